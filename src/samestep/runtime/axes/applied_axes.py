"""What the axes of a layout put around the modules of a model, and what carries out its program between ranks.

A plain layout has none of it: each axis that it does not ask for returns at once, or gives an object that does nothing. So here
stand the axes and their order, and each says in its own file what it does.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from samestep.building.chunked_cross_entropy import Chunking
from samestep.building.loss import RunFunction
from samestep.building.model import call_model
from samestep.building.model_changes import multiply_all_packed
from samestep.building.torch_seams import disable_compiler, is_compiled
from samestep.examination.traced_model import TracedModel
from samestep.job_tables import RunTable
from samestep.layout import Layout
from samestep.program.program import Program
from samestep.program.step import repeats_in_graphs
from samestep.randomness import dropout_state
from samestep.randomness import mode as dropout
from samestep.randomness.dropout_state import Dropout, DropoutState
from samestep.randomness.masks import MaskSlice
from samestep.runtime.axes import (
    batch_norm,
    chunked_mlp,
    expert,
    folded_hooks,
    own_backwards,
    precision,
    recompute,
    tensor,
)
from samestep.runtime.axes.compiled_blocks import CompiledBlocks, compile_blocks
from samestep.runtime.axes.context import slicing as context
from samestep.runtime.axes.forward_state import RepeatedState
from samestep.runtime.axes.pipeline import other_stages
from samestep.runtime.axes.pipeline import stage as pipeline
from samestep.runtime.axes.pipeline.stage_flow import Flows
from samestep.runtime.axes.step_part import PartOfStep, SharedSamples
from samestep.runtime.axes.tensor import cuts_logits
from samestep.runtime.axes.weight_gradients import Deferred
from samestep.runtime.ledger import owned
from samestep.runtime.processes.mesh import Mesh
from samestep.tracing.pending_logits import PendingHead


class WholeModel:
    """The counterpart of `Stage` in a layout without a pipeline: it has all layers, and sends nothing."""

    num_chunks = 1

    def __init__(self, model: nn.Module, running: Callable[[], AbstractContextManager[object]] = nullcontext) -> None:
        self._model, self._running = model, running

    def is_last(self, chunk: int) -> bool:
        """Return whether a chunk ends the model, and so has the loss: the only one does."""
        return True

    def forward(self, microbatch: int, chunk: int, samples: Any) -> Any:
        """Run all layers on a micro-batch; return the model's outputs."""
        if self._running is nullcontext:
            return call_model(self._model, samples)
        with self._running():
            return call_model(self._model, samples)

    def backward(self, microbatch: int, chunk: int, loss: Tensor | None) -> None:
        """Run the backward of the whole model."""
        assert loss is not None
        loss.backward()

    def weight_gradients(self, microbatch: int) -> None:
        """Do nothing: nothing was postponed."""

    def finish_forward(self) -> None:
        """Do nothing: nothing was kept."""

    def from_last(self, outputs: Any) -> Any:
        """Return the outputs: this is the last stage."""
        return outputs


# Order matters: from the inside out, as in `strategies.STACK`.
TWINS: tuple[ModuleType, ...] = (tensor, expert)
"""The twins that change modules in place, each with a function `apply(traced, program, mesh)`."""


@dataclass(frozen=True, slots=True)
class Parallel:
    """The program of this rank, and the objects that carry it out between ranks."""

    program: Program
    mesh: Mesh
    stage: pipeline.Stage | WholeModel
    """The layers that this rank runs, and the tensors it exchanges with other pipeline stages."""
    slicing: context.Slicing | context.WholeSequences
    """The slice of every sequence that this rank runs."""
    batch_norms: SharedSamples
    """What forwards ask of samples that other ranks have, such as the statistics of a batch norm."""
    precise: precision.PreciseForwards
    """The contexts of forwards in the precision of the job."""
    step_parts: tuple[PartOfStep, ...]
    """Those of them that hold something from the beginning of a step to its end."""
    pending: Callable[[], AbstractContextManager[None]]
    """Returns the context of a forward whose loss makes the logits, in chunks."""
    checkpoints: AbstractContextManager[None]
    """Returns the context of a step, in which checkpointed forwards are repeated as they ran."""


@dataclass(frozen=True, slots=True)
class AppliedAxes:
    """The parts that axes have put around the modules of a model, whose weights are still on the meta device."""

    traced: TracedModel
    program: Program
    mesh: Mesh
    slicing: context.Slicing | context.WholeSequences
    batch_norms: SharedSamples
    compiled: CompiledBlocks
    deferred: Deferred
    """Weight gradients that a split backward postpones."""

    @classmethod
    def of(cls, traced: TracedModel, program: Program, mesh: Mesh, settings: RunTable) -> AppliedAxes:
        """Let the axes work on the modules, from the inside out."""
        model = traced.module
        precision.apply(traced, program, mesh.device)
        multiply_all_packed(model, traced.blueprint.rounded)
        for twin in TWINS:
            twin.apply(traced, program, mesh)
        slicing = context.slicing_of(model, program, mesh)
        norms = batch_norm.shared_samples(model, program, mesh)
        deferred = Deferred(traced, program)
        folded_hooks.fold(model, program)
        repeats = repeats_in_graphs(program.step)
        if repeats:
            recompute.apply(model, program, mesh.device, slicing.in_graph)
        compiled = compile_blocks(traced, program, settings, functools.partial(slicing.in_graph, is_repeated=repeats))
        dropout.leave_out(model, compiled.in_graph)
        dropout.track_modules(model)
        dropout.place_samples(model, traced.spec.masks)
        if not repeats:
            recompute.apply(model, program, mesh.device)
        return cls(traced, program, mesh, slicing, norms, compiled, deferred)

    def dropout_state(self, settings: RunTable) -> DropoutState:
        """Return the state of the model's dropout before the first step: active if the trace drew masks or a probability is above 0."""
        spec, mesh, layout = self.traced.spec, self.mesh, self.program.step.layout
        tp, cp = ((mesh.size(axis), mesh.index(axis)) for axis in ("tp", "cp"))
        is_active = spec.masks or self.traced.analysis.has_dropout
        return DropoutState(
            Dropout.ACTIVE if is_active else Dropout.UNKNOWN,
            self.traced.module,
            MaskSlice.of(spec, tp, cp, cuts_sequence=layout.sequence_parallel, cp_heads=self.slicing.heads),
            may_go_by_name=layout.pp == layout.cp == 1 and not self.compiled.num_blocks,
            allows_random="random" in settings.allow,
        )

    def parallel(self, flows: Flows | None) -> Parallel:
        """Return what carries out the program between ranks; the model is filled."""
        traced, program, mesh, norms = self.traced, self.program, self.mesh, self.batch_norms
        other_stages.mark(traced.module)
        precise = precision.PreciseForwards(program)
        graphs = bool(self.compiled.num_blocks)
        stage = _stage_of(traced, program, mesh, self.slicing, flows, self.deferred, runs_graphs=graphs)
        repeated = (
            precise.recompute_contexts,
            functools.partial(dropout_state.recompute_contexts, traced.module),
            self.slicing.recompute_contexts,
            norms.recompute_contexts,
        )
        chunked_mlp.apply(traced.module, program, functools.partial(recompute.nest_each, repeated))
        return Parallel(
            program=program,
            mesh=mesh,
            stage=stage,
            step_parts=(
                *([stage] if isinstance(stage, pipeline.Stage) else []),
                *([norms] if norms.are_used else []),
                *([precise.casts] if precise.casts else []),
                *RepeatedState.parts_of(traced.analysis.states, traced.module, program),
            ),
            slicing=self.slicing,
            batch_norms=norms,
            precise=precise,
            pending=pending_of(traced.module, program, mesh, self.compiled.run),
            checkpoints=recompute.in_our_modes(
                functools.partial(recompute.nest_each, (*repeated, *expert.recompute_contexts(mesh.size("ep")))),
                plainly=traced.spec.runs_checkpoints_plainly(on_stages=isinstance(stage, pipeline.Stage)),
                detached=traced.analysis.detached_checkpoints,
            ),
        )


def _stage_of(
    traced: TracedModel,
    program: Program,
    mesh: Mesh,
    slicing: context.Slicing | context.WholeSequences,
    flows: Flows | None,
    deferred: Deferred,
    *,
    runs_graphs: bool = False,
) -> pipeline.Stage | WholeModel:
    """Return the layers that this rank runs, and their exchange with other stages where there are any; `runs_graphs` if the job compiles."""
    running = nullcontext if runs_graphs else _running_in(program.step.layout, traced.module)
    running = own_backwards.around(traced.module, running) if traced.spec.differentiates_at else running
    return (
        pipeline.Stage(traced, program, mesh, slicing, flows, deferred, running)
        if mesh.size("pp") > 1
        else WholeModel(traced.module, running)
    )


def _running_in(layout: Layout, model: nn.Module) -> Callable[[], AbstractContextManager[object]]:
    """Return the context of forwards of a model that compiles itself: uncompiled where a layout has hooks in its modules, which the
    compiler would compile too.
    """
    has_hooks = layout.zero > 1 or layout.model_ranks * layout.pp * layout.cp * layout.ep > 1
    return disable_compiler if has_hooks and any(map(is_compiled, model.modules())) else nullcontext


def pending_of(
    model: nn.Module, program: Program, mesh: Mesh, run: RunFunction
) -> Callable[[], AbstractContextManager[None]]:
    """Return what makes the context of a forward without logits, on the stage that has the head; elsewhere it does nothing.

    The head of the model returns logits that are not made yet (`tracing/pending_logits.py`); the loss makes them, a chunk of tokens at a
    time (`strategies/chunked_loss.py` has the mathematics). `run` calls the functions of a chunk.
    """
    head, chunk = program.step.model.layers[-1].head, program.step.layout.loss_chunk
    is_here = not program.chunks or program.chunks[-1].stop == len(program.step.model.layers)
    if head is None or chunk is None or not is_here:
        return nullcontext
    module = model.get_submodule(head.owner)
    assert isinstance(module, nn.Linear), "another head is rejected"
    return PendingHead(module, _chunking_of(program, mesh, chunk, run)).pending


def _chunking_of(program: Program, mesh: Mesh, tokens: int, run: RunFunction) -> Chunking:
    """Return how this rank computes logits in chunks of `tokens`; where tp cuts the vocabulary, each chunk's largest logits and sums
    are those of all ranks of `tp`."""
    if not cuts_logits(program):
        return Chunking(tokens, run=run)
    group = mesh.groups["tp"]

    def reduce(values: Tensor, name: str) -> None:
        op = dist.ReduceOp.MAX if name == "largest" else dist.ReduceOp.SUM
        with owned(f"loss.{name}"):
            dist.all_reduce(values, op=op, group=group)

    return Chunking(tokens, dist.get_world_size(group), dist.get_rank(group), reduce, run)
