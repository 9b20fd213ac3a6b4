"""Parts of the record of predictions: errors by size of cluster and by word of the layout, and how many rows intervals cover.

A prediction carries the interval of measured / predicted in which 8 of 10 rows lie, every source counting alike. How many rows of a *new*
source it covers is found by leaving out each source in turn: the interval is that of all others, the covered rows are its own. The
mean over sources is to be near 80 per cent; far more would be an interval that says nothing.
"""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from typing import Any

from cells import Row, whole
from forecast import Outcome, rounded

from samestep.layout import Layout

Ratio = tuple[str, float]
"""A source, and measured / predicted of one of its rows."""
INSIDE = (0.1, 0.9)
"""The parts of all rows that lie below the ends of an interval."""
SIZES = (1, 8, 64, 512)
"""Devices from which on a row belongs to the next group of sizes."""
FEATURES: dict[str, Callable[[Layout], bool]] = {
    "one device": lambda layout: layout.world_size == 1,
    "zero=0, several replicas": lambda layout: layout.zero == 0 and layout.dp > 1,
    "zero=1": lambda layout: layout.zero == 1,
    "zero=2": lambda layout: layout.zero == 2,
    "zero=3": lambda layout: layout.zero == 3,
    "tp": lambda layout: layout.tp > 1,
    "sequence_parallel": lambda layout: layout.sequence_parallel,
    "pp": lambda layout: layout.pp > 1,
    "cp": lambda layout: layout.cp > 1,
    "ep": lambda layout: layout.ep > 1,
    "recompute": lambda layout: layout.recompute != "none",
}


def weighted_quantile(found: Sequence[Ratio], part: float) -> float:
    """Return the value below which this part lies of (source, value), all of a source weighing as much as of another."""
    counts = Counter(source for source, _ in found)
    reached = 0.0
    for source, value in sorted(found, key=lambda one: one[1]):
        reached += 1 / counts[source] / len(counts)
        if reached >= part:
            return value
    return max(value for _, value in found)


def ratios(rows: Sequence[Row], outcomes: Sequence[Outcome]) -> dict[str, list[Ratio]]:
    """Return measured / predicted of steps and of peaks of memory, with the file of each row."""
    files = [(row["file"], o) for row, o in zip(rows, outcomes, strict=True)]
    return {
        "time": [(file, o.measured_s / o.predicted_s) for file, o in files if o.measured_s and o.predicted_s],
        "memory": [
            (file, o.measured_bytes / o.predicted_bytes) for file, o in files if o.measured_bytes and o.predicted_bytes
        ],
    }


def coverage(found: Sequence[Ratio]) -> dict[str, Any]:
    """Return the per cent of each source's rows that the interval of all other sources covers, and their mean over sources."""
    by_source: dict[str, list[float]] = defaultdict(list)
    for source, value in found:
        by_source[source].append(value)
    covered: dict[str, float] = {}
    for source, values in by_source.items():
        others = [one for one in found if one[0] != source]
        if others:
            low, high = (weighted_quantile(others, part) for part in INSIDE)
            covered[source] = 100 * statistics.fmean(low <= value <= high for value in values)
    return {
        "sources": {source: rounded(share) for source, share in covered.items()},
        "mean": rounded(statistics.fmean(covered.values())) if covered else None,
    }


def over_sources(fitted: dict[str, dict[str, float]]) -> dict[str, float]:
    """Return the middle and the mean over sources of the error of a source that was left out, in per cent."""
    errors = [one["mape"] for one in fitted.values()]
    return {"median": rounded(statistics.median(errors)), "mean": rounded(statistics.fmean(errors))}


def by_part(rows: Sequence[Row], outcomes: Sequence[Outcome]) -> dict[str, list[Outcome]]:
    """Return the outcomes of each size of cluster, and of each feature of a layout; a row may have several features."""
    found: dict[str, list[Outcome]] = {}
    for first, beyond in zip(SIZES, (*SIZES[1:], None), strict=True):
        found[f"{first} to {beyond - 1} devices" if beyond else f"{first} devices and more"] = [
            o
            for row, o in zip(rows, outcomes, strict=True)
            if o.layout and first <= whole(row, "n_gpus") and (beyond is None or whole(row, "n_gpus") < beyond)
        ]
    layouts = {o.layout: Layout.parse(o.layout) for o in outcomes if o.layout}
    for name, has in FEATURES.items():
        found[name] = [o for o in outcomes if o.layout and has(layouts[o.layout])]
    return {name: alike for name, alike in found.items() if alike}
