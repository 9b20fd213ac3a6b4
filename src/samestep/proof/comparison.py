"""The comparison of a layout's ranks with one device: the error of every tensor, output and number, in the order of a step.

The error of a tensor is

        max |difference| / max(max |x| of the tensor, 1e-6 of the largest of its kind in the model)

so that the bias of an attention key, whose true gradient is near 0, is not judged by its noise. An element that no
rank holds counts as wrong. Each kind is compared step by step in the order in which a step computes it: the first error
is at the cause, and all later errors follow from it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from samestep.proof.held_tensors import HeldTensor
from samestep.proof.observation import MASKED, Observation, Output
from samestep.proof.verdict import Check

SMALL = 1e-6
"""The least scale of an error, as a fraction of the model's largest value of that kind."""


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
    found = [_starts(reference, ranks), _data(reference, ranks)]
    for index in range(len(reference.steps)):
        found.append(_outputs(reference, ranks, index, limit))
        found.append(_numbers("loss", reference, ranks, index, limit))
        found.append(
            compare_held(
                "gradients",
                index + 1,
                unclip_gradients(reference, index),
                [(r.rank, unclip_gradients(r, index)) for r in ranks],
                limit,
            )
        )
        found.append(_numbers("gradient norm", reference, ranks, index, limit))
        found.append(
            compare_held(
                "weights",
                index + 1,
                reference.steps[index].weights,
                [(r.rank, r.steps[index].weights) for r in ranks],
                limit,
            )
        )
    found.append(
        compare_held("buffers", None, reference.buffers, [(r.rank, r.buffers) for r in ranks], limit, partly=True)
    )
    held_out = Comparison("held-out loss", None, allowance=limit("loss", "loss", len(reference.steps)))
    for seen in ranks:
        held_out.note("held-out loss", relative(seen.held_out, reference.held_out), seen.rank)
    return [*found, held_out]


def compare_updates(reference: Observation, ranks: Sequence[Observation], limit: Limit) -> list[Comparison]:
    """Compare the job's optimizer on equal gradients: the weights after each step, and its state after the last."""
    found = [
        compare_held("optimizer", index + 1, weights, [(r.rank, r.updated[index]) for r in ranks], limit)
        for index, weights in enumerate(reference.updated)
    ]
    states = [(r.rank, r.state) for r in ranks]
    return [*found, compare_held("optimizer state", None, reference.state, states, limit)]


def checks_of(comparisons: Sequence[Comparison]) -> tuple[Check, ...]:
    """Return one check for each kind of comparison, in their order."""
    kinds = dict.fromkeys(comparison.what for comparison in comparisons)
    return tuple(_check(what, [one for one in comparisons if one.what == what]) for what in kinds)


def _check(what: str, comparisons: Sequence[Comparison]) -> Check:
    first = next((misfit for comparison in comparisons for misfit in comparison.misfits), None)
    where = ""
    if first is not None:
        step = f" in step {first.step}" if first.step else ""
        lacking = f" ({first.missing} elements that no rank holds)" if first.missing else ""
        where = f"first {first.name}{step} on rank {first.rank}{lacking}"
    worst = max(comparisons, key=lambda one: one.largest / one.allowance if one.allowance else one.largest)
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
    found = Comparison("data", None)
    for index, expected in enumerate(reference.steps):
        wanted = sorted(sample for _, _, samples in expected.shares for sample in samples)
        places: dict[tuple[int, int, int], list[int]] = {}  # dp index, stage, chunk
        for seen in ranks:
            step = seen.steps[index]
            mine: dict[int, list[int]] = {}
            for _, chunk, samples in step.shares:
                mine.setdefault(chunk, []).extend(samples)
            for chunk, read in mine.items():
                place = (seen.indices["dp"], seen.indices["stage"], chunk)
                agrees = places.setdefault(place, read) == read
                found.note(f"samples of step {index + 1}", float(not agrees), seen.rank)
            for sample, digest in step.digests.items():
                if sample in expected.digests and expected.digests[sample] != digest:
                    found.note(f"content of sample {sample}", 1.0, seen.rank)
        for stage, chunk in sorted({place[1:] for place in places}):
            everyone = sorted(s for place, mine in places.items() if place[1:] == (stage, chunk) for s in mine)
            found.note(f"samples of step {index + 1}", float(everyone != wanted), ranks[0].rank)
    return found


def _outputs(reference: Observation, ranks: Sequence[Observation], index: int, limit: Limit) -> Comparison:
    """Compare the outputs of modules in order of execution, where a rank has the whole output of a sample."""
    expected = reference.steps[index].outputs
    largest: dict[str, float] = {}
    for (path, _, _), output in expected.items():
        largest[path] = max(largest.get(path, 0.0), output.norm)
    found = Comparison("forward", index + 1, allowance=limit("forward", "", index + 1))
    for key, output in expected.items():
        for seen in ranks:
            given = seen.steps[index].outputs.get(key)
            if given is not None and given.numel == output.numel:
                error = _output_error(given, output, largest[key[0]])
                found.note(key[0], error, seen.rank, limit("forward", key[0], index + 1))
    return found


def _output_error(given: Output, expected: Output, largest: float) -> float:
    scale = max(expected.norm, SMALL * largest)
    most = max(abs(given.projection - expected.projection), abs(given.norm - expected.norm))
    return most / scale if scale else most


def _numbers(what: str, reference: Observation, ranks: Sequence[Observation], index: int, limit: Limit) -> Comparison:
    """Compare the step's loss or gradient norm, as every rank reports it."""
    found = Comparison(what, index + 1, allowance=limit(what, what, index + 1))
    for seen in ranks:
        ours, theirs = seen.steps[index], reference.steps[index]
        pair = (ours.loss, theirs.loss) if what == "loss" else (ours.norm, theirs.norm)
        found.note(what, relative(*pair), seen.rank)
    return found


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
    return [HeldTensor(held.name, held.values / step.factor, held.places) for held in step.gradients]


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
    found = Comparison(what, step, allowance=limit(what, "", step or 1))
    whole = whole_of(reference)
    most = max((_largest(tensor) for tensor in whole.values()), default=0.0)
    held: dict[str, list[tuple[int, HeldTensor]]] = {name: [] for name in whole}
    for rank, mine in ranks:
        for one in mine:
            held.setdefault(one.name, []).append((rank, one))
    for name, copies in held.items():
        expected = whole.get(name)
        if expected is None:
            found.note(name, math.inf, copies[0][0], 0.0)
            continue
        scale = max(_largest(expected), SMALL * most) or 1.0
        seen = torch.zeros(expected.numel(), dtype=torch.bool)
        worst, at = 0.0, ranks[0][0]
        for rank, one in copies:
            values, wanted, index = match_places(one, expected)
            seen[index] = True
            error = _difference(values, wanted) / scale
            if not error <= worst:
                worst, at = error, rank
        missing = 0 if partly else int((~seen).sum())
        found.note(name, worst, at, limit(what, name, step or 1), missing)
    return found


def match_places(held: HeldTensor, expected: Tensor) -> tuple[Tensor, Tensor, Tensor | slice]:
    """Return the held values without padding, the expected values in their places, and the places."""
    if isinstance(held.places, range):
        index = slice(held.places.start, held.places.stop)
        return held.values, expected[index], index
    real = held.places >= 0
    places = held.places[real]
    return held.values[real], expected[places], places


def whole_of(reference: Sequence[HeldTensor]) -> dict[str, Tensor]:
    """Return one device's tensors, flattened, by name."""
    return {held.name: held.values for held in reference}


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
    for rank, mine in ranks:
        for held in mine:
            if held.name == name:
                groups.setdefault(held.key, []).append((rank, held.values))
    yield from groups.values()


def constant(limits: Mapping[str, float] | float) -> Limit:
    """Return a limit that is one number everywhere, or one for each kind."""
    if isinstance(limits, float):
        return lambda *_: limits
    return lambda what, *_: limits[what]
