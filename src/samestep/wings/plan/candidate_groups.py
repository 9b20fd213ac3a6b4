"""Groups of layouts that a search bounds and throws out at once: of the same degrees, or that differ only in the words of the data axis."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from samestep.enumeration import candidates
from samestep.hardware import Hardware
from samestep.job import Job
from samestep.layout import Accumulate, Layout, Reduce
from samestep.models.spec import ModelSpec


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


class ThinnedList:
    """The thinned list of a model, a job and a machine, of which whole parts are counted, and listed only where somebody asks."""

    def __init__(self, model: ModelSpec, job: Job, hardware: Hardware) -> None:
        self.model, self.job, self.hardware = model, job, hardware
        self._known_splits: dict[tuple[object, ...], tuple[Split, ...]] = {}
        self._known_variants: dict[tuple[object, ...], tuple[Mapping[str, Any], ...]] = {}
        self._known_numbers: dict[tuple[object, ...], int] = {}

    def splits(self, degrees: Layout, microbatch: int | None) -> tuple[Split, ...]:
        """Return the words of the data axis: with a single micro-batch there is nothing to accumulate."""
        key = degrees.dp, degrees.cp, degrees.ep, degrees.tp, microbatch is None
        if key not in self._known_splits:
            every = (split for plain in candidates.splits(degrees) for split in self.reductions(plain))
            self._known_splits[key] = tuple(split for split in every if microbatch or split.accumulate == "sharded")
        return self._known_splits[key]

    def reductions(self, plain: Layout) -> Iterator[Split]:
        """Yield the words of the data axis of a split, with each way to sum its gradients."""
        return map(split_of, candidates.reductions(plain, self.hardware))

    def variants(self, sized: Layout) -> tuple[Mapping[str, Any], ...]:
        """Return the words of every schedule, chunk of the loss and recomputation."""
        key = sized.pp, sized.world_size, sized.tp, sized.cp, sized.microbatch
        if key not in self._known_variants:
            self._known_variants[key] = candidates.variants(sized, self.model)
        return self._known_variants[key]

    def num_layouts(self, degrees: Layout, sized: Layout | None) -> int:
        """Return the number of layouts with these degrees, or with these degrees and this micro-batch."""
        if sized is None:
            return sum(self.num_layouts(degrees, size) for size in self.sizes(degrees))
        key = sized.dp, sized.cp, sized.ep, sized.tp, sized.pp, sized.microbatch
        if key not in self._known_numbers:
            self._known_numbers[key] = len(self.splits(degrees, sized.microbatch)) * len(self.variants(sized))
        return self._known_numbers[key]

    def sizes(self, degrees: Layout) -> Iterator[Layout]:
        """Yield each micro-batch of these degrees."""
        return candidates.vary_microbatches(degrees, self.job, thin=self.hardware)


class WholeGroup(NamedTuple):
    """All layouts of the thinned list with the same degrees, or with the same degrees and micro-batch: nobody has asked yet which of
    them the rules refuse."""

    thinned: ThinnedList
    degrees: Layout
    sized: Layout | None = None
    """The degrees with their micro-batch; None for layouts of every micro-batch."""

    def parts(self) -> Iterator[CandidateGroup]:
        """Yield their groups that differ only in the words of the data axis."""
        for sized in (self.sized,) if self.sized else self.thinned.sizes(self.degrees):
            splits = self.thinned.splits(self.degrees, sized.microbatch)
            yield from (CandidateGroup(sized, words, splits) for words in self.thinned.variants(sized))

    @property
    def num_layouts(self) -> int:
        """The number of them."""
        return self.thinned.num_layouts(self.degrees, self.sized)

    def layouts(self) -> Iterator[Layout]:
        """Yield each of them."""
        return itertools.chain.from_iterable(part.layouts() for part in self.parts())
