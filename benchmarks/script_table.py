"""What is proven of kinds of single-device scripts, as `docs/coming-from.md` shows it: one line a kind, one column a layout.

The outcomes are those that `benchmarks/scripts.py` has found, kept in `benchmarks/rows/scripts.json`; refusals of one reason
share a number, and the reasons are listed below the table.
"""

from __future__ import annotations

import json
from pathlib import Path

KEPT = Path(__file__).parent / "rows" / "scripts.json"
LAYOUTS = ("dp=1", "dp=2", "dp=2 zero=3", "tp=2", "pp=2 microbatch=4")
EQUAL, REFUSED, WRONG, FAILED = "equal", "refused", "wrong", "failed"
SHOWN = {REFUSED: "rejected"}
LONGEST = 240
"""The most characters of a refusal that are shown."""

Outcomes = dict[str, dict[str, list[str]]]
"""The outcome of each kind in each layout, and its text."""


def kept() -> Outcomes:
    """Return the outcomes that are kept."""
    found: Outcomes = json.loads(KEPT.read_text(encoding="utf-8")) if KEPT.is_file() else {}
    return found


def keep(found: Outcomes) -> None:
    """Write the outcomes to the file that is kept."""
    lines = [f"{json.dumps(name)}: {json.dumps(row)}" for name, row in found.items()]
    KEPT.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def table() -> str:
    """Return the table of all kinds, with the reasons of refusals as notes."""
    found, notes = kept(), dict[str, int]()
    lines = ["| kind | " + " | ".join(f"`{layout}`" for layout in LAYOUTS) + " |", "| --- |" + " --- |" * len(LAYOUTS)]
    for name, row in found.items():
        cells = []
        for layout in LAYOUTS:
            word, why = row.get(layout, ["", ""])
            is_noted = word not in (EQUAL, "")
            cells.append(
                f"{_strong(SHOWN.get(word, word))} ({notes.setdefault(why, len(notes) + 1)})" if is_noted else word
            )
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    lines += ["", counts(found)]
    if notes:
        lines += ["", *(f"{number}. {_shown(why)}" for why, number in notes.items())]
    return "\n".join(lines)


def counts(found: Outcomes) -> str:
    """Return how many kinds are equal in each layout."""
    parts = []
    for layout in LAYOUTS:
        words = [row[layout][0] for row in found.values() if layout in row]
        parts.append(f"{words.count(EQUAL)} of {len(words)} in `{layout}`")
    return "Equal: " + ", ".join(parts) + "."


def summary(found: Outcomes) -> str:
    """Return how many kinds are equal on two data ranks, how many outcomes are wrong or failed, and what is refused in each layout, and why."""
    two = [row["dp=2"][0] for row in found.values() if "dp=2" in row]
    every = [(name, layout, *outcome) for name, row in found.items() for layout, outcome in row.items()]
    bad = [f"{name} in {layout}" for name, layout, word, _ in every if word in (WRONG, FAILED)]
    lines = [
        f"{len(found)} kinds, equal in dp=2: {two.count(EQUAL)} of {len(two)}, wrong: {sum(one[2] == WRONG for one in every)}, "
        f"failed: {sum(one[2] == FAILED for one in every)}{' (' + ', '.join(bad) + ')' if bad else ''}, "
        f"refused: {sum(one[2] == REFUSED for one in every)}"
    ]
    refused = [one for one in every if one[2] == REFUSED]
    lines += [f"  {name} in {layout}: {why[:LONGEST]}" for name, layout, _, why in refused]
    return "\n".join(lines)


def _strong(word: str) -> str:
    return f"**{word}**" if word in (WRONG, FAILED) else word


def _shown(text: str) -> str:
    """Return a refusal as a line of a Markdown list."""
    text = text.replace("|", "\\|").replace("<", "&lt;").replace("`", "'")
    return f"`{text}`" if len(text) <= LONGEST else f"`{text[:LONGEST]} ...`"
