"""The bytes that a rank sends and receives in a step, by axis: those that its program lists, held against those that torch was given.

A buffer counts as in the ledger: whole, with its padding, once for each collective or message on each of its ranks. Torch is asked in
the first step of a record alone, whose times are left out. Exchanges of replicas are not in each step: of them the program lists
what was sent in that one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from samestep.explanation.measured_step import sent_by
from samestep.output.byte_sizes import readable
from samestep.program.recorded import RankRecord


@dataclass(frozen=True, slots=True)
class AxisBytes:
    """The bytes of the buffers that a rank hands to torch on one axis in a step."""

    axis: str
    predicted: int
    """Bytes that the program lists."""
    measured: int | None
    """Bytes that torch was given; None where the record does not have its first step."""
    is_routed: bool = False
    """Whether a rank's part of an exchange between experts makes both differ, which all ranks of the axis together do not."""

    def to_record(self) -> dict[str, object]:
        """Return plain data for JSON."""
        return {"axis": self.axis, "predicted_bytes": self.predicted, "measured_bytes": self.measured}

    def to_text(self) -> str:
        """Return the axis with its bytes, and where both differ what the program lists."""
        if self.measured in (None, self.predicted):
            return f"{self.axis} {readable(self.predicted)}"
        if self.is_routed:
            return (
                f"{self.axis} {readable(self.measured or 0)} as tokens are routed, on all its ranks together as listed"
            )
        return f"{self.axis} {self.measured:,} B, where the program lists {self.predicted:,} B"


def bytes_of(records: Mapping[int, RankRecord], rank: int) -> tuple[AxisBytes, ...]:
    """Return the bytes of the buffers of a rank in a step, by axis, in the order of its program."""
    own = _bytes_of(records[rank])
    differs = [one.axis for one in own if one.measured not in (None, one.predicted)]
    routed = {axis for axis in differs if _agrees_together(records, rank, axis)}
    return tuple(replace(one, is_routed=one.axis in routed) for one in own)


def _agrees_together(records: Mapping[int, RankRecord], rank: int, axis: str) -> bool:
    """Return whether all ranks of an axis together were given what their programs list, as those with experts are."""
    group = records[rank].head.groups.get(axis, ())
    sent = [one for other in group if other in records for one in _bytes_of(records[other]) if one.axis == axis]
    return len(sent) == len(group) and sum(one.predicted for one in sent) == sum(one.measured or 0 for one in sent)


def _bytes_of(record: RankRecord) -> tuple[AxisBytes, ...]:
    listed, measured = Counter[str](), Counter[str]()
    ops = record.head.ops
    always, exchanged = ops[: len(ops) - record.head.num_exchanged], ops[len(ops) - record.head.num_exchanged :]
    for op in always:
        listed[op.axis] += op.size_bytes
    now_and_then = {(op.owner, op.axis) for op in exchanged}
    first = min(record.steps)
    sent = [one for one in sent_by(record, first, 0) if one.size_bytes is not None]
    for one in sent:
        measured[one.op.axis] += one.size_bytes or 0
        listed[one.op.axis] += one.op.size_bytes if (one.op.owner, one.op.axis) in now_and_then else 0
    return tuple(AxisBytes(axis, listed[axis], measured[axis] if sent else None) for axis in {**listed, **measured})


def traffic_line(rank: int, sent: Sequence[AxisBytes]) -> str:
    """Return a line with the bytes of each axis."""
    is_agreed = all(one.measured == one.predicted or one.is_routed for one in sent)
    known = "listed and sent" if is_agreed else "sent" if sent[0].measured is not None else "listed"
    return f"buffers of rank {rank} in a step, {known}: {'; '.join(one.to_text() for one in sent)}"
