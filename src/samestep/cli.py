"""The command line: parse the arguments, call the function of a verb, print its result. Each verb is imported when called.

Exit status: 0 done; 1 the run failed (a worker died, or numbers were not finite), or the proof found a difference, or nothing
fits; 2 the job, layout or arguments cannot run; 130 interrupted by Ctrl-C and 143 by SIGTERM, `train` with a checkpoint saved
unless it was a second one. So do the ranks of other launchers, all of them, once rank 0 has saved; those of torchrun end with 0, or
else its agent would start them again at once.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from samestep import arguments, hardware
from samestep import job as jobs
from samestep.errors import InputError, LayoutError, RunError, WorkerError
from samestep.layout import Layout
from samestep.models import published
from samestep.models.presets import PRESETS
from samestep.output import temporary_folder
from samestep.output.output_file import check_writable, write
from samestep.training import run_folder

if TYPE_CHECKING:
    from samestep.runtime.processes.meeting import Rendezvous


def main(words: Sequence[str] | None = None) -> int:
    """Run one verb and return the exit status from 0 to 255; a user's mistake prints one line, never a traceback."""
    warnings.showwarning = _say_warning
    given = _parser().parse_args(words)
    try:
        for flag in ("json", "trace", "html"):
            if getattr(given, flag, None) is not None:
                check_writable(getattr(given, flag))
        return int(given.verb(given) or 0)
    except RunError as error:
        return _fail(error, 1)
    except InputError as error:
        return _fail(error, 2)
    except KeyboardInterrupt:
        return _fail("interrupted", 130)
    except BrokenPipeError:
        # The reader of our output has gone; without this, Python would flush the rest at exit and fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _parser() -> ArgumentParser:
    about = (
        "Distributed training for PyTorch: changing the layout never changes the result. A job's functions are run: take jobs "
        "only from people whose code you would run; those of run folders and checkpoints need --allow code."
    )
    parser = arguments.Parser(prog="samestep", allow_abbrev=False, description=about)
    parser.add_argument("--version", action="version", version=f"samestep {metadata.version('samestep')}")
    verbs = parser.add_subparsers(title="verbs", required=True, metavar="VERB")

    def verb(name: str, run: Callable[[Namespace], int | None], about: str) -> ArgumentParser:
        added: ArgumentParser = verbs.add_parser(name, help=about, allow_abbrev=False)
        added.set_defaults(verb=run)
        return added

    about = "prove that a layout computes what one device computes: exit 0 proven, 1 differs, 2 could not be tried"
    arguments.add_train(verb("train", _train, "train a job on this machine, or as a rank of torchrun or srun"))
    arguments.add_verify(verb("verify", _verify, about))
    more = "write the script that an engine of processes needs to train a job; submit it only with --submit"
    arguments.add_launch(verb("launch", _launch, more))
    about = "write the model of a run as a folder that transformers loads; needs no workers"
    arguments.add_export(verb("export", _export, about))
    arguments.add_sample(verb("sample", _sample, "write text with the model of a run"))
    arguments.add_evaluate(
        verb("evaluate", _evaluate, "compute the held-out loss of a run's checkpoint, in one process")
    )
    about = "find the fastest layout that fits, and say why the others are not; needs no torch"
    arguments.add_plan(verb("plan", _plan, about))
    about = "predict the time and memory of a step from its program; needs no torch"
    arguments.add_simulate(verb("simulate", _simulate, about))
    about = "say where the time of a run's recorded steps went, who waited for whom, and what to try"
    arguments.add_explain(verb("explain", _explain, about))
    about = "list the legal layouts of a job on N devices, and say why one is not"
    arguments.add_layouts(verb("layouts", _layouts, about))
    about = "print the blocks of a job's model, what may be cut, and why not the rest"
    arguments.add_inspect(verb("inspect", _inspect, about))
    arguments.add_measure(verb("measure", _measure, "write this machine's hardware profile, in a minute or two"))
    verb("presets", _presets, "list the models that plan and simulate know by name")
    arguments.add_profiles(verb("profiles", _profiles, "list the machines that plan and simulate know by name"))
    verb("env", _env, "print versions and devices, for a bug report")
    return parser


def _job(words: Namespace) -> jobs.Job:
    if words.job is None:
        return jobs.default(words.set)
    name = words.job.name.lower().removeprefix("preset:")
    if not words.job.exists() and name in PRESETS:
        raise InputError(f"no job file at {words.job}; to plan and simulate, --set model.source=preset:{name} works")
    return jobs.load(words.job, words.set)


def _allowing(words: Namespace) -> jobs.Job:
    """Return the job of a verb that runs, with the refusals that the command line waives too."""
    job = _job(words)
    allow = tuple(dict.fromkeys((*job.run.allow, *(word for word in words.allow if word != "code"))))
    return job.model_copy(update={"run": job.run.model_copy(update={"allow": allow})})


def _planned_job(words: Namespace) -> jobs.Job:
    """Return the job of a verb that predicts, and say how a preset is planned."""
    job = _job(words)
    if note := published.as_published(job)[1]:
        print(note)
    return job


def _limit_threads(count: int) -> None:
    """Set the number of threads of torch, which is imported later: a process whose thread pool has run cannot be forked."""
    for name, value in {"OMP_NUM_THREADS": str(count), **temporary_folder.compiler_cache()}.items():
        os.environ.setdefault(name, value)


def _train(words: Namespace) -> int:
    out = run_folder.newest() if words.resume and words.out is None else words.out
    goes_on = (words.resume or words.auto_resume) and words.job is None and out and (out / run_folder.JOB).exists()
    if goes_on:
        words.job = out / run_folder.JOB
    job = _allowing(words)
    if goes_on and "code" not in words.allow:
        from samestep.training import foreign_code

        foreign_code.refuse(job, words.job, jobs.default(words.set))
    if words.record:
        job = job.model_copy(update={"train": type(job.train)(**{**job.train.model_dump(), "record": words.record})})
    _limit_threads(job.run.threads)
    least_ranks, ranks = words.ranks
    given = {"layout": words.layout, "ranks": ranks, "steps": words.steps, "out": out}
    given |= {"resume": words.resume, "auto_resume": words.auto_resume, "init_from": words.init_from}
    given["allow_code"] = "code" in words.allow
    if words.dry_run:
        from samestep.training.check import dry_run

        nodes = words.nodes or "1"
        num_hosts = int(nodes) if nodes.isdecimal() else len(nodes.split(","))
        print(dry_run(job, **given, num_hosts=max(1, num_hosts)).to_text())
    else:
        if words.nodes is not None and not words.nodes.isdecimal():
            from samestep.training import ssh

            return ssh.start(words.nodes.split(","), words.rendezvous, goes_on=least_ranks is not None)
        from samestep.runtime.processes import join
        from samestep.training.train import train

        more = {"prove": words.prove, "rendezvous": _rendezvous(words), "least_ranks": least_ranks}
        summary = train(job, **given, **more)
        if number := summary.stop_signal if summary else join.ended_by():
            return 128 + number
    return 0


def _launch(words: Namespace) -> None:
    from samestep.engines import scripts
    from samestep.engines.site import read_site
    from samestep.engines.wanted import wanted_of

    given = {"nodes": words.nodes, "ranks_per_node": words.ranks_per_node, "layout": words.layout, "out": words.out}
    site = read_site(words.site)
    wanted = wanted_of(words.job, **given, settings=words.set, name=words.name, site=site)
    suffix = scripts.engine_of(words.on).suffix
    text, file = scripts.emit(wanted, words.on, words.emit or (f"{wanted.name}{suffix}" if words.submit else None))
    print(text, end="", flush=True)
    if words.submit:
        scripts.submit(words.on, file)


def _rendezvous(words: Namespace) -> Rendezvous | None:
    """Return the rendezvous of the hosts of a run; None if this host runs alone."""
    given = {"--nodes": words.nodes, "--rendezvous": words.rendezvous, "--token-file": words.token_file}
    missing = [flag for flag, value in given.items() if value is None]
    if len(missing) == len(given):
        return None
    if missing:
        raise InputError(
            f"{' and '.join(missing)} missing: several hosts need --nodes N, --rendezvous HOST:PORT and --token-file FILE, "
            f"or --nodes H1,H2 alone, which starts them over ssh"
        )
    if int(words.nodes) < 2:
        raise InputError(f"--nodes {words.nodes}: a rendezvous is for 2 hosts or more; without it this one runs alone")
    from samestep.runtime.processes import meeting
    from samestep.training import ssh

    is_stream = words.token_file == Path("-")
    token = ssh.heed_standard_input() if is_stream else meeting.read_token(words.token_file)
    return meeting.Rendezvous.of(words.rendezvous, int(words.nodes), token)


def _verify(words: Namespace) -> int:
    job = _allowing(words)
    _limit_threads(job.run.threads)
    from samestep.proof import verify

    if words.all == (words.layout is not None) or words.all != (words.devices is not None):
        raise LayoutError(
            'verify tries one layout, --layout "dp=2 tp=2", or all layouts of N devices, --all --devices 4'
        )
    given, verdicts = {"steps": words.steps, "precision": words.precision, "device": words.device}, []
    try:
        every = (
            verify.verify_all(job, words.devices, **given)
            if words.all
            else [verify.verify(job, layout=words.layout, **given)]
        )
        for verdict in every:
            print(verdict.to_line() if words.all else verdict.to_text(), flush=True)
            verdicts.append(verdict)
    except WorkerError as error:
        return _fail(error, 2)
    records = [verdict.to_record() for verdict in verdicts]
    _write_json(words.json, records if words.all else records[0])
    return 0 if all(verdict.proven for verdict in verdicts) else 1


def _export(words: Namespace) -> None:
    _limit_threads(1)
    from samestep.training.export import export

    given = {"dtype": words.dtype, "merge": words.merge, "ema": words.ema, "form": words.format}
    given["allow_code"] = "code" in words.allow
    print(export(words.run, words.out, **given).to_text())


def _sample(words: Namespace) -> None:
    from samestep.training.trained import printable, sample

    keys = ("chat", "tokens", "temperature", "seed", "ema")
    given = {key: getattr(words, key) for key in keys} | {"allow_code": "code" in words.allow}
    print(printable(sample(words.run, words.prompt, **given)))


def _evaluate(words: Namespace) -> None:
    from samestep.training.trained import evaluate

    found = evaluate(words.run, samples=words.samples, ema=words.ema, allow_code="code" in words.allow)
    print(found.to_text())
    _write_json(words.json, found.to_record())


def _plan(words: Namespace) -> int:
    from samestep.planning import plan, ranking

    job = _planned_job(words)
    asked = None if words.why is None else Layout.parse(words.why)
    if words.measure_top:
        _check_measurable(words, job)
    top = max(words.top, words.measure_top)
    found = plan.plan(
        job, words.devices, words.hardware, top=top, fewest_devices=words.fewest_devices, keep_free=words.keep_free
    )
    _say_cautions(words, found.hardware, words.devices)
    print(ranking.as_text(found))
    if asked is not None:
        print(ranking.why_not(found, asked))
    answers = ranking.answers(found, words.days_for_tokens, words.cost_per_hour)
    for line in [*answers, *ranking.other_numerics(found)]:
        print(line)
    measured = None
    if words.measure_top and found.best:
        _limit_threads(job.run.threads)
        from samestep.measurement.profile import measure

        measured = measure(job, layouts=[one.layout for one in found.best[: words.measure_top]])
        print(measured.to_text())
    if words.json:  # a hundred thousand rejected layouts take longer to write out than to reject
        rows = {} if measured is None else {"measured": [row.to_record() for row in measured.rows]}
        _write_json(words.json, ranking.as_record(found) | rows)
    return 0 if found.best else 1


def _check_measurable(words: Namespace, job: jobs.Job) -> None:
    """Refuse --measure-top before the search where its layouts could not be run on this machine."""
    if words.hardware not in (None, hardware.OWN):
        raise InputError(
            f"--measure-top runs on this machine, and --hardware {words.hardware} is another one: leave --hardware out"
        )
    if job.model.preset is not None:
        raise InputError(
            f"--measure-top runs steps, and {job.model.source} has a shape but no code: hf:FAMILY or module:function works"
        )


def _say_cautions(words: Namespace, machine: hardware.Hardware, devices: int) -> None:
    """Print why the default hardware profile may not describe this machine; a profile that the user names is trusted."""
    for line in hardware.cautions_here(machine, devices) if words.hardware is None else ():
        print(line)


def _simulate(words: Namespace) -> None:
    if words.case is not None:
        _case(words)
        return
    from samestep.simulation import listing
    from samestep.simulation.simulate import simulate

    found = simulate(_planned_job(words), words.layout, words.hardware, devices=words.devices)
    _say_cautions(words, found.hardware, found.devices)
    print(listing.as_text(found, whole=words.program))
    _write_prediction(words, found)


def _explain(words: Namespace) -> None:
    from samestep.explanation import differences, explain, foreign_traces

    if len(words.run) > 2:
        raise InputError(f"explain {' '.join(words.run)}: one run is explained, or two are compared")
    run = Path(words.run[0]) if words.run else run_folder.newest("to explain")
    if len(words.run) == 2 or foreign_traces.is_foreign(run):
        if words.trace or words.html or words.step or words.steps:
            raise InputError("--trace, --html, --step and --steps are of one run with records: leave them out")
        one, other, is_pair = words.run[0], words.run[-1], len(words.run) == 2
        told = differences.differences(one, other, words.hardware) if is_pair else foreign_traces.explain_traces(run)
        print(told.to_text())
        _write_json(words.json, told.to_record())
        return
    found = explain.explain(run, step=words.step, steps=words.steps, hardware=words.hardware)
    print(found.to_text())
    _write_json(words.json, found.to_record())
    if words.trace:
        write(words.trace, json.dumps(found.to_chrome_trace()))
    if words.html:
        from samestep.explanation import explained_page

        write(words.html, explained_page.to_html(found))


def _case(words: Namespace) -> None:
    from samestep.simulation import cases

    given = [flag for flag in ("job", "layout", "set", "hardware", "devices", "program") if getattr(words, flag)]
    if given:
        name = given[0] if given[0] == "job" else f"--{given[0]}"
        raise InputError(f"--case {words.case} has its own job and layout: leave {name} out")
    wanted = [flag for flag in ("json", "trace", "html") if getattr(words, flag)]
    if wanted and words.case not in cases.RUNS:
        raise InputError(f"--{wanted[0]} writes one step, and only the cases {', '.join(cases.RUNS)} are one step")
    print("\n".join(cases.lines_of(words.case)))
    if wanted:
        _write_prediction(words, cases.RUNS[words.case].predict())


def _write_prediction(words: Namespace, found: Any) -> None:
    _write_json(words.json, found.to_record())
    if words.trace:
        write(words.trace, json.dumps(found.timeline.to_chrome_trace()))
    if words.html:
        from samestep.simulation.html import to_html

        write(words.html, to_html(found))


def _layouts(words: Namespace) -> None:
    from samestep.planning import legality

    job = _planned_job(words)
    if words.why_not is not None:
        print(legality.why_refused(job, Layout.parse(words.why_not), words.devices))
    elif words.pairs:
        print(legality.matrix(legality.pairs(job), markdown=words.markdown))
    else:
        rows = legality.layouts(job, words.devices, switches=words.switches)
        print(legality.as_markdown(rows) if words.markdown else legality.as_text(rows, whole=words.whole))
        _write_json(words.json, [legality.as_record(row) for row in rows])


def _inspect(words: Namespace) -> None:
    job = _planned_job(words)
    _limit_threads(job.run.threads)
    from samestep.training.inspection import inspect

    found = inspect(job)
    print(found.to_text())
    _write_json(words.json, found.to_record())


def _measure(words: Namespace) -> None:
    _limit_threads(1)
    from samestep.measurement import profile

    if sys.stderr.isatty():
        print(
            "samestep: measuring products, copies and messages: two minutes, more where other programs run",
            file=sys.stderr,
        )
    machine = profile.measure(out=words.out, ranks=words.ranks, device=words.device)
    print(profile.as_text(machine))
    print(f"written: {words.out or hardware.own_path()}, with the source of every number")


def _presets(words: Namespace) -> None:
    print(published.presets())


def _profiles(words: Namespace) -> None:
    print(hardware.profile_table() if words.show is None else hardware.as_written(words.show), end="")


def _env(words: Namespace) -> None:
    from samestep import environment

    print(environment.as_text())


def _write_json(path: Path | None, data: object) -> None:
    if path is not None:
        write(path, json.dumps(data, indent=1) + "\n")


def _fail(error: Exception | str, status: int) -> int:
    if sys.stdout.isatty():
        print("\x1b[?25h", end="", flush=True)  # a killed worker may have left the cursor hidden behind its live line
    print(f"samestep: {_visible(error)}", file=sys.stderr)
    return status


def _visible(text: object) -> str:
    """Return a text for the terminal, with control characters as escapes: a job or a file may hold any."""
    return "".join(one if one.isprintable() or one in "\n\t" else ascii(one)[1:-1] for one in str(text))


def _say_warning(message: Warning | str, category: Any, *_: Any, **__: Any) -> None:
    """Print the warnings of samestep as one line, and none of other categories, which libraries address to developers."""
    if category is UserWarning:
        print(f"samestep: warning: {_visible(message)}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
