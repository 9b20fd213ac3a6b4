"""The page of a run that has ended: its losses, its curves, and whether its layout was proven."""

from __future__ import annotations

from html import escape

from samestep.output.page.charts import Bar, bars
from samestep.output.page.page import Answer, Page, Section
from samestep.output.page.quantities import Quantity, count, share
from samestep.training.logged_steps import curves, logged
from samestep.training.summary import Summary


def page_of(found: Summary, *, small: bool = False) -> Page:
    """Return the page of a run; a small one has no record."""
    series = logged(found.folder, "loss", "tokens_per_s", "samples_per_s")
    answers = [
        Answer("steps", Quantity(found.steps, f"{found.steps:,}"), None, "stopped early" if found.stopped else "")
    ]
    answers += [
        Answer(label, Quantity(value, f"{value:.4f}"))
        for label, value in {"loss": found.loss, "held-out loss": found.held_out_loss, **_sets(found)}.items()
        if value is not None
    ]
    if found.held_out_accuracy is not None:
        answers.append(Answer("held-out accuracy", share(found.held_out_accuracy)))
    speed = next((series[key] for key in ("tokens_per_s", "samples_per_s") if key in series), None)
    if speed is not None:
        middle = sorted(speed.values)[len(speed.values) // 2]
        unit = "tokens" if "tokens_per_s" in series else "samples"
        answers.append(Answer(f"{unit} a second", count(middle), None, "median of the logged steps"))
    if found.seconds:
        answers.append(Answer("goodput", share(found.goodput), None, "of the time, in steps that counted"))
    return Page(
        verb="train",
        title=f"{found.steps:,} steps in {found.folder.name}",
        subject=found.started_from,
        answers=answers,
        verdict=found.proof,
        sections=[*curves(series), *_times(found), *_remarks(found)],
        record=None if small else {**found.to_record(), "folder": str(found.folder)},
    )


def _sets(found: Summary) -> dict[str, float]:
    """Return the losses of held-out sets, where there are several."""
    return (
        {f"loss of {name}": value for name, value in found.held_out_losses.items()}
        if len(found.held_out_losses) > 1
        else {}
    )


_TIME_KINDS = {
    "start": "host",
    "steps": "forward",
    "skipped": "dp",
    "saves": "checkpoint",
    "evaluations": "data",
    "restarts": "tp",
}


def _times(found: Summary) -> list[Section]:
    """Return the seconds of the run by what they were spent on."""
    whole_s = sum(found.seconds.values())
    rows = [Bar(name, _TIME_KINDS.get(name, "rest"), seconds, None) for name, seconds in found.seconds.items()]
    caption = "All starts of the run together."
    return [Section("Where the time of the run went", bars(rows, whole_s), caption)] if whole_s > 0 else []


def _remarks(found: Summary) -> list[Section]:
    """Return what a reader of the result must know: waived refusals, trials, changes of a resume, and other remarks."""
    texts = [*found.waived, *found.tried, *found.changes, *found.remarks]
    lines = "".join(f"<li>{escape(text)}</li>" for text in texts)
    return [Section("Remarks", f'<ul class="reasons">{lines}</ul>')] if texts else []
