"""The layouts that fell out of a search, in groups, and the words for why they did."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from samestep.hardware import Hardware
from samestep.job import Job
from samestep.layout import Layout
from samestep.output.byte_sizes import gib
from samestep.planning.bounds.least_memory import Need
from samestep.planning.candidate_groups import CandidateGroup, WholeGroup


@dataclass(frozen=True, slots=True)
class Rejection:
    """A layout that fell out, with the rule and the reason."""

    layout: Layout
    rule: str
    """refused, memory, slower, or unplayed (the search ended first)."""
    reason: str


class Fallen(NamedTuple):
    """Groups of layouts that fell out by one rule, and why."""

    groups: tuple[CandidateGroup | WholeGroup, ...]
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
    too_large = [one for one in fallen if one.rule == "memory"]
    if not too_large:
        return "no layout of these devices is legal"
    near = min(too_large, key=lambda one: one.needed_bytes)
    return f'nothing fits; "{next(near.layouts())}" comes nearest: {near.reason}'
