"""Whether a job may have a layout, by the rules of the strategies, and what it holds and sends: for any list of layouts."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from samestep import calls
from samestep.enumeration.candidates import list_layouts, schedule_words
from samestep.errors import InputError, LayoutError
from samestep.job import Job
from samestep.layout import Layout, check_number
from samestep.memory.memory_use import MemoryUse, at_rest
from samestep.models import catalog
from samestep.models.published import as_published
from samestep.models.spec import ModelSpec
from samestep.output.text import align_columns
from samestep.program.ops import OpKind
from samestep.program.program import Program
from samestep.schedules import DEFAULT, SCHEDULES
from samestep.strategies import program_of


@dataclass(frozen=True, slots=True)
class Row:
    """One layout: what it holds and sends, or why it cannot be."""

    layout: Layout
    reason: str = ""
    """Empty where the layout is valid."""
    memory: MemoryUse | None = None
    sent: dict[str, int] | None = None
    """Bytes of buffers that one step hands to each kind of collective."""


# -- what composes with what -----------------------------------------------------------------------

_FEATURES: dict[str, dict[str, Any]] = {
    "dp": {"dp_replicate": 2},
    "zero=1": {"dp_shard": 2, "zero": 1},
    "zero=2": {"dp_shard": 2, "zero": 2},
    "zero=3": {"dp_shard": 2, "zero": 3},
    "tp": {"tp": 2},
    "sequence_parallel": {"tp": 2, "sequence_parallel": True},
    "cp": {"cp": 2},
    "cp zero=1": {"cp": 2, "dp_shard": 1, "zero": 1},
    "cp zero=2": {"cp": 2, "dp_shard": 1, "zero": 2},
    "cp zero=3": {"cp": 2, "dp_shard": 1, "zero": 3},
    "exchange=ring": {"cp": 2, "exchange": "ring"},
    "exchange=hybrid": {"cp": 4, "exchange": "hybrid"},
    "ep": {"dp_replicate": 2, "ep": 2},
    "pp": {"pp": 2},
    **{schedule: {"pp": 2, **schedule_words(schedule)} for schedule in SCHEDULES if schedule != DEFAULT},
    "microbatch": {"microbatch": 1},
    "accumulate=full": {"accumulate": "full"},
    "recompute": {"recompute": "full"},
    "recompute=offload": {"recompute": "offload"},
    "loss_chunk": {"loss_chunk": 1024},
    "offload": {"offload": True},
    "reduce=root": {"reduce": "root"},
}
"""Each word at the smallest degree at which it does something."""


@dataclass(frozen=True, slots=True)
class Pair:
    """Two features of layouts, and whether one layout can have both."""

    first: str
    second: str
    reason: str | None
    """Why they cannot be together; empty where they can, None where they are two values of one word."""


def pairs(job: Job) -> Iterator[Pair]:
    """Try every two features together on a job."""
    model = catalog.model_spec(job)
    for (first, ours), (second, theirs) in itertools.combinations(_FEATURES.items(), 2):
        if any(ours[word] != theirs[word] for word in ours.keys() & theirs.keys()):
            yield Pair(first, second, None)
            continue
        try:
            yield Pair(first, second, row_of(model, job, Layout(**{**ours, **theirs})).reason)
        except LayoutError as error:
            yield Pair(first, second, str(error))


def words(model: ModelSpec, job: Job) -> Iterator[tuple[str, str]]:
    """Try every feature by itself on a job; yield it with the reason why the job may not have it, empty where it may."""
    for name, degrees in _FEATURES.items():
        try:
            yield name, row_of(model, job, Layout(**degrees)).reason
        except LayoutError as error:
            yield name, str(error)


def matrix(pairs: Iterable[Pair], *, markdown: bool = False) -> str:
    """Write which features compose: `x` together, `.` two values of one word, else the number of a reason below."""
    reasons: dict[str, int] = {}
    cell: dict[tuple[str, str], str] = {}
    for pair in pairs:
        mark = (
            "."
            if pair.reason is None
            else "x"
            if not pair.reason
            else f"{reasons.setdefault(pair.reason, len(reasons) + 1)}"
        )
        cell[pair.first, pair.second] = cell[pair.second, pair.first] = mark
    names = list(_FEATURES)
    rows = [[name, *(cell.get((name, other), "") for other in names)] for name in names]
    if markdown:
        head = ["", *(f"`{name}`" for name in names)]
        lines = [head, ["---", *("---" for _ in names)], *([f"`{row[0]}`", *row[1:]] for row in rows)]
        text = "\n".join(f"| {' | '.join(line)} |" for line in lines)
        return "\n".join([text, "", *(f"{number}. {reason}" for reason, number in reasons.items())])
    width = max(map(len, names))
    lines = [
        [f"{number:>2} {name:<{width}}", *row[1:]]
        for number, (name, row) in enumerate(zip(names, rows, strict=True), 1)
    ]
    text = "\n".join(
        [
            " " * (width + 3) + "".join(f"{n:>4}" for n in range(1, len(names) + 1)),
            *(line[0] + "".join(f"{mark:>4}" for mark in line[1:]) for line in lines),
        ]
    )
    return "\n".join([text, *(f"{number}: {reason}" for reason, number in reasons.items())])


def row_of(model: ModelSpec, job: Job, layout: Layout) -> Row:
    """Try one layout on a job."""
    try:
        program = program_of(model, job, layout)
    except LayoutError as error:
        return Row(layout, reason=str(error))
    return Row(layout, memory=at_rest(program), sent=_sent_bytes(program))


@calls.checked
def layouts(job: Job, devices: int, *, switches: bool = False) -> tuple[Row, ...]:
    """Try every layout of a job on a number of devices; each rejected one has its reason.

    Args:
        job: the computation.
        devices: how many; each is used.
        switches: also try each switch of every split separately, such as recompute or offload.

    Raises:
        InputError: the job or its model cannot be understood.
    """
    if devices < 1:
        raise InputError("value-out-of-range", f"devices={devices}: a layout needs at least 1")
    check_number("devices", devices)
    job, _ = as_published(job)
    model = catalog.model_spec(job)
    return tuple(row_of(model, job, layout) for layout in list_layouts(devices, model, switches=switches))


def why_refused(job: Job, layout: Layout, devices: int) -> str:
    """Return why a layout is refused on a number of devices, or that it is valid: the answer to `--why-not`."""
    job, _ = as_published(job)
    reason = row_of(catalog.model_spec(job), job, layout).reason
    if layout.world_size == devices:
        return reason or f'"{layout}" is valid'
    named = f"--devices {devices}, but layout {str(layout)!r} has {layout.world_size} ranks"
    return f"{named}; there it is {f'rejected: {reason}' if reason else 'valid'}"


def _sent_bytes(program: Program) -> dict[str, int]:
    sent: dict[str, int] = {}
    for _, op in program.ops():
        if op.axis is not None and op.owner != "scalars":
            sent[op.kind] = sent.get(op.kind, 0) + op.size_bytes
    return {str(kind): sent[kind] for kind in OpKind if kind in sent}


_HEAD = ("layout", "weights", "gradients", "optimizer", "collectives of a step (bytes of their buffers)")


def _cells(row: Row) -> tuple[str, ...]:
    if row.memory is None or row.sent is None:
        return (str(row.layout), "", "", "", f"rejected: {row.reason}")
    sizes = (row.memory.weights, row.memory.gradients, row.memory.optimizer)
    sent = ", ".join(f"{kind} {size:,}" for kind, size in row.sent.items())
    return (str(row.layout), *(f"{size:,}" for size in sizes), sent or "none")


SCREENFUL = 40
"""The rows that a table has at most, unless all are asked for."""
_LEGAL, _RULES = 20, 12
"""The valid layouts, and the rules of refusals, that a shortened table shows at most."""


def as_text(rows: Sequence[Row], *, whole: bool = False) -> str:
    """Write the table for a terminal: bytes that rank 0 holds between steps with Adam, and what a step sends.

    A table of more rows than a screen has begins with the valid ones, and has one line for each rule that refuses others.
    """
    if whole or len(rows) <= SCREENFUL:
        return align_columns([_HEAD, *map(_cells, rows)], left=(0, len(_HEAD) - 1))
    legal = [row for row in rows if not row.reason]
    lines = [f"{len(legal):,} of {len(rows):,} layouts are valid{_more(len(legal), _LEGAL)}"]
    if legal:
        lines.append(align_columns([_HEAD, *map(_cells, legal[:_LEGAL])], left=(0, len(_HEAD) - 1)))
    rules: dict[str, list[Row]] = {}
    for row in rows:
        if row.reason:
            rules.setdefault(row.reason.partition(":")[0].translate(_NUMBERS), []).append(row)
    ranked = sorted(rules.values(), key=len, reverse=True)
    lines.append(f"rejected by {len(ranked)} rules{_more(len(ranked), _RULES)}, each with an example")
    lines += [f'  {len(of_rule):,} as "{of_rule[0].layout}": {of_rule[0].reason}' for of_rule in ranked[:_RULES]]
    return "\n".join([*lines, "--whole prints every layout, and --json FILE writes them"])


_NUMBERS = dict.fromkeys(map(ord, "0123456789.,"))
"""Deletes the characters of numbers, in `str.translate`."""


def _more(count: int, shown: int) -> str:
    return f", the first {shown} of them" if count > shown else ""


def as_markdown(rows: Sequence[Row]) -> str:
    """Write the table for a document."""
    lines = [_HEAD, ("---", "---:", "---:", "---:", "---"), *((f"`{c[0]}`", *c[1:]) for c in map(_cells, rows))]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def as_record(row: Row) -> dict[str, object]:
    """Return plain data for JSON."""
    memory = row.memory
    return {
        "layout": str(row.layout),
        "legal": not row.reason,
        "reason": row.reason,
        "bytes": None
        if memory is None
        else {"weights": memory.weights, "gradients": memory.gradients, "optimizer": memory.optimizer},
        "sent": row.sent,
    }
