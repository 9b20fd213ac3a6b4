"""The comparison of a layout's ranks with one device: the error of every tensor, output and number, in the order of a step.

The error of a tensor is

        max |difference| / max(max |x| of the tensor, 1e-6 of the largest of its kind in the model)

so that the bias of an attention key, whose true gradient is near 0, is not judged by its noise. An element that no
rank holds counts as wrong. Each kind is compared step by step in the order in which a step computes it: the first error
is at the cause, and all later errors follow from it.

The `Evidence` of a search for the cause is both sides' observations, and runs on one device that it may request.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from samestep.proof.held_tensors import HeldTensor
from samestep.proof.observation import MASKED, Observation, Output
from samestep.proof.verdict import Cause, Check

SMALL = 1e-6
"""The least scale of an error, as a fraction of the model's largest value of that kind."""
CLOSE = 1e-6
"""The largest relative difference of coefficients and ratios that count as equal; they come from rounded sums."""
Found = tuple[Cause, str]
"""A cause, and its explanation in one sentence with names and numbers."""


@dataclass(slots=True)
class Misfit:
    """One tensor, output or number that differs."""

    name: str
    error: float
    rank: int
    step: int | None = None
    """The step, counted from 1; None for kinds without steps."""
    missing: int = 0
    """The number of its elements that no rank holds."""


@dataclass(slots=True)
class Comparison:
    """All comparisons of one kind in one step."""

    what: str
    """The kind, such as `gradients`."""
    step: int | None
    compared: int = 0
    """The number of comparisons."""
    largest: float = 0.0
    """The largest error, in the scale of `allowance`."""
    misfits: list[Misfit] = field(default_factory=list)
    """The comparisons beyond their allowance, in order of execution."""
    allowance: float = 0.0

    def note(self, name: str, error: float, rank: int, limit: float | None = None, missing: int = 0) -> None:
        """Add one comparison; `limit` is the allowance of this one, by default that of the kind."""
        limit = self.allowance if limit is None else limit
        error = math.inf if math.isnan(error) or missing else error
        self.compared += 1
        if error > limit:
            self.misfits.append(Misfit(name, error, rank, self.step, missing))
        relative = error / limit if limit else (math.inf if error else 0.0)
        if relative >= self.largest / self.allowance if self.allowance else error >= self.largest:
            self.largest = relative * self.allowance if self.allowance else error


Limit = Callable[[str, str, int], float]
"""A function (kind, name, step) -> the largest error that is allowed in one comparison."""


def compare(reference: Observation, ranks: Sequence[Observation], limit: Limit) -> list[Comparison]:
    """Return every comparison of the ranks with one device, in the order in which a step computes the values."""
    comparisons = [_starts(reference, ranks), _data(reference, ranks)]
    for index in range(len(reference.steps)):
        comparisons.append(_outputs(reference, ranks, index, limit))
        comparisons.append(_numbers("loss", reference, ranks, index, limit))
        comparisons.append(
            compare_held(
                "gradients",
                index + 1,
                unclip_gradients(reference, index),
                [(r.rank, unclip_gradients(r, index)) for r in ranks],
                limit,
            )
        )
        comparisons.append(_numbers("gradient norm", reference, ranks, index, limit))
        comparisons.append(
            compare_held(
                "weights",
                index + 1,
                reference.steps[index].weights,
                [(r.rank, r.steps[index].weights) for r in ranks],
                limit,
            )
        )
    comparisons.append(
        compare_held("buffers", None, reference.buffers, [(r.rank, r.buffers) for r in ranks], limit, partly=True)
    )
    held_out = Comparison("validation loss", None, allowance=limit("loss", "loss", len(reference.steps)))
    for seen in ranks:
        held_out.note("validation loss", relative(seen.held_out, reference.held_out), seen.rank)
    return [*comparisons, held_out]


def compare_updates(reference: Observation, ranks: Sequence[Observation], limit: Limit) -> list[Comparison]:
    """Compare the job's optimizer on equal gradients: the weights after each step, and its state after the last."""
    comparisons = [
        compare_held("optimizer", index + 1, weights, [(r.rank, r.updated[index]) for r in ranks], limit)
        for index, weights in enumerate(reference.updated)
    ]
    states = [(r.rank, r.state) for r in ranks]
    return [*comparisons, compare_held("optimizer state", None, reference.state, states, limit)]


def checks_of(comparisons: Sequence[Comparison]) -> tuple[Check, ...]:
    """Return one check for each kind of comparison, in their order."""
    kinds = dict.fromkeys(comparison.what for comparison in comparisons)
    return tuple(_check(what, [comparison for comparison in comparisons if comparison.what == what]) for what in kinds)


def _check(what: str, comparisons: Sequence[Comparison]) -> Check:
    first = next((misfit for comparison in comparisons for misfit in comparison.misfits), None)
    where = ""
    if first is not None:
        step = f" in step {first.step}" if first.step else ""
        lacking = f" ({first.missing} elements that no rank holds)" if first.missing else ""
        where = f"first {first.name}{step} on rank {first.rank}{lacking}"
    worst = max(
        comparisons,
        key=lambda comparison: (
            comparison.largest / comparison.allowance if comparison.allowance else comparison.largest
        ),
    )
    return Check(
        what=what,
        error=worst.largest,
        allowance=worst.allowance,
        compared=sum(comparison.compared for comparison in comparisons),
        where=where,
    )


# -- one kind each ---------------------------------------------------------------------------------


def _starts(reference: Observation, ranks: Sequence[Observation]) -> Comparison:
    """Compare the first weights, which must be equal to the bit."""
    return compare_held("start", None, reference.start, [(r.rank, r.start) for r in ranks], lambda *_: 0.0)


def _data(reference: Observation, ranks: Sequence[Observation]) -> Comparison:
    """Compare the samples that ranks read: each once on the data axis, in every chunk, with one device's content."""
    comparison = Comparison("data", None)
    for index, expected in enumerate(reference.steps):
        wanted = sorted(sample for _, _, samples in expected.shares for sample in samples)
        places: dict[tuple[int, int, int], list[int]] = {}  # dp index, stage, chunk
        for seen in ranks:
            step = seen.steps[index]
            of_place: dict[int, list[int]] = {}
            for _, chunk, samples in step.shares:
                of_place.setdefault(chunk, []).extend(samples)
            for chunk, read in of_place.items():
                place = (seen.indices["dp"], seen.indices["stage"], chunk)
                agrees = places.setdefault(place, read) == read
                comparison.note(f"samples of step {index + 1}", float(not agrees), seen.rank)
            for sample, digest in step.digests.items():
                if sample in expected.digests and expected.digests[sample] != digest:
                    comparison.note(f"content of sample {sample}", 1.0, seen.rank)
        for stage, chunk in sorted({place[1:] for place in places}):
            everyone = sorted(s for place, of_place in places.items() if place[1:] == (stage, chunk) for s in of_place)
            comparison.note(f"samples of step {index + 1}", float(everyone != wanted), ranks[0].rank)
    return comparison


def _outputs(reference: Observation, ranks: Sequence[Observation], index: int, limit: Limit) -> Comparison:
    """Compare the outputs of modules in order of execution, where a rank has the whole output of a sample."""
    expected = reference.steps[index].outputs
    largest: dict[str, float] = {}
    for (path, _, _), output in expected.items():
        largest[path] = max(largest.get(path, 0.0), output.norm)
    comparison = Comparison("forward", index + 1, allowance=limit("forward", "", index + 1))
    for key, output in expected.items():
        for seen in ranks:
            seen_output = seen.steps[index].outputs.get(key)
            if seen_output is not None and seen_output.numel == output.numel:
                error = _output_error(seen_output, output, largest[key[0]])
                comparison.note(key[0], error, seen.rank, limit("forward", key[0], index + 1))
    return comparison


def _output_error(output: Output, expected: Output, largest: float) -> float:
    scale = max(expected.norm, SMALL * largest)
    most = max(abs(output.projection - expected.projection), abs(output.norm - expected.norm))
    return most / scale if scale else most


def _numbers(what: str, reference: Observation, ranks: Sequence[Observation], index: int, limit: Limit) -> Comparison:
    """Compare the step's loss or gradient norm, as every rank reports it."""
    comparison = Comparison(what, index + 1, allowance=limit(what, what, index + 1))
    for seen in ranks:
        ours, theirs = seen.steps[index], reference.steps[index]
        pair = (ours.loss, theirs.loss) if what == "loss" else (ours.norm, theirs.norm)
        comparison.note(what, relative(*pair), seen.rank)
    return comparison


def relative(ours: float, theirs: float) -> float:
    """Return the difference of two numbers over the larger of 1 and the second one's size."""
    if math.isnan(ours) and math.isnan(theirs):
        return 0.0
    return abs(ours - theirs) / max(1.0, abs(theirs))


def unclip_gradients(seen: Observation, index: int) -> list[HeldTensor]:
    """Return a step's gradients divided by the clipping factor that follows from this rank's norm."""
    step = seen.steps[index]
    if step.factor == 1.0:
        return step.gradients
    return [HeldTensor(gradient.name, gradient.values / step.factor, gradient.places) for gradient in step.gradients]


# -- tensors, of which a rank holds parts ----------------------------------------------------------


def compare_held(
    what: str,
    step: int | None,
    reference: Sequence[HeldTensor],
    ranks: Sequence[tuple[int, Sequence[HeldTensor]]],
    limit: Limit,
    *,
    partly: bool = False,
) -> Comparison:
    """Compare tensors of one kind, of which each rank holds parts; unless `partly`, some rank must hold each element."""
    comparison = Comparison(what, step, allowance=limit(what, "", step or 1))
    right = whole_of(reference)
    most = max((_largest(tensor) for tensor in right.values()), default=0.0)
    copies_by_name: dict[str, list[tuple[int, HeldTensor]]] = {name: [] for name in right}
    for rank, tensors in ranks:
        for piece in tensors:
            copies_by_name.setdefault(piece.name, []).append((rank, piece))
    for name, copies in copies_by_name.items():
        expected = right.get(name)
        if expected is None:
            comparison.note(name, math.inf, copies[0][0], 0.0)
            continue
        scale = max(_largest(expected), SMALL * most) or 1.0
        seen = torch.zeros(expected.numel(), dtype=torch.bool)
        worst, at = 0.0, ranks[0][0]
        for rank, piece in copies:
            values, wanted, index = match_places(piece, expected)
            seen[index] = True
            error = _difference(values, wanted) / scale
            if not error <= worst:
                worst, at = error, rank
        missing = 0 if partly else int((~seen).sum())
        comparison.note(name, worst, at, limit(what, name, step or 1), missing)
    return comparison


def match_places(tensor: HeldTensor, expected: Tensor) -> tuple[Tensor, Tensor, Tensor | slice]:
    """Return the held values without padding, the expected values in their places, and the places."""
    if isinstance(tensor.places, range):
        index = slice(tensor.places.start, tensor.places.stop)
        return tensor.values, expected[index], index
    real = tensor.places >= 0
    places = tensor.places[real]
    return tensor.values[real], expected[places], places


def whole_of(reference: Sequence[HeldTensor]) -> dict[str, Tensor]:
    """Return one device's tensors, flattened, by name."""
    return {tensor.name: tensor.values for tensor in reference}


def _largest(values: Tensor) -> float:
    """Return the largest magnitude of the values that do not stand for minus infinity, as in masks."""
    sizes = _wide(values).abs()
    sizes = sizes[sizes < MASKED]
    return float(sizes.max()) if sizes.numel() else 0.0


def _difference(values: Tensor, wanted: Tensor) -> float:
    """Return the largest difference; two infinities of one sign are equal, and so are two that are not a number."""
    ours, theirs = _wide(values), _wide(wanted)
    apart = torch.where((ours == theirs) | (ours.isnan() & theirs.isnan()), 0.0, (ours - theirs).abs())
    return float(apart.max()) if apart.numel() else 0.0


def _wide(values: Tensor) -> Tensor:
    return values.to(torch.complex128 if values.is_complex() else torch.float64)


def copies_of(ranks: Sequence[tuple[int, Sequence[HeldTensor]]], name: str) -> Iterator[list[tuple[int, Tensor]]]:
    """Yield, for each set of elements of a tensor, the (rank, values) of all ranks that hold it."""
    groups: dict[object, list[tuple[int, Tensor]]] = {}
    for rank, tensors in ranks:
        for tensor in tensors:
            if tensor.name == name:
                groups.setdefault(tensor.key, []).append((rank, tensor.values))
    yield from groups.values()


def constant(limits: Mapping[str, float] | float) -> Limit:
    """Return a limit that is one number everywhere, or one for each kind."""
    if isinstance(limits, float):
        return lambda *_: limits
    return lambda what, *_: limits[what]


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
    """All inputs of the search for a cause: both sides' observations, and runs that it may request."""

    reference: Observation
    ranks: Sequence[Observation]
    comparisons: Sequence[Comparison]
    layers: Mapping[str, int]
    """The index of the layer of each parameter, in the order of the forward."""
    draws: Callable[[str], bool]
    """Return whether the module at a path, or one inside of it, draws masks of dropout or other random numbers."""
    collectives: Callable[[str], str]
    """Describe the collectives that the program sends for a module, bucket or unit."""
    parts: Callable[[int], Sequence[BatchPart]]
    """Compute the parts of a step on one device; steps count from 0."""
    balances: bool
    """Whether the job adds a loss that balances experts; a single part of a batch has none."""
    shares_values: bool = False
    """Whether code takes values of all samples by name (`samestep.batch_cat`), so that parts of a batch do not add up to it."""


def held_part(evidence: Evidence, misfit: Misfit, of: Callable[[Observation], Sequence[HeldTensor]]) -> HeldTensor:
    """Return the held part of a misfit's tensor on the misfit's rank."""
    seen = next(rank for rank in evidence.ranks if rank.rank == misfit.rank)
    return next(tensor for tensor in of(seen) if tensor.name == misfit.name)


def numbers(values: Iterable[float]) -> str:
    """Return numbers as text, the smallest first."""
    return ", ".join(f"{value:.6g}" for value in sorted(values))
