"""Crossings: where a tensor of one rank becomes one of its group, with another move for its gradient.

A crossing is a move there, and another one back for its gradient. Each is made of one collective, or of none. In a graph of
`torch.compile` the collectives are operations of this file, which compilers neither look into nor compute twice:

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

import functools
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


Change = Callable[[Tensor], Tensor]


def through(x: Tensor, there: Change, back: Change) -> Tensor:
    """Return `there(x)`, whose gradient goes through `back`; collective where these are, see [Note: collective calls]."""
    result: Tensor = Through.apply(x, (there, back))
    return result


class Through(torch.autograd.Function):
    """The operation of `through`, which takes both functions as one argument: torch looks through each in Python."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, how: tuple[Change, Change]) -> Tensor:
        """Return `there(x)`."""
        there, ctx.back = how
        return there(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        """Return `back` of the gradient."""
        return ctx.back(gradients[0]), None


class GroupLine(NamedTuple):
    """The collectives of a group of ranks under the name of their owner, outside of graphs. Each is collective over the group."""

    group: dist.ProcessGroup
    owner: str
    meanwhile: Callable[[], object] | None = None
    """What the host does while a sum is under way."""

    @property
    def degree(self) -> int:
        """Number of ranks."""
        return self.group.size()

    @property
    def rank(self) -> int:
        """Number of this rank among them."""
        return self.group.rank()

    def all_reduce(self, x: Tensor) -> Tensor:
        """Return the sum over all ranks."""
        total = x.clone(memory_format=torch.contiguous_format)
        with ledger.owned(self.owner) as issue:
            work = issue.sent(dist.all_reduce(total, group=self.group, async_op=True))
        if self.meanwhile is not None:
            self.meanwhile()
        work.wait()
        return total

    def all_gather(self, x: Tensor) -> Tensor:
        """Return the tensors of all ranks, one behind the other along dimension 0."""
        parts = x.new_empty(self.degree * x.shape[0], *x.shape[1:])
        with ledger.owned(self.owner):
            all_gather(parts, x.contiguous(), group=self.group)
        return parts

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """Return this rank's part along dimension 0 of the sum over all ranks."""
        part = x.new_empty(x.shape[0] // self.degree, *x.shape[1:])
        with ledger.owned(self.owner) as issue:
            work = issue.sent(reduce_scatter(part, x.contiguous(), group=self.group, async_op=True))
        if self.meanwhile is not None:
            self.meanwhile()
        work.wait()
        return part

    def all_to_all(self, x: Tensor) -> Tensor:
        """Send each rank its part along dimension 0; return those of all ranks."""
        sent = x.contiguous()
        received = torch.empty_like(sent)
        with ledger.owned(self.owner):
            dist.all_to_all_single(received, sent, group=self.group)
        return received


def moved(
    x: Tensor,
    group: dist.ProcessGroup,
    owner: str,
    there: MoveName,
    back: MoveName,
    meanwhile: Callable[[], object] | None = None,
) -> Tensor:
    """Return x after the move there; its gradient takes the move back. Beside each sum of these `meanwhile` is called.

    Collective over `group` where the moves are, see [Note: collective calls].
    """
    line = GroupLine(group, owner, meanwhile)
    moves = functools.partial(_MOVES[there], wire=line), functools.partial(_MOVES[back], wire=line)
    result: Tensor = Through.apply(x, moves)
    return result


class RankCrossing:
    """One crossing of a module: the move `there` and, for the gradient, the move `back`; outside of graphs `uncompiled`, if it is given.

    Operations of a graph are given the number of its place in this process, and look it up when they run. Collective over `group` where its
    moves are, see [Note: collective calls].
    """

    def __init__(
        self,
        owner: str,
        group: dist.ProcessGroup,
        there: MoveName,
        back: MoveName,
        uncompiled: Callable[[Tensor], Tensor] | None = None,
        *,
        is_shared: bool = False,
    ) -> None:
        self.line = GroupLine(group, owner)
        self.place = torch.tensor(len(_NUMBERED))
        """The number, int64, as the operations of a graph are given it."""
        _PLACES[len(_NUMBERED)] = self
        _NUMBERED.append(None)
        self.degree, self.index = self.line.degree, self.line.rank
        self._there, self._back, self._is_shared = there, back, is_shared
        self._uncompiled = uncompiled or functools.partial(moved, group=group, owner=owner, there=there, back=back)

    def __call__(self, x: Tensor) -> Tensor:
        """Return x after the move there."""
        if torch.compiler.is_dynamo_compiling():
            return cross(x, self.place, self.degree, self.index, self._there, self._back, self._is_shared)
        return self._uncompiled(x)


_NUMBERED: list[None] = []
"""One element for each place so far: numbers are not used twice."""
_PLACES: WeakValueDictionary[int, RankCrossing] = WeakValueDictionary()


def trial_place(tensor: Tensor) -> Tensor | None:
    """Return the number of a place that sends nothing, in the stead of one of this process; None for any other tensor."""
    return _NOWHERE if any(tensor is crossing.place for crossing in _PLACES.values()) else None


_NOWHERE = torch.tensor(-1)
"""The place in a graph that is tried, at which each operation computes a result of its shape from x alone."""


# -- in a graph ------------------------------------------------------------------------------------


class _At(NamedTuple):
    """The collectives of one crossing as operations of a graph."""

    place: Tensor
    degree: int
    rank: int

    def all_reduce(self, x: Tensor) -> Tensor:
        return torch.ops.samestep.all_reduce(x, self.place)

    def all_gather(self, x: Tensor) -> Tensor:
        return torch.ops.samestep.all_gather(x, self.degree, self.place)

    def reduce_scatter(self, x: Tensor) -> Tensor:
        return torch.ops.samestep.reduce_scatter(x, self.degree, self.place)

    def all_to_all(self, x: Tensor) -> Tensor:
        return torch.ops.samestep.all_to_all(x, self.place)


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


# -- the moves -------------------------------------------------------------------------------------

Wire = GroupLine | _At
"""The collectives of a group, of which moves are made."""


def _gather(x: Tensor, wire: Wire) -> Tensor:
    return wire.all_gather(x).view(wire.degree, *x.shape).transpose(0, 1).flatten(1, 2)


def _scatter(x: Tensor, wire: Wire) -> Tensor:
    return wire.reduce_scatter(x.unflatten(1, (wire.degree, -1)).transpose(0, 1).flatten(0, 1))


def _gather_last(x: Tensor, wire: Wire) -> Tensor:
    return torch.cat(wire.all_gather(x).split(x.shape[0]), dim=-1)


def _to_heads(part: Tensor, wire: Wire) -> Tensor:
    """Exchange tokens for heads, [B, A, T/N, D] -> [B, A/N, T, D]."""
    return wire.all_to_all(torch.unflatten(part, 1, (wire.degree, -1)).movedim(1, 0)).movedim(0, 2).flatten(2, 3)


def _to_tokens(part: Tensor, wire: Wire) -> Tensor:
    """Exchange heads for tokens, [B, A/N, T, D] -> [B, A, T/N, D]."""
    received = wire.all_to_all(torch.unflatten(part, 2, (wire.degree, -1)).movedim(2, 0))
    # The heads of a token side by side, as the kernels write them: code may view the output so.
    return received.permute(1, 3, 0, 2, 4).flatten(2, 3).transpose(1, 2)


_MOVES: dict[str, Callable[..., Tensor]] = {
    "sum": lambda x, wire: wire.all_reduce(x),
    "gather": _gather,
    "scatter": _scatter,
    # Of one sample a rank's tokens are a view, with which autograd would keep all tokens.
    "own": lambda x, wire: x.chunk(wire.degree, dim=1)[wire.rank].clone(memory_format=torch.contiguous_format),
    "gather_last": _gather_last,
    "own_last": lambda x, wire: x.chunk(wire.degree, dim=-1)[wire.rank].contiguous(),
    "swap": lambda x, wire: wire.all_to_all(x),
    "to_heads": _to_heads,
    "to_tokens": _to_tokens,
    "keep": lambda x, wire: x.view_as(x),
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


def _line_at(place: Tensor) -> GroupLine | None:
    """Return the line of the crossing at a place; None where nothing is sent."""
    number = int(place)
    return None if number < 0 else _PLACES[number].line


def _all_reduce(x: Tensor, place: Tensor) -> Tensor:
    line = _line_at(place)
    return x.clone(memory_format=torch.contiguous_format) if line is None else line.all_reduce(x)


def _all_gather(x: Tensor, degree: int, place: Tensor) -> Tensor:
    line = _line_at(place)
    return torch.cat([x] * degree) if line is None else line.all_gather(x)


def _reduce_scatter(x: Tensor, degree: int, place: Tensor) -> Tensor:
    if (line := _line_at(place)) is None:
        return x[: x.shape[0] // degree].clone(memory_format=torch.contiguous_format)
    return line.reduce_scatter(x)


def _all_to_all(x: Tensor, place: Tensor) -> Tensor:
    line = _line_at(place)
    return x.clone(memory_format=torch.contiguous_format) if line is None else line.all_to_all(x)


_LIBRARY = torch.library.Library("samestep", "FRAGMENT")


def _define(schema: str, carry_out: Callable[..., Any], shape: Callable[..., Any]) -> None:
    """Define an operation that communicates, with the function that gives results of its shapes on fake tensors."""
    name = schema.partition("(")[0]
    _LIBRARY.define(schema, tags=(torch.Tag.cudagraph_unsafe,))  # the ledger and the place are read in each call
    _LIBRARY.impl(name, carry_out, "CompositeExplicitAutograd")
    torch.library.register_fake(f"samestep::{name}", shape, lib=_LIBRARY)
    ledger.SENDING[f"samestep::{name}"] = carry_out


_define("all_reduce(Tensor x, Tensor place) -> Tensor", _all_reduce, lambda x, place: x.new_empty(x.shape))
_define(
    "all_gather(Tensor x, int degree, Tensor place) -> Tensor",
    _all_gather,
    lambda x, degree, place: x.new_empty(degree * x.shape[0], *x.shape[1:]),
)
_define(
    "reduce_scatter(Tensor x, int degree, Tensor place) -> Tensor",
    _reduce_scatter,
    lambda x, degree, place: x.new_empty(x.shape[0] // degree, *x.shape[1:]),
)
_define("all_to_all(Tensor x, Tensor place) -> Tensor", _all_to_all, lambda x, place: x.new_empty(x.shape))
