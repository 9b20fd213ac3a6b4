"""What an exchange keeps from one step to the next: the residuals of error feedback, and the directions of factors.

A residual is what a code has lost of a contribution; it is added to the next one before that is encoded (Seide et al. 2014).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from torch import Tensor

SUM = "sum"
"""The key of the residual of the sum of all contributions."""


class BufferResidual(NamedTuple):
    """The residual of one contribution, or of the sum of all, in a run of a buffer's elements."""

    key: str
    """The number of the contribution; `SUM` of their sum."""
    start: int
    """First element in the buffer."""
    values: Tensor
    summed: int = 0
    """If not 0, the number of contributions, of which `key` is the first, that it is the sum of."""


class Residual(NamedTuple):
    """The residual of one contribution, or of the sum of all, in a run of a weight's elements."""

    name: str
    key: str
    """The number of the contribution; `SUM` of their sum."""
    start: int
    """First element in the flattened weight, or in the part of it that `tp` and `ep` leave this rank."""
    values: Tensor
    summed: int = 0
    """If not 0, the number of contributions, of which `key` is the first, that it is the sum of."""


class Directions(NamedTuple):
    """Directions along which a weight's next gradient is projected."""

    name: str
    values: Tensor
    """[rank, columns]"""


def residuals_of_weights(found: BufferResidual, places: Iterable[tuple[str, int, int]]) -> Iterator[Residual]:
    """Yield the residuals of the weights that a buffer holds at the places (name, first element in the buffer, elements)."""
    end = found.start + found.values.numel()
    for name, first, numel in places:
        start, stop = max(first, found.start), min(first + numel, end)
        if start < stop:
            values = found.values[start - found.start : stop - found.start]
            yield Residual(name, found.key, start - first, values, found.summed)
