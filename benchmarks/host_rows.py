"""The rows of `benchmarks/host.py`: layouts beside loops by hand, what was measured of them, and why an aim is missed."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import samestep

KEPT = Path(__file__).parent / "rows" / "host.json"
"""The figures of a quiet machine, by the name of the row."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """A layout beside the loop by hand that computes the same."""

    name: str
    aim: float | None
    """The largest ratio that is good enough."""
    cause: str = ""
    """What makes the ratio large, where it has missed the aim: a fact that was counted or measured."""
    model: str = "llama"
    layout: str = "dp=1"
    peer: str = "a loop by hand"
    precision: str = "float32"
    microbatches: int = 1
    samples: int = 1
    """Samples of a micro-batch."""
    options: dict[str, Any] = field(default_factory=dict)
    """Arguments of the model."""
    backend: str = ""
    """The compiler of its blocks; empty where they run as they are."""

    @property
    def num_ranks(self) -> int:
        """The number of processes."""
        return samestep.Layout(self.layout).world_size


_FIXED = (
    "Once per step: five comparisons of the attributes that hold weights and modules, five readings of the generators of random "
    "numbers, and the report"
)
_RAISED = "33 layer norms in float32, which cast inputs, weights and gradients: 264 casts per step that the plain loop does not make"
_HOOKS = "a hook in Python on each of 75 weights, where DDP counts gradients in C++"
UNCOMPILED = "the same, not compiled"
"""The peer of a row of compiled blocks: the same layout without a compiler."""
_DRY = {"dropout": 0.0}
_TWO = {"layers": 8}
ROWS = (
    Row(name="Llama, one rank", aim=1.10, cause=_FIXED),
    Row(name="Llama, one rank, bf16", aim=1.20, precision="bf16"),
    Row(
        name="Llama, 8 micro-batches", aim=1.03, microbatches=8,
        cause="144 functions of Python a micro-batch around its forward, its loss and its backward, which are 1,200 calls of their own",
    ),
    Row(name="Llama, 8 micro-batches, bf16", aim=1.20, microbatches=8, precision="bf16"),
    Row(name="GPT without dropout", aim=1.10, model="gpt", options=_DRY, cause=_FIXED),
    Row(name="GPT with dropout", aim=1.25, model="gpt"),
    Row(name="GPT without dropout, bf16", aim=1.20, model="gpt", options=_DRY, precision="bf16", cause=_RAISED),
    Row(name="GPT with dropout, bf16", aim=1.40, model="gpt", precision="bf16", cause=_RAISED),
    Row(
        name="ResNet-50, one rank", aim=1.10, model="resnet", samples=2,
        cause=f"{_FIXED}. Copies of 159 running buffers, which a skipped step puts back, and a function in Python around each of 53 batch norms",
    ),
    Row(name="dp=2", aim=1.10, layout="dp=2", peer="DDP", options=_TWO, cause=f"{_HOOKS}. {_FIXED}"),
    Row(name="dp=2, bf16", aim=1.20, layout="dp=2", peer="DDP", options=_TWO, precision="bf16", cause=_HOOKS),
    Row(name="zero=3", aim=1.15, layout="dp=2 zero=3", peer="fully_shard", options=_TWO),
    Row(name="zero=3, bf16", aim=1.15, layout="dp=2 zero=3", peer="fully_shard", options=_TWO, precision="bf16"),
    Row(
        name="tp=2", aim=1.30, layout="tp=2", peer="two autograd functions", options=_TWO,
        cause="40 linear layers leave the gradients of their weights until that of their input is on its way, each in a function of "
        "autograd in Python, and 17 more calls of autograd add them: the loop by hand waits for each sum instead",
    ),
    Row(name="pp=2, 1f1b", aim=1.20, layout="pp=2", peer="torch's Schedule1F1B", options=_TWO, microbatches=8),
    Row(name="ResNet-50, dp=2", aim=1.10, model="resnet", layout="dp=2", peer="DDP and an autograd function", samples=2),
    Row(
        name="ResNet-50, dp=2, beside local statistics", aim=2.0, model="resnet", layout="dp=2", peer="DDP", samples=2,
        cause="106 collectives a step that the peer does not send, one for each batch norm and direction; the row above has a peer that does",
    ),
    Row(name="Llama, compiled", aim=1.0, peer=UNCOMPILED, options=_TWO, backend="inductor"),
    Row(name="GPT with dropout, compiled", aim=1.0, model="gpt", peer=UNCOMPILED, options=_TWO, backend="inductor"),
    Row(name="tp=2, compiled", aim=1.0, layout="tp=2", peer=UNCOMPILED, options=_TWO, backend="inductor"),
)  # fmt: skip


def figures_of(found: Mapping[str, Any]) -> dict[str, Any]:
    """Return what is kept of the measurements of a row: of each ratio the quartiles."""
    ratios = {name: statistics.quantiles(each, n=4) for name, each in found["ratios"].items()}
    return {**found, "ratios": {name: [round(one, 5) for one in quartiles] for name, quartiles in ratios.items()}}


def keep(figures: Mapping[str, Mapping[str, Any]], path: Path = KEPT) -> None:
    """Write the figures of rows in the stead of those that are kept of them."""
    known: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    known |= figures
    lines = [f" {json.dumps(row.name)}: {json.dumps(known[row.name])}" for row in ROWS if row.name in known]
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


HEADINGS = ("row", "beside", "ratio", "quartiles", "aim", "met", "noise", "ms", "calls of ATen", "calls of Python")


def cells(row: Row, figures: Mapping[str, Any]) -> list[str]:
    """Return the cells of a row."""
    low, median, high = figures["ratios"]["ours"]
    twin = figures["ratios"].get("twin")
    ms, aten, python = (figures[name] for name in ("ms", "calls", "python"))
    return [
        row.name,
        row.peer,
        f"{median:.2f}",
        f"{low:.2f} to {high:.2f}",
        f"{row.aim:.2f}" if row.aim is not None else "",
        "" if row.aim is None else ("yes" if _meets(row, figures) else "no"),
        f"{twin[1]:.2f}" if twin else "",
        f"{ms['ours']:.1f} / {ms['peer']:.1f}",
        f"{aten['ours']:,} / {aten['peer']:,}",
        f"{python['ours']:,} / {python['peer']:,}",
    ]


def _meets(row: Row, figures: Mapping[str, Any]) -> bool:
    return row.aim is None or round(figures["ratios"]["ours"][1], 2) <= row.aim


def is_slower(row: Row, figures: Mapping[str, Any]) -> bool:
    """Return whether compiled blocks take longer than the same without a compiler, beyond the quartiles of the turns."""
    return bool(row.backend) and figures["ratios"]["ours"][0] > 1.0


def why_missed(row: Row, figures: Mapping[str, Any]) -> str:
    """Return why a row misses its aim, beginning with whether the aim is within the spread of its turns; empty where it is met."""
    if _meets(row, figures):
        return ""
    low, _, high = figures["ratios"]["ours"]
    assert row.aim is not None
    spread = "The aim is between the quartiles" if low <= row.aim <= high else ""
    return ". ".join(filter(None, [spread, row.cause]))


def markdown(path: Path = KEPT, rows: Sequence[Row] = ROWS) -> str:
    """Return the table of the kept figures, and below it the causes of missed aims."""
    kept = json.loads(path.read_text(encoding="utf-8"))
    lines = [f"| {' | '.join(HEADINGS)} |", "| --- | --- |" + " ---: |" * (len(HEADINGS) - 2)]
    lines += [f"| {' | '.join(cells(row, kept[row.name]))} |" for row in rows if row.name in kept]
    missed = [(row.name, why_missed(row, kept[row.name])) for row in rows if row.name in kept]
    if any(why for _, why in missed):
        lines += ["", "| missed by | why |", "| --- | --- |"]
        lines += [f"| {name} | {why} |" for name, why in missed if why]
    return "\n".join(lines)
