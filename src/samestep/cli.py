"""The command line: parse the arguments, call the function of a verb, print its result. Each verb is imported when called.

Exit status: 0 done; 1 the run failed (a worker died, or numbers were not finite), or the proof found a difference, or nothing
fits; 2 the job, layout or arguments cannot run; 130 interrupted by Ctrl-C and 143 by SIGTERM, `train` with a checkpoint saved
unless it was a second one. So do the ranks of other launchers, all of them, once rank 0 has saved; those of torchrun end with 0, or
else its agent would start them again at once.
"""

from __future__ import annotations

import errno
import os
import sys
import warnings
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from importlib import metadata
from typing import TYPE_CHECKING, Any

from samestep import arguments
from samestep.errors import InputError, RunError
from samestep.output import results
from samestep.output.output_file import check_writable
from samestep.output.results import Result, VerbFailure
from samestep.verbs import predicting, running

if TYPE_CHECKING:
    pass


_UNWRITABLE = (errno.EPIPE, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
"""Errors of writes to standard output that say nothing about samestep."""


def main(words: Sequence[str] | None = None) -> int:
    """Run one verb and return the exit status, a number from 0 to 255; a user's mistake prints one line, never a traceback."""
    warnings.showwarning = _say_warning
    given = arguments.spell_out_json(sys.argv[1:] if words is None else words)
    try:
        if arguments.JSON_ALONE in given:
            return _print_json(given)
        found = _run(given)
        if isinstance(found, VerbFailure):
            return _fail(found)
        if found.text:
            print(found.text, flush=True)
        return found.status
    except OSError as error:
        if error.filename is not None or error.errno not in _UNWRITABLE:
            raise
        # The reader of our output has gone, or its disk is full; without this, Python would flush the rest at exit and fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if error.errno != errno.EPIPE:
            print(f"samestep: standard output cannot be written: {error.strerror}", file=sys.stderr)
        return 1


def _print_json(given: Sequence[str]) -> int:
    """Run one verb and print its result or error as JSON, and nothing else on standard output; return the exit status."""
    verb = next((word for word in given if not word.startswith("-")), "")
    with results.only_json() as say:
        try:
            found = _run(given)
        except Exception as error:  # a mistake of ours: its traceback follows
            say(verb, VerbFailure(error, 1))
            raise
        say(verb, found)
    return found.status


def _run(words: Sequence[str]) -> Result | VerbFailure:
    """Run one verb, and write its result to the file of `--json`."""
    try:
        given = _parser().parse_args(words)
        for flag in ("json", "trace", "html", "emit_file"):
            path = getattr(given, flag, None)
            if path is not None and path != results.STANDARD_OUTPUT:
                check_writable(path)
        found: Result | VerbFailure = given.verb(given)
        if isinstance(found, Result) and given.json not in (None, results.STANDARD_OUTPUT):
            results.write_file(given.json, found)
    except RunError as error:
        return VerbFailure(error, 1)
    except InputError as error:
        return VerbFailure(error, 2)
    except KeyboardInterrupt as error:
        return VerbFailure(error, 130)
    return found


def _parser() -> ArgumentParser:
    about = (
        "Distributed training for PyTorch: changing the layout never changes the result. A job's functions are run: take jobs "
        "only from people whose code you would run; those of run folders and checkpoints need --allow code."
    )
    parser = arguments.Parser(prog="samestep", allow_abbrev=False, description=about)
    parser.add_argument("--version", action="version", version=f"samestep {metadata.version('samestep')}")
    verbs = parser.add_subparsers(title="verbs", required=True, metavar="VERB")

    def verb(name: str, run: Callable[[Namespace], Result | VerbFailure], about: str) -> ArgumentParser:
        added: ArgumentParser = verbs.add_parser(name, help=about, allow_abbrev=False)
        added.set_defaults(verb=run)
        arguments.add_json(added)
        return added

    about = "prove that a layout computes what one device computes: exit 0 proven, 1 differs, 2 could not be tried"
    arguments.add_train(verb("train", running.train, "train a job on this machine, or as a rank of torchrun or srun"))
    arguments.add_verify(verb("verify", running.verify, about))
    more = "write the script that an engine of processes needs to train a job; submit it only with --submit"
    arguments.add_launch(verb("launch", running.launch, more))
    about = "write the model of a run as a folder that transformers loads; needs no workers"
    arguments.add_export(verb("export", running.export, about))
    arguments.add_sample(verb("sample", running.sample, "write text with the model of a run"))
    arguments.add_evaluate(
        verb("evaluate", running.evaluate, "compute the held-out loss of a run's checkpoint, in one process")
    )
    about = "find the fastest layout that fits, and say why the others are not; needs no torch"
    arguments.add_plan(verb("plan", predicting.plan, about))
    about = "predict the time and memory of a step from its program; needs no torch"
    arguments.add_simulate(verb("simulate", predicting.simulate, about))
    about = "say where the time of a run's recorded steps went, who waited for whom, and what to try"
    arguments.add_explain(verb("explain", predicting.explain, about))
    about = "list the legal layouts of a job on N devices, and say why one is not"
    arguments.add_layouts(verb("layouts", predicting.layouts, about))
    about = "print the blocks of a job's model, what may be cut, and why not the rest"
    arguments.add_inspect(verb("inspect", running.inspect, about))
    arguments.add_measure(verb("measure", running.measure, "write this machine's hardware profile, in a minute or two"))
    about = "look at every host of an allocation, in half a minute, and say what would fail or be slow there; exit 1: a fault"
    arguments.add_doctor(verb("doctor", running.doctor, about))
    about = "refit a hardware profile to measured steps, of any framework; needs no torch for presets"
    arguments.add_calibrate(verb("calibrate", predicting.calibrate, about))
    verb("presets", predicting.presets, "list the models that plan and simulate know by name")
    arguments.add_profiles(
        verb("profiles", predicting.profiles, "list the machines that plan and simulate know by name")
    )
    verb("env", _env, "print versions and devices, for a bug report")
    arguments.add_completion(verb("completion", _completion, "print the script that completes this command in a shell"))
    return parser


def _env(_: Namespace) -> Result:
    from samestep import environment

    return Result(environment.as_record, environment.as_text())


def _completion(words: Namespace) -> Result:
    from samestep import completion

    text = completion.script(words.shell, arguments.verbs_of(_parser()), completion.words_of_flags())
    return Result(lambda: {"shell": words.shell, "script": text}, text.rstrip("\n"))


def _fail(failure: VerbFailure) -> int:
    if sys.stdout.isatty():
        print("\x1b[?25h", end="", flush=True)  # a killed worker may have left the cursor hidden behind its live line
    print(f"samestep: {_visible(failure.text)}", file=sys.stderr)
    return failure.status


def _visible(text: object) -> str:
    """Return a text for the terminal, with control characters as escapes: a job or a file may hold any."""
    return "".join(one if one.isprintable() or one in "\n\t" else ascii(one)[1:-1] for one in str(text))


def _say_warning(message: Warning | str, category: Any, *_: Any, **__: Any) -> None:
    """Print the warnings of samestep as one line, and none of other categories, which libraries address to developers."""
    if category is UserWarning:
        print(f"samestep: warning: {_visible(message)}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
