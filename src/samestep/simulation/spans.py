"""Spans: ops with a start and an end; and lines, runs of ops that are played at once."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import NamedTuple

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
    launched_s: tuple[float, ...] = ()
    """Second at which the host has launched each op, from when it begins with the first; empty where it does not run ahead."""
    first_s: float = 0.0
    """Seconds in which the host launches the first kernel of an op."""
    lead_s: float = math.inf
    """By how many seconds the host may begin later than the device is free, without making an op wait; less than 0 by how many
    it has to begin earlier."""

    def delayed(self, ends_s: tuple[float, ...], host_s: float) -> tuple[float, ...]:
        """Return when each op ends if the host begins with the first one so many seconds after the device is free.

        No op starts before its first kernel is launched, nor ends before its last one is. `ends_s` are the ends of ops that wait for
        no launch.
        """
        found, before_s, now_s, launched_s = list[float](), 0.0, 0.0, 0.0
        for end_s, next_s in zip(ends_s, self.launched_s, strict=True):
            took_s = end_s - before_s
            first_s = host_s + min(launched_s + self.first_s, next_s)
            now_s = max(max(now_s, first_s) + took_s, host_s + next_s)
            before_s, launched_s = end_s, next_s
            found.append(now_s)
        return tuple(found)


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
