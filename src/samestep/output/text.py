"""Numbers and tables as people read them: three digits and a unit, and columns that stand below each other.

On a page the exact value stands in the same element, for programs.
"""

from __future__ import annotations

import contextlib
import math
import sys
import textwrap
import threading
from collections.abc import Collection, Iterator, Sequence
from html import escape
from importlib import metadata
from typing import NamedTuple

PATIENCE_S = 2.0, 15.0
"""The seconds after which a terminal, or a file or another program, gets the reason for a wait."""


@contextlib.contextmanager
def announced(wait: str) -> Iterator[None]:
    """Print the reason for a wait to the error stream, unless the context ends within `PATIENCE_S`."""
    seconds = PATIENCE_S[0 if sys.stderr.isatty() else 1]
    timer = threading.Timer(seconds, lambda: print(f"samestep: {wait}", file=sys.stderr, flush=True))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def readable(size_bytes: float) -> str:
    """Return bytes in the largest unit of B, KiB, MiB and GiB that they fill, as `79.6 GiB`."""
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size_bytes >= factor:
            return f"{_three_digits(size_bytes / factor)} {unit}"
    return f"{size_bytes:.0f} B"


def gib(size_bytes: float) -> str:
    """Return bytes in GiB without the unit, however few they are, so that numbers can be compared."""
    return _three_digits(size_bytes / 2**30)


def installed_version(package: str) -> str:
    """Return the version of an installed package; "none" without it."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "none"


def listed(names: Sequence[str], most: int) -> str:
    """Return the first names of a list, and how many more there are."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def _three_digits(number: float) -> str:
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


class Quantity(NamedTuple):
    """A number and the text by which a page shows it."""

    value: float
    text: str

    def to_html(self) -> str:
        """Return a `data` element: its text for readers, its value for programs."""
        return f'<data value="{self.value:.10g}">{escape(self.text)}</data>'


def duration(seconds: float) -> Quantity:
    """Return a time in the largest unit of s, ms and µs that it fills."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if abs(seconds) >= size:
            return Quantity(seconds, f"{digits(seconds / size)} {unit}")
    return Quantity(seconds, f"{digits(seconds * 1e6)} µs" if abs(seconds) >= 1e-9 else "0 s")


def share(fraction: float) -> Quantity:
    """Return a fraction in percent."""
    percent = fraction * 100
    if abs(percent) < 1e-6:
        return Quantity(fraction, "0%")
    if 0 < percent < 0.1:
        return Quantity(fraction, "<0.1%")
    return Quantity(fraction, f"{percent:.0f}%" if percent >= 10 else f"{percent:.1f}%")


def size(num_bytes: float) -> Quantity:
    """Return bytes in a readable unit."""
    return Quantity(num_bytes, readable(num_bytes))


def count(number: float) -> Quantity:
    """Return a number with three digits at least and separators of thousands."""
    return Quantity(number, digits(number))


def digits(number: float) -> str:
    """Return a number with three significant digits, or all digits before the point."""
    if number == 0 or not math.isfinite(number):
        return f"{number:g}"
    return f"{number:,.{max(0, 2 - math.floor(math.log10(abs(number)) + 1e-9))}f}"


def ticks(length: float, most: int) -> list[float]:
    """Return the multiples of 1, 2 or 5 times a power of ten from 0 to `length`, at most `most` + 1 of them."""
    if length <= 0:
        return [0.0]
    power = 10 ** math.floor(math.log10(length / most))
    step = next(factor * power for factor in (1, 2, 5, 10, 20) if factor * power * most >= length * (1 - 1e-9))
    return [index * step for index in range(math.floor(length / step * (1 + 1e-9)) + 1)]


def tick_labels(values: list[float], units: tuple[tuple[float, str], ...]) -> list[str]:
    """Return the labels of ticks in one unit: the largest that the last tick fills; `units` are sizes and names, largest first."""
    last = values[-1]
    factor, unit = next(((factor, name) for factor, name in units if last >= factor), units[-1])
    return ["0", *(f"{round(value / factor, 9):g} {unit}" for value in values[1:])]


SECONDS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))
BYTES = ((2.0**30, "GiB"), (2.0**20, "MiB"), (2.0**10, "KiB"), (1.0, "B"))


COLUMNS = 120
"""Width of a terminal for which texts are made."""


def wrap(text: str) -> str:
    """Return a text with its long lines broken at blanks; a continued line is indented."""
    broken = (
        textwrap.wrap(line, COLUMNS, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False)
        for line in text.splitlines()
    )
    return "\n".join(line for lines in broken for line in lines or [""])


def align_columns(rows: Sequence[Sequence[str]], left: Collection[int] = (0,), *, wraps: bool = False) -> str:
    """Return the rows as lines of columns with two blanks between them, aligned left for the indices in `left`, else right.

    With `wraps`, a long cell of the last column continues on the next line.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    last = sum(width + 2 for width in widths[:-1])
    lines = []
    for row in rows:
        line = "  ".join(
            cell.ljust(width) if column in left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        parts = textwrap.wrap(row[-1], max(COLUMNS - 2 - last, 20), break_on_hyphens=False) if wraps else []
        whole = [line.rstrip()]
        lines += [line[:last] + parts[0], *(" " * (last + 2) + part for part in parts[1:])] if len(parts) > 1 else whole
    return "\n".join(lines)
