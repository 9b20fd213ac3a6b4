"""What a gradient codec is to torch: it writes rows of a gradient down as bytes, and reads them."""

from __future__ import annotations

import importlib
from typing import Protocol

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
    made: Codec = module.fused(backend) if backend and CODECS[name].can_be_fused else module.codec()
    return made
