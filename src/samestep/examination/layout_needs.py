"""Findings that only some layouts need: the counts of a tp rank, tokens between its cuts, slices of a cp, calls of a unit, chunks of a loss.

`TracedModel.lacks` names what a layout needs and nobody has found out.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from samestep.building.loss import cross_entropy
from samestep.building.loss_result import Loss
from samestep.errors import LayoutError
from samestep.examination import plan_search
from samestep.examination.traced_forward import BuiltModel
from samestep.examination.traced_model import TracedModel, num_slices
from samestep.independence import sequence_proof, token_slices
from samestep.layout import Layout
from samestep.models.spec import ModelSpec
from samestep.state import snapshot
from samestep.tracing import called_again, pending_logits
from samestep.tracing.checkpointed import record_checkpointed
from samestep.tracing.watched_forward import outputs_on_meta


def examine_layout(traced: TracedModel, layout: Layout, loss: Loss, example: Any, num_samples: int) -> TracedModel:
    """Return the model with what a layout with micro-batches of so many samples needs to know, and `TracedModel.lacks` names.

    Raises:
        LayoutError: the forward of a rank of this tp does not compute its part of the whole model's.
    """
    analysis, proof, lacks = traced.analysis, traced.cuts, traced.lacks(layout, num_samples)
    built = BuiltModel.of(analysis.spec.name, traced.blueprint, loss, example, analysis.stages, analysis.experts)
    if "counts" in lacks:
        assert proof is not None
        proof, counts = plan_search.try_degree(built, proof, analysis.shareable_heads, layout.tp)
        if proof.refusal:
            raise LayoutError(f"tp={layout.tp}: {analysis.spec.name} cannot be cut so, {proof.refusal}; tp=1 works")
        analysis = replace(analysis, counts={**analysis.counts, **counts})
    if layout.tp > 1 and proof is not None:
        analysis = replace(analysis, spec=_with_tried(analysis.spec, proof.tried))
    if "tokens" in lacks:
        with record_checkpointed(built.module):
            refusal, tried = sequence_proof.refuse_slices(
                built.module, built.sample, analysis, layout.tp, built.value_of
            )
        spec = replace(_with_tried(analysis.spec, tried), sequence_refusal=refusal, expert_refusal=refusal)
        analysis = replace(analysis, spec=spec, slices_between=(*analysis.slices_between, layout.tp))
    if "slices" in lacks:
        spec = analysis.spec
        if not (analysis.parts_examined and spec.slice_refusal):
            with snapshot.preserve_modules(built.module), record_checkpointed(built.module):
                spec = token_slices.prove(
                    built.module,
                    built.sample,
                    spec,
                    built.value_of,
                    built.experts,
                    num_slices(layout),
                    analysis.cut_styles,
                )
        analysis = replace(analysis, spec=spec, parts_examined=(*analysis.parts_examined, num_slices(layout)))
    if "chunks" in lacks:
        analysis = replace(analysis, spec=with_chunks(built, analysis.spec), chunks_examined=True)
    if "calls" in lacks:
        spec = analysis.spec
        with built.repeating():
            groups = called_again.called_again(
                built.module, built.sample, num_samples, built.value_of, keeps_all=bool(spec.varies_at)
            )
        spec = replace(spec, called_again=called_again.joined(spec.called_again, groups))
        analysis = replace(analysis, spec=spec, samples_examined=(*analysis.samples_examined, num_samples))
    return replace(traced, analysis=analysis, cuts=proof)


def with_chunks(built: BuiltModel, spec: ModelSpec) -> ModelSpec:
    """Return the spec with whether logits and loss can be computed in chunks of tokens, by a forward of the whole model."""
    looks = bool(spec.varies_at)
    run = functools.partial(
        outputs_on_meta, built.module, built.sample, built.num_samples, built.value_of, keeps_all=looks
    )
    with built.repeating():
        found = pending_logits.find_chunks(built.module, spec, built.loss, run)
    given = () if built.loss is cross_entropy else found.reduced
    reduces = tuple((held, elements // built.num_samples) for held, elements in given)
    return replace(spec, chunk_refusal=found.refusal, chunk_reduces=reduces)


def _with_tried(spec: ModelSpec, tried: Iterable[str]) -> ModelSpec:
    """Return the spec with more of what is used because a trial has passed."""
    return replace(spec, tried=tuple(dict.fromkeys((*spec.tried, *tried))))
