"""Predict published step times and memory from each row's configuration alone, and publish the error.

    python benchmarks/foresight.py --rows DIR [--json FILE] [--markdown FILE] [--calibrate] [--quick]

DIR holds CSV files with the columns of measured rows (model and layout, `metric_step_time_s`, ...; `published.py` says
what a row must and may have). Each row is predicted as `samestep simulate` would: a model spec from hyperparameters,
the programs of its stages, prices from the hardware profile, the clock, the memory model.

Three tables, and what each may know:
    headline           the profiles and constants as they are shipped; nothing is fitted to the rows
    cross-validated    five constants (CONSTANTS) start at values from before any fit; for each source they are fitted to
                       all other sources, and then predict it: the honest figure for rows of a new source
    calibrated         the same five constants fitted to half of a machine's rows, for the other half (--calibrate)

Errors are of seconds a step, as parts of what was measured, in per cent. tau and regret are over groups of rows that
differ in their layout alone: how well the order is kept, and how much slower the layout is that we would have chosen.
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
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from published import SHIPPED, TARGETS, Case, Row, SkippedError, case_of

from samestep import clock, cost, memory
from samestep.errors import SamestepError
from samestep.hardware import Hardware
from samestep.job import Job
from samestep.layout import Layout
from samestep.program import Op, Ops, Program
from samestep.strategies import programs_of

# -- predicting --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One row, predicted or skipped. Times in seconds, memory in bytes; zero where there is none."""

    id: str
    source: str
    machine: str = ""
    reason: str = ""
    """Why it was skipped."""
    group: tuple[str, ...] = ()
    layout: str = ""
    predicted_s: float = 0.0
    measured_s: float = 0.0
    predicted_bytes: int = 0
    measured_bytes: float = 0.0
    fits: bool = True
    """Predicted: with what no tensor can have."""
    out_of_memory: bool = False


def programs_for(case: Case, recompute: str) -> tuple[Program, ...]:
    """Write the step of a case on each stage.

    Raises:
        SamestepError: the layout is refused.
    """
    job = Job(train={"global_batch": case.global_batch}, numerics={"precision": case.precision})
    layout = Layout.of({**case.words, "recompute": recompute})
    per_node = min(case.machine.devices_per_node, layout.world_size)
    programs = programs_of(case.model, job, layout, per_node)

    def rewrite(_: str, ops: Ops) -> Ops:
        return tuple(_in_its_numerics(op, case) for op in ops)

    if case.products or case.chunks > 1:
        programs = tuple(program.with_bodies(rewrite) for program in programs)
    return programs


def _in_its_numerics(op: Op, case: Case) -> Op:
    if op.axis is None and op.flops and case.products:
        return replace(op, dtype=case.products)
    return replace(op, size_bytes=op.size_bytes // case.chunks) if op.axis == "tp" else op


def chosen_programs(case: Case) -> tuple[Program, ...]:
    """Write the step with the row's recompute and micro-batch; what it does not name, as is least work and fits."""
    recomputes = [case.recompute] if case.recompute else ["none", "selective", "full"]
    choices = [(recomputes[0], size) for size in case.microbatches or (0,)]
    choices += [(recompute, choices[-1][1]) for recompute in recomputes[1:]]
    first: tuple[Program, ...] = ()
    for recompute, size in choices:
        tried = replace(case, words={**case.words, "microbatch": size}) if size else case
        programs = programs_for(tried, recompute)
        if len(choices) == 1 or _fits(case, _peak(case, programs)):
            return programs
        first = programs if size == choices[-1][1] and not first else first
    return first  # some other way was found; the least work is the best guess


def _peak(case: Case, programs: Sequence[Program]) -> int:
    """Bytes of the fullest stage: the first or the last."""
    ends = programs[:1] if len(programs) == 1 else (programs[0], programs[-1])
    return max(memory.during_step(program, case.states_per_param).total for program in map(_shortened, ends))


def _shortened(program: Program) -> Program:
    """Leave out the middle of a long step: what is held repeats itself."""
    layout = program.step.layout
    most = 4 * layout.pp * layout.virtual_stages + 4
    tasks = program.stages[0]
    return program if len(tasks) <= 2 * most else replace(program, stages=((*tasks[:most], *tasks[-most:]),))


def _fits(case: Case, peak: int) -> bool:
    return peak + case.machine.reserved_bytes <= case.machine.memory_bytes


def predict(row: Row) -> Outcome:
    """Predict one row."""
    source = row.get("source") or row["file"]
    try:
        case = case_of(row)
        programs = chosen_programs(case)
        held = _peak(case, programs) if case.memory_bytes or case.out_of_memory else 0
        predicted_s = clock.play(programs, case.machine).step_s if case.step_s else 0.0
    except (SkippedError, SamestepError) as error:
        return Outcome(id=row.get("id") or "", source=source, reason=str(error).partition("\n")[0])
    except (ArithmeticError, LookupError, TypeError, ValueError) as error:
        return Outcome(id=row.get("id") or "", source=source, reason=f"cannot be read: {type(error).__name__}: {error}")
    return Outcome(
        id=case.id,
        source=source,
        machine=case.machine.name,
        group=case.group,
        layout=str(programs[0].step.layout),
        predicted_s=predicted_s,
        measured_s=case.step_s or 0.0,
        predicted_bytes=held,
        measured_bytes=case.memory_bytes or 0.0,
        fits=_fits(case, held),
        out_of_memory=case.out_of_memory,
        reason="" if case.step_s or held else "nothing was measured",
    )


def read_rows(folder: Path) -> tuple[list[Row], list[str]]:
    """Read every file of measured rows in a folder; name the files that hold something else."""
    rows: list[Row] = []
    others: list[str] = []
    for path in sorted(folder.glob("*.csv")):
        with path.open(encoding="utf-8-sig", newline="", errors="replace") as file:
            reader = csv.DictReader(file)
            names = set(reader.fieldnames or ())
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
        "mape": _rounded(statistics.fmean(errors)) if errors else None,
        "median_ape": _rounded(statistics.median(errors)) if errors else None,
        "bias": _rounded(statistics.fmean(biases)) if errors else None,
        "p90": _rounded(errors[math.ceil(0.9 * len(errors)) - 1]) if errors else None,
        "tau": _rounded(statistics.fmean(tau for tau, _, _ in ranks)) if ranks else None,
        "regret": _rounded(statistics.fmean(regret for _, regret, _ in ranks)) if ranks else None,
        "best_in_top_3": _rounded(100 * statistics.fmean(top for _, _, top in ranks)) if ranks else None,
        "groups": len(ranks),
    }


def _rounded(value: float) -> float:
    return round(value, 3)


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
    """Sum up errors of peak memory, and whether what fitted and what did not was foreseen."""
    used = [o for o in outcomes if o.measured_bytes and o.predicted_bytes]
    errors = [100 * abs(o.predicted_bytes / o.measured_bytes - 1) for o in used]
    judged = [o for o in outcomes if o.predicted_bytes and (o.measured_bytes or o.out_of_memory)]
    confusion = Counter((o.fits, not o.out_of_memory) for o in judged)
    return {
        "rows": len(used),
        "mape": _rounded(statistics.fmean(errors)) if errors else None,
        "median_ape": _rounded(statistics.median(errors)) if errors else None,
        "bias": _rounded(statistics.fmean(100 * (o.predicted_bytes / o.measured_bytes - 1) for o in used))
        if used
        else None,
        "fitting_said_fitting": confusion[True, True],
        "fitting_said_not": confusion[False, True],
        "not_fitting_said_not": confusion[False, False],
        "not_fitting_said_fitting": confusion[True, False],
    }


# -- fitting five constants --------------------------------------------------------------------------------------------

CONSTANTS: dict[str, tuple[float, ...]] = {
    "launch_s": (10e-6, 20e-6, 30e-6, 40e-6, 60e-6),
    "step_s": (5e-3, 10e-3, 20e-3, 40e-3),
    "products": (1.0, 0.9, 0.8, 0.7),
    "attention": (1.0, 0.75, 0.5),
    "collective_s": (15e-6, 30e-6, 60e-6),
}
"""Name and levels; the first level of each is the value from before any fit: what the literature says, or no loss."""
Setting = tuple[float, ...]
FIRST: Setting = tuple(levels[0] for levels in CONSTANTS.values())
SWEEPS = 1
"""Times that every constant is tried."""
PER_SOURCE = 10
"""Rows of a source that take part, evenly spaced: a fit of five constants needs no more."""


def adjusted(machine: Hardware, shipped: Hardware, setting: Setting) -> Hardware:
    """Return a machine with these constants; `products` and `attention` scale what its profile says is reached."""
    launch_s, per_step_s, products, attention, collective_s = setting
    host = machine.launch_s / shipped.launch_s if shipped.launch_s else 1.0  # checked runs, CUDA graphs
    once = machine.step_s / shipped.step_s if shipped.step_s else 1.0
    reached = {
        k: v * (attention / cost.ATTENTION_REACHED if k == "attention" else products / cost.REACHED)
        for k, v in machine.efficiency.items()
    }
    return replace(
        machine,
        launch_s=launch_s * host,
        step_s=per_step_s * once,
        efficiency=reached,
        intra=replace(machine.intra, collective_s=collective_s),
        inter=replace(machine.inter, collective_s=collective_s),
    )


@dataclass(frozen=True, slots=True)
class Prepared:
    """A case with its programs written, to be priced again and again."""

    source: str
    case: Case
    shipped: Hardware
    programs: tuple[Program, ...]

    def error(self, setting: Setting) -> float:
        """Part by which a prediction with these constants is off, at most 1.5: one odd row shall not rule a fit."""
        assert self.case.step_s
        predicted_s = clock.play(self.programs, adjusted(self.case.machine, self.shipped, setting)).step_s
        return min(abs(predicted_s / self.case.step_s - 1), 1.5)


def prepare(rows: Sequence[Row], most: int) -> list[Prepared]:
    """Write the programs of at most so many rows of each source that can be predicted."""
    by_source: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        by_source[row["file"]].append(row)
    prepared = []
    for source, alike in by_source.items():
        for row in alike[:: max(1, len(alike) // most)]:
            try:
                case = case_of(row)
                if case.step_s:
                    prepared.append(Prepared(source, case, SHIPPED[case.machine.name], chosen_programs(case)))
            except (SkippedError, SamestepError, ArithmeticError, LookupError, TypeError, ValueError):
                continue
    return prepared


class Fits:
    """Errors of prepared cases at settings that were tried, and the best setting for some of the cases."""

    def __init__(self, prepared: Sequence[Prepared]) -> None:
        self.prepared = prepared
        self._errors: dict[Setting, list[float]] = {}

    def errors(self, setting: Setting) -> list[float]:
        """Errors of all cases at one setting."""
        if setting not in self._errors:
            self._errors[setting] = [one.error(setting) for one in self.prepared]
        return self._errors[setting]

    def best(self, weights: Sequence[float]) -> Setting:
        """Walk along one constant after the other to the setting with the smallest weighted error."""

        def score(setting: Setting) -> float:
            return sum(w * e for w, e in zip(weights, self.errors(setting), strict=True))

        setting = FIRST
        for _ in range(SWEEPS):
            for place, levels in enumerate(CONSTANTS.values()):
                options = [(*setting[:place], level, *setting[place + 1 :]) for level in levels]
                setting = min(options, key=score)
        return setting


def cross_validate(rows: Sequence[Row]) -> dict[str, dict[str, float]]:
    """Fit the constants to all sources but one, each counting the same, and predict that one; per source, per cent."""
    prepared = prepare(rows, PER_SOURCE)
    counts = Counter(one.source for one in prepared)
    fits = Fits(prepared)
    result: dict[str, dict[str, float]] = {}
    for left_out in counts:
        weights = [0.0 if one.source == left_out else 1 / counts[one.source] for one in prepared]
        setting = fits.best(weights) if any(weights) else FIRST
        mine = [100 * e for e, one in zip(fits.errors(setting), prepared, strict=True) if one.source == left_out]
        result[left_out] = {
            "rows": len(mine),
            "mape": _rounded(statistics.fmean(mine)),
            "median_ape": _rounded(statistics.median(mine)),
            **dict(zip(CONSTANTS, setting, strict=True)),
        }
    return result


def calibrate(rows: Sequence[Row]) -> dict[str, dict[str, float]]:
    """Fit the constants to every second row of a machine, and predict the others; per machine, per cent."""
    by_machine: dict[str, list[Prepared]] = defaultdict(list)
    for one in prepare(rows, 4 * PER_SOURCE):
        by_machine[one.case.machine.name].append(one)
    result: dict[str, dict[str, float]] = {}
    for name, prepared in by_machine.items():
        if len(prepared) < 8:
            continue
        fits = Fits(prepared)
        setting = fits.best([1.0 - index % 2 for index in range(len(prepared))])
        mine = [100 * error for error in fits.errors(setting)[1::2]]
        result[name] = {
            "rows": len(mine),
            "mape": _rounded(statistics.fmean(mine)),
            "median_ape": _rounded(statistics.median(mine)),
            **dict(zip(CONSTANTS, setting, strict=True)),
        }
    return result


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


def predict_all(rows: Sequence[Row], jobs: int) -> list[Outcome]:
    """Predict every row, in several processes where there are several cores."""
    if jobs == 1 or len(rows) < 100:
        return [predict(row) for row in rows]
    with multiprocessing.get_context("fork").Pool(jobs) as pool:
        return pool.map(predict, rows, chunksize=8)


def main(arguments: Sequence[str] | None = None) -> int:
    """Predict, print, and write JSON."""
    parser = argparse.ArgumentParser(description="predict published measurements, and publish the error")
    parser.add_argument("--rows", type=Path, required=True, metavar="DIR", help="a folder of CSV files")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the tables for a document")
    parser.add_argument("--outcomes", type=Path, metavar="FILE", help="write every row's prediction as CSV")
    parser.add_argument("--calibrate", action="store_true", help="print the table of refitted machines as well")
    parser.add_argument("--quick", action="store_true", help="leave out the cross-validation")
    parser.add_argument("--jobs", type=int, default=min(4, os.cpu_count() or 1), metavar="N", help="processes")
    words = parser.parse_args(arguments)
    if not words.rows.is_dir():
        parser.error(f"{words.rows} is no folder")
    rows, others = read_rows(words.rows)
    if not rows:
        parser.error(f"no file in {words.rows} has measured rows (columns model, gpu and one of {', '.join(TARGETS)})")
    outcomes = predict_all(rows, max(1, words.jobs))
    record = summary(rows, outcomes)
    tables = [headline_table(record)]
    if not words.quick:
        record["cross_validated"] = cross_validate(rows)
        tables.append(fitted_table("cross-validated: source left out", record["cross_validated"]))
    if words.calibrate:
        record["calibrated"] = calibrate(rows)
        tables.append(fitted_table("calibrated: machine", record["calibrated"]))
    _print(record, tables, others)
    if words.json:
        words.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    if words.markdown:
        words.markdown.write_text(as_document(record, tables), encoding="utf-8")
    if words.outcomes:
        _write_outcomes(words.outcomes, outcomes)
    return 0


_DOCUMENT = """# The record of predictions

Written by `python benchmarks/foresight.py --rows DIR --markdown docs/foresight.md` from {rows} published measurements; each is
predicted from its configuration alone. Errors are of seconds a step, in per cent of what was measured; `bias` keeps the
sign, `tau` and `regret` are over groups of rows that differ in their layout alone.
{honest}
Step time as shipped: **{mape} %** on average, {median_ape} % for the middle row; the order of layouts: tau {tau}, and what
we would have chosen is {regret} % slower than the best. Peak memory, {memory_rows} rows: {memory_mape} % on average,
{memory_median} % for the middle one.
"""


def as_document(record: dict[str, Any], tables: Sequence[Table]) -> str:
    """Write the figures and the tables as a document, the honest one first: constants that have not seen the source."""
    total, held = record["total"], record["memory"]
    honest = ""
    if fitted := record.get("cross_validated"):
        count = sum(one["rows"] for one in fitted.values())
        mape = sum(one["rows"] * one["mape"] for one in fitted.values()) / count
        honest = (
            f"\n**{mape:.1f} %** is the figure to expect of a new source: {count} rows, at most {PER_SOURCE} of each source, "
            "predicted with five constants\nthat were fitted to the other sources.\n"
        )
    head = _DOCUMENT.format(
        rows=total["rows"],
        honest=honest,
        **{key: _cell(total[key]) for key in ("mape", "median_ape", "tau", "regret")},
        memory_rows=held["rows"],
        memory_mape=_cell(held["mape"]),
        memory_median=_cell(held["median_ape"]),
    )
    bodies = ["\n".join(as_lines(names, table, markdown=True)) for names, table in tables]
    skipped = [[one["source"], one["rows"], one["reason"]] for one in record["skipped"]]
    bodies.append(
        "\n".join(["What was left out, and why:\n", *as_lines(("source", "rows", "reason"), skipped, markdown=True)])
    )
    return "\n\n".join([head.rstrip(), *bodies]) + "\n"


def summary(rows: Sequence[Row], outcomes: Sequence[Outcome]) -> dict[str, object]:
    """Sum up: all rows, each file of them, memory, and why rows were skipped."""
    by_file: dict[str, list[Outcome]] = defaultdict(list)
    for row, outcome in zip(rows, outcomes, strict=True):
        by_file[row["file"]].append(outcome)
    reasons = Counter((row["file"], o.reason) for row, o in zip(rows, outcomes, strict=True) if o.reason)
    return {
        "units": "per cent, but for rows, skipped, groups and tau; errors of the step time as parts of the measured",
        "total": figures(outcomes),
        "sources": {name: figures(found) for name, found in by_file.items()},
        "memory": memory_figures(outcomes),
        "memory_sources": {name: memory_figures(found) for name, found in by_file.items()},
        "skipped": [{"source": name, "reason": why, "rows": count} for (name, why), count in reasons.most_common()],
    }


def headline_table(record: dict[str, object]) -> Table:
    """Return the table of sources, and of all."""
    sources, total = record["sources"], record["total"]
    assert isinstance(sources, dict)
    assert isinstance(total, dict)
    lines = [[name, *(found[key] for key in _KEYS)] for name, found in sources.items()]
    return _HEAD, [*lines, ["all", *(total[key] for key in _KEYS)]]


def fitted_table(title: str, found: dict[str, dict[str, float]]) -> Table:
    """Return a table of fits."""
    keys = ("rows", "mape", "median_ape", *CONSTANTS)
    lines: list[Sequence[object]] = [[name, *(figure[key] for key in keys)] for name, figure in found.items()]
    count = sum(figure["rows"] for figure in found.values())
    weighted = [sum(f["rows"] * f[key] for f in found.values()) / count if count else None for key in ("mape",)]
    return (title, *keys), [*lines, ["all, by rows", int(count), *weighted, *[None] * (len(keys) - 2)]]


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
