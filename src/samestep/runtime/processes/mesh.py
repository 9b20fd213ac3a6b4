"""Process groups of a layout: which ranks share one for each axis of its program. No other file creates them.

`program/ranks.py` gives the order of ranks. Axes over the same ranks share one group, so that a communicator is never
created twice. `cp` has a separate group: compute waits for its exchanges, which must not wait for gradients or weights
sent meanwhile; so have `dp`, over which batch norm takes statistics, and each link between two stages of a pipeline
(`schedules.link_of`).

[Note: collective calls]
A function is *collective* over a group of ranks (`world`, or an axis such as `tp`) if it sends something within the group, or may.
Every rank of the group must call it, in the same order as its other collective functions, and with equal arguments where they
are one thing for all: a batch, a folder, tensors of one shape. If a rank does not call it, the others wait for it until the time
limit (`run.timeout_s`); `hang_watch.py` names the rank that is missing. Some are collective in the backward too, and say so.

Groups are made once in a process, for all its runs. A plain `dp=2` needs none but the world, which torch has made. On NCCL all groups
of an axis are created by one split of the world, in which every rank takes part; gloo creates each by itself.
"""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from samestep import schedules
from samestep.errors import LayoutError
from samestep.layout import Layout
from samestep.program.program import Program
from samestep.program.ranks import Ranks
from samestep.runtime.ledger import LINK, has_own_group

# torch 2.13 renames these two; 2.11 has only the old names.
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_made: dict[tuple[str, float, tuple[tuple[int, ...], ...]], dist.ProcessGroup | None] = {}
"""Process groups of this process by name, time limit and ranks, the world among them."""
_WORLD = ("world", 0.0, ())


@dataclass(frozen=True, slots=True)
class Mesh:
    """This rank's process groups, one for each axis of the program's collectives."""

    rank: int
    ranks: Ranks
    device: torch.device
    groups: Mapping[str, dist.ProcessGroup]
    links: Mapping[str, dist.ProcessGroup]
    """The groups of messages between this stage of a pipeline and its neighbours, by the names of `schedules.links`."""
    timeout_s: float
    """Seconds that a call in any of the groups may take."""
    data_share: tuple[int, int]
    """Position of this rank among those that read other samples, and their number: what `StepBatch.shares` is asked with."""

    def __deepcopy__(self, _: object) -> Mesh:
        """Refuse a copy of what holds process groups, such as the hooks of a model's layout; without groups it is itself."""
        if not self.groups:
            return self
        raise LayoutError(
            "copy-of-model",
            "a copy of run.model was requested, and its modules communicate with other ranks. Copy it within `with run.gathered() as model:`",
        )

    def size(self, axis: str) -> int:
        """Return the number of ranks in a group of an axis."""
        return self.ranks.size(axis)

    def index(self, axis: str) -> int:
        """Return the position of this rank on an axis."""
        return self.ranks.coordinate(self.rank, axis)

    def members(self, axis: str) -> tuple[int, ...]:
        """Return the global ranks of this rank's group of an axis."""
        return self.ranks.group(self.rank, axis)

    def group_of(self, axis: str) -> str:
        """Return the name of an axis' group: its ranks, followed by the axis where it serves no other one."""
        return _join_ranks(self.members(axis)) + (f" {axis}" if has_own_group(axis) else "")


def check_world(layout: Layout) -> None:
    """Refuse a layout that does not have as many ranks as there are processes.

    Raises:
        LayoutError: it has more or fewer.
    """
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    if layout.world_size != world_size:
        raise LayoutError(
            "devices-and-ranks",
            f"layout {str(layout)!r} has {layout.world_size} ranks, but {world_size} "
            f"{'process runs' if world_size == 1 else 'processes run'}: start {layout.world_size}, as samestep.launch(main, "
            f"ranks={layout.world_size}) does, or use a layout with degrees that multiply to {world_size}, as dp={world_size}",
        )


def build(program: Program, device: torch.device, timeout_s: float) -> Mesh:
    """Make the process groups of every axis of `program`, whose calls may take `timeout_s`.

    Collective over the world, see [Note: collective calls].

    Raises:
        LayoutError: the layout does not have as many ranks as there are processes.
    """
    layout = program.step.layout
    check_world(layout)
    rank = dist.get_rank() if dist.is_initialized() else 0
    ranks = program.step.ranks
    groups: dict[str, dist.ProcessGroup] = {}
    links: dict[str, dist.ProcessGroup] = {}
    for axis in sorted(program.axes):
        name = axis if has_own_group(axis) else ""
        if (group := group_among(ranks.groups(axis), name, timeout_s)) is not None:
            groups[axis] = group
    for link, pairs in _links(program, ranks).items():
        if (group := group_among(pairs, link, timeout_s, LINK + _join_ranks(ranks.group(rank, "pp")))) is not None:
            links[link] = group
    data_share = ranks.coordinate(rank, "dp"), layout.dp
    return Mesh(rank, ranks, device, groups, links, timeout_s, data_share)


def _join_ranks(ranks: Sequence[int]) -> str:
    return ",".join(map(str, ranks))


def _links(program: Program, ranks: Ranks) -> dict[str, tuple[tuple[int, ...], ...]]:
    """Return the pairs of ranks that the links of each name connect, in all pipelines."""
    layout = program.step.layout
    if layout.pp == 1:
        return {}
    pipelines = ranks.groups("pp")
    return {
        name: tuple(
            tuple(sorted((members[first], members[second]))) for members in pipelines for first, second in pairs
        )
        for name, pairs in schedules.links(layout.pp, layout.virtual_stages).items()
    }


def group_among(
    parts: Sequence[tuple[int, ...]], name: str, timeout_s: float, description: str | None = None
) -> dist.ProcessGroup | None:
    """Return the process group of that part which has this rank; None where none has.

    No rank is in two parts. The groups are made once for all runs of a process, since each has threads or device memory.

    Collective over the world: every rank asks for the same parts in one order; if one does not, the others wait until
    the time limit.
    """
    world = dist.group.WORLD
    assert world is not None
    if _made.get(_WORLD) is not world:  # groups of a world that its user has destroyed
        forget_groups()
        _made[_WORLD] = world
    if not name and [*parts] == [tuple(range(world.size()))]:
        return world
    described, limit = description or name or None, datetime.timedelta(seconds=timeout_s)
    key = (name, timeout_s, tuple(parts))
    if dist.get_backend(world) == "nccl" and world.bound_device_id is not None:  # which a group of the user may lack
        if key not in _made:
            _made[key] = dist.split_group(
                split_ranks=[list(ranks) for ranks in parts], timeout=limit, group_desc=described
            )
        return _made[key]
    group = None
    for ranks in parts:
        key_of_ranks = (name, timeout_s, (ranks,))
        if key_of_ranks not in _made:
            _made[key_of_ranks] = dist.new_group(list(ranks), timeout=limit, group_desc=described)
        group = _made[key_of_ranks] if world.rank() in ranks else group
    return group


_num_forgotten = 0


def forget_groups() -> None:
    """Forget all groups, so that the next run creates new ones: after the world was destroyed, or a step failed
    among messages."""
    global _num_forgotten
    _made.clear()
    _num_forgotten += 1


def num_forgotten() -> int:
    """Return how often this process has forgotten its groups."""
    return _num_forgotten


def forget_as_often(most: int) -> None:
    """Forget all groups if another rank did so more often: a group is created by all of its ranks or by none."""
    global _num_forgotten
    if _num_forgotten < most:
        _made.clear()
        _num_forgotten = most
