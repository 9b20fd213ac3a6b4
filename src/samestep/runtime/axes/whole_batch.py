"""What a step's samples have on all ranks and in all micro-batches, in their order (twin of `strategies/whole_batch.py`).

Let rank r have n_r of the B samples, and z_i be what the model gives for sample i. A loss L(z_1, ..., z_B) is computed by every rank
on what all have gathered, as a constant of which it takes the gradient G = dL/dz. By the chain rule

    dL/dw = sum over ranks r, sum over i of r,  (dz_i/dw)^T G_i

so a rank goes back through its own samples with its own slice of G, and what a step does anyway, to sum the gradients of ranks and
micro-batches, gives dL/dw: nothing is sent in the backward. The sum and the count of a whole batch enter the step's once, with the
first micro-batch of the first rank; the gradients are divided by the count where those of any loss are.

    gather      places for as many samples as the largest rank has, cut to n_r; then the order of the global batch
    a tensor    [views, samples, positions of a sample, ...] along the dimension in which the trace has found the samples
    without     a dimension of samples (a temperature): one of all, equal ones; its gradient enters with the first sample's rank

Empty places, where a rank runs a sample that does not count, are no part of what the loss sees.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from samestep.building.loss import with_graph
from samestep.building.loss_result import Amount, Loss, LossResult, loss_result
from samestep.building.loss_scope import OverBatch, of_rows
from samestep.building.over_samples import within
from samestep.errors import JobError
from samestep.independence.roundings import limit_of_values
from samestep.program.program import Program
from samestep.runtime.axes import loss_rows, precision
from samestep.runtime.axes.batch_values import order_of
from samestep.runtime.axes.context.whole_tokens import DIM as TOKENS
from samestep.runtime.axes.context.whole_tokens import TokenRanks
from samestep.runtime.axes.data_ranks import DataRanks
from samestep.runtime.axes.forward_only import forward_only
from samestep.runtime.axes.loss_terms import Indices, Shares
from samestep.runtime.axes.sample_rows import RowsPlace, as_numbers, by_sample, from_numbers, joined
from samestep.runtime.axes.words_of_others import without_words
from samestep.runtime.ledger import outside_step
from samestep.runtime.processes.mesh import Mesh
from samestep.schedules import TaskKind
from samestep.state.snapshot import KeptValues
from samestep.strategies.whole_batch import SIZES, reads_of
from samestep.trees import map_tensors, tensors_in


class _WithGradients(torch.autograd.Function):
    """A number whose gradient by some tensors is given."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, gradients: list[Tensor], *tensors: Tensor) -> Tensor:
        ctx.gradients = gradients
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *given: Tensor) -> Any:
        return None, None, *(given[0].to(one.dtype) * one for one in ctx.gradients)


class _Kept(NamedTuple):
    """What one micro-batch gives to the loss of all."""

    outputs: Any
    batch: Any


class _Tensor(NamedTuple):
    """One tensor that the loss is given, of each micro-batch of this rank."""

    of: Literal["outputs", "batch"]
    parts: list[Tensor]
    place: RowsPlace
    is_read: bool


@dataclass(frozen=True, slots=True)
class _Result:
    """The loss of the whole batch, and its gradient by the tensors of the outputs."""

    found: LossResult
    number: Amount
    """The sum and the count that stand for all terms."""
    gradients: list[Tensor | None]
    """Of this rank's samples, as `by_sample` has them, or of the whole tensor where it has no samples."""


class WholeBatch:
    """The scope of a loss over all samples of the step."""

    is_whole = True
    reads_ahead = False
    moved = ""

    def __init__(self, program: Program, mesh: Mesh, asked: OverBatch, *, keeps_state: bool) -> None:
        """Make it for a rank; `keeps_state` is whether forwards change anything that later ones read."""
        step = program.step
        self._ranks, self._pad, self._keeps_state = DataRanks(mesh, step.layout.dp), asked.pad, keeps_state
        self._by_rows = asked.rows
        self._tokens = TokenRanks(program, mesh)
        self._is_alone = not (self._ranks.send or self._tokens.send)
        self._is_first = self._ranks.index == self._tokens.index == 0
        self._sliced: int | None = None
        """The index of the output of which this rank has the rows of some tokens."""
        self._reads = {(one.of, one.index): one for one in reads_of(step)}
        self._is_known = all(one.rows is not None for one in self._reads.values())
        self._batch, self._num_microbatches = step.global_batch, step.num_microbatches
        self._groups: dict[int, list[Sequence[Indices]]] = {}
        """The parts of each batch that is evaluated, by the index of its last one."""
        self._num_alone = sum(task.kind is TaskKind.OUTPUTS for task in program.tasks)
        self.left = 0
        """Forwards for outputs alone that the step has left."""
        self._state: KeptValues | None = None
        self._sizes: list[list[int]] = []
        """Samples of each rank in each micro-batch."""
        self._order: Tensor | None = None
        """The place of each sample of the global batch among those gathered; None where it is the same."""
        self._kept: dict[int, _Kept] = {}
        self._places: list[RowsPlace] = []
        self._result: _Result | None = None
        self._number: Amount | None = None
        self._num_computed = 0
        self.graph: tuple[Tensor, list[Tensor]] | None = None
        """In a step that tries the loss its sum with its graph, and the outputs at which the graph should end."""

    def begin_step(self, shares: Shares) -> None:
        """Begin a step."""
        num_ranks = self._ranks.num_ranks
        self._begin([shares(rank, num_ranks, self._num_microbatches) for rank in range(num_ranks)], shares(0, 1, 1)[0])

    def _begin(self, table: Sequence[Sequence[Indices]], everything: Indices) -> None:
        """Note which samples of all, `everything`, each rank has in each micro-batch."""
        self._sizes = [[len(part) for part in parts] for parts in table]
        gathered = np.concatenate([part for parts in table for part in parts])
        self._order = order_of(gathered, everything)
        self._kept, self._result, self.left = {}, None, self._num_alone

    @contextmanager
    def outputs_alone(self, model: nn.Module, *, takes_gradients: bool) -> Iterator[None]:
        """Return the context of a forward that no backward follows; after the last one the model is as it was before the first."""
        if self.left == self._num_alone and self._keeps_state:
            self._state = KeptValues(model, weights=False)
        with forward_only(takes_gradients=takes_gradients):
            yield
        self.left -= 1
        if not self.left and self._state is not None:
            self._state.restore(generators=False)
            self._state = None

    def keep(self, microbatch: int, outputs: Any, part: Any, loss: Loss | None = None) -> None:
        """Keep what a micro-batch gives to the loss; after the last one compute `loss` and its gradient.

        Collective over `dp`, see [Note: collective calls].
        """
        self._kept[microbatch] = _Kept(map_tensors(precision.for_loss(outputs), Tensor.detach), part)
        if loss is not None and len(self._kept) == len(self._mine):
            self._result = self._compute(loss)

    def result(self, microbatch: int, outputs: Any, part: Any, loss: Loss) -> LossResult:
        """Return the result of the whole loss with the first micro-batch of the first rank, and zeros with all others.

        `summed` then returns a number whose gradient by the outputs of this micro-batch is that of the whole loss.

        Collective over `dp`, see [Note: collective calls].
        """
        if not self._num_alone and self._is_alone:
            return self._plain(outputs, part, loss)
        if not self._num_alone:
            self.keep(microbatch, outputs, part, loss)
        assert self._result is not None, "all micro-batches have given their outputs"
        result, is_first = self._result, self._is_first and microbatch == 0
        enters = self._enters and self._tokens.index == 0 and microbatch == 0
        given = list(zip(tensors_in(outputs), self._places, result.gradients, strict=True))
        taken = [
            one for one in given if one[0].requires_grad and one[2] is not None
        ]  # an output that is not read gets none
        gradients = [self._slice(microbatch, *one, is_first=is_first) for one in taken]
        total, count = (one * enters for one in result.number)
        if taken:
            total = _WithGradients.apply(total, gradients, *(one[0] for one in taken))
        self._number = total, count
        return _times(result.found, enters)

    def summed(self, found: LossResult, outputs: Any, own: Any, others: Callable[[], Iterable[Any]]) -> Amount:
        """Return the sum and the count that `result` gives for a micro-batch."""
        assert self._number is not None, "the result of this micro-batch"
        number, self._number = self._number, None
        return number

    def ends(self, number: int, at_once: int) -> list[int]:
        """Return where the parts end in which so many samples are evaluated: each batch of the job ends with one."""
        return sorted({*range(at_once, number, at_once), *range(self._batch, number, self._batch), number})

    def begin_evaluation(self, parts: Sequence[Sequence[Indices]]) -> None:
        """Begin an evaluation of samples in parts, each divided among the ranks, of which those of a batch are seen together."""
        self._groups, self._kept, group = {}, {}, list[Sequence[Indices]]()
        for index, part in enumerate(parts):
            group.append(part)
            if sum(len(rows) for one in group for rows in one) >= self._batch or index + 1 == len(parts):
                self._groups[index] = group
                group = []

    def evaluated(self, index: int, outputs: Any, part: Any, loss: Loss) -> dict[str, Amount]:
        """Return the sums and counts of the batch that a part ends, or nothing: zeros on other ranks than the first.

        Collective over `dp`, see [Note: collective calls].
        """
        if (group := self._groups.get(index)) is None:
            self._kept[len(self._kept)] = _Kept(outputs, part)
            return {}
        kept = [*self._kept.values(), _Kept(outputs, part)]
        table = [[one[rank] for one in group] for rank in range(self._ranks.num_ranks)]
        self._begin(table, np.concatenate([rows for one in group for rows in one]))
        self._kept = dict(enumerate(kept))
        found = _times(self._compute(loss, differentiates=False).found, self._enters)
        self._kept = {}
        return {**found.terms, **found.values}

    @property
    def _enters(self) -> bool:
        """Whether the sums that this rank computes are added to the step's: those of its rows, or of all rows on one rank."""
        return self._by_rows or self._ranks.index == 0

    @property
    def _mine(self) -> list[int]:
        return self._sizes[self._ranks.index]

    def _plain(self, outputs: Any, part: Any, loss: Loss) -> LossResult:
        """Return the result of the loss of one rank with one micro-batch."""
        found = loss_result(loss(outputs, part))
        self._number = total, _ = _one_number(found, sum(self._mine))
        self.graph = (total, tensors_in(outputs)) if total.requires_grad else None
        return found

    def _slice(
        self, microbatch: int, output: Tensor, place: RowsPlace, gradient: Tensor | None, *, is_first: bool
    ) -> Tensor:
        """Return the part of a gradient that belongs to an output of a micro-batch."""
        size = self._mine[microbatch]
        if gradient is None or not (size if place.dim >= 0 else is_first):
            return torch.zeros_like(output)
        if place.dim < 0:
            return gradient
        start = sum(self._mine[:microbatch])
        like = by_sample(output, place, size)
        window = gradient[start : start + size][tuple(slice(0, length) for length in like.shape)]
        return joined(window, place)

    # -- gather, compute ---------------------------------------------------------------------------

    def _compute(self, loss: Loss, *, differentiates: bool = True) -> _Result:
        """Return the loss on the outputs and the batch of all samples, and its gradient by this rank's outputs."""
        tries = self._num_computed & (self._num_computed - 1) == 0  # the same on all ranks
        self._num_computed += 1
        self._sliced = self._tokens.sliced(self._kept[0].outputs)
        tensors = [*self._tensors("outputs"), *self._tensors("batch")]
        self._places = [one.place for one in tensors if one.of == "outputs"]
        if tries:
            self._check_alike(tensors)
        rows = torch.zeros(1, dtype=torch.int64, device=tensors[0].parts[0].device)
        with of_rows(rows) if self._by_rows else nullcontext():
            given, result = self._first_call(loss, tensors)
        if self._by_rows:
            return self._compute_rows(loss, given, tries=tries, differentiates=differentiates)
        number = _one_number(result, sum(map(sum, self._sizes)))
        outputs = given[: len(self._places)]
        if not differentiates:
            return _Result(result, number, [])
        roots = [one for one in outputs if one.requires_grad]
        total = with_graph(number[0], result.counted, roots)
        self.graph = (total, roots) if tries else None
        found = iter(torch.autograd.grad(total, roots, allow_unused=True))
        gradients = [next(found) if one.requires_grad else None for one in outputs]
        return _Result(result, (total.detach(), number[1]), self._own_parts(gradients))

    def _compute_rows(self, loss: Loss, given: list[Tensor], *, tries: bool, differentiates: bool) -> _Result:
        """Return the loss of the rows of this rank's samples, and the gradient of that of all rows by its outputs."""
        outputs = given[: len(self._places)]
        roots = [one for one in outputs if one.requires_grad]
        call = functools.partial(self._call, loss, given, len(outputs))
        if tries:
            self.graph = loss_rows.tried(call, sum(map(sum, self._sizes)), roots)
        rows = self._places_of_mine(roots[0].device).split(self._mine)
        found, total, parts = loss_rows.computed(call, rows, roots, differentiates=differentiates)
        if not differentiates:
            return _Result(found, found.only, [])
        own = iter(parts)
        gradients: list[Tensor | None] = []
        for index, one in enumerate(outputs):
            part = next(own) if one.requires_grad else None
            if one.requires_grad:  # ranks sum what the program lists, though a loss does not use all that it reads
                summed = self._ranks.sum(
                    torch.zeros_like(one) if part is None else part.contiguous(), f"loss.outputs.{index}"
                )
                part = None if part is None else summed
            gradients.append(part)
        return _Result(found, (total, found.only[1]), self._own_parts(gradients))

    def _first_call(self, loss: Loss, tensors: list[_Tensor]) -> tuple[list[Tensor], LossResult]:
        """Gather what the loss reads and call it; return the tensors that it is given, and its result."""
        given = self._gathered(tensors)
        try:
            result = self._call(loss, given, len(self._places))
            if not any(one.is_meta for amount in result.amounts.values() for one in amount):
                return given, result
        except JobError:
            if all(one.is_read for one in tensors):
                raise
        self._is_known = False  # it reads what the trace did not show
        with outside_step():
            given = self._gathered([one._replace(is_read=True) for one in tensors])
        return given, self._call(loss, given, len(self._places))

    def _own_parts(self, gradients: list[Tensor | None]) -> list[Tensor | None]:
        """Return this rank's part of the gradient of each output."""
        return [
            self._own_part(one, place, is_sliced=index == self._sliced) if one is not None and place.dim >= 0 else one
            for index, (one, place) in enumerate(zip(gradients, self._places, strict=True))
        ]

    def _call(self, loss: Loss, given: list[Tensor], num_outputs: int) -> LossResult:
        """Call the loss with tensors of all samples in the places of those of the first micro-batch."""
        outputs, batch = iter(given[:num_outputs]), iter(given[num_outputs:])
        first = self._kept[0]
        whole = map_tensors(first.batch, lambda _: next(batch))
        if self._ranks.send or len(self._kept) > 1:
            whole = without_words(whole)
        with torch.enable_grad(), within(None):  # it sees all samples already
            return loss_result(loss(map_tensors(first.outputs, lambda _: next(outputs)), whole))

    def _tensors(self, of: Literal["outputs", "batch"]) -> Iterator[_Tensor]:
        """Yield the tensors of the outputs or of the batch, with the places of samples that the trace or their shapes show."""
        kept = [self._kept[index] for index in sorted(self._kept)]
        columns = zip(*(tensors_in(one.outputs if of == "outputs" else one.batch) for one in kept), strict=True)
        for index, parts in enumerate(columns):
            known = self._reads.get((of, index))
            is_read = known is not None or not self._is_known or self._is_alone
            place = RowsPlace(*known.rows) if known is not None and known.rows is not None else self._place(parts[0])
            yield _Tensor(of, list(parts), place, is_read)

    def _place(self, tensor: Tensor) -> RowsPlace:
        """Return where the shape of a tensor of the first micro-batch shows its samples."""
        size = max(1, self._mine[0])
        if size in tensor.shape:
            return RowsPlace(tensor.shape.index(size), 1)
        return RowsPlace(0) if tensor.dim() and tensor.shape[0] and tensor.shape[0] % size == 0 else RowsPlace(-1)

    def _check_alike(self, tensors: list[_Tensor]) -> None:
        """Compare outputs without a dimension of samples over micro-batches and ranks.

        Raises:
            JobError: they differ; all ranks raise it.
        """
        numbers = [one for one in tensors if one.place.dim < 0 and one.is_read and one.of == "outputs"]
        for index, one in enumerate(numbers):
            mine = torch.stack([part.detach().to(torch.float64).flatten() for part in one.parts])
            with outside_step():
                everything = self._ranks.gather(mine, f"loss.alike.{index}")
            limit = min(map(limit_of_values, (one.parts[0].dtype, torch.float32)))
            off = (everything - everything[:1]).abs()
            if bool((off > limit * everything[:1].abs().clamp_min(1e-6)).any()):
                raise JobError(
                    f"the loss over the whole batch is given an output {list(one.parts[0].shape)} that has no dimension of samples "
                    f"and differs between micro-batches by {float(off.max()):.3g}: one that is the same for all samples works, and so "
                    "does one with a row for each"
                )

    def _gathered(self, tensors: list[_Tensor]) -> list[Tensor]:
        """Return each tensor with all samples of the step in their order; of what the loss does not read only the shape."""
        parts = {
            index: [
                as_numbers(by_sample(part, one.place, max(1, size)))[:size]
                for part, size in zip(one.parts, self._mine, strict=True)
            ]
            for index, one in enumerate(tensors)
            if one.is_read and one.place.dim >= 0
        }
        largest = self._agree_on_sizes(list(parts.values()))
        sizes = dict(zip(parts, largest, strict=True))
        found = []
        for index, one in enumerate(tensors):
            is_sliced = index == self._sliced
            if self._tokens.send and index in parts and one.of == "outputs" and not is_sliced:
                self._tokens.check(index, one.parts[0])
            if index in parts:
                name = f"loss.{one.of}.{index - (0 if one.of == 'outputs' else len(self._places))}"
                rows = torch.cat([self._padded(part, sizes[index]) for part in parts[index]])
                value = joined(from_numbers(self._all_rows(rows, name), one.parts[0]), one.place)
                value = self._tokens.whole(value, name) if is_sliced else value
            elif one.is_read:
                value = one.parts[0]
            else:
                value = self._shape_alone(one)
            found.append(value.requires_grad_() if one.of == "outputs" and _takes_gradient(value) else value)
        return found

    def _shape_alone(self, one: _Tensor) -> Tensor:
        """Return a tensor without values in the shape of that of all samples."""
        rows, shape = sum(map(sum, self._sizes)), list(one.parts[0].shape)
        if one.place.dim >= 0:
            shape[one.place.dim] = shape[one.place.dim] // max(1, self._mine[0]) * rows
        return torch.empty(shape, dtype=one.parts[0].dtype, device="meta")

    def _agree_on_sizes(self, parts: list[list[Tensor]]) -> list[tuple[int, ...]]:
        """Return the largest sizes of each tensor over all ranks and micro-batches, without the samples.

        Raises:
            JobError: they differ, and nothing says how they are padded; all ranks raise it.
        """
        if not parts:
            return []
        shapes = [[part.shape[1:] for part in one] for one in parts]
        mine = [_largest(one) for one in shapes]
        differ = [any(shape != largest for shape in one) for one, largest in zip(shapes, mine, strict=True)]
        everything = [mine]
        if self._ranks.send:
            rows = [
                [*sizes, *[0] * (SIZES - 1 - len(sizes)), int(one)] for sizes, one in zip(mine, differ, strict=True)
            ]
            sent = torch.tensor(rows, dtype=torch.int64, device=parts[0][0].device)
            numbers = self._ranks.gather(sent, "loss.sizes").view(self._ranks.num_ranks, len(parts), SIZES).tolist()
            everything = [
                [tuple(row[: len(sizes)]) for row, sizes in zip(of_rank, mine, strict=True)] for of_rank in numbers
            ]
            differ = [any(of_rank[index][-1] for of_rank in numbers) for index in range(len(parts))]
        found = [_largest([of_rank[index] for of_rank in everything]) for index in range(len(parts))]
        for index, sizes in enumerate(found):
            if (self._pad is None or self._tokens.send) and (
                differ[index] or any(of_rank[index] != sizes for of_rank in everything)
            ):
                least = tuple(map(min, *(of_rank[index] for of_rank in everything), *shapes[index]))
                some = (
                    f"sizes {list(least[1:])} and {list(sizes[1:])}"
                    if least != sizes
                    else f"sizes up to {list(sizes[1:])}"
                )
                raise JobError(
                    f"the loss over the whole batch is given tensors of {some} by different parts of it: samestep.whole_batch(loss, pad=0.0) pads them, and samples of one size work"
                )
        return found

    def _padded(self, part: Tensor, sizes: tuple[int, ...]) -> Tensor:
        """Return a part of the samples, padded to the sizes that all ranks have agreed on."""
        if tuple(part.shape[1:]) == sizes:
            return part
        missing = [length for old, new in zip(part.shape[:0:-1], sizes[::-1], strict=True) for length in (0, new - old)]
        return F.pad(part, missing, value=self._pad)

    def _all_rows(self, mine: Tensor, owner: str) -> Tensor:
        """Return the rows of all samples, in their order, from those of this rank's."""
        mine = self._ranks.gather_rows(mine, [sum(of_rank) for of_rank in self._sizes], owner)
        return mine if self._order is None else mine[self._order.to(mine.device)]

    def _own_part(self, gradient: Tensor, place: RowsPlace, *, is_sliced: bool) -> Tensor:
        """Return this rank's samples, and tokens, of a gradient of all, as `by_sample` has them."""
        gradient = self._tokens.own(gradient, TOKENS) if is_sliced else gradient
        rows = by_sample(gradient, place, sum(map(sum, self._sizes)))
        return rows[self._places_of_mine(rows.device)]

    def _places_of_mine(self, device: torch.device) -> Tensor:
        """Return the places of this rank's samples in the global batch."""
        start = sum(map(sum, self._sizes[: self._ranks.index]))
        places = torch.arange(sum(map(sum, self._sizes)))
        if self._order is not None:
            places[self._order] = places.clone()
        return places[start : start + sum(self._mine)].to(device)


def _one_number(found: LossResult, num_samples: int) -> Amount:
    """Return the sum and the count that stand for all terms of a whole batch: several are added up as means."""
    if len(found.terms) == 1:
        return found.only
    factors = [torch.where(count > 0, num_samples / count.clamp(min=1e-300), 0.0) for _, count in found.terms.values()]
    total = torch.stack([part * factor for (part, _), factor in zip(found.terms.values(), factors, strict=True)]).sum()
    return total, (found.counted > 0) * float(num_samples)


def _times(found: LossResult, factor: bool) -> LossResult:
    """Return a result without a graph, times 0 or 1."""
    parts = (
        {name: (total.detach() * factor, count * factor) for name, (total, count) in part.items()}
        for part in (found.terms, found.values)
    )
    return LossResult(*parts)


def _largest(shapes: Sequence[Sequence[int]]) -> tuple[int, ...]:
    return tuple(map(max, zip(*shapes, strict=True)))


def _takes_gradient(tensor: Tensor) -> bool:
    return (tensor.is_floating_point() or tensor.is_complex()) and not tensor.is_meta
