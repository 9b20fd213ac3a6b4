"""Dropout as kernels: the mask of `randomness/masks.py` is drawn from its rows and columns where the elements are read.

A program computes a tile of some rows and columns. Rows are numbered in the order of the tensor, whose dimensions but the last are at
most three (`StridedRows` in `dropped_elements.py`); the mask of an element needs the two halves of its row and the hash of its column. Numbers of 64 bits with
a point come as the integers of their bits, since Triton takes a float for float32.

The hash of a mask as functions of kernels is equal to that in torch in every bit:

    a, b    = row_halves(key, row)        the halves of mix64((mix64(sample) ^ draw's key) + row * G), once a row
    c       = hashed_columns(column)      the low half of mix64(column), once a column
    dropped = element_bits(a, b, c) < threshold

All numbers wrap around: keys, rows and columns are of 64 bits, halves and bits int32, as they are in torch's tensors. The threshold is
that of `masks.drop_threshold`.
"""

from __future__ import annotations

import triton
import triton.language as tl

_GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)
_MIX_1 = tl.constexpr(0xBF58476D1CE4E5B9)
_MIX_2 = tl.constexpr(0x94D049BB133111EB)
_NOT_SPECIALIZED = ["threshold", "scale"]


@triton.jit
def mix64(x):
    """Mix the bits of numbers of 64 bits, one to one; the result is uint64."""
    x = x.to(tl.uint64, bitcast=True) + _GOLDEN
    x = (x ^ (x >> 30)) * _MIX_1
    x = (x ^ (x >> 27)) * _MIX_2
    return x ^ (x >> 31)


@triton.jit
def row_halves(key, row):
    """Return the two halves of rows, int32: of uncut rows, int64, and the keys of their samples, mix64(sample) ^ the draw's key."""
    mixed = mix64(key.to(tl.uint64, bitcast=True) + row.to(tl.uint64, bitcast=True) * _GOLDEN)
    a = mixed.to(tl.uint32).to(tl.int32, bitcast=True)
    b = (mixed >> 32).to(tl.uint32).to(tl.int32, bitcast=True)
    return a, b


@triton.jit
def hashed_columns(column):
    """Return the hash of uncut columns, int64; it is int32."""
    return mix64(column).to(tl.uint32).to(tl.int32, bitcast=True)


@triton.jit
def element_bits(a, b, column):
    """Return 32 hashed bits of elements, int32, by the halves of their rows and their hashed columns, which broadcast."""
    x = column ^ a
    x = x * (2 * x + 1) + b
    return x * (2 * x + 1)


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
    values = tl.load(x + source, mask=exists, other=0.0)
    # torch multiplies in float32, or in float64 what is float64, and rounds the product.
    times = scale.to(tl.int64).to(tl.float64, bitcast=True)
    if values.dtype == tl.float64:
        product = values * times
    else:
        product = (values.to(tl.float32) * times.to(tl.float32)).to(values.dtype)
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
