"""Differentiable collectives: one communication in the forward, and its counterpart in the backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

Move = Callable[[Tensor, dist.ProcessGroup, str], Tensor]
"""Computes a tensor from one on each rank of a group; the text is the owner of its collectives in the ledger."""


def moved(x: Tensor, group: dist.ProcessGroup, owner: str, there: Move, back: Move) -> Tensor:
    """Return `there(x, group, owner)`, whose gradient goes through `back(gradient, group, owner)`.

    Collective over `group` where `there` is, and in the backward where `back` is: if a rank does not call it, or does
    not run the backward, the others wait until the time limit.
    """
    result: Tensor = _Moved.apply(x, group, owner, there, back)
    return result


class _Moved(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, owner: str, there: Move, back: Move) -> Tensor:
        ctx.group, ctx.owner, ctx.back = group, owner, back
        return there(x, group, owner)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return ctx.back(gradients[0], ctx.group, ctx.owner), None, None, None, None
