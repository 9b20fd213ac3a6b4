"""Tensors of all samples of a step, gathered from micro-batches, ranks and slices of tokens, with a graph to this rank's parts.

```
parts [n_m, ...] ─► rows [views, inner, ...] of each sample ─► padded ─► all ranks ─► order of the batch ─► all tokens
gradient of a part ◄──────────────────── its own rows ◄── summed over ranks if each has computed a part of the loss
```
Ranks have unequal numbers of samples: the gather has as many places on each as the largest has. A backward sends nothing if all ranks
have computed the same from what they have gathered.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from samestep.errors import JobError
from samestep.independence.roundings import limit_of_values
from samestep.runtime.axes.context.whole_parts import DIM as TOKENS
from samestep.runtime.axes.context.whole_parts import TokenRanks
from samestep.runtime.axes.data_ranks import DataRanks
from samestep.runtime.axes.rank_crossings import through
from samestep.runtime.ledger import outside_step
from samestep.strategies.whole_batch import SIZES

Indices = np.ndarray[Any, np.dtype[np.int64]]


class RowsPlace(NamedTuple):
    """The place of a micro-batch's samples in a tensor."""

    dim: int
    """Its dimension of samples; negative if it has none."""
    inner: int = 0
    """Positions of one sample side by side; 0 for all that it has."""


class StepTensor(NamedTuple):
    """One tensor that a loss is given, of each micro-batch of this rank."""

    of: Literal["outputs", "batch"]
    place_in: int
    """Its index among the tensors of the outputs, or of the batch."""
    parts: list[Tensor]
    place: RowsPlace
    is_read: bool
    is_sliced: bool = False
    """Whether this rank has the rows of some tokens."""

    @property
    def name(self) -> str:
        """The name of its gather in the program."""
        return f"loss.{self.of}.{self.place_in}"


@dataclass(frozen=True, slots=True)
class AllSamples:
    """The samples of a step on all ranks and in all micro-batches."""

    ranks: DataRanks
    tokens: TokenRanks
    pad: float | None
    """The value with which tensors of different sizes are padded; None rejects them."""
    sums_gradients: bool
    """Whether each rank computes a part of the loss, so that ranks sum the gradients."""
    sizes: list[list[int]]
    """Samples of each rank in each micro-batch."""
    order: Tensor | None
    """The place of each sample of the global batch among those gathered; None if it is the same."""

    @classmethod
    def of(
        cls,
        ranks: DataRanks,
        tokens: TokenRanks,
        pad: float | None,
        table: Sequence[Sequence[Indices]],
        *,
        everyone: Indices,
        sums_gradients: bool,
    ) -> AllSamples:
        """Return the samples of a step; `table` has those of each rank in each micro-batch, and `everyone` those of the batch in order."""
        gathered, order = np.concatenate([part for parts in table for part in parts]), None
        if not np.array_equal(gathered, everyone):
            order = np.empty(len(everyone), dtype=np.int64)
            order[np.argsort(everyone, kind="stable")] = np.argsort(gathered, kind="stable")
        sizes = [[len(part) for part in parts] for parts in table]
        return cls(ranks, tokens, pad, sums_gradients, sizes, None if order is None else torch.from_numpy(order))

    @property
    def mine(self) -> list[int]:
        """Samples of this rank in each micro-batch."""
        return self.sizes[self.ranks.index]

    @property
    def number(self) -> int:
        """The number of samples of all ranks."""
        return sum(map(sum, self.sizes))

    def own_places(self, device: torch.device) -> Tensor:
        """Return the places of this rank's samples in the global batch."""
        start = sum(map(sum, self.sizes[: self.ranks.index]))
        places = torch.arange(self.number)
        if self.order is not None:
            places[self.order] = places.clone()
        return places[start : start + sum(self.mine)].to(device)

    def gathered(self, tensors: Sequence[StepTensor]) -> list[Tensor]:
        """Return each tensor with all samples in their order, with a graph to its parts; if the loss does not read it, without values.

        Collective over `dp` and `cp`, see [Note: collective calls].
        """
        rows = {
            place: [
                _by_sample(part, tensor.place, max(1, size))[:size]
                for part, size in zip(tensor.parts, self.mine, strict=True)
            ]
            for place, tensor in enumerate(tensors)
            if tensor.is_read and tensor.place.dim >= 0
        }
        sizes = dict(zip(rows, self._agree_on_sizes(list(rows.values())), strict=True))
        for place in rows:
            if self.tokens.send and tensors[place].of == "outputs" and not tensors[place].is_sliced:
                self.tokens.check(place, tensors[place].parts[0])
        return [
            self._joined(tensor, torch.cat([self._padded(part, sizes[place]) for part in rows[place]]))
            if place in rows
            else self._of_one(tensor)
            for place, tensor in enumerate(tensors)
        ]

    def check_alike(self, tensors: Sequence[StepTensor]) -> None:
        """Compare outputs without a dimension of samples over micro-batches, ranks and their slices of the tokens.

        Raises:
            JobError: they differ; all ranks raise it.
        """
        numbers = [tensor for tensor in tensors if tensor.place.dim < 0 and tensor.is_read and tensor.of == "outputs"]
        is_uneven = len({size for of_rank in self.sizes for size in of_rank}) > 1
        for index, number in enumerate(numbers):
            if is_uneven:
                elements = torch.tensor([[float(part.numel())] for part in number.parts], device=number.parts[0].device)
                with outside_step():
                    of_parts = self.ranks.gather(elements, f"loss.elements.{index}")
                if bool((of_parts != of_parts[:1]).any()):
                    raise JobError(
                        "loss-over-batch",
                        f"the loss over the whole batch is given an output {list(number.parts[0].shape)} that depends on no sample, and has "
                        "other sizes in micro-batches of other sizes. Use a loss that makes it, and not the forward",
                    )
            numbers_here = torch.stack([part.detach().to(torch.float64).flatten() for part in number.parts])
            with outside_step():
                everything = self.tokens.rows(self.ranks.gather(numbers_here, f"loss.alike.{index}"))
            limit = min(map(limit_of_values, (number.parts[0].dtype, torch.float32)))
            off = (everything - everything[:1]).abs()
            if bool((off > limit * everything[:1].abs().clamp_min(1e-6)).any()):
                raise JobError(
                    "loss-over-batch",
                    f"the loss over the whole batch is given an output {list(number.parts[0].shape)} that has no dimension of samples "
                    f"and differs between parts of the batch by {float(off.max()):.3g}. Use one that is the same for all samples, or one with a row for each",
                )

    def _joined(self, tensor: StepTensor, rows: Tensor) -> Tensor:
        """Return a tensor of all samples from this rank's rows of it."""

        def all_rows(rows: Tensor) -> Tensor:
            gathered = self.ranks.gather_rows(rows, [sum(of_rank) for of_rank in self.sizes], tensor.name)
            return gathered if self.order is None else gathered[self.order.to(gathered.device)]

        def own_rows(gradient: Tensor) -> Tensor:
            return self._summed(gradient, tensor)[self.own_places(gradient.device)]

        rows = _from_numbers(through(_as_numbers(rows), all_rows, own_rows), tensor.parts[0])
        tensor_of_all = rows.transpose(0, 1).flatten(0, 2).movedim(0, tensor.place.dim)
        if not tensor.is_sliced:
            return tensor_of_all
        return through(tensor_of_all, lambda x: self.tokens.whole(x, tensor.name), lambda g: self.tokens.own(g, TOKENS))

    def _of_one(self, tensor: StepTensor) -> Tensor:
        """Return a tensor that is the same on all ranks; one that is not read has the shape of that of all samples, and no values."""
        first, place = tensor.parts[0], tensor.place
        if tensor.is_read:
            return through(first, lambda x: x, lambda gradient: self._summed(gradient, tensor))
        shape = list(first.shape)
        if place.dim >= 0:
            shape[place.dim] = shape[place.dim] // max(1, self.mine[0]) * self.number
        return torch.empty(shape, dtype=first.dtype, device="meta")

    def _summed(self, gradient: Tensor, tensor: StepTensor) -> Tensor:
        if not self.sums_gradients:
            return gradient
        return self.ranks.sum(gradient.clone(memory_format=torch.contiguous_format), tensor.name)

    def _agree_on_sizes(self, parts: list[list[Tensor]]) -> list[tuple[int, ...]]:
        """Return the largest sizes of each tensor over all ranks and micro-batches, without the samples.

        Raises:
            JobError: they differ, and nothing says how they are padded; all ranks raise it.
        """
        if not parts:
            return []
        shapes = [[part.shape[1:] for part in parts_of_one] for parts_of_one in parts]
        mine = [_largest(one) for one in shapes]
        differ = [any(shape != largest for shape in one) for one, largest in zip(shapes, mine, strict=True)]
        everything = [mine]
        if self.ranks.send:
            rows = [
                [*sizes, *[0] * (SIZES - 1 - len(sizes)), int(one)] for sizes, one in zip(mine, differ, strict=True)
            ]
            sent = torch.tensor(rows, dtype=torch.int64, device=parts[0][0].device)
            numbers = self.ranks.gather(sent, "loss.sizes").view(self.ranks.num_ranks, len(parts), SIZES).tolist()
            everything = [
                [tuple(row[: len(sizes)]) for row, sizes in zip(of_rank, mine, strict=True)] for of_rank in numbers
            ]
            differ = [any(of_rank[index][-1] for of_rank in numbers) for index in range(len(parts))]
        agreed = [_largest([of_rank[index] for of_rank in everything]) for index in range(len(parts))]
        for index, sizes in enumerate(agreed):
            if (self.pad is None or self.tokens.send) and (
                differ[index] or any(of_rank[index] != sizes for of_rank in everything)
            ):
                least = tuple(map(min, *(of_rank[index] for of_rank in everything), *shapes[index]))
                some = (
                    f"sizes {list(least[1:])} and {list(sizes[1:])}"
                    if least != sizes
                    else f"sizes up to {list(sizes[1:])}"
                )
                raise JobError(
                    "loss-over-batch",
                    f"the loss over the whole batch is given tensors of {some} by different parts of it. Use samestep.whole_batch(loss, pad=0.0), which pads them, or samples of one size",
                )
        return agreed

    def _padded(self, part: Tensor, sizes: tuple[int, ...]) -> Tensor:
        """Return a part of the samples, padded to the sizes that all ranks have agreed on."""
        if tuple(part.shape[1:]) == sizes:
            return part
        missing = [length for old, new in zip(part.shape[:0:-1], sizes[::-1], strict=True) for length in (0, new - old)]
        return F.pad(part, missing, value=self.pad)


def _by_sample(tensor: Tensor, place: RowsPlace, num_samples: int) -> Tensor:
    """Return a tensor as [samples, views, positions of a sample, ...]."""
    rows = tensor.movedim(place.dim, 0)
    inner = place.inner or len(rows) // num_samples
    return rows.unflatten(0, (-1, num_samples, inner)).transpose(0, 1)


def _as_numbers(tensor: Tensor) -> Tensor:
    """Return a tensor as floating numbers or bytes, which every backend gathers."""
    if tensor.is_complex():
        return torch.view_as_real(tensor)
    return tensor if tensor.is_floating_point() else tensor.contiguous().view(torch.uint8)


def _from_numbers(numbers: Tensor, like: Tensor) -> Tensor:
    """Return the tensor that `_as_numbers` has changed."""
    if like.is_complex():
        return torch.view_as_complex(numbers.contiguous())
    return numbers if like.is_floating_point() else numbers.contiguous().view(like.dtype)


def _largest(shapes: Sequence[Sequence[int]]) -> tuple[int, ...]:
    return tuple(map(max, zip(*shapes, strict=True)))
