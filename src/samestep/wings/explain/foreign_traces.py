"""The steps of other programs, from a folder of their traces (`trace_files.py`).

The rows are those of any step (`wings/plan/simulation/partition.py`), without predictions. A trace does not say what a group of ranks is for, so
its axis is a guess: its ranks. The n-th collective of a group on one rank is the n-th on another; it starts when the last has begun
it. Files are read one after the other, and only intervals are kept of each.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from samestep import wings
from samestep.errors import RecordError
from samestep.output.text import align_columns
from samestep.program import recorded
from samestep.wings.explain.step_parts import StepPart
from samestep.wings.explain.trace_files import RankTrace, read_trace, trace_paths, uncovered
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

    folder: Path
    steps: tuple[int, ...]
    rows: tuple[TimeRow, ...]
    """Mean seconds of each row, by rank."""
    step_s: float
    missing: tuple[str, ...]
    last: Timeline
    """The last of the steps, to look at."""

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks of which there is a trace."""
        return tuple(sorted({row.stage for row in self.rows}))

    @property
    def busiest(self) -> int:
        """The rank that waits least."""
        return min(self.ranks, key=lambda rank: seconds_of(self.rows, WAIT, stage=rank))

    def _repr_html_(self) -> str | None:
        return wings.in_notebook("foreign_page", self)

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
    return ForeignSteps(place, tuple(used), rows, max(lasted.values()), tuple(_missing(traces, common)), timeline)


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
        yield "the traces of other ranks: who was waited for cannot be said"
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
