"""A batch of one step whose values a process holds: all of them, or those of its data rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from samestep.datasets.batch import Steps, shares
from samestep.datasets.order import Integers
from samestep.datasets.values import rows_of


@dataclass(frozen=True, eq=False)
class GivenBatch:
    """A batch of one step whose values this process holds: of all samples, or of those of its data rank."""

    step: int
    """The step's index, counted from 0."""
    values: Any
    count: int
    """The number of samples whose values are here."""
    sizes: tuple[int, ...] | None = None
    """The number of samples that each data rank holds, where they hold different ones."""
    rank: int = 0
    """The data rank whose samples are here, where they hold different ones."""
    by_microbatch: bool = False
    """Whether micro-batch i of all ranks together is one contiguous range of the batch."""
    stream: Steps | None = None
    """The stream that yielded it, if one did."""

    @property
    def num_samples(self) -> int:
        """The number of samples of all ranks."""
        return self.count if self.sizes is None else sum(self.sizes)

    @property
    def held(self) -> Any:
        """The values of a stream's batch, which every rank holds; else None."""
        return None if self.stream is None else self.values

    @property
    def _first(self) -> int:
        return 0 if self.sizes is None else sum(self.sizes[: self.rank])

    def shares(self, rank: int, num_ranks: int, num_microbatches: int) -> list[Integers]:
        """Return the positions in the batch of the samples of each micro-batch of one data rank.

        Where ranks hold different samples, the share of one rank of one is what is held here.
        """
        here = np.arange(self._first, self._first + self.count, dtype=np.int64)
        if self.sizes is not None:
            return shares(here, 0, 1, num_microbatches)
        return shares(here, rank, num_ranks, num_microbatches, by_microbatch=self.by_microbatch)

    def samples(self, indices: Integers | Sequence[int]) -> Any:
        """Return the values of the samples at these positions of the batch."""
        return rows_of(self.values, np.asarray(indices) - self._first, self.count)

    def read_ahead(self, rank: int, num_ranks: int, num_microbatches: int, *, pin: bool = False) -> None:
        """Do nothing, since the values are here."""

    def before_next(self, function: Callable[[], None]) -> None:
        """Call a function before the stream that yielded this batch yields the next one; without one the next step does."""
        if self.stream is not None:
            self.stream.before_next = function

    def end_stream(self) -> None:
        """End the stream that yielded this batch; a loop that hands batches over ends where `StepReport.stop` says so."""
        if self.stream is not None:
            self.stream.stop()
