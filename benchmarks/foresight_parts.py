"""Parts of the record of predictions: errors by size of cluster and by word of the layout, and how many rows intervals cover.

A prediction carries the interval of measured / predicted in which 8 of 10 rows of a *new* source are to be expected, every source counting
alike. How many it covers is found by leaving out each source in turn: the interval is that of all others, the covered rows are its own.
The mean over sources is to be near 80 per cent; far more would be an interval that says nothing.

Three procedures were looked at. Quantiles of all rows, with tails that leaving out one source after the other chose, covered 80 % of the
steps of 17 sources, and 68 to 74 % of the memory of four: no quantile is beyond what was seen, and of three sources too little was. Normal
distributions of sources and of rows within them covered 88 % of the steps: the variance within is that of a few rows far out.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from cells import Row, whole
from forecast import Outcome, rounded
from published_loops import adapters_of, is_packed
from published_vision import vision_of

from samestep.layout import Layout

Ratio = tuple[str, float]
"""A source, and measured / predicted of one of its rows."""
COVERED = 0.8
"""Part of the rows of a new source that an interval shall hold."""
PARTS = tuple(0.6 + step / 80 for step in range(21))
"""Parts of a distribution that an interval may have so as to hold `COVERED`."""
STRIPS = 2**14
"""Of two right angles, by which a distribution is summed up."""
POINTS = 2**9
"""Equally probable values that stand for a distribution."""
SIZES = (1, 2, 8, 9, 64, 512)
"""Devices from which on a row belongs to the next group of sizes."""
KINDS = {"cards": "cards on PCIe", "few": "parts of a node", "nodes": "nodes"}
"""Classes of machines (`class_of`), each with intervals of its own."""
FEATURES: dict[str, Callable[[Layout], bool]] = {
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


def work_of(row: Row) -> str:
    """Return what is special in what a row trains: a network of convolutions, adapters, or such on frozen weights in 4 bits."""
    if vision_of(row):
        return "vision"
    return "" if adapters_of(row) is None else "QLoRA" if is_packed(row) else "LoRA"


class Spread(NamedTuple):
    """A distribution of logarithms of measured / predicted, of rows of a new source."""

    middle: float
    offs: np.ndarray
    """How far rows are off the middle, sorted."""
    below: np.ndarray
    """Probability that a row is off by no more than each of them."""

    def ends(self, part: float) -> tuple[float, float]:
        """Return the ends of the interval that has this part of the distribution, each of which leaves out the same."""
        low, high = (self.offs[np.searchsorted(self.below, side)] for side in ((1 - part) / 2, (1 + part) / 2))
        return math.exp(self.middle + low), math.exp(self.middle + high)


def interval(found: Sequence[Ratio], part: float = COVERED) -> tuple[float, float]:
    """Return the ends of the interval in which a row of a new source is to be expected, with this probability."""
    return spread_of(found).ends(part)


def spread_of(found: Sequence[Ratio]) -> Spread:
    """Return how rows of a new source are spread.

    Sources are few and differ: of n sources, whose own means vary by b, a new one's mean is off their middle by b (1 + 1 / n), which
    is only estimated, so as Student's t with n - 1 degrees of freedom: with four sources it is often far out. On top of it a row is off
    the mean of its source as one of the known rows is off its own, every source counting alike. Means of few rows vary by what their
    rows do, which b has in it, so the row of a source of one row is not off at all. Rows are many, and their distribution is taken as it
    was found: it has a narrow middle and wide tails, and a normal one of the same variance holds nine rows of ten where it claims to
    hold eight. Of one source alone the ends are its smallest and its largest value.
    """
    logs = [np.log(values) for values in _by_source(found).values()]
    count = len(logs)
    if count < 2:
        sides = np.sort(logs[0])[[0, -1]]
        return Spread(0.0, sides, np.array([0.5, 1.0]))
    means = [float(values.mean()) for values in logs]
    offs = math.sqrt(statistics.variance(means) * (1 + 1 / count)) * student_points(count - 1)
    sums = np.concatenate([np.add.outer(values - values.mean(), offs).ravel() for values in logs])
    weights = np.concatenate([np.full(len(values) * POINTS, 1 / len(values)) for values in logs])
    order = np.argsort(sums)
    return Spread(statistics.fmean(means), sums[order], np.cumsum(weights[order]) / weights.sum())


def student_points(freedom: float) -> np.ndarray:
    """Return `POINTS` equally probable values of Student's t distribution.

    With t = sqrt(freedom) tan(angle) its density is cos(angle)^(freedom - 1), between a right angle to either side.
    """
    edges = np.linspace(-math.pi / 2, math.pi / 2, STRIPS + 1)
    reached = np.concatenate([[0.0], np.cumsum(np.cos((edges[1:] + edges[:-1]) / 2) ** (freedom - 1))])
    wanted = (np.arange(POINTS) + 0.5) / POINTS * reached[-1]
    return math.sqrt(freedom) * np.tan(np.interp(wanted, reached, edges))


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


def ratios_by_kind(rows: Sequence[Row], outcomes: Sequence[Outcome]) -> dict[str, dict[str, list[Ratio]]]:
    """Return the ratios of all rows, and of each class of machines."""
    pairs = [*zip(rows, outcomes, strict=True)]
    found = {"all": ratios(rows, outcomes)}
    for kind in KINDS:
        alike = [(row, o) for row, o in pairs if o.kind == kind]
        found[kind] = ratios([row for row, _ in alike], [o for _, o in alike])
    return found


def coverage(found: Sequence[Ratio], known: Sequence[Ratio] = ()) -> dict[str, Any]:
    """Return the per cent of each source's rows that the interval of all other sources covers, their mean over sources and over rows, and the
    part of a distribution that the interval has; of those found, or of all that are known.

    Of sources that were left out, an interval with a part of `COVERED` covers more in some classes, less in others. So it has the part by
    which what it covers, over sources and over rows, is nearest to `COVERED`.
    """
    values = _by_source(found)
    others = {source: [ratio for ratio in known or found if ratio[0] != source] for source in values}
    spreads = {source: spread_of(rest) for source, rest in others.items() if rest}
    if not spreads:
        return {"sources": {}, "mean": None, "rows": None, "part": COVERED}
    tried = [_covered(values, spreads, part) for part in PARTS]
    return min(tried, key=lambda one: max(abs(one[name] - 100 * COVERED) for name in ("mean", "rows")))


def _covered(values: dict[str, list[float]], spreads: dict[str, Spread], part: float) -> dict[str, Any]:
    """Return what intervals with a part of the other sources' distributions cover."""
    ends = {source: spread.ends(part) for source, spread in spreads.items()}
    shares = {
        source: 100 * statistics.fmean(low <= value <= high for value in values[source])
        for source, (low, high) in ends.items()
    }
    rows = sum(len(values[source]) for source in shares)
    return {
        "sources": {source: rounded(share) for source, share in shares.items()},
        "mean": rounded(statistics.fmean(shares.values())),
        "rows": rounded(sum(share * len(values[source]) for source, share in shares.items()) / rows),
        "part": part,
    }


def over_sources(fitted: dict[str, dict[str, float]]) -> dict[str, float]:
    """Return the middle and the mean over sources of the error of a source that was left out, in per cent."""
    errors = [one["mape"] for one in fitted.values()]
    return {"median": rounded(statistics.median(errors)), "mean": rounded(statistics.fmean(errors))}


def by_part(rows: Sequence[Row], outcomes: Sequence[Outcome]) -> dict[str, list[Outcome]]:
    """Return the outcomes of each size of cluster, of each feature of a layout, and of each kind of work; a row may be in several parts."""
    found: dict[str, list[Outcome]] = {}
    for first, beyond in zip(SIZES, (*SIZES[1:], None), strict=True):
        found[size_of(first, beyond)] = [
            o
            for row, o in zip(rows, outcomes, strict=True)
            if o.layout and first <= whole(row, "n_gpus") and (beyond is None or whole(row, "n_gpus") < beyond)
        ]
    for kind, name in KINDS.items():
        found[name] = [o for o in outcomes if o.layout and o.kind == kind]
    layouts = {o.layout: Layout(o.layout) for o in outcomes if o.layout}
    for name, has in FEATURES.items():
        found[name] = [o for o in outcomes if o.layout and has(layouts[o.layout])]
    for row, o in zip(rows, outcomes, strict=True):
        if o.layout and (work := work_of(row)):
            found.setdefault(work, []).append(o)
    return {name: alike for name, alike in found.items() if alike}


def size_of(first: int, beyond: int | None) -> str:
    """Return the name of a group of sizes."""
    if beyond == first + 1:
        return f"{first} device{'s' * (first > 1)}"
    return f"{first} to {beyond - 1} devices" if beyond else f"{first} devices and more"


def left_out_groups(fitted: dict[str, dict[str, Any]]) -> dict[str, list[Ratio]]:
    """Return the errors of rows of sources that were left out, in per cent, with their source: by class of machine, by devices, and by kind of work."""
    each = [(source, *one) for source, found in fitted.items() for one in found["each"]]
    groups = {name: [(s, off) for s, of, _, _, off in each if of == kind] for kind, name in KINDS.items()}
    for first, beyond in zip(SIZES, (*SIZES[1:], None), strict=True):
        groups[size_of(first, beyond)] = [
            (s, off) for s, _, n, _, off in each if first <= n and (beyond is None or n < beyond)
        ]
    groups["1 to 8 devices"] = [(s, off) for s, _, n, _, off in each if n <= 8]
    for s, _, _, work, off in each:
        if work:
            groups.setdefault(work, []).append((s, off))
    return {name: found for name, found in groups.items() if found}


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
