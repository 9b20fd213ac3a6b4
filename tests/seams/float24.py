"""A gradient codec that the product does not know: the upper three bytes of a float32. One file, and one row.

An element loses the lower eight of its 23 bits: less than 2^-15 of it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from samestep.program.codecs import CodecSpec

ROW = CodecSpec(name="float24", module=__name__, element_bytes=3)


class Float24:
    def encode(self, values: Tensor, block: int, wire: Tensor, lost: Tensor | None = None) -> None:
        wire.copy_(_bytes(values.float())[..., 1:].flatten(1))

    def decode(self, wire: Tensor, block: int, values: Tensor) -> None:
        found = torch.zeros(values.shape, dtype=torch.float32)
        _bytes(found)[..., 1:] = wire.unflatten(1, (-1, 3))
        values.add_(found)


def _bytes(values: Tensor) -> Tensor:
    """The four bytes of each float32, the lowest first: a view."""
    return values.contiguous().view(torch.uint8).unflatten(1, (-1, 4))


def codec() -> Float24:
    return Float24()
