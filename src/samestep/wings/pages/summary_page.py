"""The page of a run that has ended: its losses, its curves, and whether its layout was proven."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from samestep.output.text import Quantity, count, share
from samestep.training.run_folder import LOG, Summary
from samestep.wings.pages.charts import Bar, bars, curve
from samestep.wings.pages.page import Answer, Page, Section


def page_of(summary: Summary, *, small: bool = False) -> Page:
    """Return the page of a run; a small one has no record."""
    series = logged(summary.folder, "loss", "tokens_per_s", "samples_per_s")
    answers = [
        Answer("steps", Quantity(summary.steps, f"{summary.steps:,}"), None, "stopped early" if summary.stopped else "")
    ]
    sets = summary.held_out_losses if len(summary.held_out_losses) > 1 else {}
    losses = {"loss": summary.loss, "validation loss": summary.held_out_loss}
    losses |= {f"loss of {name}": value for name, value in sets.items()}
    answers += [Answer(label, Quantity(loss, f"{loss:.4f}")) for label, loss in losses.items() if loss is not None]
    if summary.held_out_accuracy is not None:
        answers.append(Answer("validation accuracy", share(summary.held_out_accuracy)))
    speed = next((series[key] for key in ("tokens_per_s", "samples_per_s") if key in series), None)
    if speed is not None:
        middle = sorted(speed.values)[len(speed.values) // 2]
        unit = "tokens" if "tokens_per_s" in series else "samples"
        answers.append(Answer(f"{unit}/s", count(middle), None, "median of the logged steps"))
    if summary.seconds:
        answers.append(Answer("goodput", share(summary.goodput), None, "of the time were training steps"))
    return Page(
        verb="train",
        title=f"{summary.steps:,} steps in {summary.folder.name}",
        subject=summary.started_from,
        answers=answers,
        verdict=summary.proof,
        sections=[*curves(series), *_times(summary), *_remarks(summary)],
        record=None if small else {**summary.to_record(), "folder": str(summary.folder)},
    )


_TIME_KINDS = {
    "start": "host",
    "steps": "forward",
    "skipped": "dp",
    "saves": "checkpoint",
    "evaluations": "data",
    "restarts": "tp",
}


def _times(summary: Summary) -> list[Section]:
    """Return the seconds of the run by what they were spent on."""
    whole_s = sum(summary.seconds.values())
    rows = [Bar(name, _TIME_KINDS.get(name, "rest"), seconds, None) for name, seconds in summary.seconds.items()]
    caption = "All starts of the run together."
    return [Section("Where the time of the run went", bars(rows, whole_s), caption)] if whole_s > 0 else []


def _remarks(summary: Summary) -> list[Section]:
    """Return what a reader of the result must know: waived refusals, trials, changes of a resume, and other remarks."""
    texts = [*summary.waived, *summary.tried, *summary.changes, *summary.remarks]
    lines = "".join(f"<li>{escape(text)}</li>" for text in texts)
    return [Section("Remarks", f'<ul class="reasons">{lines}</ul>')] if texts else []


@dataclass(frozen=True, slots=True)
class LoggedSeries:
    """One number of a run over its steps."""

    steps: Sequence[int]
    values: Sequence[float]


def logged(folder: Path, *keys: str) -> dict[str, LoggedSeries]:
    """Return the series of some numbers of a run folder; without a log, or of a number that was not logged, none.

    A line that is no JSON, as the last one of a killed run, is left out.
    """
    path = folder / LOG
    if not path.is_file():
        return {}
    numbers: dict[str, tuple[list[int], list[float]]] = {key: ([], []) for key in keys}
    for text in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            line = json.loads(text)
            step = int(line["step"])
        except (ValueError, TypeError, KeyError):
            continue
        for key, (steps, values) in numbers.items():
            if isinstance(value := line.get(key), int | float):
                steps.append(step)
                values.append(float(value))
    return {key: LoggedSeries(*series) for key, series in numbers.items() if series[0]}


def curves(series: Mapping[str, LoggedSeries]) -> Iterator[Section]:
    """Yield the curves of loss and speed as a section of a page; nothing where fewer than two steps are logged."""
    words = {"loss": "loss", "tokens_per_s": "tokens/s", "samples_per_s": "samples/s"}
    shown = {words[key]: logged_ for key, logged_ in series.items() if key in words and len(logged_.steps) > 1}
    if shown:
        charts = "".join(curve(label, logged_.steps, logged_.values) for label, logged_ in shown.items())
        yield Section("The run", f'<div class="grid wide">{charts}</div>', "Every logged step.")
