"""Groups of layouts that a search bounds and throws out at once: of the same degrees, or that differ only in the words of the data axis."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from samestep.hardware import Hardware
from samestep.job import Job
from samestep.layout import Accumulate, Layout, Reduce
from samestep.models.spec import ModelSpec
from samestep.planning import candidates


class Split(NamedTuple):
    """The words of the data axis: how it is split, and how gradients are summed over it."""

    dp_replicate: int
    dp_shard: int
    zero: int
    accumulate: Accumulate
    reduce: Reduce


def split_of(layout: Layout) -> Split:
    """Return the words of a layout's data axis."""
    return Split(layout.dp_replicate, layout.dp_shard, layout.zero, layout.accumulate, layout.reduce)


class CandidateGroup(NamedTuple):
    """Layouts that differ only in the words of the data axis."""

    sized: Layout
    """Their degrees and their micro-batch."""
    words: Mapping[str, Any]
    """Their words of schedule, recompute and loss chunks."""
    splits: tuple[Split, ...]
    """The words of the data axis of each."""

    @classmethod
    def of(cls, layout: Layout) -> CandidateGroup:
        """Return the group of a single layout."""
        return cls(layout, {}, (split_of(layout),))

    @property
    def base(self) -> Layout:
        """The layout of their common words, with an unsplit data axis; most groups fall out before it is needed."""
        return self.sized.but(**self.words)

    @property
    def num_layouts(self) -> int:
        """The number of them."""
        return len(self.splits)

    def layouts(self) -> Iterator[Layout]:
        """Yield each of them."""
        base = self.base
        for split in self.splits:
            yield base.but(**split._asdict())


@dataclass(frozen=True)
class DegreesGroup:
    """All layouts of the thinned list with the same degrees, which are listed only where somebody asks for them."""

    degrees: Layout
    model: ModelSpec
    job: Job
    hardware: Hardware

    def _sizes(self) -> Iterator[tuple[Layout, tuple[Split, ...]]]:
        """Yield each micro-batch with the words of the data axis."""
        plain = candidates.splits(self.degrees)
        splits = tuple(split_of(one) for split in plain for one in candidates.reductions(split, self.hardware))
        for sized in candidates.vary_microbatches(self.degrees, self.job, thin=self.hardware):
            yield sized, splits_with(sized, splits)

    @cached_property
    def num_layouts(self) -> int:
        """The number of them."""
        return sum(candidates.num_variants(sized, self.model) * len(splits) for sized, splits in self._sizes())

    def layouts(self) -> Iterator[Layout]:
        """Yield each of them."""
        for sized, splits in self._sizes():
            for words in candidates.variants(sized, self.model):
                yield from CandidateGroup(sized, words, splits).layouts()


def splits_with(sized: Layout, splits: tuple[Split, ...]) -> tuple[Split, ...]:
    """Return the words of the data axis that say something with a micro-batch: a single one leaves nothing to accumulate."""
    return splits if sized.microbatch else tuple(split for split in splits if split.accumulate == "sharded")
