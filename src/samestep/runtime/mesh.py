"""Process groups of a layout: the only file that makes them.

Ranks count through the axes like digits, the innermost axis fastest: `pp`, `dp_replicate`, `dp_shard`, `cp`, `tp`.

```
dp_replicate=2 dp_shard=2      rank 0 (0,0)   1 (0,1)   2 (1,0)   3 (1,1)
    dp_shard groups            {0 1} {2 3}            dp_replicate groups   {0 2} {1 3}
```
`ep` and `dp_expert` are two digits of the innermost data axis: neighbours hold different experts, ranks `ep` apart the same.
Ranks of `cp` hold equal weights, so gradients are summed over them too: the groups of `dp_shard` take them in, or where
nothing is sharded those of `dp_replicate`. Axes that run over the same ranks share one group, so a communicator is never made
twice; but `cp`, whose exchanges compute waits for, has its own, and waits for no gradient or weight that is sent meanwhile.
So has each link of `pp` but the first.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from samestep.errors import LayoutError
from samestep.layout import Layout
from samestep.program import Program
from samestep.runtime.record import OWN_GROUPS

# torch 2.13 renames these two; 2.11 has only the old names.
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


@dataclass(frozen=True, slots=True)
class Mesh:
    """This rank's groups, one for each axis the program sends over."""

    rank: int
    world_size: int
    device: torch.device
    dp_replicate: int
    """Ranks in a group of that axis, as of the next."""
    dp_shard: int
    cp: int
    tp: int
    pp: int
    groups: Mapping[str, dist.ProcessGroup]
    ranks: Mapping[str, tuple[int, ...]]
    """Global ranks of this rank's group of each axis."""
    ep: int = 1

    @property
    def shard_index(self) -> int:
        """Position in the group of `dp_shard`."""
        return self.rank // self.tp % self.dp_shard

    @property
    def dp_index(self) -> int:
        """Position among all ranks that read different samples."""
        return self.summed_index // self.cp

    @property
    def summed_index(self) -> int:
        """Position among all ranks whose gradients of one weight are summed."""
        return self.rank // self.tp % (self.dp_replicate * self.dp_shard)

    @property
    def cp_index(self) -> int:
        """Position on `cp`."""
        return self.summed_index % self.cp

    @property
    def tp_index(self) -> int:
        """Position on `tp`."""
        return self.rank % self.tp

    @property
    def ep_index(self) -> int:
        """Position on `ep`, whose ranks are neighbours on the innermost data axis."""
        return self.summed_index % self.ep

    def group_of(self, axis: str) -> str:
        """Name the group that serves an axis by its ranks, and one that serves no other by the axis too."""
        return ",".join(map(str, self.ranks[axis])) + (f" {axis}" if axis in OWN_GROUPS else "")

    def for_shards(self, axis: str) -> DeviceMesh:
        """The mesh that FSDP2 shards over: `dp_shard` or `dp_expert`, and before it replicas where there are any."""
        axes = ["dp_replicate", axis] if self.dp_replicate > 1 else [axis]
        ep, index = (self.ep, self.ep_index) if axis == "dp_expert" else (1, 0)
        everyone = torch.arange(self.world_size).view(self.pp, self.dp_replicate, self.dp_shard // ep, ep, self.tp)
        positions = everyone[stage_of(self.rank, self.world_size, self.pp), ..., index, self.tp_index]
        positions = positions if len(axes) > 1 else positions[0]
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
    for axis in sorted({*program.axes, *_links(program)}):
        for ranks in _groups_of(axis, program, world_size):
            group = group_over(ranks, axis if axis in (*OWN_GROUPS, *_LINKS) else "")
            if rank in ranks:
                groups[axis], mine[axis] = group, ranks
    return Mesh(
        rank=rank,
        world_size=world_size,
        device=device,
        dp_replicate=layout.num_replicas,
        dp_shard=layout.num_shards,
        cp=layout.cp,
        tp=layout.tp,
        pp=layout.pp,
        groups=groups,
        ranks=mine,
        ep=layout.ep,
    )


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


def _groups_of(axis: str, program: Program, world_size: int) -> Iterable[tuple[int, ...]]:
    """Ranks of every group of an axis: they differ in its digit alone."""
    step = program.step
    layout = step.layout
    if axis == "world":
        return [tuple(range(world_size))]
    if axis == "tie":
        stages = torch.arange(world_size).view(layout.pp, -1)
        return [tuple(pair) for pair in stages[[0, -1]].t().tolist()]
    if axis in ("dp_intra", "dp_inter"):
        digits = {
            "pp": layout.pp,
            "dp_inter": layout.num_summed // step.dp_per_node,
            "dp_intra": step.dp_per_node,
            "tp": layout.tp,
        }
    elif axis in _LINKS:
        return _groups_of("pp", program, world_size)
    elif axis == "cp":
        digits = {"pp": layout.pp, "dp": layout.dp, "cp": layout.cp, "tp": layout.tp}
    elif axis in ("ep", "dp_expert"):
        digits = {
            "pp": layout.pp,
            "dp_outer": layout.num_summed // step.innermost_data_ranks,
            "dp_expert": step.innermost_data_ranks // layout.ep,
            "ep": layout.ep,
            "tp": layout.tp,
        }
    else:
        digits = {
            "pp": layout.pp,
            "dp_replicate": layout.num_replicas,
            "dp_shard": layout.num_shards,
            "tp": layout.tp,
        }
    ranks = torch.arange(world_size).view(*digits.values()).movedim(list(digits).index(axis), -1)
    return [tuple(group) for group in ranks.reshape(-1, digits[axis]).tolist()]


_LINKS = ("pp backward", "pp around", "pp backward around")
"""Ways of messages between stages beside `pp` itself, which is forward."""


def link_name(*, is_forward: bool, is_around: bool) -> str:
    """Name the group for messages of activations, or of gradients, to a neighbour or around the end of the axis."""
    return "pp" + ("" if is_forward else " backward") + (" around" if is_around else "")


def _links(program: Program) -> tuple[str, ...]:
    layout = program.step.layout
    return () if layout.pp == 1 else _LINKS[:1] if layout.virtual_stages == 1 else _LINKS


def replica_of(rank: int, layout: Layout) -> int:
    """Position of a rank among those that read different samples."""
    return rank // (layout.tp * layout.cp) % layout.dp


def stage_of(rank: int, world_size: int, num_stages: int) -> int:
    """Position of a rank on `pp`, the outermost axis."""
    return rank // (world_size // num_stages)
