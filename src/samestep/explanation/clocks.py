"""The clocks of hosts: by how much they differ, from what a collective cannot do.

Nobody leaves a collective before its last rank has entered it. With o the offset of clock b to clock a, a rank there and a rank here:

    left(a) >= entered(b) + o   and   left(b) + o >= entered(a)        so  entered(a) - left(b)  <=  o  <=  left(a) - entered(b)

Each collective gives such an interval; all of them are intersected. Clocks of machines drift apart by less than `MOST_DRIFT`, so an
interval of another step is widened by that, times the time between. Of several clocks the intervals follow along the shortest paths.
Ranks with the same clock need none.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from samestep.explanation.measured_step import SentByRank
from samestep.program.recorded import RankRecord

MOST_DRIFT = 1e-4
"""The largest difference of the rates of two clocks."""


@dataclass(frozen=True, slots=True)
class ClockOffset:
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


Bound = tuple[str, str, int, int]
"""Two clocks, the most by which the offset of the second may exceed that of the first, and the time at which that was seen."""


def offsets_of(records: Mapping[int, RankRecord], bounds: Sequence[Bound], at_ns: int) -> dict[str, ClockOffset]:
    """Return the offset of each clock to that of the lowest rank, at a time of that clock."""
    hosts = {record.head.clock: record.head.host for _, record in sorted(records.items(), reverse=True)}
    clocks = [*hosts]
    first = records[min(records)].head.clock
    most: dict[tuple[str, str], float] = {}
    for one, other, bound, seen_ns in bounds:
        widened = bound + MOST_DRIFT * abs(at_ns - seen_ns)
        most[one, other] = min(most.get((one, other), float("inf")), widened)
    for middle, one, other in itertools.product(clocks, repeat=3):
        through = most.get((one, middle), float("inf")) + most.get((middle, other), float("inf"))
        if one != other and through < most.get((one, other), float("inf")):
            most[one, other] = through
    found = {}
    for clock in clocks:
        high = 0.0 if clock == first else most.get((first, clock), float("inf"))
        low = 0.0 if clock == first else -most.get((clock, first), float("inf"))
        found[clock] = ClockOffset(clock, hosts[clock], low, high)
    return found


def bounds_of(records: Mapping[int, RankRecord], meetings: Sequence[Sequence[SentByRank]]) -> list[Bound]:
    """Return what collectives that every rank both gives to and takes from say of clocks."""
    found: list[Bound] = []
    for members in meetings:
        if members[0].op.kind not in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all"):
            continue
        for one, other in itertools.permutations(members, 2):
            here, there = records[one.rank].head.clock, records[other.rank].head.clock
            if here != there and one.waited is not None:
                # other entered before one left: entered(other) + offset(other) <= left(one) + offset(one)
                found.append((here, there, one.waited[1] - other.issued, one.waited[1]))
    return found
