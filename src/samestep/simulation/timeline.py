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

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from samestep.program.ops import OpKind

COMPUTE = "compute"
"""Name of the stream of compute; all other streams carry communication."""

LETTERS = {
    OpKind.FORWARD: "F",
    OpKind.BACKWARD: "B",
    OpKind.WEIGHT: "W",
    OpKind.RECOMPUTE: "R",
    OpKind.UPDATE: "U",
    OpKind.OUTER: "O",
    OpKind.ALL_REDUCE: "a",
    OpKind.ALL_GATHER: "g",
    OpKind.REDUCE_SCATTER: "s",
    OpKind.REDUCE: "r",
    OpKind.BROADCAST: "b",
    OpKind.ALL_TO_ALL: "x",
    OpKind.SEND: ">",
    OpKind.RECV: "<",
}
"""Character of each kind of op in a picture: capitals for compute, others for communication."""

MOST_ROWS = 48
"""Number of rows above which a picture leaves communication out."""


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
            for (own, _), start_s, end_s in zip(self.line.ops, (0.0, *self.ends_s), self.ends_s, strict=False)
            if own == stream
        )


@dataclass(frozen=True)
class Timeline:
    """The ops of one step on all stages: measured spans, or lines that were played."""

    parts: tuple[Span | LineSpan, ...]

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
        found: dict[int, list[Span | LineSpan]] = {}
        for part in self.parts:
            found.setdefault(part.stage, []).append(part)
        return found

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
        """Return the seconds of the step in which the stream is idle: for compute, bubble and exposed communication."""
        return self.step_s - self.busy_s(stage, stream)

    def exposed_s(self, stage: int) -> float:
        """Return the seconds in which the stage communicates without computing."""
        return _length(_union(self._of_stage.get(stage, ()))) - self.busy_s(stage)

    def to_chrome_trace(self) -> dict[str, Any]:
        """Return a Chrome trace to write as JSON, with times in microseconds."""
        threads = {(stage, stream): tid for stage in self.stages for tid, stream in enumerate(self.streams(stage))}
        names = [_metadata("process_name", stage, 0, f"stage {stage}") for stage in self.stages]
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

    @classmethod
    def from_chrome_trace(cls, trace: Mapping[str, Any]) -> Timeline:
        """Return the timeline that `to_chrome_trace` wrote; events that are no spans are skipped."""
        events = trace["traceEvents"]
        streams = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
        return cls(
            tuple(
                Span(
                    stage=event["pid"],
                    stream=streams[event["pid"], event["tid"]],
                    name=event["name"],
                    task=event["args"]["task"],
                    start_s=event["ts"] / 1e6,
                    end_s=(event["ts"] + event["dur"]) / 1e6,
                )
                for event in events
                if event["ph"] == "X"
            )
        )

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
        return "\n".join([f"{_readable(self.step_s)} a step, {_readable(exposed)} exposed", *lines, legend])

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
