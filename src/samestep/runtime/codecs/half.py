"""Gradients in half precision: each element is rounded to the nearest number of 16 bits, and nothing is fed back.

An element x becomes x (1 + d), |d| <= 2^-8 in bfloat16 and 2^-11 in float16, which holds 6e-5 to 65504: below it loses
digits, and above it is infinite (Micikevicius et al. 2018, arXiv:1710.03740, section 3.2).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from samestep.runtime.codecs.codec import RUN_NUMEL


@dataclass(frozen=True, slots=True)
class Half:
    """A codec of two bytes an element."""

    dtype: torch.dtype

    def encode(self, values: Tensor, block: int, wire: Tensor, lost: Tensor | None = None) -> None:
        """Write values [rows, n] to `wire`, uint8 [rows, 2 n]."""
        wire.view(self.dtype).copy_(values)

    def decode(self, wire: Tensor, block: int, values: Tensor) -> None:
        """Add the decoded `wire` to values [rows, n]."""
        sent, size = wire.view(self.dtype), values.shape[1] if values.is_cuda else RUN_NUMEL
        for index, row in enumerate(values):
            for first in range(0, len(row), max(size, 1)):  # a sum of two dtypes copies the second operand
                row[first : first + size].add_(sent[index, first : first + size])
