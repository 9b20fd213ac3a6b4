"""Groups of layouts that differ only in the words of the data axis: a search bounds and throws out a group at once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from samestep.layout import Accumulate, Layout, Reduce


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

    def layouts(self) -> Iterator[Layout]:
        """Yield each of them."""
        base = self.base
        for split in self.splits:
            yield base.but(**split._asdict())
