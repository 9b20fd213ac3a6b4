"""The partition of a step's time: each instant of a lane's compute stream belongs to one row, so that the rows add up to the step.

A lane is a pipeline stage of a played timeline, or a rank of a measured one; the same function reads both. An op on the compute
stream owns its instants: compute, recompute, optimizer, data, host, checkpoint, watching. Between them are *gaps*. An instant of a
gap belongs to the op that ended last among those that ran at that instant and ended within the gap, because compute went on at the
end of the last one; an op that goes on beyond the gap did not close it, nor did one for which a measured lane has not waited.

```
compute   FFFFFF......................BBBBBB
dp        ......aaaaaaa                               row
tp               ....xxxxxxx          ......xxx
pp                             ..<<<<<
gap             |dp  |tp     |bubble|pp|              x beyond the gap's end did not close it
```
Time before the start of such an op, in which none of them runs, is a *wait*: a collective starts when its last rank has entered it.
Where the op passes through pipeline stages the wait is a *bubble*, of which *imbalance* is the part by which the busiest lane
computes longer than this one. What no op explains is the *rest*.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import NamedTuple, Protocol

from samestep.program.ops import OpKind
from samestep.program.ranks import stages_of

BUBBLE, IMBALANCE, REST, TRANSFER, WAIT = "bubble", "imbalance", "rest", "transfer", "wait"
_ROWS = {
    OpKind.RECOMPUTE: "recompute",
    OpKind.UPDATE: "optimizer",
    OpKind.OUTER: "optimizer",
    OpKind.COPY: TRANSFER,
    "data": "data",
    "host": "host",
    "checkpoint": "checkpoint",
    "watching": "watching",
    REST: REST,
}
"""Name of the row of an op on the compute stream, by its kind; of all other kinds `compute`."""
ROWS = (
    "compute",
    "recompute",
    TRANSFER,
    WAIT,
    BUBBLE,
    IMBALANCE,
    "optimizer",
    "data",
    "host",
    "checkpoint",
    "watching",
    REST,
)
"""Names of all rows, in the order in which they are shown."""
_LABELS = {
    TRANSFER: "exposed communication",
    WAIT: "wait for others",
    "host": "CPU overhead",
    "watching": "self-checks",
    REST: "other",
}
_SAME = 1e-9
"""Fraction of a step below which two times are the same."""

Key = tuple[str, str | None]
"""Name and axis of a row."""


def row_label(name: str, axis: str | None) -> str:
    """Return the name of a row as texts and pages show it, with its axis."""
    return " ".join(filter(None, (_LABELS.get(name, name), axis)))


class TimeRow(NamedTuple):
    """A part of a lane's step, in seconds."""

    stage: int
    """Index of the lane: a stage of a played timeline, a rank of a measured one."""
    name: str
    axis: str | None
    """Axis of a transfer or wait; None of other rows."""
    seconds: float

    def to_record(self) -> dict[str, object]:
        """Return the part as plain data for JSON, without its lane."""
        return {"name": self.name, "axis": self.axis, "seconds": self.seconds}


class Gap(NamedTuple):
    """A run of instants of a gap that belong to one row, with the op that closed it; the rest has none."""

    stage: int
    name: str
    axis: str | None
    start_s: float
    end_s: float
    closed_by: Span | None


class StepLanes(Protocol):
    """The spans of one step, lane by lane: a `Timeline`."""

    @property
    def lane(self) -> str:
        """`stage` where a clock has played it, `rank` where it was measured."""

    @property
    def is_piped(self) -> bool:
        """Whether activations pass between pipeline stages."""

    @property
    def step_s(self) -> float:
        """Seconds of the step."""

    @property
    def stages(self) -> tuple[int, ...]:
        """Indices of the lanes."""

    def spans_of(self, stage: int) -> Iterator[Span]:
        """Yield the span of every op of one lane."""

    def parts_of(self, stage: int) -> Sequence[Span | LineSpan]:
        """Return the spans and the lines of ops of one lane."""

    def closes_gaps(self, span: Span) -> bool:
        """Return whether a lane may have waited for an op."""


def partition(timeline: StepLanes) -> tuple[TimeRow, ...]:
    """Return the rows of every lane: those of one lane add up to the seconds of the step."""
    stages: dict[int, dict[Key, float]] = {}
    for stage in timeline.stages:
        rows = stages[stage] = dict[Key, float]()
        for part in _walk(timeline, stage):
            if isinstance(part, Gap):
                _add(rows, (part.name, part.axis), part.end_s - part.start_s)
            else:
                _add(rows, *part)
    _part_imbalance(stages)
    order = {name: index for index, name in enumerate(ROWS)}
    return tuple(
        TimeRow(stage, name, axis, seconds)
        for stage, rows in stages.items()
        for (name, axis), seconds in sorted(rows.items(), key=lambda row: (order[row[0][0]], row[0][1] or ""))
    )


def gaps(timeline: StepLanes, stage: int) -> Iterator[Gap]:
    """Yield the instants of a lane in which it does not compute, in order within a gap from its end to its start."""
    return (part for part in _walk(timeline, stage) if isinstance(part, Gap))


def seconds_of(rows: Iterable[TimeRow], *names: str, stage: int | None = None, axis: str | None = None) -> float:
    """Return the seconds of the rows with one of these names, of one lane and one axis if they are given."""
    return sum(
        row.seconds
        for row in rows
        if row.name in names and stage in (None, row.stage) and (axis is None or axis == row.axis)
    )


def row_name(kind: str) -> str:
    """Return the name of the row of an op on the compute stream, by its kind."""
    return _ROWS.get(kind, "compute")


def hidden_s(timeline: StepLanes, stage: int) -> dict[str, float]:
    """Return the seconds of communication that ran while the lane computed, by axis."""
    spans = [*timeline.spans_of(stage)]
    computing = [(span.start_s, span.end_s) for span in spans if span.stream == COMPUTE]
    seconds: dict[str, float] = {}
    for span in spans:
        if span.stream != COMPUTE:
            inside = sum(max(0.0, min(span.end_s, end) - max(span.start_s, start)) for start, end in computing)
            seconds[span.stream] = seconds.get(span.stream, 0.0) + inside
    return seconds


def _add(rows: dict[Key, float], key: Key, seconds: float) -> None:
    if seconds > 0:
        rows[key] = rows.get(key, 0.0) + seconds


def _walk(timeline: StepLanes, stage: int) -> Iterator[Gap | tuple[Key, float]]:
    """Yield the row and the seconds of each op on the compute stream of a lane, and the parts of the gaps between them."""
    busy: list[Span | LineSpan] = []
    sent: list[Span] = []
    for part in timeline.parts_of(stage):
        if isinstance(part, LineSpan) and part.line.busy_s.keys() == {COMPUTE}:
            busy.append(part)
            continue
        for span in (part,) if isinstance(part, Span) else part.spans():
            if span.stream == COMPUTE:
                busy.append(span)
            elif timeline.closes_gaps(span):
                sent.append(span)
    busy.sort(key=attrgetter("start_s"))
    # Of ops that end at once the first to start covers most of a gap.
    sent.sort(key=lambda span: (span.end_s, -span.start_s, _passes_stages(span.stream)))
    closing = _Closing(timeline, stage, sent)
    keys: dict[str, Key] = {}  # a step has few names, and many spans of each
    now_s = 0.0
    for part in busy:
        if part.start_s > now_s:
            yield from closing.parts(now_s, part.start_s)
            now_s = part.start_s
        for name, end_s in _ends_of(part):
            if end_s > now_s:  # measured ops may overlap by the resolution of a clock
                key = keys.get(name) or keys.setdefault(name, (row_name(name.partition(":")[0]), None))
                yield key, end_s - now_s
                now_s = end_s
    if now_s < timeline.step_s:
        yield from closing.parts(now_s, timeline.step_s)


def _ends_of(part: Span | LineSpan) -> Iterable[tuple[str, float]]:
    """Return the name and the end, in seconds from the start of the step, of each op of a part."""
    if isinstance(part, Span):
        return ((part.name, part.end_s),)
    start_s = part.start_s
    return [(name, start_s + after_s) for (_, name), after_s in zip(part.line.ops, part.ends_s, strict=True)]


class _Closing:
    """The collectives and messages of a lane in the order of their ends, from which gaps are explained one after the other."""

    def __init__(self, timeline: StepLanes, stage: int, sent: Sequence[Span]) -> None:
        self._stage, self._sent, self._next = stage, sent, 0
        self._step_s, self._same_s = timeline.step_s, timeline.step_s * _SAME
        self._is_played = timeline.lane == "stage"
        self._is_piped = timeline.is_piped

    def parts(self, start_s: float, end_s: float) -> Iterator[Gap]:
        """Yield the parts of a gap from its end to its start."""
        while self._next < len(self._sent) and self._sent[self._next].end_s <= end_s + self._same_s:
            self._next += 1
        now_s, closer = end_s, None
        for index in range(self._next - 1, -1, -1):
            span = self._sent[index]
            if now_s <= start_s or span.end_s <= start_s:
                break
            if span.start_s > now_s or (closer and span.start_s == now_s):
                continue
            if span.end_s < now_s - self._same_s:
                yield self._uncovered(span.end_s, now_s, closer)
                now_s = span.end_s
            first_s = max(start_s, span.start_s)
            if first_s < now_s:
                yield Gap(self._stage, TRANSFER, span.stream, first_s, now_s, span)
            now_s, closer = min(first_s, now_s), span
        if now_s > start_s:
            yield self._uncovered(start_s, now_s, closer)

    def _uncovered(self, start_s: float, end_s: float, closer: Span | None) -> Gap:
        """Return the part of a gap in which nothing ran that ended within it, before the start of `closer`."""
        if closer is None:
            is_tail = end_s >= self._step_s - self._same_s
            name = BUBBLE if self._is_played and self._is_piped and is_tail else REST
            return Gap(self._stage, name, None, start_s, end_s, None)
        if self._is_piped and _passes_stages(closer.stream):
            return Gap(self._stage, BUBBLE, None, start_s, end_s, closer)
        return Gap(self._stage, WAIT, closer.stream, start_s, end_s, closer)


def _passes_stages(axis: str) -> bool:
    """Return whether an op of the axis waits for other pipeline stages, where a step has several."""
    return axis in ("pp", "world") or bool(stages_of(axis))


def _part_imbalance(stages: Mapping[int, dict[Key, float]]) -> None:
    """Divide each lane's bubble: the part by which the busiest lane computes longer is imbalance."""
    computing = {
        stage: rows.get(("compute", None), 0.0) + rows.get(("recompute", None), 0.0) for stage, rows in stages.items()
    }
    most_s = max(computing.values(), default=0.0)
    for stage, rows in stages.items():
        bubble_s = rows.pop((BUBBLE, None), 0.0)
        imbalance_s = min(bubble_s, most_s - computing[stage])
        _add(rows, (IMBALANCE, None), imbalance_s)
        _add(rows, (BUBBLE, None), bubble_s - imbalance_s)


COMPUTE = "compute"
"""Name of the stream of compute; all other streams carry communication."""


class Span(NamedTuple):
    """One op on one stage, with its start and end in seconds from the start of the step."""

    stage: int
    stream: str
    name: str
    task: str
    """Label of the task it belongs to: `F0` is the forward of micro-batch 0."""
    start_s: float
    end_s: float


class Line(NamedTuple):
    """Consecutive ops without a gap between them; the times within a line do not depend on its start."""

    ops: tuple[tuple[str, str], ...]
    """Stream and name of each op."""
    ends_s: tuple[float, ...]
    """End of each op, in seconds from the start of the first."""
    busy_s: Mapping[str, float]
    """Seconds in which an op of a stream runs, by stream."""


class LineSpan(NamedTuple):
    """One run of a line, during which its streams run nothing else; tasks that do the same share the line."""

    stage: int
    task: str
    start_s: float
    end_s: float
    line: Line
    ends_s: tuple[float, ...]
    """End of each op in seconds from the start: the line's, unless another stage or contention delays it."""

    def spans(self) -> Iterator[Span]:
        """Yield the span of each op."""
        start_s = self.start_s
        for (stream, name), after_s in zip(self.line.ops, self.ends_s, strict=True):
            end_s = self.start_s + after_s
            yield Span(self.stage, stream, name, self.task, start_s, end_s)
            start_s = end_s

    def busy_s(self, stream: str) -> float:
        """Return the seconds in which an op of the stream runs."""
        if self.ends_s is self.line.ends_s:
            return self.line.busy_s.get(stream, 0.0)
        return sum(
            end_s - start_s
            for (op_stream, _), start_s, end_s in zip(self.line.ops, (0.0, *self.ends_s), self.ends_s, strict=False)
            if op_stream == stream
        )
