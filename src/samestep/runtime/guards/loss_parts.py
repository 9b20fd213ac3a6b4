"""The parts of a micro-batch on which a loss is tried: halves along the samples or tokens, and two micro-batches joined to one.

Which dimension of a tensor holds the samples is not known: the first, where its size is the number of samples, or
several rows for each sample (flattened tokens, two views), as many as a mask or the labels pick in it, or another
dimension of that size. What adds up under any of these readings is a sum: a coupled loss adds up under none.

A list with an item for each sample, such as the names of files, is cut and joined as the tensors are.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from samestep.building.loss import IGNORED_LABEL
from samestep.building.named_tensors import cast_floating
from samestep.datasets.values import is_by_sample
from samestep.tracing import pending_logits
from samestep.trees import map_tensors, parts_of, tree_map, with_parts

Trees = tuple[Any, Any, Any]
"""Outputs and batch of the whole, of its first and of its second half."""
Parts = tuple[list[Tensor], list[Tensor], list[Tensor]]
"""The tensors of the whole, of its first and of its second half."""
MOVED = 0.01
"""The mean change of an output that is moved a little, over the mean size of its elements."""


# -- the samples in one tensor ---------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SamplePlace:
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


def _places_in(leaf: Tensor, size: int, dim: int, picked: list[tuple[int, ...]]) -> list[SamplePlace]:
    shape = leaf.shape
    if dim:
        return [SamplePlace(dim), SamplePlace(None)] if leaf.dim() > dim and shape[dim] == size else [SamplePlace(None)]
    found = [SamplePlace(at) for at in range(leaf.dim()) if shape[at] == size]
    found += [SamplePlace(0, picked=rows) for rows in picked if leaf.dim() and sum(rows) == shape[0]]
    if leaf.dim() and shape[0] > size and shape[0] % size == 0:
        rows = shape[0] // size
        found += [SamplePlace(0, rows), SamplePlace(0, rows, stacked=True)]
    return [*found, SamplePlace(None)]


def _count_picked(leaves: list[Tensor], size: int) -> list[tuple[int, ...]]:
    """Return the numbers of positions that masks and labels of a batch pick in each sample."""
    of_each = [leaf.flatten(1) for leaf in leaves if leaf.dim() > 1 and leaf.shape[0] == size]
    whole = [leaf for leaf in of_each if not leaf.is_floating_point() and not leaf.is_complex()]
    chosen = [leaf != left_out for leaf in whole for left_out in (0, IGNORED_LABEL)]
    return [tuple(one.sum(1).tolist()) for one in chosen]


# -- parts, and two micro-batches as one -----------------------------------------------------------


def most_samples(tensors: list[Tensor], size: int, most_elements: int) -> int:
    """Return how many of `size` samples have about so many elements, at least two."""
    each = sum(tensor.numel() for tensor in tensors) // max(1, size)
    return max(2, most_elements // max(1, each))


@dataclass(frozen=True, slots=True)
class TriedTensors:
    """The detached tensors of a micro-batch: those of its outputs, followed by those of its batch."""

    tensors: list[Tensor]
    num_outputs: int
    size: int
    """Number of samples of the micro-batch, or of tokens."""
    taken: int
    """Number of them that are tried."""
    of_no_sample: frozenset[int] = frozenset()
    """The numbers of the tensors that are weights, which a forward may return."""

    @classmethod
    def of(cls, outputs: Any, batch: Any, size: int, most_elements: int) -> TriedTensors:
        """Return the tensors of a micro-batch, of which about so many elements are tried."""
        given = tensors_in((outputs, batch))
        tensors = [leaf.detach() for leaf in given]
        weights = frozenset(i for i, one in enumerate(given) if _is_weight(one))
        taken = min(size, most_samples(tensors, size, most_elements))
        return cls(tensors, len(tensors_in(outputs)), size, taken, weights)

    def readings(self, dim: int) -> Iterator[tuple[SamplePlace, ...]]:
        """Yield how all tensors may hold the samples, the likeliest first; outputs of one shape, or labels, hold them alike."""
        keys = [
            (leaf.shape, index < self.num_outputs, index in self.of_no_sample)
            for index, leaf in enumerate(self.tensors)
        ]
        is_halved = not dim and self.size > 1
        picked = list(dict.fromkeys(_count_picked(self.tensors[self.num_outputs :], self.size))) if is_halved else []
        known = {
            key: [SamplePlace(None)] if key[-1] else _places_in(leaf, self.size, dim, picked)
            for key, leaf in zip(keys, self.tensors, strict=True)
        }
        ranked = itertools.product(*(list(enumerate(found)) for found in known.values()))
        for choice in sorted(ranked, key=lambda choice: sum(rank for rank, _ in choice)):
            chosen = dict(zip(known, (reading for _, reading in choice), strict=True))
            yield tuple(chosen[key] for key in keys)

    def parts(self, readings: tuple[SamplePlace, ...], moved: float = 0.0) -> Parts:
        """Return the whole and its halves, with outputs that are changed by `moved` of their size."""
        given = self.moved(moved)
        pairs = list(zip(readings, given, strict=True))
        if self.size > 1:
            half = self.taken // 2
            whole, first, second = (
                [reading.take(leaf, *window) for reading, leaf in pairs]
                for window in ((0, self.taken), (0, half), (half, self.taken))
            )
            return whole, first, second
        others = [
            _perturb(_perturb(leaf)) if i < self.num_outputs and reading.dim is not None else leaf
            for i, (reading, leaf) in enumerate(pairs)
        ]
        joined = [reading.doubled(leaf, other) for (reading, leaf), other in zip(pairs, others, strict=True)]
        return joined, given, others

    def moved(self, by: float) -> list[Tensor]:
        """Return the tensors, those of outputs changed by so much of their size, each element by another amount."""
        return [_perturb(leaf, by) if by and i < self.num_outputs else leaf for i, leaf in enumerate(self.tensors)]


def _perturb(tensor: Tensor, by: float = MOVED) -> Tensor:
    """Return a floating tensor whose elements are changed, by about a hundredth of their mean size."""
    if not tensor.is_floating_point() or not tensor.numel():
        return tensor
    wide = tensor.to(torch.float64)
    wave = torch.arange(1, tensor.numel() + 1, dtype=torch.float64, device=tensor.device).mul_(1.7).sin_()
    size = wide.abs().nan_to_num(posinf=0.0).mean()
    return wide.add(wave.view(tensor.shape), alpha=by * (float(size) or 1.0)).to(tensor.dtype)


def join_samples(
    first: tuple[Any, Any], second: tuple[Any, Any], sizes: tuple[int, int], *, keeps_equal: bool = False
) -> tuple[Any, Any] | None:
    """Return outputs and batch of two micro-batches of `sizes` samples, from those of each.

    A weight belongs to all samples, and with `keeps_equal` so does a tensor that is equal in both, as what is computed of weights.

    None if their tensors have other different shapes, several rows for each sample, or samples along another dimension.
    """
    first, second = with_items(first, sizes[0]), with_items(second, sizes[1])
    pairs = list(zip(tensors_in(first), tensors_in(second), strict=False))
    if len(pairs) != len(tensors_in(first)) or len(pairs) != len(tensors_in(second)):
        return None
    sizes_of = [(one.shape[:1], other.shape[:1]) for one, other in pairs]
    picked = [_count_picked(tensors_in(given[1]), size) for given, size in zip((first, second), sizes, strict=True)]
    rows = {((sum(mine),), (sum(theirs),)) for mine, theirs in zip(*picked, strict=False)}  # as many as a mask picks
    num_outputs = len(tensors_in(first[0]))
    of_samples = [
        (found == ((sizes[0],), (sizes[1],)) or (index < num_outputs and found in rows))
        and not (_is_weight(pairs[index][1]) or (keeps_equal and torch.equal(*pairs[index])))
        for index, found in enumerate(sizes_of)
    ]
    for (one, other), is_of_samples in zip(pairs, of_samples, strict=True):
        if _is_weight(other):
            continue
        alike = one.shape[1:] == other.shape[1:] if is_of_samples else one.shape == other.shape
        may_be_of_samples = sizes[1] in other.shape or _has_several_rows(other, sizes[1])
        if not alike or (not is_of_samples and may_be_of_samples and not keeps_equal):
            return None
    both = [
        torch.cat(pair).detach() if is_cut else pair[1] if _is_weight(pair[1]) else pair[1].detach()
        for pair, is_cut in zip(pairs, of_samples, strict=True)
    ]
    outputs, batch = _join_words(first, with_tensors(second, both), sizes)
    return outputs, batch


def _is_weight(tensor: Tensor) -> bool:
    """Return whether an output is a weight, which a forward may return, or one that was raised for the loss."""
    return isinstance(tensor, nn.Parameter) or vars(tensor).get("is_weight", False)


def _has_several_rows(tensor: Tensor, size: int) -> bool:
    return tensor.dim() > 0 and 1 < size < tensor.shape[0] and tensor.shape[0] % size == 0


# -- lists with one item for each sample -----------------------------------------------------------


def words_of_parts(tree: Any, size: int, taken: int) -> Trees:
    """Return outputs and batch of `size` samples with the words of the first `taken`, and of the halves of these.

    One sample has no halves: the whole is the sample twice.
    """
    half = taken // 2
    parts = (range(taken), range(half), range(half, taken)) if size > 1 else ([0, 0], [0], [0])

    def of(rows: Sequence[int]) -> Any:
        return _map_words(tree, tree, lambda words, _: [words[row] for row in rows] if len(words) == size else words)

    whole, first, second = map(of, parts)
    return whole, first, second


def _join_words(first: Any, second: Any, sizes: tuple[int, int]) -> Any:
    """Return the second of two micro-batches of `sizes` samples, with the words of both."""

    def both(words: list[Any], others: Any) -> list[Any]:
        return [*others, *words] if (len(others), len(words)) == sizes else words

    return _map_words(second, first, both)


class _Item:
    """The part of one sample in a list that has one of any kind for each, which is cut as a list of words is."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


def with_items(value: Any, size: int) -> Any:
    """Return outputs or a batch of `size` samples with an item in place of each part of a list of one for each sample."""
    if isinstance(value, dict) and type(value) is dict:
        return {key: with_items(part, size) for key, part in value.items()}
    if type(value) is list and is_by_sample(value, size):
        return [part if isinstance(part, _Item) else _Item(map_tensors(part, Tensor.detach)) for part in value]
    if type(value) in (tuple, list):
        return type(value)(with_items(part, size) for part in value)
    if fields := parts_of(value):
        return with_parts(value, {name: with_items(part, size) for name, part in fields.items()})
    return value


def without_items(value: Any, raised: bool) -> Any:
    """Return outputs or a batch with the parts themselves in place of their items, `raised` to float64."""

    def shown(item: _Item) -> Any:
        return cast_floating(item.value, torch.float64) if raised else item.value

    def leaf(one: Any) -> Any:
        if isinstance(one, _Item):
            return shown(one)
        fields = parts_of(one)
        return with_parts(one, {name: without_items(part, raised) for name, part in fields.items()}) if fields else one

    return tree_map(leaf, value)


def _map_words(value: Any, other: Any, change: Callable[[list[Any], Any], list[Any]]) -> Any:
    """Return nested tuples, lists and dicts with other words; `other` has the same nesting."""
    if isinstance(value, dict) and isinstance(other, dict):
        if type(value) is not dict:  # a class of a library, which holds tensors alone
            return value
        return {key: _map_words(item, other.get(key), change) for key, item in value.items()}
    if not isinstance(value, tuple | list):
        parts, twins = parts_of(value), parts_of(other) if type(other) is type(value) else {}
        words = {name: _map_words(part, twins.get(name), change) for name, part in parts.items()}
        return with_parts(value, words) if twins else value
    if not isinstance(other, tuple | list):
        return value
    if value and all(isinstance(item, str | _Item) for item in value):
        return type(value)(change([*value], other))
    if len(value) != len(other):
        return value
    items = [_map_words(item, twin, change) for item, twin in zip(value, other, strict=True)]
    return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)


# -- nested tensors --------------------------------------------------------------------------------


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

    return map_tensors(value, leaf)
