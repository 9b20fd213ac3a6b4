"""The files of other programs' traces: Chrome traces of torch.profiler (Kineto), and NCCL's flight recorder, as intervals of a rank.

```
Kineto      compute: kernels of a GPU, or the operations of the thread that takes the steps; sent: kernels of NCCL, or `gloo:` spans
            steps:   ProfilerStep#N; without any, the whole trace is one step
recorder    sent alone, by the times at which each rank created and completed it; JSON, or a pickle of plain data
```
An operation's own time is compute, without that of the operations it calls; within `Optimizer.step` it is the optimizer's. What the engine of autograd and the call of a collective
spend themselves is a wait while a collective of the rank runs, and else the host's, as is what no operation takes.
Of a trace's events, which are most of it, only intervals are kept while its JSON is read.
"""

from __future__ import annotations

import gzip
import io
import json
import math
import pickle
import re
import sys
import zlib
from bisect import bisect
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from samestep.errors import RecordError
from samestep.wings.explain.step_kernels import own_times

_STEP = re.compile(r"ProfilerStep#(\d+)")
_SENT = re.compile(r"(?:gloo|nccl|ucc|mpi):(\w+)|nccl(?:Dev)?Kernel_?([A-Za-z]+)")
_NAMES = re.compile(r".*\.(json|json\.gz|pickle|pkl)|.*trace_rank_?\d+", re.DOTALL)
"""Names of files that may be traces; the flight recorder ends those of its pickles with the rank."""
_PICKLE = b"\x80"
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
            if file.peek(1)[:1] == _PICKLE:
                plain_data = _plain_data(path, file)
            else:
                plain_data = json.load(file, object_hook=lambda value: _take(value, events))
                plain_data = plain_data if isinstance(plain_data, dict) else {}
    except RecordError:
        raise
    except (OSError, EOFError, ValueError, RecursionError, zlib.error) as error:
        raise RecordError(
            "record-unreadable", f"{path} is not a trace, or is cut off: {' '.join(str(error).split())[:120]}"
        ) from None
    except (TypeError, KeyError, AttributeError) as error:
        raise RecordError("record-unreadable", f"{path} is damaged: {type(error).__name__}: {error}") from None
    try:
        if isinstance(plain_data.get("traceEvents"), list):
            return _of_kineto(plain_data, events, path, position)
        if isinstance(plain_data.get("entries"), list):
            return _of_flight_recorder(plain_data, path, position)
    except (TypeError, ValueError, KeyError, AttributeError, IndexError) as error:
        raise RecordError("record-unreadable", f"{path} is damaged: {type(error).__name__}: {error}") from None
    raise RecordError("record-unreadable", f"{path} is not a trace of torch.profiler or NCCL's flight recorder")


@dataclass(frozen=True, slots=True)
class _TraceEvent:
    """An interval of a trace of torch.profiler, as far as it is needed."""

    category: str
    name: str
    thread: Any
    begin_ns: int
    end_ns: int
    """After the beginning of the trace's clock."""
    given: Mapping[str, Any]
    """The arguments of a collective; empty for others."""


def _take(value: dict[str, Any], events: list[_TraceEvent]) -> dict[str, Any] | None:
    """Add what is needed of an event as it stands in a trace, if it is an interval; return what is no event."""
    if "ph" not in value:
        return value
    if value["ph"] == "X" and "dur" in value:
        begin, arguments = round(float(value["ts"]) * 1e3), value.get("args") or {}
        category, name = sys.intern(str(value.get("cat"))), sys.intern(str(value["name"]))
        kept = arguments if "Collective name" in arguments or "Process Group Ranks" in arguments else _NOTHING
        end = begin + round(float(value["dur"]) * 1e3)
        events.append(_TraceEvent(category, name, value.get("tid"), begin, end, kept))
    return None


class _PlainUnpickler(pickle.Unpickler):
    """Reads dicts, lists, numbers and text: no name of any module, without which a pickle can call nothing."""

    def find_class(self, module: str, name: str) -> Any:
        """Refuse the name of a module.

        Raises:
            pickle.UnpicklingError: always.
        """
        raise pickle.UnpicklingError(f"{module}.{name}")


def _plain_data(path: Path, file: io.BufferedReader | gzip.GzipFile) -> Mapping[str, Any]:
    """Return what a pickle of NCCL's flight recorder holds."""
    try:
        plain_data = _PlainUnpickler(file).load()
    except Exception:
        plain_data = None
    if not (isinstance(plain_data, dict) and isinstance(plain_data.get("entries"), list)):
        raise RecordError(
            "record-unreadable",
            f"{path} is a pickle, which can run code and is not read, unless it is the plain data of NCCL's flight recorder",
        )
    return plain_data


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
        args = event.given
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


def _of_flight_recorder(record: Mapping[str, Any], path: Path, position: int) -> RankTrace:
    trace = RankTrace(int(record.get("rank", _rank_of(path, position))), path)
    configured = record.get("pg_config") or {}
    for entry in record["entries"]:
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
