"""Bytes as text, in powers of two and three digits."""

from __future__ import annotations


def readable(size_bytes: float) -> str:
    """Return bytes in the largest unit of B, KiB, MiB and GiB that they fill, as `79.6 GiB`."""
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size_bytes >= factor:
            return f"{_three_digits(size_bytes / factor)} {unit}"
    return f"{size_bytes:.0f} B"


def gib(size_bytes: float) -> str:
    """Return bytes in GiB without the unit, however few they are, so that numbers can be compared."""
    return _three_digits(size_bytes / 2**30)


def _three_digits(number: float) -> str:
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"
