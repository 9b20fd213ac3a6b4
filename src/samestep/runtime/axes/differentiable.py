"""Differentiable collectives: one communication in the forward, and its counterpart in the backward."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from samestep.building.torch_seams import storage_use_count

Move = Callable[[Tensor, dist.ProcessGroup, str], Tensor]
"""Computes a tensor from one on each rank of a group; the text is the owner of its collectives in the ledger."""


Start = Callable[[Tensor, dist.ProcessGroup, str, bool], tuple[Tensor, Callable[[], object]]]
"""Begins to compute such a tensor; returns it, and a function that waits for it. It may overwrite the given one
where the last argument says so."""


def apply_move(x: Tensor, group: dist.ProcessGroup, owner: str, there: Move, back: Move) -> Tensor:
    """Return `there(x, group, owner)`, whose gradient goes through `back(gradient, group, owner)`.

    Collective over `group` where `there` is, and in the backward where `back` is, see [Note: collective calls].
    """
    result: Tensor = _Moved.apply(x, (group, owner, there, back))
    return result


def apply_move_overlapping(
    x: Tensor, group: dist.ProcessGroup, owner: str, there: Move, back: Start, meanwhile: Callable[[], object]
) -> Tensor:
    """Return `there(x, group, owner)`; `meanwhile` is called in the backward while the gradient goes through `back`.

    Collective over `group` as `apply_move` is.
    """
    result: Tensor = _MovedBeside.apply(x, (group, owner, there, back, meanwhile))
    return result


class _MovedBeside(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, how: tuple[dist.ProcessGroup, str, Move, Start, Callable[[], object]]) -> Tensor:
        group, owner, there, back, meanwhile = how  # one argument: torch looks through each in Python
        ctx.group, ctx.owner, ctx.back, ctx.meanwhile = group, owner, back, meanwhile
        return there(x, group, owner)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        holders = _holders_of(gradients[0])
        is_alone = holders is not None and holders == _holders_of_one(gradients[0].device.type)
        gradient, wait = ctx.back(gradients[0], ctx.group, ctx.owner, is_alone and gradients[0].is_contiguous())
        ctx.meanwhile()
        wait()
        return gradient, None


def _holders_of(gradient: Tensor) -> tuple[int, int, int] | None:
    """Return how often a gradient is held, as a tensor, as an object of Python and as memory; None where torch does
    not say, or the gradient is part of a graph."""
    if (
        storage_use_count is None
        or not hasattr(gradient, "_use_count")
        or gradient.requires_grad
        or type(gradient) is not Tensor
    ):
        return None
    memory = storage_use_count(gradient.untyped_storage()._cdata)
    return gradient._use_count(), sys.getrefcount(gradient), memory


class _Counting(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, counts: list[Any]) -> Tensor:
        ctx.found = counts
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        ctx.found.append(_holders_of(gradients[0]))
        return gradients[0], None


@functools.cache
def _holders_of_one(device_type: str) -> tuple[int, int, int]:
    """Return how often a gradient is held that only its backward holds.

    Autograd itself adds a gradient to another one in place by such counts. What it still has to give to another backward, a
    hook has kept, or a view shares the memory of, is held once more.
    """
    counts: list[tuple[int, int, int]] = []
    x = torch.ones(2, 2, device=device_type, requires_grad=True)
    with torch.enable_grad():
        y = _Counting.apply(x * 1.0, counts)
        (y @ x.detach()).backward(torch.ones_like(x))
    return counts[0]


class _Moved(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, how: tuple[dist.ProcessGroup, str, Move, Move]) -> Tensor:
        group, owner, there, back = how
        ctx.group, ctx.owner, ctx.back = group, owner, back
        return there(x, group, owner)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return ctx.back(gradients[0], ctx.group, ctx.owner), None
