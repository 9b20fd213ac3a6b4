"""Counts of a loss with several terms: a step needs those of its whole batch before its first backward.

A loss of one term is divided at the end of the step: gradients are linear in it, so one factor serves them all. Terms with
counts of their own (tokens and boxes, say) have a factor each,

    loss = sum over k of S_k / C_k        gradient = sum over k of dS_k / C_k

so C_k, summed over all data ranks and micro-batches, must be known before S_k is differentiated. The ranks that end the model
exchange their counts once, behind the first forward. What later micro-batches count is found from their batch alone, before
their forward (twin: `runtime/axes/loss_terms.py`).
"""

from __future__ import annotations

from samestep.errors import LayoutError
from samestep.program.holding import SHARDS
from samestep.program.ops import BodyKey, Op, OpKind, Ops, is_forward, starts_step
from samestep.program.program import Program
from samestep.program.step import StepSpec

AXIS = "dp_cp"
"""The ranks whose gradients of one weight are summed: those with other samples, or with other tokens of the same samples."""
OWNER = "loss.counts"


def refusal(step: StepSpec) -> LayoutError | None:
    """Return nothing: every layout can exchange counts."""
    return None


def axis_of(step: StepSpec) -> str | None:
    """Return the axis over which counts are summed; None where a rank or the loss has the whole batch, or the loss has one
    term."""
    if len(step.model.loss_names.terms) < 2 or step.loss_over_batch:
        return None
    axis = ("cp" if step.zero == 0 else SHARDS) if step.sharing.trains_apart else AXIS  # or those of one model
    return axis if step.ranks.size(axis) > 1 else None


def num_counts(step: StepSpec) -> int:
    """Return how many numbers are exchanged: the count of each term, and the number of samples."""
    return len(step.model.loss_names.terms) + 1


def apply(program: Program) -> Program:
    """Return the program with the all_reduce of the counts after the first forward that ends the model."""
    step = program.step
    axis = axis_of(step)
    if axis is None:
        return program
    last = len(step.model.layers) - 1

    def rewrite(key: BodyKey, ops: Ops) -> Ops:
        if not (is_forward(key) and starts_step(key) and any(op.layer == last for op in ops)):
            return ops
        op = Op(kind=OpKind.ALL_REDUCE, owner=OWNER, axis=axis, dtype="float64", after=(ops[-1].name,), is_exposed=True)
        return (*ops, op.sized(num_counts(step)))

    return program.with_bodies(rewrite, axes={**program.axes, axis: step.ranks.size(axis)})
