"""A loss over all samples of a step: ranks gather outputs, and each computes the gradients of its samples.

A loss that compares samples (Chen et al. 2020, arXiv:2002.05709; Radford et al. 2021, arXiv:2103.00020) is a function
L(z_1, ..., z_B) of the outputs of all B samples, so that no micro-batch can compute its part of it. Where a rank has one
micro-batch, ranks gather the outputs behind its forward, and compute L and its gradient by them alike. Where it has several, no
backward may begin before the last forward has ended; to keep the graphs of all would take the memory that micro-batches
save. So each runs forward twice (Gao et al. 2021, arXiv:2101.06983): once for its outputs alone, and once more to go back with
the slice of the gradient that is its own.

```
one micro-batch a rank       F ─ gather ─ L, dL/dz ─ B                                       one pass
several                      O O O O ─ gather ─ L, dL/dz ─ F B F B F B F B                   two passes
```
What it costs: the gathers of B samples' outputs; each rank computes the whole L, whose matrix of pairs has B^2 elements; and with
several micro-batches one more forward of each.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from samestep.errors import LayoutError
from samestep.models.spec import LossTensor
from samestep.program.ops import BodyKey, Buffer, Op, OpKind, Ops, Task, ends_step, starts_step
from samestep.program.program import Program
from samestep.program.step import StepSpec
from samestep.schedules import TaskKind

AXIS = "dp"
"""The ranks that read different samples; their group serves nothing else, since compute waits for it."""
TOKENS = "cp"
"""The ranks that have other tokens of the same samples."""
SIZES = 8
"""Sizes of a tensor that ranks compare before they gather it."""


def refusal(step: StepSpec) -> LayoutError | None:
    """Return None: every layout gives a loss the outputs of all samples."""
    return None


def reads_of(step: StepSpec) -> tuple[LossTensor, ...]:
    """Return what the loss reads; where no trace shows it, the output of the last layer."""
    if step.model.loss_reads is not None:
        return step.model.loss_reads
    return (LossTensor(of="outputs", index=0, elements=step.model.layers[-1].output_elements),)


def apply(program: Program) -> Program:
    """Return the program with the gathers before the loss, and with the forwards for outputs alone in front of all others."""
    step = program.step
    axes = {**program.axes, **{axis: size for axis, size in _degrees(step).items() if size > 1}}
    last_chunk = _last_chunk(program)
    gathers = tuple(op for op in _gathers(step) if op.axis in axes)
    kind = TaskKind.OUTPUTS if _runs_outputs_first(step) else TaskKind.FORWARD
    bodies: dict[BodyKey, Ops] = {}
    tasks: tuple[Task, ...] = ()
    if _runs_outputs_first(step):
        tasks = tuple(
            task._replace(body=task.body._replace(kind=TaskKind.OUTPUTS))
            for task in program.tasks
            if task.kind is TaskKind.FORWARD
        )
        bodies = {key._replace(kind=kind): ops for key, ops in program.bodies.items() if key.kind is TaskKind.FORWARD}
    bodies |= {key: _with_held_units(key, ops, step) for key, ops in program.bodies.items()}
    for key, ops in bodies.items():
        if key.kind is kind and ends_step(key) and last_chunk is not None and key.chunk == last_chunk[0]:
            bodies[key] = (*ops, *(op.but(after=(_last_compute(ops),)) for op in gathers))
    return replace(program, bodies=bodies, tasks=(*tasks, *program.tasks), axes=axes)


def _degrees(step: StepSpec) -> dict[str, int]:
    return {AXIS: step.layout.dp, TOKENS: step.layout.cp}


def _last_chunk(program: Program) -> tuple[int | None] | None:
    """Return the chunk of this stage that ends the model; None where it has none."""
    if not program.chunks:
        return (None,)
    stop = len(program.step.model.layers)
    return next(((index,) for index, layers in enumerate(program.chunks) if layers.stop == stop), None)


def _with_held_units(key: BodyKey, ops: Ops, step: StepSpec) -> Ops:
    """Return the ops of a body without the gathers of units that zero=2 holds since the forwards for outputs."""
    if not (step.zero == 2 and _runs_outputs_first(step) and key.kind is TaskKind.FORWARD and starts_step(key)):
        return ops
    return tuple(op for op in ops if not (op.implied and op.kind is OpKind.ALL_GATHER))


def _last_compute(ops: Ops) -> str:
    return next(op.name for op in reversed(ops) if op.kind is OpKind.FORWARD)


def _gathers(step: StepSpec) -> Iterator[Op]:
    """Yield the all_gathers of the tensors' sizes, of each tensor's samples, as many places on each rank as the largest has, and of
    the tokens of outputs; and the all_reduces of gradients of which each rank has a part.
    """
    tensors = [read for read in reads_of(step) if read.is_gathered]
    if not tensors:
        return
    yield from _gathers_of(step, tensors)
    for read in reads_of(step):
        if read.is_by_rows:
            op = Op(
                kind=OpKind.ALL_REDUCE,
                owner=read.name,
                axis=AXIS,
                dtype=read.dtype or step.master_dtype,
                is_exposed=True,
            )
            yield op.sized(read.elements * step.global_batch // step.layout.cp if read.is_gathered else read.elements)


def _gathers_of(step: StepSpec, tensors: list[LossTensor]) -> Iterator[Op]:
    sizes = Op(kind=OpKind.ALL_GATHER, owner="loss.sizes", axis=AXIS, dtype="int64", is_exposed=True)
    yield sizes.sized(step.layout.dp * SIZES * len(tensors))
    for tensor in tensors:
        dtype, cuts = tensor.dtype or step.master_dtype, step.layout.cp if tensor.of == "outputs" else 1
        gathered = {AXIS: step.layout.dp * step.rank_samples * tensor.elements // cuts}
        if cuts > 1:
            gathered[TOKENS] = step.global_batch * tensor.elements
        for axis, numel in gathered.items():
            op = Op(kind=OpKind.ALL_GATHER, owner=tensor.name, axis=axis, dtype=dtype, is_exposed=True).sized(numel)
            buffer = Buffer(f"samples of {tensor.name} over {axis}", "buffers", op.size_bytes)
            yield op.but(allocates=(buffer,), frees=(buffer.name,))


def _runs_outputs_first(step: StepSpec) -> bool:
    """Return whether every micro-batch runs forward once for its outputs alone, since the loss needs those of all."""
    return step.loss_over_batch and step.num_microbatches > 1
