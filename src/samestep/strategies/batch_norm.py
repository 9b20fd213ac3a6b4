"""Batch norm over groups of samples that data ranks share: its statistics are those of one device that reads whole groups.

Batch norm (Ioffe and Szegedy 2015, arXiv:1502.03167) normalises each channel with the mean and the variance of a batch, so
what a sample contributes depends on the others. Which others, the job says: groups of K = `numerics.batch_norm_group`, by
default the global batch. A rank that has a part of a group finds (count n_i, mean m_i, M_i = sum (x - m_i)^2) of its part,
ranks gather these triples, and each merges them (Chan, Golub and LeVeque 1979, "Updating formulae and a pairwise algorithm
for computing sample variances"):

    n = sum n_i      m = sum n_i m_i / n      M = sum M_i + n_i (m_i - m)^2      y = w (x - m) r + b,  r = (M / n + eps)^-1/2

The backward needs two sums a channel over the group, s = sum g and t = sum g x', with g the gradient of y and
x' = (x - m) r, which are all_reduced, and

    gradient of x = w r (g - s / n - x' t / n)

Both stay local where no group has samples on two ranks; the triples are gathered even then if running statistics are kept,
which every rank updates with all groups in their order. A repeated forward takes the statistics that the first has found.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from samestep.errors import LayoutError, module_name
from samestep.models.layer_parts import BatchNormCall
from samestep.models.spec import gradients_within
from samestep.program.ops import BodyKey, Buffer, Op, OpKind, Ops
from samestep.program.program import Program
from samestep.program.step import SampleGroups, StepSpec

AXIS = "dp"
"""The ranks that read different samples; their group serves nothing else, since compute waits for it."""


def refusal(step: StepSpec) -> LayoutError | None:
    """Return why the layout's micro-batches do not consist of whole groups, or what else cannot be between its ranks."""
    groups, layout = step.sample_groups, step.layout
    if (
        groups is None or step.sharing.trains_apart
    ):  # replicas that are trained apart are refused with statistics of samples
        return None
    path = step.model.batch_norm_owners[0] or step.model.name
    if layout.cp > 1:
        return LayoutError(
            "cp-unsupported",
            f"cp={layout.cp} slices sequences, and {path} takes statistics of all tokens (batch norm). Use cp=1",
        )
    if not groups.fit:
        return _misfit(step, groups, path)
    if groups.is_one_forward:
        return None
    if step.model.differentiates_at:
        return LayoutError(
            "forward-takes-gradients",
            f"{path} takes statistics over ranks (batch norm), and {gradients_within(step.model)}. Use one rank",
        )
    return None


def _misfit(step: StepSpec, groups: SampleGroups, path: str) -> LayoutError:
    """Return why micro-batches that divide groups are refused, and what works."""
    layout, size, ranks = step.layout, groups.size, step.layout.dp
    fewer = next(
        number
        for number in range(step.num_microbatches, 0, -1)
        if SampleGroups.of(step.global_batch, size, ranks, number).fit
    )
    common = math.gcd(*groups.totals)
    totals = " or ".join(map(str, groups.totals))
    works = f"Use microbatch={-(-step.rank_samples // fewer)}"
    if common > 1 and step.contributions is None:
        works += f", or numerics.batch_norm_group = {common}, which changes the result"
    return LayoutError(
        "batch-norm-layout",
        f"batch norm {module_name(path)} takes the statistics of {size} samples at once, and a micro-batch has {totals} "
        f"(microbatch={layout.microbatch} on {ranks} data rank{'s' * (ranks > 1)}). {works}",
    )


def apply(program: Program) -> Program:
    """Return the program with the gathers of statistics after each layer's forward, and the sums in its backward."""
    step = program.step
    groups = step.sample_groups
    if groups is None or step.layout.dp == 1:
        return program

    def rewrite(key: BodyKey, ops: Ops) -> Ops:
        return tuple(_with_statistics(ops, step, groups))

    return program.with_bodies(rewrite, axes={**program.axes, AXIS: step.layout.dp})


def _with_statistics(ops: Ops, step: StepSpec, groups: SampleGroups) -> Iterator[Op]:
    for op in ops:
        yield op
        calls = step.model.layers[op.layer].batch_norms if op.layer is not None else ()
        if op.kind is OpKind.FORWARD:
            yield from (
                _gather(call, step, groups, op) for call in calls if groups.spans_ranks or call.keeps_statistics
            )
        elif op.kind is OpKind.BACKWARD and groups.spans_ranks:
            yield from (_sum(call, step, groups, op) for call in reversed(calls) if call.takes_gradient)


def _gather(call: BatchNormCall, step: StepSpec, groups: SampleGroups, after: Op) -> Op:
    """Return the all_gather of the count, and the mean and M of each channel, of every run of every rank."""
    numel = step.layout.dp * groups.num_slots * (1 + 2 * call.channels)
    return _op(OpKind.ALL_GATHER, call, step, after, numel)


def _sum(call: BatchNormCall, step: StepSpec, groups: SampleGroups, after: Op) -> Op:
    """Return the all_reduce of two sums a channel of every group."""
    return _op(OpKind.ALL_REDUCE, call, step, after, groups.num_groups * 2 * call.channels)


def _op(kind: OpKind, call: BatchNormCall, step: StepSpec, after: Op, numel: int) -> Op:
    op = Op(kind=kind, owner=call.owner, axis=AXIS, dtype=step.master_dtype, after=(after.name,), is_exposed=True)
    op = op.sized(numel)
    buffer = Buffer(f"statistics of {call.owner}", "buffers", op.size_bytes)
    return op.but(allocates=(buffer,), frees=(buffer.name,))
