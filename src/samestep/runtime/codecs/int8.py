"""Gradients in 8 bits: whole numbers from -127 to 127, and a power of two for each block as their scale (`scaled.py`).

```
block of 256     x_0 x_1 ... x_255       m = max |x|, scale = 2^q
wire             round(x / scale), int8 each                      q, int8 each block
```
An element is off by at most m / 127. The loss of a code is added to the gradient that is encoded next (Seide et al.
2014, doi:10.21437/Interspeech.2014-274).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from samestep.runtime.codecs.codec import Codec
from samestep.runtime.codecs.scaled import Kernels, fused_kernels, kernels


@dataclass(frozen=True, slots=True)
class Int8:
    """The codec of 8 bits an element."""

    kernels: Kernels

    def encode(self, values: Tensor, block: int, wire: Tensor, lost: Tensor | None = None) -> None:
        """Write values [rows, n], plus what was lost, to `wire`, uint8 [rows, n + n / block]."""
        signed, n = wire.view(torch.int8), values.shape[1]
        for index, row in enumerate(values):
            rest = None if lost is None else lost[index].view(-1, block)
            self.kernels.quantise(row.view(-1, block), rest, signed[index, :n].view(-1, block), signed[index, n:])

    def decode(self, wire: Tensor, block: int, values: Tensor) -> None:
        """Add the decoded `wire` to values [rows, n]."""
        signed, n = wire.view(torch.int8), values.shape[1]
        for index, row in enumerate(values):
            self.kernels.add_scaled(row.view(-1, block), signed[index, :n].view(-1, block), signed[index, n:])


def codec() -> Codec:
    """Return the codec."""
    return Int8(kernels(8))


def fused(backend: str) -> Codec:
    """Return the codec with kernels compiled by a backend of `torch.compile`."""
    return Int8(fused_kernels(8, backend))
