"""What fits of long sequences: `samestep plan` for 8B and 70B at 128k, 512k and 1M tokens on H100s, for docs/plans.md.

    python benchmarks/long_context.py [--only MODEL ...] [--devices N ...]     plans, and writes benchmarks/rows/long_context.json
    python docs/tables.py                                                      writes the table

A step has 8 Mi tokens whatever their sequences' length is, in bf16 with Adam, on nodes of eight H100.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from samestep import Job
from samestep.output.text import gib
from samestep.wings.plan.plan import plan

ROWS = Path(__file__).parent / "rows" / "long_context.json"
MACHINE = "h100x8"
MODELS = ("llama3-8b", "llama3-70b")
LENGTHS = (2**17, 2**19, 2**20)
DEVICES = (8, 64, 512)
TOKENS = 2**23
"""Tokens of a step."""


def recommended(model: str, length: int, devices: int) -> dict[str, Any]:
    """Return the fastest layout that fits of a model, a length of its sequences and a number of devices."""
    job = Job(
        model={"source": f"preset:{model}"},
        data={"sequence_length": length},
        train={"global_batch": TOKENS // length},
        numerics={"precision": "bf16"},
    )
    found = plan(job, devices, MACHINE, top=1).best[:1]
    best = [
        {"layout": str(one.layout), "step_s": one.step_s, "mfu": one.mfu, "peak_bytes": one.peak.total} for one in found
    ]
    return {"model": model, "length": length, "devices": devices, "best": best}


def markdown(path: Path = ROWS) -> str:
    """Return the table of the rows that were written."""
    head = ("model", "tokens per sequence", "devices", "the fastest that fits", "s per step", "MFU", "GiB")
    lines = [f"| {' | '.join(head)} |", "| --- | ---: | ---: | --- | ---: | ---: | ---: |"]
    lines += [f"| {' | '.join(_cells(row))} |" for row in json.loads(path.read_text())]
    return "\n".join(lines)


def _cells(row: Mapping[str, Any]) -> Sequence[str]:
    first = (f"`{row['model']}`", f"{row['length']:,}", f"{row['devices']:,}")
    if not row["best"]:
        return (*first, "nothing fits", "", "", "")
    (best,) = row["best"]
    return (*first, f"`{best['layout']}`", f"{best['step_s']:.3g}", f"{best['mfu']:.0%}", gib(best["peak_bytes"]))


def main(arguments: Sequence[str] | None = None) -> int:
    """Plan every model at every length on every number of devices, and write the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--devices", nargs="+", type=int, choices=DEVICES, default=list(DEVICES))
    given = parser.parse_args(arguments)
    read = json.loads(ROWS.read_text()) if ROWS.exists() else []
    kept = {(row["model"], row["length"], row["devices"]): row for row in read}
    every = [(model, length, devices) for model in MODELS for length in LENGTHS for devices in DEVICES]
    for key in sorted(every, key=lambda one: one[2]):
        if key[0] in given.only and key[2] in given.devices:
            kept[key] = recommended(*key)
            print(" | ".join(_cells(kept[key])), flush=True)
            ROWS.write_text(json.dumps([kept[one] for one in every if one in kept], indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
