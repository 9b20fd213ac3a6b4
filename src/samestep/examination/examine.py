"""All that is found out of a model before any rank cuts it: it is built on the meta device, traced once, and tried.

```
examine ─► build ─► trace under observers ─► further forwards ─► build_spec ─► TracedModel
                  │                        ▲
                  └─ tp: `plan_search.py` ─┘             what else one layout asks: `layout_needs.py`
```
A forked worker inherits the result, and what it covers is not examined again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Set
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Literal

from torch import nn

from samestep.building.families import facts_of
from samestep.building.initial_values import Blueprint, blueprint
from samestep.building.loss import cross_entropy
from samestep.building.loss_result import Loss as Loss
from samestep.building.model import JobModel, give_labels
from samestep.building.model_loss import ModelLoss
from samestep.building.optimizer import OptimizerSource
from samestep.building.over_samples import IGNORING
from samestep.building.training_modules import refuse_scripts, set_training
from samestep.errors import ModelError, failures_of
from samestep.examination import plan_search
from samestep.examination.layout_needs import examine_layout, with_chunks
from samestep.examination.plan_search import ProvenPlan
from samestep.examination.recording import Placing, record_masks
from samestep.examination.traced_forward import BuiltModel, TracedForward, trace_forward
from samestep.examination.traced_model import TracedModel
from samestep.independence import kept_state, samples
from samestep.job import Job
from samestep.layout import Layout
from samestep.models.analysis import ModelAnalysis, StateSpec
from samestep.models.spec import LossTensor, MaskSpec, ModelSpec
from samestep.randomness import masks
from samestep.state import snapshot
from samestep.tracing.arranged_layers import with_loss
from samestep.tracing.batch_norms import with_groups, without_own_groups
from samestep.tracing.checkpointed import record_checkpointed
from samestep.tracing.containers import containers_of
from samestep.tracing.experts import with_experts


@dataclass(frozen=True, slots=True)
class Source:
    """The model, loss and optimizer of a run, before a layout cuts them."""

    model: Callable[[], nn.Module] | nn.Module
    loss: Loss
    optimizer: OptimizerSource
    name: str = "model"
    prepared: TracedModel | None = None
    """The model, built and traced already, where a forked worker inherits it."""


@IGNORING
def examine(source: Source, job: Job, example: Any, layout: Layout | None = None) -> TracedModel:
    """Return the model of a source with all that a layout needs to know of it; what `source.prepared` covers is not found out again.

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
    return (
        traced
        if traced.covers(layout, num_samples)
        else examine_layout(traced, layout, source.loss, example, num_samples)
    )


def _examine_model(source: Source, job: Job, example: Any, *, cuts: bool, chunks: bool) -> TracedModel:
    """Build a model on the meta device, trace it on one sample of `example`, and find out what holds in every layout.

    `cuts` is whether a plan of tensor parallelism is looked for and proven, and `chunks` whether the loss is tried in chunks of tokens.
    """

    def build() -> BuiltModel:
        return BuiltModel.of(source.name, build_blueprint(source, job), source.loss, example, job.model.stages)

    plan: ProvenPlan | None = None
    if cuts:
        built, forward, plan = plan_search.trace_with_plan(build)
    else:
        forward = trace_forward(built := build(), None)
    if chunks:
        forward = replace(forward, spec=with_chunks(built, forward.spec))
    found = _examine_further(built, forward)
    spec, of_plan = build_spec(built.module, forward, found, plan, has_own_loss=source.loss is not cross_entropy)
    analysis = ModelAnalysis(
        spec=spec,
        experts=built.experts,
        expert_calls=forward.expert_calls,
        has_dropout=masks.has_dropout(built.module),
        states=found.states,
        chunks_examined=chunks,
        stages=job.model.stages,
        detached_checkpoints=forward.checkpointed.detached,
        **of_plan,
    )
    return TracedModel(built.blueprint, analysis, facts_of(built.module), plan.proof if plan else None)


# -- further forwards of the whole model -----------------------------------------------------------


@dataclass(frozen=True, slots=True)
class FurtherFindings:
    """The findings of forwards that run after the traced one: once more, and on several samples."""

    states: tuple[StateSpec, ...]
    """What a forward keeps for later ones."""
    samples: samples.Findings
    """Whether samples influence each other."""
    masks: tuple[MaskSpec, ...]
    """The masks and random numbers that are drawn, with the rows of each sample."""


def _examine_further(built: BuiltModel, forward: TracedForward) -> FurtherFindings:
    """Return what further forwards show of a traced model: what it keeps, and several samples."""
    module, sample, value_of = built.module, built.sample, built.value_of
    spec, drawn, num_samples = forward.spec, forward.masks, built.num_samples
    placed: list[MaskSpec] = []

    @contextmanager
    def placing(rows_of: samples.RowsOf, place: samples.Place) -> Iterator[None]:
        with record_masks(module, samples.NUM_SAMPLES, Placing(rows_of, place, drawn)) as found:
            yield
        placed[:] = placed or found.masks  # of the first forward: further ones ask what code does with other answers

    states: tuple[StateSpec, ...] = ()
    if forward.changes.found or spec.kept_after:
        with record_checkpointed(module):
            states = kept_state.examine(module, sample, spec, containers_of(module), num_samples, value_of)
    looks = bool(spec.varies_at)
    with snapshot.preserve_modules(module), record_checkpointed(module):
        found = samples.examine(
            module, sample, built.loss, built.experts, value_of,
            keeps_all=looks, takes_gradients=bool(spec.differentiates_at), around=placing,
        )  # fmt: skip
    rows = placed if len(placed) == len(drawn.masks) else drawn.masks
    return FurtherFindings(states, found, tuple(rows))


# -- the spec --------------------------------------------------------------------------------------


def build_spec(
    module: nn.Module, forward: TracedForward, found: FurtherFindings, plan: ProvenPlan | None, *, has_own_loss: bool
) -> tuple[ModelSpec, dict[str, Any]]:
    """Return the spec of a traced model, and the fields of its analysis that follow from its plan.

    What a forward sends is written down in this order, since each needs what those before have found: the layers of the trace, what
    samples share, what experts send, what the plan cuts, what checkpointing repeats, and last the layer of the loss.
    """
    spec = _with_samples(forward.spec, found)
    spec = with_experts(spec, forward.dispatches, None if has_own_loss else module)
    spec, of_plan = plan_search.with_plan(spec, module, forward, plan)
    return with_loss(replace(spec, checkpoints=_checkpoints(spec, forward.checkpointed.entered))), of_plan


def _with_samples(spec: ModelSpec, found: FurtherFindings) -> ModelSpec:
    """Return the spec with what forwards of several samples have found."""
    shown, reads = found.samples, found.samples.loss_reads
    spec = replace(
        with_groups(spec, shown.batch_norms),
        masks=found.masks,
        mixes_samples=shown.refusal,
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


def with_new_blueprint(source: Source, job: Job) -> TracedModel:
    """Return the source's traced model with a new blueprint, for another run; the analysis is shared."""
    assert source.prepared is not None
    return replace(source.prepared, blueprint=build_blueprint(source, job))


def build_blueprint(source: Source, job: Job) -> Blueprint:
    """Return the source's model on the meta device, in training mode, with the function that computes each of its values.

    Raises:
        ModelError: it cannot be built, or a part of it was compiled by `torch.jit`.
    """
    # Whoever calls from Python wants the exceptions of their own function as they are.
    named = isinstance(source.model, JobModel)
    with failures_of(f"model.source: {source.name}", ModelError) if named else nullcontext():
        plan = blueprint(source.model, job.train.seed, functools.partial(job.run.waived, "build"))
    refuse_scripts(plan.module)
    without_own_groups(plan.module)
    if isinstance(source.loss, ModelLoss):
        give_labels(plan.module)
    set_training(plan.module)
    return plan
