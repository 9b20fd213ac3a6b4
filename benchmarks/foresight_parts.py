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
COVERED = 0.8
"""Part of the rows of a new source that an interval shall hold."""
TAILS = (0.1, 0.09, 0.08, 0.07, 0.06, 0.05, 0.04, 0.03, 0.02, 0.01, 0.0)
"""Parts of all rows that may be outside of an interval, on either side."""
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


def weighted_quantiles(found: Sequence[Ratio], parts: Sequence[float]) -> list[float]:
    """Return the values below which these parts of (source, value) are, in rising order, all of a source weighing as much as of another."""
    counts = Counter(source for source, _ in found)
    order = sorted(found, key=lambda one: one[1])
    values, reached, left = list[float](), 0.0, sorted(parts)
    for source, value in order:
        reached += 1 / counts[source] / len(counts)
        while left and reached >= left[0]:
            values.append(value)
            left = left[1:]
    return values + [order[-1][1]] * len(left)


def interval(found: Sequence[Ratio]) -> tuple[float, float]:
    """Return the ends of the narrowest interval in which most rows of a new source are to be expected, `COVERED` of them.

    Between two quantiles of all rows fewer rows of a new source are than of these, since sources differ and are few: so tails are
    tried from the largest on, until the intervals of all sources but one cover that many rows of the one, on average over sources.
    """
    tails = sorted(TAILS, reverse=True)
    by_source = _by_source(found)
    covered = {tail: list[float]() for tail in tails}
    if len(by_source) > 2:
        for source, values in by_source.items():
            for tail, (low, high) in zip(tails, _ends([one for one in found if one[0] != source], tails), strict=True):
                covered[tail].append(statistics.fmean(low <= value <= high for value in values))
    enough = (tail for tail in tails if statistics.fmean(covered[tail] or [1.0]) >= COVERED)
    return _ends(found, [next(enough, tails[-1])])[0]


def _ends(found: Sequence[Ratio], tails: Sequence[float]) -> list[tuple[float, float]]:
    """Return the ends of the interval that leaves out each of these parts of the rows on either side; tails from the largest on."""
    lows = weighted_quantiles(found, tails)[::-1]
    return list(zip(lows, weighted_quantiles(found, [1 - tail for tail in tails]), strict=True))


def _by_source(found: Sequence[Ratio]) -> dict[str, list[float]]:
    by_source: dict[str, list[float]] = defaultdict(list)
    for source, value in found:
        by_source[source].append(value)
    return by_source


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
    """Return the per cent of each source's rows that the interval of all other sources covers, and their mean over sources.

    A source has no part in the choice of the tails of the interval that judges it.
    """
    covered: dict[str, float] = {}
    for source, values in _by_source(found).items():
        others = [one for one in found if one[0] != source]
        if others:
            low, high = interval(others)
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


def own_factors(rows: Sequence[Row], outcomes: Sequence[Outcome]) -> dict[str, dict[str, float]]:
    """Return of each source what one factor of its own would leave of its mean error, and one factor for each of its machines, in
    per cent: what is left is a spread within the source, what goes is something that all its rows have in common."""
    by_source: dict[str, list[Outcome]] = defaultdict(list)
    for row, outcome in zip(rows, outcomes, strict=True):
        if outcome.measured_s and outcome.predicted_s:
            by_source[row["file"]].append(outcome)
    found = {}
    for source, alike in by_source.items():
        machines: dict[str, list[float]] = defaultdict(list)
        for one in alike:
            machines[one.machine].append(one.predicted_s / one.measured_s)
        every = [ratio for of_machine in machines.values() for ratio in of_machine]
        found[source] = {
            "rows": len(every),
            "mape": rounded(_mape(every)),
            "measured_over_predicted": rounded(1 / statistics.median(every)),
            "one_factor": rounded(_mape(_centred(every))),
            "one_a_machine": rounded(_mape([ratio for alike in machines.values() for ratio in _centred(alike)])),
        }
    return found


def _centred(found: Sequence[float]) -> list[float]:
    middle = statistics.median(found)
    return [ratio / middle for ratio in found]


def _mape(found: Sequence[float]) -> float:
    return 100 * statistics.fmean(abs(ratio - 1) for ratio in found)
