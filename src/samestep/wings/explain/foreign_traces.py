"""The steps of other programs, from a folder of their traces: Chrome traces of torch.profiler (Kineto), as intervals of a rank.

```
compute: kernels of a GPU, or the operations of the thread that takes the steps; sent: kernels of NCCL, or `gloo:` spans
steps:   ProfilerStep#N; without any, the whole trace is one step
```
An operation's own time is compute, without that of the operations it calls; within `Optimizer.step` it is the optimizer's. What the engine of autograd and the call of a collective
spend themselves is a wait while a collective of the rank runs, and else the host's, as is what no operation takes.

The rows are those of any step (`wings/plan/simulation/partition.py`), without predictions. A trace does not say what a group of ranks is for, so
its axis is a guess: its ranks. The n-th collective of a group on one rank is the n-th on another; it starts when the last has begun
it. Files are read one after the other, and only intervals are kept of each while its JSON is read.
"""

from __future__ import annotations

import gzip
import json
import math
import re
import sys
import zlib
from bisect import bisect
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from samestep import wings
from samestep.errors import RecordError
from samestep.output.text import align_columns
from samestep.program import recorded
from samestep.wings.explain.step_parts import StepPart
from samestep.wings.plan.simulation.partition import (
    COMPUTE,
    REST,
    ROWS,
    WAIT,
    Span,
    TimeRow,
    partition,
    row_label,
    seconds_of,
)
from samestep.wings.plan.simulation.timeline import Timeline

_WORTH = 0.05
"""Part of a step from which on waits are in the verdict."""


@dataclass(frozen=True, slots=True)
class ForeignSteps:
    """The time of another program's steps by its parts."""

    verb: ClassVar[str] = "explain"

    folder: Path
    steps: tuple[int, ...]
    rows: tuple[TimeRow, ...]
    """Mean seconds of each row, by rank."""
    step_s: float
    missing: tuple[str, ...]

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks of which there is a trace."""
        return tuple(sorted({row.stage for row in self.rows}))

    @property
    def busiest(self) -> int:
        """The rank that waits least."""
        return min(self.ranks, key=lambda rank: seconds_of(self.rows, WAIT, stage=rank))

    def _repr_html_(self) -> str | None:
        return wings.in_notebook("page", self)

    def to_record(self) -> dict[str, object]:
        """Return plain data for JSON."""
        return {
            "run": str(self.folder),
            "steps": list(self.steps),
            **self._of_rank(self.busiest),
            "ranks": [self._of_rank(rank) for rank in self.ranks],
            "verdict": self.verdict,
            "missing": list(self.missing),
        }

    def _of_rank(self, rank: int) -> dict[str, object]:
        rows = [row for row in self.rows if row.stage == rank]
        parts = [StepPart(row.name, row.axis, row.seconds, None) for row in rows if row.name != REST]
        return {
            "rank": rank,
            "step_s": sum(row.seconds for row in rows),
            "parts": [part.to_record() for part in parts],
            "rest_s": seconds_of(rows, REST),
        }

    @property
    def verdict(self) -> str:
        """The largest part of the step of the rank that waits least, and how long others wait for it, or all for each other."""
        busiest = self.busiest
        rows = [row for row in self.rows if row.stage == busiest]
        most = max(rows, key=lambda row: (row.name != REST, row.seconds))  # of the rest nothing is known
        share = most.seconds / self.step_s
        return f"{row_label(most.name, most.axis)}: {share:.0%} of a step of {self.step_s * 1e3:.4g} ms on rank {busiest}{self._waits()}"

    def _waits(self) -> str:
        """Return how long the others wait for the busiest rank: by how much they wait longer than it, since it waits for them too."""
        waits = [seconds_of(self.rows, WAIT, stage=rank) / self.step_s for rank in self.ranks]
        if max(waits) - min(waits) > _WORTH:
            return f"; others wait for rank {self.busiest}, up to {max(waits) - min(waits):.0%} of the step"
        return f"; the ranks wait for each other, up to {max(waits):.0%} of the step" if max(waits) > _WORTH else ""

    def to_text(self) -> str:
        """Return the verdict and the rows of each rank."""
        ranks = self.ranks
        labels = dict.fromkeys((row.name, row.axis) for row in self.rows)
        table = [("part, ms", *(f"rank {rank}" for rank in ranks))]
        for name, axis in labels:
            cells = [
                sum(row.seconds for row in self.rows if (row.stage, row.name, row.axis) == (rank, name, axis))
                for rank in ranks
            ]
            table.append((row_label(name, axis), *(f"{cell * 1e3:,.3f}" for cell in cells)))
        lines = [f"verdict: {self.verdict}", "", align_columns(table)]
        return "\n".join([*lines, *(f"missing: {text}" for text in self.missing)])


def is_foreign(place: Path) -> bool:
    """Return whether a place is a trace of another program, or a folder of some, and no run and no record of ours."""
    if place.is_file():
        return not place.name.endswith(".jsonl")
    is_ours = (place / recorded.FOLDER).is_dir() or (place / recorded.JOB).is_file()
    return place.is_dir() and not is_ours and not recorded.paths_in(place) and bool(trace_paths(place))


def explain_traces(place: Path, *, step: int | str | None = None) -> ForeignSteps:
    """Return where the time of the steps of another program went; of all but the first one, if none are named.

    Raises:
        RecordError: a file is no trace, or is damaged, or two are of one rank, or the step is in none of them.
        InputError: `step` names no steps.
    """
    asked = recorded.asked_steps(step)
    traces = _read(place)
    common = sorted(set.intersection(*({*trace.steps} for trace in traces.values())))
    if not common:
        raise RecordError("record-steps", f"{place}: no step is in the traces of all ranks")
    used = common[1:] or common  # the first step after a profiler has started has its cost
    if asked is not None:
        used = [number for number in common if number in asked]
    if not used:
        raise RecordError(
            "record-steps",
            f"{place} has no step {step}: steps {common[0]} to {common[-1]} are in the traces of all ranks",
        )
    total: dict[tuple[int, str, str | None], float] = defaultdict(float)
    lasted: dict[int, float] = defaultdict(float)
    starts = _starts(traces)
    for number in used:
        timeline = _timeline(traces, number, starts)
        for row in partition(timeline):
            total[row.stage, row.name, row.axis] += row.seconds / len(used)
        for rank, trace in traces.items():
            begin, end = trace.steps[number]
            lasted[rank] += (end - begin) / 1e9 / len(used)
            total[rank, REST, None] -= (timeline.step_s - (end - begin) / 1e9) / len(used)
    rows = tuple(
        TimeRow(*key, max(0.0, seconds))
        for key, seconds in sorted(total.items(), key=lambda item: (item[0][0], ROWS.index(item[0][1])))
    )
    return ForeignSteps(place, tuple(used), rows, max(lasted.values()), tuple(_missing(traces, common)))


def _read(place: Path) -> dict[int, RankTrace]:
    """Return the trace of each rank; several files of a rank, as of a profiler that runs again and again, are one."""
    traces: dict[int, RankTrace] = {}
    for path in trace_paths(place):
        rank_trace = read_trace(path, len(traces))
        known = traces.setdefault(rank_trace.rank, rank_trace)
        if known is rank_trace:
            continue
        if {*known.steps} & {*rank_trace.steps}:
            raise RecordError("record-ranks", f"{path} and {known.path} are both of rank {rank_trace.rank}")
        known.steps |= rank_trace.steps
        known.computing += rank_trace.computing
        known.sent += rank_trace.sent
        known.missing += rank_trace.missing
    return dict(sorted(traces.items()))


def _missing(traces: Mapping[int, RankTrace], steps: list[int]) -> Iterator[str]:
    """Yield what the traces lack, each once."""
    yield from dict.fromkeys(text for trace in traces.values() for text in trace.missing)
    world = max((trace.world_size or 0 for trace in traces.values()), default=0)
    absent = [rank for rank in range(world) if rank not in traces]
    if len(traces) == 1 and world != 1:
        yield "the traces of other ranks: the rank that was waited for is not known"
    elif absent:
        yield f"the trace{'s' * (len(absent) > 1)} of rank{'s' * (len(absent) > 1)} {', '.join(map(str, absent[:8]))}: their waits and lateness"
    if len(steps) == 1 and 0 not in steps:
        yield "a second step: the first one after a profiler has started has its cost"


def _starts(traces: Mapping[int, RankTrace]) -> dict[tuple[str, str, int], int]:
    """Return when the last rank has begun the n-th collective of a kind in a group, by these three."""
    starts: dict[tuple[str, str, int], int] = {}
    for trace in traces.values():
        for key, (begin, *_) in _numbered(trace):
            starts[key] = max(starts.get(key, begin), begin)
    return starts


def _numbered(trace: RankTrace) -> Iterator[tuple[tuple[str, str, int], tuple[int, int, str, str]]]:
    counts: dict[tuple[str, str], int] = defaultdict(int)
    for collective in sorted(trace.sent):
        kind, group = collective[2], collective[3]
        yield (group, kind, counts[group, kind]), collective
        counts[group, kind] += 1


def _timeline(traces: Mapping[int, RankTrace], number: int, starts: Mapping[tuple[str, str, int], int]) -> Timeline:
    parts: list[Span] = []
    for rank, trace in traces.items():
        begin, end = trace.steps[number]
        now = begin
        nothing = uncovered(
            ((start, stop) for start, stop, *_ in trace.sent), begin, end
        )  # of which the trace says nothing
        for start, stop, name in sorted(trace.computing) or [(*span, "rest:unknown") for span in nothing]:
            if stop > now and start < end:
                parts.append(
                    Span(rank, COMPUTE, name, "", (max(start, now) - begin) / 1e9, (min(stop, end) - begin) / 1e9)
                )
                now = max(now, stop)
        for key, (start, stop, kind, group) in _numbered(trace):
            if stop > begin and start < end:
                first = min(max(start, starts[key], begin), min(stop, end))
                parts.append(
                    Span(rank, group, f"{kind}:{key[2]}", "", (first - begin) / 1e9, (min(stop, end) - begin) / 1e9)
                )
    return Timeline(tuple(parts), "rank")


# -- files -------------------------------------------------------------------------------------------------------------

_STEP = re.compile(r"ProfilerStep#(\d+)")
_SENT = re.compile(r"(?:gloo|nccl|ucc|mpi):(\w+)|nccl(?:Dev)?Kernel_?([A-Za-z]+)")
_NAMES = re.compile(r".*\.json(\.gz)?", re.DOTALL)
"""Names of files that may be traces."""
_NOTHING: Mapping[str, Any] = {}
_WAITING = ("autograd::engine::evaluate_function", "c10d::", "c10d_functional::", "_c10d_functional::")
"""The begin of the names of operations whose own time is no compute."""


@dataclass(slots=True)
class RankTrace:
    """The intervals of one rank, in nanoseconds: steps, computing, and what was sent by group."""

    rank: int
    path: Path
    steps: dict[int, tuple[int, int]] = field(default_factory=dict)
    computing: list[tuple[int, int, str]] = field(default_factory=list)
    sent: list[tuple[int, int, str, str]] = field(default_factory=list)
    """Begin, end, kind and group of each collective."""
    missing: list[str] = field(default_factory=list)
    world_size: int | None = None
    """The number of ranks, if the file says it."""


def trace_paths(place: Path) -> list[Path]:
    """Return the files of a folder that may be traces by their names; a file stands for itself."""
    if place.is_file():
        return [place]
    return sorted(path for path in place.iterdir() if path.is_file() and _NAMES.fullmatch(path.name))


def read_trace(path: Path, position: int) -> RankTrace:
    """Read one rank's trace; a file that does not name its rank has that of its position.

    Raises:
        RecordError: it is no trace, or is damaged.
    """
    events: list[_TraceEvent] = []
    try:
        with gzip.open(path) if path.name.endswith(".gz") else path.open("rb") as file:
            record = json.load(file, object_hook=lambda value: _take(value, events))
        if isinstance(record, dict) and isinstance(record.get("traceEvents"), list):
            return _of_kineto(record, events, path, position)
    except (OSError, EOFError, json.JSONDecodeError, UnicodeDecodeError, RecursionError, zlib.error) as error:
        raise RecordError(
            "record-unreadable", f"{path} is not a trace, or is cut off: {' '.join(str(error).split())[:120]}"
        ) from None
    except (TypeError, ValueError, KeyError, AttributeError, IndexError) as error:
        raise RecordError("record-unreadable", f"{path} is damaged: {type(error).__name__}: {error}") from None
    raise RecordError("record-unreadable", f"{path} is not a trace of torch.profiler")


@dataclass(frozen=True, slots=True)
class _TraceEvent:
    """An interval of a trace of torch.profiler, as far as it is needed."""

    category: str
    name: str
    thread: Any
    begin_ns: int
    end_ns: int
    """After the beginning of the trace's clock."""
    collective: Mapping[str, Any]
    """The arguments of a collective; empty for others."""


def _take(value: dict[str, Any], events: list[_TraceEvent]) -> dict[str, Any] | None:
    """Add what is needed of an event as it stands in a trace, if it is an interval; return what is no event."""
    if "ph" not in value:
        return value
    if value["ph"] == "X" and "dur" in value:
        begin, arguments = round(float(value["ts"]) * 1e3), value.get("args") or {}
        category, name = sys.intern(str(value.get("cat"))), sys.intern(str(value["name"]))
        collective = arguments if "Collective name" in arguments or "Process Group Ranks" in arguments else _NOTHING
        end = begin + round(float(value["dur"]) * 1e3)
        events.append(_TraceEvent(category, name, value.get("tid"), begin, end, collective))
    return None


def _rank_of(path: Path, position: int) -> int:
    numbers = re.findall(r"rank[_-]?(\d+)|_(\d+)\.json", path.name)
    return int(next(filter(None, numbers[-1]))) if numbers else position


def _of_kineto(record: Mapping[str, Any], events: Sequence[_TraceEvent], path: Path, position: int) -> RankTrace:
    about = record.get("distributedInfo") or {}
    trace = RankTrace(int(about.get("rank", _rank_of(path, position))), path, world_size=about.get("world_size"))
    base = int(record.get("baseTimeNanoseconds", 0))
    groups = [group["ranks"] for group in about.get("pg_config", ()) if isinstance(group.get("ranks"), list)]

    def times(event: _TraceEvent) -> tuple[int, int]:
        return base + event.begin_ns, base + event.end_ns

    trace.steps = {
        int(named[1]): times(event) for event in events if (named := _STEP.fullmatch(event.name)) and _is_note(event)
    }
    has_kernels = any(event.category == "kernel" for event in events)
    main = _main_thread(events)
    operations = (
        [] if has_kernels else [event for event in events if event.category == "cpu_op" and event.thread == main]
    )
    noted = [
        event for event in events if event.category == ("gpu_user_annotation" if has_kernels else "user_annotation")
    ]
    updates = sorted(
        times(event)
        for event in noted
        if event.name.startswith("Optimizer.step#") and (has_kernels or event.thread == main)
    )
    for name, begin, end in own_times([(*times(event), event.name) for event in operations]):
        if not name.startswith(_WAITING):
            trace.computing.append((begin, end, _operation(begin, updates)))
    for event in events:
        args = event.collective
        sent = _SENT.match(event.name)
        is_kernel = event.category in ("kernel", "gpu_memcpy", "gpu_memset")
        if (sent or "Collective name" in args) and (is_kernel or not has_kernels) and event.category != "cpu_op":
            kind = str(args.get("Collective name") or next(filter(None, sent.groups() if sent else ()), "collective"))
            trace.sent.append((*times(event), kind, _group(args, groups)))
        elif is_kernel:
            begin, end = times(event)
            trace.computing.append((begin, end, _operation(begin, updates)))
        elif event.category == "user_annotation" and event.thread == main and "enumerate(DataLoader)" in event.name:
            trace.computing.append((*times(event), "data:loader"))
    _name_what_is_missing(trace, [times(event) for event in events], has_groups=bool(groups))
    if not has_kernels:
        covered = [(span[0], span[1]) for span in trace.computing] + [(span[0], span[1]) for span in trace.sent]
        for first, last in trace.steps.values():
            trace.computing += [
                (begin, end, "host:between operations") for begin, end in uncovered(covered, first, last)
            ]
    return trace


def own_times(calls: Iterable[tuple[int, int, str]]) -> Iterator[tuple[str, int, int]]:
    """Yield the intervals, none of them empty, in which nested calls, each given by its begin and end, run and none that they have made does."""
    stack: list[tuple[int, str]] = []
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


def uncovered(intervals: Iterable[tuple[int, int]], begin: int, end: int) -> Iterator[tuple[int, int]]:
    """Yield the runs of instants between two times that are in no interval."""
    for start, stop in sorted(intervals):
        if start >= end:
            break
        if start > begin:
            yield begin, start
        begin = max(begin, stop)
    if begin < end:
        yield begin, end


def _is_note(event: _TraceEvent) -> bool:
    return event.category == "user_annotation"


def _operation(begin: int, updates: Sequence[tuple[int, int]]) -> str:
    """Return the name of an operation that begins at a time, of the optimizer if that is in one of its updates."""
    last = bisect(updates, (begin, math.inf)) - 1
    return "update:operations" if last >= 0 and begin < updates[last][1] else "forward:operations"


def _main_thread(events: Sequence[_TraceEvent]) -> Any:
    """Return the thread that takes the steps, or else the one with most operations."""
    threads: dict[Any, int] = defaultdict(int)
    for event in events:
        is_step = _is_note(event) and _STEP.fullmatch(event.name) is not None
        threads[event.thread] += 10**9 if is_step else int(event.category == "cpu_op")
    return max(threads, key=lambda tid: threads[tid], default=None)


def _name_what_is_missing(trace: RankTrace, ends: Sequence[tuple[int, int]], *, has_groups: bool) -> None:
    """Note what a trace lacks; one without steps is a single step."""
    if not trace.steps:
        if not ends:
            raise ValueError("it has no events")
        trace.steps[0] = min(begin for begin, _ in ends), max(end for _, end in ends)
        trace.missing.append("ProfilerStep: without prof.step() the whole trace is taken as one step")
    if not trace.sent:
        trace.missing.append("collectives: no span of NCCL or gloo is in the trace")
    elif not has_groups and not any(group.startswith("ranks ") for *_, group in trace.sent):
        trace.missing.append("ranks of groups: the axes of collectives cannot be guessed")


def _group(arguments: Mapping[str, Any], groups: Sequence[Sequence[int]]) -> str:
    ranks = arguments.get("Process Group Ranks")
    if isinstance(ranks, str):
        ranks = re.findall(r"\d+", ranks)
    if not ranks and len(groups) == 1:
        ranks = groups[0]
    return f"ranks {_in_short([int(rank) for rank in ranks])} (guessed)" if ranks else "a group (guessed)"


def _in_short(ranks: Sequence[int]) -> str:
    """Return ranks as text: of many at equal distances the first, the second and the last."""
    step = ranks[1] - ranks[0] if len(ranks) > 1 else 1
    if len(ranks) > 3 and step > 0 and [*ranks] == [*range(ranks[0], ranks[-1] + 1, step)]:
        return f"{ranks[0]}-{ranks[-1]}" if step == 1 else f"{ranks[0]},{ranks[1]}..{ranks[-1]}"
    return ",".join(map(str, ranks))
