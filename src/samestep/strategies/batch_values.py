"""Sums and rows of all samples within a forward or a loss: what `samestep.batch_sum` and `samestep.batch_cat` send.

Code that takes the mean of a batch (a centre, the usage of a codebook, whitened advantages) makes samples influence each other, as
batch norm does. Where it asks by name, every data rank computes the same from the samples of all:

    batch_sum    all_reduce of one row                   backward: all_reduce of its gradient
    batch_cat    all_gather of a row for each sample     backward: all_reduce of the gradients of all rows

A result that needs the samples of later micro-batches cannot be used before these have run, so a rank runs its samples as one.
"""

from __future__ import annotations

from collections.abc import Iterator

from samestep.errors import LayoutError, module_name
from samestep.models.layer_parts import BatchValueCall
from samestep.models.spec import gradients_within
from samestep.program.ops import BodyKey, Op, OpKind, Ops, is_forward
from samestep.program.program import Program
from samestep.program.step import StepSpec

AXIS = "dp"
OWNER = "batch values"
"""Name of these collectives in the ledger."""
KEPT = "kept buffers"
"""Name of those that give a buffer of the model's own code to all stages."""


def refusal(step: StepSpec) -> LayoutError | None:
    """Return why values of all samples are not at hand in a layout."""
    model, layout = step.model, step.layout
    if not model.uses_batch_values:
        return None
    where = next((layer.batch_values[0].owner for layer in model.layers if layer.batch_values), None)
    who = "the loss" if where is None else module_name(where) or "the model itself"
    if step.num_microbatches > 1:
        return LayoutError(
            "batch-values-microbatch",
            f"microbatch={layout.microbatch} makes {step.num_microbatches} micro-batches, and {who} takes values of all samples of the "
            f"step within one (samestep.batch_sum, batch_mean, batch_cat). Use microbatch={step.rank_samples}",
        )
    if layout.dp > 1 and model.differentiates_at:
        return LayoutError(
            "forward-takes-gradients",
            f"{who} takes values over ranks (samestep.batch_sum), and {gradients_within(model)}. Use one rank",
        )
    return None


def apply(program: Program) -> Program:
    """Return the program with what each layer and the loss send in the forward, and in the backward in reverse."""
    step = program.step
    if step.layout.pp > 1 and any(layer.kept for layer in step.model.layers):
        program = program.with_update(lambda ops: (*ops, *_to_stages(step)))
    if not step.model.uses_batch_values or step.layout.dp == 1:
        return program

    def rewrite(key: BodyKey, ops: Ops) -> Ops:
        front, behind = _of_other_stages(program, key)
        return (*front, *_with_values(ops, step), *behind)

    return program.with_bodies(rewrite, axes={**program.axes, AXIS: step.layout.dp})


def _of_other_stages(program: Program, key: BodyKey) -> tuple[list[Op], list[Op]]:
    """Return what the forward of a stage sends in the code between layers of the stages before it, and of those after it."""
    if not program.chunks or not is_forward(key):
        return [], []
    chunk = program.chunks[key.chunk or 0]
    calls = [
        (index, _op(call, program.step, None, is_back=False))
        for index, layer in enumerate(program.step.model.layers)
        for call in layer.batch_values
        if call.is_everywhere
    ]
    return [op for index, op in calls if index < chunk.start], [op for index, op in calls if index >= chunk.stop]


def _to_stages(step: StepSpec) -> Iterator[Op]:
    """Yield what gives all stages the buffers that one of them has computed, after the update."""
    for layer in step.model.layers:
        for kept_value in layer.kept:
            dtype = kept_value.dtype or step.master_dtype
            yield Op(kind=OpKind.ALL_REDUCE, owner=KEPT, layer=None, axis="pp", dtype=dtype, is_exposed=True).sized(
                kept_value.elements
            )


def _with_values(ops: Ops, step: StepSpec) -> Iterator[Op]:
    last = len(step.model.layers) - 1
    for op in ops:
        layer = step.model.layers[op.layer] if op.layer is not None else None
        of_loss = step.model.loss_values if op.layer == last else ()
        if op.kind is OpKind.BACKWARD:
            back = [call for call in reversed(of_loss) if call.takes_gradient]
            yield from (_op(call, step, op, is_back=True, is_of_loss=True) for call in back)
        yield op
        if layer is None:
            continue
        if op.kind is OpKind.FORWARD:
            yield from (_op(call, step, op, is_back=False) for call in (*layer.batch_values, *of_loss))
        elif op.kind is OpKind.BACKWARD:
            yield from (
                _op(call, step, op, is_back=True) for call in reversed(layer.batch_values) if call.takes_gradient
            )


def _op(call: BatchValueCall, step: StepSpec, beside: Op | None, *, is_back: bool, is_of_loss: bool = False) -> Op:
    gathers = call.kind == "cat" and not is_back
    rows = 1 if call.kind == "sum" else step.global_batch
    rows = step.layout.dp * step.rank_samples if gathers else rows
    kind = OpKind.ALL_GATHER if gathers else OpKind.ALL_REDUCE
    op = Op(kind=kind, owner=OWNER, layer=None, axis=AXIS, dtype=call.dtype or step.master_dtype, is_exposed=True)
    if beside is None:
        return op.sized(rows * call.elements)
    if is_of_loss:  # which goes back before the layer
        return op.but(layer=beside.layer).sized(rows * call.elements)
    return op.but(after=(beside.name,)).sized(rows * call.elements)
