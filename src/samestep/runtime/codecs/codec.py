"""The interface of a gradient codec in torch, which writes rows of a gradient down as bytes and reads them, and what an exchange keeps
from one step to the next: residuals, and directions of factors.

A residual is what a code has lost of a contribution; it is added to the next one before that is encoded (Seide et al. 2014).
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator
from typing import NamedTuple, Protocol

from torch import Tensor

from samestep.program.codecs import CODECS

RUN_NUMEL = 2**20
"""Elements that are taken at once on a CPU: a run of them stays in its cache, and Python's part is small."""


class Codec(Protocol):
    """Encodes and decodes; it keeps nothing between two calls, and equal values have equal codes at any position."""

    def encode(self, values: Tensor, block: int, wire: Tensor, lost: Tensor | None = None) -> None:
        """Write values [rows, n], a whole number of blocks, to `wire`, uint8 [rows, bytes of n elements].

        A codec that feeds back writes the sum of `values` and `lost`, and leaves in `lost` what its code loses, 0 in a block
        with a value that is not finite. `values` stay as they are.
        """
        ...

    def decode(self, wire: Tensor, block: int, values: Tensor) -> None:
        """Add what `wire` stands for to `values` [rows, n]; a block with a value that is not finite gives such values."""
        ...


def codec_of(name: str, backend: str = "") -> Codec:
    """Return the codec of a row of `CODECS`; if a `backend` of `torch.compile` is given, with kernels that it makes, where there are
    any, of the same codes."""
    module = importlib.import_module(CODECS[name].module)
    codec: Codec = module.fused(backend) if backend and CODECS[name].can_be_fused else module.codec()
    return codec


SUM = "sum"
"""The key of the residual of the sum of all contributions."""


class BufferResidual(NamedTuple):
    """The residual of one contribution, or of the sum of all, in a run of a buffer's elements."""

    key: str
    """The number of the contribution; `SUM` of their sum."""
    start: int
    """First element in the buffer."""
    values: Tensor


class Residual(NamedTuple):
    """The residual of one contribution, or of the sum of all, in a run of a weight's elements."""

    name: str
    key: str
    """The number of the contribution; `SUM` of their sum."""
    start: int
    """First element in the flattened weight, or in the part of it that `tp` and `ep` leave this rank."""
    values: Tensor


class Directions(NamedTuple):
    """Directions along which a weight's next gradient is projected."""

    name: str
    values: Tensor
    """[rank, columns]"""


def residuals_of_weights(buffer_residual: BufferResidual, places: Iterable[tuple[str, int, int]]) -> Iterator[Residual]:
    """Yield the residuals of the weights that a buffer holds at the places (name, first element in the buffer, elements)."""
    end = buffer_residual.start + buffer_residual.values.numel()
    for name, first, numel in places:
        start, stop = max(first, buffer_residual.start), min(first + numel, end)
        if start < stop:
            values = buffer_residual.values[start - buffer_residual.start : stop - buffer_residual.start]
            yield Residual(name, buffer_residual.key, start - first, values)
