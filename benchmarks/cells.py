"""Cells of a published row as people write them: numbers with units, words, nothing."""

from __future__ import annotations

import re
from collections.abc import Mapping

Row = Mapping[str, str]


class SkippedError(Exception):
    """This row cannot be predicted; the text says why."""


_NOTHING = (
    r"[^a-z0-9]*|n/?a|nan|null|none|no|off|false|auto\w*|default|unset|unknown|tbd|var\w+|mixed|dynamic|packed|not\b.*"
)


def says_nothing(cell: str) -> bool:
    """Whether a cell is empty, or as good as that: n/a, unknown, auto, not stated."""
    return re.fullmatch(_NOTHING, cell.strip(), re.IGNORECASE) is not None


def number(row: Row, column: str) -> float | None:
    """Read a cell: 1840000000.0, ~250k, 1.5e9, 1,024 and 16,27; None where it is empty or holds no number."""
    cell = (row.get(column) or "").strip().lstrip("~")
    cell = cell.replace(",", "" if re.match(r"[1-9]\d{0,2}(,\d{3})+(?!\d)", cell) else ".")
    found = re.match(r"([0-9]*\.?[0-9]+(?:e[+-]?\d+)?)\s*([kmbt]?)", cell, re.IGNORECASE)
    if not found:
        return None
    return float(found[1]) * {"": 1, "k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}[found[2].lower()]


def whole(row: Row, column: str, default: int = 0) -> int:
    """Read a cell that counts something."""
    value = number(row, column)
    return default if value is None or value < 1 else round(value)


def joined(row: Row, *columns: str) -> str:
    """Return what cells say, one after the other."""
    return " ".join((row.get(column) or "") for column in columns)
