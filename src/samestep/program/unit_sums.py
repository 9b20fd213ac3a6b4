"""The sums that replicas, tied stages and `tp` add to the reductions of a step: of FSDP2's units, and of gradients that are still partial."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import replace

from samestep.program.buckets import Bucket
from samestep.program.holding import REPLICAS
from samestep.program.ops import REDUCING, UPDATE_BODY, Op, OpKind, Ops
from samestep.program.program import Program
from samestep.program.step import StepSpec
from samestep.program.units import Unit, padded_rows, partial_sizes


def reduce_units(ops: Ops, step: StepSpec, units: Mapping[str, Unit], *, is_last: bool) -> Iterator[Op]:
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


def reduce_tied_units(step: StepSpec, units: tuple[Unit, ...]) -> Iterator[Op]:
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


def partial_sums(program: Program, buckets: tuple[Bucket, ...]) -> Iterator[Op]:
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
