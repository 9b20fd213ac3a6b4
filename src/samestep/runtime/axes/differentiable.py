"""A function of a tensor whose gradient goes through another one: one communication in the forward, and its counterpart in the backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

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
