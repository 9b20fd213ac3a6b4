"""The page of another program's steps: the verdict, one step on a timeline, and where the time of each rank goes."""

from __future__ import annotations

from dataclasses import replace
from html import escape

from samestep.explanation.foreign_traces import ForeignSteps
from samestep.output.page.charts import Bar, bars, stacked
from samestep.output.page.page import Answer, Page, Section, table
from samestep.output.page.quantities import Quantity, duration, share
from samestep.output.page.timeline_figure import TimelineFigure, some_of
from samestep.simulation.partition import TRANSFER, WAIT, seconds_of
from samestep.simulation.prediction_page import lanes_of, most_drawn, row_kind, row_label

MOST_BARS = 64
"""Number of ranks above which only some have a bar."""
_MOST_LETTERS = 13
"""Letters of the name of a lane."""


def page_of(found: ForeignSteps, *, small: bool = False) -> Page:
    """Return the page of a folder of traces; a small one has neither boxes to zoom into nor a record."""
    ranks, steps = len(found.ranks), found.steps
    which = f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}"
    return Page(
        verb="explain",
        title=f"{duration(found.step_s).text} a step on {ranks:,} rank{'s' * (ranks > 1)}",
        subject=f"{found.folder.resolve().name} · {which}",
        answers=_answers(found),
        verdict=found.verdict,
        sections=[_timeline(found, small=small), _busiest(found), _each_rank(found)],
        notes=[f"missing: {text}" for text in found.missing]
        + ["The axis of a collective is a guess: the ranks of its group. Nothing is predicted."],
        record=None if small else found.to_record(),
    )


def _answers(found: ForeignSteps) -> list[Answer]:
    """Return the step, and the parts of it in which the busiest rank computes, sends and waits."""
    rank = found.busiest
    answers = [Answer("step", duration(found.step_s), None, f"mean of {len(found.steps)}, on the slowest rank")]
    for label, names in (("compute", ("compute",)), ("exposed communication", (TRANSFER, WAIT)), ("host", ("host",))):
        seconds = seconds_of(found.rows, *names, stage=rank)
        answers.append(
            Answer(label, share(seconds / (found.step_s or 1.0)), None, f"of rank {rank}, which waits least")
        )
    return answers


def _timeline(found: ForeignSteps, *, small: bool) -> Section:
    ranks = some_of(found.ranks, [found.busiest], most_drawn(found.last))
    some = "" if len(ranks) == len(found.ranks) else f" {len(ranks)} of {len(found.ranks)} ranks are drawn."
    lanes = [replace(lane, name=_short(lane.name)) for lane in lanes_of(found.last, ranks)]
    figure = TimelineFigure(lanes, found.last.step_s)
    caption = f"Step {found.steps[-1]}, one lane for each rank and stream.{some}"
    return Section("The step", figure.to_html(small=small), caption)


def _short(lane: str) -> str:
    """Return the name of a lane without what a note of the page says, and short enough for a phone."""
    name = lane.removesuffix(" (guessed)")
    return name if len(name) <= _MOST_LETTERS else f"{name[: _MOST_LETTERS - 1]}…"


def _busiest(found: ForeignSteps) -> Section:
    rows = [
        Bar(row_label(row.name, row.axis), row_kind(row.name, row.axis), row.seconds, None)
        for row in found.rows
        if row.stage == found.busiest and row.seconds
    ]
    caption = f"The rows of rank {found.busiest}, which waits least; they add up to its step."
    return Section("Where the time goes", bars(rows, found.step_s), caption)


def _each_rank(found: ForeignSteps) -> Section:
    """Return one bar a rank, and its rows as a table."""
    shown = some_of(found.ranks, [found.busiest], MOST_BARS)
    lines, names = [], dict[str, str]()
    for rank in shown:
        rows = [row for row in found.rows if row.stage == rank]
        parts = [(row_label(row.name, row.axis), row_kind(row.name, row.axis), row.seconds) for row in rows]
        names |= {label: kind for label, kind, seconds in parts if seconds > 0.002 * found.step_s}
        total = sum(row.seconds for row in rows)
        lines.append(stacked(f"rank {rank}", parts, found.step_s, duration(total)))
    legend = "".join(f'<span><i class="{kind}"></i>{escape(label)}</span>' for label, kind in names.items())
    body = f'<ul class="bars">{"".join(lines)}</ul><p class="legend">{legend}</p>'
    return Section(
        "Each rank", body + _table(found, shown[:8]), "A rank that waits less than the others is waited for."
    )


def _table(found: ForeignSteps, ranks: list[int]) -> str:
    labels = dict.fromkeys((row.name, row.axis) for row in found.rows)
    seconds = {(row.name, row.axis, row.stage): row.seconds for row in found.rows}
    rows = [
        (
            escape(row_label(name, axis)),
            *(
                duration(seconds[name, axis, rank]).to_html() if (name, axis, rank) in seconds else _NOTHING
                for rank in ranks
            ),
        )
        for name, axis in labels
    ]
    return table(("part", *(f"rank {rank}" for rank in ranks)), rows)


_NOTHING = Quantity(0.0, "0 s").to_html()
