"""The positions of a global batch that each data rank reads in each micro-batch. No torch.

Sizes differ by at most one, the larger parts first; parts are empty where there are more parts than samples. A rank's part
of the batch is contiguous, and cut into its micro-batches. With `by_microbatch` the parts have the same sizes, and what is
contiguous is a micro-batch of all ranks together, so that samples that belong together are read in one:

    12 samples, 2 ranks, 3 micro-batches      rank 0              rank 1
    by rank                                   0 1 | 2 3 | 4 5     6 7 | 8 9 | 10 11
    by_microbatch                             0 1 | 4 5 | 8 9     2 3 | 6 7 | 10 11
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


def even_part(count: int, parts: int, index: int) -> int:
    """Return the size of one of several parts that differ by at most one, the larger ones first."""
    return count // parts + (index < count % parts)


def even_start(count: int, parts: int, index: int) -> int:
    """Return the number of things in the parts before one."""
    return index * (count // parts) + min(index, count % parts)


@dataclass(frozen=True, slots=True)
class Shares:
    """The shares of `num_ranks` data ranks in a batch, each cut into as many micro-batches."""

    global_batch: int
    num_ranks: int
    num_microbatches: int
    by_microbatch: bool = False

    def size(self, rank: int, microbatch: int) -> int:
        """Return the number of samples of a rank in a micro-batch."""
        return even_part(even_part(self.global_batch, self.num_ranks, rank), self.num_microbatches, microbatch)

    def total(self, microbatch: int) -> int:
        """Return the number of samples of all ranks in a micro-batch."""
        return self._of_ranks(self.num_ranks, even_part, microbatch)

    def first(self, microbatch: int) -> int:
        """Return the position of the first sample of a micro-batch of all ranks; asked only where it is contiguous."""
        assert self.by_microbatch, "a micro-batch in several places"
        return self._of_ranks(self.num_ranks, even_start, microbatch)

    def positions(self, rank: int, microbatch: int) -> range:
        """Return the positions of a rank's samples in a micro-batch."""
        if self.by_microbatch:
            start = self.first(microbatch) + self._of_ranks(rank, even_part, microbatch)
        else:
            part = even_part(self.global_batch, self.num_ranks, rank)
            start = even_start(self.global_batch, self.num_ranks, rank)
            start += even_start(part, self.num_microbatches, microbatch)
        return range(start, start + self.size(rank, microbatch))

    def _of_ranks(self, count: int, what: Callable[[int, int, int], int], microbatch: int) -> int:
        """Return the sum over the first ranks of their samples in a micro-batch, or in those before it."""
        least, num_larger = divmod(self.global_batch, self.num_ranks)
        larger, parts = min(count, num_larger), self.num_microbatches
        return larger * what(least + 1, parts, microbatch) + (count - larger) * what(least, parts, microbatch)
