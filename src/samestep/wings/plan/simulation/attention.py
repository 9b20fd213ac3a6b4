"""The seconds of a fused attention by the family of its kernel, head size, length and direction.

A kernel cuts the queries of a head into tiles of TILE rows, and each tile visits its keys one block after the other. A tile
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
