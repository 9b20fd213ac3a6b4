"""Process groups of a layout: the only file that makes them.

Ranks count through the axes like digits, the innermost axis fastest: `dp_replicate`, then `dp_shard`.

```
dp_replicate=2 dp_shard=2      rank 0 (0,0)   1 (0,1)   2 (1,0)   3 (1,1)
    dp_shard groups            {0 1} {2 3}            dp_replicate groups   {0 2} {1 3}
```
Axes that run over the same ranks share one group, so a communicator is never made twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from samestep.errors import LayoutError
from samestep.program import Program


@dataclass(frozen=True, slots=True)
class Mesh:
    """This rank's groups, one for each axis the program sends over."""

    rank: int
    world_size: int
    device: torch.device
    dp_replicate: int
    dp_shard: int
    groups: Mapping[str, dist.ProcessGroup]
    ranks: Mapping[str, tuple[int, ...]]
    """Global ranks of this rank's group of each axis."""

    @property
    def shard_index(self) -> int:
        """Position on `dp_shard`."""
        return self.rank % self.dp_shard

    @property
    def dp_index(self) -> int:
        """Position among all ranks that read different samples."""
        return self.rank

    def group_of(self, axis: str) -> str:
        """Name the group that serves an axis by its ranks."""
        return ",".join(map(str, self.ranks[axis]))

    def for_shards(self) -> DeviceMesh:
        """The mesh that FSDP2 shards over: one axis, or two where shards are replicated."""
        axes = ["dp_replicate", "dp_shard"] if self.dp_replicate > 1 else ["dp_shard"]
        positions = torch.arange(self.world_size).view(*(getattr(self, axis) for axis in axes))
        groups = [self.groups[axis] for axis in axes]
        return DeviceMesh.from_group(
            groups if len(groups) > 1 else groups[0], self.device.type, mesh=positions, mesh_dim_names=tuple(axes)
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
    groups: dict[str, dist.ProcessGroup] = {}
    mine: dict[str, tuple[int, ...]] = {}
    made: dict[tuple[int, ...], dist.ProcessGroup] = {}
    if dist.group.WORLD is not None:
        made[tuple(range(world_size))] = dist.group.WORLD
    for axis in sorted(program.axes):
        for ranks in _groups_of(axis, program, world_size):
            if ranks not in made:
                made[ranks] = dist.new_group(list(ranks))  # every rank makes every group, in one order
            if rank in ranks:
                groups[axis], mine[axis] = made[ranks], ranks
    return Mesh(
        rank=rank,
        world_size=world_size,
        device=device,
        dp_replicate=layout.dp_replicate,
        dp_shard=layout.dp_shard,
        groups=groups,
        ranks=mine,
    )


def _groups_of(axis: str, program: Program, world_size: int) -> Iterable[tuple[int, ...]]:
    """Ranks of every group of an axis."""
    everyone = torch.arange(world_size)
    shards, nodes = program.step.layout.dp_shard, program.step.ranks_per_node
    grids = {
        "world": everyone.view(1, -1),
        "dp_shard": everyone.view(-1, shards),
        "dp_replicate": everyone.view(-1, shards).t(),
        "dp_intra": everyone.view(-1, min(nodes, world_size)),
        "dp_inter": everyone.view(-1, min(nodes, world_size)).t(),
    }
    return [tuple(group) for group in grids[axis].tolist()]
