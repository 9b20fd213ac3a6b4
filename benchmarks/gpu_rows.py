"""What `gpu.py` has measured, one row each, and the tables of `benchmarks/README.md` that show it.

A row is keyed by machine, part and name; measuring it again replaces it. The file is `rows/gpu.json`, one line a row.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

KEPT = Path(__file__).parent / "rows" / "gpu.json"

Values = Mapping[str, Any]
"""What one row says: numbers, and words such as an error."""


@dataclass(frozen=True, slots=True)
class Measured:
    """On which machine, with which software and when."""

    machine: str
    torch: str
    python: str
    date: str


Key = tuple[str, str, str]
"""Machine, part and name."""


def read(path: Path) -> dict[Key, Values]:
    """Return the rows of a file; none if there is no such file."""
    if not path.is_file():
        return {}
    rows = json.loads(path.read_text(encoding="utf-8"))
    return {(row["machine"], row["part"], row["name"]): row for row in rows}


def write(path: Path, where: Measured, part: str, name: str, values: Values) -> None:
    """Add a row to a file, or replace it there; a file that does not exist begins with the rows that are kept."""
    rows = read(path if path.is_file() else KEPT)
    about = {"machine": where.machine, "part": part, "name": name}
    of_software = {"torch": where.torch, "python": where.python, "date": where.date}
    rows[where.machine, part, name] = {**about, **of_software, **values}
    lines = [json.dumps(rows[key]) for key in rows]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("[\n" + ",\n".join(lines) + "\n]\n", encoding="utf-8")


# -- tables ----------------------------------------------------------------------------------------

COLUMNS: dict[str, Sequence[tuple[str, str, str]]] = {
    "correctness": [("outcome", "outcome", ""), ("seconds", "s", ".1f")],
    "predict": [
        ("predicted_step_s", "predicted s", ".4g"), ("step_s", "measured s", ".4g"), ("step_error", "error", "+.1%"),
        ("predicted_bytes", "predicted GiB", "GiB"), ("allocated_bytes", "allocated GiB", "GiB"),
        ("bytes_error", "error", "+.1%"), ("reserved_bytes", "reserved GiB", "GiB"),
    ],
    "throughput": [
        ("loop", "loop", ""), ("layers", "layers", ","), ("params", "weights", ","), ("tokens", "tokens a step", ","),
        ("recompute", "recompute", ""), ("step_s", "step s", ".4f"), ("tokens_per_s", "tokens/s", ",.0f"),
        ("tflops", "TFLOP/s", ".4g"), ("mfu", "MFU", ".1%"), ("allocated_bytes", "allocated GiB", "GiB"),
        ("reserved_bytes", "reserved GiB", "GiB"), ("first_step_s", "first step s", ".3g"),
    ],
}  # fmt: skip
"""By part: the key of a value, its head in a table, and how it is written."""


def cells(part: str, name: str, values: Values) -> list[str]:
    """Return a row of a part's table; an error or a note takes the place of the first value that is missing."""
    written = [_written(values.get(key), form) for key, _, form in COLUMNS[part]]
    if error := values.get("error") or values.get("note"):
        at = written.index("") if "" in written else 0
        written[at] = str(error)
    return [name, *written]


def head(part: str) -> list[str]:
    """Return the heads of a part's table."""
    return ["what", *(title for _, title, _ in COLUMNS[part])]


def _written(value: Any, form: str) -> str:
    if value is None:
        return ""
    return f"{value / 2**30:.2f}" if form == "GiB" else f"{value:{form}}"


def tables() -> str:
    """Return one Markdown table for each machine and part; nothing where nothing was measured."""
    rows = read(KEPT)
    lines: list[str] = []
    for machine in dict.fromkeys(key[0] for key in rows):
        for part in COLUMNS:
            chosen = {name: row for (where, which, name), row in rows.items() if (where, which) == (machine, part)}
            if chosen:
                software = dict.fromkeys(f"torch {row['torch']}, Python {row['python']}" for row in chosen.values())
                dates = sorted(row["date"] for row in chosen.values())
                when = dates[0] if dates[0] == dates[-1] else f"{dates[0]} to {dates[-1]}"
                lines += [f"**{machine}: {part}**, {'; '.join(software)}, {when}", ""]
                lines += ["| " + " | ".join(head(part)) + " |", "| --- |" + " --- |" * len(COLUMNS[part])]
                lines += ["| " + " | ".join(cells(part, name, row)) + " |" for name, row in chosen.items()]
                lines.append("")
    return "\n".join(lines).rstrip()
