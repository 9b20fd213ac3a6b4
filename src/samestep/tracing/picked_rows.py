"""Tensors of a traced forward whose shapes follow from values: the rows that a mask, or scores, have picked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from samestep.trees import operands, tree_leaves

_aten = torch.ops.aten

PACKS = frozenset((_aten._pack_padded_sequence,))
"""Operations that are given a tensor on the host beside one on the device."""


class PickedRows:
    """The storages of one forward whose shapes follow from the values of the sample."""

    def __init__(self, key_of: Callable[[Tensor], int]) -> None:
        self._key_of = key_of
        self._storages: set[int] = set()
        self.path = ""
        """Path of the first module whose code works on such rows: other samples may have more."""
        self.has_none = False
        """Whether the sample has no such row, so that what is done to them cannot be seen."""

    def follow(self, func: Any, args: tuple[Any, ...], given: list[Tensor], made: list[Tensor]) -> bool:
        """Follow an operation to its results; return whether it picks rows, or works on some."""
        if not _finds(func, args) and not self.holds(given):
            return False
        keeps_shape = func._schema.is_mutable or (func.overloadpacket in _WRITTEN_BACK and not self.holds(args[0]))
        if not keeps_shape:
            self._storages |= {self._key_of(tensor) for tensor in made if tensor.dim()}
        return True

    def holds(self, values: Any) -> bool:
        """Return whether the shape of one of nested tensors follows from values."""
        return any(self._key_of(one) in self._storages for one in tree_leaves(values) if isinstance(one, Tensor))


def _finds(func: Any, args: tuple[Any, ...]) -> bool:
    """Return whether the shape of an operation's result follows from values, as that of `x[mask]` does."""
    if torch.Tag.dynamic_output_shape not in func.tags:
        return False
    if func.overloadpacket is _aten.index:
        return any(pick.dtype in (torch.bool, torch.uint8) for pick in operands(args[1]))
    return func.overloadpacket not in _OF_GIVEN_SIZE or len(args) < 2 or args[-1] is None


_OF_GIVEN_SIZE = (_aten.one_hot, _aten.bincount)
"""Operations whose last argument is the number of classes that the result has a place for."""
_WRITTEN_BACK = frozenset(
    (
        _aten.index_add, _aten.index_put, _aten._unsafe_index_put, _aten.index_copy, _aten.index_fill, _aten.scatter,
        _aten.scatter_add, _aten.scatter_reduce, _aten.masked_fill, _aten.masked_scatter,
    )
)  # fmt: skip
"""Operations whose results have the shape of their first operand."""
