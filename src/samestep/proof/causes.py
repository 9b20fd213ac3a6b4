"""The likely cause of a difference, from its shape.

A gradient is a sum over the parts of a batch: g = sum_dm G_dm, over data ranks d and micro-batches m. One device can
compute each G_dm by itself. What a rank holds instead of g is then written as a combination of them,

    held = sum_dm c_dm G_dm        (least squares over a few thousand elements)

and the coefficients say what was done wrong: all equal to k, scaled by k; zero but for the last m, only the last
micro-batch; zero but for the rank's own d, never reduced; proportional to 1 / count_dm, a mean of means. Where no
combination fits, the fault lies inside the model: copies that add up to the right gradient lack a reduction over their
axis, those of a tied weight are fitted by the gradients of its single uses, and so on down to a module's name.
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
"""Of coefficients and ratios, which are found from noisy sums."""
_SAMPLED = 4096

Found = tuple[Cause, str]


@dataclass(frozen=True, slots=True)
class BatchPart:
    """What one part of a step's batch gives on one device: not divided by any count."""

    dp_index: int
    microbatch: int
    gradients: Mapping[str, Tensor]
    loss: float
    count: float


@dataclass(frozen=True, slots=True)
class Case:
    """What a cause is looked for in."""

    reference: Observation
    ranks: Sequence[Observation]
    comparisons: Sequence[Comparison]
    layers: Mapping[str, int]
    """Of each parameter: its place in the forward."""
    aliases: Mapping[str, tuple[str, ...]]
    """Other names of tied weights."""
    dropout: Callable[[str], bool]
    """Whether a module, given by its path, drops elements."""
    weighted: Callable[[str], bool]
    """Whether a module has weights."""
    positional: Callable[[str], bool]
    """Whether a module knows positions alone, by what is known of the model's family."""
    boundaries: Sequence[tuple[str, ...]]
    """Modules of the first layer of each pipeline run but the first."""
    collectives: Callable[[str], str]
    """What the program sends for a module, bucket or unit, in words."""
    parts: Callable[[int], Sequence[BatchPart]]
    """Compute the parts of a step on one device; counts from 0."""
    uses: Callable[[str, int], Sequence[Tensor]]
    """Compute the gradients of a tied weight's single uses in a step."""
    clips: bool
    """Whether the job clips."""
    balances: bool
    """Whether the job adds a loss that balances experts, which no part of a batch has by itself."""


def find_cause(case: Case) -> Found | None:
    """Return the likely cause of the first difference; None where nothing differs."""
    first = next((one for one in case.comparisons if one.misfits), None)
    if first is None:
        return None
    return _BY_KIND[first.what](case, first)


# -- before a step ---------------------------------------------------------------------------------


def _start(case: Case, first: Comparison) -> Found:
    misfit = first.misfits[0]
    if misfit.missing:
        return Cause.START, f"{misfit.missing} elements of {misfit.name} are on no rank"
    if _is_elsewhere(case.reference.start, _held(case, misfit, lambda seen: seen.start)):
        return (
            Cause.ROWS_SWAPPED,
            f"rank {misfit.rank} starts with elements of {misfit.name} that belong to another place of it",
        )
    names = {one.name for one in first.misfits}
    return Cause.START, f"{len(names)} of {first.compared} weights start from other values; first {misfit.name}"


def _is_elsewhere(reference: Sequence[HeldTensor], held: HeldTensor) -> bool:
    """Whether all that is held does stand in the whole tensor, though in other places."""
    whole = whole_of(reference)[held.name]
    values, _, _ = matched(held, whole)
    return bool(torch.isin(values, whole).all()) and bool((values != values[0]).any())


def _data(case: Case, first: Comparison) -> Found:
    misfit = first.misfits[0]
    return Cause.DATA, f"rank {misfit.rank} read other {misfit.name} than one device reads"


# -- forward ---------------------------------------------------------------------------------------


def _forward(case: Case, first: Comparison) -> Found:
    misfit = first.misfits[0]
    path, step = misfit.name, misfit.step or 1
    where = f"{path} in step {step} on rank {misfit.rank} (error {misfit.error:.1e}); all before it agrees"
    if GIVEN in path:
        return Cause.POSITIONS, f"what is given to {where}"
    if case.dropout(path):
        return Cause.DROPOUT, f"the masks of {where}"
    if step > 1 and case.weighted(path):
        return Cause.STALE_WEIGHT, f"weights agree after step {step - 1}, yet not the output of {where}"
    if not case.weighted(path) or case.positional(path):
        return Cause.POSITIONS, f"first {where}; it knows positions and buffers alone"
    sums = _sum_over_copies(case, path, step)
    if sums is not None:
        return (
            Cause.MISSING_REDUCTION,
            f"outputs over {sums} add up to the right one of {where}{case.collectives(path)}",
        )
    ratio = _output_ratio(case, path, step)
    times = f", {ratio:g} times the right output" if ratio else ""
    if any(
        path == boundary or path.startswith(f"{boundary}.") for boundaries in case.boundaries for boundary in boundaries
    ):
        return Cause.BORDER, f"first {where}{times}; it is the first layer of a pipeline stage"
    return Cause.FORWARD, f"first {where}{times}{case.collectives(path)}"


def _projections(case: Case, path: str, step: int) -> list[tuple[Observation, float, float]]:
    """Return (rank, its projection, the right one) of the samples of one module."""
    expected = case.reference.steps[step - 1].outputs
    return [
        (seen, given.projection, expected[key].projection)
        for seen in case.ranks
        for key, given in seen.steps[step - 1].outputs.items()
        if key[0] == path and key in expected and given.numel == expected[key].numel
    ]


def _sum_over_copies(case: Case, path: str, step: int) -> str | None:
    """Name the axis over which the outputs of ranks with the same samples add up to the right output."""
    expected = case.reference.steps[step - 1].outputs
    for axis in ("tp", "cp"):
        groups = {seen.axes[axis] for seen in case.ranks if axis in seen.axes}
        totals: list[tuple[float, float]] = []
        for group in groups:
            members = [seen for seen in case.ranks if seen.rank in group]
            for key, right in expected.items():
                given = [s.steps[step - 1].outputs[key] for s in members if key in s.steps[step - 1].outputs]
                if key[0] == path and len(given) == len(members) > 1:
                    totals.append((sum(one.projection for one in given), right.projection))
        if totals and all(abs(total - right) <= CLOSE * max(1.0, abs(right)) for total, right in totals):
            return f"the {axis} ranks"
    return None


def _output_ratio(case: Case, path: str, step: int) -> float | None:
    pairs = [(given, right) for _, given, right in _projections(case, path, step) if abs(right) > SMALL_OUTPUT]
    ratios = [given / right for given, right in pairs]
    if ratios and max(ratios) - min(ratios) <= CLOSE * abs(ratios[0]) and abs(ratios[0] - 1) > CLOSE:
        return round(ratios[0], 6)
    return None


SMALL_OUTPUT = 1e-12


def _loss(case: Case, first: Comparison) -> Found:
    """Forwards agree: what differs is how losses are summed and divided."""
    step = first.misfits[0].step or 1
    right = case.reference.steps[step - 1].loss
    given = {seen.steps[step - 1].loss for seen in case.ranks}
    if len(given) > 1 and max(given) - min(given) > CLOSE * abs(right):
        return (
            Cause.MISSING_REDUCTION,
            f"ranks report different losses in step {step}: {_numbers(given)}; right {right:g}",
        )
    ours = given.pop()
    parts = case.parts(step - 1)
    if case.balances:
        ratio = (ours - _ratio(parts)) / (right - _ratio(parts))
        return (
            Cause.AUXILIARY_LOSS,
            f"forwards agree, but what step {step} adds to the loss is {ratio:.6g} times the right",
        )
    for words, guess in _mean_of_means(parts):
        if abs(guess - ours) <= CLOSE * abs(ours) and abs(guess - right) > CLOSE * abs(right):
            return Cause.MEAN_OF_MEANS, f"the loss {ours:g} of step {step} is the mean over {words}; right {right:g}"
    last = max(part.microbatch for part in parts)
    kept = [part for part in parts if part.microbatch == last]
    if last and abs(_ratio(kept) - ours) <= CLOSE * abs(ours):
        return Cause.LAST_MICROBATCH, f"the loss {ours:g} of step {step} is that of the last micro-batches alone"
    return Cause.LOSS_SCALE, f"forwards agree, but the loss of step {step} is {ours / right:.6g} times the right one"


def _mean_of_means(parts: Sequence[BatchPart]) -> list[tuple[str, float]]:
    """Return wrong ways to divide: means over groups of parts, each of which weighs the same."""
    groupings: list[tuple[str, Callable[[BatchPart], object]]] = [
        ("means of micro-batches", lambda part: (part.dp_index, part.microbatch)),
        ("means of ranks", lambda part: part.dp_index),
        ("means of micro-batch numbers", lambda part: part.microbatch),
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


def _gradients(case: Case, first: Comparison) -> Found:
    step = first.step or 1
    # Backward goes from the last layer to the first: the error begins at the last layer that has one.
    order = sorted(first.misfits, key=lambda one: -case.layers.get(one.name, 0))
    misfit = order[0]
    affected = f"{len(first.misfits)} of {first.compared} gradients differ in step {step}, first {misfit.name}"
    if misfit.missing:
        return Cause.MISSING_GRADIENT, f"{affected}: {misfit.missing} of its elements are on no rank"
    right = {held.name: held for held in unclipped(case.reference, step - 1)}
    holders = [(seen.rank, unclipped(seen, step - 1)) for seen in case.ranks]
    held = _held(case, misfit, lambda seen: unclipped(seen, step - 1))
    values, wanted, _ = matched(held, right[misfit.name].values)
    if len(first.misfits) < first.compared and not values.abs().max() and wanted.abs().max():
        return Cause.MISSING_GRADIENT, f"{affected}: it has none at all on rank {misfit.rank}"
    tied = next((one.name for one in order if case.aliases.get(one.name)), None)
    if tied is not None and len(first.misfits) <= max(2, first.compared // 2) and (found := _tied(case, tied, step)):
        return found
    scales = _scales(case, step, right) if case.clips else {}
    if scales and max(scales.values()) - min(scales.values()) > CLOSE:
        return (
            Cause.CLIP_NORM,
            f"{affected}: ranks scale theirs by {_numbers(scales.values())}, each by a norm of its own",
        )
    found = _combination(case, misfit, step, len(first.misfits) == first.compared) or _elsewhere(case, misfit, step)
    if found is not None:
        return found[0], f"{affected}: {found[1]}"
    if axis := _copies_add_up(case, misfit.name, right[misfit.name].values, holders):
        return Cause.MISSING_REDUCTION, f"{affected}: its copies over the {axis} ranks add up to the right gradient"
    if torch.allclose(values.sort().values, wanted.sort().values, rtol=CLOSE, atol=1e-12):
        return Cause.ROWS_SWAPPED, f"{affected}: it has the right elements in other places"
    if tied is not None and (found := _tied(case, tied, step)):
        return found
    spread = max((_spread(copies) for copies in copies_of(holders, misfit.name)), default=0.0)
    if spread > CLOSE * float(wanted.abs().max()):
        return Cause.DRIFT, f"{affected}: ranks that hold the same elements of it hold other values"
    path = misfit.name.rpartition(".")[0]
    return Cause.BACKWARD, f"{affected}; forwards agree, so look at the backward of {path}{case.collectives(path)}"


def _scales(case: Case, step: int, right: Mapping[str, HeldTensor]) -> dict[int, float]:
    """Return by what each rank scales all its gradients; nothing where that is not what it does."""
    scales = {}
    for seen in case.ranks:
        held = [matched(one, right[one.name].values)[:2] for one in unclipped(seen, step - 1) if one.name in right]
        if not held:
            continue
        ours, wanted = (torch.cat([pair[i].flatten().double() for pair in held]) for i in (0, 1))
        scale = float(ours @ wanted / (wanted @ wanted))
        if float((ours - scale * wanted).norm()) > CLOSE * float(ours.norm()):
            return {}
        scales[seen.rank] = scale
    return scales


def _tied(case: Case, name: str, step: int) -> Found | None:
    """Write a tied weight's gradient as a combination of the gradients of its single uses."""
    uses = case.uses(name, step - 1)
    total = sum(uses[1:], uses[0])
    right = whole_of(unclipped(case.reference, step - 1))[name]
    scale = float(right.flatten() @ total.flatten() / (total.flatten() @ total.flatten()))
    for seen in case.ranks:
        for held in unclipped(seen, step - 1):
            if held.name != name:
                continue
            columns = [matched(held, use.flatten() * scale)[1] for use in uses]
            fit = _fit(held.values, columns)
            if fit is not None and any(abs(one - 1) > CLOSE for one in fit):
                names = (name, *case.aliases[name])
                counts = ", ".join(f"{c:.4g} x {n}" for c, n in zip(fit, names, strict=False))
                return Cause.TIED, f"the gradient of {name} on rank {seen.rank} is {counts}, where each counts once"
    return None


def _combination(case: Case, misfit: Misfit, step: int, everywhere: bool) -> Found | None:
    """Write the gradient that ranks hold as a combination of those of the parts of the batch."""
    parts = case.parts(step - 1)
    total = sum(part.count for part in parts)
    fits: dict[int, list[float]] = {}
    for seen in case.ranks:
        for held in unclipped(seen, step - 1):
            if held.name == misfit.name:
                columns = [matched(held, part.gradients[misfit.name].flatten() / total)[1] for part in parts]
                fit = _fit(held.values, columns)
                if fit is None:
                    return None
                fits[seen.rank] = fit
    if not fits or all(abs(one - 1) <= CLOSE for fit in fits.values() for one in fit):
        return None
    return _named(case, parts, fits, everywhere)


def _elsewhere(case: Case, misfit: Misfit, step: int) -> Found | None:
    """Write what a rank holds of a weight as a combination of what belongs there and what belongs to another rank."""
    parts = case.parts(step - 1)
    total = sum(part.count for part in parts)
    held = {seen.rank: [h for h in unclipped(seen, step - 1) if h.name == misfit.name] for seen in case.ranks}
    for mine in held.get(misfit.rank, ()):
        for rank, others in held.items():
            for other in others:
                if other.key == mine.key or len(other.values) != len(mine.values):
                    continue
                whole = [part.gradients[misfit.name].flatten() / total for part in parts]
                columns = [matched(place, one)[1] for place in (mine, other) for one in whole]
                fit = _fit(mine.values, columns)
                if fit is not None and any(abs(c) > CLOSE for c in fit[len(parts) :]):
                    return Cause.WRONG_GROUP, f"rank {misfit.rank} holds a sum with what belongs to rank {rank}"
    return None


def _named(case: Case, parts: Sequence[BatchPart], fits: Mapping[int, list[float]], everywhere: bool) -> Found:
    """Say what coefficients mean. Parts that are alike in all coefficients are spoken of together."""
    by_rank = {seen.rank: seen for seen in case.ranks}
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
                return Cause.MISSING_REDUCTION, f"{_lacking(parts, kept)}: it was not there when the sum was made"
            return (
                Cause.MISSING_REDUCTION,
                f"rank {rank} holds the sum over data ranks {sorted(mine)} alone{_axis_lacking(case, mine)}",
            )
        rank, mine = min(seen_by.items(), key=lambda item: len(item[1]))
        return (
            Cause.WRONG_GROUP,
            f"rank {rank} holds the sum over data ranks {sorted(mine)}, to which it does not belong",
        )
    fit = max(fits.values(), key=lambda one: max(abs(c - 1) for c in one))
    if max(fit) - min(fit) <= CLOSE * abs(fit[0]):
        ratios = sorted({round(one[0], 6) for one in fits.values()})
        times = f"{_numbers(ratios)} times the right gradient{_degree(case, fit[0])}"
        if everywhere or fit[0] < 1:
            return Cause.GRADIENT_SCALE, f"every one is {times}" if everywhere else f"it is {times}"
        return Cause.DOUBLE_REDUCTION, f"it is {times}"
    for words, key in (("micro-batch", lambda p: (p.dp_index, p.microbatch)), ("rank", lambda p: p.dp_index)):
        counts: dict[object, float] = {}
        for part in parts:
            counts[key(part)] = counts.get(key(part), 0.0) + part.count
        products = [c * counts[key(part)] for c, part in zip(fit, parts, strict=True)]
        if max(products) - min(products) <= CLOSE * abs(products[0]):
            return Cause.MEAN_OF_MEANS, f"each {words} weighs the same, whatever number of tokens it counts"
    listed = ", ".join(f"{c:.4g}" for c in fit)
    if all(abs(c - round(c)) <= CLOSE and round(c) >= 1 for c in fit):
        return Cause.DOUBLE_REDUCTION, f"parts of the batch count {listed} times"
    return Cause.WRONG_GROUP, f"parts of the batch weigh {listed}, where each weighs 1"


def _lacking(parts: Sequence[BatchPart], kept: Mapping[int, set[int]]) -> str:
    """Say which micro-batches of other ranks the rank lacks that lacks most."""
    rank, mine = min(kept.items(), key=lambda item: len(item[1]))
    lacking = [part for index, part in enumerate(parts) if index not in mine]
    microbatches = ", ".join(str(m + 1) for m in sorted({part.microbatch for part in lacking}))
    return f"rank {rank} lacks micro-batch {microbatches} of data ranks {sorted({part.dp_index for part in lacking})}"


def _axis_lacking(case: Case, data_ranks: set[int]) -> str:
    lacking = [
        axis for axis in ("dp_replicate", "dp_shard", "dp_expert") if any(axis in seen.axes for seen in case.ranks)
    ]
    return f": a reduction over {' or '.join(lacking)} is missing" if lacking else ""


def _degree(case: Case, ratio: float) -> str:
    """Name the axes whose size the ratio is."""
    for axis, size in sorted({(axis, len(group)) for seen in case.ranks for axis, group in seen.axes.items()}):
        if size > 1 and axis != "world" and (abs(ratio - size) <= CLOSE or abs(ratio * size - 1) <= CLOSE):
            return f", the size of {axis}" if ratio > 1 else f", one over the size of {axis}"
    return ""


def _fit(held: Tensor, columns: Sequence[Tensor]) -> list[float] | None:
    """Fit held = sum c_i column_i by least squares; None where that is not what it is."""
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
    case: Case, name: str, right: Tensor, holders: Sequence[tuple[int, Sequence[HeldTensor]]]
) -> str | None:
    """Name the axis over which copies of a gradient, each a part, add up to the whole."""
    for axis in ("tp", "cp", "tie", "pp", "dp_replicate", "dp_shard"):
        groups = {seen.axes[axis] for seen in case.ranks if axis in seen.axes}
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
    return max((float((values - copies[0][1]).abs().max()) for _, values in copies[1:]), default=0.0)


# -- after backward --------------------------------------------------------------------------------


def _norm(case: Case, first: Comparison) -> Found:
    step = first.step or 1
    right, given = case.reference.steps[step - 1].norm, {seen.steps[step - 1].norm for seen in case.ranks}
    return (
        Cause.CLIP_NORM,
        f"gradients agree, but their global norm in step {step} is {_numbers(given)}, not {right:g} "
        f"(squares: {_numbers({one**2 / right**2 for one in given})} times the right one)",
    )


def _weights(case: Case, first: Comparison) -> Found:
    step, misfit = first.step or 1, first.misfits[0]
    skipped = {seen.rank for seen in case.ranks if seen.steps[step - 1].skipped}
    if skipped and len(skipped) < len(case.ranks):
        return Cause.SKIP, f"ranks {sorted(skipped)} skip step {step}, the others take it"
    before = case.reference.start if step == 1 else case.reference.steps[step - 2].weights
    held = _held(case, misfit, lambda seen: seen.steps[step - 1].weights)
    values, wanted, _ = matched(held, whole_of(before)[misfit.name])
    if torch.allclose(values, wanted, rtol=1e-9, atol=1e-12):
        return Cause.STALE_WEIGHT, f"{misfit.name} on rank {misfit.rank} is still what it was before step {step}"
    holders = [(seen.rank, seen.steps[step - 1].weights) for seen in case.ranks]
    if any(_spread(copies) > CLOSE * float(wanted.abs().max()) for copies in copies_of(holders, misfit.name)):
        return Cause.DRIFT, f"ranks that hold the same elements of {misfit.name} differ after step {step}"
    return Cause.UPDATE, f"gradients agree, but not the update of {misfit.name} in step {step}"


def _optimizer(case: Case, first: Comparison) -> Found:
    misfit = first.misfits[0]
    when = f" in step {first.step}" if first.step else ""
    return (
        Cause.UPDATE,
        f"fed with equal gradients, the job's optimizer differs at {misfit.name}{when} on rank {misfit.rank}",
    )


def _buffers(case: Case, first: Comparison) -> Found:
    misfit = first.misfits[0]
    return Cause.BUFFER, f"{misfit.name} on rank {misfit.rank} differs after the last step"


def _held_out(case: Case, first: Comparison) -> Found:
    return Cause.FORWARD, "training agrees, but not the loss of a forward without gradients"


def find_checkpoint_cause(reference: Observation, loaded: Observation, first: Comparison) -> Found:
    """Say what a checkpoint of the layout gave back to one device."""
    kind = "optimizer state" if first.what == "checkpoint state" else "weights"
    whole = whole_of(reference.state if kind == "optimizer state" else reference.updated[-1])
    came = whole_of(loaded.state if kind == "optimizer state" else loaded.updated[-1])
    for name in (misfit.name for misfit in first.misfits):
        given = came.get(name)
        if given is None or given.numel() < 2:
            continue
        others = [n for n, t in whole.items() if n != name and t.shape == given.shape and torch.equal(t, given)]
        if others:
            return Cause.STATE_SWAPPED, f"what comes back as {name} is {others[0]}"
        if torch.allclose(given.sort().values, whole[name].sort().values, rtol=1e-9, atol=1e-12):
            return Cause.STATE_SWAPPED, f"{name} comes back with its elements in other places"
    return (
        Cause.CHECKPOINT,
        f"{len(first.misfits)} of {first.compared} {kind} come back changed, first {first.misfits[0].name}",
    )


def _held(case: Case, misfit: Misfit, of: Callable[[Observation], Sequence[HeldTensor]]) -> HeldTensor:
    """Find what the rank of a misfit holds of its tensor."""
    seen = next(one for one in case.ranks if one.rank == misfit.rank)
    return next(held for held in of(seen) if held.name == misfit.name)


def _numbers(values: Iterable[float]) -> str:
    return ", ".join(f"{value:.6g}" for value in sorted(values))


_BY_KIND: dict[str, Callable[[Case, Comparison], Found]] = {
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
