"""Pieces of weights, which a rank updates, and the norm of their gradients.

However a layout cuts the weights, a rank updates a list of `Piece`s: runs of one parameter's elements as plain tensors
in master precision: see [Note: what a rank holds of a weight], the head of `runtime/weights/__init__.py`.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from samestep.building.model_changes import format_of
from samestep.runtime.weights.split_masters import SplitMasters


@dataclass(slots=True)
class Piece:
    """A run of one parameter's elements that this rank updates."""

    name: str
    start: int
    stop: int
    """Elements [start, stop) of the flattened part, or of the whole weight if `is_uncut`."""
    value: Tensor
    """Master values, which the optimizer updates; on the host under offload."""
    gradient: Callable[[], Tensor]
    """Returns the summed gradient of these elements, once the step's reductions are done."""
    holder: Tensor | None = None
    """The weight in whose `grad` the gradient is, where it is no window of a buffer."""
    window: Tensor | None = None
    """The window of a buffer that holds the gradient in every step, where it is one."""
    target: Tensor | None = None
    """Tensor that receives the updated values, in another dtype or on the device; None where `value` itself is in use."""
    is_uncut: bool = False
    """Whether it is a run of the whole weight, though `tp` or `ep` leaves this rank a part of it."""
    held_as: str = ""
    """The format in which `value` holds rows of a frozen weight; empty for the dtype of the others."""
    split: tuple[SplitMasters, int] | None = None
    """The holder of a master of which `target` is the upper half, and the master's index in it; `value` then exists in updates only."""

    def master(self) -> Tensor:
        """Return the master values, of the shape of `value`; newly allocated where they are held in two halves or in 4 bits."""
        if self.held_as:
            values: Tensor = format_of(self.held_as).unpack_values(self.value.detach())
            return values
        if self.split is None:
            return self.value.detach()
        masters, index = self.split
        return masters.of(index).view(self.value.shape)

    @torch.no_grad()
    def set_master(self, values: Tensor) -> None:
        """Set the master values; those that are not split are published later."""
        if self.held_as:
            self.value.detach().copy_(format_of(self.held_as).pack_values(values.view(len(self.value), -1)))
        elif self.split is None:
            self.value.detach().copy_(values.view_as(self.value))
        else:
            masters, index = self.split
            masters.set(index, values)

    def hold_whole(self) -> None:
        """Hold the master in one tensor from now on."""
        if self.split is not None:
            masters, index = self.split
            self.value.data = masters.release(index).view(self.value.shape)
            self.split = None


def gradients_of(pieces: Sequence[Piece]) -> list[Tensor]:
    """Return the gradient of each piece; a window of a buffer or the `grad` of a weight is found without a call."""
    held = [piece.window if piece.holder is None else piece.holder.grad for piece in pieces]
    if not any(map(_is_none, held, itertools.repeat(None))) and {*map(_layout_of, held)} <= {torch.strided}:
        return held  # type: ignore[return-value]
    return [
        piece.gradient() if gradient is None or gradient.is_sparse else gradient
        for piece, gradient in zip(pieces, held, strict=True)
    ]


_is_none = operator.is_
_layout_of = cast("Any", Tensor.layout).__get__
