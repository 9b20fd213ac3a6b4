"""Dropout as kernels: the mask of `randomness/masks.py` is drawn from its rows and columns where the elements are read.

A program computes a tile of some rows and columns. Rows are numbered in the order of the tensor, whose dimensions but the last are at
most three (`strided_rows.py`); the mask of an element needs the two halves of its row and the hash of its column. Numbers of 64 bits with
a point come as the integers of their bits, since Triton takes a float for float32.
"""

from __future__ import annotations

import triton
import triton.language as tl

from samestep.kernels.hashed_bits import element_bits

_NOT_SPECIALIZED = ["threshold", "scale"]


@triton.jit
def _tile(num_rows, num_columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Return the rows, int64, and columns of this program's tile, and which of its elements there are."""
    num_across = (num_columns + COLUMNS - 1) // COLUMNS
    row = (tl.program_id(0) // num_across).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = (tl.program_id(0) % num_across) * COLUMNS + tl.arange(0, COLUMNS)
    return row, column, (row < num_rows)[:, None] & (column < num_columns)[None, :]


@triton.jit
def _is_dropped(halves, columns, row, column, num_rows, num_columns, threshold):
    """Return which elements of a tile are dropped."""
    a = tl.load(halves + 2 * row, mask=row < num_rows, other=0)
    b = tl.load(halves + 2 * row + 1, mask=row < num_rows, other=0)
    hashed = tl.load(columns + column, mask=column < num_columns, other=0)
    return element_bits(a[:, None], b[:, None], hashed[None, :]) < threshold


@triton.jit
def _place(row, size_1, size_2, stride_0, stride_1, stride_2):
    """Return where rows begin in a tensor whose dimensions but the last have these sizes and strides."""
    last, rest = row % size_2, row // size_2
    return (rest // size_1) * stride_0 + (rest % size_1) * stride_1 + last * stride_2


@triton.jit(do_not_specialize=_NOT_SPECIALIZED)
def drop_and_scale(
    x, y, halves, columns, num_rows, num_columns, size_1, size_2, stride_0, stride_1, stride_2, stride_3,
    threshold, scale, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Write x * scale to y, which is contiguous, and 0 where an element is dropped."""
    row, column, exists = _tile(num_rows, num_columns, ROWS, COLUMNS)
    is_dropped = _is_dropped(halves, columns, row, column, num_rows, num_columns, threshold)
    source = (
        _place(row, size_1, size_2, stride_0, stride_1, stride_2)[:, None] + (column.to(tl.int64) * stride_3)[None, :]
    )
    given = tl.load(x + source, mask=exists, other=0.0)
    # torch multiplies in float32, or in float64 what is float64, and rounds the product.
    times = scale.to(tl.int64).to(tl.float64, bitcast=True)
    if given.dtype == tl.float64:
        product = given * times
    else:
        product = (given.to(tl.float32) * times.to(tl.float32)).to(given.dtype)
    result = tl.where(is_dropped, 0.0, product)
    tl.store(y + row[:, None] * num_columns + column[None, :], result, mask=exists)


@triton.jit(do_not_specialize=_NOT_SPECIALIZED)
def write_mask(
    dropped, halves, columns, num_rows, num_columns, threshold, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """Write which elements are dropped, bool [rows, columns], contiguous."""
    row, column, exists = _tile(num_rows, num_columns, ROWS, COLUMNS)
    is_dropped = _is_dropped(halves, columns, row, column, num_rows, num_columns, threshold)
    tl.store(dropped + row[:, None] * num_columns + column[None, :], is_dropped, mask=exists)
