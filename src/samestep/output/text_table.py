"""Tables of text for a terminal, with aligned columns."""

from __future__ import annotations

from collections.abc import Collection, Sequence


def align_columns(rows: Sequence[Sequence[str]], left: Collection[int] = (0,)) -> str:
    """Return the rows as lines of columns with two blanks between them, aligned left for the indices in `left`, else right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(
            cell.ljust(width) if column in left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
    return "\n".join(line.rstrip() for line in lines)
