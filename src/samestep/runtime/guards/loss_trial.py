"""The loss, tried before it is trusted: the sums of the parts of a micro-batch must add up to that of the whole.

A step adds the sums and counts of all micro-batches and ranks, so a loss must be a sum over samples. Once a run it is
evaluated on the detached outputs and the labels of one micro-batch, in float64, and on its two halves along the samples:

    loss(whole) = loss(first half) + loss(second half)        sums and counts, to 1e-9

A mean, a statistic of the batch or a contrastive loss does not add up. Where outputs are equal for all samples, as those
of a head that starts at zero, a coupled loss adds up by chance, so it is tried on outputs that are moved a little too.
One sample has no halves: it is doubled, and its copy's outputs are moved. Few samples may agree by chance in what couples
them, such as their class, so those of several micro-batches are tried together. Under cp each rank has a slice of the tokens,
and the parts are halves along the tokens too.

Which dimension of a tensor holds the samples is not known: the first, where its size is the number of samples, or
several rows for each sample (flattened tokens, two views), as many as a mask or the labels pick in it, or another
dimension of that size. What adds up under any of
these readings is a sum: a coupled loss adds up under none. A loss that gives another value when it is called again, as one
with a running mean of its own, depends on how often it is called, and does not pass either.

Words in a batch: lists with a text for each sample, such as names of files, beside the tensors that are cut and joined.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from samestep.building.loss import IGNORED_LABEL
from samestep.building.loss_result import UNNAMED, VALUES, Loss, loss_result
from samestep.building.named_tensors import cast_floating
from samestep.building.over_samples import within
from samestep.building.torch_seams import disable_current_modes
from samestep.datasets.values import is_by_sample
from samestep.runtime.axes.precision import RaiseIslands
from samestep.state.snapshot import preserve_function
from samestep.tracing import pending_logits
from samestep.trees import map_tensors, tree_map_only

Trees = tuple[Any, Any, Any]
"""Outputs and batch of the whole, of its first and of its second half."""


def of_parts(tree: Any, size: int, taken: int) -> Trees:
    """Return outputs and batch of `size` samples with the words of the first `taken`, and of the halves of these.

    One sample has no halves: the whole is the sample twice.
    """
    half = taken // 2
    parts = (range(taken), range(half), range(half, taken)) if size > 1 else ([0, 0], [0], [0])

    def of(rows: Sequence[int]) -> Any:
        return _map_words(tree, tree, lambda words, _: [words[row] for row in rows] if len(words) == size else words)

    whole, first, second = map(of, parts)
    return whole, first, second


def join_batches(first: Any, second: Any, sizes: tuple[int, int]) -> Any:
    """Return the second of two micro-batches of `sizes` samples, with the words of both."""

    def both(words: list[Any], others: Any) -> list[Any]:
        return [*others, *words] if (len(others), len(words)) == sizes else words

    return _map_words(second, first, both)


class _Item:
    """The part of one sample in a list that has one of any kind for each, which is cut as a list of words is."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


def _with_items(value: Any, size: int) -> Any:
    """Return outputs or a batch of `size` samples with an item in place of each part of a list of one for each sample."""
    if isinstance(value, dict) and type(value) is dict:
        return {key: _with_items(part, size) for key, part in value.items()}
    if type(value) is list and is_by_sample(value, size):
        return [part if isinstance(part, _Item) else _Item(map_tensors(part, Tensor.detach)) for part in value]
    if type(value) in (tuple, list):
        return type(value)(_with_items(part, size) for part in value)
    return value


def _without_items(value: Any, raised: bool) -> Any:
    def shown(item: _Item) -> Any:
        return cast_floating(item.value, torch.float64) if raised else item.value

    return tree_map_only(_Item, shown, value)


def _map_words(value: Any, beside: Any, change: Callable[[list[Any], Any], list[Any]]) -> Any:
    """Return nested tuples, lists and dicts with other words; `beside` has the same nesting."""
    if isinstance(value, dict) and isinstance(beside, dict):
        if type(value) is not dict:  # a class of a library, which holds tensors alone
            return value
        return {key: _map_words(item, beside.get(key), change) for key, item in value.items()}
    if not isinstance(value, tuple | list) or not isinstance(beside, tuple | list):
        return value
    if value and all(isinstance(item, str | _Item) for item in value):
        return type(value)(change([*value], beside))
    if len(value) != len(beside):
        return value
    items = [_map_words(item, other, change) for item, other in zip(value, beside, strict=True)]
    return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)


TOLERANCE = 1e-9
_ROUNDED = 1e-5
"""The tolerance for a loss that cannot be evaluated in float64, far below what a mean or a batch statistic differs by."""
_ELEMENTS = 2**22
"""About so many elements of outputs and labels are tried, and at least two samples."""
_SAMPLES = 8
"""So many samples are tried before a loss is trusted, where they have no more elements than that."""
_READINGS = 24
"""So many readings of the tensors' dimensions are tried at most."""
_MOVED, _FAR = 0.01, 3.0
_KEEPS = "its {} is {:.9g} at first and {:.9g} when it is called again on the same, so it keeps something between calls"
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


@dataclass(frozen=True, slots=True)
class _SamplePlace:
    """The place of the samples in one tensor."""

    dim: int | None = 0
    """The dimension of the samples; None for a tensor that belongs to all of them."""
    rows: int = 1
    """Number of rows of the dimension for each sample."""
    stacked: bool = False
    """Whether the rows of one sample stand apart, as in two views of a batch one after the other."""
    picked: tuple[int, ...] = ()
    """Numbers of rows of each sample, where they are not equal."""

    def take(self, tensor: Tensor, start: int, stop: int) -> Tensor:
        """Return the part of some samples."""
        if self.dim is None:
            return tensor
        if self.picked:
            return tensor.narrow(self.dim, sum(self.picked[:start]), sum(self.picked[start:stop]))
        if self.rows == 1:
            return tensor.narrow(self.dim, start, stop - start)
        if not self.stacked:
            return tensor.narrow(self.dim, start * self.rows, (stop - start) * self.rows)
        return tensor.unflatten(self.dim, (self.rows, -1)).narrow(self.dim + 1, start, stop - start).flatten(0, 1)

    def doubled(self, tensor: Tensor, other: Tensor) -> Tensor:
        """Return one sample's tensor followed by that of another sample."""
        if self.dim is None:
            return tensor
        if not self.stacked:
            return torch.cat([tensor, other], self.dim)
        return torch.stack([tensor, other], 1).flatten(0, 1)


def try_loss_on_halves(loss: Loss, outputs: Any, batch: Any, size: int, dim: int = 0) -> LossTrial:
    """Evaluate a loss on a micro-batch and on its halves; `size` is the number of samples, or of tokens in `dim` 1.

    What the loss keeps between calls is as before afterwards. Every rank of a tensor cut calls it alike, since the loss may
    communicate over the cut.
    """
    with preserve_function(loss):
        try:
            return _try_readings(loss, outputs, batch, size, dim)
        except torch.OutOfMemoryError:
            return LossTrial(judged=False)


def samples_wanted(outputs: Any, batch: Any, size: int) -> int:
    """Return the number of samples that a trial needs, from a micro-batch of `size` samples."""
    return min(_SAMPLES, _most_samples(tensors_in((outputs, batch)), size))


def _most_samples(leaves: list[Tensor], size: int) -> int:
    each = sum(leaf.numel() for leaf in leaves) // max(1, size)
    return max(2, _ELEMENTS // max(1, each))


def _try_readings(loss: Loss, outputs: Any, batch: Any, size: int, dim: int) -> LossTrial:
    if not dim:
        outputs, batch = _with_items(outputs, size), _with_items(batch, size)
    leaves = [leaf.detach() for leaf in tensors_in((outputs, batch))]
    taken = min(size, _most_samples(leaves, size))
    num_outputs = len(tensors_in(outputs))
    best = LossTrial(judged=False)
    trees = of_parts((outputs, batch), size, taken) if not dim else ((outputs, batch),) * 3
    for readings in itertools.islice(_readings(leaves, size, dim, num_outputs), _READINGS):
        parts = _parts_of(leaves, readings, size, taken, num_outputs)
        outcome = _try_sums(loss, trees, parts)
        if not outcome.judged:
            return outcome
        if not outcome.reason:
            outcome = _try_perturbed(outcome, loss, trees, leaves, readings, size, taken, num_outputs)
        if not outcome.reason:
            return outcome
        best = outcome if not best.judged else best
    return best


def moved_count(loss: Loss, outputs: Any, batch: Any) -> str:
    """Return the name of a term whose count is another on outputs that are moved; empty if there is none, or the loss fails there."""
    leaves = [leaf.detach() for leaf in tensors_in((outputs, batch))]
    num_outputs = len(tensors_in(outputs))
    with preserve_function(loss):
        try:
            first, *others = (
                _evaluate_loss(
                    loss,
                    (outputs, batch),
                    [_perturb(leaf, moved) if moved and i < num_outputs else leaf for i, leaf in enumerate(leaves)],
                    raised=True,
                    graph=False,
                )
                for moved in (0.0, _MOVED, _FAR)
            )
        except Exception:  # of the user's own code, which may raise anything; the trial of its sums says so
            return ""
    terms = [name for name in first.amounts if not name.startswith(VALUES)]
    counts = [[value.amounts.get(name, (0.0, 0.0))[1] for value in (first, *others)] for name in terms]
    return next((name for name, (one, *rest) in zip(terms, counts, strict=True) if any(one != c for c in rest)), "")


# -- parts of a micro-batch ------------------------------------------------------------------------

_Parts = tuple[list[Tensor], list[Tensor], list[Tensor]]
"""The tensors of the whole, of its first and of its second half."""


def _parts_of(
    leaves: list[Tensor],
    readings: tuple[_SamplePlace, ...],
    size: int,
    taken: int,
    num_outputs: int,
    moved: float = 0.0,
) -> _Parts:
    """Return the whole and its halves; outputs are changed by `moved` of their size, each element by another amount."""
    given = [_perturb(leaf, moved) if moved and i < num_outputs else leaf for i, leaf in enumerate(leaves)]
    pairs = list(zip(readings, given, strict=True))
    if size > 1:
        half = taken // 2
        whole, first, second = (
            [reading.take(leaf, *window) for reading, leaf in pairs]
            for window in ((0, taken), (0, half), (half, taken))
        )
        return whole, first, second
    others = [
        _perturb(_perturb(leaf)) if i < num_outputs and reading.dim is not None else leaf
        for i, (reading, leaf) in enumerate(pairs)
    ]
    joined = [reading.doubled(leaf, other) for (reading, leaf), other in zip(pairs, others, strict=True)]
    return joined, given, others


def _perturb(tensor: Tensor, by: float = _MOVED) -> Tensor:
    """Return a floating tensor whose elements are changed, by about a hundredth of their mean size."""
    if not tensor.is_floating_point() or not tensor.numel():
        return tensor
    wide = tensor.to(torch.float64)
    wave = torch.arange(1, tensor.numel() + 1, dtype=torch.float64, device=tensor.device).mul_(1.7).sin_()
    size = wide.abs().nan_to_num(posinf=0.0).mean()
    return wide.add(wave.view(tensor.shape), alpha=by * (float(size) or 1.0)).to(tensor.dtype)


def _readings(leaves: list[Tensor], size: int, dim: int, num_outputs: int) -> Iterator[tuple[_SamplePlace, ...]]:
    """Yield how all tensors may hold the samples, the likeliest first; outputs of one shape, or labels, hold them alike."""
    keys = [(leaf.shape, index < num_outputs) for index, leaf in enumerate(leaves)]
    picked = [] if dim or size == 1 else list(dict.fromkeys(_count_picked(leaves[num_outputs:], size)))
    known = {key: _readings_of(leaf, size, dim, picked) for key, leaf in zip(keys, leaves, strict=True)}
    ranked = itertools.product(*(list(enumerate(found)) for found in known.values()))
    for choice in sorted(ranked, key=lambda choice: sum(rank for rank, _ in choice)):
        chosen = dict(zip(known, (reading for _, reading in choice), strict=True))
        yield tuple(chosen[key] for key in keys)


def _count_picked(leaves: list[Tensor], size: int) -> list[tuple[int, ...]]:
    """Return the numbers of positions that masks and labels of a batch pick in each sample."""
    of_each = [leaf.flatten(1) for leaf in leaves if leaf.dim() > 1 and leaf.shape[0] == size]
    whole = [leaf for leaf in of_each if not leaf.is_floating_point() and not leaf.is_complex()]
    chosen = [leaf != left_out for leaf in whole for left_out in (0, IGNORED_LABEL)]
    return [tuple(one.sum(1).tolist()) for one in chosen]


def _readings_of(leaf: Tensor, size: int, dim: int, picked: list[tuple[int, ...]]) -> list[_SamplePlace]:
    shape = leaf.shape
    if dim:
        return (
            [_SamplePlace(dim), _SamplePlace(None)] if leaf.dim() > dim and shape[dim] == size else [_SamplePlace(None)]
        )
    found = [_SamplePlace(at) for at in range(leaf.dim()) if shape[at] == size]
    found += [_SamplePlace(0, picked=rows) for rows in picked if leaf.dim() and sum(rows) == shape[0]]
    if leaf.dim() and shape[0] > size and shape[0] % size == 0:
        rows = shape[0] // size
        found += [_SamplePlace(0, rows), _SamplePlace(0, rows, stacked=True)]
    return [*found, _SamplePlace(None)]


# -- evaluating ------------------------------------------------------------------------------------


def _try_sums(loss: Loss, trees: Trees, parts: _Parts) -> LossTrial:
    """Evaluate the loss on the whole and on the halves, in float64 if it can be, and compare."""
    error: Exception | None = None
    for raised, graph in ((True, False), (True, True), (False, False), (False, True)):
        try:
            given = [(trees[0], parts[0]), *zip(trees, parts, strict=True)]
            values = _ValuesOfWhole()
            with within(values):
                whole, again, *halves = [values.evaluate(loss, tree, part, raised, graph) for tree, part in given]
        except torch.OutOfMemoryError:
            raise
        except Exception as caught:  # of the user's own code, which may raise anything
            error = error or caught
            continue
        if whole.went_back:
            return LossTrial(_GOES_BACK)
        for name, (total, _) in whole.amounts.items():
            if math.isfinite(total) and abs(again.amounts[name][0] - total) > TOLERANCE * abs(total):
                return LossTrial(_KEEPS.format(f"sum{_of(name)}", total, again.amounts[name][0]))
        return _compare_halves(whole, halves, raised)
    words = str(error).strip().partition("\n")[0]
    return LossTrial(f"it cannot be evaluated on a part of a micro-batch ({type(error).__name__}: {words})")


class _ValuesOfWhole:
    """The scope of `samestep.batch_sum` and its like in a trial: halves are given what the first evaluation, of the whole, has found."""

    def __init__(self) -> None:
        self._found: list[Any] = []
        self._next: Iterator[Any] | None = None

    def evaluate(self, *given: Any) -> _LossValue:
        """Evaluate a loss, the first time on the whole."""
        value = _evaluate_loss(*given)
        self._next = iter(self._found)
        return value

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
    tolerance = TOLERANCE if raised and whole.is_float64 else _ROUNDED
    judged = {name: whole.amounts[name] for name in whole.amounts if whole.counts(name)}
    if not judged:
        return LossTrial(judged=False)
    for index, word in ((1, "count"), (0, "sum")):
        for name, amount in judged.items():
            all_of, both = amount[index], [half.amounts.get(name, (0.0, 0.0))[index] for half in halves]
            if not abs(all_of - sum(both)) <= tolerance * max(abs(all_of), *map(abs, both)):
                return LossTrial(
                    f"its {word}{_of(name)} is {all_of:.9g} for the whole and {both[0]:.9g} and {both[1]:.9g} for the halves"
                )
    return LossTrial(is_zero=not any(total for value in (whole, *halves) for total, _ in value.amounts.values()))


def _of(name: str) -> str:
    return f" of {name}" if name != UNNAMED else ""


def _try_perturbed(
    outcome: LossTrial,
    loss: Loss,
    trees: Trees,
    leaves: list[Tensor],
    readings: tuple[_SamplePlace, ...],
    size: int,
    taken: int,
    num_outputs: int,
) -> LossTrial:
    """Try outputs that are moved a little, and far; a loss that is not defined for them was tried on the real ones.

    A loss that is zero everywhere, as one with a margin may be, has shown nothing yet.
    """
    is_zero = outcome.is_zero
    for moved in (_MOVED, _FAR):
        outcome = _try_sums(loss, trees, _parts_of(leaves, readings, size, taken, num_outputs, moved))
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

    def counts(self, name: str) -> bool:
        """Return whether a term or value is finite and counts something."""
        total, count = self.amounts[name]
        return math.isfinite(total) and math.isfinite(count) and count != 0.0


def _evaluate_loss(loss: Loss, tree: Any, leaves: list[Tensor], raised: bool, graph: bool) -> _LossValue:
    """Evaluate the loss on detached tensors; with `graph`, for a loss that differentiates its outputs."""
    given = cast_floating(leaves, torch.float64) if raised else leaves
    if graph:
        given = [leaf.clone().requires_grad_() if leaf.is_floating_point() else leaf for leaf in given]
    outputs, batch = _without_items(with_tensors(tree, given), raised)
    with disable_current_modes(), torch.set_grad_enabled(graph), _raise_to_float64() if raised else _plain():
        found = loss_result(loss(outputs, batch))
    is_float64 = all(total.dtype is torch.float64 for total, _ in found.terms.values())
    went_back = graph and any(leaf.grad is not None for leaf in given)
    amounts = {name: (float(total.detach()), float(count)) for name, (total, count) in found.amounts.items()}
    return _LossValue(amounts, is_float64, went_back)


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


# -- trees -----------------------------------------------------------------------------------------


def tensors_in(value: Any) -> list[Tensor]:
    """Return the tensors of outputs and batches: in tuples, mappings, dataclasses and plain objects."""
    found: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    _map_tensors(value, note)
    return found


def detach_tensors(value: Any) -> Any:
    """Return a copy of outputs and batches with detached tensors, which hold no graph."""
    return _map_tensors(value, Tensor.detach)


def join_samples(
    first: tuple[Any, Any], second: tuple[Any, Any], sizes: tuple[int, int], *, keeps_equal: bool = False
) -> tuple[Any, Any] | None:
    """Return outputs and batch of two micro-batches of `sizes` samples, from those of each.

    With `keeps_equal` a tensor that is equal in both belongs to all samples, as a weight with so many elements does.

    None if their tensors have other different shapes, several rows for each sample, or samples along another dimension.
    """
    first, second = _with_items(first, sizes[0]), _with_items(second, sizes[1])
    pairs = list(zip(tensors_in(first), tensors_in(second), strict=False))
    if len(pairs) != len(tensors_in(first)) or len(pairs) != len(tensors_in(second)):
        return None
    sizes_of = [(one.shape[:1], other.shape[:1]) for one, other in pairs]
    picked = [_count_picked(tensors_in(given[1]), size) for given, size in zip((first, second), sizes, strict=True)]
    rows = {((sum(mine),), (sum(theirs),)) for mine, theirs in zip(*picked, strict=False)}  # as many as a mask picks
    num_outputs = len(tensors_in(first[0]))
    of_samples = [
        (found == ((sizes[0],), (sizes[1],)) or (index < num_outputs and found in rows))
        and not (keeps_equal and torch.equal(*pairs[index]))
        for index, found in enumerate(sizes_of)
    ]
    for (one, other), is_of_samples in zip(pairs, of_samples, strict=True):
        alike = one.shape[1:] == other.shape[1:] if is_of_samples else one.shape == other.shape
        may_be_of_samples = sizes[1] in other.shape or _has_several_rows(other, sizes[1])
        if not alike or (not is_of_samples and may_be_of_samples and not keeps_equal):
            return None
    both = [
        torch.cat(pair).detach() if is_cut else pair[1].detach() for pair, is_cut in zip(pairs, of_samples, strict=True)
    ]
    outputs, batch = join_batches(first, with_tensors(second, both), sizes)
    return outputs, batch


def _has_several_rows(tensor: Tensor, size: int) -> bool:
    return tensor.dim() > 0 and 1 < size < tensor.shape[0] and tensor.shape[0] % size == 0


def with_tensors(value: Any, tensors: list[Tensor]) -> Any:
    """Return a copy of outputs and batches with other tensors, in the order of `tensors_in`."""
    rest = iter(tensors)
    return _map_tensors(value, lambda _: next(rest))


def _map_tensors(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    def leaf(tensor: Tensor) -> Tensor:
        if isinstance(tensor, pending_logits.PendingLogits):
            return pending_logits.detach_logits(tensor).with_hidden(change(tensor.made.hidden))
        twin = change(tensor)
        for name, item in vars(tensor).items():  # of the user: `logits.aux = ...`
            if isinstance(item, Tensor):
                setattr(twin, name, leaf(item))
        return twin

    return map_tensors(value, leaf, records=True)
