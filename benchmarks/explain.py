"""Is what `samestep explain` says true? Delays of known size in real runs, clean runs, the layouts, its cost, and a slow link.

    python benchmarks/explain.py                              everything, and keeps the rows; about ten minutes alone
    python benchmarks/explain.py delays --only "tp=2"         some delays (explain_delays.py says what is held against what)
    python benchmarks/explain.py clean layouts cost link      other parts (explained_runs.py)

Two cores are needed; the link needs root and network namespaces. Figures are kept in rows/explain.json, part by part, from which
`python docs/tables.py` makes the tables of docs/explain.md. The last line says how many are not as they should be: on a machine that
has other things to do a row moves by what these do.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parent))

import circumstances

ROWS = Path(__file__).parent / "rows" / "explain.json"
DRAWER = 0.1
"""Part of a step that host and rest may take together."""
ALWAYS, WINDOW = 0.005, 0.02
"""Part of a step of 100 ms that the recorder may take."""
STEP_S = 0.1


def _delays(only: str) -> Iterator[dict[str, Any]]:
    from explain_delays import delays

    return (asdict(found) for found in delays(only))


def _clean(only: str) -> Iterator[dict[str, Any]]:
    from explained_runs import clean

    for row in clean():
        blamed = row["kind"] in ("straggler", "link") or row["named"]
        yield {**row, "faults": ["blamed"] * bool(blamed)}


def _layouts(only: str) -> Iterator[dict[str, Any]]:
    from explained_runs import LAYOUTS, layouts

    for row in layouts([one for one in LAYOUTS if only in one]):
        drawer_s = row["rows"].get("host", 0.0) + row["rows"].get("rest", 0.0)
        faults = ["sum"] * (row["unexplained_s"] > 1e-6) + ["missing"] * bool(row["missing"])
        yield {**row, "faults": faults + ["drawer"] * (drawer_s > DRAWER * row["step_s"])}


def _cost(only: str) -> Iterator[dict[str, Any]]:
    from explained_runs import cost, window_cost

    yield {**cost(), "faults": []}
    yield {**window_cost(), "faults": []}


def _link(only: str) -> Iterator[dict[str, Any]]:
    from explained_runs import MBIT, link, sent_s

    found = link()
    fast, slow = ({tuple(row[:2]): row[2] for row in found[kind]["rows"]} for kind in ("fast", "slow"))
    truth_s = sent_s(found["slow"]["sent_bytes"])
    moved = {key: slow.get(key, 0.0) - fast.get(key, 0.0) for key in {*slow, *fast}}
    moved_s = moved.pop(("transfer", "dp_replicate"))
    other = max(moved.items(), key=lambda one: abs(one[1]))
    faults = ["row"] * (abs(moved_s - truth_s) > 0.1 * truth_s)
    faults += ["elsewhere"] * (abs(other[1]) > 0.05 * found["fast"]["step_s"]) + ["verdict"] * (
        found["slow"]["kind"] != "link"
    )
    label = " ".join(word for word in other[0] if word)
    yield {"mbit": MBIT, "truth_s": truth_s, "moved_s": moved_s, "other": [label, other[1]], **found, "faults": faults}


PARTS: Mapping[str, Callable[[str], Iterator[dict[str, Any]]]] = {
    "delays": _delays,
    "clean": _clean,
    "layouts": _layouts,
    "cost": _cost,
    "link": _link,
}


def main(words: Sequence[str] | None = None) -> int:
    """Run the parts, print each row as it is found, and keep the rows of parts that are whole."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}; default: all")
    parser.add_argument("--only", default="", help="a word of the delays or layouts to run; nothing is kept")
    given = parser.parse_args(words)
    faults = 0
    for part in given.parts or PARTS:
        began = circumstances.now()
        rows = []
        for row in PARTS[part](given.only):
            rows.append(row)
            faults += len(row["faults"])
            print(f"{part}: {json.dumps(row)}", flush=True)
        if not given.only:
            kept = json.loads(ROWS.read_text()) if ROWS.exists() else {}
            kept[part] = {circumstances.KEY: began, "rows": rows}
            ROWS.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    print(f"{faults} figures are not as they should be" if faults else "every figure is as it should be")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
