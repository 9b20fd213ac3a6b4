"""The tiles of a product on the multiprocessors of a device, and the steps along k that these take for them."""

from __future__ import annotations

import math

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


def waves(m: int, n: int, count: int, rows: int, columns: int, k: int, num_units: int) -> float:
    """Return the steps along k that the multiprocessors take one after the other, in waves of tiles.

    If there are fewer tiles than multiprocessors, several share a tile, and each takes a part of its steps. If there are a few
    waves of them and k is long, k is cut so that the last wave is full.
    """
    tiles = count * math.ceil(m / rows) * math.ceil(n / columns)
    parts = [1, max(1, num_units // tiles)]
    parts += SPLITS if tiles <= FEW_WAVES * num_units else ()
    return min(math.ceil(tiles * s / num_units) * (max(k / s, min(k, SPLIT)) + FILL) for s in parts)
