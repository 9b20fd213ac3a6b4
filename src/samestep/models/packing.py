"""Bytes of the elements of a weight that is held in 4 bits. No torch.

A row of a weight in NF4 is held as bytes: two elements in a byte, then one float32 scale for each block of elements.
"""

from __future__ import annotations

from typing import Literal

HeldAs = Literal["", "nf4"]
"""Format in which a frozen weight is held: empty for the dtype of the others, or `nf4` (`building/nf4.py`)."""

BLOCK = 64
"""Elements of a row that share a scale."""
SCALE_BYTES = 4


def packed_bytes(numel: int) -> int:
    """Return the bytes of so many elements, which are whole blocks."""
    return numel // 2 + numel // BLOCK * SCALE_BYTES
