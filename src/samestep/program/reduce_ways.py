"""The ways of summing gradients over replicas, by the layout's word `reduce`. No torch.

With N ranks and S bytes:

    reduce=ring           all_reduce                                       2 (N-1)/N S bytes a rank
    reduce=hierarchical   reduce_scatter in the node, all_reduce between nodes, all_gather in the node
    reduce=root           reduce to one rank, then broadcast: the naive way, N-1 times S through one link
"""

from __future__ import annotations

from collections.abc import Callable

from samestep.program.holding import REPLICAS
from samestep.program.ops import Op, OpKind
from samestep.program.ranks import data_ranks_per_node
from samestep.program.step import StepSpec


def refusal(step: StepSpec) -> str | None:
    """Return why a layout cannot reduce as asked."""
    layout = step.layout
    if layout.reduce != "ring" and step.zero > 0:
        return f"reduce={layout.reduce} reduces whole gradients: use it with zero=0, not zero={layout.zero}; reduce=ring works"
    leaves_node = step.ranks_per_node % layout.model_ranks > 0
    if layout.reduce == "hierarchical" and (layout.dp_cp_size % _per_node(step) or leaves_node):
        return (
            f"reduce=hierarchical needs whole nodes: {layout.world_size} ranks are no multiple of "
            f"{step.ranks_per_node} ranks per node, or tp={layout.tp} leaves the node"
        )
    return None


def axes(step: StepSpec) -> dict[str, int]:
    """Return the number of ranks of each axis over which replicas are reduced."""
    if step.layout.reduce != "hierarchical":
        return {REPLICAS: step.layout.num_replicas}
    inside = _per_node(step)
    sizes = ("dp_intra", inside), ("dp_inter", step.layout.dp_cp_size // inside)
    return {name: size for name, size in sizes if size > 1}


def over_replicas(
    step: StepSpec, numel: int, op: Callable[[OpKind, str, int], Op], axis: str, ranks: int
) -> tuple[Op, ...]:
    """Return the collectives that sum `numel` elements over an axis of so many ranks."""
    if ranks == 1:
        return ()
    if step.layout.reduce == "ring":
        return (op(OpKind.ALL_REDUCE, axis, numel),)
    if step.layout.reduce == "root":
        return (op(OpKind.REDUCE, axis, numel), op(OpKind.BROADCAST, axis, numel))
    sizes = axes(step)
    inside = sizes.get("dp_intra", 1)
    between = (op(OpKind.ALL_REDUCE, "dp_inter", numel // inside),) if "dp_inter" in sizes else ()
    if inside == 1:
        return between
    return (op(OpKind.REDUCE_SCATTER, "dp_intra", numel), *between, op(OpKind.ALL_GATHER, "dp_intra", numel))


def _per_node(step: StepSpec) -> int:
    """Return the number of ranks of one node whose gradients of one weight are summed."""
    return data_ranks_per_node(step.layout, step.ranks_per_node)
