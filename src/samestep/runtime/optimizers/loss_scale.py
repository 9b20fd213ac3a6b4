"""Dynamic loss scaling: gradients of a float16 forward are multiplied by a power of two, so that few of them become zero."""

from __future__ import annotations

import math
from collections.abc import Sequence, Set
from dataclasses import dataclass, field

import torch
from torch import Tensor

from samestep.job_tables import NumericsTable
from samestep.runtime.weights.gradient_codes import GradientCodes
from samestep.runtime.weights.pieces import Piece

LARGEST_SUM = torch.finfo(torch.float16).max / 2
"""The largest sum of gradients under a loss scale: partial sums, some of which cancel, then fit float16 as well."""


@dataclass(slots=True)
class LossScale:
    """Dynamic loss scaling for fp16: halved at an overflow, doubled after `growth_steps` without one."""

    scale: float = 1.0
    growth_steps: float = math.inf
    steps_since: int = 0
    codes: GradientCodes = field(default_factory=GradientCodes)
    """What codes have lost of gradients under the scale, and which follows it."""

    @classmethod
    def of(cls, numerics: NumericsTable, codes: GradientCodes) -> LossScale:
        """Return the loss scale that a job begins with; 1 in other precisions than fp16."""
        if numerics.precision != "fp16":
            return cls()
        return cls(numerics.loss_scale, numerics.loss_scale_growth_steps, codes=codes)

    @property
    def is_dynamic(self) -> bool:
        """Whether the scale may change; it stays 1 in other precisions than fp16."""
        return self.growth_steps < math.inf

    def after(self, *, overflowed: bool, has_moves: bool = False) -> None:
        """Adapt the scale after a step, and what codes have lost of gradients, but not of moves of replicas, where it `has_moves`.

        Every rank passes the same `overflowed`, so every rank holds the same scale.
        """
        scale = self.scale
        if overflowed:
            self.scale, self.steps_since = max(self.scale / 2, min(self.scale, 1.0)), 0
        else:
            self.steps_since += 1
            if self.steps_since >= self.growth_steps:
                self.scale, self.steps_since = self.scale * 2, 0
        if self.scale != scale and not has_moves:
            self.codes.scale(self.scale / scale)

    def with_overflow(self, norm_squared: Tensor, pieces: Sequence[Piece], names: Set[str] | None = None) -> Tensor:
        """Return a squared norm (float64 []), infinity if a gradient of pieces, of these weights or any, exceeds float16 under the scale.

        Whether float16 overflows on the way depends on how many samples a micro-batch adds up; their sum over the whole
        step does not. So the sum alone decides whether a step is skipped, and all layouts decide alike.
        """
        counted = [piece for piece in pieces if names is None or piece.name in names]
        gradients = [gradient for piece in counted if (gradient := piece.gradient()).numel()]
        if not gradients:
            return norm_squared
        with torch.no_grad():
            largest = torch.stack(torch._foreach_norm(gradients, math.inf)).max()
            return norm_squared + torch.where(largest > LARGEST_SUM, math.inf, 0.0).double()
