"""Gradients in 4 bits: whole numbers from -7 to 7, two in a byte, and a power of two for each block as their scale.

```
block of 256     x_0 x_1 ... x_255       m = max |x|, scale = 2^q (`scaled.py`)
wire             c_0 + 8 | c_1 + 8       ...  4 bits each, the first in the lower half       q, int8 each block
```
An element is off by at most m / 7: about a sixth of it is lost on average, so a run needs what codes have lost before: it is
added to the gradient that is encoded next (Seide et al. 2014, doi:10.21437/Interspeech.2014-274; Karimireddy et al. 2019,
arXiv:1901.09847, show that then any such code trains). A block of one element takes half a byte of its own besides its scale.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from samestep.runtime.codecs.codec import Codec
from samestep.runtime.codecs.scaled import add_scaled, quantise

_ZERO = 8
"""What stands for 0, so that codes are not negative."""


class Int4:
    """The codec."""

    def encode(self, values: Tensor, block: int, wire: Tensor) -> None:
        """Write values [rows, n] to `wire`, uint8 [rows, n / 2 + n / block], and leave in them what is lost."""
        codes, exponents = quantise(values.view(-1, block), bits=4)
        halves = pad(codes.nan_to_num_(0.0).clamp_(-7, 7).add_(_ZERO).to(torch.uint8), (0, block % 2))
        packed = (halves[:, 0::2] | halves[:, 1::2] << 4).view(len(values), -1)
        wire[:, : packed.shape[1]].copy_(packed)
        wire.view(torch.int8)[:, packed.shape[1] :].copy_(exponents.view(len(values), -1))

    def decode(self, wire: Tensor, block: int, values: Tensor) -> None:
        """Add what `wire` stands for to values [rows, n]."""
        width = -(-block // 2)
        end = values.shape[1] // block * width
        packed = wire[:, :end].reshape(-1, width)
        codes = torch.stack([packed & 15, packed >> 4], dim=2).view(-1, 2 * width)[:, :block]
        exponents = wire.view(torch.int8)[:, end:].reshape(-1).int()
        add_scaled(values.view(-1, block), codes.to(values.dtype) - _ZERO, exponents)


def codec() -> Codec:
    """Return the codec."""
    return Int4()
