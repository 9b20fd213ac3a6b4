"""What is found out of a model before any rank cuts it: it is built on the meta device, traced, and tried.

prepare       builds and traces the model, and proves its tensor plan
traced_for    adds what one layout needs to know: counts of its `tp`, slices of its `cp`, flows of its stages

Both run once for all ranks: a forked worker inherits the result.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from samestep.building.families import facts_of
from samestep.building.initial_values import Blueprint, blueprint
from samestep.building.loss import cross_entropy
from samestep.building.model import JobModel
from samestep.building.named_tensors import cast_floating
from samestep.building.optimizer import OptimizerSource
from samestep.datasets import blame_samples
from samestep.errors import LayoutError, ModelError, failures_of
from samestep.examination.recording import MaskRecorder, Placing, record_masks
from samestep.examination.traced_model import TracedModel
from samestep.independence import (
    cut_proof,
    kept_state,
    samples,
    sequence_boundaries,
    sequence_proof,
    tensor_plan,
    token_slices,
)
from samestep.independence.rank_trial import DiffersError
from samestep.independence.structural_plan import structural_plan
from samestep.job import Job
from samestep.layout import Layout
from samestep.models.analysis import ExpertModules, ModelAnalysis, StateSpec
from samestep.models.spec import MaskSpec, ModelSpec
from samestep.randomness import masks
from samestep.state import snapshot
from samestep.strategies.tensor import refuse_degree
from samestep.tracing import experts as experts_module
from samestep.tracing import pending_logits
from samestep.tracing.arranged_layers import spread_over_calls
from samestep.tracing.batch_norms import with_groups, without_own_groups
from samestep.tracing.checkpointed import record_checkpointed
from samestep.tracing.looks import Looks, paths_within
from samestep.tracing.operations import Recorder
from samestep.tracing.trace import containers_of, samples_traced, trace
from samestep.tracing.watched_forward import outputs_on_meta
from samestep.trees import tree_map_only

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


def prepare(source: Source, job: Job, example: Any, planned: tensor_plan.Cuts | None = None) -> TracedModel:
    """Build the model on the meta device and trace it on one sample of `example`; nothing else examines it.

    `planned` is the plan of tensor parallelism, if not the one that is found for the model. To prove a plan takes a third of
    the time, so a model that is to run without tp is given one that is refused (`prepare_for`).

    Raises:
        ModelError: the model cannot be built or traced.
    """
    plan = build_blueprint(source, job)
    dtype = next((param.dtype for param in plan.module.parameters() if param.is_floating_point()), torch.float32)
    one = _first_of(example, dtype)
    experts = experts_module.experts_of(plan.module)
    planned = planned or _plan_of(plan, experts, one)
    expert_calls: dict[str, tuple[Any, Any]] = {}
    value_of = functools.partial(plan.materialize, device=torch.device("cpu"))
    recorder, stages = Recorder(), job.model.stages
    with blame_samples(example), ExitStack() as stack:
        changes = stack.enter_context(
            kept_state.record_changes(plan.module)
        )  # first: it looks when the others have gone
        stack.enter_context(cut_proof.record_ends(plan.module, planned.styles, recorder, planned.looking))
        seen = stack.enter_context(tensor_plan.record_cuts(plan.module, planned))
        calls = stack.enter_context(sequence_boundaries.record_calls(plan.module))
        drawn = stack.enter_context(record_masks(plan.module, samples_traced(plan.module)))
        dispatches = stack.enter_context(experts_module.record_dispatches(plan.module, experts, expert_calls))
        checkpointed = stack.enter_context(record_checkpointed(plan.module))
        spec = trace(
            plan.module, one, source.name, value_of, seen.keep, planned.styles, recorder, source.loss, stages,
            keeps_all=bool(planned.looking),
        )  # fmt: skip
    if not planned.refusal and not {*spec.looks_in} <= {*planned.looking}:
        return prepare(source, job, example, tensor_plan.without_looking(plan.module, planned, spec.looks_in))
    prove = functools.partial(_proven, spec, plan, recorder, experts, one, source.loss is cross_entropy)
    proof, counts, shareable = prove(planned)
    fewer, refusal = planned, proof.refusal
    while refusal and (smaller := tensor_plan.smaller(plan.module, fewer, refusal)):
        fewer, refusal = smaller, prove(smaller)[0].refusal
    if fewer is not planned and not refusal:
        return prepare(source, job, example, fewer)  # costs are those of the cuts that are traced
    if planned.gathered:  # what a rank holds and sends is that of the gathered modules
        with _once_more(plan.module, experts), tensor_plan.record_cuts(plan.module, planned) as seen:
            spec = trace(
                plan.module, one, source.name, value_of, seen.keep, planned.styles, None, source.loss, stages,
                keeps_all=bool(planned.looking),
            )  # fmt: skip
    states = _states_of(spec, plan, one) if changes.found else ()
    spec = experts_module.with_experts(spec, dispatches, plan.module if source.loss is cross_entropy else None)
    spec = spread_over_calls(tensor_plan.with_cuts(spec, plan.module, planned, seen, shareable, proof))
    spec = _with_loss(spec)
    spec, parts = sequence_boundaries.with_sequence(
        spec, plan.module, planned.styles, proof, calls, recorder.operations
    )
    with _once_more(plan.module, experts):
        run_on_meta = functools.partial(
            outputs_on_meta, plan.module, one, samples_traced(plan.module), value_of, bool(spec.varies_at)
        )
        spec = replace(spec, chunk_refusal=pending_logits.refusal_of(plan.module, spec, source.loss, run_on_meta))
    spec = _with_samples(spec, plan, source, experts, one, drawn)
    analysis = ModelAnalysis(
        spec=spec,
        cut_styles=planned.styles,
        gathered=planned.gathered,
        copied=proof.copied,
        counts=counts,
        shareable_heads=shareable,
        sequence_parts=parts,
        experts=experts,
        expert_calls=expert_calls,
        has_dropout=masks.has_dropout(plan.module),
        states=states,
        stages=stages,
        detached_checkpoints=checkpointed.detached,
        recomputes_calls=any(checkpointed.entered & {*layer.called} for layer in spec.layers if layer.begins_stage),
        recomputes_blocks=any(
            checkpointed.entered.intersection(layer.modules) for layer in spec.layers if layer.is_block
        ),
    )
    return TracedModel(plan, analysis, facts_of(plan.module), proof)


def _states_of(spec: ModelSpec, plan: Blueprint, one: Any) -> tuple[StateSpec, ...]:
    """Return what a forward keeps for later ones."""
    containers, num_samples = containers_of(plan.module), samples_traced(plan.module)
    value_of = functools.partial(plan.materialize, device=torch.device("cpu"))
    with record_checkpointed(plan.module):
        return kept_state.examine(plan.module, one, spec, containers, num_samples, value_of)


def _with_samples(
    spec: ModelSpec, plan: Blueprint, source: Source, experts: ExpertModules, one: Any, drawn: MaskRecorder
) -> ModelSpec:
    """Return the spec with what several samples show: whether they influence each other, and the rows of each in the masks."""
    placed: list[MaskSpec] = []

    @contextmanager
    def placing(rows_of: samples.RowsOf, place: samples.Place) -> Iterator[None]:
        beside = Placing(rows_of, place, drawn)
        with record_masks(plan.module, samples.NUM_SAMPLES, beside) as found:
            yield
        placed.extend(found.masks)

    value_of = functools.partial(plan.materialize, device=torch.device("cpu"))
    with snapshot.preserve_modules(plan.module), record_checkpointed(plan.module):
        found = samples.examine(
            plan.module, one, source.loss, experts, value_of,
            keeps_all=bool(spec.varies_at), takes_gradients=bool(spec.differentiates_at), around=placing,
        )  # fmt: skip
    spec = replace(with_groups(spec, found.batch_norms), mixes_samples=found.refusal, tried=found.tried)
    return replace(spec, masks=tuple(placed if len(placed) == len(drawn.masks) else drawn.masks))


@contextmanager
def _once_more(module: nn.Module, experts: ExpertModules) -> Iterator[None]:
    """Let a forward of the whole model run once more on the meta device, from the state that the modules have now.

    At their first forward modules make tables, and install hooks that record their outputs: both are taken back.
    """
    with (
        snapshot.preserve_modules(module),
        record_checkpointed(module),
        record_masks(module, samples_traced(module)),
        experts_module.record_dispatches(module, experts),
    ):
        yield


def _plan_of(plan: Blueprint, experts: ExpertModules, sample: Any) -> tensor_plan.Cuts:
    """Return the plan of tensor parallelism of a model; where it has none, the one that its data flow shows."""
    planned = tensor_plan.cuts_of(plan.module, experts.counts)
    if not planned.is_open:
        return planned
    for keeps_all in (False, True):
        recorder = Recorder()
        with suppress(DiffersError):  # the trace says why the forward fails
            looking = _run_forward(plan, experts, sample, {}, recorder, keeps_all=keeps_all).paths
            planning = functools.partial(structural_plan, plan.module, recorder.operations, experts.counts)
            if styles := planning(paths_within(plan.module, looking)):
                return tensor_plan.Cuts(styles, may_shrink=True, looking=looking)
            if looking and (styles := planning()):  # which the code that looks leaves nothing of
                return tensor_plan.without_looking(plan.module, tensor_plan.Cuts(styles, may_shrink=True), looking)
            return planned
    return planned


def _run_forward(
    plan: Blueprint, experts: ExpertModules, sample: Any, styles: Mapping[str, str], recorder: Recorder, **looks: Any
) -> Looks:
    """Record the operations of a forward on the meta device, with the ends of the modules that have a cut style.

    `looks` are the arguments of `cut_proof.run_forward` about code that looks at values.

    Raises:
        DiffersError: it fails.
    """
    value_of = functools.partial(plan.materialize, device=torch.device("cpu"))
    with _once_more(plan.module, experts):
        return cut_proof.run_forward(plan.module, sample, styles, value_of, recorder, **looks)


def _proven(
    spec: ModelSpec,
    plan: Blueprint,
    recorder: Recorder,
    experts: ExpertModules,
    sample: Any,
    cuts_loss: bool,
    planned: tensor_plan.Cuts,
) -> tuple[cut_proof.CutProof, dict[int, tuple[tuple[str, str, int], ...]], dict[str, int]]:
    """Return the proof of a plan, the counts of a rank, and the heads that ranks may share.

    Where the code behind a cut needs more than a rank's part, the outputs of the modules that it reads are gathered, those of
    the head first; where that does not help, these modules stay whole.
    """
    first: cut_proof.CutProof | None = None
    while True:
        shareable = {} if planned.refusal else tensor_plan.shareable_heads(plan.module, planned)
        proofs: list[cut_proof.CutProof] = []
        for cuts_logits in (True, False) if cuts_loss else (False,):
            counts: dict[int, tuple[tuple[str, str, int], ...]] = {}
            proof = tensor_plan.proof_of(spec, plan.module, planned, shareable, recorder, cuts_logits)
            if degree := cut_proof.smallest_degree(proof):
                proof, counts = _try_degree(proof, plan, experts, shareable, sample, degree)
            if not proof.refusal:
                return proof, counts, shareable
            proofs.append(proof)
            if not proof.cuts_logits:  # else the code behind the head may need them whole
                break
        proof = proofs[0]
        first = first or proof
        planned.gather(paths := cut_proof.to_gather(plan.module, proof), proof.refusal)
        if not paths or not planned.styles:
            planned.styles = dict(first.styles)
            planned.gathered.clear()
            return first, {}, shareable


def _try_degree(
    proof: cut_proof.CutProof,
    plan: Blueprint,
    experts: ExpertModules,
    shareable: Mapping[str, int],
    sample: Any,
    degree: int,
) -> tuple[cut_proof.CutProof, dict[int, tuple[tuple[str, str, int], ...]]]:
    """Return the proof of a plan with the counts of a rank of a degree, or why it fails, and the counts by module."""
    shared = {path: heads for path, heads in shareable.items() if heads < degree}
    forward = functools.partial(_run_forward, plan, experts, sample, proof.styles, looking=proof.looking)
    try:
        looks = forward(recorder := Recorder(), keeps_all=bool(proof.looking))
        forward = functools.partial(forward, answers=looks.answers if proof.looking else None)
        proof = cut_proof.with_degree(proof, plan.module, shared, recorder.operations, forward, degree)
    except DiffersError as error:
        return replace(proof, refusal=str(error), refused_at=error.where), {}
    return proof, {degree: proof.divided(plan.module)}


def with_new_blueprint(source: Source, job: Job) -> TracedModel:
    """Return the source's traced model with a blueprint of its own, for another run; the analysis is shared."""
    assert source.prepared is not None
    return replace(source.prepared, blueprint=build_blueprint(source, job))


def build_blueprint(source: Source, job: Job) -> Blueprint:
    """Return the source's model on the meta device, in training mode, with how each of its values is made."""
    # Whoever calls from Python wants the exceptions of their own function as they are.
    named = isinstance(source.model, JobModel)
    with failures_of(f"model.source: {source.name}", ModelError) if named else nullcontext():
        plan = blueprint(source.model, job.train.seed, functools.partial(job.run.waived, "build"))
    without_own_groups(plan.module)
    set_training(plan.module)
    return plan


def set_training(model: nn.Module) -> None:
    """Let a model train as a loop's `model.train()` does; in one that trains already, a part in evaluation mode is intended.

    A class that keeps a part in evaluation mode, as one with frozen batch norms does, says so in a `train` of its own.
    """
    modes = {part: part.training for part in model.modules()}
    is_loaded_for_inference = not model.training
    if is_loaded_for_inference or any(type(part).train is not nn.Module.train for part in modes):
        model.train()
    for part, trains in modes.items() if not is_loaded_for_inference else ():
        part.training &= trains


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


UNEXAMINED = "its plan of tensor parallelism was not examined"
"""The refusal of a model that was traced for layouts without tp, which need no proof of a plan."""


def prepare_for(source: Source, job: Job, example: Any, layout: Layout | None) -> TracedModel:
    """Return the model of a source, traced for a layout with or without tp, or for any; what is known already is not traced again.

    Raises:
        ModelError: the model cannot be built or traced.
    """
    traced, is_cut = source.prepared, layout is None or layout.tp > 1
    if traced is not None and not (is_cut and traced.spec.cut_refusal == UNEXAMINED):
        return traced
    return prepare(source, job, example, None if is_cut else tensor_plan.Cuts(refusal=UNEXAMINED))


def with_slices(traced: TracedModel, layout: Layout, example: Any) -> TracedModel:
    """Return the model with what the layout needs to know: the counts of its tp, and that blocks work token by token.

    Raises:
        LayoutError: the forward of a rank of this tp does not compute its part of the whole model's.
    """
    traced = _with_degree(traced, layout.tp, example)
    if layout.tp > 1 and not set(traced.cuts.tried) <= set(traced.spec.tried):
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
        with snapshot.preserve_modules(traced.module):
            spec = token_slices.prove(traced.module, one, spec, value_of, analysis.experts, parts)
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
    sample = _first_of(example, torch.float32)
    refusal, tried = sequence_proof.refuse_slices(traced.module, sample, analysis, degree, value_of)
    spec = replace(_with_tried(spec, tried), sequence_refusal=refusal, expert_refusal=refusal)
    return replace(traced, analysis=replace(analysis, spec=spec, slices_between=(*analysis.slices_between, degree)))


def _with_degree(traced: TracedModel, degree: int, example: Any) -> TracedModel:
    """Return the model with the counts of a rank of a tensor cut of this degree, tried unless they are known."""
    analysis, plan = traced.analysis, traced.blueprint
    if degree == 1 or degree in analysis.counts or refuse_degree(analysis.spec, degree):
        return traced
    dtype = next((param.dtype for param in plan.module.parameters() if param.is_floating_point()), torch.float32)
    sample, shareable = _first_of(example, dtype), analysis.shareable_heads
    proof, counts = _try_degree(traced.cuts, plan, analysis.experts, shareable, sample, degree)
    if proof.refusal:
        raise LayoutError(f"tp={degree}: {analysis.spec.name} cannot be cut so, {proof.refusal}; tp=1 works")
    return replace(traced, analysis=replace(analysis, counts={**analysis.counts, **counts}), cuts=proof)


def _first_of(example: Any, dtype: torch.dtype) -> Any:
    """Return a batch of the first sample, its floating tensors in `dtype`."""
    return cast_floating(tree_map_only(Tensor, lambda tensor: tensor[:1], example), dtype)
