"""Gradients in 8 bits: whole numbers from -127 to 127, and a power of two for each block as their scale (`scaled.py`).

```
block of 256     x_0 x_1 ... x_255       m = max |x|, scale = 2^q
wire             round(x / scale), int8 each                      q, int8 each block
```
An element is off by at most m / 127. What a code loses is added to the gradient that is encoded next (Seide et al. 2014,
doi:10.21437/Interspeech.2014-274).
"""

from __future__ import annotations

import torch
from torch import Tensor

from samestep.runtime.codecs.codec import Codec
from samestep.runtime.codecs.scaled import add_scaled, quantise


class Int8:
    """The codec."""

    def encode(self, values: Tensor, block: int, wire: Tensor) -> None:
        """Write values [rows, n] to `wire`, uint8 [rows, n + n / block], and leave in them what is lost."""
        signed, n = wire.view(torch.int8), values.shape[1]
        codes, exponents = quantise(values.view(-1, block), bits=8)
        signed[:, :n].copy_(codes.view_as(values))
        signed[:, n:].copy_(exponents.view(len(values), -1))

    def decode(self, wire: Tensor, block: int, values: Tensor) -> None:
        """Add what `wire` stands for to values [rows, n]."""
        signed, n = wire.view(torch.int8), values.shape[1]
        codes = signed[:, :n].to(values.dtype)
        add_scaled(values.view(-1, block), codes.view(-1, block), signed[:, n:].reshape(-1).int())


def codec() -> Codec:
    """Return the codec."""
    return Int8()
