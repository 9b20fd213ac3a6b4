"""Recurrences on ranks of `cp`: each computes its tokens from the state of the rank before, and passes on the state after them.

    hop 0            hop 1
    rank 0 ──state──► rank 1 ──state──► rank 2       (back: the gradients of states, from the last rank on)

All ranks take part in every hop, so that they send the same: what is sent before a rank's state is there, or after it is gone, is
read by nobody and not waited for. States are sent in master precision. A rank waits while those before it compute, so the
time of a recurrence is that of all tokens; what stands around it is divided (`independence/traced_moves.py` finds the calls).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from samestep.building.recurrences import State, StateCall
from samestep.building.torch_seams import disable_current_modes
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
    given = operands(*call.args, *call.kwargs.values())
    anchor = next((one for one in given if one.requires_grad), given[0])
    state: State | None = None
    if hops.rank:
        shapes = _shapes_of(call)
        packed = _Arriving.apply(anchor, hops, sum(shape.numel() for shape in shapes))
        parts = packed.split([shape.numel() for shape in shapes])
        state = tuple(part.view(shape.shape).to(shape.dtype) for part, shape in zip(parts, shapes, strict=True))
    tokens, last = call.run(state)
    if hops.rank == hops.degree - 1:
        return tokens, last
    packed = torch.cat([one.reshape(-1).to(hops.dtype) for one in last])
    passed: Tensor = _Leaving.apply(tokens, packed, hops)
    return passed, last


_known_shapes: dict[Any, list[Tensor]] = {}


def _shapes_of(call: StateCall) -> list[Tensor]:
    """Return the state after a call on the meta device."""
    given = operands(*call.args, *call.kwargs.values())
    key = call.key, tuple((one.shape, one.dtype) for one in given)
    if key not in _known_shapes:
        args, kwargs = tree_map_only(Tensor, lambda one: one.detach().to("meta"), (call.args, call.kwargs))
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
