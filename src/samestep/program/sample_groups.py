"""Groups of samples that influence each other, and which parts of them the data ranks read in a micro-batch.

Group g holds the positions [gK, (g + 1)K) of the global batch, so it is the same one in every layout. A rank reads runs of
them, and what ranks find out about their runs is put together in slots:

    K=8, 4 ranks of 6 samples      rank 0: 6 of group 0      rank 1: 2 of group 0, 4 of group 1      rank 2: 4 of group 1, ...
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from samestep.shares import Shares


class GroupPart(NamedTuple):
    """Samples side by side that belong to one group."""

    group: int
    """Index of the group in its micro-batch."""
    num_samples: int


@dataclass(frozen=True)
class SampleGroups:
    """The groups of `size` samples in a batch, and the shares of its ranks and micro-batches."""

    shares: Shares
    size: int

    @classmethod
    def of(cls, global_batch: int, size: int, num_ranks: int, num_microbatches: int) -> SampleGroups:
        """Return the groups of a batch in which all ranks together read a micro-batch side by side."""
        return cls(Shares(global_batch, num_ranks, num_microbatches, by_microbatch=True), size)

    @cached_property
    def totals(self) -> tuple[int, ...]:
        """The different numbers of samples of a micro-batch, over all ranks."""
        shares = self.shares
        least = shares.global_batch // shares.num_ranks
        # The sizes of a rank's micro-batches change once, where its remainder ends.
        ends = {0, least % shares.num_microbatches, (least + 1) % shares.num_microbatches}
        return tuple(sorted({shares.total(index) for index in ends}))

    @property
    def fit(self) -> bool:
        """Whether every micro-batch of all ranks consists of whole groups."""
        return self.shares.num_microbatches == 1 or all(total % self.size == 0 for total in self.totals)

    @cached_property
    def num_groups(self) -> int:
        """The largest number of groups in a micro-batch."""
        return -(-self.totals[-1] // self.size)

    @property
    def is_one_forward(self) -> bool:
        """Whether every forward of a rank computes one whole group, whose statistics nobody else needs."""
        return self.shares.num_ranks == 1 and self.totals == (self.size,)

    @cached_property
    def spans_ranks(self) -> bool:
        """Whether the samples of a group may be spread over several ranks."""
        return self.shares.num_ranks > 1 and not (self._each and self._each % self.size == 0)

    @cached_property
    def num_slots(self) -> int:
        """The number of runs for which a rank has a place, the same on every rank: at least those that it reads."""
        largest = self._each or self.shares.size(0, 0)
        step = (
            math.gcd(self._each, self.size) if self._each else 1
        )  # every run begins at a multiple of it within a group
        return min(self.num_groups, -(-(self.size - step + largest) // self.size))

    @cached_property
    def _each(self) -> int:
        """The samples of every rank in every micro-batch, if all have as many; else 0."""
        each, rest = divmod(self.shares.global_batch, self.shares.num_ranks * self.shares.num_microbatches)
        return 0 if rest else each

    def runs(self, rank: int, microbatch: int) -> tuple[GroupPart, ...]:
        """Return the runs that a rank reads in a micro-batch; none where its place is empty."""
        first, mine = self.shares.first(microbatch), self.shares.positions(rank, microbatch)
        found = []
        start = mine.start - first
        while start < mine.stop - first:
            group = start // self.size
            stop = min(mine.stop - first, (group + 1) * self.size)
            found.append(GroupPart(group, stop - start))
            start = stop
        return tuple(found)

    def slots(self, microbatch: int) -> tuple[range, ...]:
        """Return for each group of a micro-batch its slots, counted over all ranks in their order."""
        spans: dict[int, tuple[int, int]] = {}
        for rank in range(self.shares.num_ranks):
            for index, run in enumerate(self.runs(rank, microbatch), rank * self.num_slots):
                spans[run.group] = spans.get(run.group, (index, 0))[0], index + 1
        return tuple(range(*spans[group]) for group in sorted(spans))
