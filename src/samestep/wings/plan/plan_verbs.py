"""The commands of this wing: plan, simulate, measure and calibrate."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from samestep import hardware, wings
from samestep import job_files as jobs
from samestep.errors import InputError
from samestep.job import Job
from samestep.layout import Layout
from samestep.output import results
from samestep.output.durable_files import write
from samestep.output.results import Result
from samestep.output.text import announced, wrap
from samestep.verbs import job_of, limit_threads, planned_job, say_cautions

if TYPE_CHECKING:
    from samestep.wings.plan.recipes.recipe import Recipe
    from samestep.wings.plan.simulation.simulate import Prediction


def plan(words: Namespace) -> Result:
    """Search the fastest layouts that fit, and measure or emit them if that is asked for."""
    from samestep.wings.plan import plan, ranking

    _check_emit(words)
    job = planned_job(words)
    asked = None if words.why is None else Layout(words.why)
    if words.measure_top:
        _check_measurable(words, job)
    top = max(words.top, words.measure_top)
    with announced(f"comparing the layouts of {words.devices} devices"):
        planned = plan.plan(
            job, words.devices, words.hardware, top=top, fewest_devices=words.fewest_devices, keep_free=words.keep_free
        )
    say_cautions(words, planned.hardware, words.devices)
    why = [] if asked is None else [ranking.why_not(planned, asked)]
    answers = ranking.answers(planned, words.days_for_tokens, words.cost_per_hour)
    recipe = _recipe(words, job, *planned.best)
    text = wrap("\n".join([ranking.as_text(planned), *why, *answers, *ranking.other_numerics(planned)]))
    text = "\n".join([text, *_emitted(words, recipe)])
    measured = None
    if words.measure_top and planned.best:
        limit_threads(job.run.threads)
        from samestep.wings.plan.measurement.profile import benchmark_layouts

        print(text)
        measured = benchmark_layouts(job, [prediction.layout for prediction in planned.best[: words.measure_top]])
        text = measured.to_text()

    if words.html:
        plan_page = wings.required("pages", "plan_page")
        write(words.html, plan_page.page_of(planned).to_html())

    def record() -> dict[str, object]:
        more: dict[str, object] = {"why": why[0]} if why else {}
        more |= {"measured": measured.to_record()} if measured else {}
        more |= {"emitted": recipe.to_record()} if recipe else {}
        return ranking.as_record(planned) | more

    return Result(record, text, 0 if planned.best else 1)


def _check_emit(words: Namespace) -> None:
    """Refuse an unknown framework before the search, and a file of none."""
    from samestep.wings.plan import recipes

    if words.to is not None:
        recipes.framework_of(words.to)
    elif words.to_file is not None:
        names = ", ".join(recipes.FRAMEWORKS)
        raise InputError("command-options", f"--to-file {words.to_file} needs --to FRAMEWORK: one of {names}")


def _recipe(words: Namespace, job: Job, *prediction: Prediction) -> Recipe | None:
    """Return the first predicted layout in the words of another framework; None if none is asked for, or nothing fits."""
    from samestep.wings.plan import recipes

    return recipes.emit_predicted(words.to, job, prediction) if words.to and prediction else None


def _emitted(words: Namespace, recipe: Recipe | None) -> list[str]:
    """Write a recipe to its file, and return what is printed of it, as a list of at most one text."""
    if recipe is None:
        return []
    if words.to_file is None:
        return [
            "\n" + "\n".join([recipe.text.rstrip(), *([] if recipe.has_comments else recipe.notes), *recipe.instead])
        ]
    write(words.to_file, recipe.text)
    return ["\n".join([f"wrote {words.to_file}", *recipe.notes, *recipe.instead])]


def _check_measurable(words: Namespace, job: Job) -> None:
    """Refuse --measure-top before the search where its layouts could not be run on this machine."""
    if words.hardware not in (None, hardware.OWN):
        raise InputError(
            "command-options",
            f"--measure-top runs on this machine, and --hardware {words.hardware} is another one: leave --hardware out",
        )
    if job.model.preset is not None:
        raise InputError(
            "model-only-a-shape",
            f"--measure-top runs steps, and {job.model.source} has a shape but no code. Use hf:FAMILY or module:function",
        )


def simulate(words: Namespace) -> Result:
    """Predict one step, and write its pictures and its recipe if that is asked for."""
    if words.case is not None:
        return _case(words)
    from samestep.wings.plan.simulation.simulate import as_text, simulate

    _check_emit(words)
    job = planned_job(words)
    prediction = simulate(job, words.layout, words.hardware, devices=words.devices)
    say_cautions(words, prediction.hardware, prediction.devices)
    _write_pictures(words, prediction)
    recipe = _recipe(words, job, prediction)
    more = {"job": job.model_dump(mode="json"), **({"emitted": recipe.to_record()} if recipe else {})}
    text = "\n".join([as_text(prediction, lists_ops=words.program), *_emitted(words, recipe)])
    return Result(lambda: prediction.to_record() | more, text)


def _case(words: Namespace) -> Result:
    from samestep.wings.plan.simulation import cases

    flags = [flag for flag in ("job", "layout", "set", "hardware", "devices", "program") if getattr(words, flag)]
    if flags:
        name = flags[0] if flags[0] == "job" else f"--{flags[0]}"
        raise InputError("command-options", f"--case {words.case} has its own job and layout: leave {name} out")
    is_file = words.json not in (None, results.STANDARD_OUTPUT)
    wanted = [flag for flag in ("json", "trace", "html") if getattr(words, flag) and (flag != "json" or is_file)]
    if wanted and words.case not in cases.RUNS:
        raise InputError(
            "command-options", f"--{wanted[0]} writes one step, and only the cases {', '.join(cases.RUNS)} are one step"
        )
    lines = cases.lines_of(words.case)
    if words.case not in cases.RUNS:
        return Result(lambda: {"lines": lines}, "\n".join(lines))
    run = cases.RUNS[words.case]
    if words.trace or words.html:
        _write_pictures(words, run.predict())
    return Result(lambda: run.predict().to_record(), "\n".join(lines))


def _write_pictures(words: Namespace, prediction: Any) -> None:
    if words.trace:
        write(words.trace, json.dumps(prediction.timeline.to_chrome_trace()))
    if words.html:
        prediction_page = wings.required("pages", "prediction_page")
        write(words.html, prediction_page.page_of(prediction).to_html())


def measure(words: Namespace) -> Result:
    """Write this machine's hardware profile."""
    limit_threads(1)
    from samestep.wings.plan.measurement import profile

    busy = profile.busy()
    if sys.stderr.isatty():
        print(
            "samestep: measuring products, copies and messages: two minutes, more where other programs run",
            file=sys.stderr,
        )
    machine = profile.benchmark_hardware(out=words.out, ranks=words.ranks, device=words.device)
    path = words.out or hardware.own_path()
    said = "\n".join([profile.as_text(machine), f"written: {path}, with the source of every number", *busy])
    return Result(lambda: {"file": path, "profile": asdict(machine)}, said)


def _of_settings(settings: Sequence[str]) -> Job | None:
    """Return a job of some settings alone, without those of the default job, which nobody has measured; None without settings."""
    tables: dict[str, Any] = {}
    for setting in settings:
        jobs.set_key(tables, setting)
    return Job(**tables) if tables else None


def calibrate(words: Namespace) -> Result:
    """Refit a hardware profile to measured steps."""
    from samestep.wings.plan.calibrate import calibrate

    job = _of_settings(words.set) if words.job is None else job_of(words)
    calibration = calibrate(words.rows, words.hardware, words.out, job=job)
    return Result(calibration.to_record, calibration.to_text(), 1 if calibration.kept else 0)
