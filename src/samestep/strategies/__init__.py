"""What each way of spreading a step SAYS: what it refuses, and what it adds to the program. No torch.

Strategies do not know each other. Each has two functions, `refusal(step)` and `apply(program)`, and is stacked here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType

from samestep.errors import LayoutError
from samestep.job import Job
from samestep.layout import Layout
from samestep.model import ModelSpec
from samestep.program import Kind, Op, Ops, Program, Step, Task, TaskKind, position
from samestep.strategies import context, data, expert, pipeline, precision, recompute, sequence, shard, tensor

# Order matters: context leaves a slice of the sequence, of which tensor cuts heads and neurons; sequence cuts what that
# leaves whole, expert leaves a rank its experts, recompute repeats forwards with what they send, pipeline leaves a stage its
# layers, sharding gathers and scatters around what is there, replication reduces what sharding leaves whole.
STACK: tuple[ModuleType, ...] = (precision, context, tensor, sequence, expert, recompute, pipeline, shard, data)


def program_of(
    model: ModelSpec,
    job: Job,
    layout: Layout,
    ranks_per_node: int | None = None,
    cuts_loss: bool | None = None,
    stage: int = 0,
    replica: int = 0,
) -> Program:
    """Return the step that `layout` makes of `model` and `job` on one pipeline stage, for one share of the samples.

    `cuts_loss` says whether the loss can work on logits cut by vocabulary; without it the job's loss says so.

    Raises:
        LayoutError: a strategy refuses the layout; the text says why and what would work.
    """
    step = Step.of(model, job, layout, ranks_per_node, cuts_loss, stage, replica)
    if reason := refusal_of(step):
        raise LayoutError(reason)
    return _of_all_sizes(step, lambda sized: _behind(_before_stages(sized)))


def programs_of(
    model: ModelSpec,
    job: Job,
    layout: Layout,
    ranks_per_node: int | None = None,
    cuts_loss: bool | None = None,
) -> tuple[Program, ...]:
    """Return the programs of all pipeline stages: `program_of` each of them, with what they share made once.

    Raises:
        LayoutError: a strategy refuses the layout.
    """
    step = Step.of(model, job, layout, ranks_per_node, cuts_loss)
    if reason := refusal_of(step):
        raise LayoutError(reason)
    shared = functools.cache(lambda samples: _before_stages(replace(step, samples=samples)))

    def of_stage(sized: Step) -> Program:
        program = shared(sized.samples)
        return _behind(replace(program, step=replace(program.step, stage=sized.stage)))

    return tuple(_of_all_sizes(replace(step, stage=stage), of_stage) for stage in range(layout.pp))


def refusal_of(step: Step) -> str | None:
    """Return why the first strategy that refuses a step does; None where none does."""
    return next((reason for strategy in STACK if (reason := strategy.refusal(step))), None)


def _of_all_sizes(step: Step, program_for: Callable[[Step], Program]) -> Program:
    """Return the step's program, in which smaller micro-batches have bodies of their own."""
    program = program_for(step)
    sizes = step.microbatch_sizes
    others = {size: program_for(replace(step, samples=size)) for size in {*sizes} - {step.microbatch_samples}}
    if not others:
        return program
    tasks: list[Task] = []
    bodies: dict[str, Ops] = {}
    for task in program.stages[0]:
        size, key = sizes[task.microbatch], task.body
        if task.kind is not TaskKind.UPDATE and size in others:
            first, _, where = key.rpartition(".")
            key = f"{first}.of{size}.{where}"
        bodies[key] = others[size].bodies[task.body] if key != task.body else program.bodies[key]
        tasks.append(replace(task, body=key))
    return replace(program, stages=(tuple(tasks),), bodies=bodies)


_STAGED = STACK.index(pipeline)


def _before_stages(step: Step) -> Program:
    """Apply what is the same for all stages."""
    program = _on_one_rank(step)
    for strategy in STACK[:_STAGED]:
        program = strategy.apply(program)
    return program


def _behind(program: Program) -> Program:
    """Apply the pipeline, and what comes after it."""
    for strategy in STACK[_STAGED:]:
        program = strategy.apply(program)
    return program


def _on_one_rank(step: Step) -> Program:
    """The base program: forward and backward of each micro-batch, then one update."""
    count = step.num_microbatches
    bodies: dict[str, Ops] = {}
    tasks: list[Task] = []
    for microbatch in range(count):
        where = position(microbatch, count)
        for kind in (TaskKind.FORWARD, TaskKind.BACKWARD):
            key = f"{kind}.{where}"
            tasks.append(Task(kind, microbatch, key))
            if key not in bodies:
                bodies[key] = _layer_ops(step, kind)
    tasks.append(Task(TaskKind.UPDATE, count - 1, str(TaskKind.UPDATE)))
    bodies[str(TaskKind.UPDATE)] = (Op(kind=Kind.UPDATE, owner="optimizer", dtype=step.master_dtype),)
    return Program(step=step, bodies=bodies, stages=(tuple(tasks),))


def _layer_ops(step: Step, kind: TaskKind) -> Ops:
    """Compute of every layer once: backward goes the other way, by input and by weight."""
    forward = kind is TaskKind.FORWARD
    ops = tuple(
        Op(
            kind=Kind.FORWARD if forward else Kind.BACKWARD,
            owner=layer.name,
            layer=index,
            flops=(layer.forward_flops if forward else layer.backward_flops) * step.microbatch_samples,
        )
        for index, layer in enumerate(step.model.layers)
    )
    return ops if forward else ops[::-1]
