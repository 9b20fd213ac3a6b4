"""The likely cause of wrong gradients after right forwards.

A gradient is a sum over the parts of a batch: g = sum_dm G_dm, over data ranks d and micro-batches m. One device can
compute each G_dm by itself. The wrong gradient that a rank holds is then written as a combination of them,

    held = sum_dm c_dm G_dm        (least squares over a few thousand elements)

and the coefficients name the mistake: all equal to k, the gradient is scaled by k; zero except for the last m, only the
last micro-batch counts; zero except for the rank's d, the gradient was never reduced; proportional to 1 / count_dm, a
mean of means. A factor of one pipeline stage, of experts or of chunks of the loss is found alike. Where no combination
fits, the fault lies inside the model: copies that add up to the right gradient lack a reduction over their axis, a tied
weight's gradient is written as a combination of those of its single uses, and
otherwise the module whose backward comes first is named.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

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
from samestep.proof.verdict import Cause

_SAMPLED = 4096
"""The number of elements of a gradient that a combination is fitted to."""


def gradients_cause(evidence: Evidence, first: Comparison) -> Found:
    """Return the likely cause of the first gradients that differ."""
    step = first.step or 1
    # Backward goes from the last layer to the first, so the error begins at the last layer with a wrong gradient.
    order = sorted(first.misfits, key=lambda misfit: -evidence.layers.get(misfit.name, 0))
    misfit = order[0]
    affected = f"{len(first.misfits)} of {first.compared} gradients differ in step {step}, first {misfit.name}"
    if misfit.missing:
        return Cause.MISSING_GRADIENT, f"{affected}: no rank holds {misfit.missing} of its elements"
    right = {gradient.name: gradient for gradient in unclip_gradients(evidence.reference, step - 1)}
    holders = [(seen.rank, unclip_gradients(seen, step - 1)) for seen in evidence.ranks]
    held = held_part(evidence, misfit, lambda seen: unclip_gradients(seen, step - 1))
    values, wanted, _ = match_places(held, right[misfit.name].values)
    if len(first.misfits) < first.compared and not values.abs().max() and wanted.abs().max():
        return Cause.MISSING_GRADIENT, f"{affected}: it has none at all on rank {misfit.rank}"
    tied = next((tensor.name for tensor in order if evidence.aliases.get(tensor.name)), None)
    if (
        tied is not None
        and len(first.misfits) <= max(2, first.compared // 2)
        and (combination := _explain_tied_weight(evidence, tied, step))
    ):
        return combination
    scales = scales_of(evidence, step, right) if evidence.clips else {}
    if scales and max(scales.values()) - min(scales.values()) > CLOSE:
        return (
            Cause.CLIP_NORM,
            f"{affected}: ranks scale their gradients by {numbers(scales.values())}, each by a norm of its own",
        )
    if coupled := _explain_coupled_gradient(evidence, misfit.name, step, right[misfit.name].values):
        return Cause.COUPLED, f"{affected}: {coupled}"
    if part := _explain_scaled_part(evidence, step, right) or _explain_scaled_chunk(
        evidence, _largest(order, right), step
    ):
        return Cause.PART_SCALE, f"{affected}: {part}"
    combination = _combination(evidence, misfit, step, len(first.misfits) == first.compared) or _elsewhere(
        evidence, misfit, step
    )
    if combination is not None:
        return combination[0], f"{affected}: {combination[1]}"
    if axis := _copies_add_up(evidence, misfit.name, right[misfit.name].values, holders):
        return Cause.MISSING_REDUCTION, f"{affected}: its copies over the {axis} ranks add up to the right gradient"
    if torch.allclose(values.sort().values, wanted.sort().values, rtol=CLOSE, atol=1e-12):
        return Cause.ROWS_SWAPPED, f"{affected}: it has the right elements in other places"
    if tied is not None and (combination := _explain_tied_weight(evidence, tied, step)):
        return combination
    spread = max((spread_of(copies) for copies in copies_of(holders, misfit.name)), default=0.0)
    if spread > CLOSE * float(wanted.abs().max()):
        return Cause.DRIFT, f"{affected}: ranks that hold the same elements of it hold different values"
    path = misfit.name.rpartition(".")[0]
    return Cause.BACKWARD, f"{affected}; forwards agree, so look at the backward of {path}{evidence.collectives(path)}"


def _explain_coupled_gradient(evidence: Evidence, name: str, step: int, right: Tensor) -> str | None:
    """Return text that shows that on one device a gradient is not the sum over parts of the batch; None where it is."""
    if evidence.balances or evidence.shares_values:
        return None
    parts = evidence.parts(step - 1)
    total = sum(part.count for part in parts)
    summed = sum((part.gradients[name].flatten() / total for part in parts), torch.zeros_like(right))
    if len(parts) == 1 or float((summed - right).norm()) <= CLOSE * float(right.norm()):
        return None
    return f"on one device too it is not the sum over the {len(parts)} parts that the layout makes of the batch"


def scales_of(evidence: Evidence, step: int, right: Mapping[str, HeldTensor]) -> dict[int, float]:
    """Return the factor by which each rank scales all its gradients; an empty dict where a rank has no single factor."""
    scales = {}
    for seen in evidence.ranks:
        pairs = [
            match_places(gradient, right[gradient.name].values)[:2]
            for gradient in unclip_gradients(seen, step - 1)
            if gradient.name in right
        ]
        if not pairs:
            continue
        ours, wanted = (torch.cat([pair[i].flatten().double() for pair in pairs]) for i in (0, 1))
        scale = float(ours @ wanted / (wanted @ wanted))
        if float((ours - scale * wanted).norm()) > CLOSE * float(ours.norm()):
            return {}
        scales[seen.rank] = scale
    return scales


def _explain_scaled_part(evidence: Evidence, step: int, right: Mapping[str, HeldTensor]) -> str | None:
    """Return text that names a pipeline stage, or experts, whose gradients alone are one factor times the right ones."""
    factors = _factors(evidence, step, right)
    wrong = {key: factor for key, factor in factors.items() if factor is None or abs(factor - 1) > CLOSE}
    all_ = [factor for factor in wrong.values() if factor is not None]
    if not all_ or len(all_) < len(wrong) or max(all_) - min(all_) > CLOSE * abs(all_[0]) or abs(all_[0]) < CLOSE:
        return None
    names = {name for name, _ in wrong}
    times = f"{all_[0]:.6g} times the right gradients{_degree(evidence, all_[0])}"
    for number, stage in enumerate(evidence.stages):
        if names == {name for name, _ in factors if name in stage}:
            return f"the gradients of pipeline stage {number + 1} of {len(evidence.stages)} are {times}"
    if any(not expert and not evidence.experts(name)[0] for name, expert in wrong):
        return None
    experts = sorted({expert for _, expert in wrong if expert}, key=int)
    everyone = {expert for name, expert in factors if expert and name in names}
    which = f"expert{'s' * (len(experts) > 1)} {', '.join(experts)}" if len(experts) < len(everyone) else "all experts"
    return f"those of {which} are {times}"


def _factors(evidence: Evidence, step: int, right: Mapping[str, HeldTensor]) -> dict[tuple[str, str], float | None]:
    """Return the factor of each gradient, by weight and expert: None where it has no single one on all ranks that hold it."""
    factors: dict[tuple[str, str], float | None] = {}
    for piece in (
        gradient for seen in evidence.ranks for gradient in unclip_gradients(seen, step - 1) if gradient.name in right
    ):
        right_values = right[piece.name].values
        values, wanted, index = match_places(piece, right_values)
        stacked, expert = evidence.experts(piece.name)
        places = torch.arange(len(right_values))[index]
        rows = places // (len(right_values) // stacked) if stacked else torch.zeros_like(places)
        for row in rows.unique().tolist():
            ours, theirs = values[rows == row].double(), wanted[rows == row].double()
            if not theirs.any() and not ours.any():
                continue
            key = (piece.name, str(row) if stacked else expert)
            size = float(theirs @ theirs)
            factor = float(ours @ theirs) / size if size else math.inf
            fits = math.isfinite(factor) and float((ours - factor * theirs).norm()) <= CLOSE * float(ours.norm())
            known = factors.get(key, factor)
            agrees = fits and known is not None and abs(factor - known) <= CLOSE * abs(factor)
            factors[key] = factor if agrees else None
    return factors


def _largest(misfits: Sequence[Misfit], right: Mapping[str, HeldTensor]) -> Misfit:
    """Return the one with the most elements, to which the most coefficients can be fitted."""
    return max(misfits, key=lambda gradient: right[gradient.name].values.numel())


def _explain_scaled_chunk(evidence: Evidence, misfit: Misfit, step: int) -> str | None:
    """Return text that names the chunks of the loss that do not count once; None where no such weights fit."""
    parts = evidence.chunks(misfit.name, step - 1)
    if len(parts) < 2:
        return None
    total = sum(part.count for part in evidence.parts(step - 1))
    for seen in evidence.ranks:
        for gradient in unclip_gradients(seen, step - 1):
            if gradient.name != misfit.name:
                continue
            columns = [match_places(gradient, part.flatten() / total)[1] for part in parts]
            fit = _fit(gradient.values, columns)
            if fit is not None and max(fit) - min(fit) > CLOSE:
                counts = ", ".join(
                    f"chunk {i + 1} counts {c:.4g} times" for i, c in enumerate(fit) if abs(c - 1) > CLOSE
                )
                return f"of the {len(parts)} chunks of the loss {counts}"
    return None


def _explain_tied_weight(evidence: Evidence, name: str, step: int) -> Found | None:
    """Explain a tied weight's gradient as a combination of the gradients of its single uses; None where none fits."""
    uses = evidence.uses(name, step - 1)
    total = sum(uses[1:], uses[0])
    right = whole_of(unclip_gradients(evidence.reference, step - 1))[name]
    scale = float(right.flatten() @ total.flatten() / (total.flatten() @ total.flatten()))
    for seen in evidence.ranks:
        for gradient in unclip_gradients(seen, step - 1):
            if gradient.name != name:
                continue
            columns = [match_places(gradient, use.flatten() * scale)[1] for use in uses]
            fit = _fit(gradient.values, columns)
            if fit is not None and any(abs(coefficient - 1) > CLOSE for coefficient in fit):
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
        for gradient in unclip_gradients(seen, step - 1):
            if gradient.name == misfit.name:
                columns = [match_places(gradient, part.gradients[misfit.name].flatten() / total)[1] for part in parts]
                fit = _fit(gradient.values, columns)
                if fit is None:
                    return None
                fits[seen.rank] = fit
    if not fits or all(abs(coefficient - 1) <= CLOSE for fit in fits.values() for coefficient in fit):
        return None
    return _name_cause(evidence, parts, fits, everywhere)


def _elsewhere(evidence: Evidence, misfit: Misfit, step: int) -> Found | None:
    """Explain a rank's gradient as a combination of this rank's elements and another rank's; None where none fits."""
    parts = evidence.parts(step - 1)
    total = sum(part.count for part in parts)
    by_rank = {
        seen.rank: [h for h in unclip_gradients(seen, step - 1) if h.name == misfit.name] for seen in evidence.ranks
    }
    for gradient in by_rank.get(misfit.rank, ()):
        for rank, others in by_rank.items():
            for other in others:
                if other.key == gradient.key or len(other.values) != len(gradient.values):
                    continue
                gradients = [part.gradients[misfit.name].flatten() / total for part in parts]
                columns = [match_places(place, values)[1] for place in (gradient, other) for values in gradients]
                fit = _fit(gradient.values, columns)
                if fit is not None and any(abs(c) > CLOSE for c in fit[len(parts) :]):
                    return Cause.WRONG_GROUP, f"rank {misfit.rank} holds a sum with elements that belong to rank {rank}"
    return None


def _name_cause(
    evidence: Evidence, parts: Sequence[BatchPart], fits: Mapping[int, list[float]], everywhere: bool
) -> Found:
    """Return the cause that the coefficients of each rank's fit show; `everywhere` if every gradient differs."""
    by_rank = {seen.rank: seen for seen in evidence.ranks}
    last = max(part.microbatch for part in parts)
    counted = {rank: {i for i, c in enumerate(fit) if abs(c) > CLOSE} for rank, fit in fits.items()}
    if any(len(indices) < len(parts) for indices in counted.values()):
        microbatches = {parts[i].microbatch for indices in counted.values() for i in indices}
        if last and microbatches != set(range(last + 1)):
            listed = ", ".join(str(m + 1) for m in sorted(microbatches))
            return (
                Cause.LAST_MICROBATCH,
                f"of {last + 1} micro-batches only {listed} count{'s' * (len(microbatches) == 1)}",
            )
        seen_by = {rank: {parts[i].dp_index for i in indices} for rank, indices in counted.items()}
        if all(by_rank[rank].indices["dp"] in indices for rank, indices in seen_by.items()):
            rank, indices = min(seen_by.items(), key=lambda item: len(item[1]))
            if len(indices) == len({part.dp_index for part in parts}):
                return Cause.MISSING_REDUCTION, f"{_lacking(parts, counted)}: it was not ready when the sum was taken"
            return (
                Cause.MISSING_REDUCTION,
                f"rank {rank} holds the sum over data ranks {sorted(indices)} alone{_axis_lacking(evidence, indices)}",
            )
        rank, indices = min(seen_by.items(), key=lambda item: len(item[1]))
        return (
            Cause.WRONG_GROUP,
            f"rank {rank} holds the sum over data ranks {sorted(indices)}, and is not one of them",
        )
    fit = max(fits.values(), key=lambda fit: max(abs(c - 1) for c in fit))
    if max(fit) - min(fit) <= CLOSE * abs(fit[0]):
        ratios = sorted({round(fit[0], 6) for fit in fits.values()})
        times = f"{numbers(ratios)} times the right gradient{_degree(evidence, fit[0])}"
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


def _lacking(parts: Sequence[BatchPart], counted: Mapping[int, set[int]]) -> str:
    """Name the rank whose sum lacks the most parts, and the micro-batches and data ranks of those parts."""
    rank, indices = min(counted.items(), key=lambda item: len(item[1]))
    lacking = [part for index, part in enumerate(parts) if index not in indices]
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


def spread_of(copies: Sequence[tuple[int, Tensor]]) -> float:
    """Return the largest difference of an element between the first copy and any other."""
    return max((float((values - copies[0][1]).abs().max()) for _, values in copies[1:]), default=0.0)
