"""Processor seconds and number of tests of each file, in `tests/costs.json`: `python -m tests.costs [COUNT]` prints the dearest fifty.

`pytest -q --keep-costs PATH ...` writes those of the files that it runs, each when its last test is done (`progress.py`), and leaves
the others; so a whole run may be made of parts. `make costs` runs all files with all turns, on a quiet machine, and prints the table.
Each file has the commit at which it ran.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from tests.frozen import table

KEPT = Path(__file__).parent / "costs.json"

Costs = dict[str, dict[str, float | int | str]]
"""For each file of tests its `processor_s`, `tests` and `commit`."""


def load(path: Path = KEPT) -> Costs:
    """Return the costs that are kept."""
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def keep(file: str, used_s: float, num_tests: int, path: Path = KEPT) -> None:
    """Write the cost of a file in place of the one before; a file that is no more is dropped."""
    with table.locked(path):
        costs = {name: cost for name, cost in load(path).items() if (table.ROOT / name).is_file()}
        costs[file] = {"processor_s": round(used_s, 1), "tests": num_tests, "commit": table.commit()}
        lines = [f"{json.dumps(name)}: {json.dumps(cost)}" for name, cost in sorted(costs.items())]
        part = path.with_suffix(".part")
        part.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
        os.replace(part, path)


def dearest(costs: Costs, count: int) -> str:
    """Return the dearest files as a table, with the sums of folders and of all, and the files that have no cost yet."""
    seconds = {file: float(cost["processor_s"]) for file, cost in costs.items()}
    folders = Counter[str]()
    for file, used_s in seconds.items():
        folders[file.removeprefix("tests/").rpartition("/")[0]] += used_s  # type: ignore[assignment]
    order = sorted(costs, key=lambda file: -seconds[file])[:count]
    lines = [f"{seconds[file]:8.1f} s{costs[file]['tests']:6} tests  {file}  {costs[file]['commit']}" for file in order]
    lines.append("by folder: " + ", ".join(f"{folder} {used_s:.0f} s" for folder, used_s in folders.most_common()))
    lines.append(f"together {sum(seconds.values()):.0f} s of processor time, {len(costs)} files")
    here = {str(path.relative_to(table.ROOT)) for path in table.TESTS.rglob("test_*.py")}
    if left := sorted(here - costs.keys()):
        lines.append(f"without a cost: {len(left)} files, such as {', '.join(left[:3])}")
    return "\n".join(lines)


def main(words: Sequence[str] | None = None) -> int:
    """Print the dearest files."""
    given = list(sys.argv[1:] if words is None else words)
    print(dearest(load(), int(given[0]) if given else 50))
    return 0


if __name__ == "__main__":
    sys.exit(main())
