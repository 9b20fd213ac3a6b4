"""The tables of the record of predictions, and the document that holds them."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from forecast import PARTS
from foresight_fits import CONSTANTS, PER_SOURCE
from foresight_parts import KINDS, left_out_groups, over_sources

from samestep.wings.plan.calibrate import FACTORS

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


def tables_of(record: dict[str, Any]) -> list[Table]:
    """Return the tables of all that a record holds, in their order."""
    tables = [headline_table(record)]
    if record["composed"]:
        tables += [agreement_table(record), both_ways_table(record)]
    tables += [kinds_table(record), parts_table(record), factors_table(record)]
    if "cross_validated" in record:
        tables.insert(0, aims_table(record))
        tables.insert(1, left_out_table(record["cross_validated"]))
        tables.insert(2, busy_table(record["cross_validated"]))
        tables.append(fitted_table("cross-validated: source left out", record["cross_validated"]))
    if "calibrated" in record:
        tables.append(calibrated_table(record["calibrated"]))
    return tables


def headline_table(record: dict[str, Any]) -> Table:
    """Return the table of measured sources, and of all of them."""
    lines = [[name, *(found[key] for key in _KEYS)] for name, found in record["sources"].items()]
    return _HEAD, [*lines, ["all", *(record["total"][key] for key in _KEYS)]]


def left_out_table(fitted: dict[str, Any]) -> Table:
    """Return the table of errors of rows whose source was left out, by class of machine and by number of devices, rows counted alike and
    sources counted alike."""
    lines: list[list[object]] = []
    for name, found in left_out_groups(fitted).items():
        off = sorted(value for _, value in found)
        means = [statistics.fmean(v for s, v in found if s == source) for source in dict.fromkeys(s for s, _ in found)]
        lines.append(
            [name, len(off), len(means), statistics.fmean(off), statistics.median(off), statistics.fmean(means)]
        )
    return ("sources left out", "rows", "sources", "mape", "median_ape", "mean over sources"), lines


def kinds_table(record: dict[str, Any]) -> Table:
    """Return the table of classes of machines: errors with what is shipped, intervals, and what those of other sources cover."""
    lines = [
        [f"{KINDS.get(kind, kind)}, {part}", f["rows"], f["sources"], f["mape"], f["median_ape"], "{} to {}".format(*f["interval"]),
         f["covered"], f["covered_rows"]]
        for kind, parts in record["kinds"].items()
        for part, f in parts.items()
    ]  # fmt: skip
    head = (
        "class of machine",
        "rows",
        "sources",
        "mape",
        "median_ape",
        "80 % interval",
        "covered, by sources",
        "by rows",
    )
    return head, lines


def aims_table(record: dict[str, Any]) -> Table:
    """Return the table of what predictions are to reach for sources that are left out, and of what they do."""
    fitted, memory, total = record["cross_validated"], record["memory"], record["total"]
    errors = {name: [off for _, off in found] for name, found in left_out_groups(fitted).items()}
    lines: list[tuple[str, str, float, bool]] = []

    def at_most(name: str, value: float | None, most: float) -> None:
        if value is not None:
            lines.append((name, f"at most {most}", value, value <= most))

    few = errors.get("1 to 8 devices")
    if few:
        at_most("1 to 8 devices, mean error, %", statistics.fmean(few), 18)
        at_most("1 to 8 devices, median error, %", statistics.median(few), 12)
    for name in ("vision", "LoRA", "QLoRA"):
        at_most(f"{name}, mean error, %", statistics.fmean(errors[name]) if name in errors else None, 20)
    at_most("peak memory, mean error, %", memory["mape"], 12)
    at_most("peak memory, median error, %", memory["median_ape"], 7)
    newest = fitted.get("mlperf_6", {})
    at_most(f"MLPerf 6.0, {newest.get('rows')} rows that take part, mean error, %", newest.get("mape"), 15)
    at_most(f"MLPerf 6.0, all {newest.get('all_rows')} rows, mean error, %", newest.get("all_mape"), 15)
    for name in ("64 to 511 devices", "512 devices and more"):
        at_most(f"{name}, mean error, %", statistics.fmean(errors[name]) if name in errors else None, 13.9)
    if total["tau"] is not None:
        lines.append(("order of layouts, tau", "at least 0.75", total["tau"], total["tau"] >= LEAST_TAU))
    for kind, parts in record["kinds"].items():
        for part, found in parts.items() if kind in KINDS else ():
            for by, key in (("sources", "covered"), ("rows", "covered_rows")):
                if found["rows"] >= LEAST_OF_KIND and found[key] is not None:
                    is_near = COVERAGE[0] <= found[key] <= COVERAGE[1]
                    lines.append((f"{KINDS[kind]}, {part}, covered by {by}, %", "75 to 85", found[key], is_near))
    at_most("this record, CPU seconds", record.get("seconds"), 150)
    return ("figure", "aim", "is", "reached"), [(*line[:3], "yes" if line[3] else "no") for line in lines]


LEAST_TAU, COVERAGE, LEAST_OF_KIND = 0.75, (75, 85), 30
"""Aims: how well the order of layouts is kept, per cent that intervals cover, and rows from which on a class of machines has one."""


def busy_table(fitted: dict[str, Any]) -> Table:
    """Return the table of the parts of the predicted step of each source that is off by more than `OFF`."""
    off = sorted((name for name in fitted if fitted[name]["mape"] > OFF), key=lambda name: -fitted[name]["mape"])
    lines = [[name, fitted[name]["mape"], *fitted[name]["busy"].values()] for name in off]
    return ("busy for per cent of the step", "left out, mape", *PARTS), lines


OFF = 15
"""Per cent by which a source that is left out may be off before the parts of its steps are shown."""


def worst_sources(fitted: dict[str, Any], most: int = 5) -> str:
    """Name the sources that are met worst where they are left out."""
    worst = sorted(fitted, key=lambda name: -fitted[name]["mape"])[:most]
    return ", ".join(f"{name} ({fitted[name]['mape']:.0f} %)" for name in worst)


def agreement_table(record: dict[str, Any]) -> Table:
    """Return the table of sources that a simulator composed: how well two models agree."""
    lines = [[name, *(found[key] for key in _KEYS)] for name, found in record["agreement"].items()]
    return ("agreement with another simulator", *_HEAD[1:]), lines


def both_ways_table(record: dict[str, Any]) -> Table:
    """Return the table of each figure of measured rows, and of what it would be with simulated rows."""
    ways = record, record["with_composed"]
    keys = ("rows", "mape", "median_ape", "bias", "tau", "regret", "groups")
    lines: list[list[object]] = [[key, *(way["total"][key] for way in ways)] for key in keys]
    if "cross_validated" in record:
        found = [over_sources(way["cross_validated"]) for way in ways]
        lines += [[f"error of a new source, {name}", *(one[name] for one in found)] for name in found[0]]
        lines.append(["error of a new source, by rows", *(by_rows(way["cross_validated"]) for way in ways)])
        fitted = {name: ways[1]["cross_validated"][name] for name in ways[0]["cross_validated"]}
        lines += [
            [f"error of a new measured source, simulators in the fits, {name}", None, value]
            for name, value in over_sources(fitted).items()
        ]
    lines += [[f"80 % interval of {part}", *(_interval(way, part) for way in ways)] for part in ("time", "memory")]
    lines += [[f"coverage of {part}", *(way["coverage"][part]["mean"] for way in ways)] for part in ("time", "memory")]
    return ("figure", "measured rows", "with simulated rows"), lines


def by_rows(fitted: dict[str, dict[str, float]]) -> float:
    """Return the mean error over rows of sources that were left out, in per cent."""
    return sum(one["rows"] * one["mape"] for one in fitted.values()) / sum(one["rows"] for one in fitted.values())


def _interval(way: dict[str, Any], part: str) -> str:
    found = way["intervals"].get(part)
    return f"{found[0]} to {found[1]}" if found else "-"


_MEMORY_KEYS = (
    "rows", "mape", "median_ape", "bias", "fitting_said_fitting", "fitting_said_not", "not_fitting_said_not",
    "not_fitting_said_fitting",
)  # fmt: skip


def memory_table(record: dict[str, Any]) -> Table:
    """Return the table of peak memory by source; what ran and what ran out of it, as it was predicted."""
    found = {name: figure for name, figure in record["memory_sources"].items() if figure["rows"]}
    kinds = {name: "reserved" if name in record["reserved"] else "allocated" for name in found}
    lines = [[name, kinds[name], *(figure[key] for key in _MEMORY_KEYS)] for name, figure in found.items()]
    head = ("source", "counts", *(key.replace("_", " ") for key in _MEMORY_KEYS))
    return head, [*lines, ["all", "-", *(record["memory"][key] for key in _MEMORY_KEYS)]]


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


def inverted_table(record: dict[str, Any]) -> Table:
    """Return the table of pairs of layouts that are predicted in the wrong order."""
    keys = ("faster", "slower", "measured", "predicted")
    lines = [[name, *(pair[key] for key in keys)] for name, pairs in record["inverted"].items() for pair in pairs]
    return ("source", "the faster layout", "the slower one", "took, times", "predicted"), lines


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


_DOCUMENT = """# Prediction errors by source

`python benchmarks/foresight.py --rows DIR --calibrate --markdown docs/reference/prediction-errors.md` writes this page. It has {rows} published
measurements. Each one is predicted from its configuration only. [Accuracy of predictions](../foresight.md) is the summary.

- Errors are errors of the seconds of a step, in per cent of the measured seconds. `mape` is the mean, `median` the median, and `bias` the mean with its sign.
  Nine of ten rows have an error below `p90`.
- `tau` and `regret` cover groups of rows that differ only in their layout. `tau` (Kendall) is 1 if the predicted order is right. `regret` is the extra time of
  the layout with the best prediction.{composed}
{honest}
With the shipped profiles and constants, the error of the step time is **{mape} %** on average, with a median of {median_ape} %. In {groups} groups of layouts the order has tau {tau}. In {groups_apart}
of them there are layouts that the source itself tells apart: they differ by more than 3 %, than its stated spread, and than its repeated runs. Over such pairs
tau is {tau_apart}. Over all pairs a prediction without error would have about {tau_bound}, because the order of the other pairs is noise. The chosen layout is {regret} %
slower than the best one.

The error of the peak memory, over {memory_rows} rows, is {memory_mape} % on average, with a median of {memory_median} %.
"""


_COVERAGE = """The interval of a prediction should cover 8 of 10 rows of a new source. So it is as wide as sources differ, and wider for few sources. Its
nominal part is between 60 and 85 %. It is chosen so that the coverage of left-out sources, and of their rows, is nearest to 80 %. The table shows
the covered rows of each source, in per cent, by intervals from the other sources. The mean over sources is last:
"""


_INVERTED = """These pairs of layouts are in the wrong order, in groups of three layouts and more. A row has the faster one, the slower one, and how many times as long the slower
one took and was predicted to take. Pairs that differ by less than 3 %, or by less than the source's own results of one layout, are left out:
"""


_MEMORY = """Peak memory, of rows with a known micro-batch. `allocated` is the maximum of all tensors. `reserved` is the memory that the allocator took from
the device; it is compared with a replay of the allocator:
"""


_COMPOSED = """
- The times of {names} are sums from another simulator; `benchmarks/composed.py` explains the evidence and the rule. They are not measured, so only two tables
  use them: the agreement of the two models, and each number with these rows included.
"""


def as_document(record: dict[str, Any], tables: Sequence[Table]) -> str:
    """Write the figures and the tables as a document, the honest one first: constants that have not seen the source."""
    total, held = record["total"], record["memory"]
    honest = ""
    if fitted := record.get("cross_validated"):
        count = sum(one["rows"] for one in fitted.values())
        honest = (
            f"\nFor a new source, expect an error of **{by_rows(fitted):.1f} %**: the error of {count} rows, at most {PER_SOURCE} of each source, "
            "predicted\nwith six constants that were fitted to the other sources. Over sources the median error is "
            "**{median:.1f} %**, and the mean\n**{mean:.1f} %**. ".format(**over_sources(fitted))
        )
        honest += "The first table has the aims, the second one this error by class of machine and number of devices.\n"
        honest += (
            "\nThis is the error of constants that have not seen the source. The rules for reading and predicting rows were written with these rows\n"
            "known, so the error is optimistic. [First predictions](../../benchmarks/first_predictions.md) of new rows, before any rule followed from\n"
            "them, had a mean error of 22.2 % and a median of 17.1 % over 419 rows. For unseen rows on one to eight devices it was 34 %.\n\n"
        )
        honest += f"Sources with the largest errors: {worst_sources(fitted)}.\n"
    head = _DOCUMENT.format(
        rows=total["rows"],
        honest=honest,
        composed=_COMPOSED.rstrip().format(names=", ".join(record["composed"])) if record["composed"] else "",
        **{
            key: _cell(total[key])
            for key in ("mape", "median_ape", "tau", "tau_apart", "tau_bound", "regret", "groups", "groups_apart")
        },
        memory_rows=held["rows"],
        memory_mape=_cell(held["mape"]),
        memory_median=_cell(held["median_ape"]),
    )
    bodies = ["\n".join(as_lines(names, table, markdown=True)) for names, table in tables]
    bodies.append("\n".join([_INVERTED, *as_lines(*inverted_table(record), markdown=True)]))
    bodies.append("\n".join([_MEMORY, *as_lines(*memory_table(record), markdown=True)]))
    bodies.append("\n".join([_COVERAGE, *as_lines(*coverage_table(record), markdown=True)]))
    skipped = [[one["source"], one["rows"], one["reason"]] for one in record["skipped"]]
    bodies.append(
        "\n".join(
            ["Excluded rows, with the reason:\n", *as_lines(("source", "rows", "reason"), skipped, markdown=True)]
        )
    )
    return "\n\n".join([head.rstrip(), *bodies]) + "\n"
