"""The command line: parse the arguments, call the function of a verb, print its result. Each verb is imported when called.

Exit status: 0 done; 1 the run failed (a worker died, or numbers were not finite), or the proof found a difference, or nothing
fits; 2 the job, layout or arguments cannot run; 130 interrupted by Ctrl-C, 143 by SIGTERM and 129 by SIGHUP, `train` with a checkpoint saved
unless it was a second one. So do the ranks of other launchers, all of them, once rank 0 has saved; those of torchrun end with 0, or
else its agent would start them again at once.

`samestep completion SHELL` prints a script that shtab writes from the parser. A flag is followed by its choices, by the words that
`words_of_flags` lists for it (of a layout, of a job's keys, names of profiles), or by files or folders.
"""

from __future__ import annotations

import errno
import importlib.util
import os
import platform
import sys
import warnings
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any, cast, get_args, get_type_hints

from samestep import arguments, hardware, verbs, wings
from samestep import job_files as jobs
from samestep.arguments import verbs_of
from samestep.errors import InputError, RunError
from samestep.layout import Layout
from samestep.output import results
from samestep.output.durable_files import check_writable
from samestep.output.results import Result, VerbFailure
from samestep.output.text import installed_version, wrap
from samestep.schedules import SCHEDULES

_UNWRITABLE = (errno.EPIPE, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
"""Errors of writes to standard output that say nothing about samestep."""
_WINGS = {
    **dict.fromkeys(("plan", "simulate", "measure", "calibrate"), "plan"),
    **dict.fromkeys(("submit", "doctor"), "cluster"),
    "explain": "explain",
}
"""The commands of wings, with the wing of each."""
_PACKAGES = ("samestep", "torch", "numpy", "transformers", "tokenizers", "safetensors")


def main(words: Sequence[str] | None = None) -> int:
    """Run one verb and return the exit status, a number from 0 to 255; a user's mistake prints one line, never a traceback."""
    warnings.showwarning = _say_warning
    line = arguments.spell_out(sys.argv[1:] if words is None else words) or ["--help"]
    try:
        if arguments.JSON_ALONE in line:
            return _print_json(line)
        result = _run(line)
        if isinstance(result, VerbFailure):
            return _fail(result)
        if result.text:
            print(result.text, flush=True)
        return result.status
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
            result = _run(given)
        except Exception as error:  # a mistake of ours: its traceback follows
            say(verb, VerbFailure(error, 1))
            raise
        say(verb, result)
    return result.status


def _run(words: Sequence[str]) -> Result | VerbFailure:
    """Run one verb, and write its result to the file of `--json`."""
    try:
        words, script_arguments = _split_at_script(words)
        parsed = _parser().parse_args(words, Namespace(arguments=script_arguments))
        for flag in ("json", "trace", "html", "to_file", "write"):
            path = getattr(parsed, flag, None)
            if path is not None and path != results.STANDARD_OUTPUT:
                check_writable(path)
        result: Result | VerbFailure = parsed.verb(parsed)
        heading = [*map(wrap, getattr(parsed, "heading", []))]
        if parsed.json == results.STANDARD_OUTPUT and heading[1:]:
            print(*heading[1:], sep="\n")  # cautions, to standard error
        elif isinstance(result, Result) and result.text and not getattr(parsed, "markdown", False):
            result = replace(result, text="\n".join([*heading, result.text]))
        if isinstance(result, Result) and parsed.json not in (None, results.STANDARD_OUTPUT):
            results.write_file(parsed.json, result)
    except RunError as error:
        return VerbFailure(error, 1)
    except InputError as error:
        return VerbFailure(error, 2)
    except KeyboardInterrupt as error:
        return VerbFailure(error, 130)
    return result


def _split_at_script(words: Sequence[str]) -> tuple[Sequence[str], Sequence[str]]:
    """Return the words of a command, and the arguments of the script of `launch`, which follow after `--`."""
    if words[:1] != ["launch"] or "--" not in words:
        return words, ()
    place = words.index("--")
    return words[:place], words[place + 1 :]


def _parser() -> ArgumentParser:
    about = (
        "Distributed training for PyTorch: changing the layout never changes the result. A job can name functions, and samestep "
        "runs them: use only jobs from people you trust. Functions named by run folders and checkpoints need --allow code."
    )
    parser = arguments.Parser(prog="samestep", allow_abbrev=False, description=about)
    parser.add_argument("--version", action="version", version=f"samestep {metadata.version('samestep')}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    here = {"env": _env, "completion": _completion} | {name: _of_wing(wing, name) for name, wing in _WINGS.items()}
    for name, (about, add) in arguments.COMMANDS.items():
        added: ArgumentParser = commands.add_parser(name, help=about, allow_abbrev=False)
        added.set_defaults(verb=here.get(name) or getattr(verbs, name))
        about = "print the result as JSON only; with FILE, write the JSON to FILE and print the text"
        added.add_argument("--json", type=Path, metavar="FILE", help=about)
        add(added)
    return parser


def _of_wing(wing: str, name: str) -> Callable[[Namespace], Result | VerbFailure]:
    """Return the function of a command of a wing, which is loaded when the command is called."""

    def run(words: Namespace) -> Result | VerbFailure:
        return cast(Result | VerbFailure, getattr(wings.required(wing, f"{wing}_verbs"), name)(words))

    return run


def _env(_: Namespace) -> Result:
    return Result(_environment, _environment_text())


def _completion(words: Namespace) -> Result:
    text = script(words.shell, _parser())
    return Result(lambda: {"shell": words.shell, "script": text}, text.rstrip("\n"))


def _fail(failure: VerbFailure) -> int:
    if sys.stdout.isatty():
        print("\x1b[?25h", end="", flush=True)  # a killed worker may have left the cursor hidden behind its live line
    print(f"samestep: {_visible(failure.text)}", file=sys.stderr)
    return failure.status


def _visible(text: object) -> str:
    """Return a text for the terminal, with control characters as escapes: a job or a file may hold any."""
    return "".join(
        character if character.isprintable() or character in "\n\t" else ascii(character)[1:-1]
        for character in str(text)
    )


def _say_warning(message: Warning | str, category: Any, *_: Any, **__: Any) -> None:
    """Print the warnings of samestep as one line, and none of other categories, which libraries address to developers."""
    if category is UserWarning:
        print(f"samestep: warning: {_visible(message)}", file=sys.stderr)


def _environment() -> dict[str, Any]:
    """Return the versions of Python and of the packages that results depend on, None if one is not installed, and the GPUs."""
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cores": os.cpu_count(),
        "packages": {
            package: version if (version := installed_version(package)) != "none" else None for package in _PACKAGES
        },
        "shadowed": _list_shadowed(),
        "gpus": _gpus(),
    }


def _environment_text() -> str:
    """Return the same as text, one line each."""
    facts = _environment()
    packages = (f"{package} {version or 'is not installed'}" for package, version in facts["packages"].items())
    head = f"python {facts['python']} on {facts['platform']}, {facts['cores']} cores"
    return "\n".join([head, *packages, *facts["shadowed"], *facts["gpus"]])


def _gpus() -> list[str]:
    """Return a line for each GPU, or why torch, which knows them, cannot be imported."""
    try:
        import torch
    except Exception as error:
        return [f"torch cannot be imported: {type(error).__name__}: {error}"]
    return [f"GPU {index} {torch.cuda.get_device_name(index)}" for index in range(torch.cuda.device_count())]


def _list_shadowed() -> list[str]:
    """Return a line for each package in whose place a file of the same name on the path is imported."""
    lines = []
    for package in _PACKAGES[1:]:
        try:
            files = {
                Path(str(file.locate())).resolve()
                for file in metadata.files(package) or ()
                if file.name == "__init__.py"
            }
            spec = importlib.util.find_spec(package)
        except (metadata.PackageNotFoundError, ImportError, ValueError):
            continue
        origin = Path(spec.origin).resolve() if spec is not None and spec.origin else None
        if origin is not None and files and origin not in files:
            lines.append(
                f"{package} is imported from {origin}, which hides the installed one. Use another name for that file"
            )
    return lines


def script(shell: str, parser: ArgumentParser) -> str:
    """Return the script of a shell for a parser, whose actions are given what may follow them: it parses nothing any more."""
    import shtab

    words = words_of_flags()
    for _, verb in verbs_of(parser).values():
        for action in verb._actions:
            _say_what_follows(action, words)
    return shtab.complete(parser, shell)


def _say_what_follows(action: Any, words: Mapping[str, Sequence[str]]) -> None:
    import shtab

    shown = str(action.metavar or "")
    if flag := next((flag for flag in action.option_strings if flag in words), ""):
        action.choices = words[flag]
    elif action.type is Path or shown.endswith(("FILE", "RUN")):
        action.complete = shtab.DIRECTORY if shown in ("DIR", "RUN") else shtab.FILE


def words_of_flags() -> dict[str, Sequence[str]]:
    """Return the words that may follow flags whose parser has no choices."""
    scripts, cases = wings.optional("cluster", "engines.scripts"), wings.optional("plan", "simulation.cases")
    return {
        **dict.fromkeys(("--layout", "--why", "--why-not"), words_of_layouts()),
        "--set": jobs.settings(),
        "--hardware": hardware.known(),
        "--show": hardware.known(),
        "--on": tuple(scripts.ENGINES) if scripts else (),
        "--case": ("list", *cases.RUNS, *cases.COMPARISONS) if cases else (),
    }


def words_of_layouts() -> tuple[str, ...]:
    """Return the words of a layout as one begins to write them: `tp=` before a number, else each value."""
    written = ["dp="]
    for name, hint in get_type_hints(Layout).items():
        choices = {"schedule": tuple(SCHEDULES), "zero": (0, 1, 2, 3)}.get(name, get_args(hint))
        if hint is bool:
            written.append(name)
        elif name in ("schedule", "zero") or all(isinstance(choice, str) for choice in choices or (0,)):
            written += [f"{name}={choice}" for choice in choices]
        else:
            written.append(f"{name}=")
    return tuple(written)


if __name__ == "__main__":
    sys.exit(main())
