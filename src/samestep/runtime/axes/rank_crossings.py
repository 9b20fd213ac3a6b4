"""Crossings: where a tensor of one rank becomes one of its group, with another move for its gradient.

Uncompiled, a crossing calls the functions it is given. In a graph of `torch.compile` it is a function of torch's autograd around
operations of this file, each one collective, which compilers neither look into nor compute twice:

    move        [B, T/N, D] of each rank to                         operations
    sum         the sum over ranks, of the same shape               all_reduce
    gather      the whole sequence [B, T, D]                        all_gather
    scatter     a rank's tokens of the sum, [B, T, D] to [B, T/N, D]  reduce_scatter
    own         a rank's tokens, [B, T, D] to [B, T/N, D]           none
    gather_last, own_last    the same along the last dimension      all_gather, none
    swap        part n of each rank n, [N, ...] to [N, ...]          all_to_all
    to_heads    tokens for heads, [B, A, T/N, D] to [B, A/N, T, D]   all_to_all
    to_tokens   heads for tokens, the way back                       all_to_all
    keep        x itself                                            none

A graph serves all blocks that are equal, so what differs between them is no constant of it: each crossing has a place, an integer
that is an input of the graph, and the operations look up its owner and its group when they run. The backward saves the place.
Crossings of one tensor that share a move become one in the graph (`share`), as `sequence.Shared` makes them one without.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, Literal, NamedTuple
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from samestep.runtime import ledger
from samestep.runtime.processes.mesh import all_gather, reduce_scatter

MoveName = Literal[
    "sum", "gather", "scatter", "own", "gather_last", "own_last", "swap", "to_heads", "to_tokens", "keep"
]


class GraphPlace:
    """A place in this process that sends something within graphs, whose operations are given its number and look it up when they run."""

    def __init__(self, owner: str, group: dist.ProcessGroup) -> None:
        self.owner, self.group = owner, group
        number = len(_NUMBERED)
        self.place = torch.tensor(number)
        """The number, int64, as the operations of a graph are given it."""
        _NUMBERED.append(None)
        _PLACES[number] = self


_NUMBERED: list[None] = []
"""One element for each place so far: numbers are not used twice."""
_PLACES: WeakValueDictionary[int, GraphPlace] = WeakValueDictionary()


class RankCrossing(GraphPlace):
    """One crossing of a module: `uncompiled(x)`, and in a graph the moves `there` and, for the gradient, `back`.

    Collective over `group` where its moves are, see [Note: collective calls].
    """

    def __init__(
        self,
        owner: str,
        group: dist.ProcessGroup,
        there: MoveName,
        back: MoveName,
        uncompiled: Callable[[Tensor], Tensor],
        *,
        is_shared: bool = False,
    ) -> None:
        super().__init__(owner, group)
        self.degree, self.index = dist.get_world_size(group), dist.get_rank(group)
        self._there, self._back, self._uncompiled, self._is_shared = there, back, uncompiled, is_shared

    def __call__(self, x: Tensor) -> Tensor:
        """Return x after the move there."""
        if torch.compiler.is_dynamo_compiling():
            return cross(x, self.place, self.degree, self.index, self._there, self._back, self._is_shared)
        return self._uncompiled(x)


def trial_place(tensor: Tensor) -> Tensor | None:
    """Return the number of a place that sends nothing, in the stead of one of this process; None for any other tensor."""
    return _NOWHERE if any(tensor is crossing.place for crossing in _PLACES.values()) else None


_NOWHERE = torch.tensor(-1)
"""The place in a graph that is tried, at which each operation computes a result of its shape from x alone."""


# -- in a graph ------------------------------------------------------------------------------------


class _At(NamedTuple):
    """The arguments of the operations of one crossing, besides the tensor."""

    place: Tensor
    degree: int
    rank: int


def cross(x: Tensor, place: Tensor, degree: int, index: int, there: str, back: str, is_shared: bool) -> Tensor:
    """Return x after the move there of a crossing in a graph, which contains a call of this function as it is."""
    result: Tensor = _Crossed.apply(x, place, degree, index, there, back)
    return result


class _Crossed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, place: Tensor, degree: int, index: int, there: str, back: str) -> Tensor:
        ctx.save_for_backward(place)
        ctx.degree, ctx.index, ctx.back = degree, index, back
        return _MOVES[there](x, _At(place, degree, index))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (place,) = ctx.saved_tensors
        return _MOVES[ctx.back](gradients[0], _At(place, ctx.degree, ctx.index)), None, None, None, None, None


def _gather(x: Tensor, at: _At) -> Tensor:
    parts = torch.ops.samestep.all_gather(x, at.degree, at.place)
    return parts.view(at.degree, *x.shape).transpose(0, 1).flatten(1, 2)


def _scatter(x: Tensor, at: _At) -> Tensor:
    parts = x.unflatten(1, (at.degree, -1)).transpose(0, 1)
    tensor: Tensor = torch.ops.samestep.reduce_scatter(parts.flatten(0, 1), at.degree, at.place)
    return tensor


def _gather_last(x: Tensor, at: _At) -> Tensor:
    return torch.cat(torch.ops.samestep.all_gather(x, at.degree, at.place).split(x.shape[0]), dim=-1)


def to_heads(part: Tensor, degree: int, swap: Callable[[Tensor], Tensor]) -> Tensor:
    """Exchange tokens for heads, [B, A, T/N, D] -> [B, A/N, T, D], where `swap` sends each rank its part along dimension 0."""
    return swap(torch.unflatten(part, 1, (degree, -1)).movedim(1, 0)).movedim(0, 2).flatten(2, 3)


def to_tokens(part: Tensor, degree: int, swap: Callable[[Tensor], Tensor]) -> Tensor:
    """Exchange heads for tokens, [B, A/N, T, D] -> [B, A, T/N, D], where `swap` sends each rank its part along dimension 0."""
    received = swap(torch.unflatten(part, 2, (degree, -1)).movedim(2, 0))
    # The heads of a token side by side, as the kernels write them: code may view the output so.
    return received.permute(1, 3, 0, 2, 4).flatten(2, 3).transpose(1, 2)


def _swap(x: Tensor, at: _At) -> Tensor:
    received: Tensor = torch.ops.samestep.all_to_all(x, at.place)
    return received


_MOVES: dict[str, Callable[[Tensor, _At], Tensor]] = {
    "sum": lambda x, at: torch.ops.samestep.all_reduce(x, at.place),
    "gather": _gather,
    "scatter": _scatter,
    "own": lambda x, at: x.chunk(at.degree, dim=1)[at.rank].clone(memory_format=torch.contiguous_format),
    "gather_last": _gather_last,
    "own_last": lambda x, at: x.chunk(at.degree, dim=-1)[at.rank].contiguous(),
    "swap": _swap,
    "to_heads": lambda x, at: to_heads(x, at.degree, lambda sent: _swap(sent, at)),
    "to_tokens": lambda x, at: to_tokens(x, at.degree, lambda sent: _swap(sent, at)),
    "keep": lambda x, at: x.view_as(x),
}


def share(graph: torch.fx.Graph) -> None:
    """Let crossings of one tensor that share a move be the first of them, unless the tensor is written in between."""
    first: dict[tuple[Any, ...], torch.fx.Node] = {}
    for node in list(graph.nodes):
        if node.target is cross and node.args[-1]:
            key = (node.args[0], *node.args[4:])
            if key in first:
                node.replace_all_uses_with(first[key])
                graph.erase_node(node)
            else:
                first[key] = node
            continue
        written = _memory_written_by(node)
        if written is not None:
            first = {key: shared for key, shared in first.items() if _memory_of(key[0]) != written}


def _memory_of(node: Any) -> Any:
    value = node.meta.get("example_value") if isinstance(node, torch.fx.Node) else None
    return value.untyped_storage()._cdata if isinstance(value, Tensor) else None


def _memory_written_by(node: torch.fx.Node) -> Any:
    """Return what identifies the memory that a node writes; None where it writes none."""
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    writes = node.op in ("call_method", "call_function") and (
        (name.endswith("_") and not name.endswith("__")) or node.target in _WRITING
    )
    if "out" in node.kwargs:
        return _memory_of(node.kwargs["out"])
    return _memory_of(node.args[0]) if node.args and (writes or node.kwargs.get("inplace") is True) else None


_WRITING = {
    operator.iadd, operator.isub, operator.imul, operator.itruediv, operator.ifloordiv, operator.imod, operator.ipow,
    operator.iand, operator.ior, operator.ixor, operator.imatmul, operator.setitem,
}  # fmt: skip


# -- the operations --------------------------------------------------------------------------------


def sending(place: Tensor) -> Any:
    """Return the `GraphPlace` of a number; None where nothing is sent."""
    number = int(place)
    return None if number < 0 else _PLACES[number]


def _all_reduce(x: Tensor, place: Tensor) -> Tensor:
    total = x.clone(memory_format=torch.contiguous_format)
    if (crossing := sending(place)) is not None:
        with ledger.owned(crossing.owner):
            dist.all_reduce(total, group=crossing.group)
    return total


def _all_gather(x: Tensor, degree: int, place: Tensor) -> Tensor:
    if (crossing := sending(place)) is None:
        return torch.cat([x] * degree)
    parts = x.new_empty(degree * x.shape[0], *x.shape[1:])
    with ledger.owned(crossing.owner):
        all_gather(parts, x.contiguous(), group=crossing.group)
    return parts


def _reduce_scatter(x: Tensor, degree: int, place: Tensor) -> Tensor:
    if (crossing := sending(place)) is None:
        return x[: x.shape[0] // degree].clone(memory_format=torch.contiguous_format)
    part = x.new_empty(x.shape[0] // degree, *x.shape[1:])
    with ledger.owned(crossing.owner):
        reduce_scatter(part, x.contiguous(), group=crossing.group)
    return part


def _all_to_all(x: Tensor, place: Tensor) -> Tensor:
    if (crossing := sending(place)) is None:
        return x.clone(memory_format=torch.contiguous_format)
    return swap(x, crossing.group, crossing.owner)


def swap(sent: Tensor, group: dist.ProcessGroup, owner: str) -> Tensor:
    """Send each rank its part along dimension 0; return those of all ranks.

    Collective over `group`, see [Note: collective calls].
    """
    sent = sent.contiguous()
    received = torch.empty_like(sent)
    with ledger.owned(owner):
        dist.all_to_all_single(received, sent, group=group)
    return received


_LIBRARY = torch.library.Library("samestep", "FRAGMENT")


def define(schema: str, carry_out: Callable[..., Any], shape: Callable[..., Any]) -> None:
    """Define an operation that communicates, with the function that gives results of its shapes on fake tensors."""
    name = schema.partition("(")[0]
    _LIBRARY.define(schema, tags=(torch.Tag.cudagraph_unsafe,))  # the ledger and the place are read in each call
    _LIBRARY.impl(name, carry_out, "CompositeExplicitAutograd")
    torch.library.register_fake(f"samestep::{name}", shape, lib=_LIBRARY)
    ledger.SENDING[f"samestep::{name}"] = carry_out


define("all_reduce(Tensor x, Tensor place) -> Tensor", _all_reduce, lambda x, place: x.new_empty(x.shape))
define(
    "all_gather(Tensor x, int degree, Tensor place) -> Tensor",
    _all_gather,
    lambda x, degree, place: x.new_empty(degree * x.shape[0], *x.shape[1:]),
)
define(
    "reduce_scatter(Tensor x, int degree, Tensor place) -> Tensor",
    _reduce_scatter,
    lambda x, degree, place: x.new_empty(x.shape[0] // degree, *x.shape[1:]),
)
define("all_to_all(Tensor x, Tensor place) -> Tensor", _all_to_all, lambda x, place: x.new_empty(x.shape))
