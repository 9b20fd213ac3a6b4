"""Laws of the partition of a step: every instant belongs to one row, and a gap to the op whose end closed it."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from samestep.program.ranks import tie_of
from samestep.wings.plan.simulation.clock import play
from samestep.wings.plan.simulation.partition import (
    BUBBLE,
    COMPUTE,
    IMBALANCE,
    REST,
    TRANSFER,
    WAIT,
    Span,
    gaps,
    hidden_s,
    partition,
    row_name,
    seconds_of,
)
from samestep.wings.plan.simulation.timeline import Timeline
from tests.laws.models import LAW, Case, cases, machine

SLOW = machine(bytes_per_s=1e9, latency_s=1e-5, memory_bytes_per_s=1e11)
KINDS = ("forward", "backward", "recompute", "update", "data", "host", "checkpoint", "watching", "rest")
AXES = ("dp_shard", "tp", "cp", "ep", "pp", "world", tie_of((0, 1)))
TICK_S = 0.01


@st.composite
def timelines(draw: st.DrawFn) -> Timeline:
    """Spans of up to three lanes at whole ticks: compute one after the other, communication in any order on any axis."""
    parts: list[Span] = []
    for stage in range(draw(st.integers(1, 3))):
        now = 0
        for gap, length, kind in draw(
            st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5), st.sampled_from(KINDS)), max_size=8)
        ):
            parts.append(Span(stage, COMPUTE, f"{kind}:a", "F0", (now + gap) * TICK_S, (now + gap + length) * TICK_S))
            now += gap + length
        for start, length, axis in draw(
            st.lists(st.tuples(st.integers(0, 40), st.integers(1, 9), st.sampled_from(AXES)), max_size=8)
        ):
            parts.append(Span(stage, axis, "all_reduce:a", "F0", start * TICK_S, (start + length) * TICK_S))
    return Timeline(tuple(parts), draw(st.sampled_from(("stage", "rank"))))


def by_ticks(timeline: Timeline, stage: int) -> dict[tuple[str, str | None], float]:
    """The rows of a lane by the definition, tick by tick: who owns it, or who ran, ended in the gap, and ended last."""
    found: dict[tuple[str, str | None], float] = defaultdict(float)
    end = round(timeline.step_s / TICK_S)
    mine = [
        (span, round(span.start_s / TICK_S), round(span.end_s / TICK_S))
        for span in timeline.spans
        if span.stage == stage
    ]
    owner = {tick: span for span, a, b in mine if span.stream == COMPUTE for tick in range(a, b)}
    edge = {tick for _, a, b in mine if a == b for tick in (a,)}
    for tick in range(end):
        if tick in owner:
            found[row_name(owner[tick].name.partition(":")[0]), None] += TICK_S
            continue
        points = {a for span, a, _ in mine if span.stream == COMPUTE and a > tick}
        closes = min(points, default=end)
        sent = [one for one in mine if one[0].stream != COMPUTE and one[2] <= closes and one[2] > tick]
        running = [one for one in sent if one[1] <= tick]
        if running:
            last = max(one[2] for one in running)
            names = {one[0].stream for one in running if one[2] == last}
            found[TRANSFER, min(names) if len(names) == 1 else "any"] += TICK_S
        else:
            found["uncovered", None] += TICK_S
    assert not edge or end >= max(edge)
    return found


@LAW
@given(timelines())
def test_every_instant_belongs_to_one_row_and_a_gap_to_the_op_that_ended_last(timeline: Timeline) -> None:
    rows = partition(timeline)
    for stage in timeline.stages:
        assert seconds_of(rows, *{row.name for row in rows}, stage=stage) == pytest.approx(timeline.step_s)
        assert all(row.seconds > 0 for row in rows)
        expected = by_ticks(timeline, stage)
        uncovered_s = seconds_of(rows, WAIT, BUBBLE, IMBALANCE, stage=stage)
        own_rest_s = sum(s.end_s - s.start_s for s in timeline.spans if s.stage == stage and s.name == "rest:a")
        assert uncovered_s + seconds_of(rows, REST, stage=stage) - own_rest_s == pytest.approx(
            expected.pop(("uncovered", None), 0.0), abs=1e-9
        )
        assert seconds_of(rows, TRANSFER, stage=stage) == pytest.approx(
            sum(s for (name, _), s in expected.items() if name == TRANSFER), abs=1e-9
        )
        if (TRANSFER, "any") not in expected:  # of two that end at once, either
            for (name, axis), seconds in expected.items():
                if name == TRANSFER or name != REST:
                    assert seconds_of(rows, name, stage=stage, axis=axis) == pytest.approx(seconds, abs=1e-9), name


@LAW
@given(timelines())
def test_the_parts_of_gaps_are_disjoint_and_where_nothing_computes(timeline: Timeline) -> None:
    for stage in timeline.stages:
        parts = sorted(gaps(timeline, stage), key=lambda gap: gap.start_s)
        assert all(one.end_s <= other.start_s + 1e-12 for one, other in pairwise(parts))
        computing = [(s.start_s, s.end_s) for s in timeline.spans if s.stage == stage and s.stream == COMPUTE]
        for gap in parts:
            assert not any(start < gap.end_s - 1e-9 and end > gap.start_s + 1e-9 for start, end in computing)
            if gap.name == TRANSFER:
                assert gap.closed_by is not None
                assert gap.closed_by.start_s <= gap.start_s + 1e-9
                assert gap.closed_by.end_s >= gap.end_s - 1e-9
            elif gap.closed_by is not None:  # a wait ends where the op that closed it starts
                assert gap.closed_by.start_s == pytest.approx(gap.end_s)


@LAW
@given(cases())
def test_a_played_step_has_no_rest_and_bubbles_only_between_stages(case: Case) -> None:
    """Its lines have the rows of its spans."""
    timeline = play(case.programs, SLOW)
    rows = timeline.rows
    of_spans = {(row.stage, row.name, row.axis): row.seconds for row in Timeline(timeline.spans, timeline.lane).rows}
    for row in rows:
        found_s = of_spans.pop((row.stage, row.name, row.axis), 0.0)
        assert found_s == pytest.approx(row.seconds, abs=1e-9 * timeline.step_s)
    assert sum(of_spans.values()) <= 1e-9 * timeline.step_s
    for stage in timeline.stages:
        whole = sum(row.seconds for row in rows if row.stage == stage)
        assert whole == pytest.approx(timeline.step_s)
        computed = seconds_of(rows, "compute", "recompute", "optimizer", stage=stage)
        assert computed == pytest.approx(timeline.busy_s(stage))
    assert seconds_of(rows, REST) <= 1e-9 * timeline.step_s
    if case.layout.pp == 1:
        assert seconds_of(rows, BUBBLE, IMBALANCE, WAIT) <= 1e-9 * timeline.step_s


def span(stream: str, start_s: float, end_s: float, stage: int = 0, name: str = "") -> Span:
    kind = name or ("forward" if stream == COMPUTE else "all_reduce")
    return Span(stage, stream, f"{kind}:a", "F0", start_s, end_s)


def test_a_gap_in_its_parts() -> None:
    parts = (
        span(COMPUTE, 0, 6),
        span("dp", 6, 13),
        span("tp", 10, 17),
        span("cp", 16, 30),  # goes on while the next op computes, so it did not close the gap
        span("pp", 23, 28, name="recv"),
        span(COMPUTE, 28, 34),
        span(COMPUTE, 0, 34, stage=1),
    )
    found = {(row.name, row.axis): row.seconds for row in partition(Timeline(parts)) if row.stage == 0}
    imbalance = {(IMBALANCE, None): 6.0}  # all of the bubble: the other stage computes for 22 s more
    assert found == {
        ("compute", None): 12, (TRANSFER, "dp"): 4, (TRANSFER, "tp"): 7, (TRANSFER, "pp"): 5, **imbalance
    }  # fmt: skip
    assert hidden_s(Timeline(parts), 0) == {"dp": 0, "tp": 0, "cp": 2, "pp": 0}


def test_a_wait_belongs_to_the_axis_that_is_waited_for() -> None:
    parts = (span(COMPUTE, 0, 1), span("dp_shard", 4, 5), span(COMPUTE, 5, 6), span(COMPUTE, 7, 8))
    found = {(row.name, row.axis): row.seconds for row in partition(Timeline(parts, "rank"))}
    assert found == {("compute", None): 3, (WAIT, "dp_shard"): 3, (TRANSFER, "dp_shard"): 1, (REST, None): 1}


@pytest.mark.parametrize(("slow", "parts"), [(1, (3.0, 0.0)), (2, (3.0, 10.0))])
def test_a_slow_stage_is_imbalance_and_not_bubble(slow: int, parts: tuple[float, float]) -> None:
    """Two stages, gpipe with one micro-batch a second and a slow second stage: (p - 1) micro-batches are bubble."""
    lanes = (
        *(span(COMPUTE, k, k + 1) for k in range(10)),
        span("pp", 10 * slow + 3, 10 * slow + 3, name="recv"),
        span(COMPUTE, 10 * slow + 3, 10 * slow + 4, name="update"),
        *(span(COMPUTE, 1 + slow * k, 1 + slow * (k + 1), stage=1) for k in range(10)),
        span("pp", 0.5, 1, stage=1),
    )
    rows = partition(Timeline(lanes))
    assert (seconds_of(rows, BUBBLE, stage=0), seconds_of(rows, IMBALANCE, stage=0)) == pytest.approx(parts)
