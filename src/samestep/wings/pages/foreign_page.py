"""The page of another program's steps: the verdict, one step on a timeline, and where the time of each rank goes."""

from __future__ import annotations

from dataclasses import replace
from html import escape

from samestep.output.text import duration, share
from samestep.wings.explain.foreign_traces import ForeignSteps
from samestep.wings.pages.charts import Bar, TimelineFigure, bars, each_rank, left_out, some_of
from samestep.wings.pages.explained_page import MOST_BARS, which
from samestep.wings.pages.page import Answer, Page, Section, table
from samestep.wings.pages.prediction_page import lanes_of, most_drawn, row_kind
from samestep.wings.plan.simulation.partition import TRANSFER, WAIT, row_label, seconds_of

_MOST_LETTERS = 13
"""Letters of the name of a lane."""


def page_of(foreign_steps: ForeignSteps, *, small: bool = False) -> Page:
    """Return the page of a folder of traces; a small one has neither boxes to zoom into nor a record."""
    ranks = len(foreign_steps.ranks)
    return Page(
        verb="explain",
        title=f"{duration(foreign_steps.step_s).text} per step on {ranks:,} rank{'s' * (ranks > 1)}",
        subject=f"{foreign_steps.folder.resolve().name} · {which(foreign_steps.steps)}",
        answers=_answers(foreign_steps),
        verdict=foreign_steps.verdict,
        sections=[_timeline(foreign_steps, small=small), _busiest(foreign_steps), _each_rank(foreign_steps)],
        notes=[f"missing: {text}" for text in foreign_steps.missing]
        + ["The axis of a collective is a guess: the ranks of its group. Nothing is predicted."],
        record=None if small else foreign_steps.to_record(),
    )


def _answers(foreign_steps: ForeignSteps) -> list[Answer]:
    """Return the step, and the parts of it in which the busiest rank computes, sends and waits."""
    rank = foreign_steps.busiest
    answers = [
        Answer("step", duration(foreign_steps.step_s), None, f"mean of {len(foreign_steps.steps)}, on the slowest rank")
    ]
    for label, names in (
        ("compute", ("compute",)),
        ("exposed communication", (TRANSFER, WAIT)),
        ("CPU overhead", ("host",)),
    ):
        seconds = seconds_of(foreign_steps.rows, *names, stage=rank)
        answers.append(
            Answer(label, share(seconds / (foreign_steps.step_s or 1.0)), None, f"of rank {rank}, the slowest rank")
        )
    return answers


def _timeline(foreign_steps: ForeignSteps, *, small: bool) -> Section:
    ranks = some_of(foreign_steps.ranks, [foreign_steps.busiest], most_drawn(foreign_steps.last))
    some = left_out(ranks, foreign_steps.ranks, "ranks")
    lanes = [replace(lane, name=_short(lane.name)) for lane in lanes_of(foreign_steps.last, ranks, {})]
    figure = TimelineFigure(lanes, foreign_steps.last.step_s)
    caption = f"Step {foreign_steps.steps[-1]}, one track for each rank and stream.{some}"
    return Section("The step", figure.to_html(small=small), caption)


def _short(lane: str) -> str:
    """Return the name of a lane without what a note of the page says, and short enough for a phone."""
    name = lane.removesuffix(" (guessed)")
    return name if len(name) <= _MOST_LETTERS else f"{name[: _MOST_LETTERS - 1]}…"


def _busiest(foreign_steps: ForeignSteps) -> Section:
    rows = [
        Bar(row_label(row.name, row.axis), row_kind(row.name, row.axis), row.seconds, None)
        for row in foreign_steps.rows
        if row.stage == foreign_steps.busiest and row.seconds
    ]
    caption = f"Rank {foreign_steps.busiest}, the slowest rank. The parts add up to its step."
    return Section("Where the time goes", bars(rows, foreign_steps.step_s), caption)


def _each_rank(foreign_steps: ForeignSteps) -> Section:
    """Return one bar a rank, and its rows as a table."""
    shown = some_of(foreign_steps.ranks, [foreign_steps.busiest], MOST_BARS)
    parts: dict[int, list[tuple[str, str, float]]] = {rank: [] for rank in shown}
    for row in foreign_steps.rows:
        if row.stage in parts:
            parts[row.stage].append((row_label(row.name, row.axis), row_kind(row.name, row.axis), row.seconds))
    return Section(
        "Each rank",
        each_rank(parts, foreign_steps.step_s) + _table(foreign_steps, shown[:8]),
        "The others wait for the slowest rank.",
    )


def _table(foreign_steps: ForeignSteps, ranks: list[int]) -> str:
    labels = dict.fromkeys((row.name, row.axis) for row in foreign_steps.rows)
    seconds = {(row.name, row.axis, row.stage): row.seconds for row in foreign_steps.rows}
    rows = [
        (
            escape(row_label(name, axis)),
            *(duration(seconds.get((name, axis, rank), 0.0)).to_html() for rank in ranks),
        )
        for name, axis in labels
    ]
    return table(("part", *(f"rank {rank}" for rank in ranks)), rows)
