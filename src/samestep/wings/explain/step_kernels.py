"""The kernels of a measured step by block: which kernels of a GPU, or operations of torch, take the time of each forward and backward.

A kernel belongs to the op in which the host has issued it: the innermost one at that time, as everywhere (`measured_step.segments`).
An operation's seconds are its own, without those of the operations that it has called, and divided where the op changes while it runs,
so that the operations of an op add up to at most the op.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, TypeVar

from samestep.program.recorded import Kernel, RankRecord, RecordedStep, StepKernels, kernel_path, read_kernels
from samestep.wings.explain.measured_step import Segment, segments

T = TypeVar("T")
_MOST_OPS, _MOST_KERNELS = 8, 3
"""Numbers of ops, and of kernels of each, that are printed."""


@dataclass(frozen=True, slots=True)
class KernelRow:
    """One kernel in one op of a rank, as means over the steps."""

    op: str
    kernel: str
    calls: float
    seconds: float

    def to_record(self) -> dict[str, object]:
        """Return plain data for JSON."""
        return {"op": self.op, "kernel": self.kernel, "calls": self.calls, "self_s": self.seconds}


@dataclass(frozen=True, slots=True)
class RankKernels:
    """The kernels of a rank: by op, the op with most seconds first, and within it the kernel with most."""

    rank: int
    rows: tuple[KernelRow, ...]
    last: StepKernels
    """Those of the last step, to look at."""

    @property
    def by_op(self) -> list[tuple[str, list[KernelRow]]]:
        """The rows of each op."""
        return [(op, [*rows]) for op, rows in groupby(self.rows, lambda row: row.op)]

    def to_lines(self) -> list[str]:
        """Return the ops with most seconds, each with its largest kernels."""
        shown, lines = self.by_op[:_MOST_OPS], []
        width = max(len(op) for op, _ in shown)
        for op, rows in shown:
            largest = [f"{row.kernel[:60]} {row.seconds * 1e3:,.3f} ({row.calls:g})" for row in rows[:_MOST_KERNELS]]
            lines.append(f"{op:{width}}  {seconds_of(rows) * 1e3:>10,.3f}  {', '.join(largest)}")
        left = len(self.by_op) - len(shown)
        more = [f"and {left} ops more, which --json and --html have"] if left else []
        head = f"kernels of rank {self.rank}: own ms of each op, and of its largest kernels (calls)"
        return ["", head, *lines, *more]

    def to_chrome_events(self, tid: int) -> list[dict[str, Any]]:
        """Return the kernels of the last step as events of one thread of a Chrome trace."""
        names, thread = self.last.names, {"name": f"rank {self.rank} kernels"}
        return [{"ph": "M", "name": "thread_name", "pid": 0, "tid": tid, "args": thread}] + [
            {
                "ph": "X",
                "name": names[kernel.name],
                "cat": "kernel",
                "pid": 0,
                "tid": tid,
                "ts": kernel.begin / 1e3,
                "dur": (kernel.end - kernel.begin) / 1e3,
                "args": {"self_us": kernel.own / 1e3},
            }
            for kernel in self.last.kernels
        ]


def seconds_of(rows: Iterable[KernelRow]) -> float:
    """Return the seconds of some rows."""
    return sum(row.seconds for row in rows)


def kernels_of(records: Mapping[int, RankRecord], steps: Sequence[int]) -> tuple[dict[int, RankKernels], list[str]]:
    """Return the kernels of each rank that has recorded some, and what is missing.

    Raises:
        RecordError: a file is damaged.
    """
    rank_kernels: dict[int, RankKernels] = {}
    missing: list[str] = []
    for rank, record in records.items():
        kernels, why = read_kernels(kernel_path(record.path))
        if why:
            missing.append(f"the kernels of rank {rank}: {why}")
        seen = [step for step in steps if step in kernels]
        if seen:
            rows = _rows([(record.steps[step], kernels[step]) for step in seen])
            rank_kernels[rank] = RankKernels(rank, rows, kernels[seen[-1]])
    return rank_kernels, missing


def _rows(steps: Sequence[tuple[RecordedStep, StepKernels]]) -> tuple[KernelRow, ...]:
    """Return the rows of some steps of a rank, as means."""
    calls: dict[tuple[str, str], float] = defaultdict(float)
    seconds: dict[tuple[str, str], float] = defaultdict(float)
    of_op: dict[str, float] = defaultdict(float)
    for step, kernels in steps:
        runs = [*segments(dataclasses.replace(step, events=kernels.events) if kernels.events else step, ())]
        begins = [run.begin for run in runs]
        for kernel in kernels.kernels:
            calls[_op_at(runs, begins, kernel.issued), kernels.names[kernel.name]] += 1 / len(steps)
        for kernel, op, lasted in _shares(kernels, runs, begins):
            seconds[op, kernels.names[kernel.name]] += lasted / 1e9 / len(steps)
            of_op[op] += lasted / 1e9 / len(steps)
    rows = [KernelRow(*key, calls.get(key, 0.0), lasted) for key, lasted in seconds.items()]
    return tuple(sorted(rows, key=lambda row: (-of_op[row.op], row.op, -row.seconds, row.kernel)))


def _shares(kernels: StepKernels, runs: Sequence[Segment], begins: Sequence[int]) -> Iterator[tuple[Kernel, str, int]]:
    """Yield the nanoseconds of each kernel that belong to an op."""
    if kernels.events:  # a GPU runs them later than the host is at the op
        for kernel in kernels.kernels:
            yield kernel, _op_at(runs, begins, kernel.issued), kernel.own
        return
    for kernel, begin, end in own_times((kernel.begin, kernel.end, kernel) for kernel in kernels.kernels):
        for op, lasted in _divided(runs, begins, begin, end):
            yield kernel, op, lasted


def own_times(calls: Iterable[tuple[int, int, T]]) -> Iterator[tuple[T, int, int]]:
    """Yield the intervals, none of them empty, in which nested calls, each given by its begin and end, run and none that they have made does."""
    stack: list[tuple[int, T]] = []
    now = 0
    for begin, end, call in sorted(calls, key=lambda call: (call[0], -call[1])):
        while stack and stack[-1][0] <= begin:
            stop, outer = stack.pop()
            if stop > now:
                yield outer, now, stop
            now = max(now, stop)
        if stack and begin > now:
            yield stack[-1][1], now, begin
        stack.append((end, call))
        now = max(now, begin)
    while stack:
        stop, outer = stack.pop()
        if stop > now:
            yield outer, now, stop
        now = max(now, stop)


def _op_at(runs: Sequence[Segment], begins: Sequence[int], time: int) -> str:
    """Return the op of the host at a time."""
    return runs[max(0, bisect.bisect_right(begins, time) - 1)].name


def _divided(runs: Sequence[Segment], begins: Sequence[int], begin: int, end: int) -> Iterator[tuple[str, int]]:
    """Yield the ops of the host between two times, each with its nanoseconds."""
    place = max(0, bisect.bisect_right(begins, begin) - 1)
    while begin < end and place < len(runs):
        stop = min(end, runs[place].end)
        if stop > begin:
            yield runs[place].name, stop - begin
            begin = stop
        place += 1
