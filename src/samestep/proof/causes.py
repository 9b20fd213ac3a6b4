"""The likely cause of a difference between a layout and one device: where it begins, on which ranks, by which factor, and over which axis.

The first difference in the order of a step is explained: an error at the start, in the data, in a module's forward, in
the loss, in gradients, or after the backward. Outputs of copies that add up to the right one lack a reduction; a model
that one device, too, computes differently on the parts of a batch couples its samples; otherwise the module that
differs first is named.

A gradient is a sum over the parts of a batch: g = sum_dm G_dm, over data ranks d and micro-batches m. One device can
compute each G_dm by itself. The wrong gradient that a rank holds is then written as a combination of them,

    held = sum_dm c_dm G_dm        (least squares over a few thousand elements)

and the coefficients are what is reported: all equal to k, the gradient is scaled by k; zero but for the rank's own d,
it was never reduced; proportional to 1 / count_dm, it is a mean of means. Where no combination fits, the fault lies
inside the model, and the module whose backward comes first is named.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from samestep.program.ranks import stages_of
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
from samestep.proof.held_tensors import HeldTensor
from samestep.proof.observation import GIVEN, Observation
from samestep.proof.verdict import Cause

_SMALL_OUTPUT = 1e-12
"""Projections of outputs at most this large give no ratio."""
_SAMPLED = 4096
"""The number of elements of a gradient that a combination is fitted to."""
_MOST_LISTED = 8


def find_cause(evidence: Evidence) -> Found | None:
    """Return the likely cause of the first difference in the order of a step; None where nothing differs."""
    first = next((comparison for comparison in evidence.comparisons if comparison.misfits), None)
    return None if first is None else _BY_KIND[first.what](evidence, first)


# -- before a step, and forward --------------------------------------------------------------------


def _start(evidence: Evidence, first: Comparison) -> Found:
    misfit = first.misfits[0]
    if misfit.missing:
        return Cause.START, f"no rank holds {misfit.missing} elements of {misfit.name}"
    names = {misfit.name for misfit in first.misfits}
    return Cause.START, f"{len(names)} of {first.compared} weights start from different values, first {misfit.name}"


def _data(evidence: Evidence, first: Comparison) -> Found:
    misfit = first.misfits[0]
    return Cause.DATA, f"{misfit.name} on rank {misfit.rank}: one device reads other samples"


def _forward(evidence: Evidence, first: Comparison) -> Found:
    misfit = first.misfits[0]
    path, step = misfit.name, misfit.step or 1
    where = f"{path} in step {step} on rank {misfit.rank} (error {misfit.error:.1e}); everything before it agrees"
    if coupled := _explain_coupling(evidence, step):
        return Cause.COUPLED, f"{coupled}; first {where}"
    if GIVEN not in path and evidence.draws(path):
        return Cause.RANDOM, f"first the random numbers or masks of {where}"
    if step > 1 and any(name.startswith(f"{path}.") for name in evidence.layers):
        return Cause.STALE_WEIGHT, f"weights agree after step {step - 1}, but not the output of {where}"
    collectives = evidence.collectives(path)
    if (sums := _sum_over_copies(evidence, path, step)) is not None:
        return (Cause.MISSING_REDUCTION, f"the outputs of {sums} add up to the right output of {where}{collectives}")
    ratio = _output_ratio(evidence, path, step)
    return Cause.FORWARD, f"first {where}{f', {ratio:g} times the right output' if ratio else ''}{collectives}"


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
    expected = evidence.reference.steps[step - 1].outputs
    ratios = [
        output.projection / expected[key].projection
        for seen in evidence.ranks
        for key, output in seen.steps[step - 1].outputs.items()
        if key[0] == path and key in expected and output.numel == expected[key].numel
        if abs(expected[key].projection) > _SMALL_OUTPUT
    ]
    is_one = bool(ratios) and max(ratios) - min(ratios) <= CLOSE * abs(ratios[0])
    return round(ratios[0], 6) if is_one and abs(ratios[0] - 1) > CLOSE else None


def _loss(evidence: Evidence, first: Comparison) -> Found:
    """Explain a wrong loss after a right forward: losses were summed or divided wrongly."""
    step = first.misfits[0].step or 1
    right = evidence.reference.steps[step - 1].loss
    losses = {seen.steps[step - 1].loss for seen in evidence.ranks}
    if max(losses) - min(losses) > CLOSE * abs(right):
        return (
            Cause.MISSING_REDUCTION,
            f"ranks report different losses in step {step}: {numbers(losses)}; {right:g} is right",
        )
    counted, count = sum(part.count for part in evidence.parts(step - 1)), evidence.reference.steps[step - 1].count
    is_mean = abs(counted - count) >= 1  # which counts the same, however much it is given
    if not is_mean and (coupled := _explain_coupling(evidence, step)):
        return Cause.COUPLED, f"forwards agree, and the loss is not a sum over samples: {coupled}"
    drawn = "; the model draws masks or random numbers" if evidence.draws("") else ""
    return (
        Cause.LOSS,
        f"forwards agree, but the loss of step {step} is {min(losses) / right:.6g} times the right one"
        f"{_mean_of_means(evidence.parts(step - 1), min(losses))}{drawn}",
    )


def _mean_of_means(parts: Sequence[BatchPart], loss: float) -> str:
    """Return text that says which means a loss is the mean of, equally weighted; empty if it is no such mean."""
    keys: dict[str, Callable[[BatchPart], object]] = {
        "micro-batches": lambda part: (part.dp_index, part.microbatch),
        "ranks": lambda part: part.dp_index,
    }
    for word, key in keys.items():
        groups: dict[object, list[BatchPart]] = {}
        for part in parts:
            groups.setdefault(key(part), []).append(part)
        means = [_mean(group) for group in groups.values() if sum(part.count for part in group)]
        if len(means) > 1 and abs(sum(means) / len(means) - loss) <= CLOSE * abs(loss):
            return f": it is the mean of the means of the {word}"
    return ""


def _mean(parts: Sequence[BatchPart]) -> float:
    return sum(part.loss for part in parts) / max(1.0, sum(part.count for part in parts))


def _explain_coupling(evidence: Evidence, step: int) -> str | None:
    """Return a text that shows that one device computes different results on the parts of a batch; None where it
    does not."""
    if evidence.balances or evidence.shares_values:
        return None  # a part has no balancing loss, nor the values of all samples
    right, parts = evidence.reference.steps[step - 1].loss, evidence.parts(step - 1)
    alone = _mean(parts)
    if len(parts) == 1 or abs(alone - right) <= CLOSE * abs(right):
        return None
    return (
        f"on one device too the batch has the loss {right:.6g} as a whole, and {alone:.6g} in the {len(parts)} parts "
        "that the layout makes of it"
    )


# -- gradients -------------------------------------------------------------------------------------


def _gradients(evidence: Evidence, first: Comparison) -> Found:
    """Explain the first gradients that differ, after right forwards."""
    step = first.step or 1
    # Backward goes from the last layer to the first, so the error begins at the last layer with a wrong gradient.
    misfit = min(first.misfits, key=lambda misfit: -evidence.layers.get(misfit.name, 0))
    affected = f"{len(first.misfits)} of {first.compared} gradients differ in step {step}, first {misfit.name}"
    if misfit.missing:
        return Cause.GRADIENT_SUM, f"{affected}: no rank holds {misfit.missing} of its elements"
    right = whole_of(unclip_gradients(evidence.reference, step - 1))[misfit.name]
    holders = [(seen.rank, unclip_gradients(seen, step - 1)) for seen in evidence.ranks]
    if _is_coupled(evidence, misfit.name, step, right):
        return (
            Cause.COUPLED,
            f"{affected}: on one device too it is not the sum over the {len(evidence.parts(step - 1))} parts that the "
            "layout makes of the batch",
        )
    if combination := _combination(evidence, misfit, step):
        return combination[0], f"{affected}: {combination[1]}"
    if axis := _copies_add_up(evidence, misfit.name, right, holders):
        return Cause.MISSING_REDUCTION, f"{affected}: its copies over the {axis} ranks add up to the right gradient"
    part = held_part(evidence, misfit, lambda seen: unclip_gradients(seen, step - 1))
    values, wanted, _ = match_places(part, right)
    spread = max((_spread(copies) for copies in copies_of(holders, misfit.name)), default=0.0)
    if spread > CLOSE * float(wanted.abs().max()):
        return Cause.DRIFT, f"{affected}: ranks that hold the same elements of it hold different values"
    is_moved = torch.allclose(values.sort().values, wanted.sort().values, rtol=CLOSE, atol=1e-12)
    moved = ", which has the right elements in other places" if is_moved else ""
    path = misfit.name.rpartition(".")[0]
    return (
        Cause.BACKWARD,
        f"{affected}{moved}; forwards agree, so look at the backward of {path}{evidence.collectives(path)}",
    )


def _is_coupled(evidence: Evidence, name: str, step: int, right: Tensor) -> bool:
    """Return whether on one device, too, a gradient is not the sum over parts of the batch."""
    parts = evidence.parts(step - 1)
    if evidence.balances or evidence.shares_values or len(parts) == 1:
        return False
    total = sum(part.count for part in parts)
    summed = sum((part.gradients[name].flatten() / total for part in parts), torch.zeros_like(right))
    return float((summed - right).norm()) > CLOSE * float(right.norm())


def _combination(evidence: Evidence, misfit: Misfit, step: int) -> Found | None:
    """Explain the gradients that ranks hold as combinations of those of the batch's parts; None where none fits."""
    parts = evidence.parts(step - 1)
    total = sum(part.count for part in parts)
    fits: dict[int, list[float]] = {}
    for seen in evidence.ranks:
        for gradient in unclip_gradients(seen, step - 1):
            if gradient.name == misfit.name:
                columns = [match_places(gradient, part.gradients[misfit.name].flatten() / total)[1] for part in parts]
                fit = _fit(gradient.values, columns)
                if fit is None:
                    return None
                fits[seen.rank] = fit
    if not fits or all(abs(coefficient - 1) <= CLOSE for fit in fits.values() for coefficient in fit):
        return None
    rank, fit = max(fits.items(), key=lambda item: max(abs(coefficient - 1) for coefficient in item[1]))
    if max(fit) - min(fit) <= CLOSE * abs(fit[0]):
        ratios = {round(fit[0], 6) for fit in fits.values()}
        return Cause.GRADIENT_SUM, f"it is {numbers(ratios)} times the right gradient{_degree(evidence, fit[0])}"
    if alone := _unreduced(evidence, parts, fits):
        return Cause.MISSING_REDUCTION, alone
    listed = ", ".join(
        f"{coefficient:.4g} x micro-batch {part.microbatch + 1} of data rank {part.dp_index}"
        for part, coefficient in zip(parts[:_MOST_LISTED], fit, strict=False)
    )
    weighed = [coefficient * part.count for part, coefficient in zip(parts, fit, strict=True)]
    is_mean = max(weighed) - min(weighed) <= CLOSE * abs(weighed[0])
    hint = "; each part weighs the same, however much it counts, as in a mean of means" if is_mean else ""
    return Cause.GRADIENT_SUM, f"rank {rank} holds {listed}{', ...' * (len(parts) > _MOST_LISTED)}{hint}"


def _unreduced(evidence: Evidence, parts: Sequence[BatchPart], fits: Mapping[int, list[float]]) -> str:
    """Return text that names a rank whose sum has its own data rank's parts and lacks those of others; empty if there is none."""
    data_ranks = {part.dp_index for part in parts}
    for seen in evidence.ranks:
        counted = {part.dp_index for part, c in zip(parts, fits.get(seen.rank, ()), strict=False) if abs(c) > CLOSE}
        if seen.indices["dp"] in counted and counted < data_ranks:
            axes = [axis for axis in ("dp_replicate", "dp_shard", "dp_expert") if axis in seen.axes]
            over = f": a reduction over {' or '.join(axes)} is missing" if axes else ""
            return f"rank {seen.rank} holds the sum over data ranks {sorted(counted)} alone{over}"
    return ""


def _degree(evidence: Evidence, ratio: float) -> str:
    """Return text that names the axis whose size, or one over whose size, the ratio is; empty if there is none."""
    for axis, size in sorted({(axis, len(group)) for seen in evidence.ranks for axis, group in seen.axes.items()}):
        if size > 1 and axis != "world" and (abs(ratio - size) <= CLOSE or abs(ratio * size - 1) <= CLOSE):
            return f", the size of {axis}" if ratio > 1 else f", one over the size of {axis}"
    return ""


def _fit(tensor: Tensor, columns: Sequence[Tensor]) -> list[float] | None:
    """Return the coefficients c of the least-squares fit held = sum c_i column_i; None where it does not fit."""
    places = torch.linspace(0, tensor.numel() - 1, min(_SAMPLED, tensor.numel())).long()
    target = tensor.flatten()[places].double()
    matrix = torch.stack([column.flatten()[places].double() for column in columns], dim=1)
    size = float(target.norm())
    if not math.isfinite(size) or not torch.isfinite(matrix).all() or len(target) <= len(columns):
        return None
    fit = torch.linalg.lstsq(matrix, target[:, None], driver="gelsd").solution[:, 0]
    residual = float((matrix @ fit - target).norm())
    scale = max(size, float(matrix.norm()))
    return fit.tolist() if residual <= CLOSE * scale else None


def _copies_add_up(
    evidence: Evidence, name: str, right: Tensor, holders: Sequence[tuple[int, Sequence[HeldTensor]]]
) -> str | None:
    """Return the axis over whose ranks the copies of a gradient add up to the right one; None if there is none."""
    ties = {axis for seen in evidence.ranks for axis in seen.axes if stages_of(axis)}
    for axis in ("tp", "cp", *sorted(ties), "pp", "dp_replicate", "dp_shard"):
        groups = {seen.axes[axis] for seen in evidence.ranks if axis in seen.axes}
        checked = 0
        for copies in copies_of(holders, name):
            for group in groups:
                parts = [values for rank, values in copies if rank in group]
                if len(parts) < 2:
                    continue
                tensor = next(h for rank, all_held in holders for h in all_held if h.name == name and rank in group)
                _, wanted, _ = match_places(tensor, right)
                if not torch.allclose(
                    sum(parts[1:], parts[0]), wanted, rtol=CLOSE, atol=CLOSE * float(right.abs().max())
                ):
                    break
                checked += 1
        if checked:
            return axis
    return None


def _spread(copies: Sequence[tuple[int, Tensor]]) -> float:
    """Return the largest difference of an element between the first copy and any other."""
    return max((float((values - copies[0][1]).abs().max()) for _, values in copies[1:]), default=0.0)


# -- after backward --------------------------------------------------------------------------------


def _norm(evidence: Evidence, first: Comparison) -> Found:
    step = first.step or 1
    right, norms = evidence.reference.steps[step - 1].norm, {seen.steps[step - 1].norm for seen in evidence.ranks}
    return (
        Cause.CLIP_NORM,
        f"gradients agree, but their global norm in step {step} is {numbers(norms)}, not {right:g} "
        f"(its square is {numbers({norm**2 / right**2 for norm in norms})} times the right one)",
    )


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
    holders = [(seen.rank, seen.steps[step - 1].weights) for seen in evidence.ranks]
    if any(_spread(copies) > CLOSE * float(wanted.abs().max()) for copies in copies_of(holders, misfit.name)):
        return Cause.DRIFT, f"ranks that hold the same elements of {misfit.name} differ after step {step}"
    return Cause.UPDATE, f"gradients agree, but not the update of {misfit.name} in step {step}"


def _optimizer(evidence: Evidence, first: Comparison) -> Found:
    misfit = first.misfits[0]
    when = f" in step {first.step}" if first.step else ""
    return (
        Cause.UPDATE,
        f"given equal gradients, the job's optimizer computes a different {misfit.name}{when} on rank {misfit.rank}",
    )


def _buffers(evidence: Evidence, first: Comparison) -> Found:
    misfit = first.misfits[0]
    return Cause.BUFFER, f"{misfit.name} on rank {misfit.rank} differs after the last step"


def _held_out(evidence: Evidence, first: Comparison) -> Found:
    return Cause.FORWARD, "training agrees, but not the loss of a forward without gradients"


def find_checkpoint_cause(reference: Observation, loaded: Observation, first: Comparison) -> Found:
    """Return the cause of a difference in a checkpoint: one device loads wrong values from the layout's checkpoint."""
    kind = "optimizer state" if first.what == "checkpoint state" else "weights"
    expected = whole_of(reference.state if kind == "optimizer state" else reference.updated[-1])
    came = whole_of(loaded.state if kind == "optimizer state" else loaded.updated[-1])
    name = first.misfits[0].name
    others = [other for other, tensor in expected.items() if name in came and torch.equal(tensor, came[name])]
    swapped = f", which has the values of {others[0]}" if others else ""
    return (
        Cause.CHECKPOINT,
        f"{len(first.misfits)} of {first.compared} {kind} are changed when loaded, first {name}{swapped}",
    )


_BY_KIND: dict[str, Callable[[Evidence, Comparison], Found]] = {
    "start": _start,
    "data": _data,
    "forward": _forward,
    "loss": _loss,
    "gradients": _gradients,
    "gradient norm": _norm,
    "weights": _weights,
    "optimizer": _optimizer,
    "optimizer state": _optimizer,
    "buffers": _buffers,
    "validation loss": _held_out,
}
