"""The likely cause of a difference between a layout and one device, found from the shape of the error.

The first difference in the order of a step is explained: an error at the start, in the data, in a module's forward, in
the sums of the loss, in gradients (`gradient_causes.py`), or after the backward. Outputs of copies that add up to the
right one lack a reduction; a loss that is the mean of the parts' means was divided too early; a model that one device,
too, computes differently on the parts of a batch couples its samples; otherwise the module that differs first is named.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from samestep.models.spec import is_below
from samestep.proof.comparison import (
    CLOSE,
    BatchPart,
    Comparison,
    Evidence,
    Found,
    Misfit,
    copies_of,
    held_part,
    match_places,
    numbers,
    unclip_gradients,
    whole_of,
)
from samestep.proof.gradient_causes import gradients_cause, scales_of, spread_of
from samestep.proof.held_tensors import HeldTensor
from samestep.proof.observation import GIVEN, Observation, Output
from samestep.proof.verdict import Cause

SMALL_OUTPUT = 1e-12
"""Projections of outputs at most this large give no ratio."""


def find_cause(evidence: Evidence) -> Found | None:
    """Return the likely cause of the first difference in the order of a step; None where nothing differs."""
    first = next((comparison for comparison in evidence.comparisons if comparison.misfits), None)
    if first is None:
        return None
    return _BY_KIND[first.what](evidence, first)


# -- before a step ---------------------------------------------------------------------------------


def _start(evidence: Evidence, first: Comparison) -> Found:
    misfit = first.misfits[0]
    if misfit.missing:
        return Cause.START, f"no rank holds {misfit.missing} elements of {misfit.name}"
    if _is_elsewhere(evidence.reference.start, held_part(evidence, misfit, lambda seen: seen.start)):
        return (
            Cause.ROWS_SWAPPED,
            f"rank {misfit.rank} starts with elements of {misfit.name} that belong elsewhere in it",
        )
    names = {misfit.name for misfit in first.misfits}
    return Cause.START, f"{len(names)} of {first.compared} weights start from different values, first {misfit.name}"


def _is_elsewhere(reference: Sequence[HeldTensor], tensor: HeldTensor) -> bool:
    """Return whether every held element occurs in the whole tensor, in another place."""
    weight = whole_of(reference)[tensor.name]
    values, _, _ = match_places(tensor, weight)
    return bool(torch.isin(values, weight).all()) and bool((values != values[0]).any())


def _data(evidence: Evidence, first: Comparison) -> Found:
    misfit = first.misfits[0]
    return Cause.DATA, f"{misfit.name} on rank {misfit.rank}: one device reads other samples"


# -- forward ---------------------------------------------------------------------------------------


def _forward(evidence: Evidence, first: Comparison) -> Found:
    misfit = first.misfits[0]
    path, step = misfit.name, misfit.step or 1
    where = f"{path} in step {step} on rank {misfit.rank} (error {misfit.error:.1e}); everything before it agrees"
    if coupled := _explain_coupling(evidence, step):
        return Cause.COUPLED, f"{coupled}; first {where}"
    if GIVEN in path:
        return Cause.POSITIONS, f"first the argument {where}"
    if evidence.dropout(path) and not _numbers_within(evidence, path):
        return Cause.DROPOUT, f"first the masks of {where}"
    if _numbers_within(evidence, path):
        return Cause.RANDOM, f"first the random numbers of {where}"
    if other := _other_call(evidence, misfit, step):
        return Cause.OTHER_CALL, f"{other}; first {where}"
    if step > 1 and evidence.weighted(path):
        return Cause.STALE_WEIGHT, f"weights agree after step {step - 1}, but not the output of {where}"
    if not evidence.weighted(path) or evidence.positional(path):
        return Cause.POSITIONS, f"first {where}; its output depends on positions and buffers alone"
    sums = _sum_over_copies(evidence, path, step)
    if sums is not None:
        return (
            Cause.MISSING_REDUCTION,
            f"the outputs of {sums} add up to the right output of {where}{evidence.collectives(path)}",
        )
    if drawn := _find_random_part(evidence, misfit, step):
        return drawn[0], f"{drawn[1]} draws a value that ranks shard among themselves; first {where}"
    ratio = _output_ratio(evidence, path, step)
    times = f", {ratio:g} times the right output" if ratio else ""
    if any(
        path == boundary or path.startswith(f"{boundary}.")
        for boundaries in evidence.boundaries
        for boundary in boundaries
    ):
        return Cause.BOUNDARY, f"first {where}{times}; it is the first layer of a pipeline stage"
    return Cause.FORWARD, f"first {where}{times}{evidence.collectives(path)}"


def _numbers_within(evidence: Evidence, path: str) -> bool:
    """Return whether a module, or one inside of it, draws random numbers."""
    return any(numbers and is_below(owner, path) for owner, numbers in evidence.draws.items())


def _other_call(evidence: Evidence, misfit: Misfit, step: int) -> str | None:
    """Return a text that shows that a call of a module gives another call's result on one device; None where none
    does."""
    path, expected = misfit.name, evidence.reference.steps[step - 1].outputs
    seen = next(rank for rank in evidence.ranks if rank.rank == misfit.rank)
    calls = {key: output for key, output in seen.steps[step - 1].outputs.items() if key[0] == path and key in expected}
    wrong = [key for key in calls if not _is_same(calls[key], expected[key])]
    for call in sorted({key[1] for key in wrong}):
        keys = [key for key in wrong if key[1] == call]
        for other in sorted({key[1] for key in expected if key[0] == path and key[1] != call}):
            pairs = [(calls[key], expected.get((path, other, key[2]))) for key in keys]
            if all(right is not None and _is_same(output, right) for output, right in pairs):
                return f"call {call + 1} of {path} gives the output that call {other + 1} has on one device"
    return None


def _is_same(output: Output, right: Output) -> bool:
    scale = CLOSE * max(right.norm, SMALL_OUTPUT)
    return abs(output.projection - right.projection) <= scale and abs(output.norm - right.norm) <= scale


def _find_random_part(evidence: Evidence, misfit: Misfit, step: int) -> tuple[Cause, str] | None:
    """Return the random numbers drawn in parts, by a module whose output no rank holds whole, before the first output
    that differs.

    Such a module ran after the last output that agrees, or contains the one that differs.
    """
    seen = next(rank for rank in evidence.ranks if rank.rank == misfit.rank)
    if not any(len(group) > 1 for axis, group in seen.axes.items() if axis in ("tp", "cp")):
        return None
    expected, outputs = evidence.reference.steps[step - 1].outputs, seen.steps[step - 1].outputs
    between: list[str] = []
    for key, right in expected.items():
        if key[0] == misfit.name:
            break
        is_compared = key in outputs and outputs[key].numel == right.numel
        between = [] if is_compared else [*between, key[0]]
    for owner, is_numbers in evidence.draws.items():
        if owner in between or is_below(misfit.name, owner):
            return Cause.RANDOM if is_numbers else Cause.DROPOUT, owner or "the model itself"
    return None


def _projections(evidence: Evidence, path: str, step: int) -> list[tuple[Observation, float, float]]:
    """Return (rank, its projection, the right projection) for each sample of one module's output."""
    expected = evidence.reference.steps[step - 1].outputs
    return [
        (seen, output.projection, expected[key].projection)
        for seen in evidence.ranks
        for key, output in seen.steps[step - 1].outputs.items()
        if key[0] == path and key in expected and output.numel == expected[key].numel
    ]


def _sum_over_copies(evidence: Evidence, path: str, step: int) -> str | None:
    """Return the ranks whose outputs for the same samples add up to the right output, as text; None if there are none."""
    expected = evidence.reference.steps[step - 1].outputs
    for axis in ("tp", "cp"):
        groups = {seen.axes[axis] for seen in evidence.ranks if axis in seen.axes}
        totals: list[tuple[float, float]] = []
        for group in groups:
            members = [seen for seen in evidence.ranks if seen.rank in group]
            for key, right in expected.items():
                outputs = [s.steps[step - 1].outputs[key] for s in members if key in s.steps[step - 1].outputs]
                if key[0] == path and len(outputs) == len(members) > 1:
                    totals.append((sum(output.projection for output in outputs), right.projection))
        if totals and all(abs(total - right) <= CLOSE * max(1.0, abs(right)) for total, right in totals):
            return f"the {axis} ranks"
    return None


def _output_ratio(evidence: Evidence, path: str, step: int) -> float | None:
    """Return the one factor between a module's outputs and the right ones; None where there is no such factor."""
    pairs = [(value, right) for _, value, right in _projections(evidence, path, step) if abs(right) > SMALL_OUTPUT]
    ratios = [value / right for value, right in pairs]
    if ratios and max(ratios) - min(ratios) <= CLOSE * abs(ratios[0]) and abs(ratios[0] - 1) > CLOSE:
        return round(ratios[0], 6)
    return None


def _loss(evidence: Evidence, first: Comparison) -> Found:
    """Explain a wrong loss after a right forward: losses were summed or divided wrongly."""
    step = first.misfits[0].step or 1
    right = evidence.reference.steps[step - 1].loss
    losses = {seen.steps[step - 1].loss for seen in evidence.ranks}
    if len(losses) > 1 and max(losses) - min(losses) > CLOSE * abs(right):
        return (
            Cause.MISSING_REDUCTION,
            f"ranks report different losses in step {step}: {numbers(losses)}; {right:g} is right",
        )
    ours = losses.pop()
    parts = evidence.parts(step - 1)
    if evidence.balances:
        ratio = (ours - _ratio(parts)) / (right - _ratio(parts))
        return (
            Cause.AUXILIARY_LOSS,
            f"forwards agree, but the balancing loss of step {step} is {ratio:.6g} times the right one",
        )
    coupled, count = _explain_coupling(evidence, step), evidence.reference.steps[step - 1].count
    is_mean = abs(sum(part.count for part in parts) - count) >= 1  # which counts the same, however much it is given
    if coupled and not is_mean:
        return Cause.COUPLED, f"forwards agree, and the loss is not a sum over samples: {coupled}"
    for words, guess in _mean_of_means(parts):
        if abs(guess - ours) <= CLOSE * abs(ours) and abs(guess - right) > CLOSE * abs(right):
            return Cause.MEAN_OF_MEANS, f"the loss {ours:g} of step {step} is the mean of {words}; {right:g} is right"
    last = max(part.microbatch for part in parts)
    last_parts = [part for part in parts if part.microbatch == last]
    if last and abs(_ratio(last_parts) - ours) <= CLOSE * abs(ours):
        return Cause.LAST_MICROBATCH, f"the loss {ours:g} of step {step} is the loss of the last micro-batches alone"
    times = f"the loss of step {step} is {ours / right:.6g} times the right one"
    if scales_of(
        evidence, step, {gradient.name: gradient for gradient in unclip_gradients(evidence.reference, step - 1)}
    ):
        return Cause.LOSS_SCALE, f"forwards agree, but {times}"
    where = f"{times}, and gradients are not a multiple of the right ones: modules with a row for each sample are equal"
    return (Cause.DROPOUT, f"first the masks: {where}") if evidence.dropout("") else (Cause.FORWARD, where)


def _explain_coupling(evidence: Evidence, step: int) -> str | None:
    """Return a text that shows that one device computes different results on the parts of a batch; None where it
    does not."""
    if evidence.balances or evidence.shares_values:
        return None  # a part has no balancing loss, nor the values of all samples
    right, parts = evidence.reference.steps[step - 1].loss, evidence.parts(step - 1)
    alone = _ratio(parts)
    if len(parts) == 1 or abs(alone - right) <= CLOSE * abs(right):
        return None
    return (
        f"on one device too the batch has the loss {right:.6g} as a whole, and {alone:.6g} in the {len(parts)} parts "
        "that the layout makes of it"
    )


def _mean_of_means(parts: Sequence[BatchPart]) -> list[tuple[str, float]]:
    """Return the losses that wrong divisions give, with the words for each: means of groups of parts, equally weighted."""
    groupings: list[tuple[str, Callable[[BatchPart], object]]] = [
        ("the micro-batches' means", lambda part: (part.dp_index, part.microbatch)),
        ("the ranks' means", lambda part: part.dp_index),
        ("the means over ranks of each micro-batch", lambda part: part.microbatch),
    ]
    ratios = []
    for words, key in groupings:
        groups: dict[object, list[BatchPart]] = {}
        for part in parts:
            groups.setdefault(key(part), []).append(part)
        means = [_ratio(group) for group in groups.values() if sum(part.count for part in group)]
        ratios.append((words, sum(means) / len(means)))
    return ratios


def _ratio(parts: Sequence[BatchPart]) -> float:
    return sum(part.loss for part in parts) / max(1.0, sum(part.count for part in parts))


# -- after backward --------------------------------------------------------------------------------


def _norm(evidence: Evidence, first: Comparison) -> Found:
    step = first.step or 1
    right, norms = evidence.reference.steps[step - 1].norm, {seen.steps[step - 1].norm for seen in evidence.ranks}
    return (
        Cause.CLIP_NORM,
        f"gradients agree, but their global norm in step {step} is {numbers(norms)}, not {right:g} "
        f"(its square is {numbers({norm**2 / right**2 for norm in norms})} times the right one{_axis_of_norm(evidence, step)})",
    )


def _axis_of_norm(evidence: Evidence, step: int) -> str:
    """Return text that names the axis over whose ranks the squares were not summed; empty if there is no one axis."""
    norms = {seen.rank: seen.steps[step - 1].norm for seen in evidence.ranks}
    right = evidence.reference.steps[step - 1].norm
    axes = {axis for seen in evidence.ranks for axis in seen.axes if axis != "world"}
    for axis in sorted(axes, key=lambda axis: (axis.startswith("dp"), axis)):
        index = {seen.rank: seen.axes[axis].index(seen.rank) for seen in evidence.ranks if axis in seen.axes}
        squares: dict[int, set[float]] = {}
        for rank, at in index.items():
            squares.setdefault(at, set()).add(norms[rank] ** 2)
        if (
            len(index) < len(norms)
            or len(squares) < 2
            or any(max(values) - min(values) > CLOSE * right**2 for values in squares.values())
        ):
            continue
        if abs(sum(max(values) for values in squares.values()) - right**2) <= CLOSE * right**2:
            return f"; the gradients of ranks with other places on {axis} add up to it, so a sum over {axis} is missing"
    return ""


def _weights(evidence: Evidence, first: Comparison) -> Found:
    step, misfit = first.step or 1, first.misfits[0]
    skipped = {seen.rank for seen in evidence.ranks if seen.steps[step - 1].skipped}
    if skipped and len(skipped) < len(evidence.ranks):
        return Cause.SKIP, f"ranks {sorted(skipped)} skip step {step}, and the others take it"
    weights_before = evidence.reference.start if step == 1 else evidence.reference.steps[step - 2].weights
    tensor = held_part(evidence, misfit, lambda seen: seen.steps[step - 1].weights)
    values, wanted, _ = match_places(tensor, whole_of(weights_before)[misfit.name])
    if torch.allclose(values, wanted, rtol=1e-9, atol=1e-12):
        return Cause.STALE_WEIGHT, f"{misfit.name} on rank {misfit.rank} still has the values from before step {step}"
    if (idle := _explain_idle_move(evidence, misfit.name, step)) is not None:
        return Cause.IDLE, idle
    holders = [(seen.rank, seen.steps[step - 1].weights) for seen in evidence.ranks]
    if any(spread_of(copies) > CLOSE * float(wanted.abs().max()) for copies in copies_of(holders, misfit.name)):
        return Cause.DRIFT, f"ranks that hold the same elements of {misfit.name} differ after step {step}"
    return Cause.UPDATE, f"gradients agree, but not the update of {misfit.name} in step {step}"


def _explain_idle_move(evidence: Evidence, name: str, step: int) -> str | None:
    """Return a text that shows that the layout moves a weight without a gradient, and one device does not; None
    otherwise."""
    right = evidence.reference.steps[step - 1]
    weights_before = evidence.reference.start if step == 1 else evidence.reference.steps[step - 2].weights
    if not torch.equal(whole_of(right.weights)[name], whole_of(weights_before)[name]):
        return None
    gradient = whole_of(right.gradients).get(name)
    if gradient is not None and bool(gradient.any()):
        return None
    return f"{name} has no gradient in step {step}: one device leaves it as it is, and the layout moves it"


def _optimizer(evidence: Evidence, first: Comparison) -> Found:
    misfit = first.misfits[0]
    if first.step and _stays(evidence, misfit.name, first.step):
        return (
            Cause.IDLE,
            f"{misfit.name} has no gradient in step {first.step}: the job's optimizer leaves it as it is on one device, and the "
            "layout moves it",
        )
    when = f" in step {first.step}" if first.step else ""
    return (
        Cause.UPDATE,
        f"given equal gradients, the job's optimizer computes a different {misfit.name}{when} on rank {misfit.rank}",
    )


def _stays(evidence: Evidence, name: str, step: int) -> bool:
    """Return whether the job's optimizer leaves a weight without a gradient unchanged on one device."""
    reference = evidence.reference
    weights_before = reference.start if step == 1 else reference.updated[step - 2]
    gradient = whole_of(reference.steps[step - 1].gradients).get(name)
    is_without = gradient is None or not bool(gradient.any())
    return is_without and torch.equal(whole_of(reference.updated[step - 1])[name], whole_of(weights_before)[name])


def _buffers(evidence: Evidence, first: Comparison) -> Found:
    misfit = first.misfits[0]
    return Cause.BUFFER, f"{misfit.name} on rank {misfit.rank} differs after the last step"


def _explain_held_out(evidence: Evidence, first: Comparison) -> Found:
    return Cause.FORWARD, "training agrees, but not the loss of a forward without gradients"


def find_checkpoint_cause(reference: Observation, loaded: Observation, first: Comparison) -> Found:
    """Return the cause of a difference in a checkpoint: one device loads wrong values from the layout's checkpoint."""
    kind = "optimizer state" if first.what == "checkpoint state" else "weights"
    expected = whole_of(reference.state if kind == "optimizer state" else reference.updated[-1])
    came = whole_of(loaded.state if kind == "optimizer state" else loaded.updated[-1])
    for name in (misfit.name for misfit in first.misfits):
        value = came.get(name)
        if value is None or value.numel() < 2:
            continue
        others = [n for n, t in expected.items() if n != name and t.shape == value.shape and torch.equal(t, value)]
        if others:
            return Cause.STATE_SWAPPED, f"{name} is loaded with the values of {others[0]}"
        if torch.allclose(value.sort().values, expected[name].sort().values, rtol=1e-9, atol=1e-12):
            return Cause.STATE_SWAPPED, f"{name} is loaded with its elements in other places"
    return (
        Cause.CHECKPOINT,
        f"{len(first.misfits)} of {first.compared} {kind} are changed when loaded, first {first.misfits[0].name}",
    )


_BY_KIND: dict[str, Callable[[Evidence, Comparison], Found]] = {
    "start": _start,
    "data": _data,
    "forward": _forward,
    "loss": _loss,
    "gradients": gradients_cause,
    "gradient norm": _norm,
    "weights": _weights,
    "optimizer": _optimizer,
    "optimizer state": _optimizer,
    "buffers": _buffers,
    "held-out loss": _explain_held_out,
}
