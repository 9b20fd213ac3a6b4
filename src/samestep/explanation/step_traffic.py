"""The bytes that a rank sends and receives in a step, by axis: those that its program lists, held against those that torch was given.

A buffer counts as in the ledger: whole, with its padding, once for each collective or message on each of its ranks. Torch is asked in
the first step of a record alone, whose times are left out. Exchanges of replicas are not in each step: of them the program lists
what was sent in that one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from samestep.explanation.measured_step import sent_by
from samestep.output.byte_sizes import readable
from samestep.program.ranks import BESIDE
from samestep.program.recorded import RankRecord


@dataclass(frozen=True, slots=True)
class AxisBytes:
    """The bytes of the buffers that a rank hands to torch on one axis in a step."""

    axis: str
    predicted: int
    """Bytes that the program lists."""
    measured: int | None
    """Bytes that torch was given; None where the record does not have its first step."""

    def to_record(self) -> dict[str, object]:
        """Return plain data for JSON."""
        return {"axis": self.axis, "predicted_bytes": self.predicted, "measured_bytes": self.measured}

    def to_text(self) -> str:
        """Return the axis with its bytes, and where both differ what the program lists."""
        if self.measured in (None, self.predicted):
            return f"{self.axis} {readable(self.predicted)}"
        return f"{self.axis} {readable(self.measured or 0)}, where the program lists {readable(self.predicted)}"


def bytes_of(record: RankRecord) -> tuple[AxisBytes, ...]:
    """Return the bytes of the buffers of a rank in a step, by axis, in the order of its program."""
    listed, measured = Counter[str](), Counter[str]()
    for op in record.head.ops:
        listed[op.axis] += 0 if BESIDE in op.axis else op.size_bytes
    first = min(record.steps)
    sent = [one for one in sent_by(record, first, 0) if one.size_bytes is not None]
    for one in sent:
        measured[one.op.axis] += one.size_bytes or 0
        listed[one.op.axis] += one.op.size_bytes if BESIDE in one.op.axis else 0
    return tuple(AxisBytes(axis, listed[axis], measured[axis] if sent else None) for axis in {**listed, **measured})


def traffic_line(rank: int, sent: Sequence[AxisBytes]) -> str:
    """Return a line with the bytes of each axis."""
    known = "listed and sent" if all(one.measured == one.predicted for one in sent) else "listed"
    known = "sent" if any(one.measured not in (None, one.predicted) for one in sent) else known
    return f"buffers of rank {rank} in a step, {known}: {'; '.join(one.to_text() for one in sent)}"
