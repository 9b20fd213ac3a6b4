"""Profiles of cards that people have one to eight of, from their data sheets: what else a profile says is that of a card of the same make.

gaming cards     tensor cores sum into float32 at half of the rate that is printed for 16-bit sums; the rate below is that half,
                 and clocks are above those of the sheet (`sustained` of the profile they share)
others           reach the part of the sheet's rate that an RTX A6000's or an L40S's products do, under their power limit
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from samestep.hardware import Hardware


class Card(NamedTuple):
    """What a data sheet says of one card."""

    pattern: str
    """Of the names that rows give it."""
    like: str
    """The profile that it shares all else with."""
    float32: float
    """10^12 FLOP/s."""
    sixteen: float
    """10^12 FLOP/s of products in 16 bits with sums in float32."""
    gigabytes: float
    """Of memory, in 10^9 bytes."""
    bandwidth: float
    """10^9 bytes a second of memory."""
    units: int
    """Multiprocessors."""


CARDS = (
    Card(r"RTX PRO 6000", "l40sx8", 125, 503.8, 102.6, 1792, 188),
    Card(r"5080", "rtx5090x8", 56.3, 112.6, 17.1, 960, 84),
    Card(r"5070 ?Ti", "rtx5090x8", 43.9, 87.9, 17.1, 896, 70),
    Card(r"5070", "rtx5090x8", 30.9, 61.7, 12.8, 672, 48),
    Card(r"4080 ?S", "rtx4090x8", 52.2, 104.4, 17.1, 736, 80),
    Card(r"4080", "rtx4090x8", 48.7, 97.5, 17.1, 717, 76),
    Card(r"4070 ?Ti ?S", "rtx4090x8", 44.1, 88.2, 17.1, 672, 66),
    Card(r"4070 ?Ti", "rtx4090x8", 40.1, 80.2, 12.8, 504, 60),
    Card(r"4070 ?S", "rtx4090x8", 35.5, 71.0, 12.8, 504, 56),
    Card(r"4070", "rtx4090x8", 29.1, 58.3, 12.8, 504, 46),
    Card(r"4060 ?Ti", "rtx4090x8", 22.1, 44.1, 17.1, 288, 34),
    Card(r"4060", "rtx4090x8", 15.1, 30.2, 8.5, 272, 24),
    Card(r"3090 ?Ti", "rtx3090x8", 40.0, 80.0, 25.2, 1008, 84),
    Card(r"3080 ?Ti", "rtx3090x8", 34.1, 68.2, 12.8, 912, 80),
    Card(r"3080", "rtx3090x8", 29.8, 59.5, 10.6, 760, 68),
    Card(r"3070 ?Ti", "rtx3090x8", 21.7, 43.5, 8.5, 608, 48),
    Card(r"3070", "rtx3090x8", 20.3, 40.6, 8.5, 448, 46),
    Card(r"3060 ?Ti", "rtx3090x8", 16.2, 32.4, 8.5, 448, 38),
    Card(r"3060", "rtx3090x8", 12.7, 25.5, 12.8, 360, 28),
    Card(r"2080 ?Ti", "rtx3090x8", 13.4, 53.8, 11.5, 616, 68),
    Card(r"2080", "rtx3090x8", 10.1, 40.3, 8.5, 448, 46),
    Card(r"2070", "rtx3090x8", 7.5, 29.9, 8.5, 448, 36),
    Card(r"TITAN ?RTX", "t4x8", 16.3, 130.5, 25.2, 672, 72),
    Card(r"RTX (8000|6000) ?(passive)?$|Quadro RTX 8000", "t4x8", 16.3, 130.5, 50.5, 672, 72),
    Card(r"Quadro RTX 6000", "t4x8", 16.3, 130.5, 25.2, 672, 72),
    Card(r"TITAN ?V", "v100x8", 14.9, 110.0, 12.6, 653, 80),
    Card(r"P100", "v100x8", 9.5, 19.0, 17.1, 732, 56),
    Card(r"1080 ?Ti", "v100x8", 11.3, 11.3, 11.7, 484, 28),
    Card(r"1080", "v100x8", 8.9, 8.9, 8.5, 320, 20),
    Card(r"6000 Ada|A6000 Ada|RTX 6000 ?Ada", "l40sx8", 91.1, 364.2, 50.9, 960, 142),
    Card(r"A5500", "a6000x8", 34.1, 136.4, 25.3, 768, 80),
    Card(r"A5000", "a6000x8", 27.8, 111.1, 25.3, 768, 64),
    Card(r"A4500", "a6000x8", 23.7, 94.6, 21.0, 640, 56),
    Card(r"A4000", "a6000x8", 19.2, 76.7, 16.9, 448, 48),
    Card(r"A2000", "a6000x8", 8.0, 31.9, 12.6, 288, 26),
    Card(r"7900 ?XTX", "mi250x8", 61.4, 122.8, 25.7, 960, 96),
)
"""Dense rates, from NVIDIA's and AMD's data sheets and white papers of GP102, GV100, TU102, GA102, AD102 and GB202."""
NO_BFLOAT16 = ("2080", "2070", "TITAN", "RTX (8000", "Quadro", "P100", "1080")


def of_card(card: Card, like: Hardware) -> Hardware:
    """Return the profile of a card, of whose make another one is."""
    rates = {"float32": card.float32 * 1e12, "float16": card.sixteen * 1e12}
    if not card.pattern.startswith(NO_BFLOAT16):
        rates["bfloat16"] = rates["float16"]
        rates["tfloat32"] = rates["float16"] / 2
    if "float8" in like.flops_per_s:
        rates["float8"] = 2 * rates["float16"]
    return replace(
        like,
        name=card.pattern.replace(" ?", "").split("|")[0].replace("\\b", "").lower().replace(" ", "-"),
        flops_per_s=rates,
        memory_bytes=round(card.gigabytes * 1e9),
        memory_bytes_per_s=card.bandwidth * 1e9,
        num_units=card.units,
        device_names=(),
    )
