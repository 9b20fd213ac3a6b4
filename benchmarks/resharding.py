"""Every ordered pair out of twelve layouts: what one saves, the other loads, to the bit.

    python benchmarks/resharding.py      saves in each, loads in each; writes benchmarks/rows/resharding.json

`tests/parity/test_every_pair.py` does the work, and repeats it in `make parity`; `docs/reference/layouts.md` shows the rows.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from tests.parity import test_every_pair as pairs  # noqa: E402
from tests.pool import close_all  # noqa: E402


def main() -> None:
    """Save and load in all pairs, print and write the table."""
    with tempfile.TemporaryDirectory(prefix="samestep-pairs-") as folder:
        written = {layout: pairs.written_by(layout, Path(folder)) for layout in pairs.LAYOUTS}
        rows = {after: pairs.loaded_by(after, written) for after in pairs.LAYOUTS}
    close_all()
    pairs.ROWS.write_text(json.dumps(rows, indent=1) + "\n")
    print(table())


def table() -> str:
    """Return the table of what was found: a row saves, a column loads."""
    rows = json.loads(pairs.ROWS.read_text())
    numbers = {layout: index for index, layout in enumerate(rows, 1)}
    lines = ["| saved in | " + " | ".join(str(number) for number in numbers.values()) + " |"]
    lines.append("| --- |" + " :-: |" * len(rows))
    for before, number in numbers.items():
        cells = [rows[after].get(before) for after in rows]
        words = ["" if cell is None else "=" if cell == "" else f"{cell} differs" for cell in cells]
        lines.append(f"| {number}. `{before}` | " + " | ".join(words) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
