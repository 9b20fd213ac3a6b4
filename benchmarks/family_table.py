"""What is proven of every causal family of transformers, as `docs/reference/families.md` shows it: one line a family, one column a layout.

The outcomes are those that `benchmarks/families.py` has found, kept in `benchmarks/rows/families.json`; refusals of one
reason share a number, and the reasons are listed below the table.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

KEPT = Path(__file__).parent / "rows" / "families.json"
LAYOUTS = (
    "dp=2", "dp=2 zero=3", "dp=1 tp=2", "dp=1 tp=2 sequence_parallel", "dp=1 pp=2 microbatch=4", "dp=1 cp=2", "dp=2 ep=2",
)  # fmt: skip
FOLDER = "folder"
"""A column beside the layouts: whether a folder of the family that is read and written is the same to the bit."""
COLUMNS = (*LAYOUTS, FOLDER)
OUTCOMES = ("proven", "refused", "different", "failed", "absent", "unbuilt")
SHOWN = {"proven": "equal", "absent": "", "different": "**different**", "failed": "**failed**", "": "not tried"}

Outcomes = Mapping[tuple[str, str], tuple[str, str, str]]
"""The outcome of each family in each layout, its text, and the state of the code that found it."""


def keep(found: Outcomes) -> None:
    """Write the outcomes to the file that is kept."""
    table: dict[str, dict[str, tuple[str, str, str]]] = {}
    for (family, layout), outcome in sorted(found.items()):
        table.setdefault(family, {})[layout] = outcome
    lines = [f"{json.dumps(family)}: {json.dumps(row, sort_keys=True)}" for family, row in table.items()]
    KEPT.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def kept() -> Outcomes:
    """Return the outcomes that are kept."""
    table = json.loads(KEPT.read_text(encoding="utf-8")) if KEPT.is_file() else {}
    return {(family, layout): tuple(found) for family, row in table.items() for layout, found in row.items()}


def counts() -> str:
    """Return how many families are equal to one device, refused or not built, in each layout."""
    outcomes = kept()
    found = Counter((layout, kind) for (_, layout), (kind, _, _) in outcomes.items())
    lines = ["| layout | " + " | ".join(("equal", "rejected", *OUTCOMES[2:4], "without experts", "not built")) + " |"]
    lines.append("| --- |" + " ---: |" * len(OUTCOMES))
    lines += [
        f"| `{_short(layout)}` | " + " | ".join(str(found[layout, kind]) for kind in OUTCOMES) + " |"
        for layout in COLUMNS
    ]
    codes = Counter(code for _, _, code in outcomes.values()).most_common()
    everywhere = [family for family in {name for name, _ in outcomes} if _is_everywhere(family, outcomes)]
    lines += [
        "",
        f"Equal in every layout that applies: {len(everywhere)}.",
        "",
        "States of the code that found them: " + ", ".join(f"`{code}` {count} rows" for code, count in codes) + ".",
    ]
    return "\n".join(lines)


def _is_everywhere(family: str, outcomes: Outcomes) -> bool:
    """Return whether a family is equal to one device in every layout that it has something for."""
    return {outcomes.get((family, layout), ("", "", ""))[0] for layout in LAYOUTS} <= {"proven", "absent"}


def table() -> str:
    """Return the table of all families, with the reasons of refusals as notes."""
    found = kept()
    reasons = Counter(_reason(family, text) for (family, _), (kind, text, _) in found.items() if kind == "refused")
    numbers = {reason: number for number, (reason, _) in enumerate(reasons.most_common(), 1)}
    lines = [
        "| family | " + " | ".join(f"`{_short(layout)}`" for layout in COLUMNS) + " |",
        "| --- |" + " --- |" * len(COLUMNS),
    ]
    unbuilt = []
    for family in sorted({family for family, _ in found}):
        row = [found.get((family, layout), ("", "", "")) for layout in COLUMNS]
        if all(kind == "unbuilt" for kind, _, _ in row):
            unbuilt.append(family)
            continue
        cells = [
            f"rejected {numbers[_reason(family, text)]}" if kind == "refused" else SHOWN.get(kind, kind)
            for kind, text, _ in row
        ]
        lines.append(f"| {family} | " + " | ".join(cells) + " |")
    lines += ["", f"Not built from small sizes alone: {', '.join(unbuilt) or 'none'}.", "", "Reasons:", ""]
    lines += [f"{number}. {reason}" for reason, number in numbers.items()]
    return "\n".join(lines)


def _short(layout: str) -> str:
    return layout.removeprefix("dp=1 ")


def _reason(family: str, text: str) -> str:
    """Return a refusal without the names of the model and of its modules, so that families share it."""
    text = re.sub(r" \[[a-z0-9-]+\]$", "", text)
    text = re.sub(r"^[tc]p=2( slices sequences)?: ", "", text)
    text = re.sub(rf"\b{re.escape(family)}\b( cannot be cut, )?", "", text)
    text = re.sub(r"\b[a-z_]\w*(\.\w+)+|^\.\w+(\.\w+)*|\blm_head\b", "M", text)
    text = re.sub(r"\[[\d, ]+\]|\b\d[\d,]*\b", "N", text)
    return text.partition("; ")[0].partition(": pp=1 works")[0].partition(". Use ")[0].strip()[:200]
