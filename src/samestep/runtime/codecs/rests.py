"""Remainders of gradients that an exchange keeps from one step to the next: losses of codes, and directions of
factors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from torch import Tensor

SUM = "sum"


class Rest(NamedTuple):
    """The loss of the codes of one contribution, or of the sum of all, in a run of a part's elements."""

    key: str
    """The number of the contribution; `SUM` of their sum."""
    start: int
    """First element in the part's buffer."""
    values: Tensor
    summed: int = 0
    """If not 0, the number of contributions, of which `key` is the first, that it is the sum of."""


class GivenBack(NamedTuple):
    """The loss of codes in a run of a weight's elements, which is added to the gradient of the next step."""

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


def of_weights(rest: Rest, places: Iterable[tuple[str, int, int]]) -> Iterator[GivenBack]:
    """Yield the parts of a remainder by weight; weights are at (name, first element in the part's buffer, elements)."""
    end = rest.start + rest.values.numel()
    for name, first, numel in places:
        start, stop = max(first, rest.start), min(first + numel, end)
        if start < stop:
            values = rest.values[start - rest.start : stop - rest.start]
            yield GivenBack(name, rest.key, start - first, values, rest.summed)
