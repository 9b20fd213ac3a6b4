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
Sources whose times a simulator composed (`composed.py`) are no measured ones: they are predicted, and have a table of their own.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import json
import math
import os
import statistics
import sys
from collections import Counter, defaultdict
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from cells import Row
from composed import composed
from forecast import Outcome, predict, rounded
from foresight_fits import calibrate, cross_validate
from foresight_parts import Ratio, by_part, coverage, interval, own_factors, ratios, ratios_by_kind
from foresight_tables import LEAST_OF_KIND, Table, as_document, as_lines, tables_of
from foresight_workers import Workers
from published_memory import TARGETS, is_reserved


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
                {**{k: v or "" for k, v in row.items() if isinstance(k, str)}, "file": _origin(path.stem, row)}
                for row in reader
            ]
    return rows, others


_COLLECTED = ("small_machines", "misc_papers", "misc_single_gpu")
"""Files that hold rows of many sources, of which each is left out by itself."""


def _origin(stem: str, row: Row) -> str:
    """Return the source of a row: its file, or what its cell says in a file of several."""
    return (row.get("source") or stem).partition(" (")[0][:40] if stem in _COLLECTED else stem


# -- figures -----------------------------------------------------------------------------------------------------------


def figures(outcomes: Sequence[Outcome]) -> dict[str, float | int | None]:
    """Sum up errors of time, in per cent, and how well the order of layouts is kept."""
    used = [o for o in outcomes if o.measured_s and o.predicted_s]
    errors = sorted(100 * abs(o.predicted_s / o.measured_s - 1) for o in used)
    biases = [100 * (o.predicted_s / o.measured_s - 1) for o in used]
    groups = list(_groups(used))
    ranks, told = [group.pairs for group in groups], [group for group in groups if group.told]
    return {
        "rows": len(used),
        "skipped": sum(1 for o in outcomes if o.reason),
        "mape": rounded(statistics.fmean(errors)) if errors else None,
        "median_ape": rounded(statistics.median(errors)) if errors else None,
        "bias": rounded(statistics.fmean(biases)) if errors else None,
        "p90": rounded(errors[math.ceil(0.9 * len(errors)) - 1]) if errors else None,
        "tau": rounded(statistics.fmean(kendall(pairs) for pairs in ranks)) if ranks else None,
        "tau_apart": rounded(statistics.fmean(kendall(group.pairs, group.apart) for group in told)) if told else None,
        "tau_bound": rounded(statistics.fmean(group.told for group in groups)) if groups else None,
        "regret": rounded(statistics.fmean(map(_regret, ranks))) if ranks else None,
        "best_in_top_3": rounded(100 * statistics.fmean(map(_is_best_among_three, ranks))) if ranks else None,
        "groups": len(ranks),
        "groups_apart": len(told),
    }


ALIKE = 0.03
"""Part of a step below which two layouts count as equally fast, as the documents tell users."""
Ranked = Sequence[tuple[float, float]]
"""Predicted and measured seconds of each layout of a group, medians where it was measured several times."""


class _Group(NamedTuple):
    """The layouts of a group, each with its predicted and measured seconds."""

    layouts: dict[str, tuple[float, float]]
    apart: float
    """Part of a step below which two measurements tell nothing of the order of their layouts: as far apart were measurements of the same
    layout, or are measurements as the source itself says; at least `ALIKE`."""

    @property
    def pairs(self) -> Ranked:
        return tuple(self.layouts.values())

    @property
    def told(self) -> float:
        """Part of the pairs that are further apart. It is the tau to expect of a prediction without error: the order of others is noise."""
        return statistics.fmean(_differ(a, b, self.apart) for a, b in itertools.combinations(self.pairs, 2))


def _groups(used: Iterable[Outcome]) -> Iterator[_Group]:
    """Yield each group that has three layouts."""
    groups: dict[tuple[str, ...], dict[str, list[Outcome]]] = defaultdict(lambda: defaultdict(list))
    for outcome in used:
        groups[outcome.group][outcome.layout].append(outcome)
    for layouts in groups.values():
        if len(layouts) >= 3:
            medians = {
                name: (statistics.median(o.predicted_s for o in alike), statistics.median(o.measured_s for o in alike))
                for name, alike in layouts.items()
            }
            repeated = [
                max(o.measured_s for o in alike) / min(o.measured_s for o in alike) - 1 for alike in layouts.values()
            ]
            stated = [outcome.spread for alike in layouts.values() for outcome in alike]
            yield _Group(medians, max(ALIKE, *repeated, *stated))


def _regret(pairs: Ranked) -> float:
    """Return by how many per cent the layout that is predicted as the fastest takes longer than the fastest one."""
    return 100 * (min(pairs)[1] / min(measured_s for _, measured_s in pairs) - 1)


def _is_best_among_three(pairs: Ranked) -> bool:
    best_s = min(measured_s for _, measured_s in pairs)
    return any(measured_s == best_s for _, measured_s in sorted(pairs)[:3])


def kendall(pairs: Ranked, apart: float = 0.0) -> float:
    """Return Kendall's tau: pairs in the right order less those in the wrong one, over all whose measured seconds differ by more than
    a part of the shorter ones."""
    signs = [(a[0] - b[0]) * (a[1] - b[1]) for a, b in itertools.combinations(pairs, 2) if _differ(a, b, apart)]
    return sum((sign > 0) - (sign < 0) for sign in signs) / len(signs) if signs else 1.0


def _differ(pair: tuple[float, float], other: tuple[float, float], apart: float) -> bool:
    return max(pair[1], other[1]) / min(pair[1], other[1]) > 1 + apart


def inverted(outcomes: Iterable[Outcome]) -> list[dict[str, Any]]:
    """Return the pairs of layouts of a group that are predicted in the wrong order, and differ by more than tells nothing: the one that was faster
    first, with how many times as long the other one took, and was predicted to take."""
    used = [o for o in outcomes if o.measured_s and o.predicted_s]
    wrong = []
    for group in _groups(used):
        for pair in itertools.combinations(group.layouts.items(), 2):
            (faster, (faster_s, least_s)), (slower, (slower_s, most_s)) = sorted(pair, key=lambda layout: layout[1][1])
            if most_s / least_s > 1 + group.apart and slower_s <= faster_s:
                wrong.append(
                    {"faster": faster, "slower": slower, "measured": rounded(most_s / least_s), "predicted": rounded(slower_s / faster_s)}
                )  # fmt: skip
    return sorted(wrong, key=lambda row: -row["measured"])


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


def predict_all(rows: Sequence[Row], workers: Workers) -> list[Outcome]:
    """Predict every row, each source in its own process."""
    by_source: dict[str, list[int]] = defaultdict(list)
    for index, row in enumerate(rows):
        by_source[row["file"]].append(index)
    asked = [(source, ([rows[index] for index in indices],)) for source, indices in by_source.items()]
    found: dict[int, Outcome] = {}
    for indices, outcomes in zip(by_source.values(), workers.each(_predict_rows, asked), strict=True):
        found |= zip(indices, outcomes, strict=True)
    return [found[index] for index in range(len(rows))]


def _predict_rows(rows: Sequence[Row]) -> list[Outcome]:
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
    with Workers(rows, max(1, words.jobs)) as workers:
        outcomes = predict_all(rows, workers)
        record = summary(rows, outcomes)
        if not words.quick:
            record["cross_validated"], with_composed = cross_validate(rows, workers, record["composed"])
            record["with_composed"]["cross_validated"] = with_composed
        if words.calibrate:
            record["calibrated"] = calibrate([row for row in rows if row["file"] not in record["composed"]], workers)
    record["seconds"] = round(sum(os.times()[:4]))
    tables = tables_of(record)
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


LEAST_SOURCES = 5
"""Sources from which on that is made of its own rows: fewer say too little of how a new one differs."""
_RECORD = """# Measured over predicted: between these parts 8 of 10 rows of a new source are to be expected, and were, of sources left out.
# Written by `python benchmarks/foresight.py --rows DIR --record FILE`.
"""


def as_intervals(rows: Sequence[Row], outcomes: Sequence[Outcome]) -> str:
    """Write the intervals of measured over predicted, of steps and of peaks of memory: of all rows, and of classes with enough of them."""
    lines = [_RECORD.rstrip()]
    by_kind = ratios_by_kind(*_of_files(rows, outcomes, composed(rows), is_in=False))
    for kind, parts in by_kind.items():
        for name, found in parts.items():
            if found and (kind == "all" or len(found) >= LEAST_OF_KIND):
                known = found if kind == "all" else _known(found, by_kind["all"][name])
                low, high = map(rounded, interval(known, coverage(found, known)["part"]))
                lines += ["", f"[{kind}.{name}]", f"rows = {len(found)}", f"low = {low}", f"high = {high}"]
    return "\n".join(lines) + "\n"


def _known(found: Sequence[Ratio], every: Sequence[Ratio]) -> Sequence[Ratio]:
    """Return the ratios of which the interval of a class of machines is made: its own, if they are enough, or those of all classes."""
    has_own = len(found) >= LEAST_OF_KIND and len({source for source, _ in found}) >= LEAST_SOURCES
    return found if has_own else every


def _of_files(
    rows: Sequence[Row], outcomes: Sequence[Outcome], names: Container[str], *, is_in: bool
) -> tuple[list[Row], list[Outcome]]:
    """Return the rows of these files, or of all others, with their outcomes."""
    found = [(row, o) for row, o in zip(rows, outcomes, strict=True) if (row["file"] in names) == is_in]
    return [row for row, _ in found], [o for _, o in found]


def summary(all_rows: Sequence[Row], all_outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Sum up measured rows: all, each file of them, memory, and why rows were skipped; those of simulators by themselves."""
    aside = composed(all_rows)
    rows, outcomes = _of_files(all_rows, all_outcomes, aside, is_in=False)
    by_file = _by_file(rows, outcomes)
    by_kind = ratios_by_kind(rows, outcomes)
    reasons = Counter((row["file"], o.reason) for row, o in zip(rows, outcomes, strict=True) if o.reason)
    return {
        "units": "per cent, but for rows, skipped, groups and tau; errors of the step time as parts of the measured",
        "total": figures(outcomes),
        "sources": {name: figures(found) for name, found in by_file.items()},
        "composed": sorted(aside),
        "agreement": {
            name: figures(found)
            for name, found in _by_file(*_of_files(all_rows, all_outcomes, aside, is_in=True)).items()
        },
        "with_composed": {"total": figures(all_outcomes), **_of_intervals(all_rows, all_outcomes)},
        "memory": memory_figures(outcomes),
        "memory_sources": {name: memory_figures(found) for name, found in by_file.items()},
        "reserved": sorted({row["file"] for row in rows if is_reserved(row)}),
        "parts": {name: figures(alike) for name, alike in by_part(rows, outcomes).items()},
        "own_factors": own_factors(rows, outcomes),
        "inverted": {name: inverted(groups) for name, groups in by_file.items()},
        **_of_intervals(rows, outcomes),
        "kinds": {
            kind: {
                name: _kind(alike, alike if kind == "all" else _known(alike, by_kind["all"][name]))
                for name, alike in parts.items()
                if alike
            }
            for kind, parts in by_kind.items()
        },
        "skipped": [{"source": name, "reason": why, "rows": count} for (name, why), count in reasons.most_common()],
    }


def _by_file(rows: Sequence[Row], outcomes: Sequence[Outcome]) -> dict[str, list[Outcome]]:
    found: dict[str, list[Outcome]] = defaultdict(list)
    for row, outcome in zip(rows, outcomes, strict=True):
        found[row["file"]].append(outcome)
    return found


def _of_intervals(rows: Sequence[Row], outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Return the intervals of steps and of peaks of memory, and what those of other sources cover of each."""
    found = ratios(rows, outcomes)
    covered = {name: coverage(alike) for name, alike in found.items()}
    return {
        "intervals": {
            name: [*map(rounded, interval(alike, covered[name]["part"]))] for name, alike in found.items() if alike
        },
        "coverage": covered,
    }


def _kind(found: Sequence[Ratio], known: Sequence[Ratio]) -> dict[str, Any]:
    """Return what a class of machines has of one part: rows, errors, the interval of known rows, and what that of other sources covers."""
    off = sorted(100 * abs(1 / ratio - 1) for _, ratio in found)
    covered = coverage(found, known)
    return {
        "rows": len(found),
        "sources": len({source for source, _ in found}),
        "mape": rounded(statistics.fmean(off)),
        "median_ape": rounded(statistics.median(off)),
        "interval": [*map(rounded, interval(known, covered["part"]))],
        "covered": covered["mean"],
        "covered_rows": covered["rows"],
    }


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
