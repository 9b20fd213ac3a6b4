"""Data parallelism: ranks read different samples and sum their gradients once, after the last micro-batch.

A bucket of gradients is reduced as soon as backward has finished its last gradient, so that reduction overlaps with the
rest of backward (Li et al. 2020, arXiv:2006.15704, section 3.2.3); on a stage of a pipeline it starts once the gradient of
the input is sent, with the backward of the stages before, so that stages never reduce one after the other. Each loss is already divided by the tokens or
samples that the whole step counts, so gradients are summed, never averaged. With N ranks and S bytes:

    reduce=ring           all_reduce                                       2 (N-1)/N S bytes a rank
    reduce=hierarchical   reduce_scatter in the node, all_reduce between nodes, all_gather in the node
    reduce=root           reduce to one rank, then broadcast: the naive way, N-1 times S through one link

Under zero=1 a bucket is first reduce_scattered over `dp_shard`, the rank updates its chunk of it, and the weights are
all_gathered after the update: together the bytes of one all_reduce. If ZeRO has sharded the gradients (zero >= 1), an
all_reduce of the shards over `dp_replicate` remains. Gradients that are still partial over `tp`, of weights that tensor
parallelism replicates but uses on a part of the activations, are then summed over `tp`, once a step. One all_reduce of a
few scalars ends the step: loss, count, gradient norm and flags.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

from samestep.errors import LayoutError, module_name
from samestep.program.buckets import (
    Bucket,
    Reduction,
    coded_reductions,
    finish_reductions,
    make_buckets,
    start_reductions,
)
from samestep.program.codecs import PLAIN
from samestep.program.holding import REPLICAS
from samestep.program.ops import REDUCING, UPDATE_BODY, BodyKey, Op, OpKind, Ops, is_backward
from samestep.program.program import Program
from samestep.program.ranks import data_ranks_per_node
from samestep.program.step import StepSpec
from samestep.program.units import Unit, padded_rows, partial_sizes

AXIS = REPLICAS


def refusal(step: StepSpec) -> LayoutError | None:
    """Return why the layout cannot reduce as asked, or where samples that it reads in several parts influence each other."""
    is_split = step.global_batch > step.microbatch_samples
    return _refusal_of_way(step) or (_refusal_of_mixed_samples(step) if is_split else None)


def _refusal_of_mixed_samples(step: StepSpec) -> LayoutError | None:
    model = step.model
    works = f"so the result would change with the layout. Use one rank with microbatch={step.global_batch}"
    owners = model.batch_norm_owners  # whose statistics are those of groups (`strategies/batch_norm.py`)
    if other := next((path for path in model.coupled_modules if path not in owners), ""):
        return LayoutError(
            "samples-mixed",
            f"{module_name(other)} lets samples influence each other or keeps statistics of them, {works}",
        )
    if model.mixes_samples and "samples" not in step.allow:
        where, _, operation = model.mixes_samples.rpartition(" by ")
        or_loss = "or a loss function (outputs, batch) that computes it from the logits, " * operation.startswith(
            "nll_loss"
        )
        return LayoutError(
            "samples-mixed",
            f"{module_name(where)} lets the samples of a batch influence each other by {operation}, {works}, {or_loss}"
            'or set run.allow = ["samples"] to skip this check',
        )
    if (unclear := next((mask for mask in model.masks if mask.rows is None), None)) is not None:
        where = unclear.owner or model.name
        return LayoutError(
            "samples-mixed", f"{where} draws {unclear.name} for a tensor without a dimension of samples, {works}"
        )
    return None


def apply(program: Program) -> Program:
    """Return the program with the reductions over `dp_replicate`, tied stages and `tp`, and the step's scalars."""
    step = program.step
    are_tied = any(step.holding(param).tied_over for param in step.model.params)
    are_partial = any(step.holding(param).partial_over for param in step.model.params if param.trainable)
    program = _with_buckets(program, sums=step.layout.dp_cp_size > 1 or are_tied or are_partial)
    known: dict[str, Ops] = {}

    def reduction(bucket: Bucket) -> Ops:
        """Return the collectives of a bucket, which the bodies of all positions share."""
        return known.get(bucket.name) or known.setdefault(bucket.name, _reductions(step, bucket))

    program = program.with_bodies(lambda key, ops: _add_reductions(key, ops, program, reduction))
    if are_tied and program.units:  # over the stages that share a weight, before all else of the update
        ties = tuple(_reduce_tied_units(step, program.units))
        program = program.with_update(lambda ops: (*ties, *ops))
    if are_partial:  # over a model axis, after all other reductions
        parts = tuple(_partial_sums(program, program.buckets if step.contributions is None else ()))
        program = program.with_update(lambda ops: _before_update(ops, parts))
    return _sum_scalars(program) if step.layout.world_size > 1 else program


def _with_buckets(program: Program, *, sums: bool) -> Program:
    """Return the program with the buckets of its gradients, which it `sums` or not, and the axes over which they are summed."""
    step, contributions = program.step, program.step.contributions
    if contributions is not None:
        axes = {contributions.axis: contributions.ranks}
    else:
        axes = _axes_of_way(step) if step.layout.num_replicas > 1 else {}
    # Mixed precision and codecs need their buffers on one rank too.
    has_buckets = step.zero == 1 or (step.zero == 0 and (sums or step.is_mixed or contributions is not None))
    buckets = make_buckets(step, program.chunks) if has_buckets else ()
    return replace(program, buckets=buckets, axes={**program.axes, **axes})


def _sum_scalars(program: Program) -> Program:
    """Return the program with the all_reduce of the step's scalars before the update, which waits for it.

    It waits for every reduction, because the gradient norm is that of the reduced gradients.
    """
    step, waits = program.step, tuple(_reductions_of(program))
    scalars = Op(kind=OpKind.ALL_REDUCE, owner="scalars", axis="world", dtype="float64", after=waits)

    def write(ops: Ops) -> Ops:
        return tuple(
            op.but(after=(*op.after, scalars.name)) if op.kind is OpKind.UPDATE else op
            for op in _before_update(ops, (scalars.sized(step.num_scalars),))
        )

    return program.with_update(write, axes={**program.axes, "world": step.layout.world_size})


def _add_reductions(key: BodyKey, ops: Ops, program: Program, reduction: Reduction) -> Ops:
    """Return the ops of a body with the reductions of the gradients that the step's last backward leaves."""
    step, units, buckets = program.step, program.units, program.buckets
    if units and is_backward(key):
        is_last = step.ends_gradients(key)
        if not is_last and all(unit.num_shards > 1 for unit in units):
            return ops
        return tuple(_reduce_units(ops, step, {unit.name: unit for unit in units}, is_last=is_last))
    if step.ends_gradients(key):
        # A bucket that no two ranks of a replica share is sent over another axis, and waits for none of the others.
        for is_cut in (True, False):
            alike = tuple(bucket for bucket in buckets if (bucket.holding.num_shards > 1) == is_cut)
            ops = start_reductions(ops, step, alike, reduction) if alike else ops
        return ops
    if key != UPDATE_BODY:
        return ops
    return (*finish_reductions(step, program.chunks, buckets, reduction), *ops, *_gather_weights(buckets))


def _gather_weights(buckets: tuple[Bucket, ...]) -> Iterator[Op]:
    """Yield the all_gathers of zero=1, which give every rank the chunks that the others have updated.

    The next forward needs those of its first layers first, which backward has finished last.
    """
    after = (f"{OpKind.UPDATE}:optimizer",)
    for bucket in reversed(buckets):
        if bucket.holding.num_shards > 1:
            op = Op(
                kind=OpKind.ALL_GATHER,
                owner=bucket.name,
                axis=bucket.holding.data_axis,
                dtype=bucket.dtype,
                after=after,
            )
            yield op.sized(bucket.padded_numel)


def _reductions_of(program: Program) -> Iterator[str]:
    """Yield the names of the ops that must end before the update: the last backward and every reduction."""
    for key, ops in program.bodies.items():
        if program.step.ends_gradients(key):
            yield next(op.name for op in reversed(ops) if op.kind in (OpKind.BACKWARD, OpKind.WEIGHT))
            yield from (op.name for op in ops if (op.kind in REDUCING and not op.is_exposed) or op.codec is not None)
    for op in program.bodies[UPDATE_BODY]:
        if op.kind is OpKind.UPDATE:
            return
        yield op.name


def _reductions(step: StepSpec, bucket: Bucket) -> tuple[Op, ...]:
    """Return the collectives after which every rank that updates a bucket has the sum of its gradients."""
    numel, holding = bucket.padded_numel, bucket.holding

    def op(kind: OpKind, axis: str, numel: int) -> Op:
        return Op(kind=kind, owner=bucket.name, axis=axis, dtype=step.master_dtype, codec=PLAIN).sized(numel)

    if step.contributions is not None:
        return tuple(coded_reductions(step, step.contributions, bucket, op))
    chunk = numel // holding.num_shards
    over_ties = tuple(op(OpKind.ALL_REDUCE, axis, chunk) for axis in holding.tied_over)
    if step.zero == 1:
        first = (op(OpKind.REDUCE_SCATTER, holding.data_axis, numel),) if holding.num_shards > 1 else ()
        last = (op(OpKind.ALL_REDUCE, AXIS, chunk),) if step.layout.num_replicas > 1 else ()
        return (*first, *last, *over_ties)
    ranks = step.ranks.size(holding.data_axis)
    return (*_over_replicas(step, numel, op, holding.data_axis, ranks), *over_ties)


def _before_update(ops: Ops, sums: tuple[Op, ...]) -> Ops:
    """Return the ops with `sums` inserted before the update."""
    place = next(index for index, op in enumerate(ops) if op.kind is OpKind.UPDATE)
    return (*ops[:place], *sums, *ops[place:])


def _refusal_of_way(step: StepSpec) -> LayoutError | None:
    """Return why a layout cannot reduce as asked."""
    layout = step.layout
    if layout.reduce != "ring" and step.zero > 0:
        return LayoutError(
            "reduce-unsupported",
            f"reduce={layout.reduce} reduces whole gradients: use it with zero=0, not zero={layout.zero}. Use reduce=ring",
        )
    leaves_node = step.ranks_per_node % layout.model_ranks > 0
    if layout.reduce == "hierarchical" and (layout.dp_cp_size % _per_node(step) or leaves_node):
        return LayoutError(
            "reduce-unsupported",
            f"reduce=hierarchical needs whole nodes: {layout.world_size} ranks are not a multiple of "
            f"{step.ranks_per_node} ranks per node, or tp={layout.tp} leaves the node",
        )
    return None


def _axes_of_way(step: StepSpec) -> dict[str, int]:
    """Return the number of ranks of each axis over which replicas are reduced."""
    if step.layout.reduce != "hierarchical":
        return {REPLICAS: step.layout.num_replicas}
    inside = _per_node(step)
    sizes = ("dp_intra", inside), ("dp_inter", step.layout.dp_cp_size // inside)
    return {name: size for name, size in sizes if size > 1}


def _over_replicas(
    step: StepSpec, numel: int, op: Callable[[OpKind, str, int], Op], axis: str, ranks: int
) -> tuple[Op, ...]:
    """Return the collectives that sum `numel` elements over an axis of so many ranks."""
    if ranks == 1:
        return ()
    if step.layout.reduce == "ring":
        return (op(OpKind.ALL_REDUCE, axis, numel),)
    if step.layout.reduce == "root":
        return (op(OpKind.REDUCE, axis, numel), op(OpKind.BROADCAST, axis, numel))
    sizes = _axes_of_way(step)
    inside = sizes.get("dp_intra", 1)
    between = (op(OpKind.ALL_REDUCE, "dp_inter", numel // inside),) if "dp_inter" in sizes else ()
    if inside == 1:
        return between
    return (op(OpKind.REDUCE_SCATTER, "dp_intra", numel), *between, op(OpKind.ALL_GATHER, "dp_intra", numel))


def _per_node(step: StepSpec) -> int:
    """Return the number of ranks of one node whose gradients of one weight are summed."""
    return data_ranks_per_node(step.layout, step.ranks_per_node)


def _reduce_units(ops: Ops, step: StepSpec, units: Mapping[str, Unit], *, is_last: bool) -> Iterator[Op]:
    """Yield the ops with an all_reduce over the replicas after each unit's last reduce_scatter, as FSDP2 does.

    A unit with a single shard has no reduce_scatter; its all_reduce takes the place of it.
    """
    for op in ops:
        if op.kind is not OpKind.REDUCE_SCATTER or op.owner not in units:
            yield op
            continue
        parts = units[op.owner].num_shards
        if parts > 1:
            yield op
        if is_last and step.layout.num_replicas > 1 and step.contributions is None:
            numel = units[op.owner].padded_grad_numel // parts
            summed = op.but(kind=OpKind.ALL_REDUCE, axis=REPLICAS, after=(op.name,) if parts > 1 else op.after)
            yield summed.sized(numel)


def _reduce_tied_units(step: StepSpec, units: tuple[Unit, ...]) -> Iterator[Op]:
    """Yield, for each tied weight, the all_reduce of its reduced gradient shard among the stages that hold it.

    In the order of the model's weights, which all stages have in common.
    """
    is_summed_last = step.layout.num_replicas > 1 and step.contributions is None
    reduced = OpKind.ALL_REDUCE if is_summed_last else OpKind.REDUCE_SCATTER
    unit_of = {name: unit for unit in units for name in unit.params}
    for param in step.model.params:
        unit = unit_of.get(param.name)
        for axis in step.holding(param).tied_over if unit is not None and param.trainable else ():
            assert unit is not None
            op = Op(kind=OpKind.ALL_REDUCE, owner=param.name, axis=axis, dtype=step.master_dtype)
            numel = padded_rows(param, unit.num_shards) // unit.num_shards
            yield replace(op, after=(f"{reduced}:{unit.name}",)).sized(numel)


def _partial_sums(program: Program, buckets: tuple[Bucket, ...]) -> Iterator[Op]:
    """Yield the all_reduces of gradients that are still partial over a model axis, after their other reductions."""
    step = program.step
    final = [op for key, ops in program.bodies.items() if step.ends_gradients(key) for op in ops]
    final += itertools.takewhile(lambda op: op.kind is not OpKind.UPDATE, program.bodies[UPDATE_BODY])
    last = {op.owner: op.name for op in final if op.kind in (*REDUCING, OpKind.BROADCAST, OpKind.ALL_GATHER)}
    done = next(op.name for op in reversed(final) if op.kind in (OpKind.BACKWARD, OpKind.WEIGHT))
    for axis in sorted({axis for param in step.model.params for axis in step.holding(param).partial_over}):
        sizes = {
            bucket.name: bucket.padded_numel // bucket.holding.num_shards
            for bucket in buckets
            if axis in bucket.holding.partial_over
        }
        sizes |= {unit.name: sum(partial_sizes(step, unit, axis).values()) for unit in program.units}
        for name, numel in sizes.items():
            if numel:
                after = (last.get(name, done),)
                op = Op(kind=OpKind.ALL_REDUCE, owner=name, axis=axis, dtype=step.master_dtype, after=after)
                yield op.but(is_exposed=True).sized(numel)
