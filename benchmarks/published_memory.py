"""Which memory a published row measured: what tensors had, or what torch's allocator had taken for them."""

from __future__ import annotations

import re

from cells import Row, joined

FIGURES = ("allocated", "reserved", "not said")
"""What tensors have; what the allocator has taken for them; or a row does not say, and is held against the first."""


def is_titan(row: Row) -> bool:
    """Whether a row is of torchtitan, or of torchao, which measures with it."""
    return re.search(r"titan|torchao", joined(row, "source"), re.IGNORECASE) is not None


def memory_figure(row: Row) -> str:
    """Return which memory a row says it measured; torchtitan's log has what is reserved."""
    notes = joined(row, "notes").lower()
    if "reserved" in notes or is_titan(row):
        return "reserved"
    return "allocated" if "allocated" in notes else "not said"
