"""The tables of the record of predictions, and the document that holds them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from foresight_fits import CONSTANTS, PER_SOURCE
from foresight_parts import over_sources

from samestep.planning.calibration.factors import FACTORS

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
    tables += [parts_table(record), factors_table(record)]
    if "cross_validated" in record:
        tables.append(fitted_table("cross-validated: source left out", record["cross_validated"]))
    if "calibrated" in record:
        tables.append(calibrated_table(record["calibrated"]))
    return tables


def headline_table(record: dict[str, Any]) -> Table:
    """Return the table of measured sources, and of all of them."""
    lines = [[name, *(found[key] for key in _KEYS)] for name, found in record["sources"].items()]
    return _HEAD, [*lines, ["all", *(record["total"][key] for key in _KEYS)]]


def agreement_table(record: dict[str, Any]) -> Table:
    """Return the table of sources that a simulator composed: how well two models agree."""
    lines = [[name, *(found[key] for key in _KEYS)] for name, found in record["agreement"].items()]
    return ("agreement with another simulator", *_HEAD[1:]), lines


def both_ways_table(record: dict[str, Any]) -> Table:
    """Return the table of each figure of measured rows, and of what it would be with those of simulators."""
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
    return ("figure", "measured rows", "with those of simulators"), lines


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
    head = ("source", "counts what is", *(key.replace("_", " ") for key in _MEMORY_KEYS))
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


_DOCUMENT = """# The record of predictions

This page is written by `python benchmarks/foresight.py --rows DIR --calibrate --markdown docs/foresight.md`. It holds {rows}
published measurements, each predicted from its configuration alone. Errors are those of the seconds of a step, in per cent of the
measured seconds. `mape` is the mean error, `median` that of the middle row, and `p90` the error that 9 of 10 rows stay below; `bias`
keeps the sign. `tau` and `regret` are computed over groups of rows that differ only in their layout: `tau` (Kendall) is 1 where the
predicted order is right, and `regret` is how much slower the layout is that the prediction would choose.{composed}
{honest}
With the profiles and constants as shipped, the error of the step time is **{mape} %** on average and {median_ape} % for the middle
row. In {groups} groups of layouts the order has tau {tau}, and the chosen layout is {regret} % slower than the best one. The error of the
peak memory, over {memory_rows} rows, is {memory_mape} % on average and {memory_median} % for the middle row.
"""


_COVERAGE = """The interval of a prediction shall hold 8 of 10 rows of a new source, so it is as wide as sources differ, and wider where they are few.
How many rows of a source it covers that had no part in it, nor in its width, in per cent, with the mean over sources last:
"""


_MEMORY = """Peak memory, of rows whose micro-batch is known. `allocated` is what tensors had at most; `reserved` is what the allocator took from the
device, which is compared with a replay of the allocator:
"""


_COMPOSED = """

The times of {names} are sums that a simulator composed; `benchmarks/composed.py` explains how one can tell, and the rule. They are no
measured rows, so they have no part in any figure but those of two tables: how well the two models agree, and what each
figure would be with them.
"""


def as_document(record: dict[str, Any], tables: Sequence[Table]) -> str:
    """Write the figures and the tables as a document, the honest one first: constants that have not seen the source."""
    total, held = record["total"], record["memory"]
    honest = ""
    if fitted := record.get("cross_validated"):
        count = sum(one["rows"] for one in fitted.values())
        honest = (
            f"\nFor a new source, expect an error of **{by_rows(fitted):.1f} %**: that of {count} rows, at most {PER_SOURCE} of each source, "
            "predicted\nwith six constants that were fitted to the other sources. Over sources the error is "
            "**{median:.1f} %** in the middle and **{mean:.1f} %**\non average.\n".format(**over_sources(fitted))
        )
    head = _DOCUMENT.format(
        rows=total["rows"],
        honest=honest,
        composed=_COMPOSED.rstrip().format(names=", ".join(record["composed"])) if record["composed"] else "",
        **{key: _cell(total[key]) for key in ("mape", "median_ape", "tau", "regret", "groups")},
        memory_rows=held["rows"],
        memory_mape=_cell(held["mape"]),
        memory_median=_cell(held["median_ape"]),
    )
    bodies = ["\n".join(as_lines(names, table, markdown=True)) for names, table in tables]
    bodies.append("\n".join([_MEMORY, *as_lines(*memory_table(record), markdown=True)]))
    bodies.append("\n".join([_COVERAGE, *as_lines(*coverage_table(record), markdown=True)]))
    skipped = [[one["source"], one["rows"], one["reason"]] for one in record["skipped"]]
    bodies.append(
        "\n".join(
            ["Rows that were left out, and why:\n", *as_lines(("source", "rows", "reason"), skipped, markdown=True)]
        )
    )
    return "\n\n".join([head.rstrip(), *bodies]) + "\n"
