"""Data parallelism: ranks read different samples and add up their gradients after the last micro-batch.

A bucket of gradients is reduced as soon as backward has finished its last one, so reduction hides behind the rest of
the backward (Li et al. 2020, arXiv:2006.15704, section 3.2.3). Each loss is already divided by the samples of the whole
step, so gradients are summed, never averaged. With N ranks and S bytes:

    reduce=ring           all_reduce                                       2 (N-1)/N S bytes a rank
    reduce=hierarchical   reduce_scatter in the node, all_reduce between nodes, all_gather in the node
    reduce=root           reduce to one rank, then broadcast: the naive way, N-1 times S through one link

Where the gradients are sharded already (zero >= 1) what is left to do is an all_reduce of the shards over
`dp_replicate`. One all_reduce of a few scalars ends the step: loss, count, gradient norm and stop flag.
"""

from __future__ import annotations

from dataclasses import replace

from samestep.program import (
    STEP_SCALARS,
    Bucket,
    Kind,
    Op,
    Ops,
    Program,
    Step,
    bucket_ops,
    ends_step,
    is_backward,
    is_forward,
    make_buckets,
)

AXIS = "dp_replicate"


def refusal(step: Step) -> str | None:
    """Refuse ways of reduction that this layout has no use for, and samples that influence each other."""
    layout = step.layout
    if layout.reduce != "ring" and step.zero > 0:
        return f"reduce={layout.reduce} reduces whole gradients: use it with zero=0, not zero={layout.zero}"
    if layout.reduce == "hierarchical" and layout.dp % step.ranks_per_node:
        return (
            f"reduce=hierarchical needs whole nodes: {layout.dp} ranks are no multiple of "
            f"{step.ranks_per_node} ranks per node"
        )
    if step.model.coupled_modules and step.global_batch > step.microbatch_samples:
        return (
            f"{step.model.coupled_modules[0]} lets samples influence each other (batch norm), so the result would "
            f"change with the layout: only one rank with microbatch={step.global_batch} computes it"
        )
    return None


def apply(program: Program) -> Program:
    """Write the reductions over `dp_replicate` and the step's scalars."""
    step = program.step
    layout = step.layout
    axes = dict(program.axes)
    buckets = program.buckets
    if layout.dp_replicate > 1:
        axes |= _axes(step)
    if step.zero == 0 and (layout.dp > 1 or step.compute_dtype != step.master_dtype):
        buckets = make_buckets(step)  # on one rank too, mixed precision adds gradients up in float32 buffers

    def rewrite(key: str, ops: Ops) -> Ops:
        if is_backward(key) and ends_step(key) and layout.dp_replicate > 1:
            if step.zero == 0:
                return bucket_ops(ops, step, buckets, lambda b, numel: _reductions(step, b, numel))
            return _reduce_shards(ops, step)
        if is_forward(key) or is_backward(key) or layout.world_size == 1:
            return ops
        return _agreed(ops, program)

    if layout.world_size > 1:
        axes["world"] = layout.world_size
    return replace(program, buckets=buckets).with_bodies(rewrite, axes=axes)


def _axes(step: Step) -> dict[str, int]:
    if step.layout.reduce != "hierarchical":
        return {AXIS: step.layout.dp_replicate}
    nodes = step.layout.dp // step.ranks_per_node
    return {name: size for name, size in (("dp_intra", step.ranks_per_node), ("dp_inter", nodes)) if size > 1}


def _reductions(step: Step, bucket: Bucket, numel: int) -> tuple[Op, ...]:
    """The ops that leave the sum of a bucket on every rank."""

    def op(kind: Kind, axis: str, numel: int) -> Op:
        return Op(kind=kind, owner=bucket.name, axis=axis, dtype=step.master_dtype).sized(numel)

    if step.layout.reduce == "ring":
        return (op(Kind.ALL_REDUCE, AXIS, numel),)
    if step.layout.reduce == "root":
        return (op(Kind.REDUCE, AXIS, numel), op(Kind.BROADCAST, AXIS, numel))
    axes = _axes(step)
    inside = axes.get("dp_intra", 1)
    between = (op(Kind.ALL_REDUCE, "dp_inter", numel // inside),) if "dp_inter" in axes else ()
    if inside == 1:
        return between
    return (op(Kind.REDUCE_SCATTER, "dp_intra", numel), *between, op(Kind.ALL_GATHER, "dp_intra", numel))


def _reduce_shards(ops: Ops, step: Step) -> Ops:
    """Reduce each shard over the replicas: units at once, as FSDP2 does, buckets at the end (see `bucket_ops`)."""
    written: list[Op] = []
    rest: list[Op] = []
    for op in ops:
        written.append(op)
        if op.kind is Kind.REDUCE_SCATTER:
            size = op.size_bytes // step.layout.dp_shard
            reduction = replace(op, kind=Kind.ALL_REDUCE, axis=AXIS, size_bytes=size, after=(op.name,))
            (written if op.implied else rest).append(reduction)
    return (*written, *rest)


def _agreed(ops: Ops, program: Program) -> Ops:
    """Put the step's scalars before the update, behind every reduction of the step."""
    scalars = Op(kind=Kind.ALL_REDUCE, owner="scalars", axis="world", dtype="float64").sized(len(STEP_SCALARS))
    return tuple(
        part
        for op in ops
        for part in ((scalars, replace(op, after=(*op.after, scalars.name))) if op.kind is Kind.UPDATE else (op,))
    )
