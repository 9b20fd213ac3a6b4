"""The entries of a search's queue: groups of layouts that were bounded as a whole, and are opened in the order of their bounds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from samestep.layout import Layout
from samestep.planning.bounds.least_memory import StageHeld
from samestep.planning.candidate_groups import CandidateGroup, WholeGroup
from samestep.program.step import StepSpec


class ScheduleGroup(NamedTuple):
    """Groups of a family that have the same schedule, of which the rules may refuse some splits of the data axis."""

    groups: tuple[CandidateGroup, ...]
    family: Layout
    """Their degrees and their schedule."""
    sized: Layout
    """Their degrees and their micro-batch, with what is computed again at least of a layout that fits."""
    is_bounded: bool = False
    """Whether their bound is that of their slowest stage."""


class Chain(NamedTuple):
    """Candidate groups that differ only in `recompute`, fastest first; the bound of the first holds for all."""

    groups: tuple[CandidateGroup, ...]
    step: StepSpec
    """The step of the first group, with an unsplit data axis."""
    stages: tuple[StageHeld, ...]
    """What its stages hold in any split."""


class CutSequence(NamedTuple):
    """All layouts of degrees that are bounded by those that cut a sequence less."""

    groups: tuple[WholeGroup]
    next: tuple[Layout, ...]
    """Degrees that bound them better, the last they themselves."""


OpenGroup = WholeGroup | CutSequence | ScheduleGroup | Chain | Layout
"""Entries of the search's queue, which is ordered by bounds."""


def schedule_of(words: Mapping[str, Any]) -> tuple[str, int]:
    """Return the schedule of layout words, with its virtual stages."""
    return words["schedule"], words.get("virtual_stages", 1)


def chunk_of(group: CandidateGroup) -> tuple[int | None, int | None]:
    """Return the chunks of the loss and of MLPs of a group."""
    return group.words["loss_chunk"], group.words["mlp_chunk"]


def groups_of(what: OpenGroup) -> tuple[CandidateGroup | WholeGroup, ...]:
    """Return the groups of layouts of an entry."""
    if isinstance(what, WholeGroup):
        return (what,)
    return (CandidateGroup.of(what),) if isinstance(what, Layout) else what.groups
