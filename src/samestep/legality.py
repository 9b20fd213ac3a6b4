"""Which layouts a job may have: the rules of the strategies, tried on every layout of a number of devices."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import get_args

from samestep.errors import LayoutError
from samestep.job import Job
from samestep.layout import Layout, Recompute, Reduce
from samestep.memory import MemoryUse, at_rest
from samestep.model import ModelSpec
from samestep.program import Kind, Program
from samestep.strategies import program_of


@dataclass(frozen=True, slots=True)
class Row:
    """One layout: what it holds and sends, or why it cannot be."""

    layout: Layout
    reason: str = ""
    """Empty where the layout is legal."""
    memory: MemoryUse | None = None
    sent: dict[str, int] | None = None
    """Bytes of buffers that one step hands to each kind of collective."""


def layouts_of(num_devices: int) -> Iterator[Layout]:
    """Yield the layouts of so many devices: every split of the data axis, each switch of it by itself."""
    for shard in (degree for degree in range(1, num_devices + 1) if num_devices % degree == 0):
        replicate = num_devices // shard
        for zero in (1, 2, 3) if shard > 1 else (0,):
            plain = Layout(dp_replicate=replicate, dp_shard=shard, zero=zero)
            yield plain
            yield from _switched(plain)


def _switched(plain: Layout) -> Iterator[Layout]:
    yield replace(plain, microbatch=1)
    if plain.zero >= 2:
        yield replace(plain, microbatch=1, accumulate="full")
    for recompute in get_args(Recompute)[1:]:
        yield replace(plain, recompute=recompute)
    if plain.dp > 1 and plain.zero == 0:
        for reduce in get_args(Reduce)[1:]:
            yield replace(plain, reduce=reduce)
    yield replace(plain, offload=True)


def row_of(model: ModelSpec, job: Job, layout: Layout) -> Row:
    """Try one layout on a job."""
    try:
        program = program_of(model, job, layout)
    except LayoutError as error:
        return Row(layout, reason=str(error))
    return Row(layout, memory=at_rest(program), sent=_sent(program))


def _sent(program: Program) -> dict[str, int]:
    sent: dict[str, int] = {}
    for _, op in program.ops():
        if op.axis is not None and op.owner != "scalars":
            sent[op.kind] = sent.get(op.kind, 0) + op.size_bytes
    return {str(kind): sent[kind] for kind in Kind if kind in sent}


_HEAD = ("layout", "weights", "gradients", "optimizer", "collectives of a step (bytes of their buffers)")


def _cells(row: Row) -> tuple[str, ...]:
    if row.memory is None or row.sent is None:
        return (str(row.layout), "", "", "", f"refused: {row.reason}")
    held = (row.memory.weights, row.memory.gradients, row.memory.optimizer)
    sent = ", ".join(f"{kind} {size:,}" for kind, size in row.sent.items())
    return (str(row.layout), *(f"{size:,}" for size in held), sent or "none")


def as_text(rows: list[Row]) -> str:
    """Write the table for a terminal: bytes that rank 0 holds between steps with Adam, and what a step sends."""
    table = [_HEAD, *map(_cells, rows)]
    widths = [max(len(cells[column]) for cells in table) for column in range(4)]
    return "\n".join(
        "  ".join(
            [cells[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(cells[1:4], widths[1:], strict=True)), cells[4]]
        )
        for cells in table
    )


def as_markdown(rows: list[Row]) -> str:
    """Write the table for a document."""
    lines = [_HEAD, ("---", "---:", "---:", "---:", "---"), *((f"`{c[0]}`", *c[1:]) for c in map(_cells, rows))]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def as_record(row: Row) -> dict[str, object]:
    """Return plain data for JSON."""
    held = row.memory
    return {
        "layout": str(row.layout),
        "legal": not row.reason,
        "reason": row.reason,
        "bytes": None
        if held is None
        else {"weights": held.weights, "gradients": held.gradients, "optimizer": held.optimizer},
        "sent": row.sent,
    }
