"""The likely cause of a difference between a layout and one device, found from the shape of the error.

A gradient is a sum over the parts of a batch: g = sum_dm G_dm, over data ranks d and micro-batches m. One device can
compute each G_dm by itself. The wrong gradient that a rank holds is then written as a combination of them,

    held = sum_dm c_dm G_dm        (least squares over a few thousand elements)

and the coefficients name the mistake: all equal to k, the gradient is scaled by k; zero except for the last m, only the
last micro-batch counts; zero except for the rank's own d, the gradient was never reduced; proportional to 1 / count_dm,
a mean of means. Where no combination fits, the fault lies inside the model: copies that add up to the right gradient lack
a reduction over their axis, a tied weight's gradient is written as a combination of those of its single uses, and
otherwise the module that differs first is named.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from samestep.proof.comparison import Comparison, Misfit, copies_of, matched, unclipped, whole_of
from samestep.proof.observation import GIVEN, HeldTensor, Observation
from samestep.proof.verdict import Cause

CLOSE = 1e-6
"""The largest relative difference of coefficients and ratios that count as equal; they come from rounded sums."""
SMALL_OUTPUT = 1e-12
"""Projections of outputs at most this large give no ratio."""
_SAMPLED = 4096
"""The number of elements of a gradient that a combination is fitted to."""

Found = tuple[Cause, str]
"""A cause, and its explanation in one sentence with names and numbers."""


@dataclass(frozen=True, slots=True)
class BatchPart:
    """The loss and gradients of one micro-batch of one data rank, computed on one device as sums, not means."""

    dp_index: int
    microbatch: int
    """The index of the micro-batch on its data rank, counted from 0."""
    gradients: Mapping[str, Tensor]
    """The sum of the gradients over counted tokens, by parameter."""
    loss: float
    """The sum of the losses of counted tokens."""
    count: float
    """The number of counted tokens."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """Everything that the search for a cause reads: both sides' observations, and runs that it may ask for."""

    reference: Observation
    ranks: Sequence[Observation]
    comparisons: Sequence[Comparison]
    layers: Mapping[str, int]
    """The index of the layer of each parameter, in the order of the forward."""
    aliases: Mapping[str, tuple[str, ...]]
    """The other names of each tied weight, by parameter."""
    dropout: Callable[[str], bool]
    """Return whether the module at a path applies dropout."""
    weighted: Callable[[str], bool]
    """Return whether the module at a path has parameters."""
    positional: Callable[[str], bool]
    """Return whether the output of the module at a path depends on positions alone, as known of the model's family."""
    boundaries: Sequence[tuple[str, ...]]
    """The modules of the first layer of each pipeline chunk but the first."""
    collectives: Callable[[str], str]
    """Describe the collectives that the program sends for a module, bucket or unit."""
    parts: Callable[[int], Sequence[BatchPart]]
    """Compute the parts of a step on one device; steps count from 0."""
    uses: Callable[[str, int], Sequence[Tensor]]
    """Compute the gradient of each single use of a tied weight in a step; steps count from 0."""
    clips: bool
    """Whether the job clips gradients."""
    balances: bool
    """Whether the job adds a loss that balances experts; a single part of a batch has none."""


def find_cause(evidence: Evidence) -> Found | None:
    """Return the likely cause of the first difference in the order of a step; None where nothing differs."""
    first = next((one for one in evidence.comparisons if one.misfits), None)
    if first is None:
        return None
    return _BY_KIND[first.what](evidence, first)


# -- before a step ---------------------------------------------------------------------------------


def _start(evidence: Evidence, first: Comparison) -> Found:
    misfit = first.misfits[0]
    if misfit.missing:
        return Cause.START, f"no rank holds {misfit.missing} elements of {misfit.name}"
    if _is_elsewhere(evidence.reference.start, _held(evidence, misfit, lambda seen: seen.start)):
        return (
            Cause.ROWS_SWAPPED,
            f"rank {misfit.rank} starts with elements of {misfit.name} that belong elsewhere in it",
        )
    names = {one.name for one in first.misfits}
    return Cause.START, f"{len(names)} of {first.compared} weights start from different values, first {misfit.name}"


def _is_elsewhere(reference: Sequence[HeldTensor], held: HeldTensor) -> bool:
    """Return whether every held element occurs in the whole tensor, in another place."""
    whole = whole_of(reference)[held.name]
    values, _, _ = matched(held, whole)
    return bool(torch.isin(values, whole).all()) and bool((values != values[0]).any())


def _data(evidence: Evidence, first: Comparison) -> Found:
    misfit = first.misfits[0]
    return Cause.DATA, f"{misfit.name} on rank {misfit.rank}: not what one device reads"


# -- forward ---------------------------------------------------------------------------------------


def _forward(evidence: Evidence, first: Comparison) -> Found:
    misfit = first.misfits[0]
    path, step = misfit.name, misfit.step or 1
    where = f"{path} in step {step} on rank {misfit.rank} (error {misfit.error:.1e}); everything before it agrees"
    if coupled := _coupled(evidence, step):
        return Cause.COUPLED, f"{coupled}; first {where}"
    if GIVEN in path:
        return Cause.POSITIONS, f"first the argument {where}"
    if evidence.dropout(path):
        return Cause.DROPOUT, f"first the masks of {where}"
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
    ratio = _output_ratio(evidence, path, step)
    times = f", {ratio:g} times the right output" if ratio else ""
    if any(
        path == boundary or path.startswith(f"{boundary}.")
        for boundaries in evidence.boundaries
        for boundary in boundaries
    ):
        return Cause.BOUNDARY, f"first {where}{times}; it is the first layer of a pipeline stage"
    return Cause.FORWARD, f"first {where}{times}{evidence.collectives(path)}"


def _projections(evidence: Evidence, path: str, step: int) -> list[tuple[Observation, float, float]]:
    """Return (rank, its projection, the right projection) for each sample of one module's output."""
    expected = evidence.reference.steps[step - 1].outputs
    return [
        (seen, given.projection, expected[key].projection)
        for seen in evidence.ranks
        for key, given in seen.steps[step - 1].outputs.items()
        if key[0] == path and key in expected and given.numel == expected[key].numel
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
                given = [s.steps[step - 1].outputs[key] for s in members if key in s.steps[step - 1].outputs]
                if key[0] == path and len(given) == len(members) > 1:
                    totals.append((sum(one.projection for one in given), right.projection))
        if totals and all(abs(total - right) <= CLOSE * max(1.0, abs(right)) for total, right in totals):
            return f"the {axis} ranks"
    return None


def _output_ratio(evidence: Evidence, path: str, step: int) -> float | None:
    """Return the one factor between a module's outputs and the right ones; None where there is no such factor."""
    pairs = [(given, right) for _, given, right in _projections(evidence, path, step) if abs(right) > SMALL_OUTPUT]
    ratios = [given / right for given, right in pairs]
    if ratios and max(ratios) - min(ratios) <= CLOSE * abs(ratios[0]) and abs(ratios[0] - 1) > CLOSE:
        return round(ratios[0], 6)
    return None


def _loss(evidence: Evidence, first: Comparison) -> Found:
    """Explain a wrong loss after a right forward: losses were summed or divided wrongly."""
    step = first.misfits[0].step or 1
    right = evidence.reference.steps[step - 1].loss
    given = {seen.steps[step - 1].loss for seen in evidence.ranks}
    if len(given) > 1 and max(given) - min(given) > CLOSE * abs(right):
        return (
            Cause.MISSING_REDUCTION,
            f"ranks report different losses in step {step}: {_numbers(given)}; {right:g} is right",
        )
    ours = given.pop()
    parts = evidence.parts(step - 1)
    if evidence.balances:
        ratio = (ours - _ratio(parts)) / (right - _ratio(parts))
        return (
            Cause.AUXILIARY_LOSS,
            f"forwards agree, but the balancing loss of step {step} is {ratio:.6g} times the right one",
        )
    coupled, whole = _coupled(evidence, step), evidence.reference.steps[step - 1].count
    is_mean = abs(sum(part.count for part in parts) - whole) >= 1  # which counts the same, however much it is given
    if coupled and not is_mean:
        return Cause.COUPLED, f"forwards agree, and the loss is no sum over samples: {coupled}"
    for words, guess in _mean_of_means(parts):
        if abs(guess - ours) <= CLOSE * abs(ours) and abs(guess - right) > CLOSE * abs(right):
            return Cause.MEAN_OF_MEANS, f"the loss {ours:g} of step {step} is the mean of {words}; {right:g} is right"
    last = max(part.microbatch for part in parts)
    kept = [part for part in parts if part.microbatch == last]
    if last and abs(_ratio(kept) - ours) <= CLOSE * abs(ours):
        return Cause.LAST_MICROBATCH, f"the loss {ours:g} of step {step} is that of the last micro-batches alone"
    return Cause.LOSS_SCALE, f"forwards agree, but the loss of step {step} is {ours / right:.6g} times the right one"


def _coupled(evidence: Evidence, step: int) -> str | None:
    """Return text that shows that one device computes something else on the parts of a batch; None where it does not."""
    if evidence.balances:
        return None  # a part has no balancing loss
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
    found = []
    for words, key in groupings:
        groups: dict[object, list[BatchPart]] = {}
        for part in parts:
            groups.setdefault(key(part), []).append(part)
        means = [_ratio(group) for group in groups.values() if sum(part.count for part in group)]
        found.append((words, sum(means) / len(means)))
    return found


def _ratio(parts: Sequence[BatchPart]) -> float:
    return sum(part.loss for part in parts) / max(1.0, sum(part.count for part in parts))


# -- backward --------------------------------------------------------------------------------------


def _gradients(evidence: Evidence, first: Comparison) -> Found:
    step = first.step or 1
    # Backward goes from the last layer to the first, so the error begins at the last layer with a wrong gradient.
    order = sorted(first.misfits, key=lambda one: -evidence.layers.get(one.name, 0))
    misfit = order[0]
    affected = f"{len(first.misfits)} of {first.compared} gradients differ in step {step}, first {misfit.name}"
    if misfit.missing:
        return Cause.MISSING_GRADIENT, f"{affected}: no rank holds {misfit.missing} of its elements"
    right = {held.name: held for held in unclipped(evidence.reference, step - 1)}
    holders = [(seen.rank, unclipped(seen, step - 1)) for seen in evidence.ranks]
    held = _held(evidence, misfit, lambda seen: unclipped(seen, step - 1))
    values, wanted, _ = matched(held, right[misfit.name].values)
    if len(first.misfits) < first.compared and not values.abs().max() and wanted.abs().max():
        return Cause.MISSING_GRADIENT, f"{affected}: it has none at all on rank {misfit.rank}"
    tied = next((one.name for one in order if evidence.aliases.get(one.name)), None)
    if (
        tied is not None
        and len(first.misfits) <= max(2, first.compared // 2)
        and (found := _tied(evidence, tied, step))
    ):
        return found
    scales = _scales(evidence, step, right) if evidence.clips else {}
    if scales and max(scales.values()) - min(scales.values()) > CLOSE:
        return (
            Cause.CLIP_NORM,
            f"{affected}: ranks scale their gradients by {_numbers(scales.values())}, each by a norm of its own",
        )
    if coupled := _coupled_gradient(evidence, misfit.name, step, right[misfit.name].values):
        return Cause.COUPLED, f"{affected}: {coupled}"
    found = _combination(evidence, misfit, step, len(first.misfits) == first.compared) or _elsewhere(
        evidence, misfit, step
    )
    if found is not None:
        return found[0], f"{affected}: {found[1]}"
    if axis := _copies_add_up(evidence, misfit.name, right[misfit.name].values, holders):
        return Cause.MISSING_REDUCTION, f"{affected}: its copies over the {axis} ranks add up to the right gradient"
    if torch.allclose(values.sort().values, wanted.sort().values, rtol=CLOSE, atol=1e-12):
        return Cause.ROWS_SWAPPED, f"{affected}: it has the right elements in other places"
    if tied is not None and (found := _tied(evidence, tied, step)):
        return found
    spread = max((_spread(copies) for copies in copies_of(holders, misfit.name)), default=0.0)
    if spread > CLOSE * float(wanted.abs().max()):
        return Cause.DRIFT, f"{affected}: ranks that hold the same elements of it hold different values"
    path = misfit.name.rpartition(".")[0]
    return Cause.BACKWARD, f"{affected}; forwards agree, so look at the backward of {path}{evidence.collectives(path)}"


def _coupled_gradient(evidence: Evidence, name: str, step: int, right: Tensor) -> str | None:
    """Return text that shows that on one device a gradient is not the sum over parts of the batch; None where it is."""
    if evidence.balances:
        return None
    parts = evidence.parts(step - 1)
    total = sum(part.count for part in parts)
    summed = sum((part.gradients[name].flatten() / total for part in parts), torch.zeros_like(right))
    if len(parts) == 1 or float((summed - right).norm()) <= CLOSE * float(right.norm()):
        return None
    return f"on one device too it is not the sum over the {len(parts)} parts that the layout makes of the batch"


def _scales(evidence: Evidence, step: int, right: Mapping[str, HeldTensor]) -> dict[int, float]:
    """Return the factor by which each rank scales all its gradients; an empty dict where a rank has no single factor."""
    scales = {}
    for seen in evidence.ranks:
        held = [matched(one, right[one.name].values)[:2] for one in unclipped(seen, step - 1) if one.name in right]
        if not held:
            continue
        ours, wanted = (torch.cat([pair[i].flatten().double() for pair in held]) for i in (0, 1))
        scale = float(ours @ wanted / (wanted @ wanted))
        if float((ours - scale * wanted).norm()) > CLOSE * float(ours.norm()):
            return {}
        scales[seen.rank] = scale
    return scales


def _tied(evidence: Evidence, name: str, step: int) -> Found | None:
    """Explain a tied weight's gradient as a combination of the gradients of its single uses; None where none fits."""
    uses = evidence.uses(name, step - 1)
    total = sum(uses[1:], uses[0])
    right = whole_of(unclipped(evidence.reference, step - 1))[name]
    scale = float(right.flatten() @ total.flatten() / (total.flatten() @ total.flatten()))
    for seen in evidence.ranks:
        for held in unclipped(seen, step - 1):
            if held.name != name:
                continue
            columns = [matched(held, use.flatten() * scale)[1] for use in uses]
            fit = _fit(held.values, columns)
            if fit is not None and any(abs(one - 1) > CLOSE for one in fit):
                names = (name, *evidence.aliases[name])
                counts = ", ".join(f"{c:.4g} x {n}" for c, n in zip(fit, names, strict=False))
                return Cause.TIED, f"the gradient of {name} on rank {seen.rank} is {counts}, where each counts once"
    return None


def _combination(evidence: Evidence, misfit: Misfit, step: int, everywhere: bool) -> Found | None:
    """Explain the gradients that ranks hold as combinations of those of the batch's parts; None where none fits."""
    parts = evidence.parts(step - 1)
    total = sum(part.count for part in parts)
    fits: dict[int, list[float]] = {}
    for seen in evidence.ranks:
        for held in unclipped(seen, step - 1):
            if held.name == misfit.name:
                columns = [matched(held, part.gradients[misfit.name].flatten() / total)[1] for part in parts]
                fit = _fit(held.values, columns)
                if fit is None:
                    return None
                fits[seen.rank] = fit
    if not fits or all(abs(one - 1) <= CLOSE for fit in fits.values() for one in fit):
        return None
    return _named(evidence, parts, fits, everywhere)


def _elsewhere(evidence: Evidence, misfit: Misfit, step: int) -> Found | None:
    """Explain a rank's gradient as a combination of its own elements and another rank's; None where none fits."""
    parts = evidence.parts(step - 1)
    total = sum(part.count for part in parts)
    held = {seen.rank: [h for h in unclipped(seen, step - 1) if h.name == misfit.name] for seen in evidence.ranks}
    for mine in held.get(misfit.rank, ()):
        for rank, others in held.items():
            for other in others:
                if other.key == mine.key or len(other.values) != len(mine.values):
                    continue
                whole = [part.gradients[misfit.name].flatten() / total for part in parts]
                columns = [matched(place, one)[1] for place in (mine, other) for one in whole]
                fit = _fit(mine.values, columns)
                if fit is not None and any(abs(c) > CLOSE for c in fit[len(parts) :]):
                    return Cause.WRONG_GROUP, f"rank {misfit.rank} holds a sum with elements that belong to rank {rank}"
    return None


def _named(evidence: Evidence, parts: Sequence[BatchPart], fits: Mapping[int, list[float]], everywhere: bool) -> Found:
    """Return the cause that the coefficients of each rank's fit show; `everywhere` if every gradient differs."""
    by_rank = {seen.rank: seen for seen in evidence.ranks}
    last = max(part.microbatch for part in parts)
    kept = {rank: {i for i, c in enumerate(fit) if abs(c) > CLOSE} for rank, fit in fits.items()}
    if any(len(mine) < len(parts) for mine in kept.values()):
        microbatches = {parts[i].microbatch for mine in kept.values() for i in mine}
        if last and microbatches != set(range(last + 1)):
            listed = ", ".join(str(m + 1) for m in sorted(microbatches))
            return (
                Cause.LAST_MICROBATCH,
                f"of {last + 1} micro-batches only {listed} count{'s' * (len(microbatches) == 1)}",
            )
        seen_by = {rank: {parts[i].dp_index for i in mine} for rank, mine in kept.items()}
        if all(by_rank[rank].indices["dp"] in mine for rank, mine in seen_by.items()):
            rank, mine = min(seen_by.items(), key=lambda item: len(item[1]))
            if len(mine) == len({part.dp_index for part in parts}):
                return Cause.MISSING_REDUCTION, f"{_lacking(parts, kept)}: it was not ready when the sum was taken"
            return (
                Cause.MISSING_REDUCTION,
                f"rank {rank} holds the sum over data ranks {sorted(mine)} alone{_axis_lacking(evidence, mine)}",
            )
        rank, mine = min(seen_by.items(), key=lambda item: len(item[1]))
        return (
            Cause.WRONG_GROUP,
            f"rank {rank} holds the sum over data ranks {sorted(mine)}, and is not one of them",
        )
    fit = max(fits.values(), key=lambda one: max(abs(c - 1) for c in one))
    if max(fit) - min(fit) <= CLOSE * abs(fit[0]):
        ratios = sorted({round(one[0], 6) for one in fits.values()})
        times = f"{_numbers(ratios)} times the right gradient{_degree(evidence, fit[0])}"
        if everywhere or fit[0] < 1:
            return Cause.GRADIENT_SCALE, f"every one is {times}" if everywhere else f"it is {times}"
        return Cause.DOUBLE_REDUCTION, f"it is {times}"
    for words, key in (("micro-batch", lambda p: (p.dp_index, p.microbatch)), ("rank", lambda p: p.dp_index)):
        counts: dict[object, float] = {}
        for part in parts:
            counts[key(part)] = counts.get(key(part), 0.0) + part.count
        products = [c * counts[key(part)] for c, part in zip(fit, parts, strict=True)]
        if max(products) - min(products) <= CLOSE * abs(products[0]):
            return Cause.MEAN_OF_MEANS, f"each {words} has the same weight, however many tokens it counts"
    listed = ", ".join(f"{c:.4g}" for c in fit)
    if all(abs(c - round(c)) <= CLOSE and round(c) >= 1 for c in fit):
        return Cause.DOUBLE_REDUCTION, f"parts of the batch count {listed} times"
    return Cause.WRONG_GROUP, f"parts of the batch have the weights {listed}, where each has weight 1"


def _lacking(parts: Sequence[BatchPart], kept: Mapping[int, set[int]]) -> str:
    """Name the rank whose sum lacks the most parts, and the micro-batches and data ranks of those parts."""
    rank, mine = min(kept.items(), key=lambda item: len(item[1]))
    lacking = [part for index, part in enumerate(parts) if index not in mine]
    microbatches = ", ".join(str(m + 1) for m in sorted({part.microbatch for part in lacking}))
    return f"rank {rank} lacks micro-batch {microbatches} of data ranks {sorted({part.dp_index for part in lacking})}"


def _axis_lacking(evidence: Evidence, data_ranks: set[int]) -> str:
    lacking = [
        axis for axis in ("dp_replicate", "dp_shard", "dp_expert") if any(axis in seen.axes for seen in evidence.ranks)
    ]
    return f": a reduction over {' or '.join(lacking)} is missing" if lacking else ""


def _degree(evidence: Evidence, ratio: float) -> str:
    """Return text that names the axis whose size, or one over whose size, the ratio is; empty if there is none."""
    for axis, size in sorted({(axis, len(group)) for seen in evidence.ranks for axis, group in seen.axes.items()}):
        if size > 1 and axis != "world" and (abs(ratio - size) <= CLOSE or abs(ratio * size - 1) <= CLOSE):
            return f", the size of {axis}" if ratio > 1 else f", one over the size of {axis}"
    return ""


def _fit(held: Tensor, columns: Sequence[Tensor]) -> list[float] | None:
    """Return the coefficients c of the least-squares fit held = sum c_i column_i; None where it does not fit."""
    kept = torch.linspace(0, held.numel() - 1, min(_SAMPLED, held.numel())).long()
    target = held.flatten()[kept].double()
    matrix = torch.stack([column.flatten()[kept].double() for column in columns], dim=1)
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
    for axis in ("tp", "cp", "tie", "pp", "dp_replicate", "dp_shard"):
        groups = {seen.axes[axis] for seen in evidence.ranks if axis in seen.axes}
        checked = 0
        for copies in copies_of(holders, name):
            for group in groups:
                mine = [values for rank, values in copies if rank in group]
                if len(mine) < 2:
                    continue
                held = next(h for rank, all_held in holders for h in all_held if h.name == name and rank in group)
                _, wanted, _ = matched(held, right)
                if not torch.allclose(
                    sum(mine[1:], mine[0]), wanted, rtol=CLOSE, atol=CLOSE * float(right.abs().max())
                ):
                    break
                checked += 1
        if checked:
            return axis
    return None


def _spread(copies: Sequence[tuple[int, Tensor]]) -> float:
    """Return the largest difference between the first copy and another one."""
    return max((float((values - copies[0][1]).abs().max()) for _, values in copies[1:]), default=0.0)


# -- after backward --------------------------------------------------------------------------------


def _norm(evidence: Evidence, first: Comparison) -> Found:
    step = first.step or 1
    right, given = evidence.reference.steps[step - 1].norm, {seen.steps[step - 1].norm for seen in evidence.ranks}
    return (
        Cause.CLIP_NORM,
        f"gradients agree, but their global norm in step {step} is {_numbers(given)}, not {right:g} "
        f"(its square is {_numbers({one**2 / right**2 for one in given})} times the right one)",
    )


def _weights(evidence: Evidence, first: Comparison) -> Found:
    step, misfit = first.step or 1, first.misfits[0]
    skipped = {seen.rank for seen in evidence.ranks if seen.steps[step - 1].skipped}
    if skipped and len(skipped) < len(evidence.ranks):
        return Cause.SKIP, f"ranks {sorted(skipped)} skip step {step}, and the others take it"
    before = evidence.reference.start if step == 1 else evidence.reference.steps[step - 2].weights
    held = _held(evidence, misfit, lambda seen: seen.steps[step - 1].weights)
    values, wanted, _ = matched(held, whole_of(before)[misfit.name])
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
    """Return the cause of a difference in a checkpoint: what one device loads from the layout's checkpoint is wrong."""
    kind = "optimizer state" if first.what == "checkpoint state" else "weights"
    whole = whole_of(reference.state if kind == "optimizer state" else reference.updated[-1])
    came = whole_of(loaded.state if kind == "optimizer state" else loaded.updated[-1])
    for name in (misfit.name for misfit in first.misfits):
        given = came.get(name)
        if given is None or given.numel() < 2:
            continue
        others = [n for n, t in whole.items() if n != name and t.shape == given.shape and torch.equal(t, given)]
        if others:
            return Cause.STATE_SWAPPED, f"{name} is loaded with the values of {others[0]}"
        if torch.allclose(given.sort().values, whole[name].sort().values, rtol=1e-9, atol=1e-12):
            return Cause.STATE_SWAPPED, f"{name} is loaded with its elements in other places"
    return (
        Cause.CHECKPOINT,
        f"{len(first.misfits)} of {first.compared} {kind} are changed when loaded, first {first.misfits[0].name}",
    )


def _held(evidence: Evidence, misfit: Misfit, of: Callable[[Observation], Sequence[HeldTensor]]) -> HeldTensor:
    """Return the held part of a misfit's tensor on the misfit's rank."""
    seen = next(one for one in evidence.ranks if one.rank == misfit.rank)
    return next(held for held in of(seen) if held.name == misfit.name)


def _numbers(values: Iterable[float]) -> str:
    return ", ".join(f"{value:.6g}" for value in sorted(values))


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
    "held-out loss": _held_out,
}
