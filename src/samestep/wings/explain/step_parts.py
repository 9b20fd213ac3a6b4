"""The parts of the measured steps of a run, by rank and for the busiest rank, each held against the prediction; and who was waited for.

The rows of every step are those of `wings/plan/simulation/partition.py`, as of a played one, and add up to the seconds from a step's begin to
that of the next. Steps are averaged. A wait is charged to the rank that entered the collective last, and to what it did before. A
wait that is shorter than twice the interval of the clocks is charged to nobody.

By how much the clocks of hosts differ follows from what a collective cannot do: nobody leaves it before its last rank has entered it.
With o the offset of clock b to clock a, a rank there and a rank here:

    left(a) >= entered(b) + o   and   left(b) + o >= entered(a)        so  entered(a) - left(b)  <=  o  <=  left(a) - entered(b)

The intervals of all collectives are intersected. Clocks of machines drift apart by less than `MOST_DRIFT`, so an interval of another
step is widened by that, times the time between. Of several clocks the intervals follow along the shortest paths. Ranks with the same
clock need none.
"""

from __future__ import annotations

import itertools
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from samestep.program.ops import OpKind
from samestep.program.recorded import RankRecord
from samestep.wings.explain.measured_step import MeasuredStep, SentByRank, measured_step, meetings_of, sent_by
from samestep.wings.plan.simulation.partition import (
    BUBBLE,
    IMBALANCE,
    REST,
    ROWS,
    WAIT,
    Key,
    hidden_s,
    partition,
    row_label,
)
from samestep.wings.plan.simulation.simulate import Prediction
from samestep.wings.plan.simulation.timeline import Timeline

MOST_DRIFT = 1e-4
"""The largest difference of the rates of two clocks."""


@dataclass(frozen=True, slots=True)
class StepPart:
    """One part of a step, in seconds; without a matching hardware profile nothing is predicted."""

    name: str
    axis: str | None
    measured_s: float
    predicted_s: float | None

    @property
    def label(self) -> str:
        """The name with its axis, as it is shown."""
        return row_label(self.name, self.axis)

    def to_record(self) -> dict[str, object]:
        """Return plain data for JSON."""
        return {"name": self.name, "axis": self.axis, "predicted_s": self.predicted_s, "measured_s": self.measured_s}


@dataclass(frozen=True, slots=True)
class Charge:
    """Seconds of a step for which others have waited for a rank, and what it did before it came."""

    rank: int
    doing: str
    axis: str | None
    """Axis of the collective that it entered last; None of a bubble."""
    seconds: float
    waiting: int
    """The number of ranks that waited."""


@dataclass(frozen=True, slots=True)
class MeasuredSteps:
    """Some steps as the records of all ranks show them, averaged."""

    steps: tuple[int, ...]
    records: Mapping[int, RankRecord]
    rows: Mapping[int, Mapping[Key, float]]
    """Seconds of each row, by rank."""
    lasted_s: Mapping[int, float]
    cpu_s: Mapping[int, tuple[float, ...]]
    """Processor seconds of each step, by rank."""
    queued_s: Mapping[int, tuple[float | None, ...]]
    """Seconds of each step for which the rank wanted a processor and had none, by rank; None where the system does not say."""
    others_queued_s: Mapping[int, tuple[float, ...]]
    """The same of that other thread of the rank, such as one that sends, which waited most; 0 where the system does not say."""
    hidden: Mapping[int, Mapping[str, float]]
    """Seconds of communication that ran while the rank computed, by axis."""
    charges: tuple[Charge, ...]
    clocks: Mapping[str, _ClockOffset]
    last: MeasuredStep
    """The last of the steps, to look at."""
    timelines: Mapping[int, Timeline]
    """Each of the steps."""
    missing: tuple[str, ...]
    """What the records lack."""

    @property
    def step_s(self) -> float:
        """Mean seconds of a step."""
        return max(self.lasted_s.values())

    @property
    def busiest(self) -> int:
        """The rank that waits least for others: its work decides how long the step is."""

        def waits_s(rank: int) -> float:
            return sum(seconds for (name, _), seconds in self.rows[rank].items() if name in (WAIT, BUBBLE, IMBALANCE))

        return min(self.rows, key=waits_s)

    def queued_for(self, rank: int) -> float | None:
        """Return the median seconds of a step for which a rank waited for a CPU; None if the system does not count them."""
        known = [seconds for seconds in self.queued_s[rank] if seconds is not None]
        return statistics.median(known) if known else None

    def sent_bytes(self, rank: int) -> dict[str, int]:
        """Return the bytes of the buffers that a rank sends in a step, by axis: what its program lists."""
        sizes: dict[str, int] = defaultdict(int)
        for op in self.records[rank].head.ops:
            sizes[op.axis] += op.size_bytes
        return sizes

    def wire_bytes(self, rank: int, axis: str) -> float:
        """Return the bytes that a rank sends on an axis in a step: of a collective over n ranks by a ring, of a message its size."""
        head = self.records[rank].head
        others = 1 - 1 / max(1, len(head.groups.get(axis, ())))
        passes: Mapping[str, float] = {OpKind.ALL_REDUCE: 2 * others, OpKind.SEND: 1.0, OpKind.RECV: 0.0}
        return sum(op.size_bytes * passes.get(op.kind, others) for op in head.ops if op.axis == axis)


def measured_steps(records: Mapping[int, RankRecord], steps: Sequence[int]) -> MeasuredSteps:
    """Return the parts of some steps, which every rank has recorded."""
    bounds = _bounds(records, steps)
    rows: dict[int, dict[Key, float]] = {rank: defaultdict(float) for rank in records}
    hidden: dict[int, dict[str, float]] = {rank: defaultdict(float) for rank in records}
    charged: dict[tuple[int, str, str | None], list[float]] = defaultdict(lambda: [0.0, 0.0])
    clocks: dict[str, _ClockOffset] = {}
    each: list[MeasuredStep] = []
    for number in steps:
        clocks = _offsets_of(records, bounds, records[min(records)].steps[number].begin_ns)
        offsets = {clock: offset.offset_ns for clock, offset in clocks.items()}
        step = _with_step_before(records, number, offsets, each[-1] if each else None)
        each.append(step)
        for row in partition(step.timeline):
            rows[row.stage][row.name, row.axis] += row.seconds / len(steps)
        for rank in records:
            tail_s = step.timeline.step_s - step.lasted_s[rank]  # until the longest step has ended
            rows[rank][REST, None] = max(0.0, rows[rank][REST, None] - tail_s / len(steps))
            for axis, seconds in hidden_s(step.timeline, rank).items():
                hidden[rank][axis] += seconds / len(steps)
        _charge(step, clocks, records, charged, len(steps))
    return MeasuredSteps(
        steps=tuple(steps),
        records=records,
        rows=rows,
        lasted_s={rank: statistics.fmean(step.lasted_s[rank] for step in each) for rank in records},
        cpu_s={rank: tuple(step.cpu_s[rank] for step in each) for rank in records},
        queued_s={rank: tuple(step.queued_s[rank] for step in each) for rank in records},
        others_queued_s={rank: tuple(step.others_queued_s[rank] for step in each) for rank in records},
        hidden=hidden,
        charges=tuple(
            sorted(
                (Charge(*key, seconds, round(waiting)) for key, (seconds, waiting) in charged.items()),
                key=lambda charge: -charge.seconds,
            )
        ),
        clocks=clocks,
        last=each[-1],
        timelines={step.step: step.timeline for step in each},
        missing=tuple(_missing(records, steps)),
    )


def _with_step_before(
    records: Mapping[int, RankRecord], number: int, offsets: Mapping[str, int], last: MeasuredStep | None
) -> MeasuredStep:
    """Return a step that knows the one before it, where every rank has recorded that; `last` is the latest."""
    previous = None
    if last is not None and last.step == number - 1:
        previous = replace(last, before=None)
    elif all(number - 1 in record.steps for record in records.values()):
        previous = measured_step(records, number - 1, offsets)
    return measured_step(records, number, offsets, previous)


def _bounds(records: Mapping[int, RankRecord], steps: Sequence[int]) -> list[_Bound]:
    """Return what the collectives of all steps say of the clocks; nothing where all ranks share one."""
    if len({record.head.clock for record in records.values()}) == 1:
        return []
    bounds: list[_Bound] = []
    for number in steps:
        sent = {rank: sent_by(record, number, 0) for rank, record in records.items()}
        bounds += _bounds_of(records, [*meetings_of(records, sent).values()])
    return bounds


def _charge(
    measured: MeasuredStep,
    clocks: Mapping[str, _ClockOffset],
    records: Mapping[int, RankRecord],
    charged: dict[tuple[int, str, str | None], list[float]],
    num_steps: int,
) -> None:
    for rank in records:
        for gap in measured.gaps[rank]:
            if gap.name not in (WAIT, BUBBLE):
                continue
            cause = measured.cause(gap)
            if cause is None or gap.end_s - gap.start_s < 2 * _uncertain_s(clocks, records, rank, cause[0]):
                continue
            entry = charged[cause[0], cause[1], gap.axis if gap.name == WAIT else None]
            entry[0] += (gap.end_s - gap.start_s) / num_steps
            entry[1] += 1 / num_steps


def _uncertain_s(clocks: Mapping[str, _ClockOffset], records: Mapping[int, RankRecord], rank: int, other: int) -> float:
    """Return the seconds within which the times of two ranks are known against each other."""
    here, there = records[rank].head.clock, records[other].head.clock
    return 0.0 if here == there else clocks[here].width_s + clocks[there].width_s


def _missing(records: Mapping[int, RankRecord], steps: Sequence[int]) -> list[str]:
    """Return what the records lack: ranks, and ops of the program that were not seen."""
    head = records[min(records)].head
    lines = []
    if absent := [rank for rank in range(head.world_size) if rank not in records]:
        lines.append(f"no record of rank{'s' * (len(absent) > 1)} {', '.join(map(str, absent[:8]))}")
    for rank, record in records.items():
        listed = len(record.head.ops)
        sent = [sum(1 for event in record.steps[number].events if event[0] == "sent") for number in steps]
        # Exchanges after some steps alone are listed, and are not sent in each.
        if any(count != listed for count in sent) and not record.head.num_exchanged:
            lines.append(
                f"rank {rank} has sent {min(sent)} to {max(sent)} times per step, and its program lists {listed}"
            )
    return lines


def parts_of(steps: MeasuredSteps, rank: int, predicted: Prediction | None) -> tuple[tuple[StepPart, ...], float]:
    """Return the parts of a rank's step, and its rest in seconds: together they are the seconds of the step."""
    said: dict[Key, float] = {}
    if predicted is not None:
        stage = steps.records[rank].head.stage
        said = {(row.name, row.axis): row.seconds for row in predicted.timeline.rows if row.stage == stage}
    measured = steps.rows[rank]
    keys = [key for key in dict.fromkeys((*measured, *said)) if key[0] != REST]
    keys.sort(key=lambda key: (ROWS.index(key[0]), key[1] or ""))
    parts = tuple(
        StepPart(
            name, axis, measured.get((name, axis), 0.0), None if predicted is None else said.get((name, axis), 0.0)
        )
        for name, axis in keys
        if measured.get((name, axis), 0.0) > 0 or said.get((name, axis), 0.0) > 0
    )
    rest_s = round(steps.lasted_s[rank] - sum(part.measured_s for part in parts), 10)  # clocks count nanoseconds
    return parts, rest_s or 0.0  # no negative zero


@dataclass(frozen=True, slots=True)
class _ClockOffset:
    """The offset that is added to a clock, in nanoseconds: the middle of an interval."""

    clock: str
    host: str
    low_ns: float
    high_ns: float

    @property
    def offset_ns(self) -> int:
        """The middle of the interval in nanoseconds; of one without an end, the other end."""
        ends = [end for end in (self.low_ns, self.high_ns) if abs(end) != float("inf")]
        return round(sum(ends) / len(ends)) if ends else 0

    @property
    def width_s(self) -> float:
        """Seconds within which the clock is known."""
        return (self.high_ns - self.low_ns) / 1e9

    def to_line(self) -> str:
        """Return the interval as text."""
        if self.high_ns < self.low_ns:
            return f"the clock of {self.host}: no offset agrees with all collectives, which is a fault of samestep; please report it"
        return (
            f"the clock of {self.host} is {self.offset_ns / 1e6:+.3f} ms off, known within {self.width_s * 1e3:.3f} ms"
        )


_Bound = tuple[str, str, int, int]
"""Two clocks, the most by which the offset of the second may exceed that of the first, and the time at which that was seen."""


def _offsets_of(records: Mapping[int, RankRecord], bounds: Sequence[_Bound], at_ns: int) -> dict[str, _ClockOffset]:
    """Return the offset of each clock to that of the lowest rank, at a time of that clock."""
    hosts = {record.head.clock: record.head.host for _, record in sorted(records.items(), reverse=True)}
    clocks = [*hosts]
    first = records[min(records)].head.clock
    most: dict[tuple[str, str], float] = {}
    for start, other, bound, seen_ns in bounds:
        widened = bound + MOST_DRIFT * abs(at_ns - seen_ns)
        most[start, other] = min(most.get((start, other), float("inf")), widened)
    for middle, start, other in itertools.product(clocks, repeat=3):
        through = most.get((start, middle), float("inf")) + most.get((middle, other), float("inf"))
        if start != other and through < most.get((start, other), float("inf")):
            most[start, other] = through
    offsets = {}
    for clock in clocks:
        high = 0.0 if clock == first else most.get((first, clock), float("inf"))
        low = 0.0 if clock == first else -most.get((clock, first), float("inf"))
        offsets[clock] = _ClockOffset(clock, hosts[clock], low, high)
    return offsets


def _bounds_of(records: Mapping[int, RankRecord], meetings: Sequence[Sequence[SentByRank]]) -> list[_Bound]:
    """Return what collectives that every rank both gives to and takes from say of clocks."""
    bounds: list[_Bound] = []
    for members in meetings:
        if members[0].op.kind not in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all"):
            continue
        for member, other in itertools.permutations(members, 2):
            here, there = records[member.rank].head.clock, records[other.rank].head.clock
            if here != there and member.waited is not None:
                # other entered before one left: entered(other) + offset(other) <= left(one) + offset(one)
                bounds.append((here, there, member.waited[1] - other.issued, member.waited[1]))
    return bounds
