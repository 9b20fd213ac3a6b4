"""Masks that a forward has counted: their bits are arranged for a tensor when they are used; and the forwards of modules that count them.

formula of torch    a mask, bool, whole or in parts         hashed with the other masks of its forward
kernel              halves of rows and hashed columns       it hashes the elements itself, so no mask is in memory
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from samestep.building.attention.attention_spec import DroppedWeights
from samestep.kernels.dropped_elements import can_drop, drop_elements
from samestep.kernels.kernel_choice import runs_kernels
from samestep.randomness.masks import drop_threshold, hashed_mask
from samestep.randomness.row_hashes import DrawBits


@dataclass(frozen=True, slots=True)
class CountedDraw:
    """A mask that was counted."""

    arranged: Callable[[torch.device, torch.Size, float], DrawBits]
    """Returns its bits for a tensor on a device, of this shape; with the probability of a mask, or 0 where a kernel hashes elements."""
    dim: int
    """The dimension of the samples."""
    p: float
    """The probability with which an element is dropped."""

    def bits(self, x: Tensor, shape: torch.Size) -> DrawBits:
        """Return the bits for a tensor."""
        return self.arranged(x.device, shape, self.p)

    def drop_elements(self, x: Tensor, *, inplace: bool) -> Tensor:
        """Return a tensor on which kernels run with elements dropped and scaled: by one kernel, or by torch what that does not take."""
        bits, scale = self.bits(x, x.shape), 1.0 / (1.0 - self.p)
        halves = bits.rows_in_order()
        if halves is None or not can_drop(x, bits.columns.numel(), inplace=inplace):
            dropped = bits.dropped()
            return (x.masked_fill_(dropped, 0.0) if inplace else x.masked_fill(dropped, 0.0)).mul_(scale)
        return drop_elements(x, hashed_mask(halves, bits.columns, self.p), scale, inplace=inplace)

    def weights(self, x: Tensor, shape: torch.Size) -> DroppedWeights:
        """Return the dropout of an attention with these queries, whose weights have this shape."""
        if not runs_kernels(x):
            return DroppedWeights(self.p, self.bits(x, shape).dropped_part)
        arranged, device, p = self.arranged, x.device, self.p  # the tensor itself would be kept for the backward
        bits = functools.cache(lambda: arranged(device, shape, p))
        hashes = functools.cache(lambda: arranged(device, shape, 0.0).hashes(drop_threshold(p)))
        are_in_rows = self.dim < len(shape) - 1
        return DroppedWeights(p, lambda *some: bits().dropped_part(*some), hashes if are_in_rows else None)


@dataclass(slots=True)
class RunningForward:
    """One running forward of a module."""

    name: str
    entry: int
    num_draws: int = 0
    num_numbers: int = 0
    num_choices: int = 0
    """Number of expert choices recorded in this forward (`runtime/axes/expert.py`)."""
