"""The tensors between the stages of a pipeline in the run's dtypes, and the recorded flows that stages follow."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from samestep.building.named_tensors import cast_floating
from samestep.datasets.values import has_items, num_samples, rows_of
from samestep.examination.examine import Source, examine
from samestep.examination.traced_model import TracedModel
from samestep.job import Job
from samestep.layout import Layout
from samestep.models.layer_spec import LayerSpec
from samestep.program.step import StepSpec
from samestep.runtime.axes.pipeline.stage_flow import Flows
from samestep.runtime.axes.precision import DTYPES
from samestep.tracing.flow import Flow
from samestep.tracing.stage_events import passes_one_tensor, with_crossings, with_exact_crossings, with_slices_of
from samestep.tracing.trace import samples_traced
from samestep.trees import map_tensors, tensors_in


def shapes_in(samples: Any) -> tuple[torch.Size, ...]:
    """Return the shapes of the tensors in a micro-batch."""
    return tuple([leaf.shape for leaf in tensors_in(samples)])


def trace_for_layout(source: Source, layout: Layout, job: Job, example: Any) -> TracedModel:
    """Return the model of a source with what a layout needs to know; what is known already is not traced again.

    Raises:
        LayoutError: the forward of a rank of this layout does not compute its part of the whole model's.
    """
    traced = examine(source, job, example, layout)
    recorded = with_flows(traced, layout, job, example, source.loss)[0].flows
    return traced if len(recorded) == len(traced.flows) else replace(traced, flows=recorded)


def with_flows(
    traced: TracedModel, layout: Layout, job: Job, example: Any, loss: Callable[[Any, Any], Any]
) -> tuple[TracedModel, Flows | None]:
    """Return the model with the tensors between stages in the job's precision, and the flows that stages follow.

    There are no flows where each block passes one tensor in the compute dtype to the next.

    Raises:
        LayoutError: what passes is another for two samples than for one.
    """
    spec = traced.spec
    is_open = not spec.varies_at or bool(spec.varies_within)
    if layout.pp == 1 or not is_open or sum(layer.is_beginning for layer in spec.layers) < 2:
        return traced, None
    step = StepSpec.of(spec, job, layout)
    recorded = dict(traced.flows)
    flows = Flows(traced, step, recorded)
    compute = DTYPES[step.compute_dtype]
    few = samples_traced(traced.module)
    flow = _flow_of(flows, example, few, step, loss)
    if not spec.called_again and passes_one_tensor(spec.layers, flow, traced.module, compute):
        return _with_layers(traced, with_crossings(spec.layers, flow, traced.module, few), recorded), None
    more = _flow_of(flows, example, few + 1, step)
    layers = with_exact_crossings(spec.layers, (flow, few), (more, few + 1), compute)
    if layout.cp > 1 and not spec.slice_refusal:
        flows = Flows(traced, step, recorded, layout.cp)
        layers = with_slices_of(layers, flow, _flow_of(flows, example, few, step))
    for size in set(step.microbatch_sizes):  # now, once, where workers are forked
        _flow_of(flows, example, size, step)
    flows.hold()
    return _with_layers(traced, layers, recorded), flows


def _flow_of(
    flows: Flows, example: Any, num_samples: int, step: StepSpec, loss: Callable[[Any, Any], Any] | None = None
) -> Flow:
    samples = _repeat_sample(example, num_samples, step)
    return flows.of(samples, shapes_in(samples), loss)


def _repeat_sample(example: Any, times: int, step: StepSpec) -> Any:
    """Return the first sample of a batch several times, in the dtype in which a run reads it."""
    if has_items(example):
        repeated = rows_of(example, [0] * times, num_samples(example) or 1)
    else:
        repeated = map_tensors(example, lambda t: torch.cat([t[:1]] * times) if t.dim() else t)
    return cast_floating(repeated, DTYPES[step.master_dtype])


def _with_layers(traced: TracedModel, layers: Sequence[LayerSpec], recorded: Mapping[Hashable, Flow]) -> TracedModel:
    analysis = replace(traced.analysis, spec=replace(traced.spec, layers=tuple(layers)))
    return replace(traced, analysis=analysis, flows=recorded)
