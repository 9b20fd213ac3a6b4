"""Process groups of a layout: the only file that makes them.

The order of ranks is `samestep.ranks`'. Axes that run over the same ranks share one group, so a communicator is never made
twice; but `cp`, whose exchanges compute waits for, has its own, and waits for no gradient or weight that is sent meanwhile.
So has each link of `pp` but the first.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from samestep.errors import LayoutError
from samestep.program.program import Program
from samestep.program.ranks import LINKS, Ranks
from samestep.runtime.ledger import OWN_GROUPS

# torch 2.13 renames these two; 2.11 has only the old names.
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


@dataclass(frozen=True, slots=True)
class Mesh:
    """This rank's groups, one for each axis the program sends over."""

    rank: int
    ranks: Ranks
    device: torch.device
    groups: Mapping[str, dist.ProcessGroup]

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
        """Name the group that serves an axis by its ranks, and one that serves no other by the axis too."""
        return ",".join(map(str, self.members(axis))) + (f" {axis}" if axis in OWN_GROUPS else "")

    def for_shards(self, axis: str) -> DeviceMesh:
        """The mesh that FSDP2 shards over: `dp_shard` or `dp_expert`, and before it replicas where there are any."""
        rows = [self.ranks.group(rank, axis) for rank in self.members("dp_replicate")]
        axes, positions = (["dp_replicate", axis], rows) if len(rows) > 1 else ([axis], rows[0])
        groups = [self.groups[axis] for axis in axes]
        return DeviceMesh.from_group(
            groups if len(groups) > 1 else groups[0],
            self.device.type,
            mesh=torch.tensor(positions),
            mesh_dim_names=tuple(axes),
        )


def build(program: Program, device: torch.device) -> Mesh:
    """Make the groups of every axis of `program`. Collective over the world: each rank must call it.

    Raises:
        LayoutError: the layout does not have as many ranks as there are processes.
    """
    layout = program.step.layout
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    rank = dist.get_rank() if dist.is_initialized() else 0
    if layout.world_size != world_size:
        raise LayoutError(
            f"layout {str(layout)!r} has {layout.world_size} ranks, but {world_size} "
            f"{'process runs' if world_size == 1 else 'processes run'}: start {layout.world_size}, "
            f"or use a layout whose degrees multiply to {world_size}, as dp={world_size}"
        )
    ranks = program.step.ranks
    groups: dict[str, dist.ProcessGroup] = {}
    for axis in sorted({*program.axes, *_links(program)}):
        for members in ranks.groups(axis):
            group = group_over(members, axis if axis in (*OWN_GROUPS, *LINKS) else "")
            if rank in members:
                groups[axis] = group
    return Mesh(rank, ranks, device, groups)


def gather_objects(mine: Any, world_size: int) -> list[Any]:
    """Return what every rank gives, by rank. Collective over the world: if a rank does not call it, the others wait."""
    if world_size == 1:
        return [mine]
    given: list[Any] = [None] * world_size
    dist.all_gather_object(given, mine)
    return given


_made: dict[tuple[str, tuple[int, ...]], dist.ProcessGroup] = {}
"""Groups of this process by name and ranks, the world among them."""
_WORLD = ("world", ())


def group_over(ranks: tuple[int, ...], name: str = "") -> dist.ProcessGroup:
    """Return the group of some ranks, made once for all runs of a process: each has threads that never sleep for long.

    Collective over the world: every rank asks for all groups, also those of others, in one order.
    """
    world = dist.group.WORLD
    assert world is not None
    if _made.get(_WORLD) is not world:  # those of a world that its user left
        forget_groups()
        _made[_WORLD] = _made["", tuple(range(world.size()))] = world
    key = (name, ranks)
    if key not in _made:
        _made[key] = dist.new_group(list(ranks), group_desc=name or None)
    return _made[key]


def forget_groups() -> None:
    """Let go of all groups, after the world was left: their threads end with them."""
    _made.clear()


def link_name(*, is_forward: bool, is_around: bool) -> str:
    """Name the group for messages of activations, or of gradients, to a neighbour or around the end of the axis."""
    return "pp" + ("" if is_forward else " backward") + (" around" if is_around else "")


def _links(program: Program) -> tuple[str, ...]:
    layout = program.step.layout
    return () if layout.pp == 1 else LINKS[:1] if layout.virtual_stages == 1 else LINKS
