"""The interface of a gradient codec: it encodes rows of a gradient as bytes, and decodes them."""

from __future__ import annotations

import importlib
from typing import Protocol

from torch import Tensor

from samestep.program.codecs import CODECS

RUN_NUMEL = 2**20
"""Elements that are encoded at once on a CPU: so many stay in its cache, and Python's overhead is small."""


class Codec(Protocol):
    """Encodes and decodes; it keeps nothing between two calls, and equal values have equal codes at any place."""

    def encode(self, values: Tensor, block: int, wire: Tensor, lost: Tensor | None = None) -> None:
        """Write values [rows, n], which are whole blocks, to `wire`, uint8 [rows, bytes of n elements].

        A codec with feedback writes the sum of `values` and `lost`, and leaves the loss of its code in `lost`, 0 in a
        block
        with a value that is not finite. `values` stay as they are.
        """
        ...

    def decode(self, wire: Tensor, block: int, values: Tensor) -> None:
        """Add the decoded `wire` to `values` [rows, n]; a block with a value that is not finite gives such values."""
        ...


def codec_of(name: str, backend: str = "") -> Codec:
    """Return the codec of a row of `CODECS`; with a `backend` of `torch.compile`, with kernels compiled by that,
    where there are any, for the same codes."""
    module = importlib.import_module(CODECS[name].module)
    made: Codec = module.fused(backend) if backend and CODECS[name].can_be_fused else module.codec()
    return made
