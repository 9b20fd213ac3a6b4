"""The forward of a model as one graph of a compiler (`run.compile = "model"`), in layouts that exchange nothing within it.

A graph has no place between two blocks where weights are gathered or activations sent, so each rank must hold all weights and
exchange gradients alone, after the backward.
"""

from __future__ import annotations

from samestep.program.graphs import one_graph
from samestep.program.program import Program
from samestep.program.step import StepSpec


def refusal(step: StepSpec) -> str | None:
    """Return why the forward of a layout is not one graph."""
    layout = step.layout
    within = [f"{axis}={degree}" for axis, degree in layout.inner_degrees.items() if degree > 1]
    within += [f"zero={step.zero}"] if step.zero > 1 else []
    within += ["recompute=offload"] if layout.recompute == "offload" else []
    if not within:
        return None
    return (
        f"{within[0]} moves tensors between parts of the forward, and {one_graph(step)}: run.compile = 'blocks' works, "
        "and so does dp with zero=0 or zero=1"
    )


def apply(program: Program) -> Program:
    """Return the program as it is: a graph computes what its modules do."""
    return program


def why_not_captured(step: StepSpec) -> str:
    """Return why the forward and backward of a micro-batch cannot be one CUDA graph; empty where nothing prevents it.

    A CUDA graph repeats launches with the addresses and sizes that they had, without the host. So within a micro-batch the host may
    neither wait for the device nor send it anything, nothing may communicate, and no shape may depend on a value. Weights, buffers
    and the buckets of gradients keep their addresses over steps, and whatever else a micro-batch makes is gone before the next
    one; samples arrive at other addresses, and whoever captures copies them to one place, as torch's own CUDA graphs do.
    """
    if reason := refusal(step):
        return reason
    model = step.model
    if model.masks:
        return f"{model.masks[0].owner} draws masks (dropout), whose keys the host sends in each forward"
    if step.offload:
        return "weights that the host holds are copied before their use"
    if step.sample_groups is not None and not step.sample_groups.is_one_forward:
        return f"{model.batch_norm_owners[0] or model.name} takes statistics over ranks (batch norm)"
    if model.differentiates_at:
        return f"the forward at {model.differentiates_at} takes gradients itself"
    if model.uses_batch_values or step.loss_over_batch:
        return "the loss or the forward takes values of all samples of the step"
    for layer in model.layers:
        if layer.dispatches:
            return f"{layer.dispatches[0].owner} sends tokens to experts, so that its shapes depend on values"
    looking = [one for one in (model.varies_at, model.picks_at) if one] or [*model.looks_in]
    return f"code at {looking[0] or model.name} looks at values, for which the host waits" if looking else ""
