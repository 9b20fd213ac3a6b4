"""The rates of kernels: of products by their tiles, and of a fused attention by the family of its kernel, head size, length and direction.

The tiles of a product run on the multiprocessors of a device in waves, each in steps along k.

A kernel of attention cuts the queries of a head into tiles of TILE rows, and each tile visits its keys one block after the other. A tile
also starts and ends, which takes as long as `start` keys, and under a causal mask the last block is computed whole although
half of it is masked. A score costs 2 d multiplications and additions and one exponential, which takes as long as `softmax`
of the products of a head of 128, so small heads reach less:

    keys of a tile     those that it attends to, + TILE / 2 under a causal mask, + start
    rate               efficiency.attention x peak x reached x (1 + softmax) / (1 + 128 softmax / d)     d at most 128
    seconds            keys of all tiles / units, but no less than the longest tile; without a mask whole waves of tiles

The figures of each family are read off published measurements on one H100, 16,384 tokens with 2,048 elements each (Shah et al. 2024,
arXiv:2407.08608, figures 5 and 6: forward and backward, heads of 64 and 128, 512 to 16k tokens). FLASH_2's are the unit, and
with its `start` and `softmax` what it reaches on an A100 is met as well (Dao 2023, arXiv:2307.08691, figure 4). FLASH_1 reaches up to
half of an A100's peak forward and 35 % backward, where FLASH_2 reaches 73 and 63 % (the same, section 1), and is taken to start alike.
`tests/laws/test_attention_rate.py` holds them against the formula.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal, NamedTuple

Family = Literal["sdpa", "flash-1", "flash-2", "flash-3", "cudnn"]
"""Kernels of a fused attention; `sdpa` is what torch chooses by itself: FlashAttention-2."""
CHOSEN: dict[str, Family] = {"flash": "flash-2", "cudnn": "cudnn", "efficient": "flash-1"}
"""The family of a kernel that a job chooses by `run.attention`; torch's memory-efficient one is taken to be as fast as FlashAttention-1."""
TILE = 128
"""Queries of a tile, and keys of a block."""
LARGE_HEAD = 128
"""Size of a head up to which a larger one reaches more."""
BACKWARD = 2.5
"""Ratio of FLOPs of a backward, which recomputes the scores, to its forward (arXiv:2307.08691)."""


class KernelPass(NamedTuple):
    """The speed that the kernel of a forward or of a backward reaches."""

    reached: float
    """Rate of long heads of 128 without a mask, over that of FlashAttention-2's forward and backward together."""
    start: float
    """Keys that a tile could visit in the time in which it starts and ends."""
    softmax: float
    """Time of the exponential of a score, over that of its products in a head of 128."""


class AttentionKernel(NamedTuple):
    """A family of kernels."""

    forward: KernelPass
    backward: KernelPass
    causal: float
    """Part of the rate that is left where tiles have unequal numbers of keys."""


FLASH_1 = AttentionKernel(KernelPass(0.77, 104, 0.17), KernelPass(0.54, 277, 0.125), 0.9)
FLASH_2 = AttentionKernel(KernelPass(1.12, 104, 0.17), KernelPass(0.995, 277, 0.125), 0.9)
FLASH_3 = AttentionKernel(KernelPass(1.97, 200, 0.436), KernelPass(1.75, 390, 0.226), 0.94)
CUDNN = AttentionKernel(KernelPass(1.85, 110, 0.87), KernelPass(1.64, 360, 0.265), 0.89)
KERNELS: dict[Family, AttentionKernel] = {
    "sdpa": FLASH_2,
    "flash-1": FLASH_1,
    "flash-2": FLASH_2,
    "flash-3": FLASH_3,
    "cudnn": CUDNN,
}


def flops_per_s(kernel: KernelPass, head: float, rate: float) -> float:
    """Return the FLOP/s of a long attention without a mask, given those of FlashAttention-2 with heads of 128."""
    exponential = kernel.softmax * LARGE_HEAD / min(head, LARGE_HEAD)
    return rate * kernel.reached * (1 + kernel.softmax) / (1 + exponential)


def scores_s(
    family: Family, backward: bool, head: float, queries: int, keys: int, heads: int, attended: float,
    rate: float, peak: float, units: int,
) -> float:  # fmt: skip
    """Return the seconds of the scores of all heads and of what they weigh.

    `attended` is the part of all keys that a query attends to on average, 1 without a mask; `rate` the FLOP/s of
    FlashAttention-2 for long heads of 128, forward and backward together, and `peak` the largest; `units` are multiprocessors, 0 for
    a device without tiles.
    """
    kernel = KERNELS[family]
    direction = kernel.backward if backward else kernel.forward
    is_causal = attended < 1.0
    reached = flops_per_s(direction, head, rate) * (kernel.causal if is_causal else 1.0)
    tiles = heads * max(1, math.ceil(queries / TILE))
    more = direction.start + (TILE / 2 if is_causal else 0.0)
    visited = keys * attended + more
    a_key_s = 4.0 * TILE * head * (BACKWARD if backward else 1.0) / min(reached, peak) * max(units, 1)
    if not is_causal:
        return math.ceil(tiles / max(units, 1)) * visited * a_key_s
    longest = min(keys, 2 * keys * attended) + more
    return max(tiles / max(units, 1) * visited, longest if units else 0.0) * a_key_s


def unit_over(head: int, length: int, heads: int, units: int) -> float:
    """Return the rate of long heads of 128, forward and backward without a mask, over that of a causal forward of torch's choice."""
    took_s = scores_s("sdpa", False, head, length, length, heads, 0.5, 1.0, math.inf, units)
    return took_s / (2.0 * length * length * head * heads)


# -- products ----------------------------------------------------------------------------------------------------------

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
