"""A trial of the loss before its first use: the sums of the parts of a micro-batch must add up to that of the whole.

A step adds the sums and counts of all micro-batches and ranks, so a loss must be a sum over samples. Once a run it is
evaluated on the detached outputs and the labels of one micro-batch, in float64, and on its two halves along the samples:

    loss(whole) = loss(first half) + loss(second half)        sums and counts, to 1e-9

A mean, a statistic of the batch or a contrastive loss does not add up. Where outputs are equal for all samples, as those
of a head that starts at zero, a coupled loss adds up by chance, so it is tried on outputs that are moved a little too.
One sample has no halves: it is doubled, and its copy's outputs are moved. Few samples may agree by chance in what couples
them, such as their class, so those of several micro-batches are tried together. Under cp each rank has a slice of the tokens,
and the parts are halves along the tokens too.

The forward is not run again for it (`repeat.py`): a forward in bf16 rounds by more than a coupled loss may differ, and outputs
that are equal for all samples show nothing. A loss that gives another value when it is called again, or again after it was called on
other outputs, as one with a running mean of its own, depends on what it was called on before, and does not pass either.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from samestep.building.loss_result import UNNAMED, VALUES, Loss, is_same_count, loss_result
from samestep.building.named_tensors import cast_floating
from samestep.building.over_samples import Keeping, within
from samestep.building.torch_seams import disable_current_modes
from samestep.independence.roundings import EXACT, LEAST_MEAN, LIMITS_OF_SUMS
from samestep.runtime.axes.precision import RaiseIslands
from samestep.runtime.guards.loss_parts import (
    MOVED,
    Parts,
    SamplePlace,
    Trees,
    TriedTensors,
    most_samples,
    tensors_in,
    with_items,
    with_tensors,
    without_items,
    words_of_parts,
)
from samestep.state.snapshot import preserve_function, preserve_generators

_ELEMENTS = 2**22
"""About so many elements of outputs and labels are tried, and at least two samples."""
_SAMPLES = 8
"""So many samples are tried before a loss is trusted, where they have no more elements than that."""
_READINGS = 24
"""So many readings of the tensors' dimensions are tried at most."""
_FAR = 3.0
_FURTHEST = 1000.0
_WAYS = ((True, False), (True, True), (False, False), (False, True))
"""Ways to evaluate a loss: in float64 or as it is, and without or with a graph."""
_OTHERS = 8
"""So many times a loss is called on other outputs before it is called again on the first ones: a running mean of it has moved by half."""
_KEEPS = (
    "its {} is {:.9g} at first and {:.9g} when it is called again on the same{}, so it keeps something between calls"
)
_KEEPS_OF_PART = (
    "samestep.after_step gives a buffer a value that a part of the samples decides, and each rank and micro-batch has others: "
    "one of samestep.batch_mean or batch_sum works, and so does samestep.whole_batch(loss)"
)
_GOES_BACK = "it calls backward() by itself, and so adds a gradient of its own for each part of a batch"


@dataclass(frozen=True, slots=True)
class LossTrial:
    """The outcome of a trial."""

    reason: str = ""
    """Why the loss is not a sum over what was cut; empty if it is."""
    judged: bool = True
    """Whether there was something to judge: a finite sum that counts something."""
    is_zero: bool = False
    """Whether the sums of the whole and of the halves are all zero."""
    is_indivisible: bool = False
    """Whether it fails on a part of these tensors, which a part that is read by itself may show to be a matter of the batch's form."""


def try_loss_on_halves(loss: Loss, outputs: Any, batch: Any, size: int, dim: int = 0) -> LossTrial:
    """Evaluate a loss on a micro-batch and on its halves; `size` is the number of samples, or of tokens in `dim` 1.

    What the loss keeps between calls is as before afterwards. Every rank of a tensor cut calls it alike, since the loss may
    communicate over the cut.
    """
    try:
        if dim:
            return _try_readings(loss, outputs, batch, size, dim)
        cut, batch = with_items(outputs, size), with_items(batch, size)
        found = _try_readings(loss, cut, batch, size, dim)
        if found.reason and len(tensors_in(cut)) < len(tensors_in(outputs)):
            # A list of as many tensors as there are samples need not have one for each: layers, or weights.
            other = _try_readings(loss, outputs, batch, size, dim)
            return found if other.reason else other
        return found
    except torch.OutOfMemoryError:
        return LossTrial(judged=False)


def samples_wanted(outputs: Any, batch: Any, size: int) -> int:
    """Return the number of samples that a trial needs, from a micro-batch of `size` samples."""
    return min(_SAMPLES, most_samples(tensors_in((outputs, batch)), size, _ELEMENTS))


def _try_readings(loss: Loss, outputs: Any, batch: Any, size: int, dim: int) -> LossTrial:
    given = TriedTensors.of(outputs, batch, size, _ELEMENTS)
    best = LossTrial(judged=False)
    trees = words_of_parts((outputs, batch), size, given.taken) if not dim else ((outputs, batch),) * 3
    for readings in itertools.islice(given.readings(dim), _READINGS):
        with preserve_function(loss):
            outcome = _try_sums(loss, trees, given.parts(readings))
            if not outcome.judged:
                return outcome
            if not outcome.reason:
                outcome = _try_perturbed(outcome, loss, trees, given, readings)
        if not outcome.reason:
            others = (given.parts(readings, by)[0] for by in (_FURTHEST, _FAR))
            return replace(outcome, reason=_memory_of_others(loss, trees[0], given.parts(readings)[0], others))
        best = outcome if not best.judged else best
    return best


def term_with_moving_count(loss: Loss, outputs: Any, batch: Any) -> str:
    """Return the name of a term whose count is another on outputs that are moved; empty if there is none, or the loss fails there."""
    given = TriedTensors.of(outputs, batch, 1, _ELEMENTS)
    with preserve_function(loss):
        try:
            first, *others = (
                _evaluate_loss(loss, (outputs, batch), given.moved(by), raised=True, graph=False)
                for by in (0.0, MOVED, _FAR)
            )
        except Exception:  # of the user's own code, which may raise anything; the trial of its sums says so
            return ""
    terms = [name for name in first.amounts if not name.startswith(VALUES)]
    counts = [[value.amounts.get(name, (0.0, 0.0))[1] for value in (first, *others)] for name in terms]
    pairs = zip(terms, counts, strict=True)
    return next((name for name, (one, *rest) in pairs if not all(is_same_count(one, other) for other in rest)), "")


# -- evaluating ------------------------------------------------------------------------------------


def _try_sums(loss: Loss, trees: Trees, parts: Parts) -> LossTrial:
    """Evaluate the loss on the whole and on the halves, in float64 if it can be, and compare."""
    error: Exception | None = None
    for raised, graph in _WAYS:
        try:
            given = [(trees[0], parts[0]), *zip(trees, parts, strict=True)]
            values = _ValuesOfWhole()
            with within(values), Keeping(values):
                whole, again, *halves = [values.evaluate(loss, tree, part, raised, graph) for tree, part in given]
        except torch.OutOfMemoryError:
            raise
        except Exception as caught:  # of the user's own code, which may raise anything
            error = error or caught
            continue
        if whole.went_back:
            return LossTrial(_GOES_BACK)
        for name, (total, _) in whole.amounts.items():
            if math.isfinite(total) and abs(again.amounts[name][0] - total) > EXACT * abs(total):
                return LossTrial(_KEEPS.format(f"sum{_of(name)}", total, again.amounts[name][0], ""))
        if values.parts_differ():
            return LossTrial(_KEEPS_OF_PART)
        return _compare_halves(whole, halves, raised)
    words = str(error).strip().partition("\n")[0]
    text = f"it cannot be evaluated on a part of a micro-batch ({type(error).__name__}: {words})"
    return LossTrial(text, is_indivisible=True)


def _memory_of_others(loss: Loss, tree: Any, leaves: list[Tensor], others: Iterable[list[Tensor]]) -> str:
    """Return the reason against a loss whose sum is another once it was called on other outputs; empty if it is the same.

    Of the other outputs those count first on which it is defined.
    """
    for other, way in itertools.product(others, _WAYS):
        try:
            with preserve_function(loss):
                first = _evaluate_alone(loss, tree, leaves, way)
            with preserve_function(loss):
                for _ in range(_OTHERS):
                    _evaluate_alone(loss, tree, other, way)
                again = _evaluate_alone(loss, tree, leaves, way)
        except torch.OutOfMemoryError:
            raise
        except Exception:  # of the user's own code, which may not be defined for other outputs
            continue
        for name, (total, _) in first.amounts.items():
            found = again.amounts.get(name, (math.nan, 0.0))[0]
            if math.isfinite(total) and not abs(found - total) <= EXACT * abs(total):
                return _KEEPS.format(f"sum{_of(name)}", total, found, " after others")
        return ""
    return ""


def _evaluate_alone(loss: Loss, tree: Any, leaves: list[Tensor], way: tuple[bool, bool]) -> _LossValue:
    """Evaluate a loss on a whole, with the random numbers that every such call draws."""
    with preserve_generators(), within(values := _ValuesOfWhole()):
        return values.evaluate(loss, tree, leaves, *way)


class _ValuesOfWhole:
    """The scope of `samestep.batch_sum` and its like in a trial: halves are given what the first evaluation, of the whole, has found.

    It is the keeper of `samestep.after_step` too: what a buffer gets then must follow from these alone.
    """

    def __init__(self) -> None:
        self._kept: list[dict[int, Tensor]] = []
        """Next values of buffers in each evaluation, by the identities of the buffers."""
        self._found: list[Any] = []
        self._next: Iterator[Any] | None = None

    def evaluate(self, *given: Any) -> _LossValue:
        """Evaluate a loss, the first time on the whole."""
        self._kept.append({})
        value = _evaluate_loss(*given)
        self._next = iter(self._found)
        return value

    def keep(self, buffer: Tensor, value: Tensor) -> None:
        """Note what a buffer gets after the step."""
        self._kept[-1][id(buffer)] = value.detach().clone()

    def parts_differ(self) -> bool:
        """Return whether a buffer gets another value from a part of the samples than from all of them."""
        whole, *others = self._kept
        return any(
            other.keys() != whole.keys()
            or not all(torch.allclose(other[key], value, rtol=EXACT, equal_nan=True) for key, value in whole.items())
            for other in others
        )

    def sum(self, x: Tensor) -> Tensor:
        """Return the sum of the rows of the whole."""
        return cast("Tensor", self._of_whole(x.sum(0)))

    def cat(self, x: Tensor) -> Tensor:
        """Return the rows of the whole."""
        return cast("Tensor", self._of_whole(x))

    def num_rows(self, x: Tensor) -> int:
        """Return the number of rows of the whole."""
        return cast("int", self._of_whole(len(x)))

    def _of_whole(self, found: Any) -> Any:
        if self._next is not None:
            return next(self._next, found)
        self._found.append(found.detach() if isinstance(found, Tensor) else found)
        return found


def _compare_halves(whole: _LossValue, halves: list[_LossValue], raised: bool) -> LossTrial:
    tolerance = LIMITS_OF_SUMS[torch.float64 if raised and whole.is_float64 else torch.float32]
    judged = {name: whole.amounts[name] for name in whole.amounts if whole.counts(name)}
    if not judged:
        return LossTrial(judged=False)
    of_parts = {name: amount for name, amount in judged.items() if not _is_of_no_sample(name, amount, halves)}
    for index, word in ((1, "count"), (0, "sum")):
        for name, amount in (of_parts or judged).items():
            all_of, both = amount[index], [half.amounts.get(name, (0.0, 0.0))[index] for half in halves]
            least = 0.0 if index else LEAST_MEAN * abs(amount[1])
            if not abs(all_of - sum(both)) <= tolerance * max(least, abs(all_of), *map(abs, both)):
                found = f"its {word}{_of(name)} is {all_of:.9g} for the whole and {both[0]:.9g} and {both[1]:.9g} for the halves"
                rounds = f", and it is rounded to {whole.rounded_to}: a loss that computes it in float32 works"
                return LossTrial(found + rounds if whole.rounded_to and not index else found)
    return LossTrial(is_zero=not any(total for value in (whole, *halves) for total, _ in value.amounts.values()))


def _is_of_no_sample(name: str, whole: tuple[float, float], halves: Sequence[_LossValue]) -> bool:
    """Return whether a named term is the same for any samples, as a penalty on weights is: its mean is then right for any parts."""
    alike = [half.amounts.get(name) for half in halves]
    return (
        name != UNNAMED
        and all(one is not None and one[1] == whole[1] for one in alike)
        and all(one is not None and abs(one[0] - whole[0]) <= EXACT * abs(whole[0]) for one in alike)
    )


def _of(name: str) -> str:
    return f" of {name}" if name != UNNAMED else ""


def _try_perturbed(
    outcome: LossTrial,
    loss: Loss,
    trees: Trees,
    given: TriedTensors,
    readings: tuple[SamplePlace, ...],
) -> LossTrial:
    """Try outputs that are moved a little, and far; a loss that is not defined for them was tried on the real ones.

    A loss that is zero everywhere, as one with a margin may be, has shown nothing yet.
    """
    is_zero = outcome.is_zero
    for moved in (MOVED, _FAR):
        outcome = _try_sums(loss, trees, given.parts(readings, moved))
        if outcome.reason.startswith("its "):
            return outcome
        is_zero &= not outcome.judged or outcome.is_zero
    return LossTrial(judged=not is_zero)


@dataclass(frozen=True, slots=True)
class _LossValue:
    amounts: dict[str, tuple[float, float]]
    """The sum and the count of each term, and of each value."""
    is_float64: bool
    went_back: bool
    """Whether the loss has computed gradients by `backward`."""
    rounded_to: str = ""
    """The half precision in which it returned a sum; empty if there is none."""

    def counts(self, name: str) -> bool:
        """Return whether a term or value is finite and counts something."""
        total, count = self.amounts[name]
        return math.isfinite(total) and math.isfinite(count) and count != 0.0


def _evaluate_loss(loss: Loss, tree: Any, leaves: list[Tensor], raised: bool, graph: bool) -> _LossValue:
    """Evaluate the loss on detached tensors; with `graph`, for a loss that differentiates its outputs."""
    given = cast_floating(leaves, torch.float64) if raised else leaves
    if graph:
        given = [leaf.clone().requires_grad_() if leaf.is_floating_point() else leaf for leaf in given]
    outputs, batch = without_items(with_tensors(tree, given), raised)
    with disable_current_modes(), torch.set_grad_enabled(graph), _raise_to_float64() if raised else _plain():
        found = loss_result(loss(outputs, batch))
    is_float64 = all(total.dtype is torch.float64 for total, _ in found.terms.values())
    went_back = graph and any(leaf.grad is not None for leaf in given)
    amounts = {name: (float(total.detach()), float(count)) for name, (total, count) in found.amounts.items()}
    halves = (str(total.dtype).removeprefix("torch.") for total, _ in found.terms.values() if total.dtype.itemsize < 4)
    return _LossValue(amounts, is_float64, went_back, next(halves, ""))


class _InFloat64(TorchFunctionMode):
    """A function mode in which every floating tensor is float64: those that the loss holds itself are raised."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name, kwargs = getattr(func, "__name__", ""), kwargs or {}
        if name == "__get__":
            return func(*args, **kwargs)
        raised = cast_floating(args, torch.float64)
        result = func(*raised, **cast_floating(kwargs, torch.float64))
        if not _writes(name) or raised[0] is args[0]:
            return result
        args[0].copy_(raised[0])  # a tensor of the loss's own, in its own precision
        return args[0] if result is raised[0] else result


def _writes(name: str) -> bool:
    """Return whether a function of this name writes into its first argument."""
    in_place = name.startswith("__i") and name.endswith("__") and name not in ("__index__", "__int__", "__invert__")
    return in_place or name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))


@contextmanager
def _raise_to_float64() -> Iterator[None]:
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with _InFloat64(), RaiseIslands():
            yield
    finally:
        torch.set_default_dtype(default)


@contextmanager
def _plain() -> Iterator[None]:
    yield
