"""The lower halves of float32 masters as a kernel: one pass over the bits writes what `runtime/weights/pieces.py` holds of them."""

from __future__ import annotations

import triton
import triton.language as tl

_HALFWAY = tl.constexpr(0x8000)
"""The last 17 bits of a master that is halfway between two weights and is rounded down."""


@triton.jit
def write_remainders(bits, remainders, is_halfway, size, BLOCK: tl.constexpr):
    """Write the last 16 bits of each number as a signed one, the largest where it is halfway, and which ones are halfway."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    exists = at < size
    values = tl.load(bits + at, mask=exists, other=0)
    halfway = (values & 0x1FFFF) == _HALFWAY
    tl.store(remainders + at, tl.where(halfway, 0x7FFF, values).to(tl.int16), mask=exists)
    tl.store(is_halfway + at, halfway, mask=exists)
