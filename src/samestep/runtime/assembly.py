"""Assembly of a run: a traced model (`examination/examine.py`) is cut, filled with this rank's part, and given a store.

```
_decide          examine the model, read the optimizer's rule, write this rank's program      ─► _Decided
AppliedAxes      each axis' twin works on the modules; nothing in a plain layout              ─► Parallel
_fill_weights    this rank's part of every weight, in the store of the layout                 ─► WeightStore
_prepare_model, Objective.of, _with_updater                                                   ─► Assembly
```
Where a layout or a job does not ask for a technique, its function returns an object that does nothing.

The parts of an assembly are never replaced; what changes between steps is inside them: weights, gradients, the
optimizer's state, the loss scale, and what is known of the model's dropout.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from samestep.building.initial_values import fill_rest
from samestep.building.loss import cross_entropy
from samestep.building.model_loss import settle_own_loss
from samestep.building.optimizer import learning_rate_factor
from samestep.building.over_samples import IGNORING
from samestep.building.owned_model import PlainForm
from samestep.building.pretrained_form import PretrainedForm
from samestep.examination.examine import Source, examine
from samestep.examination.traced_model import TracedModel
from samestep.job import Job
from samestep.layout import Layout
from samestep.models.spec import ModelSpec
from samestep.output.text import listed
from samestep.program.program import Program
from samestep.program.ranks import Ranks
from samestep.randomness.dropout_state import DropoutState
from samestep.runtime import memory_limits
from samestep.runtime.axes import batch_norm, exchanging_calls, forward_state, host_weights, precision, recompute
from samestep.runtime.axes.applied_axes import AppliedAxes, Parallel
from samestep.runtime.axes.compiled_blocks import CompiledBlocks
from samestep.runtime.axes.pipeline import recorded_flows
from samestep.runtime.axes.pipeline.stage_flow import Flows
from samestep.runtime.objective import Objective
from samestep.runtime.optimizers.optimizer_source import given_sources
from samestep.runtime.optimizers.optimizer_step import Updater
from samestep.runtime.optimizers.packed_states import StatePacking
from samestep.runtime.optimizers.whole_optimizer import WholeOptimizer
from samestep.runtime.processes import mesh as meshes
from samestep.runtime.processes import messages
from samestep.runtime.processes.join import RankInfo
from samestep.runtime.weights import owning
from samestep.runtime.weights.moving_averages import WeightAverages
from samestep.runtime.weights.parameter_hooks import attributes_of, gradient_hooks
from samestep.runtime.weights.placement import Placements
from samestep.runtime.weights.replaced_weights import ReplacedWeights
from samestep.runtime.weights.unsummed import whole_weights
from samestep.runtime.weights.weight_store import Materialize, WeightStore
from samestep.runtime.weights.weights_in_loops import WeightsInLoops
from samestep.state.fingerprints import FirstState, digests_of, places_of
from samestep.state.snapshot import Slot, modules_of
from samestep.state.writes import AlikeTensors
from samestep.strategies import program_of

_MISFIT = "invalid for input of size"
"""Words of torch's error for a view with other sizes than a rank's part has."""


@dataclass(frozen=True, slots=True)
class PreparedModel:
    """This rank's module, as the layout has cut it, and the facts a run needs about it."""

    module: nn.Module
    spec: ModelSpec
    """Spec of the whole model."""
    master_dtype: torch.dtype
    """Dtype of master weights and gradients, and of a batch's floating tensors."""
    keeps_double: bool
    """Whether float64 values of a batch that this dtype cannot hold are kept as they are."""
    training_modes: Mapping[nn.Module, bool]
    """Whether each module trained when it was prepared: a batch norm that was built frozen does not."""
    compiled: CompiledBlocks
    running_buffers: AlikeTensors
    """Running statistics, which a skipped step restores."""
    first_state: FirstState
    """Fingerprints of frozen weights, buffers and attributes before the first step."""
    first_of_loss: Mapping[Slot, int]
    """Digests of what the loss kept before the first step."""
    first_outside: Mapping[Slot, int]
    """Those of the variables outside of modules in which the model's code keeps something."""
    replaced: ReplacedWeights
    plain: PlainForm
    """The form of the module without the layout."""
    dropout: DropoutState
    remarks: tuple[str, ...] = ()
    """Refusals of this model that `run.allow` waives."""
    form: PretrainedForm | None = None
    """The form in which checkpoints write the model for transformers too; None where they do not."""
    given: Mapping[str, weakref.ref[Tensor]] = field(default_factory=dict)
    """Parameters that code has made elsewhere, of which the run's own are copies, by name."""
    state_names: Mapping[str, str] = field(default_factory=dict)
    """Of each tensor in the uncut module's `state_dict`, the first name of what it is: tied weights have several."""
    gathered: Mapping[str, str] = field(default_factory=dict)
    """Modules whose outputs tp gathers although a plan cuts them otherwise, or which it leaves whole, and why."""

    def gathered_lines(self) -> Iterator[str]:
        """Yield a line for each reason for which every rank of tp computes whole after some modules."""
        reasons: dict[str, list[str]] = {}
        for path, reason in self.gathered.items():
            reasons.setdefault(reason, []).append(path)
        for reason, paths in reasons.items():
            fix = ". Use view(b, t, -1, head_dim), which also fits the heads of a rank" if _MISFIT in reason else ""
            yield f"tp gathers the outputs of {listed(paths, 4)}, so every rank computes the code after them whole: {reason}{fix}"


@dataclass(frozen=True, slots=True)
class Weights:
    """This rank's weights, and the optimizer that updates them."""

    store: WeightStore
    updater: Updater
    placements: Placements
    """The elements of whole weights of which this rank's parts consist."""
    lr_factor: Callable[[int], float]
    """Returns the factor on the learning rate in a step, counted from 0."""
    in_loops: WeightsInLoops
    """The weights that a loop meets between two steps otherwise than a step does."""


@dataclass(frozen=True, slots=True)
class Assembly:
    """All parts of a prepared run."""

    parallel: Parallel
    model: PreparedModel
    objective: Objective
    weights: Weights


@IGNORING
def assemble(source: Source, layout: Layout, job: Job, place: RankInfo, example: Any) -> Assembly:
    """Build, cut and fill the model of one rank.

    Collective over the world, since it makes the process groups, see [Note: collective calls].

    Raises:
        InputError: the model, the optimizer or the number of processes does not fit the layout.
    """
    decided = _decide(source, layout, job, place, example)
    plan = decided.traced.blueprint
    precision.set_products(job.numerics)
    mesh = meshes.build(decided.program, place.device, job.run.timeout_s)
    assert all(param.is_meta for param in plan.module.parameters()), "a blueprint is cut and filled by one run alone"
    # Read while weights are whole, and the loss is called as its code does.
    form = PretrainedForm.of(plan, job) if job.checkpoint.save_pretrained else None
    settle_own_loss(plan.module, source.loss, example)
    state_names = plan.state_names()
    axes = AppliedAxes.of(decided.traced, decided.program, mesh, job.run)
    placements = Placements.of(decided.spec, decided.program, mesh)
    store = _fill_weights(decided, placements)
    exchanges = exchanging_calls.watch(axes.traced.module, decided.program, store.before_exchange, source.loss)
    assembled = Assembly(
        parallel=axes.parallel(decided.flows),
        model=_prepare_model(decided, axes, store, form, state_names),
        objective=Objective.of(source, decided.traced, decided.program, mesh, exchanges, example, axes.compiled.run),
        weights=_with_updater(decided, placements, store),
    )
    plan.plain.settle(functools.partial(plan.materialize, device=place.device), frees=plan.is_taken)
    return assembled


@dataclass(frozen=True, slots=True)
class _Decided:
    """What is decided of a rank's run before its model is cut."""

    source: Source
    job: Job
    traced: TracedModel
    flows: Flows | None
    spec: ModelSpec
    """The spec of the whole model, with what its optimizer needs."""
    optimizer: WholeOptimizer
    program: Program
    waived: tuple[str, ...]
    """Rejections of what the model keeps that the job waives."""


def _decide(source: Source, layout: Layout, job: Job, place: RankInfo, example: Any) -> _Decided:
    """Trace the model, make the program of this rank, and refuse what this machine cannot hold and what its groups cannot send.

    Raises:
        InputError: the model or the optimizer does not fit the layout, or the layout does not fit the machine.
    """
    traced, flows = recorded_flows.with_flows(examine(source, job, example, layout), layout, job, example, source.loss)
    layout = recompute.layout_for(layout, traced.analysis)
    ranks = Ranks.of(layout)
    stage, replica = ranks.coordinate(place.rank, "pp"), ranks.coordinate(place.rank, "dp")
    marks = attributes_of(traced.blueprint.marks)
    optimizer, spec = WholeOptimizer.of(source.optimizer, traced.spec, marks, job, layout)
    cuts_loss, in_chunks = source.loss is cross_entropy, optimizer.updates_in_chunks
    program = program_of(spec, job, layout, place.ranks_per_node, cuts_loss, stage, replica, in_chunks)
    memory_limits.refuse_weights_too_large(program, job, place.device, place.ranks_per_node)
    messages.check(spec, program.step.layout, job, several_hosts=place.ranks_per_node < place.world_size)
    waived = tuple(forward_state.check(traced.analysis.states, program, job.run))
    return _Decided(source, job, traced, flows, spec, optimizer, program, waived)


def _fill_weights(decided: _Decided, placements: Placements) -> WeightStore:
    """Give this rank its part of every weight, in the store of the layout, and fill the rest of the model."""
    job, program, mesh = decided.job, decided.program, placements.mesh
    plan, model = decided.traced.blueprint, decided.traced.module
    make = store_of(program.step.layout)
    store = make(model, program, mesh, host_weights.on_host(functools.partial(placements.materialize, plan), program))
    host_weights.copy_for_calls(model, program, mesh)
    store = owning.owning(store, program, mesh, decided.spec)
    attributes = decided.optimizer.weights.attributes  # of Python, that the user's parameters had
    for name, param in model.named_parameters():
        param.__dict__.update(attributes.get(name, {}))
    store.hook_gradients(gradient_hooks(plan, program, mesh))
    fill_rest(plan, mesh.device, torch.float64 if job.numerics.precision == "float64" else None)
    return store


def _prepare_model(
    decided: _Decided,
    axes: AppliedAxes,
    store: WeightStore,
    form: PretrainedForm | None,
    state_names: Mapping[str, str],
) -> PreparedModel:
    """Return the filled module and the facts that a run needs about it."""
    traced, program, spec, model = decided.traced, decided.program, decided.spec, axes.traced.module
    written = [state.full_name for state in traced.analysis.states if state.kind == "weight"]
    running = batch_norm.running_buffers(model, spec)
    return PreparedModel(
        module=model,
        spec=spec,
        master_dtype=precision.DTYPES[program.step.master_dtype],
        keeps_double=decided.traced.keeps_double,
        compiled=axes.compiled,
        training_modes={module: module.training for module in model.modules()},
        running_buffers=AlikeTensors(
            [*running, *(buffer for name, buffer in model.named_buffers() if name in spec.kept_after)]
        ),
        first_state=FirstState.of(model, {piece.name: piece.value for piece in store.frozen}),
        first_of_loss=digests_of(places_of(decided.source.loss, modules_of(decided.source.loss))),
        first_outside=digests_of(places_of(model)),
        replaced=ReplacedWeights(model, written, program),
        plain=traced.blueprint.plain,
        dropout=axes.dropout_state(decided.job.run),
        remarks=decided.waived,
        form=form,
        given={} if traced.blueprint.is_taken else traced.blueprint.given,
        state_names=state_names,
        gathered=traced.analysis.gathered if program.step.layout.tp > 1 else {},
    )


def _with_updater(decided: _Decided, placements: Placements, store: WeightStore) -> Weights:
    """Return the weights of a store, with the optimizer that updates them."""
    job, program = decided.job, decided.program
    if (owner := decided.source.owner) is not None:
        owner.optimizers = [*given_sources(decided.optimizer.source).values()]
    updater = Updater.over(
        store.pieces,
        decided.optimizer,
        job.numerics,
        codes=store.codes,
        splits_masters=program.step.splits_masters,
        packing=StatePacking.of(program),
        averages=WeightAverages(job.train.ema) if job.train.ema is not None else None,
        follows_schedule=job.schedule.name != "constant" or job.schedule.warmup_steps > 0,
        takes_instances=decided.source.owner is not None,
    )
    return Weights(
        store=store,
        updater=updater,
        placements=placements,
        lr_factor=learning_rate_factor(job),
        in_loops=WeightsInLoops.of(decided.traced.module, program, placements),
    )


def store_of(layout: Layout) -> Callable[[nn.Module, Program, meshes.Mesh, Materialize], WeightStore]:
    """Return what makes the store of a layout's weights.

    FSDP2 and DTensor take a second to import, which replicated runs need not spend. A process that forks workers calls
    this first, so that the workers need not spend it either.
    """
    if not layout.gathers_weights:
        return whole_weights
    from samestep.runtime.weights.sharded import Sharded  # noqa: PLC0415

    return Sharded
