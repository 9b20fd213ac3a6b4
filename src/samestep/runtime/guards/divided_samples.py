"""Samples that were run as one and as two halves, and the halves once more as rows of the outputs of the whole.

```
             samples 0 1 2 3         [8, T, V]       [8 * T, V]        two views, one after the other     [C]
halves       0 1  |  2 3             4 + 4 = 8       4T + 4T = 8T      nearer to a half that ran alone    C, C, C
the samples  add up to the whole     dimension 0     dimension 0       stacked                            belongs to all
```
So no rounding of a forward stands between a loss of the whole and that of the halves. What no rows of the whole are, such as a
statistic of the batch, numbers that begin anew in each batch, names, or lists with an item for each sample, a half has by itself.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from samestep.building.loss import IGNORED_LABEL
from samestep.building.named_tensors import cast_floating
from samestep.independence.roundings import is_let_go, limit_of_values, relative_deviation
from samestep.tracing import pending_logits
from samestep.trees import map_tensors, tree_leaves
from samestep.trees import tensors_in as tensors_in_tree

_FAR, _BESIDE = 1000.0, 0.01
"""Other values are so many times the mean size, or differ by this part from a number."""
_LARGE, _LARGEST_WHOLE = 2**18, 10_000
"""In more elements fewer other values are tried; and no larger whole numbers, which may be sizes."""
WHOLE = 0
PARTS = (WHOLE, 1, 2)
"""The samples together, and each half."""


class Samples(NamedTuple):
    """Samples that were run: the outputs of their forward, their batch, and their number."""

    outputs: Any
    batch: Any
    size: int


@dataclass(frozen=True, slots=True)
class SamplePlace:
    """The place of the samples in one tensor."""

    dim: int | None = None
    """The dimension of the samples; None for a tensor that belongs to all of them."""
    of_half: int = 0
    """Number of rows of the first half."""
    is_stacked: bool = False
    """Whether the rows of one sample stand apart, as in two views of a batch one after the other."""

    def take(self, tensor: Tensor, half: int, sizes: tuple[int, int]) -> Tensor:
        """Return the rows of the first half, or of the second one, of two of these numbers of samples."""
        if self.dim is None:
            return tensor
        if self.is_stacked:
            rows = tensor.unflatten(self.dim, (-1, sum(sizes)))
            return rows.narrow(self.dim + 1, (half - 1) * sizes[0], sizes[half - 1]).flatten(self.dim, self.dim + 1)
        counts = self.of_half, tensor.shape[self.dim] - self.of_half
        return tensor.narrow(self.dim, (half - 1) * self.of_half, counts[half - 1])

    def twice(self, tensor: Tensor, number: int, shift: int) -> Tensor:
        """Return the rows of so many samples twice, the second time larger by `shift`."""
        if self.dim is None:
            return tensor
        again = tensor + shift if shift else tensor
        if not self.is_stacked:
            return torch.cat([tensor, again], self.dim)
        views = [rows.unflatten(self.dim, (-1, number)) for rows in (tensor, again)]
        return torch.cat(views, self.dim + 1).flatten(self.dim, self.dim + 1)


@dataclass(frozen=True, slots=True)
class DividedSamples:
    """Samples and their halves, and where the tensors of the whole hold the samples; outputs stand before the batch."""

    trees: tuple[Any, ...]
    """Outputs and batch of the whole and of the halves."""
    tensors: tuple[list[Tensor], ...]
    """Their detached tensors."""
    places: list[SamplePlace | None]
    """The place of the samples in each tensor of the whole, as far as the halves have one like it; None where a half has its own."""
    num_outputs: int
    sizes: tuple[int, int]
    """Number of samples of each half, or of tokens."""
    graded: tuple[int, ...] = ()
    """The numbers of the tensors through which a backward goes."""

    @property
    def num_elements(self) -> int:
        """Number of elements of the whole."""
        return sum(leaf.numel() for leaf in self.tensors[WHOLE])

    @property
    def is_small(self) -> bool:
        """Whether many other values can be tried."""
        return self.num_elements <= _LARGE

    def part(self, tensors: Sequence[Tensor], part: int, *, raised: bool) -> tuple[Any, Any]:
        """Return outputs and batch of one of `PARTS`, with the values of `tensors` of the whole; a loss may write into them."""
        leaves = list(tensors if part == WHOLE else self.tensors[part])
        for index in range(len(leaves) if part != WHOLE else 0):
            place = self.places[index] if index < len(self.places) else None
            if place is not None:
                leaves[index] = place.take(tensors[index], part, self.sizes)
            elif raised:
                leaves[index] = cast_floating(leaves[index], torch.float64)
        shared = {index for index, place in enumerate(self.places) if place == SamplePlace()}  # as a table of classes
        shared |= {index for index, leaf in enumerate(leaves) if is_let_go(leaf)}
        shown = [
            leaf if index in shared and not leaf.requires_grad else leaf.clone() for index, leaf in enumerate(leaves)
        ]
        outputs, batch = with_tensors(self.trees[part], shown)
        return outputs, batch

    def moved(self, by: float) -> DividedSamples:
        """Return the samples with outputs changed by so much of their mean size, each element by another amount."""
        together = [
            _moved(leaf, by) if i < self.num_outputs and self.places[i] is not None else leaf
            for i, leaf in enumerate(self.tensors[WHOLE])
        ]
        return replace(self, tensors=(together, *self.tensors[1:]))

    def with_other_half(self, numbers: Collection[float]) -> Iterator[tuple[DividedSamples, bool]]:
        """Yield the samples with other values in a tensor of the first half, or of both, and whether the second half has them too: values with
        which a label or mask does not count, or does; and values around `numbers`, those of the code of the loss, and far from all
        others, by which a loss may choose a factor.
        """
        is_large = not self.is_small
        for index, place in enumerate(self.places):
            leaf = self.tensors[WHOLE][index]
            is_output = index < self.num_outputs
            if place is None or place.dim is None or place.is_stacked or leaf.is_complex() or (is_output and is_large):
                continue
            first, second = (place.take(leaf, half, self.sizes) for half in PARTS[1:])
            numbers_here = () if is_large else numbers
            values = _other_values(first, second, numbers_here, is_output=is_output)
            far = [_moved(first, by) for by in (_FAR, -_FAR)] if first.is_floating_point() else []
            for other in (*map(leaf.new_tensor, values), *far):
                changed = leaf.clone()
                place.take(changed, 1, self.sizes).copy_(other)
                yield self._with(index, changed), False
                if not (is_large or is_output or other.dim() or _may_be_ids(first, second)):  # so many, as no half has
                    yield self._with(index, torch.zeros_like(leaf).copy_(other)), True

    def _with(self, index: int, leaf: Tensor) -> DividedSamples:
        """Return the samples with another tensor in the place of one of the whole."""
        together = [leaf if place == index else tensor for place, tensor in enumerate(self.tensors[WHOLE])]
        return replace(self, tensors=(together, *self.tensors[1:]))

    def doubled(self) -> list[DividedSamples]:
        """Return twice these samples, which are each half of them then; none if they cannot be repeated.

        Whole numbers that the halves do not share may be ids of groups, or classes: others in the second half first, and then the same.
        """
        has_places = None not in self.places and len(self.places) == len(self.tensors[WHOLE])
        if not has_places or any(map(is_let_go, self.tensors[WHOLE])) or len({*map(_words_of, self.trees)}) > 1:
            return []
        number, places = sum(self.sizes), [cast("SamplePlace", place) for place in self.places]
        ways = [
            [place.twice(leaf, number, by) for leaf, place, by in zip(self.tensors[WHOLE], places, shifts, strict=True)]
            for shifts in self._shifts()
        ]
        places_twice: list[SamplePlace | None] = [
            place if place.dim is None else replace(place, of_half=leaf.shape[place.dim])
            for leaf, place in zip(self.tensors[WHOLE], places, strict=True)
        ]
        return [
            replace(self, trees=self.trees[:1] * 3, tensors=(leaves,) * 3, places=places_twice, sizes=(number, number))
            for leaves in ways
        ]

    def _shifts(self) -> list[list[int]]:
        """Return by how much the numbers of each tensor are others in the second half of twice the samples; none on an accelerator if
        they are, since an index beyond a table ends its context.
        """
        shifts = []
        for leaf, place in zip(self.tensors[WHOLE], self.places, strict=True):
            halves = (
                [] if place is None or place.dim is None else [place.take(leaf, half, self.sizes) for half in PARTS[1:]]
            )
            shifts.append(int(leaf.max() - leaf.min()) + 1 if halves and _may_be_ids(*halves) else 0)
        is_on_host = all(leaf.device.type == "cpu" for leaf in self.tensors[WHOLE])
        plain = [0] * len(shifts)
        return [plain] if shifts == plain else [shifts, plain] if is_on_host else []


def _other_values(first: Tensor, second: Tensor, numbers: Collection[float], *, is_output: bool) -> list[float]:
    """Return values with which a tensor of the first half is tried: no whole numbers of the second one if the halves share none, as ids of
    groups do; and on an accelerator only those that it holds, since an index beyond a table ends its context.
    """
    if first.dtype is torch.bool:
        return [0, 1]
    if first.is_floating_point():
        far = _FAR * (float(first.abs().nan_to_num(posinf=0.0).mean()) or 1.0)
        around = [number + sign * _BESIDE * (abs(number) or 1.0) for number in numbers for sign in (1, -1)]
        return [*(() if is_output else (0, 1)), *around, far, -far]
    wholes = [int(number) + step for number in numbers if number == int(number) for step in (0, 1, -1)]
    values = dict.fromkeys((0, IGNORED_LABEL, *(value for value in wholes if abs(value) < _LARGEST_WHOLE)))
    both, info = torch.cat([first.flatten(), second.flatten()]), torch.iinfo(first.dtype)
    is_on_host = first.device.type == "cpu" or not both.numel()
    least, most = (info.min, info.max) if is_on_host else (int(both.min()), int(both.max()))
    others = set(second.flatten().tolist()) if _may_be_ids(first, second) else set()
    return [value for value in values if least <= value <= most and value not in others]


def _may_be_ids(first: Tensor, second: Tensor) -> bool:
    """Return whether two halves share none of their whole numbers, as ids of groups that stay together."""
    is_whole = not (first.is_floating_point() or first.is_complex() or first.dtype is torch.bool)
    return is_whole and first.numel() > 0 and not bool(torch.isin(first.flatten(), second.flatten()).any())


def _moved(tensor: Tensor, by: float) -> Tensor:
    if not tensor.is_floating_point() or not tensor.numel():
        return tensor
    wide = tensor.to(torch.float64)
    wave = torch.arange(1, tensor.numel() + 1, dtype=torch.float64, device=tensor.device).mul_(1.7).sin_()
    size = wide.abs().nan_to_num(posinf=0.0).mean()
    return wide.add(wave.view(tensor.shape), alpha=by * (float(size) or 1.0)).to(tensor.dtype)


# -- where the samples are -------------------------------------------------------------------------


def divisions(
    together: Samples, halves: tuple[Samples, Samples], graded: Sequence[bool] | None = None
) -> list[DividedSamples]:
    """Return how samples may be divided, as their halves show it: one way, unless outputs of equal rows fit two; none if the outputs of a
    half have other tensors, or no dimension holds the samples.

    `graded` says through which tensors of the outputs a backward goes: none if it is empty, and by default all but weights.
    """
    runs, sizes = (together, *halves), (halves[0].size, halves[1].size)
    outputs, batches = [tensors_in(run.outputs) for run in runs], [tensors_in(run.batch) for run in runs]
    has_lists = len({*map(len, batches)}) > 1  # with tensors of each sample
    if len({*map(len, outputs)}) > 1:
        return []
    leaves = [[*of_outputs, *of_batch] for of_outputs, of_batch in zip(outputs, batches, strict=True)]
    num_outputs = len(outputs[WHOLE])
    places = [
        _places(*(of_run[index] for of_run in leaves), sizes=sizes, is_output=index < num_outputs)
        for index in range(num_outputs if has_lists else len(leaves[WHOLE]))
    ]
    if not all(places):
        return []
    if graded is None or len(graded) not in (0, num_outputs):
        graded = [not isinstance(leaf, nn.Parameter) for leaf in outputs[WHOLE]]
    takes = [
        i
        for i, leaf in enumerate(outputs[WHOLE])
        if graded and graded[i] and leaf.is_floating_point() and places[i] != [None]
    ]
    trees = tuple((run.outputs, run.batch) for run in runs)
    tensors = tuple([leaf.detach() for leaf in of_run] for of_run in leaves)
    ways = [[ways_of[0] for ways_of in places], [ways_of[-1] for ways_of in places]]
    return [
        DividedSamples(trees, tensors, way, num_outputs, sizes, tuple(takes))
        for way in (ways if ways[0] != ways[1] else ways[:1])
    ]


def along_tokens(samples: Samples, length: int) -> DividedSamples:
    """Return samples whose parts are halves of the tokens, of which so many are along dimension 1, or 2 as in logits [B, V, T]."""
    tree, of_outputs = (samples.outputs, samples.batch), tensors_in(samples.outputs)
    tensors, sizes = [leaf.detach() for leaf in tensors_in(tree)], (length // 2, length - length // 2)
    dims = (next((dim for dim in (1, 2) if leaf.shape[dim : dim + 1] == (length,)), None) for leaf in tensors)
    places: list[SamplePlace | None] = [SamplePlace() if dim is None else SamplePlace(dim, sizes[0]) for dim in dims]
    graded = tuple(i for i, leaf in enumerate(of_outputs) if leaf.requires_grad and leaf.is_floating_point())
    return DividedSamples((tree,) * 3, (tensors,) * 3, places, len(of_outputs), sizes, graded)


def deviation_of_halves(together: Samples, halves: tuple[Samples, Samples]) -> float | None:
    """Return the largest relative deviation of outputs of halves, which ran by themselves, from their rows of the whole; None if they cannot be
    divided, and 0 on a stage without outputs. Statistics of the batch are left out.
    """
    if together.outputs is None:
        return 0.0
    of_ways = list[float]()
    for way in divisions(together, halves):
        distances = [0.0]
        for index, place in enumerate(way.places[: way.num_outputs]):
            leaf = way.tensors[WHOLE][index]
            if place is not None and leaf.is_floating_point():
                rows = ((place.take(leaf, half, way.sizes), way.tensors[half][index]) for half in PARTS[1:])
                distances += [_distance(part, alone) for part, alone in rows]
        of_ways.append(max(distances))
    return min(of_ways, default=None)


def _places(
    together: Tensor, first: Tensor, second: Tensor, *, sizes: tuple[int, int], is_output: bool
) -> list[SamplePlace | None]:
    """Return where a tensor may hold the samples, the likeliest first; None where a half has its own, and nothing if it cannot be divided."""
    if together.shape == first.shape == second.shape:
        far = max(_distance(together, half) for half in (first, second))
        return [SamplePlace() if far <= (limit_of_values(together.dtype) if is_output else 0.0) else None]
    rows = [*zip(together.shape, first.shape, second.shape, strict=False)]
    dims = [dim for dim, (total, of_first, of_second) in enumerate(rows) if total and of_first + of_second == total]
    are_padded = [
        total in (of_first, of_second) for dim, (total, of_first, of_second) in enumerate(rows) if dim not in dims
    ]
    if not together.dim() == first.dim() == second.dim() or len(dims) != 1 or not all(are_padded):
        return [] if is_output else [None]
    total, of_half, size = together.shape[dims[0]], first.shape[dims[0]], sum(sizes)
    ways = [SamplePlace(dims[0], of_half)]
    if total > size and total % size == 0 and of_half == sizes[0] * (total // size):
        ways.append(SamplePlace(dims[0], of_half, is_stacked=True))
    far_of = [
        max(_distance(way.take(together, i, sizes), half) for i, half in ((1, first), (2, second))) for way in ways
    ]
    if not is_output and min(far_of):
        return [None]
    return [way for way, far in zip(ways, far_of, strict=True) if far == min(far_of)]


def _distance(tensor: Tensor, expected: Tensor) -> float:
    """Return by how much two tensors of one shape differ; 0 where padding gives them different ones."""
    if tensor.is_complex():
        tensor, expected = torch.view_as_real(tensor), torch.view_as_real(expected)
    return relative_deviation(expected, tensor) if tensor.shape == expected.shape else 0.0


def _words_of(tree: Any) -> str:
    """Return what a tree holds beside tensors: names or numbers of each sample are others in each half."""
    return repr([leaf for leaf in tree_leaves(tree) if not isinstance(leaf, Tensor)])


# -- nested tensors --------------------------------------------------------------------------------


def tensors_in(value: Any) -> list[Tensor]:
    """Return the tensors of outputs and batches: in tuples, mappings, dataclasses and plain objects, each before its attributes."""
    tensors: list[Tensor] = []
    rest = tensors_in_tree(value)[::-1]
    while rest:
        tensor = rest.pop()
        if isinstance(tensor, pending_logits.PendingLogits):
            tensors.append(tensor.made.hidden)
        else:
            tensors.append(tensor)
            rest += [item for item in vars(tensor).values() if isinstance(item, Tensor)][::-1]
    return tensors


def with_tensors(value: Any, tensors: list[Tensor]) -> Any:
    """Return a copy of outputs and batches with other tensors, in the order of `tensors_in`."""
    rest = iter(tensors)

    def leaf(tensor: Tensor) -> Tensor:
        if isinstance(tensor, pending_logits.PendingLogits):
            return pending_logits.detach_logits(tensor).with_hidden(next(rest))
        twin = next(rest)
        for name, item in vars(tensor).items():  # of the user: `logits.aux = ...`
            if isinstance(item, Tensor):
                setattr(twin, name, leaf(item))
        return twin

    return map_tensors(value, leaf)
