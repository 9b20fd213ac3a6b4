"""Tokens of neighbours on ranks of `cp`, for calls that compute a token from those at a fixed distance (`independence/token_moves.py`).

    rank r - 1   [ ...  x y ]
                        └─┴──────────► in front of
    rank r                           [ x y | a b c ... ]

Each rank sends its last tokens to the next one, and around the ring, so that all ranks send the same; the first rank has what the
code puts there in their place. In the backward their gradients go back and are added to those of the rank that has these tokens.
They are sent in master precision, since they are few.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from samestep.errors import LayoutError
from samestep.independence.token_moves import Edge, TokenPlace, form_of, kind_of, operands_of
from samestep.models.layer_parts import TokenMove
from samestep.models.spec import ModelSpec
from samestep.runtime.ledger import owned


class _Slices(Protocol):
    """What the calls need of the slice of every sequence that a rank runs."""

    length: int
    degree: int
    index: int
    group: dist.ProcessGroup


class NeighbourTokens:
    """The calls of a model that need tokens of neighbours."""

    def __init__(self, model: nn.Module, spec: ModelSpec, slicing: _Slices, dtype: torch.dtype) -> None:
        self._slicing, self._dtype = slicing, dtype
        self._running: list[_Owner | None] = []
        """The modules that make such calls and run, innermost last, with None for those that they call."""
        moves: dict[str, dict[int, TokenMove]] = {}
        for move in (move for layer in spec.layers for move in layer.token_moves):
            moves.setdefault(move.owner, {})[move.number] = move
        for path, of_owner in moves.items():
            calls = _Owner(path, of_owner)
            module = model.get_submodule(path)
            module.register_forward_pre_hook(self._entering(calls))
            module.register_forward_hook(self._left, prepend=True, always_call=True)
            for child in module.children():  # what is done to their outputs is not counted either
                child.register_forward_pre_hook(self._closing, prepend=True)
                child.register_forward_hook(self._opening, always_call=True)

    @property
    def are_here(self) -> bool:
        """Whether a module runs that makes such calls."""
        return bool(self._running) and self._running[-1] is not None

    def _closing(self, *_: Any) -> None:
        self._running.append(None)

    def _opening(self, *_: Any) -> None:
        self._running.pop()

    def _entering(self, calls: _Owner) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            self._running.append(calls._replace(made=[0, 0]))

        return hook

    def _left(self, _: nn.Module, args: Any, output: Any) -> None:
        calls, has_failed = self._running.pop(), output is None
        assert calls is not None
        if self._slicing.length and not has_failed and calls.made[1] != len(calls.moves):
            raise LayoutError(
                f"{calls.path} has made {calls.made[1]} calls that need tokens of neighbours, and {len(calls.moves)} in the traced "
                "forward: cp=1 works"
            )

    def intercept(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Return the result of a call that needs tokens of neighbours; `NotImplemented` for another one.

        Collective over `cp`, in the backward too, see [Note: collective calls].
        """
        kind, calls = kind_of(func), self._running[-1]
        if kind is None or calls is None:
            return NotImplemented
        move = calls.moves.get(calls.made[0])
        calls.made[0] += 1
        if move is None:
            return NotImplemented
        calls.made[1] += 1
        given, tokens = operands_of(func, args, kwargs), self._slicing.length // self._slicing.degree
        found = [at for at, one in enumerate(given) if one.dim() > move.dim]
        if move.kind == "cat":  # the longest part has the tokens
            found = sorted(found, key=lambda at: -given[at].shape[move.dim])
        elif move.kind == "write":
            found = found[1:]
        form = None
        if found and kind == ("write" if move.kind == "edge" else move.kind):
            form = form_of(func, args, kwargs, TokenPlace(found[0], move.dim, move.start), tokens)
        if form is None or (form.left, form.right) != (move.left, move.right):
            raise LayoutError(
                f"{move.owner} calls {getattr(func, '__name__', func)} with other arguments than in the traced forward, where it needed "
                f"{move.left} tokens before a rank's and {move.right} behind: cp=1 works"
            )
        return form.compute(self._extending(move))

    def _extending(self, move: TokenMove) -> Callable[..., Tensor]:
        slicing, dtype = self._slicing, self._dtype

        def extend(
            x: Tensor, dim: int, left: int, right: int, first: Edge | None = None, last: Edge | None = None
        ) -> Tensor:
            ends = slicing.index == 0, slicing.index == slicing.degree - 1
            if not left and not right:
                is_there = any(one is not None and is_end for one, is_end in zip((first, last), ends, strict=True))
                return x.view_as(x) if is_there else x
            how = _How(move.owner, slicing.group, dim, left, right, dtype)
            edges = (
                _rows_at(x, dim, rows, edge) if edge is not None and is_end else None
                for rows, edge, is_end in zip((left, right), (first, last), ends, strict=True)
            )
            found: Tensor = _Extended.apply(x, *edges, how)
            return found

        return extend


class _Owner(NamedTuple):
    """A module that makes such calls, by the number of each."""

    path: str
    moves: dict[int, TokenMove]
    made: list[int] = []  # noqa: RUF012 (given anew in each forward)
    """Number of calls so far, of any operand and of tokens of neighbours."""


class _How(NamedTuple):
    owner: str
    group: dist.ProcessGroup
    dim: int
    left: int
    right: int
    dtype: torch.dtype


def _rows_at(x: Tensor, dim: int, rows: int, edge: Edge) -> Tensor:
    """Return the rows at one end of the sequence."""
    if isinstance(edge, Tensor):
        return edge
    return x.new_full((*x.shape[:dim], rows, *x.shape[dim + 1 :]), edge)


class _Extended(torch.autograd.Function):
    """Tokens with those of neighbours before and behind them; `first` and `last` are given at the ends of the sequence alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, first: Tensor | None, last: Tensor | None, how: _How) -> Tensor:
        dim, size = how.dim, x.shape[how.dim]
        ctx.how, ctx.size, ctx.are_ends = how, size, (first is not None, last is not None)
        before = _passed(x.narrow(dim, size - how.left, how.left), how, 1)
        behind = _passed(x.narrow(dim, 0, how.right), how, -1)
        parts = [
            edge if edge is not None else passed()
            for edge, passed in ((first, before), (None, lambda: x), (last, behind))
        ]
        for passed in (before, behind):
            passed()
        return torch.cat([one.to(x.dtype) for one in parts], dim)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        how, (is_first, is_last) = ctx.how, ctx.are_ends
        of_first, mine, of_last = gradients[0].split((how.left, ctx.size, how.right), how.dim)
        to_behind = _passed(torch.zeros_like(of_last) if is_last else of_last, how, 1)
        to_before = _passed(torch.zeros_like(of_first) if is_first else of_first, how, -1)
        mine = mine.clone()
        from_before, from_behind = to_behind(), to_before()
        if how.right:
            mine.narrow(how.dim, 0, how.right).add_(from_before)
        if how.left:
            mine.narrow(how.dim, ctx.size - how.left, how.left).add_(from_behind)
        return mine, of_first if is_first else None, of_last if is_last else None, None


def _passed(rows: Tensor, how: _How, by: int) -> Callable[[], Tensor]:
    """Begin to pass rows to a neighbour; return a function that returns those of the other one."""
    if not rows.shape[how.dim]:
        return lambda: rows
    arriving = shift(rows.to(how.dtype).contiguous(), how.group, how.owner, by)
    found: list[Tensor] = []

    def wait() -> Tensor:
        if not found:
            found.append(arriving().to(rows.dtype))
        return found[0]

    return wait


def shift(buffer: Tensor, group: dist.ProcessGroup, owner: str, by: int = 1) -> Callable[[], Tensor]:
    """Begin to send a buffer to the rank `by` places behind; return a function that waits for that of the rank as far before.

    Collective over the group, see [Note: collective calls]: an all_to_all in which each rank sends to one rank alone.
    """
    degree, rank = dist.get_world_size(group), dist.get_rank(group)
    received = torch.empty_like(buffer)
    sends, receives = [0] * degree, [0] * degree
    sends[(rank + by) % degree] = receives[(rank - by) % degree] = buffer.numel()
    with owned(owner) as issue:
        work = issue.sent(
            dist.all_to_all_single(received.view(-1), buffer.view(-1), receives, sends, group=group, async_op=True)
        )
    assert work is not None

    def wait() -> Tensor:
        work.wait()
        return received

    return wait
