"""A plan of tensor parallelism for a model that has none, read from the data flow between its linear layers.

What leaves the first layers of a block's attention or MLP reaches the last one, and nothing else:

    q, k, v = x Wq, x Wk, x Wv      by columns: each rank computes the features of some heads
    y = attention(q, k, v) Wo       by rows: each rank computes a summand of y; their sum over ranks is y

So a linear layer is cut by rows where everything that reaches its input left linear layers of the blocks, and the stream
of hidden states that blocks hand on is not among it. A layer is cut by columns where all that reads it is cut by rows.
Layers are decided from the last to the first: of three in a row the last two are cut. The head is the linear layer whose
output is the prediction; it is cut along the vocabulary with the embedding of as many rows.

The plan is a proposal. `cut_proof` follows the units of every cut through the forward, and what it cannot prove is
gathered, or left whole.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from samestep.building.families import facts_of
from samestep.models.spec import is_below
from samestep.tracing.arranged_layers import block_of
from samestep.tracing.containers import containers_of
from samestep.tracing.operations import Operation, View

_aten = torch.ops.aten

OUTSIDE = ""
"""Stands for the weights outside the blocks, such as embeddings, among what reaches a tensor."""


@dataclass(slots=True)
class _LinearFlow:
    """The layers whose outputs reach each linear layer without another linear layer in between."""

    reaching: dict[str, set[str]] = field(default_factory=dict)
    """By the path of a linear layer: linear layers, or `OUTSIDE`; in the order of the forward."""
    prediction: frozenset[str] = frozenset()
    """What reaches the model's prediction."""

    def readers_of(self, path: str) -> list[str]:
        """Return the linear layers that read what a layer computes."""
        return [reader for reader, sources in self.reaching.items() if path in sources]


def structural_plan(
    model: nn.Module, operations: list[Operation], experts: Collection[str], whole: Collection[str] = ()
) -> dict[str, str]:
    """Return the cut style of each module of a plan, by its path; empty where nothing in the blocks can be cut.

    `operations` are those of a forward of the whole model; modules of `experts` and below stay whole, and so do those in `whole`.
    """
    facts, computed = facts_of(model), _by_module(operations)
    linears = {
        path: part
        for path, part in model.named_modules()
        if (_adds_nothing_else(part, computed.get(path, ())) or facts.is_transposed(part))
        and not any(is_below(path, one) for one in experts)
        and path not in whole
    }
    blocks = containers_of(model)
    flow = _flow(model, operations, linears, blocks)
    inside = [path for path in flow.reaching if not blocks or block_of(path, blocks)]
    rows: set[str] = set()
    columns: set[str] = set()
    for path in reversed(inside):
        sources = flow.reaching[path]
        readers = flow.readers_of(path)
        if readers and rows.issuperset(readers):
            columns.add(path)
        elif sources and sources <= {*inside} - {path}:
            rows.add(path)
    rows = {path for path in rows if columns & flow.reaching[path]}
    if not rows:
        return {}
    plan = {path: "column" for path in inside if path in columns} | {path: "row" for path in inside if path in rows}
    return plan | {path: "vocab" for path in _vocabulary(model, linears, inside, flow) if path not in whole}


def _by_module(operations: list[Operation]) -> dict[str, list[Operation]]:
    """Return the operations that each module's code runs outside of its submodules, by its path."""
    found: dict[str, list[Operation]] = {}
    for op in operations:
        if op.func not in ("left", "outputs"):
            found.setdefault(op.where, []).append(op)
    return found


def _adds_nothing_else(part: nn.Module, computed: Sequence[Operation]) -> bool:
    """Return whether a module is a linear layer with torch's forward, or one whose bias a row cut can postpone: it has none, or each of
    its calls is one product to which it is added, as of a layer that casts its weights."""
    if not isinstance(part, nn.Linear):
        return False
    if type(part).forward is nn.Linear.forward or part.bias is None:
        return True
    bias = part.bias.untyped_storage()._cdata
    adds = [any(view.storage == bias for view in op.given) and not op.kwargs for op in computed]
    found = [(op.func, is_added) for op, is_added in zip(computed, adds, strict=True)]
    one, *both = (_aten.addmm.default, True), (_aten.mm.default, False), (_aten.add.Tensor, True)
    return bool(found) and found in ([one] * len(found), both * (len(found) // 2))


def _vocabulary(
    model: nn.Module, linears: Mapping[str, nn.Module], inside: Collection[str], flow: _LinearFlow
) -> list[str]:
    """Return the paths of the head and of the embedding of the same vocabulary; the largest embedding without a head."""
    outside = ((path, part) for path, part in model.named_modules() if not block_of(path, containers_of(model)))
    tables = {path: part for path, part in outside if isinstance(part, nn.Embedding)}
    heads = [path for path in flow.prediction if path in linears and path not in inside]
    if len(heads) == 1 and flow.prediction == {heads[0]} and isinstance(head := linears[heads[0]], nn.Linear):
        return [*(path for path, table in tables.items() if table.num_embeddings == head.out_features), heads[0]]
    largest = max(tables, key=lambda path: tables[path].weight.numel(), default=None)
    return [largest] if largest is not None else []


def _flow(
    model: nn.Module, operations: list[Operation], linears: Mapping[str, nn.Module], blocks: Collection[str]
) -> _LinearFlow:
    weights = {
        param.untyped_storage()._cdata: path
        for path, part in model.named_modules()
        for param in part.parameters(recurse=False)
    }
    outside = {key for key, path in weights.items() if not block_of(path, blocks)}
    reached: dict[int, frozenset[str]] = {}
    flow = _LinearFlow()
    for op in operations:
        if op.func == "outputs":
            prediction = op.args[0]
            if isinstance(prediction, View):
                flow.prediction = reached.get(prediction.storage, frozenset())
            continue
        if op.func == "left":
            continue
        sources: frozenset[str] = frozenset().union(*(reached.get(view.storage, frozenset()) for view in op.given))
        if op.where in linears:
            flow.reaching.setdefault(op.where, set()).update(sources - {op.where})
            sources = frozenset({op.where})
        elif not sources and any(view.storage in outside for view in op.given):
            sources = frozenset({OUTSIDE})
        for view in op.results:
            if view.storage not in weights:
                reached[view.storage] = reached.get(view.storage, frozenset()) | sources if op.writes else sources
    return flow
