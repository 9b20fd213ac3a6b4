"""Assembly of a run: a model is built on the meta device, traced, cut, filled with this rank's part, and given a store.

prepare    builds and traces the model, once for all ranks: a forked worker inherits the result
assemble   lets each axis' twin work on the modules, from the inside out: precision, the cuts of tp, cp and ep,
           recomputation around them, and outermost the store of the weights on the data axes

The parts of an assembly are never replaced; what changes between steps is inside them: weights, gradients, the
optimizer's state, the loss scale, and what is known of the model's dropout.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from samestep.building.families import facts_of
from samestep.building.initial_values import Blueprint, blueprint, fill_rest
from samestep.building.loss import checked, cross_entropy
from samestep.building.model import JobModel
from samestep.building.optimizer import learning_rate_factor
from samestep.building.pretrained_form import PretrainedForm
from samestep.datasets import checked_samples
from samestep.errors import JobError, LayoutError, ModelError, failures_of
from samestep.job import Job, NumericsTable
from samestep.layout import Layout
from samestep.models.analysis import ExpertModules, ModelAnalysis, StateSpec
from samestep.models.spec import MaskSpec, ModelSpec
from samestep.program.program import Program
from samestep.program.ranks import Ranks
from samestep.runtime import given_instance, kept_state, placement
from samestep.runtime.axes import (
    batch_norm,
    context,
    expert,
    pending_logits,
    pipeline,
    precision,
    recompute,
    tensor,
    whole_update,
)
from samestep.runtime.axes.chunked_loss import Chunking
from samestep.runtime.axes.data import Replicated
from samestep.runtime.axes.weight_gradients import Deferred
from samestep.runtime.compiled_blocks import CompiledBlocks, compile_blocks
from samestep.runtime.dropout import mode as dropout
from samestep.runtime.dropout import rates
from samestep.runtime.dropout.masks import MaskSlice
from samestep.runtime.first_state import FirstState
from samestep.runtime.optimizer_source import (
    WholeWeights,
    check_optimizer,
    couples_weights,
    updates_in_chunks,
)
from samestep.runtime.optimizer_step import Updater
from samestep.runtime.packed_states import StatePacking
from samestep.runtime.parameter_hooks import attributes_of, gradient_hooks
from samestep.runtime.pieces import Piece
from samestep.runtime.processes import mesh as meshes
from samestep.runtime.processes.join import RankInfo
from samestep.runtime.update_rule import OptimizerSource
from samestep.runtime.weight_store import Materialize, WeightStore
from samestep.strategies import program_of
from samestep.strategies.tensor import refuse_degree
from samestep.tracing import (
    cut_proof,
    samples,
    sequence_boundaries,
    sequence_proof,
    slices,
    snapshot,
    state,
    tensor_plan,
)
from samestep.tracing import experts as experts_module
from samestep.tracing.arranged_layers import spread_over_calls
from samestep.tracing.batch_norms import with_groups, without_own_groups
from samestep.tracing.forward import outputs_on_meta
from samestep.tracing.operations import Recorder
from samestep.tracing.rank_trial import DiffersError
from samestep.tracing.structural_plan import structural_plan
from samestep.tracing.trace import containers_of, samples_traced, trace
from samestep.tracing.traced_model import TracedModel

# Order matters: from the inside out, as in `strategies.STACK`.
TWINS: tuple[ModuleType, ...] = (tensor, expert)
"""The twins that change modules in place, each with a function `apply(traced, program, mesh)`."""

Loss = Callable[[Any, Any], tuple[Tensor, Tensor | int]]


@dataclass(frozen=True, slots=True)
class Source:
    """The model, loss and optimizer that a run is made from."""

    model: Callable[[], nn.Module] | nn.Module
    loss: Loss
    optimizer: OptimizerSource
    name: str = "model"
    prepared: TracedModel | None = None
    """The model, built and traced already, where a forked worker inherits it."""


@dataclass(frozen=True, slots=True)
class Parallel:
    """The program of this rank, and the objects that carry it out between ranks."""

    program: Program
    mesh: meshes.Mesh
    stage: pipeline.Stage | pipeline.WholeModel
    """The layers that this rank runs, and the tensors it exchanges with other pipeline stages."""
    slicing: context.Slicing | context.WholeSequences
    """The slice of every sequence that this rank runs."""
    batch_norms: batch_norm.BatchNorms
    """The batch norms that take statistics of samples, also of those that other ranks have."""
    deferred: Deferred
    """Weight gradients that a split backward has postponed."""
    pending: Callable[[], AbstractContextManager[None]]
    """Returns the context of a forward whose loss makes the logits, in chunks."""
    checkpoints: Callable[[], AbstractContextManager[None]]
    """Returns the context of a step, in which checkpointed forwards are repeated as they ran."""


@dataclass(frozen=True, slots=True)
class PreparedModel:
    """This rank's module, as the layout has cut it, and the facts a run needs about it."""

    module: nn.Module
    spec: ModelSpec
    """Spec of the whole model."""
    master_dtype: torch.dtype
    """Dtype of master weights and gradients, and of a batch's floating tensors."""
    training_modes: Mapping[nn.Module, bool]
    """Whether each module trains: a batch norm that was built frozen stays frozen."""
    compiled: CompiledBlocks
    running_buffers: Sequence[Tensor]
    """Running statistics, which a skipped step restores."""
    first_state: FirstState
    """Fingerprints of frozen weights, buffers and attributes before the first step."""
    dropout: dropout.DropoutState
    mask_part: MaskSlice | None
    """The slice of each dropout mask that this rank draws; None where no axis cuts a mask."""
    remarks: tuple[str, ...] = ()
    """Refusals of this model that `run.allow` waives."""
    form: PretrainedForm | None = None
    """The form in which checkpoints write the model for transformers too; None where they do not."""
    state_names: Mapping[str, str] = field(default_factory=dict)
    """Of each tensor in the uncut module's `state_dict`, the first name of what it is: tied weights have several."""
    gathered: Mapping[str, str] = field(default_factory=dict)
    """Modules whose outputs tp gathers although a plan cuts them otherwise, or which it leaves whole, and why."""


@dataclass(frozen=True, slots=True)
class Objective:
    """The sum that a step minimises."""

    loss: Loss
    balance: expert.Balance | expert.NoBalance
    """The auxiliary loss that balances experts."""
    nominal_count: float
    """A power of two near the count of a whole step: dividing by it loses no bit."""


@dataclass(frozen=True, slots=True)
class Weights:
    """This rank's weights, and the optimizer that updates them."""

    store: WeightStore
    updater: Updater
    lr_factor: Callable[[int], float]
    """Returns the factor on the learning rate in a step, counted from 0."""


@dataclass(frozen=True, slots=True)
class Assembly:
    """All parts of a prepared run."""

    parallel: Parallel
    model: PreparedModel
    objective: Objective
    weights: Weights

    def with_optimizer(self, source: OptimizerSource, numerics: NumericsTable) -> Assembly:
        """Return this assembly with another optimizer over the same weights; its state is empty."""
        whole = self.weights.updater.whole
        packing = self.weights.updater.packing
        updater = Updater.over(self.weights.store.pieces, source, numerics, whole, packing=packing)
        return replace(self, weights=replace(self.weights, updater=updater))

    def without_balance(self) -> Assembly:
        """Return this assembly without the auxiliary loss that balances experts."""
        return replace(self, objective=replace(self.objective, balance=expert.NoBalance()))


def prepare(source: Source, job: Job, example: Any, planned: tensor_plan.Cuts | None = None) -> TracedModel:
    """Build the model on the meta device and trace it on one sample of `example`; nothing else examines it.

    `planned` is the plan of tensor parallelism, if not the one that is found for the model.

    Raises:
        ModelError: the model cannot be built or traced.
    """
    plan = _built(source, job)
    dtype = next((param.dtype for param in plan.module.parameters() if param.is_floating_point()), torch.float32)
    one = _first_of(example, dtype)
    experts = experts_module.experts_of(plan.module)
    planned = planned or _plan_of(plan, experts, one)
    expert_calls: dict[str, tuple[Any, Any]] = {}
    value_of = functools.partial(plan.materialize, device=torch.device("cpu"))
    recorder = Recorder()
    with checked_samples(example), ExitStack() as stack:
        changes = stack.enter_context(state.record_changes(plan.module))  # first: it looks when the others have gone
        stack.enter_context(cut_proof.record_ends(plan.module, planned.styles, recorder))
        seen = stack.enter_context(tensor_plan.record_cuts(plan.module, planned))
        calls = stack.enter_context(sequence_boundaries.record_calls(plan.module))
        masks = stack.enter_context(dropout.record_masks(plan.module, samples_traced(plan.module)))
        dispatches = stack.enter_context(experts_module.record_dispatches(plan.module, experts, expert_calls))
        checkpointed = stack.enter_context(recompute.record_checkpointed(plan.module))
        spec = trace(plan.module, one, source.name, value_of, seen.keep, planned.styles, recorder, source.loss)
    proof, counts, shareable = _proven(spec, plan, planned, recorder, experts, one, source.loss is cross_entropy)
    fewer, refusal = planned, proof.refusal
    while refusal and not spec.varies_at and (smaller := tensor_plan.smaller(plan.module, fewer, refusal)):
        cuts_loss = source.loss is cross_entropy
        fewer, refusal = smaller, _proven(spec, plan, smaller, recorder, experts, one, cuts_loss)[0].refusal
    if fewer is not planned and not refusal:
        return prepare(source, job, example, fewer)  # costs are those of the cuts that are traced
    if planned.gathered:  # what a rank holds and sends is that of the gathered modules
        with _once_more(plan.module, experts), tensor_plan.record_cuts(plan.module, planned) as seen:
            spec = trace(plan.module, one, source.name, value_of, seen.keep, planned.styles, None, source.loss)
    states: tuple[StateSpec, ...] = ()
    if changes.found:
        containers, num_samples = containers_of(plan.module), samples_traced(plan.module)
        with recompute.record_checkpointed(plan.module):
            states = state.examine(plan.module, one, spec, containers, num_samples, value_of)
    spec = experts_module.with_experts(spec, dispatches, plan.module if source.loss is cross_entropy else None)
    spec = spread_over_calls(tensor_plan.with_cuts(spec, plan.module, planned, seen, shareable, proof))
    spec = _with_loss(spec)
    spec, parts = sequence_boundaries.with_sequence(spec, plan.module, planned.styles, calls)
    placed: list[MaskSpec] = []

    @contextmanager
    def placing(rows_of: samples.RowsOf) -> Iterator[None]:
        with dropout.record_masks(plan.module, samples.NUM_SAMPLES, rows_of) as found:
            yield
        placed.extend(found)

    with _once_more(plan.module, experts):
        run_on_meta = functools.partial(
            outputs_on_meta, plan.module, one, samples_traced(plan.module), value_of, bool(spec.varies_at)
        )
        spec = replace(spec, chunk_refusal=pending_logits.refusal_of(plan.module, spec, source.loss, run_on_meta))
    with snapshot.preserved(plan.module), recompute.record_checkpointed(plan.module):
        found = samples.examine(
            plan.module, one, source.loss, experts, value_of,
            keeps_all=bool(spec.varies_at), takes_gradients=bool(spec.differentiates_at), around=placing,
        )  # fmt: skip
    spec = replace(with_groups(spec, found.batch_norms), mixes_samples=found.refusal, tried=found.tried)
    analysis = ModelAnalysis(
        spec=replace(spec, masks=dropout.with_constants(masks, placed, samples.NUM_SAMPLES)),
        cut_styles=planned.styles,
        gathered=planned.gathered,
        copied=proof.copied,
        counts=counts,
        shareable_heads=shareable,
        sequence_parts=parts,
        experts=experts,
        expert_calls=expert_calls,
        has_dropout=rates.has_dropout(plan.module),
        states=states,
        detached_checkpoints=checkpointed.detached,
        recomputes_blocks=any(
            checkpointed.entered.intersection(layer.modules) for layer in spec.layers if layer.is_block
        ),
    )
    return TracedModel(plan, analysis, facts_of(plan.module), proof)


@contextmanager
def _once_more(module: nn.Module, experts: ExpertModules) -> Iterator[None]:
    """Let a forward of the whole model run once more on the meta device, from the state that the modules have now.

    At their first forward modules make tables, and install hooks that record their outputs: both are taken back.
    """
    with (
        snapshot.preserved(module),
        recompute.record_checkpointed(module),
        dropout.record_masks(module, samples_traced(module)),
        experts_module.record_dispatches(module, experts),
    ):
        yield


def _plan_of(plan: Blueprint, experts: ExpertModules, sample: Any) -> tensor_plan.Cuts:
    """Return the plan of tensor parallelism of a model; where it has none, the one that its data flow shows."""
    planned = tensor_plan.cuts_of(plan.module, experts.counts)
    if not planned.is_open:
        return planned
    try:
        _run_forward(plan, experts, sample, {}, recorder := Recorder())
    except DiffersError:  # the trace says why the forward fails
        return planned
    styles = structural_plan(plan.module, recorder.operations, experts.counts)
    return tensor_plan.Cuts(styles, may_shrink=True) if styles else planned


def _run_forward(
    plan: Blueprint, experts: ExpertModules, sample: Any, styles: Mapping[str, str], recorder: Recorder
) -> None:
    """Record the operations of a forward on the meta device, with the ends of the modules that have a cut style.

    Raises:
        DiffersError: it fails.
    """
    value_of = functools.partial(plan.materialize, device=torch.device("cpu"))
    with _once_more(plan.module, experts):
        cut_proof.run_forward(plan.module, sample, styles, value_of, recorder)


def _proven(
    spec: ModelSpec,
    plan: Blueprint,
    planned: tensor_plan.Cuts,
    recorder: Recorder,
    experts: ExpertModules,
    sample: Any,
    cuts_loss: bool,
) -> tuple[cut_proof.CutProof, dict[int, tuple[tuple[str, str, int], ...]], dict[str, int]]:
    """Return the proof of a plan, the counts of a rank, and the heads that ranks may share.

    Where the code behind a cut needs more than a rank's part, the outputs of the modules that it reads are gathered; where
    that does not help, these modules stay whole.
    """
    first: cut_proof.CutProof | None = None
    while True:
        counts: dict[int, tuple[tuple[str, str, int], ...]] = {}
        shareable = {} if planned.refusal else tensor_plan.shareable_heads(plan.module, planned)
        proof = tensor_plan.proof_of(spec, plan.module, planned, shareable, recorder, cuts_loss)
        if degree := cut_proof.smallest_degree(proof):
            proof, counts = _tried(proof, plan, experts, shareable, sample, degree)
        if not proof.refusal:
            return proof, counts, shareable
        first = first or proof
        planned.gather(paths := cut_proof.to_gather(plan.module, proof), proof.refusal)
        if not paths or not planned.styles:
            planned.styles = dict(first.styles)
            planned.gathered.clear()
            return first, {}, shareable


def _tried(
    proof: cut_proof.CutProof,
    plan: Blueprint,
    experts: ExpertModules,
    shareable: Mapping[str, int],
    sample: Any,
    degree: int,
) -> tuple[cut_proof.CutProof, dict[int, tuple[tuple[str, str, int], ...]]]:
    """Return the proof of a plan with the counts of a rank of a degree, or why it fails, and the counts by module."""
    shared = {path: heads for path, heads in shareable.items() if heads < degree}
    forward = functools.partial(_run_forward, plan, experts, sample, proof.styles)
    try:
        forward(recorder := Recorder())
        proof = cut_proof.with_degree(proof, plan.module, shared, recorder.operations, forward, degree)
    except DiffersError as error:
        return replace(proof, refusal=str(error), refused_at=error.where), {}
    return proof, {degree: proof.divided(plan.module)}


def with_new_blueprint(source: Source, job: Job) -> TracedModel:
    """Return the source's traced model with a blueprint of its own, for another run; the analysis is shared."""
    assert source.prepared is not None
    return replace(source.prepared, blueprint=_built(source, job))


def _built(source: Source, job: Job) -> Blueprint:
    # Whoever calls from Python wants the exceptions of their own function as they are.
    named = isinstance(source.model, JobModel)
    with failures_of(f"model.source: {source.name}", ModelError) if named else nullcontext():
        plan = blueprint(source.model, job.train.seed, functools.partial(job.run.waived, "build"))
    without_own_groups(plan.module)
    if not plan.module.training:
        plan.module.train()  # a model loaded for inference; in one that trains, a part in evaluation mode is intended
    return plan


def _with_loss(spec: ModelSpec) -> ModelSpec:
    """Add the loss to the last layer: it writes the log-probabilities of the output, and keeps them for its backward.

    A cross entropy does that, and other losses do little less. Its backward holds their gradient and its own result.
    """
    *others, last = spec.layers
    moved = 2 * last.output_elements
    last = replace(
        last,
        loss_elements=last.output_elements,
        loss_working_elements=2 * last.output_elements,
        moved_elements=last.moved_elements + moved,
        moved_cut_elements=last.moved_cut_elements + (moved if spec.logit_rows else 0),
        kernels=last.kernels + 3,
    )
    return replace(spec, layers=(*others, last))


def traced_for(source: Source, layout: Layout, job: Job, example: Any) -> TracedModel:
    """Return the model of a source with what a layout needs to know; what is known already is not traced again.

    Raises:
        LayoutError: the forward of a rank of this layout does not compute its part of the whole model's.
    """
    traced = with_slices(source.prepared or prepare(source, job, example), layout, example)
    recorded = pipeline.with_flows(traced, layout, job, example, source.loss)[0].flows
    return traced if len(recorded) == len(traced.flows) else replace(traced, flows=recorded)


def with_slices(traced: TracedModel, layout: Layout, example: Any) -> TracedModel:
    """Return the model with what the layout needs to know: the counts of its tp, and that blocks work token by token.

    Raises:
        LayoutError: the forward of a rank of this tp does not compute its part of the whole model's.
    """
    traced = _with_degree(traced, layout.tp, example)
    if layout.tp > 1:
        spec = _with_tried(traced.spec, traced.cuts.tried)
        traced = replace(traced, analysis=replace(traced.analysis, spec=spec))
    traced = _with_tokens_of_a_rank(traced, layout, example)
    analysis, spec = traced.analysis, traced.spec
    parts = layout.cp
    if parts in (1, *analysis.parts_examined):
        return traced
    value_of = functools.partial(traced.blueprint.materialize, device=torch.device("cpu"))
    one = _first_of(example, torch.float32)
    if not (analysis.parts_examined and spec.slice_refusal):
        with snapshot.preserved(traced.module):
            spec = slices.prove(traced.module, one, spec, value_of, analysis.experts, parts)
    analysis = replace(analysis, spec=spec, parts_examined=(*analysis.parts_examined, parts))
    return replace(traced, analysis=analysis)


def _with_tried(spec: ModelSpec, tried: Iterable[str]) -> ModelSpec:
    """Return the spec with more of what is used because a trial has passed."""
    return replace(spec, tried=tuple(dict.fromkeys((*spec.tried, *tried))))


def _with_tokens_of_a_rank(traced: TracedModel, layout: Layout, example: Any) -> TracedModel:
    """Return the model with a proof that its blocks work token by token between the parts that tp cuts, or a refusal."""
    analysis, spec, degree = traced.analysis, traced.spec, layout.tp
    known = not layout.sequence_parallel or degree in (1, *analysis.slices_between)
    if known or spec.sequence_refusal or spec.sequence % degree:
        return traced
    value_of = functools.partial(traced.blueprint.materialize, device=torch.device("cpu"))
    sample, parts = _first_of(example, torch.float32), analysis.sequence_parts
    refusal, tried = sequence_proof.refuse_slices(
        traced.module, sample, parts, spec.sequence, degree, value_of, analysis.experts
    )
    spec = replace(_with_tried(spec, tried), sequence_refusal=refusal, expert_refusal=refusal)
    return replace(traced, analysis=replace(analysis, spec=spec, slices_between=(*analysis.slices_between, degree)))


def _with_degree(traced: TracedModel, degree: int, example: Any) -> TracedModel:
    """Return the model with the counts of a rank of a tensor cut of this degree, tried unless they are known."""
    analysis, plan = traced.analysis, traced.blueprint
    if degree == 1 or degree in analysis.counts or refuse_degree(analysis.spec, degree):
        return traced
    dtype = next((param.dtype for param in plan.module.parameters() if param.is_floating_point()), torch.float32)
    sample, shareable = _first_of(example, dtype), analysis.shareable_heads
    proof, counts = _tried(traced.cuts, plan, analysis.experts, shareable, sample, degree)
    if proof.refusal:
        raise LayoutError(f"tp={degree}: {analysis.spec.name} cannot be cut so, {proof.refusal}; tp=1 works")
    return replace(traced, analysis=replace(analysis, counts={**analysis.counts, **counts}), cuts=proof)


def _first_of(example: Any, dtype: torch.dtype) -> Any:
    """Return a batch of the first sample, its floating tensors in `dtype`."""
    return precision.cast_floating(tree_map_only(Tensor, lambda tensor: tensor[:1], example), dtype)


def _set_products(numerics: NumericsTable) -> None:
    """Let matrix products on GPUs multiply as the job says, and add in float32, also where blocks of a kernel share a sum.

    In half precision torch lets them add up such parts rounded, and how a sum is divided depends on the shapes of a layout.
    """
    products = torch.backends.cuda.matmul
    products.allow_tf32 = torch.backends.cudnn.allow_tf32 = numerics.tf32
    products.allow_bf16_reduced_precision_reduction = products.allow_fp16_reduced_precision_reduction = False


def assemble(source: Source, layout: Layout, job: Job, place: RankInfo, example: Any) -> Assembly:
    """Build, cut and fill the model of one rank.

    Collective over the world, since it makes the process groups: every rank calls it; if one does not, the others wait
    until the time limit.

    Raises:
        InputError: the model, the optimizer or the number of processes does not fit the layout.
    """
    traced, flows = pipeline.with_flows(traced_for(source, layout, job, example), layout, job, example, source.loss)
    plan, spec = traced.blueprint, traced.spec
    layout = recompute.layout_for(layout, traced.analysis)
    ranks = Ranks.of(layout)
    stage, replica = ranks.coordinate(place.rank, "pp"), ranks.coordinate(place.rank, "dp")
    whole = WholeWeights.of(spec, attributes_of(plan.marks))
    spec = check_optimizer(source.optimizer, spec, layout, whole.attributes)
    # Asked now, for the canary: the optimizer that is used must be the last one that the function makes.
    is_watched = 0 < job.train.watch_every <= job.train.steps or bool(spec.tried)
    couples = is_watched and couples_weights(source.optimizer, spec, whole.attributes)
    in_chunks = _updates_in_chunks(source, job, whole)
    program = program_of(
        spec, job, layout, place.ranks_per_node, source.loss is cross_entropy, stage, replica, in_chunks
    )
    waived = kept_state.check(traced.analysis.states, program, job.run)
    _set_products(job.numerics)
    mesh = meshes.build(program, place.device, job.run.timeout_s)
    model = plan.module
    assert all(param.is_meta for param in model.parameters()), "a blueprint is cut and filled by one run alone"
    form = PretrainedForm.of(plan, job) if job.checkpoint.save_pretrained else None  # before the model is cut
    held = [name for name, value in model.state_dict(keep_vars=True).items() if isinstance(value, Tensor)]
    state_names = {name: plan.canonical.get(name, name) for name in held}
    precision.apply(traced, program)
    for twin in TWINS:
        twin.apply(traced, program, mesh)
    slicing = context.Slicing(model, program, mesh) if layout.cp > 1 else context.WholeSequences()
    norms = batch_norm.BatchNorms(model, program, mesh)
    compiled = compile_blocks(traced, program, job.run)
    dropout.leave_out(model, compiled.in_graph)
    dropout.track_modules(model)
    dropout.place_samples(model, spec.masks)
    deferred = Deferred(traced, program)
    recompute.apply(model, program)

    def materialize(name: str, dtype: torch.dtype) -> Tensor:
        cut = params[name]
        holding = program.step.holding(cut)
        held = placement.part_of(shapes[name], cut, holding, mesh)
        if held.dim == 0 and len(held.shape) > 2 and held.intervals:  # a stack of experts, which no rank holds whole
            return plan.materialize(name, place.device, dtype, held.intervals)
        if held.numel and plan.makes_parts(name):
            return plan.materialize(name, place.device, dtype, held.intervals, held.dim)
        return placement.local_part(plan.materialize(name, place.device, dtype), cut, holding, mesh)

    shapes = {param.name: param for param in spec.params}
    params = {param.name: param for param in program.step.model.params}
    store = whole_update.owning(store_of(layout)(model, program, mesh, materialize), program, mesh, spec)
    _mark(model, spec, whole, store)
    store.hook_gradients(gradient_hooks(plan, program, mesh))
    fill_rest(plan, place.device, torch.float64 if job.numerics.precision == "float64" else None)
    packing = None
    if job.numerics.optimizer_states != "float32":

        def slice_of(piece: Piece) -> placement.WeightSlice:
            cut = params[piece.name]
            if piece.is_uncut:
                return placement.whole(shapes[piece.name].shape)
            return placement.part_of(shapes[piece.name], cut, program.step.holding(cut), mesh)

        states = job.numerics.optimizer_states
        packing = StatePacking(states, job.train.seed, slice_of, program.step.state_blocks)
    of_tp, of_cp = ((mesh.size(axis), mesh.index(axis)) for axis in ("tp", "cp"))
    own_loss = source.loss
    if own_loss is not cross_entropy:
        own_loss = checked(given_instance.watching(own_loss, source.model))
    return Assembly(
        parallel=Parallel(
            program=program,
            mesh=mesh,
            stage=pipeline.Stage(traced, program, mesh, slicing, flows)
            if layout.pp > 1
            else pipeline.WholeModel(model),
            slicing=slicing,
            batch_norms=norms,
            deferred=deferred,
            pending=_pending(model, program, mesh),
            checkpoints=functools.partial(
                recompute.in_our_modes,
                functools.partial(_recompute_contexts, model, program, slicing, norms),
                plainly=traced.analysis.recomputes_blocks,
                detached=traced.analysis.detached_checkpoints,
            ),
        ),
        model=PreparedModel(
            module=model,
            spec=spec,
            master_dtype=precision.DTYPES[program.step.master_dtype],
            compiled=compiled,
            training_modes={module: module.training for module in model.modules()},
            running_buffers=[
                buffer
                for path in dict.fromkeys((*spec.coupled_modules, *spec.batch_norm_owners))
                for buffer in model.get_submodule(path).buffers(recurse=False)
            ],
            first_state=FirstState.of(model, {piece.name: piece.value for piece in store.frozen}),
            dropout=dropout.DropoutState.of(traced.analysis.has_dropout, spec),
            remarks=tuple(waived),
            form=form,
            state_names=state_names,
            gathered=traced.analysis.gathered if layout.tp > 1 else {},
            mask_part=MaskSlice(spec, *of_tp, layout.sequence_parallel, *of_cp) if layout.tp * layout.cp > 1 else None,
        ),
        objective=Objective(
            # In chunks each part of the logits knows that it is cut.
            loss=functools.partial(tensor.cut_loss, mesh)
            if tensor.cuts_logits(program) and layout.loss_chunk is None
            else own_loss,
            balance=expert.Balance.of(traced, program, mesh),
            nominal_count=_nominal_count(example, job.train.global_batch),
        ),
        weights=Weights(
            store=store,
            updater=Updater.over(
                store.pieces,
                source.optimizer,
                job.numerics,
                whole,
                couples_weights=couples,
                splits_masters=program.step.splits_masters,
                packing=packing,
            ),
            lr_factor=learning_rate_factor(job.schedule, job.train.steps),
        ),
    )


def _pending(model: nn.Module, program: Program, mesh: meshes.Mesh) -> Callable[[], AbstractContextManager[None]]:
    """Return what makes the context of a forward without logits, on the stage that has the head."""
    head, chunk = program.step.model.layers[-1].head, program.step.layout.loss_chunk
    is_here = not program.chunks or program.chunks[-1].stop == len(program.step.model.layers)
    if head is None or chunk is None or not is_here:
        return nullcontext
    group = mesh.groups["tp"] if tensor.cuts_logits(program) else None
    module = model.get_submodule(head.owner)
    assert isinstance(module, nn.Linear), "another head is refused"
    return pending_logits.PendingHead(module, Chunking(chunk, group)).pending


def _updates_in_chunks(source: Source, job: Job, whole: WholeWeights) -> bool:
    """Return whether the optimizer may update some weights before others; asked where anything depends on it.

    Raises:
        JobError: its states are to be packed, and it is none of torch's own.
    """
    packs = job.numerics.optimizer_states != "float32"
    in_chunks = (packs or job.numerics.precision == "bf16") and updates_in_chunks(source.optimizer, whole)
    if packs and not in_chunks:
        raise JobError(
            f'numerics.optimizer_states = "{job.numerics.optimizer_states}" holds states of torch\'s own optimizers, and this '
            'is none of them: optimizer_states = "float32" works, and so does adamw'
        )
    return in_chunks


def _mark(model: nn.Module, spec: ModelSpec, whole: WholeWeights, store: WeightStore) -> None:
    """Give the run's parameters the Python attributes that the user's had, and watch those that took no part in the trace."""
    held = {piece.name for piece in store.frozen}
    for name, param in model.named_parameters():
        param.__dict__.update(whole.attributes.get(name, {}))
    idle = [param.name for param in spec.params if param.is_idle and param.name in held]
    store.hook_idle({name: functools.partial(_raise_used, name) for name in idle})


def _raise_used(name: str, _: Tensor) -> None:
    raise ModelError(
        f"{name} took no part in the loss when the model was traced, so nothing updates it, and it does now: a model that "
        "uses other weights in other steps can add 0 * weight.sum() to its output, so that the weight always takes part"
    )


def store_of(layout: Layout) -> Callable[[nn.Module, Program, meshes.Mesh, Materialize], WeightStore]:
    """Return the class that stores a layout's weights.

    FSDP2 and DTensor take a second to import, which replicated runs need not spend. A process that forks workers calls
    this first, so that the workers need not spend it either.
    """
    if layout.zero < 2 or layout.num_shards == 1:
        return Replicated
    from samestep.runtime.axes.shard import Sharded  # noqa: PLC0415

    return Sharded


def set_modes(modes: Mapping[nn.Module, bool]) -> None:
    """Set each module to training or evaluation, without its children."""
    for module, training in modes.items():
        module.training = training


def _recompute_contexts(
    model: nn.Module,
    program: Program,
    slicing: context.Slicing | context.WholeSequences,
    norms: batch_norm.BatchNorms,
) -> recompute.Contexts:
    """Return the contexts of a forward and of its recomputation, during which the forward's modes are not active."""
    first, repeated = dropout.recompute_contexts(model)
    records, taken = norms.recompute_contexts()
    islands = precision.raised_islands(program)
    return recompute.nested(first, records), recompute.nested(islands, repeated, slicing.for_recompute(), taken)


def _nominal_count(example: Any, global_batch: int) -> float:
    """Return a power of two near the count of a step, from shapes alone: the same in every layout."""
    labels = example.get("labels") if isinstance(example, dict) else None
    if labels is None:
        labels = tree_leaves(example)[-1]
    each = labels.numel() / max(1, labels.shape[0]) if isinstance(labels, Tensor) and labels.dim() else 1.0
    return float(2 ** round(math.log2(max(1.0, global_batch * each))))
