"""The memory of a rank over a measured step: its peak by part, the op at which the peak stands, and the predicted one.

A rank keeps weights, gradients and states from step to step; they are counted from its tensors. What it has in use beyond them at
the peak is *the rest*: activations, logits, gathered weights and buffers, and on a CPU the libraries of the process too.

    on a GPU   the peak is the allocator's own count since the step began; the op is the one after which it stood first
    on a CPU   it is the most resident memory at the end of a layer or task: nobody counts what comes and goes between two
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from samestep.output.byte_sizes import readable
from samestep.program.recorded import MemoryMark, RankRecord
from samestep.simulation.memory import REST, MemoryUse, parts_text

KEPT = ("weights", "gradients", "optimizer")


@dataclass(frozen=True, slots=True)
class StepMemory:
    """The memory of one rank over one step, in bytes."""

    rank: int
    marks: Sequence[MemoryMark]
    held: Mapping[str, int]
    """Bytes that are kept between steps, by part."""
    predicted: MemoryUse | None
    is_process: bool
    """Whether it is the memory of a process, as on a CPU, and not that of an allocator."""

    @property
    def peak_bytes(self) -> int:
        """The most in use."""
        return max(max(mark.most, mark.used) for mark in self.marks)

    @property
    def peak_at(self) -> str:
        """The op at which the peak stands."""
        return next(mark.op for mark in self.marks if max(mark.most, mark.used) == self.peak_bytes)

    @property
    def reserved_bytes(self) -> int | None:
        """The most that the allocator has taken from the device; None on a CPU."""
        return None if self.is_process else max(mark.reserved for mark in self.marks)

    @property
    def parts(self) -> dict[str, int]:
        """The peak by part; the parts add up to it."""
        kept = {name: self.held.get(name, 0) for name in KEPT}
        return {**kept, REST: max(0, self.peak_bytes - sum(kept.values()))}

    @property
    def predicted_parts(self) -> dict[str, int]:
        """The same parts of the predicted peak; empty without a prediction."""
        if self.predicted is None:
            return {}
        said = self.predicted
        kept = {"weights": said.weights, "gradients": said.gradients, "optimizer": said.optimizer}
        return {**kept, REST: said.total - sum(kept.values())}

    def over_step(self) -> dict[str, list[int]]:
        """Return the parts in use at each mark."""
        kept = [self.held.get(name, 0) for name in KEPT]
        curves = {name: [size] * len(self.marks) for name, size in zip(KEPT, kept, strict=True)}
        return {**curves, REST: [max(0, mark.used - sum(kept)) for mark in self.marks]}

    def to_record(self) -> dict[str, object]:
        """Return plain data for JSON."""
        said = self.predicted_parts
        return {
            "peak_bytes": self.peak_bytes,
            "peak_at": self.peak_at,
            "reserved_bytes": self.reserved_bytes,
            "predicted_peak_bytes": None if self.predicted is None else self.predicted.total,
            "predicted_peak_at": None if self.predicted is None else self.predicted.peak_at,
            "of": "process" if self.is_process else "allocator",
            "parts": [
                {"name": name, "measured_bytes": size, "predicted_bytes": said.get(name)}
                for name, size in self.parts.items()
            ],
        }

    def to_lines(self) -> list[str]:
        """Return the peak in words, the measured line above the predicted one."""
        of = "resident in all" if self.is_process else "allocated in all"
        reserved = "" if self.reserved_bytes is None else f", {readable(self.reserved_bytes)} reserved"
        lines = [
            f"memory of rank {self.rank}",
            f"  measured   {parts_text(self.parts)}; {readable(self.peak_bytes)} {of}{reserved}, at {self.peak_at}",
        ]
        if self.predicted is not None:
            total = readable(self.predicted.total)
            lines.append(
                f"  predicted  {parts_text(self.predicted_parts)}; {total} in all, at {self.predicted.peak_at}"
            )
        if self.is_process:
            lines.append(
                "  on a CPU the rest has the libraries of the process, and what comes and goes within a layer is not seen"
            )
        return lines


def step_memory(record: RankRecord, number: int, predicted: Sequence[MemoryUse] | None) -> StepMemory | None:
    """Return the memory of a rank over one step; None where the system did not say how much is in use.

    `predicted` is the memory of each stage.
    """
    step, head = record.steps[number], record.head
    marks = [mark for mark in step.memory if mark.used]
    said = None if predicted is None else predicted[head.stage]
    return StepMemory(head.rank, marks, step.held, said, head.device == "cpu") if marks else None
