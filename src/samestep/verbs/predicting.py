"""The verbs that predict or explain: plan, simulate, explain, layouts, calibrate, presets and profiles."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from samestep import hardware
from samestep import job_files as jobs
from samestep.errors import InputError
from samestep.job import Job
from samestep.layout import Layout
from samestep.models import published
from samestep.output import results
from samestep.output.output_file import write
from samestep.output.results import Result
from samestep.training import run_folder
from samestep.verbs.given_job import job_of, limit_threads, planned_job, say_cautions

if TYPE_CHECKING:
    from samestep.planning.recipes.recipe import Recipe
    from samestep.simulation.prediction import Prediction


def plan(words: Namespace) -> Result:
    """Search the fastest layouts that fit, and measure or emit them if that is asked for."""
    from samestep.planning import plan, ranking

    _check_emit(words)
    job = planned_job(words)
    asked = None if words.why is None else Layout.parse(words.why)
    if words.measure_top:
        _check_measurable(words, job)
    top = max(words.top, words.measure_top)
    found = plan.plan(
        job, words.devices, words.hardware, top=top, fewest_devices=words.fewest_devices, keep_free=words.keep_free
    )
    say_cautions(words, found.hardware, words.devices)
    why = [] if asked is None else [ranking.why_not(found, asked)]
    answers = ranking.answers(found, words.days_for_tokens, words.cost_per_hour)
    recipe = _recipe(words, job, *found.best)
    text = "\n".join([ranking.as_text(found), *why, *answers, *ranking.other_numerics(found), *_emitted(words, recipe)])
    measured = None
    if words.measure_top and found.best:
        limit_threads(job.run.threads)
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


def _recipe(words: Namespace, job: Job, *found: Prediction) -> Recipe | None:
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


def _check_measurable(words: Namespace, job: Job) -> None:
    """Refuse --measure-top before the search where its layouts could not be run on this machine."""
    if words.hardware not in (None, hardware.OWN):
        raise InputError(
            f"--measure-top runs on this machine, and --hardware {words.hardware} is another one: leave --hardware out"
        )
    if job.model.preset is not None:
        raise InputError(
            f"--measure-top runs steps, and {job.model.source} has a shape but no code: hf:FAMILY or module:function works"
        )


def simulate(words: Namespace) -> Result:
    """Predict one step, and write its pictures and its recipe if that is asked for."""
    if words.case is not None:
        return _case(words)
    from samestep.simulation import listing
    from samestep.simulation.simulate import simulate

    _check_emit(words)
    job = planned_job(words)
    found = simulate(job, words.layout, words.hardware, devices=words.devices)
    say_cautions(words, found.hardware, found.devices)
    _write_pictures(words, found)
    recipe = _recipe(words, job, found)
    more = {"job": job.model_dump(mode="json"), **({"emitted": recipe.to_record()} if recipe else {})}
    text = "\n".join([listing.as_text(found, whole=words.program), *_emitted(words, recipe)])
    return Result(lambda: found.to_record() | more, text)


def explain(words: Namespace) -> Result:
    """Return where the time of recorded steps went, or how two runs differ.

    Raises:
        InputError: the arguments do not go together.
    """
    from samestep.explanation import explain, foreign_traces

    if len(words.run) > 2:
        raise InputError(f"explain {' '.join(words.run)}: one run is explained, or two are compared")
    run = Path(words.run[0]) if words.run else run_folder.newest("to explain")
    if len(words.run) == 2 or foreign_traces.is_foreign(run):
        return _without_records(words, run)
    found = explain.explain(run, step=words.step, steps=words.steps, hardware=words.hardware)
    if words.trace:
        write(words.trace, json.dumps(found.to_chrome_trace()))
    if words.html:
        from samestep.explanation import explained_page

        write(words.html, explained_page.page_of(found).to_html())
    return Result(found.to_record, found.to_text())


def _without_records(words: Namespace, run: Path) -> Result:
    """Return how two steps differ, or where the time of another program's steps went."""
    from samestep.explanation import differences, differences_page, foreign_page, foreign_traces

    if words.trace or (len(words.run) == 2 and (words.step or words.steps)):
        raise InputError("--trace is of one run with records, and --step and --steps are of one run: leave them out")
    told: differences.Differences | foreign_traces.ForeignSteps
    if len(words.run) == 2:
        told = differences.differences(words.run[0], words.run[1], words.hardware)
        page = differences_page.page_of(told)
    else:
        told = foreign_traces.explain_traces(run, step=words.step, steps=words.steps)
        page = foreign_page.page_of(told)
    if words.html:
        write(words.html, page.to_html())
    return Result(told.to_record, told.to_text())


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


def layouts(words: Namespace) -> Result:
    """List the legal layouts, or say why one is not."""
    from samestep.planning import legality

    job = planned_job(words)
    if words.why_not is not None:
        reason = legality.why_refused(job, Layout.parse(words.why_not), words.devices)
        return Result(lambda: {"layout": words.why_not, "answer": reason}, reason)
    if words.pairs:
        pairs = [*legality.pairs(job)]
        return Result(lambda: [asdict(pair) for pair in pairs], legality.matrix(pairs, markdown=words.markdown))
    rows = legality.layouts(job, words.devices, switches=words.switches)
    text = legality.as_markdown(rows) if words.markdown else legality.as_text(rows, whole=words.whole)
    return Result(lambda: [legality.as_record(row) for row in rows], text)


def _of_settings(settings: Sequence[str]) -> Job | None:
    """Return a job of some settings alone, without those of the default job, which nobody has measured; None without settings."""
    tables: dict[str, Any] = {}
    for setting in settings:
        jobs.set_key(tables, setting)
    return Job(**tables) if tables else None


def calibrate(words: Namespace) -> Result:
    """Refit a hardware profile to measured steps."""
    from samestep.planning.calibration.calibrate import calibrate

    job = _of_settings(words.set) if words.job is None else job_of(words)
    found = calibrate(words.rows, words.hardware, words.out, job=job)
    return Result(found.to_record, found.to_text(), 1 if found.kept else 0)


def presets(_: Namespace) -> Result:
    """List the models that plan and simulate know by name."""
    return Result(published.preset_records, published.presets())


def profiles(words: Namespace) -> Result:
    """List the machines that plan and simulate know by name, or print one."""
    names = hardware.known() if words.show is None else (words.show,)
    text = hardware.profile_table() if words.show is None else hardware.as_written(words.show)
    return Result(lambda: {name: asdict(hardware.load(name)) for name in names}, text.rstrip("\n"))
