"""The rate of a product: its tiles on the multiprocessors of a device, the steps along k that these take for them, and its sides."""

from __future__ import annotations

import math
from collections.abc import Mapping

ALIGNED = ((64, 1.0), (8, 0.8), (1, 0.5))
"""Multiple of elements to which rows are aligned (128 bytes, 16 bytes, none), and the fraction of the rate that
products then reach (NVIDIA, Matrix Multiplication Background, tensor core requirements; the fractions are assumed)."""
TILES = ((256, 128, 1.0), (128, 128, 0.9), (128, 64, 0.75), (64, 64, 0.55))
"""Rows and columns of a tile, and the fraction of its best rate that a multiprocessor reaches with it."""
FILL = 64
"""Steps along k that a tile spends on filling its pipeline and writing its result."""
SPLIT = 1024
"""Steps along k of the shortest part of a tile."""
SPLITS = (2, 3, 4, 5, 6, 8, 11, 16)
"""Parts into which libraries cut k so that tiles fill the last wave (split-K and stream-K, arXiv:2301.03598)."""
FEW_WAVES = 4
"""Waves of tiles up to which the last one is worth filling."""


def aligned(k: int, n: int) -> float:
    """Return the fraction of the rate that a product reaches by the lengths of its rows."""
    return next(part for multiple, part in ALIGNED if k % multiple == 0 and n % multiple == 0)


def by_shortest_side(side: int, known: Mapping[int, float]) -> float:
    """Return the fraction of the best rate that a product with a shortest side of this length reaches."""
    below = max((edge for edge in known if edge <= side), default=0)
    above = min((edge for edge in known if edge >= side), default=0)
    if not above:
        return known[below] if below else 1.0
    low = known.get(below, 0.0)  # 0 for a side of length 0
    return low + (known[above] - low) * (side - below) / max(above - below, 1)


def tiled_s(m: int, k: int, n: int, count: int, rate: float, num_units: int) -> float:
    """Return the seconds of `count` products [m, k] x [k, n] with the fastest tile, at so many FLOP/s of all multiprocessors."""
    return min(
        _waves(m, n, count, rows, columns, k, num_units) * 2.0 * rows * columns * num_units / (part * rate)
        for rows, columns, part in TILES
    )


def _waves(m: int, n: int, count: int, rows: int, columns: int, k: int, num_units: int) -> float:
    """Return the steps along k that the multiprocessors take one after the other, in waves of tiles.

    If there are fewer tiles than multiprocessors, several share a tile, and each takes a part of its steps. If there are a few
    waves of them and k is long, k is cut so that the last wave is full.
    """
    tiles = count * math.ceil(m / rows) * math.ceil(n / columns)
    parts = [1, max(1, num_units // tiles)]
    parts += SPLITS if tiles <= FEW_WAVES * num_units else ()
    return min(math.ceil(tiles * s / num_units) * (max(k / s, min(k, SPLIT)) + FILL) for s in parts)
