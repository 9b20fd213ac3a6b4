"""The `Timeline`: start and end of each op of a step, predicted by the clock or measured, in one form.

```
stage 0 compute       FFFFFFFFBBBBBBBBBBBBBBBB....UU  93 %
        dp_replicate  ..............aaaaaaaaaaaaa...  45 %
                                              └─┘            exposed: communication that overlaps with no compute
```
A Chrome trace (the Trace Event Format, for chrome://tracing or ui.perfetto.dev) has a process for each stage and a
thread for each stream.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from samestep.program.ops import OpKind
from samestep.wings.plan.simulation.partition import COMPUTE, TRANSFER, LineSpan, Span, TimeRow, partition

LETTERS = {
    OpKind.FORWARD: "F",
    OpKind.BACKWARD: "B",
    OpKind.WEIGHT: "W",
    OpKind.RECOMPUTE: "R",
    OpKind.UPDATE: "U",
    OpKind.OUTER: "O",
    OpKind.COPY: "C",
    OpKind.OFFLOAD: "v",
    OpKind.FETCH: "^",
    OpKind.ALL_REDUCE: "a",
    OpKind.ALL_GATHER: "g",
    OpKind.REDUCE_SCATTER: "s",
    OpKind.REDUCE: "r",
    OpKind.BROADCAST: "b",
    OpKind.ALL_TO_ALL: "x",
    OpKind.SHIFT: "h",
    OpKind.SEND: ">",
    OpKind.RECV: "<",
}
"""Character of each kind of op in a picture: capitals for compute, others for communication."""

MOST_ROWS = 48
"""Number of rows above which a picture leaves communication out."""


@dataclass(frozen=True)
class Timeline:
    """The ops of one step on all stages: measured spans, or lines that were played."""

    parts: tuple[Span | LineSpan, ...]
    lane: Literal["stage", "rank"] = "stage"
    """What `Span.stage` counts: pipeline stages of a played timeline, or ranks of a measured one."""
    not_waited_for: frozenset[Span] = frozenset()
    """Ops that a measured lane did not wait for: nobody saw their ends, which are at most what their spans say."""

    @cached_property
    def spans(self) -> tuple[Span, ...]:
        """The span of every op, stage by stage in the order of issue."""
        return tuple(span for part in self.parts for span in ((part,) if isinstance(part, Span) else part.spans()))

    @cached_property
    def step_s(self) -> float:
        """Seconds from the start of the step to the end of its last op on any stage."""
        return max((part.end_s for part in self.parts), default=0.0)

    @cached_property
    def _of_stage(self) -> Mapping[int, list[Span | LineSpan]]:
        spans: dict[int, list[Span | LineSpan]] = {}
        for part in self.parts:
            spans.setdefault(part.stage, []).append(part)
        return spans

    def spans_of(self, stage: int) -> Iterator[Span]:
        """Yield the span of every op of one stage, in the order of issue."""
        for part in self.parts_of(stage):
            yield from (part,) if isinstance(part, Span) else part.spans()

    def parts_of(self, stage: int) -> Sequence[Span | LineSpan]:
        """Return the spans and the lines of one stage, in the order of issue."""
        return self._of_stage.get(stage, ())

    def closes_gaps(self, span: Span) -> bool:
        """Return whether a lane may have waited for an op: of a played one, always."""
        return not self.not_waited_for or span not in self.not_waited_for

    @cached_property
    def is_piped(self) -> bool:
        """Whether activations pass between pipeline stages."""
        return any("pp" in _streams_of(part) for part in self.parts)

    @property
    def stages(self) -> tuple[int, ...]:
        """Indices of the stages with any op, in order."""
        return tuple(sorted(self._of_stage))

    def streams(self, stage: int) -> tuple[str, ...]:
        """Return the streams of a stage: compute first, then the axes in the order of their first op."""
        names = dict.fromkeys(stream for part in self._of_stage.get(stage, ()) for stream in _streams_of(part))
        return tuple(sorted(names, key=lambda name: name != COMPUTE))

    def busy_s(self, stage: int, stream: str = COMPUTE) -> float:
        """Return the seconds in which at least one op of the stream runs."""
        parts = self._of_stage.get(stage, ())
        measured = [part for part in parts if isinstance(part, Span) and part.stream == stream]
        return _length(_union(measured)) + sum(part.busy_s(stream) for part in parts if isinstance(part, LineSpan))

    def idle_s(self, stage: int, stream: str = COMPUTE) -> float:
        """Return the seconds of the step in which the stream is idle; those of compute are divided by `rows`."""
        return self.step_s - self.busy_s(stage, stream)

    @cached_property
    def rows(self) -> tuple[TimeRow, ...]:
        """The parts of every stage's step: `partition`."""
        return partition(self)

    def exposed_s(self, stage: int) -> float:
        """Return the seconds in which collectives and messages run for which the stage's compute waits."""
        return sum(row.seconds for row in self.rows if row.stage == stage and row.name == TRANSFER)

    def to_chrome_trace(self) -> dict[str, Any]:
        """Return a Chrome trace to write as JSON, with times in microseconds."""
        threads = {(stage, stream): tid for stage in self.stages for tid, stream in enumerate(self.streams(stage))}
        names = [_metadata("process_name", stage, 0, f"{self.lane} {stage}") for stage in self.stages]
        names += [_metadata("thread_name", stage, tid, stream) for (stage, stream), tid in threads.items()]
        events = [
            {
                "ph": "X",
                "name": span.name,
                "cat": span.name.partition(":")[0],
                "pid": span.stage,
                "tid": threads[span.stage, span.stream],
                "ts": span.start_s * 1e6,
                "dur": (span.end_s - span.start_s) * 1e6,
                "args": {"task": span.task},
            }
            for span in self.spans
        ]
        return {"traceEvents": names + events, "displayTimeUnit": "ms"}

    def to_text(self, width: int = 100) -> str:
        """Return a picture of every stage and stream in lines of `width` characters, with the busy fraction of the
        step.

        A character shows the op that takes most of its time, however little that is. Of more than `MOST_ROWS` rows
        those of communication are left out.
        """
        rows = [(stage, stream) for stage in self.stages for stream in self.streams(stage)]
        if not rows or not self.step_s:
            return "an empty step"
        drawn = rows if len(rows) <= MOST_ROWS else [row for row in rows if row[1] == COMPUTE]
        labels = [f"stage {stage} {stream}" for stage, stream in drawn]
        margin = max(map(len, labels))
        cells = max(width - margin - len("  100%") - 1, 10)
        lines, shown = [], set()
        for label, (stage, stream) in zip(labels, drawn, strict=True):
            picture = self._picture(stage, stream, cells)
            shown |= set(picture)
            lines.append(f"{label:<{margin}} {picture} {self.busy_s(stage, stream) / self.step_s:5.0%}")
        exposed = max(self.exposed_s(stage) for stage in self.stages)
        legend = "  ".join(f"{letter} {kind}" for kind, letter in LETTERS.items() if letter in shown)
        if left_out := len(rows) - len(drawn):
            legend += f"; {left_out} rows of communication are left out"
        return "\n".join(
            [f"{_readable(self.step_s)} per step, {_readable(exposed)} of exposed communication", *lines, legend]
        )

    def _picture(self, stage: int, stream: str, cells: int) -> str:
        """Return the row of a stream, `cells` characters long."""
        cell_s = self.step_s / cells
        drawn, covered = ["·"] * cells, [0.0] * cells
        for span in self.spans:
            if span.stage != stage or span.stream != stream or span.end_s <= span.start_s:
                continue
            letter = next((shown for kind, shown in LETTERS.items() if span.name.partition(":")[0] == kind), "#")
            first = min(int(span.start_s / cell_s), cells - 1)
            for cell in range(first, min(int(span.end_s / cell_s) + 1, cells)):
                part_s = min(span.end_s, (cell + 1) * cell_s) - max(span.start_s, cell * cell_s)
                if part_s > covered[cell]:
                    drawn[cell], covered[cell] = letter, part_s
        return "".join(drawn)


def _metadata(kind: str, stage: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": stage, "tid": tid, "args": {"name": name}}


def _streams_of(part: Span | LineSpan) -> tuple[str, ...]:
    return (part.stream,) if isinstance(part, Span) else tuple(stream for stream, _ in part.line.ops)


def _union(spans: Iterable[Span | LineSpan]) -> Iterator[tuple[float, float]]:
    """Yield start and end of the disjoint intervals in which any of the spans runs, in order."""
    start_s = end_s = 0.0
    for span in sorted(spans, key=lambda span: span.start_s):
        if span.start_s > end_s:
            yield start_s, end_s
            start_s = span.start_s
        end_s = max(end_s, span.end_s)
    yield start_s, end_s


def _length(intervals: Iterable[tuple[float, float]]) -> float:
    """Return the seconds that intervals cover."""
    return sum(end_s - start_s for start_s, end_s in intervals)


def _readable(time_s: float) -> str:
    """Return a time with a suitable unit."""
    for unit, size_s in (("s", 1.0), ("ms", 1e-3)):
        if time_s >= size_s:
            return f"{time_s / size_s:.3g} {unit}"
    return f"{time_s / 1e-6:.3g} us"
