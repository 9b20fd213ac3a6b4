"""Differentiable collectives: one communication in the forward, and its counterpart in the backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

Move = Callable[[Tensor, dist.ProcessGroup, str], Tensor]
"""Computes a tensor from one on each rank of a group; the text is the owner of its collectives in the ledger."""


Start = Callable[[Tensor, dist.ProcessGroup, str], tuple[Tensor, Callable[[], object]]]
"""Begins to compute such a tensor; returns it, and what waits until it is there."""


def moved(x: Tensor, group: dist.ProcessGroup, owner: str, there: Move, back: Move) -> Tensor:
    """Return `there(x, group, owner)`, whose gradient goes through `back(gradient, group, owner)`.

    Collective over `group` where `there` is, and in the backward where `back` is: if a rank does not call it, or does
    not run the backward, the others wait until the time limit.
    """
    result: Tensor = _Moved.apply(x, group, owner, there, back)
    return result


def moved_beside(
    x: Tensor, group: dist.ProcessGroup, owner: str, there: Move, back: Start, meanwhile: Callable[[], object]
) -> Tensor:
    """Return `there(x, group, owner)`; `meanwhile` is called in the backward while the gradient goes through `back`.

    Collective over `group` as `moved` is.
    """
    result: Tensor = _MovedBeside.apply(x, group, owner, there, back, meanwhile)
    return result


class _MovedBeside(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, group: dist.ProcessGroup, owner: str, there: Move, back: Start, meanwhile: Any
    ) -> Tensor:
        ctx.group, ctx.owner, ctx.back, ctx.meanwhile = group, owner, back, meanwhile
        return there(x, group, owner)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        gradient, wait = ctx.back(gradients[0], ctx.group, ctx.owner)
        ctx.meanwhile()
        wait()
        return gradient, None, None, None, None, None


class _Moved(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, owner: str, there: Move, back: Move) -> Tensor:
        ctx.group, ctx.owner, ctx.back = group, owner, back
        return there(x, group, owner)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return ctx.back(gradients[0], ctx.group, ctx.owner), None, None, None, None
