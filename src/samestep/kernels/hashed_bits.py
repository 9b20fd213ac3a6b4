"""The hash of dropout masks (`randomness/masks.py`) as functions of Triton kernels, equal to it in every bit.

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
