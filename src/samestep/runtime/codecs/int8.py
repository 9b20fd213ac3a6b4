"""Gradients in 8 bits: whole numbers from -127 to 127, and a power of two for each block as their scale.

```
block of 256     x_0 x_1 ... x_255       m = max |x|, scale = 2^q, the smallest with m <= 127 scale
wire             round(x / scale), int8 each                      q, int8 each block
```
An element is off by at most half a scale, and that by at most m / 127: scale < 2 m / 127 (Dettmers 2016, arXiv:1511.04561,
for 8 bits; Dettmers et al. 2022, arXiv:2110.02861, for blocks). As scales are powers of two, products and quotients with
them are exact, so every kernel that rounds to the nearest gives the same codes. Scales go from 2^-126 to 2^121; what is
smaller becomes 0, and a block with a larger number, an infinity or none at all is decoded as nan.

What a code loses is added to the gradient that is encoded next (Seide et al. 2014, doi:10.21437/Interspeech.2014-274).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from samestep.runtime.codecs.codec import Codec

_LARGEST = 127
_SMALLEST_SCALE, _LARGEST_SCALE = -126, 121
"""Exponents of the scales that float32 holds, with 127 times each and its inverse."""
_NOT_FINITE = 127
"""What stands for the exponent of a block with a value that is not finite."""


class Int8:
    """The codec."""

    def encode(self, values: Tensor, block: int, wire: Tensor) -> None:
        """Write values [rows, n] to `wire`, uint8 [rows, n + n / block], and leave in them what is lost."""
        rows = values.view(-1, block)
        largest = torch.maximum(rows.amax(1), -rows.amin(1))  # in a tenth of the time of a norm on CPUs
        exponents = torch.frexp(largest * (128 / _LARGEST)).exponent - 7
        is_finite = largest <= _LARGEST * 2.0**_LARGEST_SCALE  # which nan is not
        exponents = exponents.clamp_(_SMALLEST_SCALE, _LARGEST_SCALE)
        codes = torch.mul(rows, _power_of_two(-exponents, rows)[:, None]).round_()
        signed, n = wire.view(torch.int8), values.shape[1]
        signed[:, :n].copy_(codes.view_as(values))
        signed[:, n:].copy_(torch.where(is_finite, exponents, _NOT_FINITE).view(len(values), -1))
        rows.addcmul_(codes, _power_of_two(exponents, rows)[:, None], value=-1)
        rows.masked_fill_(~is_finite[:, None], 0.0)

    def decode(self, wire: Tensor, block: int, values: Tensor) -> None:
        """Add what `wire` stands for to values [rows, n]."""
        signed, n = wire.view(torch.int8), values.shape[1]
        codes = signed[:, :n].to(values.dtype)
        exponents = signed[:, n:].reshape(-1).int()
        scales = _power_of_two(exponents, values).masked_fill_(exponents == _NOT_FINITE, math.nan)
        values.view(-1, block).addcmul_(codes.view(-1, block), scales[:, None])


def _power_of_two(exponents: Tensor, like: Tensor) -> Tensor:
    """Return 2^e in the dtype of a tensor, for whole numbers from -126 to 127: the bits of a float32."""
    return (exponents + 127).bitwise_left_shift_(23).view(torch.float32).to(like.dtype)


def codec() -> Codec:
    """Return the codec."""
    return Int8()
