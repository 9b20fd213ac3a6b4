"""What each way of spreading a step SAYS: what it refuses, and what it adds to the program. No torch.

Strategies do not know each other. Each has two functions, `refusal(step)` and `apply(program)`, and is stacked here. One
that changes what a rank holds of a weight adds that to the weight's `Holding`, before others read it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import ModuleType

from samestep.errors import LayoutError
from samestep.job import Job
from samestep.layout import Layout
from samestep.models.spec import ModelSpec
from samestep.program.bodies import UPDATE_BODY, BodyKey, position
from samestep.program.ops import Kind, Op, Ops, Task
from samestep.program.program import Program
from samestep.program.step import StepSpec
from samestep.schedules import TaskKind
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
    step = StepSpec.of(model, job, layout, ranks_per_node, cuts_loss, stage, replica)
    if reason := refusal_of(step):
        raise LayoutError(reason)
    return _of_all_sizes(step, _program_for)


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
    return ProgramBuilder(model, job, ranks_per_node, cuts_loss).programs(layout)


class ProgramBuilder:
    """Makes the programs of many layouts of one model and job; what they share is made once.

    What stands before the pipeline in the stack knows the degrees of the model axes, recomputation and the size of a
    micro-batch: layouts that differ in other words share it.
    """

    def __init__(
        self, model: ModelSpec, job: Job, ranks_per_node: int | None = None, cuts_loss: bool | None = None
    ) -> None:
        self.model, self.job, self._ranks_per_node, self._cuts_loss = model, job, ranks_per_node, cuts_loss
        self._shared: dict[tuple[object, ...], Program] = {}

    def step(self, layout: Layout) -> StepSpec:
        """Return what the strategies are told."""
        return StepSpec.of(self.model, self.job, layout, self._ranks_per_node, self._cuts_loss)

    def programs(self, layout: Layout) -> tuple[Program, ...]:
        """Return the programs of all pipeline stages.

        Raises:
            LayoutError: a strategy refuses the layout.
        """
        step = self.step(layout)
        if reason := refusal_of(step):
            raise LayoutError(reason)

        def of_stage(sized: StepSpec) -> Program:
            return _stacked(_with_tasks(self.before_stages(sized)), _from(pipeline))

        return tuple(_of_all_sizes(replace(step, stage=stage), of_stage) for stage in range(layout.pp))

    def before_stages(self, step: StepSpec) -> Program:
        """Apply what is the same for all stages: one body for each kind of task, and no tasks yet."""
        layout = step.layout
        key = (
            layout.cuts, step.microbatch_samples, layout.world_size > 1,
            (layout.innermost_data_ranks, step.zero) if layout.borrows_data_ranks else (),
        )  # fmt: skip
        found = self._shared.get((*key, layout.recompute))
        if found is None:
            cut = self._shared.get(key)
            if cut is None:
                cut = self._shared[key] = _stacked(_on_one_rank(step), _before(recompute))
            again = replace(cut, step=step.cut_like(cut.step))
            found = self._shared[(*key, layout.recompute)] = _stacked(
                again, _before(pipeline)[len(_before(recompute)) :]
            )
        return replace(found, step=step.cut_like(found.step))


def refusal_of(step: StepSpec) -> str | None:
    """Return why the first strategy that refuses a step does; None where none does."""
    return next((reason for strategy in STACK if (reason := strategy.refusal(step))), None)


def _of_all_sizes(step: StepSpec, program_for: Callable[[StepSpec], Program]) -> Program:
    """Return the step's program, in which smaller micro-batches have bodies of their own."""
    program = program_for(step)
    sizes = step.microbatch_sizes
    others = {size: program_for(replace(step, samples=size)) for size in {*sizes} - {step.microbatch_samples}}
    if not others:
        return program
    tasks: list[Task] = []
    bodies: dict[BodyKey, Ops] = {}
    for task in program.tasks:
        size, key = sizes[task.microbatch], task.body
        if key != UPDATE_BODY and size in others:
            key = key._replace(size=size)
        bodies[key] = others[size].bodies[task.body] if key != task.body else program.bodies[key]
        tasks.append(task._replace(body=key))
    return replace(program, tasks=tuple(tasks), bodies=bodies)


def _program_for(step: StepSpec) -> Program:
    return _stacked(_with_tasks(_stacked(_on_one_rank(step), _before(pipeline))), _from(pipeline))


def _before(strategy: ModuleType) -> tuple[ModuleType, ...]:
    return STACK[: STACK.index(strategy)]


def _from(strategy: ModuleType) -> tuple[ModuleType, ...]:
    return STACK[STACK.index(strategy) :]


def _stacked(program: Program, strategies: tuple[ModuleType, ...]) -> Program:
    for strategy in strategies:
        program = strategy.apply(program)
    return program


def _on_one_rank(step: StepSpec) -> Program:
    """The base program: what a forward, a backward and the update are."""
    bodies = {BodyKey(kind): _layer_ops(step, kind) for kind in (TaskKind.FORWARD, TaskKind.BACKWARD)}
    bodies[UPDATE_BODY] = (Op(kind=Kind.UPDATE, owner="optimizer", dtype=step.master_dtype),)
    return Program(step=step, bodies=bodies)


def _with_tasks(program: Program) -> Program:
    """Run forward and backward of each micro-batch, then one update; bodies are named by where in the step they stand."""
    count = program.step.num_microbatches
    tasks = [
        Task(BodyKey(kind, position=position(microbatch, count)), microbatch)
        for microbatch in range(count)
        for kind in (TaskKind.FORWARD, TaskKind.BACKWARD)
    ]
    tasks.append(Task(UPDATE_BODY, count - 1))
    bodies = {task.body: program.bodies[BodyKey(task.kind)] for task in tasks}
    return replace(program, bodies=bodies, tasks=tuple(tasks))


def _layer_ops(step: StepSpec, kind: TaskKind) -> Ops:
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
