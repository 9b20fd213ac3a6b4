"""Processes that predict: each has the rows of some sources, and keeps what it wrote and played of them for later questions.

The record asks of the same rows three times: for the headline, for the cross-validation, and to calibrate.
"""

from __future__ import annotations

import multiprocessing
from collections import Counter
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, TypeVar

from cells import Row

Found = TypeVar("Found")
LEAST_ROWS = 100
"""Fewer are predicted by this process."""


class Workers:
    """So many processes among which sources are dealt out; one process is this one."""

    def __init__(self, rows: Sequence[Row], jobs: int = 1) -> None:
        counts = Counter(row["file"] for row in rows)
        jobs = min(jobs, len(counts)) if len(rows) >= LEAST_ROWS else 1
        load = [0] * jobs
        self._place: dict[str, int] = {}
        for source, count in counts.most_common():
            self._place[source] = place = load.index(min(load))
            load[place] += count
        context = multiprocessing.get_context("fork")
        self._pools = [context.Pool(1) for _ in range(jobs)] if jobs > 1 else []

    def each(self, function: Callable[..., Found], asked: Sequence[tuple[str, tuple[Any, ...]]]) -> list[Found]:
        """Return what a function finds, of sources and its arguments, each in the process of the source."""
        if not self._pools:
            return [function(*arguments) for _, arguments in asked]
        waiting = [self._pools[self._place[source]].apply_async(function, arguments) for source, arguments in asked]
        return [one.get() for one in waiting]

    def __enter__(self) -> Workers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for pool in self._pools:
            pool.terminate()
