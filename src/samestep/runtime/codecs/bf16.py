"""Gradients in bfloat16: each element is rounded to the nearest number of 16 bits, and nothing is fed back.

An element x becomes x (1 + d), |d| <= 2^-8 (Micikevicius et al. 2018, arXiv:1710.03740, section 3.2, for half precision).
"""

from __future__ import annotations

import torch
from torch import Tensor

from samestep.runtime.codecs.codec import RUN_NUMEL, Codec


class BF16:
    """A codec of two bytes an element."""

    def encode(self, values: Tensor, block: int, wire: Tensor, lost: Tensor | None = None) -> None:
        """Write values [rows, n] to `wire`, uint8 [rows, 2 n]."""
        wire.view(torch.bfloat16).copy_(values)

    def decode(self, wire: Tensor, block: int, values: Tensor) -> None:
        """Add the decoded `wire` to values [rows, n]."""
        sent, size = wire.view(torch.bfloat16), values.shape[1] if values.is_cuda else RUN_NUMEL
        for index, row in enumerate(values):
            for first in range(0, len(row), max(size, 1)):  # a sum of two dtypes copies the second operand
                row[first : first + size].add_(sent[index, first : first + size])


def codec() -> Codec:
    """Return the codec."""
    return BF16()
