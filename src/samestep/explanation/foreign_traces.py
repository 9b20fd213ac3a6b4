"""Traces of other programs: a folder of torch.profiler's Chrome traces (Kineto), or of NCCL's flight recorder as JSON.

```
Kineto      compute: kernels of a GPU, or the operations of the thread that takes the steps; sent: kernels of NCCL, or `gloo:` spans
            steps:   ProfilerStep#N; without any, the whole trace is one step
recorder    sent alone, by the times at which each rank created and completed it
```
The rows are those of any step (`simulation/partition.py`), without predictions. A trace does not say what a group of ranks is for, so
its axis is a guess: its ranks. The n-th collective of a group on one rank is the n-th on another; it starts when the last has begun
it. Files are read one after the other, and only intervals are kept of each.
"""

from __future__ import annotations

import gzip
import json
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from samestep.errors import RecordError
from samestep.output.text_table import align_columns
from samestep.simulation.partition import REST, WAIT, TimeRow, partition, seconds_of
from samestep.simulation.spans import COMPUTE, Span
from samestep.simulation.timeline import Timeline

_STEP = re.compile(r"ProfilerStep#(\d+)")
_SENT = re.compile(r"(?:gloo|nccl|ucc|mpi):(\w+)|nccl(?:Dev)?Kernel_?([A-Za-z]+)")
_PICKLE = b"\x80"


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


@dataclass(frozen=True, slots=True)
class ForeignSteps:
    """The time of another program's steps by its parts."""

    folder: Path
    steps: tuple[int, ...]
    rows: tuple[TimeRow, ...]
    """Mean seconds of each row, by rank."""
    step_s: float
    missing: tuple[str, ...]

    def to_record(self) -> dict[str, object]:
        """Return plain data for JSON."""
        ranks = sorted({row.stage for row in self.rows})
        return {
            "run": str(self.folder),
            "steps": list(self.steps),
            "step_s": self.step_s,
            "ranks": [
                {
                    "rank": rank,
                    "parts": [
                        {"name": row.name, "axis": row.axis, "predicted_s": None, "measured_s": row.seconds}
                        for row in self.rows
                        if row.stage == rank and row.name != REST
                    ],
                    "rest_s": seconds_of(self.rows, REST, stage=rank),
                }
                for rank in ranks
            ],
            "verdict": self.verdict,
            "missing": list(self.missing),
        }

    @property
    def verdict(self) -> str:
        """The largest part of the step of the rank that waits least, and who is waited for."""
        ranks = sorted({row.stage for row in self.rows})
        busiest = min(ranks, key=lambda rank: seconds_of(self.rows, WAIT, stage=rank))
        most = max((row for row in self.rows if row.stage == busiest), key=lambda row: row.seconds)
        waits = max(seconds_of(self.rows, WAIT, stage=rank) for rank in ranks)
        late = (
            f"; others wait for rank {busiest}, up to {waits / self.step_s:.0%} of the step"
            if waits > 0.05 * self.step_s
            else ""
        )
        label = f"{most.name} {most.axis}" if most.axis else most.name
        return (
            f"{label}: {most.seconds / self.step_s:.0%} of a step of {self.step_s * 1e3:.4g} ms on rank {busiest}{late}"
        )

    def to_text(self) -> str:
        """Return the verdict and the rows of each rank."""
        ranks = sorted({row.stage for row in self.rows})
        labels = dict.fromkeys((row.name, row.axis) for row in self.rows)
        table = [("part, ms", *(f"rank {rank}" for rank in ranks))]
        for name, axis in labels:
            cells = [
                sum(row.seconds for row in self.rows if (row.stage, row.name, row.axis) == (rank, name, axis))
                for rank in ranks
            ]
            table.append((f"{name} {axis}" if axis else name, *(f"{cell * 1e3:,.3f}" for cell in cells)))
        lines = [f"verdict: {self.verdict}", "", align_columns(table)]
        return "\n".join([*lines, *(f"missing: {text}" for text in self.missing)])


def is_foreign(folder: Path) -> bool:
    """Return whether a folder has traces of other programs and no record of ours."""
    return (
        folder.is_dir()
        and not (folder / "record").is_dir()
        and not any(folder.glob("steps-*.rank*.jsonl"))
        and bool(_paths(folder))
    )


def explain_traces(folder: Path) -> ForeignSteps:
    """Return where the time of the steps of another program went.

    Raises:
        RecordError: a file is no trace, or is damaged, or two are of one rank.
    """
    traces: dict[int, RankTrace] = {}
    for path in _paths(folder):
        one = read_trace(path, len(traces))
        if one.rank in traces:
            raise RecordError(f"{path} and {traces[one.rank].path} are both of rank {one.rank}")
        traces[one.rank] = one
    common = sorted(set.intersection(*({*one.steps} for one in traces.values())))
    if not common:
        raise RecordError(f"{folder}: no step is in the traces of all ranks")
    used = common[1:] or common  # the first step after a profiler has started has its cost
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
        for key, seconds in sorted(total.items(), key=lambda item: (item[0][0], item[0][1]))
    )
    missing = [*(text for trace in traces.values() for text in trace.missing)]
    if len(traces) == 1:
        missing.append("the traces of other ranks: who was waited for cannot be said")
    return ForeignSteps(folder, tuple(used), rows, max(lasted.values()), tuple(dict.fromkeys(missing)))


def _paths(folder: Path) -> list[Path]:
    return sorted(
        path
        for path in folder.iterdir()
        if path.is_file() and path.name.endswith((".json", ".json.gz", ".pickle", ".pkl"))
    )


def read_trace(path: Path, position: int) -> RankTrace:
    """Read one rank's trace; a file that does not name its rank has that of its position.

    Raises:
        RecordError: it is no trace, or is damaged.
    """
    try:
        raw = path.read_bytes()
        if raw[:1] == _PICKLE:
            raise RecordError(f"{path} is a pickle, which can run code and is not read: a flight recorder's JSON works")
        text = gzip.decompress(raw) if path.name.endswith(".gz") else raw
        found = json.loads(text)
    except RecordError:
        raise
    except (OSError, EOFError, ValueError) as error:
        raise RecordError(f"{path} is no trace, or is cut off: {' '.join(str(error).split())[:120]}") from None
    try:
        if isinstance(found, dict) and isinstance(found.get("traceEvents"), list):
            return _of_kineto(found, path, position)
        if isinstance(found, dict) and isinstance(found.get("entries"), list):
            return _of_flight_recorder(found, path, position)
    except (TypeError, ValueError, KeyError, AttributeError, IndexError) as error:
        raise RecordError(f"{path} is damaged: {type(error).__name__}: {error}") from None
    raise RecordError(f"{path} is no trace of torch.profiler and none of NCCL's flight recorder")


def _rank_of(path: Path, position: int) -> int:
    numbers = re.findall(r"rank[_-]?(\d+)|_(\d+)\.json", path.name)
    return int(next(filter(None, numbers[-1]))) if numbers else position


def _of_kineto(found: Mapping[str, Any], path: Path, position: int) -> RankTrace:
    about = found.get("distributedInfo") or {}
    trace = RankTrace(int(about.get("rank", _rank_of(path, position))), path)
    base = int(found.get("baseTimeNanoseconds", 0))
    events = [event for event in found["traceEvents"] if event.get("ph") == "X" and "dur" in event]
    groups = [group["ranks"] for group in about.get("pg_config", ()) if isinstance(group.get("ranks"), list)]

    def times(event: Mapping[str, Any]) -> tuple[int, int]:
        begin = base + round(float(event["ts"]) * 1e3)
        return begin, begin + round(float(event["dur"]) * 1e3)

    trace.steps = {
        int(named[1]): times(event)
        for event in events
        if (named := _STEP.fullmatch(str(event["name"]))) and _is_note(event)
    }
    has_kernels = any(event.get("cat") == "kernel" for event in events)
    main = _main_thread(events)
    for event in events:
        given = event.get("args") or {}
        sent = _SENT.match(event["name"])
        is_kernel = event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")
        if (sent or "Collective name" in given) and (is_kernel or not has_kernels) and event.get("cat") != "cpu_op":
            kind = str(given.get("Collective name") or next(filter(None, sent.groups() if sent else ()), "collective"))
            trace.sent.append((*times(event), kind, _group(given, groups)))
        elif is_kernel or (not has_kernels and event.get("cat") == "cpu_op" and event["tid"] == main):
            trace.computing.append((*times(event), "forward:operations"))
        elif (
            event.get("cat") == "user_annotation" and event["tid"] == main and "enumerate(DataLoader)" in event["name"]
        ):
            trace.computing.append((*times(event), "data:loader"))
    _name_what_is_missing(trace, [times(event) for event in events], has_groups=bool(groups))
    return trace


def _is_note(event: Mapping[str, Any]) -> bool:
    return event.get("cat") == "user_annotation"


def _main_thread(events: Sequence[Mapping[str, Any]]) -> Any:
    """Return the thread that takes the steps, or else the one with most operations."""
    threads: dict[Any, int] = defaultdict(int)
    for event in events:
        is_step = _is_note(event) and _STEP.fullmatch(str(event["name"])) is not None
        threads[event.get("tid")] += 10**9 if is_step else int(event.get("cat") == "cpu_op")
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
    elif not has_groups and not any("," in group for *_, group in trace.sent):
        trace.missing.append("ranks of groups: the axes of collectives cannot be guessed")


def _group(given: Mapping[str, Any], groups: Sequence[Sequence[int]]) -> str:
    ranks = given.get("Process Group Ranks")
    if isinstance(ranks, str):
        ranks = re.findall(r"\d+", ranks)
    if not ranks and len(groups) == 1:
        ranks = groups[0]
    return f"ranks {','.join(map(str, ranks))} (guessed)" if ranks else "a group (guessed)"


def _of_flight_recorder(found: Mapping[str, Any], path: Path, position: int) -> RankTrace:
    trace = RankTrace(int(found.get("rank", _rank_of(path, position))), path)
    configured = found.get("pg_config") or {}
    for entry in found["entries"]:
        name, began = str(entry.get("profiling_name", "nccl:collective")), entry.get("time_created_ns")
        ended = entry.get("time_discovered_completed_ns")
        if began is None:
            raise ValueError("an entry without time_created_ns")
        if ended is None:
            trace.missing.append(
                f"the end of {name} number {entry.get('collective_seq_id', '?')}: it had not completed"
            )
            continue
        group = configured.get(str((entry.get("process_group") or ["?"])[0]), {})
        trace.sent.append(
            (
                int(began),
                int(ended),
                name.partition(":")[2] or name,
                _group({"Process Group Ranks": group.get("ranks")}, ()),
            )
        )
    if not trace.sent:
        raise ValueError("it has no entry that has completed")
    trace.steps[0] = min(begin for begin, *_ in trace.sent), max(end for _, end, *_ in trace.sent)
    trace.missing.append("compute and steps: a flight recorder has collectives alone")
    return trace


def _starts(traces: Mapping[int, RankTrace]) -> dict[tuple[str, str, int], int]:
    """Return when the last rank has begun the n-th collective of a kind in a group, by these three."""
    found: dict[tuple[str, str, int], int] = {}
    for trace in traces.values():
        for key, (begin, *_) in _numbered(trace):
            found[key] = max(found.get(key, begin), begin)
    return found


def _numbered(trace: RankTrace) -> Iterator[tuple[tuple[str, str, int], tuple[int, int, str, str]]]:
    counts: dict[tuple[str, str], int] = defaultdict(int)
    for one in sorted(trace.sent):
        kind, group = one[2], one[3]
        yield (group, kind, counts[group, kind]), one
        counts[group, kind] += 1


def _unknown(trace: RankTrace, begin: int, end: int) -> Iterator[tuple[int, int, str]]:
    """Yield the time outside of collectives, of which a trace without compute says nothing."""
    now = begin
    for start, stop, *_ in sorted(trace.sent):
        if start > now:
            yield now, min(start, end), "rest:unknown"
        now = max(now, stop)
    if now < end:
        yield now, end, "rest:unknown"


def _timeline(traces: Mapping[int, RankTrace], number: int, starts: Mapping[tuple[str, str, int], int]) -> Timeline:
    parts: list[Span] = []
    for rank, trace in traces.items():
        begin, end = trace.steps[number]
        now = begin
        for start, stop, name in sorted(trace.computing or _unknown(trace, begin, end)):
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
