"""Dynamic loss scaling: gradients of a float16 forward are made larger by a power of two, so that few of them become zero."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

LARGEST_SUM = torch.finfo(torch.float16).max / 2
"""The largest sum of gradients under a loss scale: partial sums, some of which cancel, then fit float16 as well."""


@dataclass(slots=True)
class LossScale:
    """Dynamic loss scaling for fp16: halved at an overflow, doubled after `growth_steps` without one."""

    scale: float = 1.0
    growth_steps: float = math.inf
    steps_since: int = 0

    @property
    def is_dynamic(self) -> bool:
        """Whether the scale may change; it stays 1 in other precisions than fp16."""
        return self.growth_steps < math.inf

    def after(self, *, overflowed: bool) -> None:
        """Adapt the scale after a step. Every rank passes the same `overflowed`, so every rank holds the same scale."""
        if overflowed:
            self.scale, self.steps_since = max(self.scale / 2, min(self.scale, 1.0)), 0
            return
        self.steps_since += 1
        if self.steps_since >= self.growth_steps:
            self.scale, self.steps_since = self.scale * 2, 0
