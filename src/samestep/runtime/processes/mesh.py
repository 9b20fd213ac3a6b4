"""Process groups of a layout: the only file that makes them.

`program/ranks.py` gives the order of ranks. Axes over the same ranks share one group, so that a communicator is never
made twice. `cp` has a group of its own: compute waits for its exchanges, which must not wait for gradients or weights
sent meanwhile. So has each link of `pp` but the first.
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
    """This rank's process groups, one for each axis of the program's collectives."""

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
        """Return the name of an axis' group: its ranks, followed by the axis where it serves no other one."""
        return ",".join(map(str, self.members(axis))) + (f" {axis}" if axis in OWN_GROUPS else "")

    def for_shards(self, axis: str) -> DeviceMesh:
        """Return the mesh that FSDP2 shards over: `dp_shard` or `dp_expert`, after `dp_replicate` if there is one."""
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
    """Make the process groups of every axis of `program`.

    Collective over the world: every rank calls it; if one does not, the others wait until the time limit.

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
    """Return the objects that all ranks pass, in the order of ranks.

    Collective over the world: every rank calls it; if one does not, the others wait until the time limit.
    """
    if world_size == 1:
        return [mine]
    given: list[Any] = [None] * world_size
    dist.all_gather_object(given, mine)
    return given


_made: dict[tuple[str, tuple[int, ...]], dist.ProcessGroup] = {}
"""Process groups of this process by name and ranks, the world among them."""
_WORLD = ("world", ())


def group_over(ranks: tuple[int, ...], name: str = "") -> dist.ProcessGroup:
    """Return the process group of some ranks, made once for all runs of a process, since it has threads.

    Collective over the world: every rank asks for all groups, also those of others, in one order; if one does not, the
    others wait until the time limit.
    """
    world = dist.group.WORLD
    assert world is not None
    if _made.get(_WORLD) is not world:  # groups of a world that its user has destroyed
        forget_groups()
        _made[_WORLD] = _made["", tuple(range(world.size()))] = world
    key = (name, ranks)
    if key not in _made:
        _made[key] = dist.new_group(list(ranks), group_desc=name or None)
    return _made[key]


def forget_groups() -> None:
    """Forget all groups, after the world was destroyed; their threads end with them."""
    _made.clear()


def link_name(*, is_forward: bool, is_around: bool) -> str:
    """Return the name of the link for activations, or for gradients, to a neighbour or around the end of the axis."""
    return "pp" + ("" if is_forward else " backward") + (" around" if is_around else "")


def _links(program: Program) -> tuple[str, ...]:
    layout = program.step.layout
    return () if layout.pp == 1 else LINKS[:1] if layout.virtual_stages == 1 else LINKS
