"""Predict published step times and memory from each row's configuration alone, and publish the error.

    python benchmarks/foresight.py --rows DIR [--json FILE] [--markdown FILE] [--record FILE] [--calibrate] [--quick]

DIR holds CSV files with the columns of measured rows (model and layout, `metric_step_time_s`, ...; `published.py` says
what a row must and may have). Each row is predicted as `samestep simulate` would: a model spec from hyperparameters,
the programs of its stages, prices from the hardware profile, the clock, the memory model.

Three tables, and what each may know:
    headline           the profiles and constants as they are shipped; nothing is fitted to the rows
    cross-validated    six constants (CONSTANTS) of which nothing is known but a range; for each source they are fitted
                       to all other sources, and then predict it: the honest figure for rows of a new source
    calibrated         a machine's profile refitted to five of a source's rows on one node, as `samestep calibrate` does, for
                       the other ones and for its rows on 64 devices and more (--calibrate)

Errors are of seconds a step, as parts of what was measured, in per cent. tau and regret are over groups of rows that
differ in their layout alone: how well the order is kept, and how much slower the layout is that we would have chosen.
Sources whose times a simulator composed (`composed.py`) are named, and all others have a line of their own.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import multiprocessing
import os
import statistics
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from cells import Row
from composed import composed
from forecast import Outcome, predict, rounded
from foresight_fits import CONSTANTS, PER_SOURCE, calibrate, cross_validate
from foresight_parts import by_part, coverage, interval, over_sources, own_factors, ratios
from published_memory import TARGETS

from samestep.planning.calibration.factors import FACTORS


def read_rows(folder: Path) -> tuple[list[Row], list[str]]:
    """Read every file of measured rows in a folder; name the files that hold something else."""
    rows: list[Row] = []
    others: list[str] = []
    for path in sorted(one for one in folder.iterdir() if one.suffix.lower() in (".csv", ".tsv") and one.is_file()):
        with path.open(encoding="utf-8-sig", newline="", errors="replace") as file:
            delimiter = max(",;\t", key=file.readline().count)
            file.seek(0)
            reader = csv.DictReader(file, delimiter=delimiter)
            reader.fieldnames = [name.strip().lower() for name in reader.fieldnames or ()]
            names = set(reader.fieldnames)
            if "gpu" not in names or not names & {*TARGETS, "metric_memory_gib"} or "model" not in names:
                others.append(path.name)
                continue
            rows += [
                {**{k: v or "" for k, v in row.items() if isinstance(k, str)}, "file": path.stem} for row in reader
            ]
    return rows, others


# -- figures -----------------------------------------------------------------------------------------------------------


def figures(outcomes: Sequence[Outcome]) -> dict[str, float | int | None]:
    """Sum up errors of time, in per cent, and how well the order of layouts is kept."""
    used = [o for o in outcomes if o.measured_s and o.predicted_s]
    errors = sorted(100 * abs(o.predicted_s / o.measured_s - 1) for o in used)
    biases = [100 * (o.predicted_s / o.measured_s - 1) for o in used]
    ranks = list(_ranked(used))
    return {
        "rows": len(used),
        "skipped": sum(1 for o in outcomes if o.reason),
        "mape": rounded(statistics.fmean(errors)) if errors else None,
        "median_ape": rounded(statistics.median(errors)) if errors else None,
        "bias": rounded(statistics.fmean(biases)) if errors else None,
        "p90": rounded(errors[math.ceil(0.9 * len(errors)) - 1]) if errors else None,
        "tau": rounded(statistics.fmean(tau for tau, _, _ in ranks)) if ranks else None,
        "regret": rounded(statistics.fmean(regret for _, regret, _ in ranks)) if ranks else None,
        "best_in_top_3": rounded(100 * statistics.fmean(top for _, _, top in ranks)) if ranks else None,
        "groups": len(ranks),
    }


def _ranked(used: Iterable[Outcome]) -> Iterator[tuple[float, float, bool]]:
    """Yield (tau, regret in per cent, whether the best is among our first three) of each group of layouts."""
    groups: dict[tuple[str, ...], dict[str, list[Outcome]]] = defaultdict(lambda: defaultdict(list))
    for outcome in used:
        groups[outcome.group][outcome.layout].append(outcome)
    for layouts in groups.values():
        if len(layouts) < 3:
            continue
        pairs = [
            (statistics.median(o.predicted_s for o in alike), statistics.median(o.measured_s for o in alike))
            for alike in layouts.values()
        ]
        best_s = min(measured for _, measured in pairs)
        order = sorted(pairs)
        yield kendall(pairs), 100 * (order[0][1] / best_s - 1), any(m == best_s for _, m in order[:3])


def kendall(pairs: Sequence[tuple[float, float]]) -> float:
    """Return Kendall's tau: pairs in the right order less those in the wrong one, over all that differ."""
    signs = [(a[0] - b[0]) * (a[1] - b[1]) for index, a in enumerate(pairs) for b in pairs[index + 1 :] if a[1] != b[1]]
    return sum((sign > 0) - (sign < 0) for sign in signs) / len(signs) if signs else 1.0


def memory_figures(outcomes: Sequence[Outcome]) -> dict[str, float | int | None]:
    """Sum up errors of peak memory, and whether what fitted and what did not was predicted."""
    used = [o for o in outcomes if o.measured_bytes and o.predicted_bytes]
    errors = [100 * abs(o.predicted_bytes / o.measured_bytes - 1) for o in used]
    judged = [o for o in outcomes if o.predicted_bytes and (o.measured_bytes or o.out_of_memory)]
    confusion = Counter((o.fits, not o.out_of_memory) for o in judged)
    return {
        "rows": len(used),
        "mape": rounded(statistics.fmean(errors)) if errors else None,
        "median_ape": rounded(statistics.median(errors)) if errors else None,
        "bias": rounded(statistics.fmean(100 * (o.predicted_bytes / o.measured_bytes - 1) for o in used))
        if used
        else None,
        "fitting_said_fitting": confusion[True, True],
        "fitting_said_not": confusion[False, True],
        "not_fitting_said_not": confusion[False, False],
        "not_fitting_said_fitting": confusion[True, False],
    }


# -- the command -------------------------------------------------------------------------------------------------------

_HEAD = ("source", "rows", "skipped", "mape", "median", "bias", "p90", "tau", "regret", "groups")
_KEYS = ("rows", "skipped", "mape", "median_ape", "bias", "p90", "tau", "regret", "groups")


Table = tuple[Sequence[str], Sequence[Sequence[object]]]


def as_lines(head: Sequence[str], table: Sequence[Sequence[object]], markdown: bool = False) -> list[str]:
    """Write a table; numbers to the right."""
    cells = [[*map(_cell, line)] for line in table]
    if markdown:
        rule = ["---"] + ["---:"] * (len(head) - 1)
        return [f"| {' | '.join(line)} |" for line in ([*head], rule, *cells)]
    widths = [max(len(line[column]) for line in ([*head], *cells)) for column in range(len(head))]
    return [
        "  ".join([line[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(line[1:], widths[1:], strict=True))])
        for line in ([*head], *cells)
    ]


def _cell(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 1 else f"{value:.1f}"
    return str(value)


_CONFIGURED = ("file", "model", "gpu", "n_gpus", "seq_len", "precision", "tp", "pp", "vp", "cp", "ep", "micro_batch")
"""Columns in which rows of one configuration agree."""


def predict_all(rows: Sequence[Row], jobs: int) -> list[Outcome]:
    """Predict every row, in several processes where there are several cores; rows that may be one configuration in the same one,
    which predicts it once."""
    if jobs == 1 or len(rows) < 100:
        return [predict(row) for row in rows]
    alike: dict[tuple[str | None, ...], list[int]] = defaultdict(list)
    for index, row in enumerate(rows):
        alike[tuple(row.get(column) for column in _CONFIGURED)].append(index)
    found: dict[int, Outcome] = {}
    with multiprocessing.get_context("fork").Pool(jobs) as pool:
        groups = [[rows[index] for index in indices] for indices in alike.values()]
        for indices, outcomes in zip(alike.values(), pool.imap(_predict_alike, groups, chunksize=4), strict=True):
            found |= zip(indices, outcomes, strict=True)
    return [found[index] for index in range(len(rows))]


def _predict_alike(rows: Sequence[Row]) -> list[Outcome]:
    return [predict(row) for row in rows]


def main(arguments: Sequence[str] | None = None) -> int:
    """Predict, print, and write JSON."""
    parser = argparse.ArgumentParser(description="predict published measurements, and publish the error")
    parser.add_argument("--rows", type=Path, required=True, metavar="DIR", help="a folder of CSV files")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the tables for a document")
    parser.add_argument("--record", type=Path, metavar="FILE", help="write the intervals that predictions carry")
    parser.add_argument("--outcomes", type=Path, metavar="FILE", help="write every row's prediction as CSV")
    parser.add_argument("--calibrate", action="store_true", help="print the table of refitted machines as well")
    parser.add_argument("--quick", action="store_true", help="leave out the cross-validation")
    parser.add_argument("--jobs", type=int, default=min(4, os.cpu_count() or 1), metavar="N", help="processes")
    words = parser.parse_args(arguments)
    if not words.rows.is_dir():
        parser.error(f"{words.rows} is no folder")
    for target in (words.json, words.markdown, words.record, words.outcomes):
        if target and not _can_be_written(target):
            parser.error(f"cannot write {target}; a file in a folder that exists and that you may write in works")
    rows, others = read_rows(words.rows)
    if not rows:
        parser.error(f"no file in {words.rows} has measured rows (columns model, gpu and one of {', '.join(TARGETS)})")
    outcomes = predict_all(rows, max(1, words.jobs))
    record = summary(rows, outcomes)
    tables = [headline_table(record), parts_table(record), factors_table(record)]
    if not words.quick:
        record["cross_validated"] = cross_validate(rows, max(1, words.jobs))
        tables.append(fitted_table("cross-validated: source left out", record["cross_validated"]))
    if words.calibrate:
        record["calibrated"] = calibrate(rows, max(1, words.jobs))
        tables.append(calibrated_table(record["calibrated"]))
    _print(record, tables, others)
    if words.json:
        words.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    if words.markdown:
        words.markdown.write_text(as_document(record, tables), encoding="utf-8")
    if words.record:
        words.record.write_text(as_intervals(rows, outcomes), encoding="utf-8")
    if words.outcomes:
        _write_outcomes(words.outcomes, outcomes)
    return 0


def _can_be_written(path: Path) -> bool:
    place = path if path.exists() else path.parent
    return not path.is_dir() and path.parent.is_dir() and os.access(place, os.W_OK)


_RECORD = """# Measured over predicted: between these parts 8 of 10 rows of a new source are to be expected, and were, of sources left out.
# Written by `python benchmarks/foresight.py --rows DIR --record FILE`.
"""


def as_intervals(rows: Sequence[Row], outcomes: Sequence[Outcome]) -> str:
    """Write the intervals of measured over predicted, of steps and of peaks of memory."""
    lines = [_RECORD.rstrip()]
    for name, found in ratios(rows, outcomes).items():
        low, high = map(rounded, interval(found))
        lines += ["", f"[{name}]", f"rows = {len(found)}", f"low = {low}", f"high = {high}"]
    return "\n".join(lines) + "\n"


_DOCUMENT = """# The record of predictions

This page is written by `python benchmarks/foresight.py --rows DIR --calibrate --markdown docs/foresight.md`. It holds {rows}
published measurements, each predicted from its configuration alone. Errors are those of the seconds of a step, in per cent of the
measured seconds. `mape` is the mean error, `median` that of the middle row, and `p90` the error that 9 of 10 rows stay below; `bias`
keeps the sign. `tau` and `regret` are computed over groups of rows that differ only in their layout: `tau` (Kendall) is 1 where the
predicted order is right, and `regret` is how much slower the layout is that the prediction would choose.{composed}
{honest}
With the profiles and constants as shipped, the error of the step time is **{mape} %** on average and {median_ape} % for the middle
row; the order of layouts has tau {tau}, and the chosen layout is {regret} % slower than the best one. The error of the peak memory,
over {memory_rows} rows, is {memory_mape} % on average and {memory_median} % for the middle row.
"""


_COVERAGE = """The interval of a prediction shall hold 8 of 10 rows of a new source, so it is as wide as sources differ, and wider where they are few.
How many rows of a source it covers that had no part in it, nor in its width, in per cent, with the mean over sources last:
"""


_COMPOSED = """

The times of {names} seem to be sums that a simulator composed; `benchmarks/composed.py` explains how one can tell. Without
them the error is **{mape} %** over {rows} rows and {median_ape} % for the middle row, with tau {tau} and regret {regret} % over
{groups} groups.
"""


def as_document(record: dict[str, Any], tables: Sequence[Table]) -> str:
    """Write the figures and the tables as a document, the honest one first: constants that have not seen the source."""
    total, held = record["total"], record["memory"]
    honest = ""
    if fitted := record.get("cross_validated"):
        count = sum(one["rows"] for one in fitted.values())
        mape = sum(one["rows"] * one["mape"] for one in fitted.values()) / count
        honest = (
            f"\nFor a new source, expect an error of **{mape:.1f} %**: that of {count} rows, at most {PER_SOURCE} of each source, "
            "predicted\nwith six constants that were fitted to the other sources. Over sources the error is "
            "**{median:.1f} %** in the middle and **{mean:.1f} %**\non average.".format(**over_sources(fitted))
        )
        if was_measured := {name: one for name, one in fitted.items() if name not in record["composed"]}:
            honest += " Over those that were measured it is {median:.1f} % and {mean:.1f} %.".format(
                **over_sources(was_measured)
            )
        honest += "\n"
    aside = {**{key: _cell(value) for key, value in record["measured"].items()}, "names": ", ".join(record["composed"])}
    head = _DOCUMENT.format(
        rows=total["rows"],
        honest=honest,
        composed=_COMPOSED.rstrip().format(**aside) if record["composed"] else "",
        **{key: _cell(total[key]) for key in ("mape", "median_ape", "tau", "regret")},
        memory_rows=held["rows"],
        memory_mape=_cell(held["mape"]),
        memory_median=_cell(held["median_ape"]),
    )
    bodies = ["\n".join(as_lines(names, table, markdown=True)) for names, table in tables]
    bodies.append("\n".join(["Peak memory:\n", *as_lines(*memory_table(record), markdown=True)]))
    bodies.append("\n".join([_COVERAGE, *as_lines(*coverage_table(record), markdown=True)]))
    skipped = [[one["source"], one["rows"], one["reason"]] for one in record["skipped"]]
    bodies.append(
        "\n".join(
            ["Rows that were left out, and why:\n", *as_lines(("source", "rows", "reason"), skipped, markdown=True)]
        )
    )
    return "\n\n".join([head.rstrip(), *bodies]) + "\n"


def summary(rows: Sequence[Row], outcomes: Sequence[Outcome]) -> dict[str, object]:
    """Sum up: all rows, each file of them, memory, and why rows were skipped."""
    by_file: dict[str, list[Outcome]] = defaultdict(list)
    for row, outcome in zip(rows, outcomes, strict=True):
        by_file[row["file"]].append(outcome)
    aside = composed(rows)
    reasons = Counter((row["file"], o.reason) for row, o in zip(rows, outcomes, strict=True) if o.reason)
    return {
        "units": "per cent, but for rows, skipped, groups and tau; errors of the step time as parts of the measured",
        "total": figures(outcomes),
        "composed": sorted(aside),
        "measured": figures([o for row, o in zip(rows, outcomes, strict=True) if row["file"] not in aside]),
        "sources": {name: figures(found) for name, found in by_file.items()},
        "memory": memory_figures(outcomes),
        "memory_sources": {name: memory_figures(found) for name, found in by_file.items()},
        "parts": {name: figures(alike) for name, alike in by_part(rows, outcomes).items()},
        "own_factors": own_factors(rows, outcomes),
        "coverage": {name: coverage(found) for name, found in ratios(rows, outcomes).items()},
        "skipped": [{"source": name, "reason": why, "rows": count} for (name, why), count in reasons.most_common()],
    }


def headline_table(record: dict[str, object]) -> Table:
    """Return the table of sources, of all, and of those that were measured."""
    sources, total, measured = record["sources"], record["total"], record["measured"]
    assert isinstance(sources, dict)
    assert isinstance(total, dict)
    assert isinstance(measured, dict)
    lines = [[name, *(found[key] for key in _KEYS)] for name, found in sources.items()]
    below = [["all but composed", *(measured[key] for key in _KEYS)]] if record["composed"] else []
    return _HEAD, [*lines, ["all", *(total[key] for key in _KEYS)], *below]


_MEMORY_KEYS = (
    "rows", "mape", "median_ape", "bias", "fitting_said_fitting", "fitting_said_not", "not_fitting_said_not",
    "not_fitting_said_fitting",
)  # fmt: skip


def memory_table(record: dict[str, Any]) -> Table:
    """Return the table of peak memory by source; what ran and what ran out of it, as it was predicted."""
    found = {name: figure for name, figure in record["memory_sources"].items() if figure["rows"]}
    lines = [[name, *(figure[key] for key in _MEMORY_KEYS)] for name, figure in found.items()]
    head = ("source", *(key.replace("_", " ") for key in _MEMORY_KEYS))
    return head, [*lines, ["all", *(record["memory"][key] for key in _MEMORY_KEYS)]]


def parts_table(record: dict[str, Any]) -> Table:
    """Return the table of sizes of clusters and of features of layouts."""
    keys = ("rows", "mape", "median_ape", "bias", "p90")
    return ("part of all rows", *keys), [
        [name, *(found[key] for key in keys)] for name, found in record["parts"].items()
    ]


def factors_table(record: dict[str, Any]) -> Table:
    """Return the table of what one factor for each source, or each of its machines, would leave of the error."""
    keys = ("rows", "mape", "measured_over_predicted", "one_factor", "one_a_machine")
    lines = [[name, *(found[key] for key in keys)] for name, found in record["own_factors"].items()]
    return ("source's own factor", *(key.replace("_", " ") for key in keys)), lines


def coverage_table(record: dict[str, Any]) -> Table:
    """Return the table of what the intervals of other sources cover of a source."""
    time, memory = (record["coverage"][name] for name in ("time", "memory"))
    lines = [[name, share, memory["sources"].get(name)] for name, share in time["sources"].items()]
    return ("source that was left out", "time", "memory"), [*lines, ["mean over sources", time["mean"], memory["mean"]]]


def fitted_table(title: str, found: dict[str, dict[str, float]]) -> Table:
    """Return a table of fits."""
    keys = ("rows", "mape", "median_ape", *CONSTANTS)
    lines: list[Sequence[object]] = [[name, *(figure[key] for key in keys)] for name, figure in found.items()]
    count = sum(figure["rows"] for figure in found.values())
    weighted = [sum(f["rows"] * f[key] for f in found.values()) / count if count else None for key in ("mape",)]
    return (title, *keys), [*lines, ["all, by rows", int(count), *weighted, *[None] * (len(keys) - 2)]]


def calibrated_table(found: dict[str, dict[str, float | None]]) -> Table:
    """Return the table of refitted machines."""
    keys = ("near_rows", "before", "near", "far_rows", "far", *FACTORS)
    head = ("calibrated on one node: source, machine", *keys)
    return head, [[name, *(figure[key] for key in keys)] for name, figure in found.items()]


def _print(record: dict[str, object], tables: Sequence[Table], others: Sequence[str]) -> None:
    for head, table in tables:
        print("\n".join(as_lines(head, table)) + "\n")
    print("memory:", json.dumps(record["memory"]))
    skipped = record["skipped"]
    assert isinstance(skipped, list)
    for one in skipped[:40]:
        print(f"skipped {one['rows']:4d} of {one['source']}: {one['reason']}")
    if others:
        print(f"files of another kind: {', '.join(others)}")


def _write_outcomes(path: Path, outcomes: Sequence[Outcome]) -> None:
    names = [name for name in asdict(outcomes[0]) if name != "group"]
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(names)
        writer.writerows([getattr(outcome, name) for name in names] for outcome in outcomes)


if __name__ == "__main__":
    sys.exit(main())
