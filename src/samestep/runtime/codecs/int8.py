"""Gradients in 8 bits: whole numbers from -127 to 127, and a power of two for each block as their scale.

```
block of 256     x_0 x_1 ... x_255       m = max |x|, scale = 2^q, the smallest with m <= 127 scale, or twice that where they are equal
wire             round(x / scale), int8 each                      q, int8 each block
```
An element is off by at most half a scale, and that by at most m / 127: scale <= 2 m / 127 (Dettmers 2016, arXiv:1511.04561,
for few bits; Dettmers et al. 2022, arXiv:2110.02861, for blocks). The loss of a code is added to the gradient that is encoded
next (Seide et al. 2014, doi:10.21437/Interspeech.2014-274). As scales are powers of two, products and quotients with them
are exact, so every kernel that rounds to the nearest gives the same codes. Scales begin at 2^-126, and 127 times the
largest one is a float32; smaller values become 0, and a block with a larger number, an infinity or a nan is decoded as
nan.

There are two of each kernel with the same codes: the usual ones take a few operations for each run of blocks that fits
a core's cache, and the fused ones are written for `torch.compile`, which fuses them into one loop over blocks.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from samestep.building.torch_seams import dynamo
from samestep.runtime.codecs.codec import RUN_NUMEL, Codec

_SMALLEST_SCALE = -126
"""Exponent of the smallest scale that float32 holds with its inverse."""
_LARGEST_SCALE = 121
"""Exponent of the largest scale, of which 127 times is a float32."""
_NOT_FINITE = 127
"""The exponent that marks a block with a value that is not finite."""


@dataclass(frozen=True, slots=True)
class Kernels:
    """The two functions of a codec with scaled blocks: one encodes rows of a gradient, the other adds decoded rows."""

    quantise: Callable[[Tensor, Tensor | None, Tensor, Tensor], None]
    """Writes codes [blocks, block] and the exponents of scales [blocks], int8, of rows [blocks, block] plus the
    earlier losses, of the same shape, and replaces these by the losses now."""
    add_scaled: Callable[[Tensor, Tensor, Tensor], None]
    """Adds to rows [blocks, block] codes times their scales."""


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
    return Int8(Kernels(_quantise, _add_scaled))


def fused(backend: str) -> Codec:
    """Return the codec with kernels compiled by a backend of `torch.compile`."""
    return Int8(_fused_kernels(backend))


@functools.cache
def _fused_kernels(backend: str) -> Kernels:
    """Return the kernels compiled by a backend of `torch.compile`; inductor's are in C++, and on GPUs in Triton."""
    return Kernels(_Fused(_quantise_at_once, _quantise, backend), _Fused(_add_scaled_at_once, _add_scaled, backend))


class _Fused:
    """A compiled kernel, or the usual one where the backend fails, as it does without a compiler."""

    def __init__(self, kernel: Callable[..., None], usual: Callable[..., None], backend: str) -> None:
        self._kernel: Callable[..., None] = torch.compile(kernel, dynamic=True, backend=backend)
        self._usual = usual

    def __call__(self, *tensors: Tensor | None) -> None:
        try:
            self._kernel(*tensors)
        except dynamo().exc.TorchDynamoException:  # before anything is written
            self._kernel = self._usual
            self._usual(*tensors)


def _quantise(rows: Tensor, lost: Tensor | None, codes: Tensor, exponents: Tensor) -> None:
    for run in _runs(rows):
        values = rows[run] if lost is None else lost[run].add_(rows[run])
        scale_exponents, is_finite = _exponents(values)
        scaled = torch.mul(values, _power_of_two(-scale_exponents, rows)[:, None]).round_()
        codes[run] = scaled
        exponents[run] = torch.where(is_finite, scale_exponents, _NOT_FINITE)
        if lost is not None:
            values.addcmul_(scaled, _power_of_two(scale_exponents, rows)[:, None], value=-1)
            if rows.is_cuda or not is_finite.all():  # on GPUs a pass takes less time than to wait for the answer
                values.masked_fill_(~is_finite[:, None], 0.0)


def _add_scaled(rows: Tensor, codes: Tensor, exponents: Tensor) -> None:
    for run in _runs(rows):
        rows[run].addcmul_(codes[run].to(rows.dtype), _scales(exponents[run], rows)[:, None])


def _quantise_at_once(rows: Tensor, lost: Tensor | None, codes: Tensor, exponents: Tensor) -> None:
    values = rows if lost is None else lost + rows
    scale_exponents, is_finite = _exponents(values)
    scaled = torch.round(values * _power_of_two(-scale_exponents, rows)[:, None])
    codes.copy_(scaled)
    exponents.copy_(torch.where(is_finite, scale_exponents, _NOT_FINITE))
    if lost is not None:
        rest = values - scaled * _power_of_two(scale_exponents, rows)[:, None]
        lost.copy_(torch.where(is_finite[:, None], rest, 0.0))


def _add_scaled_at_once(rows: Tensor, codes: Tensor, exponents: Tensor) -> None:
    rows.add_(codes * _scales(exponents, rows)[:, None])


def _runs(rows: Tensor) -> Iterator[slice]:
    """Yield runs of blocks [blocks, block] that are processed at once; on a GPU all."""
    size = len(rows) if rows.is_cuda else max(1, RUN_NUMEL // rows.shape[1])
    for first in range(0, len(rows), max(size, 1)):
        yield slice(first, first + size)


def _exponents(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return the exponents of the scales of blocks [blocks, block], int32, and whether all of each is finite."""
    largest = torch.maximum(rows.amax(1), -rows.amin(1))  # in a tenth of the time of a norm on CPUs
    above = (largest * (128 / 127)).float().view(torch.int32)
    exponents = (above >> 23) - 133  # the bits of a float32 hold its exponent plus 127
    return exponents.clamp(_SMALLEST_SCALE, _LARGEST_SCALE), largest <= 127 * 2.0**_LARGEST_SCALE  # which nan is not


def _scales(exponents: Tensor, like: Tensor) -> Tensor:
    """Return the scales of blocks, nan of those that are not finite."""
    wide = exponents.int()
    return torch.where(wide == _NOT_FINITE, math.nan, _power_of_two(wide, like))


def _power_of_two(exponents: Tensor, like: Tensor) -> Tensor:
    """Return 2^e in the dtype of a tensor, for whole numbers from -126 to 127: the bits of a float32."""
    return ((exponents + 127) << 23).view(torch.float32).to(like.dtype)
