"""Gradients in 4 bits: whole numbers from -7 to 7, two in a byte, and a power of two for each block as their scale.

```
block of 256     x_0 x_1 ... x_255       m = max |x|, scale = 2^q (`scaled.py`)
wire             c_0 + 8 | c_1 + 8       ...  4 bits each, the first in the lower half       q, int8 each block
```
An element is off by at most m / 7: about a sixth of it is lost on average, so a run needs feedback: the loss is added
to the gradient that is encoded next (Seide et al. 2014, doi:10.21437/Interspeech.2014-274; Karimireddy et al. 2019,
arXiv:1901.09847, show that then any such code trains). A block of one element takes half a byte besides its scale.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from samestep.runtime.codecs.codec import Codec
from samestep.runtime.codecs.scaled import Kernels, fused_kernels, kernels, runs

_ZERO = 8
"""The code of 0, so that codes are not negative."""


@dataclass(frozen=True, slots=True)
class Int4:
    """The codec of 4 bits an element."""

    kernels: Kernels

    def encode(self, values: Tensor, block: int, wire: Tensor, lost: Tensor | None = None) -> None:
        """Write values [rows, n], plus what was lost, to `wire`, uint8 [rows, n / 2 + n / block]."""
        signed, width = wire.view(torch.int8), -(-block // 2)
        end = values.shape[1] // block * width
        for index, row in enumerate(values):
            rows, rest = row.view(-1, block), None if lost is None else lost[index].view(-1, block)
            packed, exponents = wire[index, :end].view(-1, width), signed[index, end:]
            for run in runs(rows):
                codes = torch.empty(rows[run].shape, dtype=torch.int8, device=values.device)
                self.kernels.quantise(rows[run], None if rest is None else rest[run], codes, exponents[run])
                # Values that are not finite have no code, and must not change that of their neighbour.
                halves = pad(codes.clamp_(-7, 7).add_(_ZERO).view(torch.uint8), (0, block % 2))
                torch.bitwise_or(halves[:, 0::2], halves[:, 1::2] << 4, out=packed[run])

    def decode(self, wire: Tensor, block: int, values: Tensor) -> None:
        """Add the decoded `wire` to values [rows, n]."""
        width = -(-block // 2)
        end = values.shape[1] // block * width
        for index, row in enumerate(values):
            rows, packed = row.view(-1, block), wire[index, :end].view(-1, width)
            exponents = wire.view(torch.int8)[index, end:]
            for run in runs(rows):
                codes = torch.stack([packed[run] & 15, packed[run] >> 4], dim=2).view(-1, 2 * width)[:, :block]
                self.kernels.add_scaled(rows[run], codes.view(torch.int8) - _ZERO, exponents[run])


def codec() -> Codec:
    """Return the codec."""
    return Int4(kernels(4))


def fused(backend: str) -> Codec:
    """Return the codec with kernels compiled by a backend of `torch.compile`."""
    return Int4(fused_kernels(4, backend))
