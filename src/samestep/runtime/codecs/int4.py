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

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from samestep.runtime.codecs.codec import Codec
from samestep.runtime.codecs.scaled import Kernels, fused_kernels, kernels

_ZERO = 8
"""What stands for 0, so that codes are not negative."""


@dataclass(frozen=True, slots=True)
class Int4:
    """The codec."""

    kernels: Kernels

    def encode(self, values: Tensor, block: int, wire: Tensor, lost: Tensor | None = None) -> None:
        """Write values [rows, n], plus what was lost, to `wire`, uint8 [rows, n / 2 + n / block]."""
        codes = torch.empty((values.shape[1] // block, block), dtype=torch.int8, device=values.device)
        for index, row in enumerate(values):
            end = len(codes) * -(-block // 2)
            rest = None if lost is None else lost[index].view(-1, block)
            self.kernels.quantise(row.view(-1, block), rest, codes, wire.view(torch.int8)[index, end:])
            # What is not finite has no code, and must not touch that of its neighbour.
            halves = pad(codes.clamp_(-7, 7).add_(_ZERO).view(torch.uint8), (0, block % 2))
            torch.bitwise_or(halves[:, 0::2], halves[:, 1::2] << 4, out=wire[index, :end].view(len(codes), -1))

    def decode(self, wire: Tensor, block: int, values: Tensor) -> None:
        """Add what `wire` stands for to values [rows, n]."""
        width = -(-block // 2)
        end = values.shape[1] // block * width
        for index, row in enumerate(values):
            packed = wire[index, :end].view(-1, width)
            codes = torch.stack([packed & 15, packed >> 4], dim=2).view(-1, 2 * width)[:, :block]
            signed = codes.view(torch.int8) - _ZERO
            self.kernels.add_scaled(row.view(-1, block), signed, wire.view(torch.int8)[index, end:])


def codec() -> Codec:
    """Return the codec."""
    return Int4(kernels(4))


def fused(backend: str) -> Codec:
    """Return the codec with kernels that a backend of `torch.compile` makes."""
    return Int4(fused_kernels(4, backend))
