"""The strategies, one way of distributing a step each, and the stack that applies them in order. No torch.

A strategy has two functions: `refusal(step)` returns the error of a step that it cannot run, and `apply(program)` returns the program
with its ops, its buckets or units, and its part of each weight's `Holding` added. Strategies do not import each other;
the order of the stack is the only thing that relates them. Twins of the same name in `runtime/axes` carry out what is
written here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from types import ModuleType

from samestep.errors import LayoutError
from samestep.job import Job
from samestep.layout import Layout
from samestep.models.spec import ModelSpec, cache_by_model
from samestep.program.ops import UPDATE_BODY, BodyKey, Op, OpKind, Ops, Task, position
from samestep.program.program import Program
from samestep.program.step import MOST_MICROBATCHES, StepSpec
from samestep.schedules import TaskKind
from samestep.strategies import (
    batch_norm,
    batch_values,
    chunked_loss,
    chunked_mlp,
    compress,
    context,
    data,
    expert,
    host_inputs,
    host_weights,
    loss_terms,
    pipeline,
    precision,
    recompute,
    sequence,
    shard,
    tensor,
    whole_batch,
    whole_update,
)

# The order matters: each strategy works on what those before it have written.
STACK: tuple[ModuleType, ...] = (
    precision,
    chunked_loss,  # leaves the last layer a chunk of its logits
    chunked_mlp,  # leaves blocks a chunk of their MLPs
    context,  # leaves a rank a slice of the sequence
    tensor,  # cuts the heads and neurons of that slice
    sequence,  # cuts the parts between what `tensor` has cut
    expert,  # leaves a rank its experts
    recompute,  # repeats forwards, together with the collectives that are in them by now
    batch_norm,  # sends statistics, which no repeated forward takes again
    pipeline,  # leaves a stage its layers
    batch_values,  # sends the sums and rows of samples that the model's code asks for
    loss_terms,  # exchanges counts where the model ends
    shard,  # gathers weights and scatters gradients
    data,  # reduces the gradients that are left
    compress,  # encodes what is reduced
    whole_update,  # brings to one rank what it must update whole
    host_weights,  # copies weights to the device in front of what reads them
    whole_batch,  # repeats the forwards, as they are by now
    host_inputs,  # copies what the others keep
)


@cache_by_model
def _asks_for_values(model: ModelSpec) -> bool:
    return model.uses_batch_values or any(layer.kept for layer in model.layers)


@cache_by_model
def _updates_whole(model: ModelSpec) -> bool:
    return any(param.is_updated_whole for param in model.params)


_ASKED: dict[ModuleType, Callable[[StepSpec], bool]] = {
    precision: lambda step: step.product_dtype != "float32",
    chunked_loss: lambda step: step.layout.loss_chunk is not None,
    chunked_mlp: lambda step: step.layout.mlp_chunk is not None,
    context: lambda step: step.layout.cp > 1,
    tensor: lambda step: step.layout.tp > 1,
    sequence: lambda step: step.layout.sequence_parallel,
    expert: lambda step: step.layout.ep > 1 or bool(step.model.balanced_experts),
    recompute: lambda step: step.layout.recompute != "none" or recompute.repeats_own_code(step),
    batch_norm: lambda step: step.sample_groups is not None,
    pipeline: lambda step: step.layout.pp > 1 or step.layout.virtual_stages > 1,
    batch_values: lambda step: _asks_for_values(step.model),
    loss_terms: lambda step: len(step.model.loss_names.terms) > 1,
    shard: lambda step: step.layout.zero > 0 or step.layout.accumulate != "sharded",
    compress: lambda step: step.contributions is not None,
    whole_update: lambda step: _updates_whole(step.model),
    host_weights: lambda step: bool(step.offload),
    whole_batch: lambda step: step.loss_over_batch,
    host_inputs: lambda step: step.layout.recompute == "offload",
}
"""Whether a step asks for a strategy; `data` has something to write in every step."""


def program_of(
    model: ModelSpec,
    job: Job,
    layout: Layout,
    ranks_per_node: int | None = None,
    cuts_loss: bool | None = None,
    stage: int = 0,
    replica: int = 0,
    updates_in_chunks: bool | None = None,
) -> Program:
    """Return the program of one pipeline stage and one data rank: one step of `job` with `model` in `layout`.

    `cuts_loss` is whether the loss can work on logits cut by vocabulary, and `updates_in_chunks` whether the optimizer
    may update some weights before others; None takes them from the job's loss and optimizer.

    Raises:
        LayoutError: a strategy rejects the layout; the text says why and what would work.
    """
    step = StepSpec.of(model, job, layout, ranks_per_node, cuts_loss, updates_in_chunks)
    step = step.but(stage=stage, replica=replica)
    if error := refusal_of(step):
        raise error
    return _of_all_sizes(step, _program_for)


def programs_of(
    model: ModelSpec, job: Job, layout: Layout, ranks_per_node: int | None = None, cuts_loss: bool | None = None
) -> tuple[Program, ...]:
    """Return the program of every pipeline stage, as `program_of` does, with their common part built once.

    Raises:
        LayoutError: a strategy rejects the layout.
    """
    return ProgramBuilder(model, job, ranks_per_node, cuts_loss).programs(layout)


MOST_SHARED = 1024
"""Programs that a builder keeps: a search makes thousands, and few of them again."""


class ProgramBuilder:
    """Makes the programs of many layouts of one model and job, and makes what layouts have in common once.

    The strategies before the pipeline depend only on the degrees of the model axes, on recompute and on the size of a
    micro-batch, so layouts that agree in these share their result.
    """

    def __init__(
        self, model: ModelSpec, job: Job, ranks_per_node: int | None = None, cuts_loss: bool | None = None
    ) -> None:
        self.model, self.job, self._ranks_per_node, self._cuts_loss = model, job, ranks_per_node, cuts_loss
        self._any_step: StepSpec | None = None
        self._shared: dict[tuple[object, ...], Program] = {}

    def of_batch(self, job: Job) -> ProgramBuilder:
        """Return the builder of a job that differs in its global batch alone: it shares the parts that both have."""
        other = ProgramBuilder(self.model, job, self._ranks_per_node, self._cuts_loss)
        other._shared = self._shared
        return other

    def step(self, layout: Layout) -> StepSpec:
        """Return the step of a layout, before any strategy."""
        if self._any_step is None:
            self._any_step = StepSpec.of(self.model, self.job, layout, self._ranks_per_node, self._cuts_loss)
        return self._any_step.in_layout(self.model, self.job, layout, self._ranks_per_node, self._cuts_loss)

    def programs(self, layout: Layout) -> tuple[Program, ...]:
        """Return the program of every pipeline stage of a layout, the first stage first.

        Raises:
            LayoutError: a strategy rejects the layout.
        """
        step = self.step(layout)
        if error := refusal_of(step):
            raise error

        def of_stage(sized: StepSpec) -> Program:
            return _apply_all(_with_tasks(self.before_stages(sized)), _from(pipeline))

        return tuple(_of_all_sizes(step.but(stage=stage), of_stage) for stage in range(layout.pp))

    def before_stages(self, step: StepSpec) -> Program:
        """Return the program that all stages have in common: one body for each kind of task, and no tasks yet."""
        layout = step.layout
        key = (
            layout.cuts, step.microbatch_samples, layout.world_size > 1,
            (layout.innermost_data_ranks, step.zero) if layout.borrows_data_ranks else (), step.sample_groups,
        )  # fmt: skip
        program = self._shared.get((*key, layout.recompute))
        if program is None:
            if len(self._shared) > MOST_SHARED:
                self._shared.clear()
            cut = self._shared.get(key)
            if cut is None:
                cut = self._shared[key] = _apply_all(_on_one_rank(step), _before(recompute))
            program_here = replace(cut, step=step.cut_like(cut.step))
            between = _before(pipeline)[len(_before(recompute)) :]
            program = self._shared[(*key, layout.recompute)] = _apply_all(program_here, between)
        return replace(program, step=step.cut_like(program.step))


def refusal_of(step: StepSpec) -> LayoutError | None:
    """Return the error of the first strategy that refuses a step; None if none does."""
    if step.num_microbatches > MOST_MICROBATCHES:
        return LayoutError(
            "microbatches-too-many",
            f"microbatch={step.layout.microbatch} makes {step.num_microbatches:,} micro-batches of the {step.rank_samples:,} "
            f"samples of a rank. Use microbatch={-(-step.rank_samples // MOST_MICROBATCHES)} or more",
        )
    return next((error for strategy in _asked(STACK, step) if (error := strategy.refusal(step))), None)


def _of_all_sizes(step: StepSpec, program_for: Callable[[StepSpec], Program]) -> Program:
    """Return the program of a step, with separate bodies for micro-batches that are smaller than the largest."""
    program = program_for(step)
    sizes = step.microbatch_sizes
    others = {size: program_for(step.but(samples=size)) for size in {*sizes} - {step.microbatch_samples}}
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
    return _apply_all(_with_tasks(_apply_all(_on_one_rank(step), _before(pipeline))), _from(pipeline))


def _before(strategy: ModuleType) -> tuple[ModuleType, ...]:
    return STACK[: STACK.index(strategy)]


def _from(strategy: ModuleType) -> tuple[ModuleType, ...]:
    return STACK[STACK.index(strategy) :]


def _apply_all(program: Program, strategies: tuple[ModuleType, ...]) -> Program:
    for strategy in strategies:
        for asked in _asked((strategy,), program.step):
            program = asked.apply(program)
    return program


def _asked(strategies: tuple[ModuleType, ...], step: StepSpec) -> Iterator[ModuleType]:
    """Yield the strategies that a step asks for."""
    return (strategy for strategy in strategies if strategy not in _ASKED or _ASKED[strategy](step))


def _on_one_rank(step: StepSpec) -> Program:
    """Return the program of a step on one rank: a forward, a backward and the update, without communication."""
    bodies = {BodyKey(kind): _layer_ops(step, kind) for kind in (TaskKind.FORWARD, TaskKind.BACKWARD)}
    bodies[UPDATE_BODY] = (Op(kind=OpKind.UPDATE, owner="optimizer", dtype=step.master_dtype),)
    return Program(step=step, bodies=bodies)


def _with_tasks(program: Program) -> Program:
    """Return the program with the tasks of one stage: forward and backward of each micro-batch, then the update."""
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
    """Return the compute ops of all layers; a backward has gradients of inputs and weights, in reverse order."""
    forward = kind is TaskKind.FORWARD
    ops = tuple(
        Op(
            kind=OpKind.FORWARD if forward else OpKind.BACKWARD,
            owner=layer.name,
            layer=index,
            flops=(layer.forward_flops if forward else layer.backward_flops) * step.microbatch_samples,
        )
        for index, layer in enumerate(step.model.layers)
    )
    return ops if forward else ops[::-1]
