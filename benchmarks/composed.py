"""Tells sources whose times a simulator summed up from those that were measured.

A step of m micro-batches takes m times one of them, and a rest. A simulator's sum says so to the last digit, a machine does
not: of rows that are alike in all but the global batch B, three after each other are

    off = | t2 / line - 1 |        line = t1 + (t3 - t1) (B2 - B1) / (B3 - B1)

off the line between the outer two. Layout searches of BigScience are a per cent off. The file that vTrain (Bang et al.
2024, arXiv:2312.12391) calls the measured data of single nodes is a millionth off, in half of 432 such threes, and three
in nine of ten. Where its rows differ in their replicas alone, the gradients of 2,048 hidden units and 12 layers are summed
over four devices 849 us *faster* than over two, which is what vTrain falls back on beyond its table (src/predictor.py,
compute_comm_time), to a microsecond; and a layer takes the same microseconds in every depth and pipeline, so that one trace
of it stands behind all rows of a width, tensor cut and micro-batch. They are its predictions: what they say of ours is how
alike two models are, not how good one is.

So the rule, which was written down before any figure was seen that follows from it: **rows of a simulator are no measured rows.** They
take no part in errors, in tau and regret, in fits of constants, in the error of a new source, nor in intervals and what these cover.
They have a table of their own, how well two models agree, and one more says what each figure would be with them. The rule holds
for whatever source this file finds, and for rows that say so themselves (`published.py` skips what was calculated): of all files that were
read, ZeRO's table 1 says so. It has costs and gains: sources that were measured are harder to meet than this one.
"""

from __future__ import annotations

import re
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

from cells import Row, joined, number

LEAST_THREES = 20
"""Without which nothing is said of a source."""
EXACT = 1e-4
"""What no clock of a machine repeats itself to: steps of one run vary by a tenth of a per cent and more."""
_FREE = ("id", "notes", "url_or_repo_path", "global_batch")


def composed(rows: Iterable[Row]) -> frozenset[str]:
    """Name the files whose times lie on straight lines to more digits than a machine's do."""
    offs: dict[str, list[float]] = defaultdict(list)
    for alike in _alike(rows):
        offs[alike[0]["file"]] += _off_line(alike)
    return frozenset(
        name for name, found in offs.items() if len(found) >= LEAST_THREES and statistics.median(found) < EXACT
    )


def is_calculated(row: Row) -> bool:
    """Whether a row says itself that nobody measured it."""
    said = joined(row, "source", "notes")
    return re.search(r"\banalytic|\bsimulated|\bestimated|\bprojected|\bnot measured", said, re.IGNORECASE) is not None


def _alike(rows: Iterable[Row]) -> Iterator[Sequence[Row]]:
    """Yield rows that differ in their global batch alone."""
    groups: dict[tuple[str, ...], list[Row]] = defaultdict(list)
    for row in rows:
        if number(row, "metric_step_time_s") and number(row, "global_batch"):
            key = (value for name, value in row.items() if name not in _FREE and not name.startswith("metric_"))
            groups[tuple(key)].append(row)
    yield from groups.values()


def _off_line(alike: Sequence[Row]) -> Iterator[float]:
    """Yield by what part the middle one of each three batches is off the line between its neighbours."""
    times = {number(row, "global_batch") or 0.0: number(row, "metric_step_time_s") or 0.0 for row in alike}
    points = sorted(times.items())
    for (b1, t1), (b2, t2), (b3, t3) in zip(points, points[1:], points[2:], strict=False):
        line = t1 + (t3 - t1) * (b2 - b1) / (b3 - b1)
        yield abs(t2 / line - 1)
