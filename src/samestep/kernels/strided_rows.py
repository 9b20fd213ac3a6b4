"""A tensor as rows of its last dimension, whose other dimensions are joined where one stride leads through them."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

MOST_DIMENSIONS = 3
"""Dimensions of rows that a kernel takes apart; of more, in no common order, a tensor is copied."""


class StridedRows(NamedTuple):
    """The sizes and strides of the dimensions of rows, of which the first ones are 1 where there are fewer."""

    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    """Those of rows, and last that of a column."""

    @classmethod
    def of(cls, x: Tensor, num_columns: int) -> StridedRows | None:
        """Return how a kernel walks a tensor by rows of so many columns; None where it cannot.

        A tensor of one dimension may have several rows.
        """
        shape, strides = tuple(x.shape), x.stride()
        if len(shape) == 1:
            shape, strides = (shape[0] // num_columns, num_columns), (num_columns * strides[0], strides[0])
        assert shape[-1] == num_columns
        dims: list[tuple[int, int]] = []
        for size, stride in zip(shape[:-1], strides[:-1], strict=True):
            if dims and dims[-1][1] == size * stride:
                dims[-1] = (dims[-1][0] * size, stride)
            elif size > 1:
                dims.append((size, stride))
        if len(dims) > MOST_DIMENSIONS:
            return None
        dims = [(1, 0)] * (MOST_DIMENSIONS - len(dims)) + dims
        return cls(tuple(size for size, _ in dims), (*(stride for _, stride in dims), strides[-1]))
