"""All that is found out of a model before any rank cuts it: it is built on the meta device, traced once, and tried.

```
examine ─► build ─► trace under observers ─► further forwards ─► build_spec ─► TracedModel
                  │                        ▲
                  └─ tp: `plan_search.py` ─┘             what else one layout needs: `FINDINGS`
```
A forked worker inherits the result, and a finding that it has is not examined again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Set
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from typing import Any, Literal

from torch import nn

from samestep.building.initial_values import Blueprint, blueprint
from samestep.building.loss import cross_entropy
from samestep.building.loss_result import Loss as Loss
from samestep.building.model import JobModel, give_labels
from samestep.building.model_changes import refuse_scripts, set_training
from samestep.building.model_loss import ModelLoss
from samestep.building.optimizer import OptimizerSource
from samestep.building.over_samples import IGNORING
from samestep.building.owned_model import OwnedModel
from samestep.errors import LayoutError, ModelError, failures_of
from samestep.examination import plan_search
from samestep.examination.plan_search import ProvenPlan
from samestep.examination.traced_forward import BuiltModel, MaskRecorder, Placing, TracedForward, trace_forward
from samestep.examination.traced_model import TracedModel
from samestep.independence import kept_state, samples, sequence_proof, token_slices
from samestep.job import Job
from samestep.layout import Layout
from samestep.models.spec import LossTensor, MaskSpec, ModelAnalysis, ModelSpec, StateSpec
from samestep.randomness import masks
from samestep.state import snapshot
from samestep.strategies.tensor import refuse_degree
from samestep.tracing import pending_logits
from samestep.tracing.arranged_layers import with_loss
from samestep.tracing.batch_norms import with_groups, without_own_groups
from samestep.tracing.checkpointed import record_checkpointed
from samestep.tracing.experts import with_experts
from samestep.tracing.forward import ForwardTracer
from samestep.tracing.module_inputs import groups_of, joined
from samestep.tracing.trace import samples_traced, trace_whole_batch
from samestep.tracing.watched_forward import outputs_on_meta, watch_forward


@dataclass(frozen=True, slots=True)
class Source:
    """The model, loss and optimizer of a run, before a layout cuts them."""

    model: Callable[[], nn.Module] | nn.Module
    loss: Loss
    optimizer: OptimizerSource
    name: str = "model"
    prepared: TracedModel | None = None
    """The model, built and traced already, where a forked worker inherits it."""
    owner: OwnedModel | None = None
    """The owner of an instance; None where a run trains a copy of it."""


@IGNORING
def examine(source: Source, job: Job, example: Any, layout: Layout | None = None) -> TracedModel:
    """Return the model of a source with all that a layout needs to know of it; the findings that `source.prepared` has are not examined again.

    Without a layout it is the model itself that is examined, with its plan of tensor parallelism. To prove a plan takes a third
    of the time, so that a layout without tp does without.

    Raises:
        ModelError: the model cannot be built or traced.
        LayoutError: the forward of a rank of this layout does not compute its part of the whole model's.
    """
    traced, cuts = source.prepared, layout is None or layout.tp > 1
    if traced is None or (cuts and traced.cuts is None):
        traced = _examine_model(source, job, example, cuts=cuts, chunks=layout is None)
    if layout is None:
        return traced
    num_samples = layout.microbatch or -(-job.train.global_batch // layout.dp)
    analysis, plan = traced.analysis, traced.blueprint

    @functools.cache
    def build() -> BuiltModel:
        return BuiltModel.of(analysis.spec.name, plan, source.loss, example, analysis.stages, analysis.experts)

    case = LayoutCase(layout, num_samples, build)
    return functools.reduce(lambda model, find: find(model, case), FINDINGS, traced)


def _examine_model(source: Source, job: Job, example: Any, *, cuts: bool, chunks: bool) -> TracedModel:
    """Build a model on the meta device, trace it on one sample of `example`, and find out what holds in every layout.

    `cuts` is whether a plan of tensor parallelism is looked for and proven, and `chunks` whether the loss is tried in chunks of tokens.
    """

    def build() -> BuiltModel:
        built = BuiltModel.of(
            source.name, build_blueprint(source, job, source.owner), source.loss, example, job.model.stages
        )
        return replace(built, global_batch=job.train.global_batch)

    plan: ProvenPlan | None = None
    if cuts:
        built, forward, plan = plan_search.trace_with_plan(build)
    else:
        forward = trace_forward(built := build(), None)
    if chunks:
        forward = replace(forward, spec=with_chunks(built, forward.spec))
    states, findings, draws = _examine_further(built, forward, job.numerics.batch_norm_group or job.train.global_batch)
    spec = _with_samples(forward.spec, findings, draws)
    spec, of_plan = build_spec(built.module, forward, spec, plan, has_own_loss=source.loss is not cross_entropy)
    analysis = ModelAnalysis(
        spec=spec,
        experts=built.experts,
        expert_calls=forward.expert_calls,
        has_dropout=masks.has_dropout(built.module),
        states=states,
        chunks_examined=chunks,
        stages=job.model.stages,
        detached_checkpoints=forward.checkpointed.detached,
        **of_plan,
    )
    return TracedModel(built.blueprint, analysis, plan.proof if plan else None, built.keeps_double)


# -- further forwards of the whole model -----------------------------------------------------------


Draws = tuple[MaskSpec, ...]
"""The masks and random numbers that are drawn, with the rows of each sample."""


def _examine_further(
    built: BuiltModel, forward: TracedForward, group: int
) -> tuple[tuple[StateSpec, ...], samples.Findings, Draws]:
    """Return what further forwards show of a traced model: what it keeps for later ones, whether samples influence each other, and what
    is drawn for each sample; a batch norm sees `group` of them.
    """
    module, sample, value_of = built.module, built.sample, built.value_of
    spec, drawn, num_samples = forward.spec, forward.masks, built.num_samples
    placed: list[MaskSpec] = []

    @contextmanager
    def placing(rows_of: samples.RowsOf, place: samples.Place) -> Iterator[None]:
        with MaskRecorder(module, samples.NUM_SAMPLES, Placing(rows_of, place, drawn)) as recorder:
            yield
        placed[:] = placed or recorder.masks  # of the first forward: further ones ask what code does with other answers

    states: tuple[StateSpec, ...] = ()
    if forward.keeps or spec.kept_after:
        with record_checkpointed(module):
            states = kept_state.examine(module, sample, spec, num_samples, value_of)
    looks = bool(spec.varies_at)
    with snapshot.preserve_modules(module), record_checkpointed(module):
        findings = samples.examine(
            module, sample, built.loss, built.experts, value_of,
            keeps_all=looks, takes_gradients=bool(spec.differentiates_at), group=group, around=placing,
        )  # fmt: skip
    rows = placed if len(placed) == len(drawn.masks) else drawn.masks
    return states, findings, tuple(rows)


# -- the spec --------------------------------------------------------------------------------------


def build_spec(
    module: nn.Module, forward: TracedForward, spec: ModelSpec, plan: ProvenPlan | None, *, has_own_loss: bool
) -> tuple[ModelSpec, dict[str, Any]]:
    """Return the spec of a traced model, and the fields of its analysis that follow from its plan.

    What a forward sends is written down in this order, since each needs what those before have found: the layers of the trace, what
    samples share, what experts send, what the plan cuts, what checkpointing repeats, and last the layer of the loss.
    """
    spec = with_experts(spec, forward.dispatches, forward.calls, None if has_own_loss else module)
    spec, of_plan = plan_search.with_plan(spec, module, forward, plan)
    return with_loss(replace(spec, checkpoints=_checkpoints(spec, forward.checkpointed.entered))), of_plan


def _with_samples(spec: ModelSpec, shown: samples.Findings, draws: Draws) -> ModelSpec:
    """Return the spec with what forwards of several samples have found."""
    reads = shown.loss_reads
    spec = replace(
        with_groups(spec, shown.batch_norms),
        masks=draws,
        mixes_samples=shown.refusal,
        hooks_scale=shown.hooks_scale,
        tried=shown.tried,
        called_again=shown.called_again,
        loss_values=shown.loss_values if reads is None else (),
    )
    if reads is None:
        return spec
    unknown = LossTensor(of="outputs", index=0, elements=spec.layers[-1].output_elements, rows=None)
    return replace(spec, loss_reads=reads or (unknown,), loss_pairs=shown.loss_pairs)


def _checkpoints(spec: ModelSpec, entered: Set[str]) -> Literal["repeat", "plain", "plain on stages"]:
    """Return what becomes of the checkpoints that a model's code makes, given the modules in whose forwards it has entered one."""
    if any(entered & {*layer.modules} for layer in spec.layers if layer.is_block):
        return "plain"
    of_calls = any(entered & {*layer.called} for layer in spec.layers if layer.begins_stage)
    return "plain on stages" if of_calls else "repeat"


# -- the model on the meta device ------------------------------------------------------------------


def with_new_blueprint(source: Source, job: Job, plan: Blueprint | None = None) -> TracedModel:
    """Return the source's traced model with a new blueprint, or with a given `plan`, for another run; the analysis is shared."""
    assert source.prepared is not None
    traced = replace(source.prepared, blueprint=plan or build_blueprint(source, job, source.owner))
    trace_whole_batch(traced.module, samples_traced(source.prepared.module))
    return traced


def build_blueprint(source: Source, job: Job, owner: OwnedModel | None = None) -> Blueprint:
    """Return the source's model on the meta device, in training mode, with the function that computes each of its values: an instance
    itself for its `owner`, otherwise a copy.

    Raises:
        ModelError: it cannot be built, or a part of it was compiled by `torch.jit`.
    """
    # Whoever calls from Python wants the exceptions of their own function as they are.
    named = isinstance(source.model, JobModel)
    with failures_of(f"model.source: {source.name}", ModelError) if named else nullcontext():
        plan = blueprint(source.model, job.train.seed, functools.partial(job.run.waived, "build"), owner)
    refuse_scripts(plan.module)
    without_own_groups(plan.module)
    if isinstance(source.loss, ModelLoss):
        give_labels(plan.module)
    set_training(plan.module)
    plan.plain.begin()
    return plan


# -- what one layout needs besides ----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LayoutCase:
    """A layout, and the means to run a model's forward for it."""

    layout: Layout
    num_samples: int
    """Samples of a micro-batch."""
    build: Callable[[], BuiltModel]
    """Returns the model with one sample; called if a finding is missing."""


def _with_size(traced: TracedModel, case: LayoutCase) -> TracedModel:
    """Return the model itself, if the forward, which takes no single sample, takes those of a micro-batch together.

    Raises:
        LayoutError: it does not.
    """
    size = samples_traced(traced.module)
    if case.num_samples >= size or size <= 2:
        return traced
    built = case.build()
    try:
        with built.repeating():
            outputs_on_meta(built.module, built.sample, case.num_samples, built.value_of, keeps_all=False)
    except (RuntimeError, ValueError, AssertionError) as error:
        reason = str(error).partition("\n")[0]
        raise LayoutError(
            "microbatch-forward",
            f'layout "{case.layout}": the forward takes {size} samples, and not the {case.num_samples} of a micro-batch ({reason}). Use '
            "larger micro-batches, or one device with the whole batch at once",
        ) from error
    return traced


def _with_degree(traced: TracedModel, case: LayoutCase) -> TracedModel:
    """Return the model with the counts of a rank of this tp, and with the trials that its plan rests on.

    Raises:
        LayoutError: the forward of a rank does not compute its part of the whole model's.
    """
    analysis, proof, degree = traced.analysis, traced.cuts, case.layout.tp
    if degree == 1 or proof is None:
        return traced
    if degree not in analysis.counts and not refuse_degree(analysis.spec, degree):
        proof = plan_search.try_degree(built := case.build(), proof, analysis.shareable_heads, degree)
        if proof.refusal:
            raise LayoutError(
                "tp-uncuttable", f"tp={degree}: cannot shard {analysis.spec.name}: {proof.refusal}. Use tp=1"
            )
        analysis = replace(analysis, counts={**analysis.counts, degree: proof.divided(built.module)})
    elif {*proof.tried} <= {*analysis.spec.tried}:
        return traced
    return replace(traced, analysis=replace(analysis, spec=_with_tried(analysis.spec, proof.tried)), cuts=proof)


def _with_tokens(traced: TracedModel, case: LayoutCase) -> TracedModel:
    """Return the model with whether blocks work token by token between cut parts, under sequence parallelism."""
    analysis, spec, degree = traced.analysis, traced.spec, case.layout.tp
    is_known = degree in analysis.slices_between or spec.sequence_refusal or spec.sequence % degree
    if degree == 1 or not case.layout.sequence_parallel or is_known:
        return traced
    built = case.build()
    with record_checkpointed(built.module):
        refusal, tried = sequence_proof.refuse_slices(built.module, built.sample, analysis, degree, built.value_of)
    spec = replace(_with_tried(spec, tried), sequence_refusal=refusal, expert_refusal=refusal)
    return _with_analysis(traced, spec, slices_between=(*analysis.slices_between, degree))


def _with_slices(traced: TracedModel, case: LayoutCase) -> TracedModel:
    """Return the model with whether blocks work on slices of a sequence."""
    analysis, spec = traced.analysis, traced.spec
    parts = max(case.layout.cp, 1 if case.layout.mlp_chunk is None else 2)
    if parts in (1, *analysis.parts_examined):
        return traced
    if not (analysis.parts_examined and spec.slice_refusal):
        built = case.build()
        with snapshot.preserve_modules(built.module), record_checkpointed(built.module):
            spec = token_slices.prove(
                built.module, built.sample, spec, built.value_of, built.experts, parts, analysis.cut_styles
            )
    return _with_analysis(traced, spec, parts_examined=(*analysis.parts_examined, parts))


def _with_loss_chunks(traced: TracedModel, case: LayoutCase) -> TracedModel:
    """Return the model with whether the loss works on chunks of tokens."""
    if case.layout.loss_chunk is None or traced.analysis.chunks_examined:
        return traced
    return _with_analysis(traced, with_chunks(case.build(), traced.spec), chunks_examined=True)


def _with_calls(traced: TracedModel, case: LayoutCase) -> TracedModel:
    """Return the model with the modules that the samples of a micro-batch call several times, if weights are gathered for a forward."""
    spec, examined, count = traced.spec, traced.analysis.samples_examined, case.num_samples
    is_gathered = case.layout.zero == 3 and case.layout.num_shards > 1
    if not is_gathered or count <= samples.NUM_SAMPLES or count in examined:
        return traced
    built, groups = case.build(), spec.called_again
    watch = ForwardTracer(built.module, {}, keeps_all=bool(spec.varies_at))
    with built.repeating(), suppress(Exception):  # of the user's own code, which a run meets again
        watch_forward(built.module, built.sample, count, watch, built.value_of)
        groups = joined(groups, groups_of(built.module, watch.modules))
    spec = replace(spec, called_again=groups)
    return _with_analysis(traced, spec, samples_examined=(*examined, count))


FINDINGS = (_with_size, _with_degree, _with_tokens, _with_slices, _with_loss_chunks, _with_calls)
"""Each returns the model with one finding that a layout needs, or the model itself if that is known, or not needed."""


def _with_analysis(traced: TracedModel, spec: ModelSpec, **examined: Any) -> TracedModel:
    return replace(traced, analysis=replace(traced.analysis, spec=spec, **examined))


def with_chunks(built: BuiltModel, spec: ModelSpec) -> ModelSpec:
    """Return the spec with whether logits and loss can be computed in chunks of tokens, by a forward of the whole model."""
    looks = bool(spec.varies_at)
    run = functools.partial(
        outputs_on_meta, built.module, built.sample, built.num_samples, built.value_of, keeps_all=looks
    )
    with built.repeating():
        chunks = pending_logits.find_chunks(built.module, spec, built.loss, run)
    reduced = () if built.loss is cross_entropy else chunks.reduced
    reduces = tuple((kind, elements // built.num_samples) for kind, elements in reduced)
    return replace(spec, chunk_refusal=chunks.refusal, chunk_reduces=reduces)


def _with_tried(spec: ModelSpec, tried: Iterable[str]) -> ModelSpec:
    """Return the spec with more of what is used because a trial has passed."""
    return replace(spec, tried=tuple(dict.fromkeys((*spec.tried, *tried))))
