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
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from samestep import arguments, hardware
from samestep import job as jobs
from samestep.errors import InputError, LayoutError, RunError, WorkerError
from samestep.layout import Layout
from samestep.models import published
from samestep.models.presets import PRESETS
from samestep.output import results, temporary_folder
from samestep.output.output_file import check_writable, write
from samestep.output.results import Result, VerbFailure
from samestep.training import run_folder

if TYPE_CHECKING:
    from samestep.planning.recipes.recipe import Recipe
    from samestep.runtime.processes.meeting import Rendezvous
    from samestep.simulation.prediction import Prediction


def main(words: Sequence[str] | None = None) -> int:
    """Run one verb and return the exit status from 0 to 255; a user's mistake prints one line, never a traceback."""
    warnings.showwarning = _say_warning
    given = arguments.spell_out_json(sys.argv[1:] if words is None else words)
    try:
        if arguments.JSON_ALONE in given:
            return _print_json(given)
        found = _run(given)
        if isinstance(found, VerbFailure):
            return _fail(found)
        if found.text:
            print(found.text)
        return found.status
    except BrokenPipeError:
        # The reader of our output has gone; without this, Python would flush the rest at exit and fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
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
    about = "look at every host of an allocation, in half a minute, and say what would fail or be slow there; exit 1: a fault"
    arguments.add_doctor(verb("doctor", _doctor, about))
    about = "refit a hardware profile to measured steps, of any framework; needs no torch for presets"
    arguments.add_calibrate(verb("calibrate", _calibrate, about))
    verb("presets", _presets, "list the models that plan and simulate know by name")
    arguments.add_profiles(verb("profiles", _profiles, "list the machines that plan and simulate know by name"))
    verb("env", _env, "print versions and devices, for a bug report")
    arguments.add_completion(verb("completion", _completion, "print the script that completes this command in a shell"))
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


def _train(words: Namespace) -> Result:
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
        would = dry_run(job, **given, num_hosts=max(1, num_hosts))
        return Result(would.to_record, would.to_text())
    if words.nodes is not None and not words.nodes.isdecimal():
        from samestep.training import ssh

        status = ssh.start(words.nodes.split(","), words.rendezvous, goes_on=least_ranks is not None)
        return Result(lambda: {"hosts": words.nodes.split(","), "folder": out, "status": status}, status=status)
    from samestep.runtime.processes import join
    from samestep.training.train import train

    more = {"prove": words.prove, "rendezvous": _rendezvous(words), "least_ranks": least_ranks}
    summary = train(job, **given, **more)
    number = summary.stop_signal if summary else join.ended_by()
    return Result(summary.to_record if summary else None, status=128 + number if number else 0)


def _launch(words: Namespace) -> Result:
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
    path = file if words.emit or words.submit else None
    return Result(lambda: {"engine": words.on, "script": text, "file": path, "submitted": words.submit})


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


def _verify(words: Namespace) -> Result | VerbFailure:
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
            if words.all:
                print(verdict.to_line(), flush=True)
            verdicts.append(verdict)
    except WorkerError as error:
        return VerbFailure(error, 2)
    status = 0 if all(verdict.proven for verdict in verdicts) else 1
    if words.all:
        return Result(lambda: [verdict.to_record() for verdict in verdicts], status=status)
    return Result(verdicts[0].to_record, verdicts[0].to_text(), status)


def _export(words: Namespace) -> Result:
    _limit_threads(1)
    from samestep.training.export import export

    given = {"dtype": words.dtype, "merge": words.merge, "ema": words.ema, "form": words.format}
    given["allow_code"] = "code" in words.allow
    written = export(words.run, words.out, **given)
    return Result(lambda: asdict(written), written.to_text())


def _sample(words: Namespace) -> Result:
    from samestep.training.trained import printable, sample

    keys = ("chat", "tokens", "temperature", "seed", "ema")
    given = {key: getattr(words, key) for key in keys} | {"allow_code": "code" in words.allow}
    text = sample(words.run, words.prompt, **given)
    return Result(lambda: {"text": text}, printable(text))


def _evaluate(words: Namespace) -> Result:
    from samestep.training.trained import evaluate

    found = evaluate(words.run, samples=words.samples, ema=words.ema, allow_code="code" in words.allow)
    return Result(found.to_record, found.to_text())


def _plan(words: Namespace) -> Result:
    from samestep.planning import plan, ranking

    _check_emit(words)
    job = _planned_job(words)
    asked = None if words.why is None else Layout.parse(words.why)
    if words.measure_top:
        _check_measurable(words, job)
    top = max(words.top, words.measure_top)
    found = plan.plan(
        job, words.devices, words.hardware, top=top, fewest_devices=words.fewest_devices, keep_free=words.keep_free
    )
    _say_cautions(words, found.hardware, words.devices)
    why = [] if asked is None else [ranking.why_not(found, asked)]
    answers = ranking.answers(found, words.days_for_tokens, words.cost_per_hour)
    recipe = _recipe(words, job, *found.best)
    text = "\n".join([ranking.as_text(found), *why, *answers, *ranking.other_numerics(found), *_emitted(words, recipe)])
    measured = None
    if words.measure_top and found.best:
        _limit_threads(job.run.threads)
        from samestep.measurement.profile import measure

        print(text)
        measured = measure(job, layouts=[one.layout for one in found.best[: words.measure_top]])
        text = measured.to_text()

    if words.html:
        from samestep.planning import plan_page

        write(words.html, plan_page.page_of(found).to_html())

    def record() -> dict[str, object]:
        more: dict[str, object] = {"why": why[0]} if why else {}
        more |= {"measured": [row.to_record() for row in measured.rows]} if measured else {}
        more |= {"emitted": recipe.to_record()} if recipe else {}
        return ranking.as_record(found) | more

    return Result(record, text, 0 if found.best else 1)


def _check_emit(words: Namespace) -> None:
    """Refuse an unknown framework before the search, and a file of none."""
    from samestep.planning.recipes import frameworks

    if words.emit is not None:
        frameworks.framework_of(words.emit)
    elif words.emit_file is not None:
        names = ", ".join(frameworks.FRAMEWORKS)
        raise InputError(f"--emit-file {words.emit_file} needs --emit FRAMEWORK: one of {names}")


def _recipe(words: Namespace, job: jobs.Job, *found: Prediction) -> Recipe | None:
    """Return the first predicted layout in the words of another framework; None if none is asked for, or nothing fits."""
    from samestep.planning.recipes import frameworks

    return frameworks.emit_predicted(words.emit, job, found) if words.emit and found else None


def _emitted(words: Namespace, recipe: Recipe | None) -> list[str]:
    """Write a recipe to its file, and return what is printed of it, as a list of at most one text."""
    if recipe is None:
        return []
    if words.emit_file is None:
        return [
            "\n" + "\n".join([recipe.text.rstrip(), *([] if recipe.has_comments else recipe.notes), *recipe.instead])
        ]
    write(words.emit_file, recipe.text)
    return ["\n".join([f"wrote {words.emit_file}", *recipe.notes, *recipe.instead])]


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


def _simulate(words: Namespace) -> Result:
    if words.case is not None:
        return _case(words)
    from samestep.simulation import listing
    from samestep.simulation.simulate import simulate

    _check_emit(words)
    job = _planned_job(words)
    found = simulate(job, words.layout, words.hardware, devices=words.devices)
    _say_cautions(words, found.hardware, found.devices)
    _write_pictures(words, found)
    recipe = _recipe(words, job, found)
    more = {"emitted": recipe.to_record()} if recipe else {}
    text = "\n".join([listing.as_text(found, whole=words.program), *_emitted(words, recipe)])
    return Result(lambda: found.to_record() | more, text)


def _explain(words: Namespace) -> Result:
    from samestep.explanation import differences, explain, foreign_traces

    if len(words.run) > 2:
        raise InputError(f"explain {' '.join(words.run)}: one run is explained, or two are compared")
    run = Path(words.run[0]) if words.run else run_folder.newest("to explain")
    if len(words.run) == 2 or foreign_traces.is_foreign(run):
        if words.trace or words.html or words.step or words.steps:
            raise InputError("--trace, --html, --step and --steps are of one run with records: leave them out")
        one, other, is_pair = words.run[0], words.run[-1], len(words.run) == 2
        told = differences.differences(one, other, words.hardware) if is_pair else foreign_traces.explain_traces(run)
        return Result(told.to_record, told.to_text())
    found = explain.explain(run, step=words.step, steps=words.steps, hardware=words.hardware)
    if words.trace:
        write(words.trace, json.dumps(found.to_chrome_trace()))
    if words.html:
        from samestep.explanation import explained_page

        write(words.html, explained_page.page_of(found).to_html())
    return Result(found.to_record, found.to_text())


def _case(words: Namespace) -> Result:
    from samestep.simulation import cases

    given = [flag for flag in ("job", "layout", "set", "hardware", "devices", "program") if getattr(words, flag)]
    if given:
        name = given[0] if given[0] == "job" else f"--{given[0]}"
        raise InputError(f"--case {words.case} has its own job and layout: leave {name} out")
    is_file = words.json not in (None, results.STANDARD_OUTPUT)
    wanted = [flag for flag in ("json", "trace", "html") if getattr(words, flag) and (flag != "json" or is_file)]
    if wanted and words.case not in cases.RUNS:
        raise InputError(f"--{wanted[0]} writes one step, and only the cases {', '.join(cases.RUNS)} are one step")
    lines = cases.lines_of(words.case)
    if words.case not in cases.RUNS:
        return Result(lambda: {"lines": lines}, "\n".join(lines))
    run = cases.RUNS[words.case]
    if words.trace or words.html:
        _write_pictures(words, run.predict())
    return Result(lambda: run.predict().to_record(), "\n".join(lines))


def _write_pictures(words: Namespace, found: Any) -> None:
    if words.trace:
        write(words.trace, json.dumps(found.timeline.to_chrome_trace()))
    if words.html:
        from samestep.simulation import prediction_page

        write(words.html, prediction_page.page_of(found).to_html())


def _layouts(words: Namespace) -> Result:
    from samestep.planning import legality

    job = _planned_job(words)
    if words.why_not is not None:
        reason = legality.why_refused(job, Layout.parse(words.why_not), words.devices)
        return Result(lambda: {"layout": words.why_not, "answer": reason}, reason)
    if words.pairs:
        pairs = [*legality.pairs(job)]
        return Result(lambda: [asdict(pair) for pair in pairs], legality.matrix(pairs, markdown=words.markdown))
    rows = legality.layouts(job, words.devices, switches=words.switches)
    text = legality.as_markdown(rows) if words.markdown else legality.as_text(rows, whole=words.whole)
    return Result(lambda: [legality.as_record(row) for row in rows], text)


def _inspect(words: Namespace) -> Result:
    job = _planned_job(words)
    _limit_threads(job.run.threads)
    from samestep.training.inspection import inspect

    found = inspect(job)
    return Result(found.to_record, found.to_text())


def _calibrate(words: Namespace) -> Result:
    from samestep.planning.calibration.calibrate import calibrate

    job = _job(words) if words.job is not None or words.set else None
    found = calibrate(words.rows, words.hardware, words.out, job=job)
    return Result(found.to_record, found.to_text(), 1 if found.kept else 0)


def _measure(words: Namespace) -> Result:
    _limit_threads(1)
    from samestep.measurement import profile

    if sys.stderr.isatty():
        print(
            "samestep: measuring products, copies and messages: two minutes, more where other programs run",
            file=sys.stderr,
        )
    machine = profile.measure(out=words.out, ranks=words.ranks, device=words.device)
    path = words.out or hardware.own_path()
    said = f"{profile.as_text(machine)}\nwritten: {path}, with the source of every number"
    return Result(lambda: {"file": path, "profile": asdict(machine)}, said)


def _doctor(words: Namespace) -> Result:
    job = None if words.job is None and not words.set else _job(words)
    if words.nodes is not None and not words.nodes.isdecimal():
        from samestep.training import ssh

        hosts = words.nodes.split(",")
        status = ssh.start(hosts, words.rendezvous)
        return Result(lambda: {"hosts": hosts, "status": status}, status=status)
    from samestep.diagnosis.doctor import doctor

    given = {"folder": words.folder, "out": words.out, "wait_s": words.wait} | _doctor_meets(words)
    report = doctor(job, words.layout, words.hardware, **given, say=lambda text: print(text, flush=True))
    if words.json not in (None, results.STANDARD_OUTPUT) and not report.has_come:  # the leading process has the file
        words.json = words.json.with_name(f"{words.json.stem}.{report.host}{words.json.suffix}")
    return Result(report.to_record if report.told is None else None, status=report.status)


def _doctor_meets(words: Namespace) -> dict[str, Any]:
    """Return where the hosts meet, and their secret, as far as the words say it."""
    if words.nodes is None and words.rendezvous is None and words.token_file is not None:
        from samestep.runtime.processes import meeting

        return {"token": meeting.read_token(words.token_file)}
    if (at := _rendezvous(words)) is None:
        return {}
    return {"rendezvous": (at.host, at.port, at.num_hosts), "token": at.token}


def _presets(_: Namespace) -> Result:
    return Result(published.preset_records, published.presets())


def _profiles(words: Namespace) -> Result:
    names = hardware.known() if words.show is None else (words.show,)
    text = hardware.profile_table() if words.show is None else hardware.as_written(words.show)
    return Result(lambda: {name: asdict(hardware.load(name)) for name in names}, text.rstrip("\n"))


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
