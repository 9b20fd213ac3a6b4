"""The bytes of a measured step: what a rank holds at its peak, and what it sends and receives on each axis.

A rank keeps weights, gradients and states from step to step; they are counted from its tensors. What it has in use beyond them at
the peak is *the rest*: activations, logits, gathered weights and buffers, and on a CPU the libraries of the process too.

    on a GPU   the peak is the allocator's own count since the step began; the op is the one after which it stood first
    on a CPU   it is the most resident memory at the end of a layer or task: nobody counts what comes and goes between two

What its program lists to be sent is held against what torch was given. A buffer counts as in the ledger: whole, with its padding,
once for each collective or message on each of its ranks. Torch is asked in the first step of a record alone, whose times are left
out. Exchanges of weights (DiLoCo) are not in each step: of them the program lists what was sent in that one.

On a Chrome trace arrows lead from the rank that entered a collective last to those that waited, and from each send to its receive:

    rank 0  ▕── all_reduce ──▏◂─┐        `ph: s` on the lane of the last rank, `ph: f` on the lanes of the others
    rank 1         ▕ all_reduce ▏
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from samestep.memory.memory_use import REST, MemoryUse, parts_text
from samestep.output.text import readable
from samestep.program.recorded import MemoryMark, RankRecord
from samestep.wings.explain.measured_step import MeasuredStep, SentByRank, sent_by

KEPT = ("weights", "gradients", "optimizer")
Slice = tuple[int, str, float]
"""The rank, the stream and the begin in seconds of one slice of a trace."""


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
        sizes = {name: self.held.get(name, 0) for name in KEPT}
        return {**sizes, REST: max(0, self.peak_bytes - sum(sizes.values()))}

    @property
    def predicted_parts(self) -> dict[str, int]:
        """The same parts of the predicted peak; empty without a prediction."""
        if self.predicted is None:
            return {}
        said = self.predicted
        sizes = {"weights": said.weights, "gradients": said.gradients, "optimizer": said.optimizer}
        return {**sizes, REST: said.total - sum(sizes.values())}

    def over_step(self) -> dict[str, list[int]]:
        """Return the parts in use at each mark."""
        sizes = [self.held.get(name, 0) for name in KEPT]
        curves = {name: [size] * len(self.marks) for name, size in zip(KEPT, sizes, strict=True)}
        return {**curves, REST: [max(0, mark.used - sum(sizes)) for mark in self.marks]}

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
                "  on a CPU the rest has the libraries of the process, and temporary tensors inside a layer are not tracked"
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
    sizes = _bytes_of(records[rank])
    differs = [traffic.axis for traffic in sizes if traffic.measured not in (None, traffic.predicted)]
    routed = {axis for axis in differs if _agrees_together(records, rank, axis)}
    return tuple(replace(traffic, is_routed=traffic.axis in routed) for traffic in sizes)


def _agrees_together(records: Mapping[int, RankRecord], rank: int, axis: str) -> bool:
    """Return whether all ranks of an axis together were given what their programs list, as those with experts are."""
    group = records[rank].head.groups.get(axis, ())
    sent = [
        traffic for other in group if other in records for traffic in _bytes_of(records[other]) if traffic.axis == axis
    ]
    return len(sent) == len(group) and sum(traffic.predicted for traffic in sent) == sum(
        traffic.measured or 0 for traffic in sent
    )


def _bytes_of(record: RankRecord) -> tuple[AxisBytes, ...]:
    listed, measured = Counter[str](), Counter[str]()
    ops = record.head.ops
    always, exchanged = ops[: len(ops) - record.head.num_exchanged], ops[len(ops) - record.head.num_exchanged :]
    for op in always:
        listed[op.axis] += op.size_bytes
    now_and_then = {(op.owner, op.axis) for op in exchanged}
    first = min(record.steps)
    sent = [collective for collective in sent_by(record, first, 0) if collective.size_bytes is not None]
    for traffic in sent:
        measured[traffic.op.axis] += traffic.size_bytes or 0
        listed[traffic.op.axis] += traffic.op.size_bytes if (traffic.op.owner, traffic.op.axis) in now_and_then else 0
    return tuple(AxisBytes(axis, listed[axis], measured[axis] if sent else None) for axis in {**listed, **measured})


def traffic_line(rank: int, sent: Sequence[AxisBytes]) -> str:
    """Return a line with the bytes of each axis."""
    is_agreed = all(traffic.measured == traffic.predicted or traffic.is_routed for traffic in sent)
    known = "listed and sent" if is_agreed else "sent" if sent[0].measured is not None else "listed"
    return f"buffers of rank {rank} in a step, {known}: {'; '.join(traffic.to_text() for traffic in sent)}"


def flows_of(step: MeasuredStep, events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the arrows between the slices of a step; `events` are those of its trace, which name the threads."""
    threads = {
        (event["pid"], event["args"]["name"]): event["tid"] for event in events if event["name"] == "thread_name"
    }
    meetings: dict[Any, list[tuple[SentByRank, Slice]]] = defaultdict(list)
    for (rank, stream, _, end_s), sent in step.spans_of_sent.items():
        begin_s = max(0.0, min((sent.starts - step.begins[rank]) / 1e9, end_s))
        meetings[sent.queue, sent.op.owner, sent.op.task, sent.starts].append((sent, (rank, stream, begin_s)))
    flows: list[dict[str, Any]] = []
    for number, met in enumerate(meetings.values()):
        first = next((at for sent, at in met if _is_source(sent)), None)
        ends = [at for _, at in met if at != first]
        if first is not None:
            phases = [("s", first), *(("f", at) for at in ends)] if ends else []
            flows += [_arrow(phase, number, at, threads[at[:2]]) for phase, at in phases]
    return flows


def _is_source(sent: SentByRank) -> bool:
    return sent.op.kind == "send" or (sent.op.kind != "recv" and sent.late == sent.rank)


def _arrow(phase: str, number: int, at: Slice, tid: int) -> dict[str, Any]:
    rank, _, begin_s = at
    arrow = {"ph": phase, "id": number, "name": "last to enter", "cat": "waits", "pid": rank, "tid": tid}
    return {**arrow, "ts": begin_s * 1e6, **({"bp": "e"} if phase == "f" else {})}
