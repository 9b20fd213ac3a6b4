"""What `samestep plan` recommends for each of the published bests, with the price of both layouts: docs/reference/published-bests.md.

    python benchmarks/published_bests.py --rows DIR [--jobs N]     plans, and writes benchmarks/rows/published_bests.json
    python docs/tables.py                                          writes the table

Of each source (a file of DIR, as `foresight.py` reads them) the best of a model on a kind of device is the row with most samples a
second and device. Its layout is priced by `predict`, and `search.plan` looks for the fastest one of the same model, batch and devices,
so the two prices answer one question: how much faster would another layout be? Rows in 8 or 4 bits are priced in bf16, in which
samestep trains. Left out are rows that print no degree, functional tests, which are no recipes, a rank's part of a sequence (cp), which is
read as a shorter sequence, and one device, which has no layout to choose.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from cells import Row, whole
from composed import composed
from forecast import UNREADABLE, known
from foresight import read_rows
from published import case_of

from samestep import Job
from samestep.errors import InputError
from samestep.layout import Layout
from samestep.wings.plan import search
from samestep.wings.plan.plan import KEPT_FREE
from samestep.wings.plan.simulation.simulate import Prediction, predict

ROWS = Path(__file__).parent / "rows" / "published_bests.json"
TESTS = ("megatron_golden",)
"""Files whose rows are functional tests of small models."""
PRINTED = ("tp", "pp", "dp_replicate", "dp_shard", "zero_stage")
"""Columns of which one at least says what the layout was."""
ALIKE = 0.03
"""Part of a step below which two predictions say nothing about an order."""


def bests(rows: Sequence[Row]) -> list[Row]:
    """Return the best row of each source, model, precision and kind of device: that with most samples a second and device."""
    aside = composed(rows)
    best: dict[tuple[str, ...], tuple[float, Row]] = {}
    for row in rows:
        is_printed = any(whole(row, name) for name in PRINTED)
        if row["file"] in {*aside, *TESTS} or not is_printed or whole(row, "cp", 1) > 1 or whole(row, "n_gpus") < 2:
            continue
        try:
            case = case_of(row)
        except UNREADABLE:
            continue
        if not case.step_s or case.is_lean:
            continue
        rate = case.global_batch / case.step_s / whole(row, "n_gpus")
        of = row["file"], row["model"], case.machine.name, row["seq_len"]
        if of not in best or rate > best[of][0]:
            best[of] = rate, row
    return [row for _, row in best.values()]


def priced(row: Row) -> dict[str, Any] | None:
    """Return what a row was, and the prices of its layout and of the best one; None where a strategy refuses its layout."""
    case = case_of(row)
    job = Job(train={"global_batch": case.global_batch}, numerics={"precision": case.precision})
    machine = replace(case.machine, kept_free=KEPT_FREE)
    printed = Layout(known(case)[0])
    try:
        theirs = predict(case.model, job, printed, machine, case.states_per_param)
        found = search.plan(case.model, job, machine, printed.world_size, top=1, states_per_param=case.states_per_param)
    except InputError:
        return None
    return {
        "source": case.source,
        "model": row["model"].partition(" (")[0],
        "machine": case.machine.name,
        "devices": printed.world_size,
        "batch": case.global_batch,
        "tokens": case.model.length,
        "precision": case.products or case.precision,
        "measured_s": case.step_s,
        "theirs": _figures(theirs),
        "best": _figures(found.best[0]) if found.best else None,
    }


def _figures(one: Prediction) -> dict[str, Any]:
    return {"layout": str(one.layout), "step_s": one.step_s, "fits": one.fits}


def markdown(path: Path = ROWS) -> str:
    """Return the table of the rows that were written."""
    head = ("model", "devices", "samples x tokens", "measured, s", "published layout", "s", "recommended", "s")
    lines = [f"| {' | '.join(head)} |", "| --- | --- | ---: | ---: | --- | ---: | --- | ---: |"]
    lines += [f"| {' | '.join(_cells(one))} |" for one in json.loads(path.read_text())]
    return "\n".join(lines)


def _cells(one: dict[str, Any]) -> Sequence[str]:
    theirs, best = one["theirs"], one["best"]
    samples = f"{one['batch']:,} x {one['tokens']:,}" if one["tokens"] else f"{one['batch']:,}"
    number = "" if one["precision"] in ("bf16", "fp16", "fp32") else f" ({one['precision']})"
    lacks = "" if theirs["fits"] else ", predicted not to fit" + " in bf16" * bool(number)
    recommended = (f"`{best['layout']}`", f"{best['step_s']:.3g}") if best else ("nothing fits", "")
    return (
        one["model"], f"{one['devices']:,} {one['machine']}", samples,
        f"{one['measured_s']:.3g}{number}", f"`{theirs['layout']}`{lacks}", f"{theirs['step_s']:.3g}", *recommended,
    )  # fmt: skip


def summary(path: Path = ROWS) -> str:
    """Return how many published layouts are predicted to be as fast as the best one, and how much faster that one is."""
    rows = json.loads(path.read_text())
    both = [one for one in rows if one["best"] and one["theirs"]["fits"]]
    gains = [one["theirs"]["step_s"] / one["best"]["step_s"] - 1 for one in both]
    tight = sum(not one["theirs"]["fits"] for one in rows)
    nothing = sum(one["best"] is None for one in rows)
    lines = [
        "| published bests | |", "| --- | ---: |",
        f"| rows | {len(rows)} |",
        f"| their layout needs more than 95 % of the memory, as predicted | {tight} |",
        f"| no layout is predicted to fit with 5 % of the memory free | {nothing} |",
        f"| of the others: another layout is less than 3 % faster | {sum(gain < ALIKE for gain in gains)} of {len(gains)} |",
        f"| how much faster the recommended layout is, middle | {statistics.median(gains):.0%} |",
        f"| nine of ten are at most | {statistics.quantiles(gains, n=10)[-1]:.0%} |",
    ]  # fmt: skip
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Price the published bests, and write the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=Path, required=True, metavar="DIR", help="published measurements")
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="processes")
    given = parser.parse_args(arguments)
    found = []
    with multiprocessing.get_context("fork").Pool(given.jobs, maxtasksperchild=8) as processes:
        for one in processes.imap(priced, bests(read_rows(given.rows)[0])):
            if one is not None:
                print(" | ".join(_cells(one)), flush=True)
                found.append(one)
    found.sort(key=lambda one: (one["source"], one["model"], one["devices"], one["machine"], one["tokens"]))
    ROWS.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
