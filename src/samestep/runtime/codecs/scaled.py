"""Whole numbers of few bits, and a power of two for each block as their scale; what int8 and int4 have in common.

With b bits, L = 2^(b-1) - 1, and of a block x_0 x_1 ... the largest m = max |x|:

    scale = 2^q, the smallest with m <= L scale, or twice that where they are equal
    codes = round(x / scale), from -L to L

An element is off by at most half a scale, and that by at most m / L: scale <= 2 m / L (Dettmers 2016, arXiv:1511.04561, for
few bits; Dettmers et al. 2022, arXiv:2110.02861, for blocks). As scales are powers of two, products and quotients with them
are exact, so every kernel that rounds to the nearest gives the same codes. Scales begin at 2^-126, and L times the largest one
is a float32; what is smaller becomes 0, and a block with a larger number, an infinity or none at all is decoded as nan.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

_SMALLEST_SCALE = -126
"""Exponent of the smallest scale that float32 holds with its inverse."""
_NOT_FINITE = 127
"""What stands for the exponent of a block with a value that is not finite."""


def quantise(rows: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Return the codes of blocks [rows, block], and the exponent of the scale of each; leave in them what is lost."""
    most, largest_scale = 2 ** (bits - 1) - 1, 129 - bits
    largest = torch.maximum(rows.amax(1), -rows.amin(1))  # in a tenth of the time of a norm on CPUs
    exponents = torch.frexp(largest * (2 ** (bits - 1) / most)).exponent - (bits - 1)
    is_finite = largest <= most * 2.0**largest_scale  # which nan is not
    exponents = exponents.clamp_(_SMALLEST_SCALE, largest_scale)
    codes = torch.mul(rows, _power_of_two(-exponents, rows)[:, None]).round_()
    rows.addcmul_(codes, _power_of_two(exponents, rows)[:, None], value=-1)
    rows.masked_fill_(~is_finite[:, None], 0.0)
    return codes, torch.where(is_finite, exponents, _NOT_FINITE)


def add_scaled(rows: Tensor, codes: Tensor, exponents: Tensor) -> None:
    """Add codes, times the scales of their blocks, to blocks [rows, block]."""
    scales = _power_of_two(exponents, rows).masked_fill_(exponents == _NOT_FINITE, math.nan)
    rows.addcmul_(codes, scales[:, None])


def _power_of_two(exponents: Tensor, like: Tensor) -> Tensor:
    """Return 2^e in the dtype of a tensor, for whole numbers from -126 to 127: the bits of a float32."""
    return (exponents + 127).bitwise_left_shift_(23).view(torch.float32).to(like.dtype)
