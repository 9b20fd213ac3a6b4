"""Which schedules, and which splits of the data axis under each, the strategies refuse: asked once for many layouts of a search."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from samestep.layout import Layout
from samestep.planning import candidates
from samestep.planning.candidate_groups import Split, ThinnedList
from samestep.strategies import ProgramBuilder, pipeline, refusal_of


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
            self._known_schedules[degrees] = tuple(one for one in every if self._is_legal(one))
        return self._known_schedules[degrees]

    def by_reason(self, family: Layout, splits: Iterable[Split]) -> dict[str | None, tuple[Split, ...]]:
        """Return splits of the data axis under a schedule by the reason for which they are refused; None for legal ones.

        Where one split of a kind is allowed, the others are taken to be, so each layout is asked about again before it is played.
        """
        if family not in self._known_reasons:
            self._known_reasons[family] = self._asked(family)
        reasons, found = self._known_reasons[family], dict[str | None, list[Split]]()
        for split in splits:
            found.setdefault(reasons[split], []).append(split)
        return {reason: tuple(some) for reason, some in found.items()}

    def _is_legal(self, family: Layout) -> bool:
        if self._refused_whole(family):
            return False
        return any(self._refusal(family, split) is None for split in self.thinned.splits(family, 1))

    def _asked(self, family: Layout) -> dict[Split, str | None]:
        splits = self.thinned.splits(family, 1)
        if reason := self._refused_whole(family):
            return dict.fromkeys(splits, reason)
        found: dict[Split, str | None] = {}
        allowed: set[tuple[object, ...]] = set()
        for split in splits:
            kind = split.zero, split.accumulate, split.reduce
            found[split] = None if kind in allowed else self._refusal(family, split)
            if found[split] is None:
                allowed.add(kind)
        return found

    def _refused_whole(self, family: Layout) -> str | None:
        """Return why no split of the data axis is allowed under a schedule: what stages refuse does not depend on it."""
        return pipeline.refusal(self.builder.step(family))

    def _refusal(self, family: Layout, split: Split) -> str | None:
        return refusal_of(self.builder.step(family.but(**split._asdict())))
