"""The blocks in which 8-bit states of an optimizer share a scale.

A block is a run of elements of the flattened whole weight that divides its rows, so a cut between rows cuts no block.
A vector, such as a bias or the weight of a norm, has float32 states: it has few elements, and its rows are single numbers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

LARGEST_BLOCK = 256
SCALE_BYTES = 4
"""Bytes of the scale of a block."""
_SIZES = (LARGEST_BLOCK, 128, 64, 32, 16)


def block_of(shape: Sequence[int]) -> int:
    """Return the elements of a block of a whole weight's 8-bit states; 0 where its states are float32.

    The largest power of two up to 256 of which a row has a multiple of four, so that rows can be cut too; otherwise the
    largest that divides a row.
    """
    row = math.prod(shape[1:]) if len(shape) > 1 else 0
    return next((size for times in (4, 1) for size in _SIZES if row and row % (times * size) == 0), 0)
