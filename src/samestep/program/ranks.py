"""The order of ranks: the coordinate of each rank on each axis, and the ranks of each group. No torch.

A rank is a number whose digits are its coordinates; the last axis changes fastest. The same world is read in several
ways, because an axis that is one for one purpose is divided for another:

```
pp  dp_replicate  dp_shard         tp     replicas and shards of weights; one of the two includes the ranks of `cp`
pp  dp                      cp     model  ranks with other samples, and with other tokens of the same samples
pp  dp_cp                          model  all ranks whose gradients of one weight are summed
pp  dp_outer  dp_expert     ep     model  the innermost data axis divided by `ep`: neighbours hold different experts
pp  dp_inter  dp_intra             model  nodes, and the data ranks within a node
pp  dp        cp_ring2  cp_heads2  model  groups of 2 ranks of `cp`, and the ranks within one; so for each divisor
```
`tp` stands for all model axes that the layout declares; together they are `model`, the ranks that work on the same tokens.
An axis is a size and a stride, the distance between neighbours; the rest follows: coordinate = rank // stride % size.
The pipeline stages that share a weight are an axis too, a *tie*, which is named by its stages: `tie_of((0, 3))`.

>>> ranks = Ranks.of(Layout("dp_replicate=2 dp_shard=2"))
>>> ranks.groups("dp_shard"), ranks.groups("dp_replicate")
(((0, 1), (2, 3)), ((0, 2), (1, 3)))
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from samestep.layout import Layout


class Axis(NamedTuple):
    """Number of ranks in a group of an axis, and the distance between neighbours in it, in ranks."""

    size: int
    stride: int


@dataclass(frozen=True, slots=True)
class Ranks:
    """The axes of a layout, from which coordinates and groups of every rank follow."""

    world_size: int
    axes: Mapping[str, Axis]

    @classmethod
    def of(cls, layout: Layout, ranks_per_node: int | None = None) -> Ranks:
        """Return the axes of a layout; `dp_inter` and `dp_intra` are among them if its data ranks fill whole nodes."""
        per_node = data_ranks_per_node(layout, ranks_per_node or layout.world_size)
        inner = tuple(reversed(layout.model_axes.items()))
        return _ranks_of(
            layout.pp, layout.num_replicas, layout.num_shards, layout.dp, layout.cp, layout.ep, inner, per_node
        )

    def size(self, axis: str) -> int:
        """Return the number of ranks in a group of an axis."""
        return len(stages_of(axis)) or self.axes[axis].size

    def stride(self, axis: str) -> int:
        """Return the distance between two neighbours on an axis, in ranks; on a tie the largest one."""
        if stages := stages_of(axis):
            return max(after - first for first, after in itertools.pairwise(stages)) * self.axes["pp"].stride
        return self.axes[axis].stride

    def coordinate(self, rank: int, axis: str) -> int:
        """Return the position of a rank on an axis, counted from 0."""
        if stages := stages_of(axis):
            return stages.index(self.coordinate(rank, "pp"))
        size, stride = self.axes[axis]
        return rank // stride % size

    def group(self, rank: int, axis: str) -> tuple[int, ...]:
        """Return the ranks that differ from a rank only in its coordinate on an axis, itself included."""
        if stages := stages_of(axis):
            pipeline = self.group(rank, "pp")
            return tuple(pipeline[stage] for stage in stages)
        size, stride = self.axes[axis]
        first = rank - rank // stride % size * stride
        return tuple(range(first, first + size * stride, stride))

    def groups(self, axis: str) -> tuple[tuple[int, ...], ...]:
        """Return all groups of an axis in the order of their first ranks; a tie has no ranks of other stages."""
        if stages := stages_of(axis):
            return tuple(tuple(pipeline[stage] for stage in stages) for pipeline in self.groups("pp"))
        size, stride = self.axes[axis]
        last = self.world_size - (size - 1) * stride
        return tuple(self.group(rank, axis) for rank in range(last) if self.coordinate(rank, axis) == 0)


_TIE = "tie"


def tie_of(stages: Iterable[int]) -> str:
    """Return the axis of the pipeline stages that share a weight."""
    return "-".join((_TIE, *map(str, stages)))


@functools.cache
def stages_of(axis: str) -> tuple[int, ...]:
    """Return the pipeline stages of a tie; nothing of any other axis."""
    name, *stages = axis.split("-")
    return tuple(map(int, stages)) if name == _TIE else ()


def data_ranks_per_node(layout: Layout, ranks_per_node: int) -> int:
    """Return the number of ranks of one node whose gradients of one weight are summed."""
    return max(1, ranks_per_node // layout.model_ranks)


@functools.lru_cache(maxsize=2**12)
def _ranks_of(
    pp: int,
    replicas: int,
    shards: int,
    dp: int,
    cp: int,
    ep: int,
    inner: tuple[tuple[str, int], ...],
    data_ranks_per_node: int,
) -> Ranks:
    dp_cp = replicas * shards
    innermost = shards if shards > 1 else replicas
    model_axes = dict(inner)
    model = math.prod(model_axes.values())
    orders = (
        {"pp": pp, "dp_replicate": replicas, "dp_shard": shards, **model_axes},
        {"pp": pp, "dp": dp, "cp": cp, "model": model},
        {"pp": pp, "dp_cp": dp_cp, "model": model},
        {"pp": pp, "dp_outer": dp_cp // innermost, "dp_expert": innermost // ep, "ep": ep, "model": model},
        {"pp": pp, "dp_inter": dp_cp // data_ranks_per_node, "dp_intra": data_ranks_per_node, "model": model},
    )
    world_size = pp * dp_cp * model
    axes = {"world": Axis(world_size, 1)}
    for order in orders:
        if math.prod(order.values()) == world_size:  # not so where nodes are not filled, or a degree will be refused
            axes |= _strides(order)
    for part in (part for part in range(2, cp) if cp % part == 0):
        axes |= _strides({"pp": pp, "dp": dp, f"cp_ring{part}": cp // part, f"cp_heads{part}": part, "model": model})
    return Ranks(world_size, axes)


def _strides(sizes: dict[str, int]) -> dict[str, Axis]:
    """Return the axes of one order, outermost first; the stride of an axis is the product of the sizes after it."""
    axes: dict[str, Axis] = {}
    stride = 1
    for name, size in reversed(sizes.items()):
        axes[name] = Axis(size, stride)
        stride *= size
    return axes
