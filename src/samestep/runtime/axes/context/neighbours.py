"""Calls that need tokens or a state of other ranks of `cp`: windows of neighbours, and recurrences.

A call that computes a token from those at a fixed distance (`independence/token_moves.py`) is given the last tokens of the rank before:

    rank r - 1   [ ...  x y ]
                        └─┴──────────► in front of
    rank r                           [ x y | a b c ... ]

Each rank sends its last tokens to the next one, and around the ring, so that all ranks send the same; the first rank has what the
code puts there in their place. In the backward their gradients go back and are added to those of the rank that has these tokens.

A recurrence computes a rank's tokens from the state of the rank before, and passes on the state after them
(`independence/traced_moves.py` finds such calls):

    hop 0            hop 1
    rank 0 ──state──► rank 1 ──state──► rank 2       (back: the gradients of states, from the last rank on)

All ranks take part in every hop, so that they send the same: what is sent before a rank's state is there, or after it is gone, is
read by nobody and not waited for. A rank waits while those before it compute, so the time of a recurrence is that of all tokens; what
stands around it is divided. Tokens and states are sent in master precision, since they are few.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from samestep.building.recurrences import State, StateCall, functions_of, intercepting
from samestep.building.torch_seams import disable_current_modes
from samestep.errors import LayoutError
from samestep.independence.token_moves import Edge, TokenPlace, ViewSources, form_of, kind_of, operands_of
from samestep.models.layer_parts import TokenMove
from samestep.models.spec import ModelSpec
from samestep.runtime.axes.context.whole_parts import Slices
from samestep.runtime.ledger import owned
from samestep.trees import operands, tree_map_only

_MOST_UNDER_WAY = 64
"""Messages that nobody reads and that are not yet waited for."""
_under_way: deque[Callable[[], Tensor]] = deque()


class Hops(NamedTuple):
    """The messages of one recurrence."""

    rank: int
    degree: int
    group: dist.ProcessGroup
    owner: str
    dtype: torch.dtype

    def pass_on(
        self, numbers: Sequence[int], state: Tensor | None, numel: int, device: torch.device, by: int
    ) -> Tensor:
        """Take part in some hops; return what the last of them brings. `state` is sent in the first."""
        received = torch.zeros(0)
        for at, _ in enumerate(numbers):
            is_last = at == len(numbers) - 1
            sent = state if at == 0 and state is not None else torch.zeros(numel, dtype=self.dtype, device=device)
            wait = shift(sent, self.group, self.owner, by)
            if is_last and state is None:
                received = wait()
            else:
                _leave(wait)
        return received


def _leave(wait: Callable[[], Tensor]) -> None:
    """Keep a message that nobody reads until it must have arrived."""
    _under_way.append(wait)
    while len(_under_way) > _MOST_UNDER_WAY:
        _under_way.popleft()()


def run_from_state_before(call: StateCall, hops: Hops) -> tuple[Tensor, State]:
    """Return a rank's tokens and the state after them.

    Collective over `cp`, in the backward too, see [Note: collective calls].
    """
    tensors = operands(*call.args, *call.kwargs.values())
    anchor = next((tensor for tensor in tensors if tensor.requires_grad), tensors[0])
    state: State | None = None
    if hops.rank:
        shapes = _shapes_of(call)
        packed = _Arriving.apply(anchor, hops, sum(shape.numel() for shape in shapes))
        parts = packed.split([shape.numel() for shape in shapes])
        state = tuple(part.view(shape.shape).to(shape.dtype) for part, shape in zip(parts, shapes, strict=True))
    tokens, last = call.run(state)
    if hops.rank == hops.degree - 1:
        return tokens, last
    packed = torch.cat([state.reshape(-1).to(hops.dtype) for state in last])
    passed: Tensor = _Leaving.apply(tokens, packed, hops)
    return passed, last


_known_shapes: dict[Any, list[Tensor]] = {}


def _shapes_of(call: StateCall) -> list[Tensor]:
    """Return the state after a call on the meta device."""
    tensors = operands(*call.args, *call.kwargs.values())
    key = call.key, tuple((tensor.shape, tensor.dtype) for tensor in tensors)
    if key not in _known_shapes:
        args, kwargs = tree_map_only(Tensor, lambda tensor: tensor.detach().to("meta"), (call.args, call.kwargs))
        with torch.no_grad(), disable_current_modes():  # selective recompute would keep its products
            _known_shapes[key] = [*call.run(None, args, kwargs)[1]]
    return _known_shapes[key]


class _Arriving(torch.autograd.Function):
    """The state of the rank before; its gradient is sent back there."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, hops: Hops, numel: int) -> Tensor:
        ctx.hops, ctx.numel = hops, numel
        return hops.pass_on(range(hops.rank), None, numel, anchor.device, 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        hops = ctx.hops
        hops.pass_on(range(hops.rank), gradients[0].contiguous(), ctx.numel, gradients[0].device, -1)
        return None, None, None


class _Leaving(torch.autograd.Function):
    """Sends a state to the next rank with the tokens before it; its gradient arrives from there."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, state: Tensor, hops: Hops) -> Tensor:
        ctx.hops, ctx.numel = hops, state.numel()
        ctx.save_for_backward(
            state[:0]
        )  # a recomputed forward comes as far as here, and before the hops of the backward
        hops.pass_on(range(hops.rank, hops.degree - 1), state.contiguous(), ctx.numel, tokens.device, 1)
        return tokens.view_as(tokens)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        hops, _ = ctx.hops, ctx.saved_tensors
        numbers = range(hops.rank, hops.degree - 1)
        return gradients[0], hops.pass_on(numbers, None, ctx.numel, gradients[0].device, -1), None


def shift(buffer: Tensor, group: dist.ProcessGroup, owner: str, by: int = 1) -> Callable[[], Tensor]:
    """Begin to send a buffer to the rank `by` places after this one; return a function that waits for that of the rank as far before.

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


class NeighbourTokens:
    """The calls of a model that need tokens of neighbours."""

    def __init__(self, model: nn.Module, spec: ModelSpec, slicing: Slices, dtype: torch.dtype) -> None:
        self._slicing, self._dtype = slicing, dtype
        self._running: list[_Owner | None] = []
        """The modules that make such calls and run, innermost last, with None for those that they call."""
        self.sources: ViewSources | None = None
        """Of which tensor each view has been taken; None where no call asks."""
        owners: dict[str, _Owner] = {}
        for move in (move for layer in spec.layers for move in layer.token_moves):
            owner = owners.setdefault(move.owner, _Owner(move.owner, {}, {}, Counter()))
            if move.kind == "state":
                owner.states[move.function, move.number] = move
            else:
                owner.moves[move.number] = move
                self.sources = self.sources or ViewSources()
        self._functions = functions_of(model) if any(mixer.states for mixer in owners.values()) else []
        for path, calls in owners.items():
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

    @property
    def place(self) -> _Owner | None:
        """The calls of the running module with the count of those that have returned; None if it has none."""
        calls = self._running[-1] if self._running else None
        return None if calls is None else calls._replace(made=Counter(calls.made))

    @contextmanager
    def at(self, place: _Owner | None) -> Iterator[None]:
        """Return the context of a forward from a place on: a block is recomputed without the hooks around it."""
        previous, self._running = self._running, [] if place is None else [place._replace(made=Counter(place.made))]
        try:
            yield
        finally:
            self._running = previous

    def _closing(self, *_: Any) -> None:
        self._running.append(None)

    def _opening(self, *_: Any) -> None:
        self._running.pop()

    def _entering(self, calls: _Owner) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            self._running.append(calls._replace(made=Counter()))

        return hook

    def _left(self, _: nn.Module, args: Any, output: Any) -> None:
        calls, has_failed = self._running.pop(), output is None
        assert calls is not None
        num_calls = calls.made[_HANDLED]
        if self._slicing.length and not has_failed and num_calls != len(calls.moves) + len(calls.states):
            raise LayoutError(
                "cp-forward-differs",
                f"{calls.path} has made {num_calls} calls that need something of neighbours, and {len(calls.moves) + len(calls.states)} in the traced "
                "forward. Use cp=1",
            )

    def intercept(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Return the result of a call that needs tokens of neighbours; `NotImplemented` for another one.

        Collective over `cp`, in the backward too, see [Note: collective calls].

        Raises:
            LayoutError: the call needs other tokens of neighbours than in the traced forward.
        """
        kind, calls, sources = kind_of(func), self._running[-1], self.sources
        if kind is None or calls is None or sources is None:
            return NotImplemented
        move = calls.moves.get(calls.made[_OF_OPERANDS])
        calls.made[_OF_OPERANDS] += 1
        if move is None:
            return NotImplemented
        calls.made[_HANDLED] += 1
        tensors, tokens = operands_of(func, args, kwargs), self._slicing.length // self._slicing.degree
        indices = [at for at, tensor in enumerate(tensors) if tensor.dim() > move.dim]
        if move.kind == "write":
            indices = indices[1:]
        elif move.kind != "cat":  # of which any part may have the tokens
            indices = indices[:1]
        if kind != ("write" if move.kind == "edge" else move.kind):
            indices = []
        places = (TokenPlace(at, move.dim, move.start) for at in indices)
        forms = (form_of(func, args, kwargs, place, tokens, sources) for place in places)
        needed = move.left, move.right
        form = next((f for f in forms if f is not None and (f.left, f.right) == needed), None)
        if form is None:
            raise LayoutError(
                "cp-forward-differs",
                f"{move.owner} calls {getattr(func, '__name__', func)} with other arguments than in the traced forward, where it needed "
                f"{move.left} tokens before a rank's and {move.right} after them. Use cp=1",
            )
        return form.compute(self._extending(move))

    def receiving(self) -> AbstractContextManager[None]:
        """Return the context of a forward, in which functions with a state are given that of the rank before."""
        return intercepting(self._functions, self._receive) if self._functions else nullcontext()

    def _receive(self, call: StateCall) -> Any:
        """Return what a function with a state computes of a rank's tokens; `NotImplemented` for a call that the proof has not found."""
        slicing = self._slicing
        calls = self._running[-1] if self._running and slicing.block else None
        if calls is None:
            return NotImplemented
        move = calls.states.get((call.name, calls.made[call.name]))
        calls.made[call.name] += 1
        if move is None:
            return NotImplemented
        if not call.begins:
            raise LayoutError(
                "cp-forward-differs",
                f"{move.owner} calls {call.name} with other arguments than in the traced forward, where it began at no state and asked "
                "for none. Use cp=1",
            )
        calls.made[_HANDLED] += 1
        suspended = slicing.suspend()
        try:
            hops = Hops(slicing.index, slicing.degree, slicing.group, move.owner, self._dtype)
            return call.returned(*run_from_state_before(call, hops))
        finally:
            slicing.resume(suspended)

    def _extending(self, move: TokenMove) -> Callable[..., Tensor]:
        slicing, dtype = self._slicing, self._dtype

        def extend(
            x: Tensor, dim: int, left: int, right: int, first: Edge | None = None, last: Edge | None = None
        ) -> Tensor:
            ends = slicing.index == 0, slicing.index == slicing.degree - 1
            are_edges = tuple(edge is not None and is_end for edge, is_end in zip((first, last), ends, strict=True))
            if not left and not right:
                return x.view_as(x) if any(are_edges) else x
            how = _How(move.owner, slicing.group, dim, left, right, dtype, are_edges)
            edges = [
                x.new_full((*x.shape[:dim], rows, *x.shape[dim + 1 :]), edge)
                if is_edge and isinstance(edge, int | float)
                else edge
                for rows, edge, is_edge in zip((left, right), (first, last), are_edges, strict=True)
            ]
            tensor: Tensor = _Extended.apply(x, *edges, how)
            return tensor

        return extend


_OF_OPERANDS = "calls of some tokens' operands"
_HANDLED = "calls that were given something of neighbours"


class _Owner(NamedTuple):
    """A module that makes such calls, by the number of each."""

    path: str
    moves: dict[int, TokenMove]
    states: dict[tuple[str, int], TokenMove]
    """Those of functions with a state, by the function and the number among its calls: others may be called in an evaluation."""
    made: Counter[str]
    """Numbers of calls so far in a forward, by function, and by these two keys."""


class _How(NamedTuple):
    owner: str
    group: dist.ProcessGroup
    dim: int
    left: int
    right: int
    dtype: torch.dtype
    are_edges: tuple[bool, ...]
    """Whether the rows in front of this rank's tokens are the first of the sequence, and those behind them the last."""


class _Extended(torch.autograd.Function):
    """Tokens with those of neighbours before and after them.

    Rows at the ends of the sequence are an operand on every rank, so that all ranks run the same backwards, in which others may be
    collective: where they are not used, their gradient is zero.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, first: Edge | None, last: Edge | None, how: _How) -> Tensor:
        dim, size = how.dim, x.shape[how.dim]
        ctx.how, ctx.size = how, size
        of_left = _passed(x.narrow(dim, size - how.left, how.left), how, 1)
        behind = _passed(x.narrow(dim, 0, how.right), how, -1)
        parts = [
            edge if is_edge and isinstance(edge, Tensor) else passed()
            for edge, is_edge, passed in (
                (first, how.are_edges[0], of_left),
                (None, False, lambda: x),
                (last, how.are_edges[1], behind),
            )
        ]
        for passed in (of_left, behind):
            passed()
        return torch.cat([part.to(x.dtype) for part in parts], dim)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        how = ctx.how
        of_first, of_own, of_last = gradients[0].split((how.left, ctx.size, how.right), how.dim)
        first, of_before = _divided(of_first, how.are_edges[0])
        last, of_behind = _divided(of_last, how.are_edges[1])
        to_behind, to_before = _passed(of_behind, how, 1), _passed(of_before, how, -1)
        of_own = of_own.clone()
        from_before, from_behind = to_behind(), to_before()
        if how.right:
            of_own.narrow(how.dim, 0, how.right).add_(from_before)
        if how.left:
            of_own.narrow(how.dim, ctx.size - how.left, how.left).add_(from_behind)
        _, needs_first, needs_last, _ = ctx.needs_input_grad
        return of_own, first if needs_first else None, last if needs_last else None, None


def _divided(gradient: Tensor, is_edge: bool) -> tuple[Tensor, Tensor]:
    """Return the gradient of the rows at an end of the sequence, and that of the neighbour's tokens: one of them is zero."""
    nothing = torch.zeros_like(gradient)
    return (gradient, nothing) if is_edge else (nothing, gradient)


def _passed(rows: Tensor, how: _How, by: int) -> Callable[[], Tensor]:
    """Begin to pass rows to a neighbour; return a function that returns those of the other one."""
    if not rows.shape[how.dim]:
        return lambda: rows
    arriving = shift(rows.to(how.dtype).contiguous(), how.group, how.owner, by)
    tensors: list[Tensor] = []

    def wait() -> Tensor:
        if not tensors:
            tensors.append(arriving().to(rows.dtype))
        return tensors[0]

    return wait
