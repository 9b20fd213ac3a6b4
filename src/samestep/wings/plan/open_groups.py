"""Groups of layouts that a search bounds and throws out at once, of the same degrees or that differ only in the words of the data axis; the
rules for them, and the layouts that fell out.

Refusals of the strategies seldom depend on more than degrees and schedule, so the strategies are asked once for many layouts. Layouts
that fell out are kept in groups too, with the reason, and the one nearest to a layout that cannot run. The degrees count most: doubling
one and halving another is two steps away. Of layouts with the same degrees the one that changes the fewest other words is nearer, and
of equals the fastest is named.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

from samestep.enumeration import candidates
from samestep.hardware import Hardware
from samestep.job import Job
from samestep.layout import Accumulate, Layout, Reduce
from samestep.memory.memory_use import memory_of
from samestep.models.spec import ModelSpec
from samestep.output.text import gib
from samestep.strategies import ProgramBuilder, pipeline, refusal_of
from samestep.wings.plan.bounds.layer_costs import Prices
from samestep.wings.plan.bounds.least_memory import Need, Needs
from samestep.wings.plan.simulation.simulate import Prediction, predict_programs


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


Groups = tuple[CandidateGroup | WholeGroup, ...]


class Schedule(NamedTuple):
    """The words of a schedule."""

    schedule: str
    virtual_stages: int


def schedule_of(words: Mapping[str, Any]) -> Schedule:
    """Return the schedule of layout words."""
    return Schedule(words["schedule"], words.get("virtual_stages", 1))


def chunk_of(group: CandidateGroup) -> tuple[int | None, int | None]:
    """Return the chunks of the loss and of MLPs of a group."""
    return group.words["loss_chunk"], group.words["mlp_chunk"]


class ScheduleRules:
    """The refusals of the strategies, by degrees and schedule: they seldom depend on other words."""

    def __init__(self, builder: ProgramBuilder, thinned: ThinnedList) -> None:
        self.builder, self.thinned = builder, thinned
        self._known_reasons: dict[Layout, Mapping[Split, str | None]] = {}
        self._known_schedules: dict[Layout, tuple[Layout, ...]] = {}

    def schedules(self, degrees: Layout) -> tuple[Layout, ...]:
        """Return the degrees with each schedule that the rules allow with some split of the data axis."""
        if degrees not in self._known_schedules:
            every = candidates.vary_schedules(degrees, self.thinned.model)
            self._known_schedules[degrees] = tuple(family for family in every if self._is_legal(family))
        return self._known_schedules[degrees]

    def by_reason(self, family: Layout, splits: Iterable[Split]) -> dict[str | None, tuple[Split, ...]]:
        """Return splits of the data axis under a schedule by the reason for which they are refused; None for legal ones.

        Where one split of a kind is allowed, the others are taken to be, so each layout is asked about again before it is played.
        """
        if family not in self._known_reasons:
            self._known_reasons[family] = self._asked(family)
        reasons, groups = self._known_reasons[family], dict[str | None, list[Split]]()
        for split in splits:
            groups.setdefault(reasons[split], []).append(split)
        return {reason: tuple(some) for reason, some in groups.items()}

    def _is_legal(self, family: Layout) -> bool:
        if self._refused_whole(family):
            return False
        return any(self._refusal(family, split) is None for split in self.thinned.splits(family, 1))

    def _asked(self, family: Layout) -> dict[Split, str | None]:
        splits = self.thinned.splits(family, 1)
        if reason := self._refused_whole(family):
            return dict.fromkeys(splits, reason)
        reasons: dict[Split, str | None] = {}
        allowed: set[tuple[object, ...]] = set()
        for split in splits:
            kind = split.zero, split.accumulate, split.reduce
            reasons[split] = None if kind in allowed else self._refusal(family, split)
            if reasons[split] is None:
                allowed.add(kind)
        return reasons

    def _refused_whole(self, family: Layout) -> str | None:
        """Return why no split of the data axis is allowed under a schedule: what stages refuse does not depend on it."""
        error = pipeline.refusal(self.builder.step(family))
        return None if error is None else str(error)

    def _refusal(self, family: Layout, split: Split) -> str | None:
        error = refusal_of(self.builder.step(family.but(**split._asdict())))
        return None if error is None else str(error)


MOST_ASKED = 3000
"""Layouts of which it is asked whether they can be."""
MOST_PLAYED = 8
"""Tie-break among equally near layouts."""
_DEGREES = (*Layout().inner_degrees, "dp")
_WORDS = tuple(field.name for field in fields(Layout) if field.name not in _DEGREES)


@dataclass(frozen=True, slots=True)
class Rejection:
    """A layout that fell out, with the rule and the reason."""

    layout: Layout
    rule: str
    """refused, memory, slower, or unplayed (the search ended first)."""
    reason: str


class Fallen(NamedTuple):
    """Groups of layouts that fell out by one rule, and why."""

    groups: Groups
    rule: str
    reason: str
    needed_bytes: float = 0.0
    """Least known bytes of a layout that does not fit; 0 for others."""

    @property
    def num_layouts(self) -> int:
        """The number of these layouts."""
        return sum(group.num_layouts for group in self.groups)

    def layouts(self) -> Iterator[Layout]:
        """Yield each of these layouts."""
        for group in self.groups:
            yield from group.layouts()


def whole_batch(layout: Layout, job: Job) -> str:
    """Return text that says that a layout without micro-batches runs all samples of a rank at once; empty for others."""
    samples = -(-job.train.global_batch // layout.dp)
    if layout.microbatch or samples < 2:
        return ""
    return f" (without a microbatch, all {samples:,} samples of a rank run at once)"


def at_least(need: Need, total: float, hardware: Hardware) -> str:
    """Return text that says how much a layout needs at least, and what most of it is."""
    parts = {"states": need.states, "activations": need.activations, "gathered weights": need.gathered}
    most = ", ".join(f"{name} {gib(size)}" for name, size in sorted(parts.items(), key=lambda p: -p[1]) if size)
    return f"needs at least {gib(total)} GiB of {gib(hardware.room_bytes)}: {most}"


def nearest_to_fitting(fallen: Sequence[Fallen]) -> str:
    """Return the layout that comes nearest to fitting, and what it needs, as text."""
    too_large = [group for group in fallen if group.rule == "memory"]
    if not too_large:
        return "no layout of these devices is valid"
    near = min(too_large, key=lambda group: group.needed_bytes)
    return f'nothing fits; "{next(near.layouts())}" comes nearest: {near.reason}'


def distance(layout: Layout, other: Layout) -> tuple[float, int]:
    """Return by what powers of two the degrees differ in all, and how many other words do."""
    powers = sum(abs(math.log2(getattr(layout, name) / getattr(other, name))) for name in _DEGREES)
    return round(powers, 6), sum(getattr(layout, name) != getattr(other, name) for name in _WORDS)


def nearest(
    model: ModelSpec, job: Job, hardware: Hardware, layout: Layout, devices: int, states_per_param: int = 2
) -> Prediction | None:
    """Return the nearest layout of so many devices that no strategy refuses and that fits; None where there is none."""
    builder = ProgramBuilder(model, job, job.run.ranks_per_node or hardware.devices_per_node)
    needs = Needs(Prices(model, job, hardware), states_per_param)
    room = hardware.room_bytes - hardware.reserved_bytes
    far = functools.partial(distance, layout)
    tried = (
        layout
        for layout in candidates.layouts_of(devices, model, job, thin=hardware)
        if layout.tp <= hardware.devices_per_node
    )
    asked = itertools.islice(sorted(tried, key=far), MOST_ASKED)
    for _, alike in itertools.groupby(asked, key=far):
        steps = (builder.step(near) for near in alike)
        may_be = (step for step in steps if refusal_of(step) is None and needs.need(step).total <= room)
        predictions = []
        for step in itertools.islice(may_be, MOST_PLAYED):
            programs = builder.programs(step.layout)
            uses = memory_of(programs, hardware, states_per_param)
            if max(use.total for use in uses) <= hardware.room_bytes:
                predictions.append(predict_programs(programs, model, job, hardware, uses, states_per_param))
        if predictions:
            return min(predictions, key=lambda prediction: prediction.step_s)
    return None
