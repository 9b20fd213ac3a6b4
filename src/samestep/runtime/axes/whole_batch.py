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
from torch import Tensor, nn

from samestep.building.loss import with_graph
from samestep.building.loss_result import Amount, Loss, LossResult, loss_result
from samestep.building.over_samples import OverBatch, of_rows, within
from samestep.errors import JobError
from samestep.independence.roundings import limit_of_values
from samestep.program.program import Program
from samestep.runtime.axes import precision
from samestep.runtime.axes.all_samples import AllSamples, RowsPlace, StepTensor
from samestep.runtime.axes.context.whole_parts import TokenRanks
from samestep.runtime.axes.data_ranks import DataRanks
from samestep.runtime.axes.forward_only import forward_only
from samestep.runtime.axes.loss_terms import Indices, Shares
from samestep.runtime.ledger import outside_step
from samestep.runtime.processes.mesh import Mesh
from samestep.schedules import TaskKind
from samestep.state.snapshot import KeptValues
from samestep.strategies.whole_batch import reads_of
from samestep.trees import map_tensors, tensors_in


class _WithGradients(torch.autograd.Function):
    """A number whose gradient by some tensors is given."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, gradients: list[Tensor], *tensors: Tensor) -> Tensor:
        ctx.gradients = gradients
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *of_result: Tensor) -> Any:
        return None, None, *(of_result[0].to(gradient.dtype) * gradient for gradient in ctx.gradients)


class _Kept(NamedTuple):
    """The values that one micro-batch gives to the loss of all."""

    outputs: Any
    batch: Any


@dataclass(frozen=True, slots=True)
class _Result:
    """The loss of the whole batch, and its gradient by the tensors of this rank's outputs."""

    found: LossResult
    number: Amount
    """The sum and the count that stand for all terms."""
    gradients: list[list[Tensor | None] | None]
    """Of each tensor, by micro-batch; None for one that the loss does not use."""


class _Words:
    """The words of all samples; a rank has those of its own samples alone, so that a loss which reads them is refused."""

    def _refuse(self, *_: Any) -> Any:
        raise JobError(
            "loss-over-batch",
            "the loss over the full batch reads strings of the batch, and each rank has the strings of its own samples only. Use tensors of numbers instead, such as class indices",
        )

    __getitem__ = __iter__ = __len__ = __bool__ = __contains__ = __getattr__ = _refuse


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
        self._reads = {(tensor.of, tensor.index): tensor for tensor in reads_of(step)}
        self._is_known = all(tensor.rows is not None for tensor in self._reads.values())
        self._batch, self._num_microbatches = step.global_batch, step.num_microbatches
        self._groups: dict[int, list[Sequence[Indices]]] = {}
        """The parts of each batch that is evaluated, by the index of its last one."""
        self._num_alone = sum(task.kind is TaskKind.OUTPUTS for task in program.tasks)
        self.left = 0
        """Forwards for outputs alone that the step has left."""
        self._state: KeptValues | None = None
        self._all: AllSamples
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
        self._all = self._samples_of(table, everything)
        self._kept, self._result, self.left = {}, None, self._num_alone

    def _samples_of(self, table: Sequence[Sequence[Indices]], everyone: Indices) -> AllSamples:
        return AllSamples.of(
            self._ranks, self._tokens, self._pad, table, everyone=everyone, sums_gradients=self._by_rows
        )

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
        self._kept[microbatch] = _Kept(map_tensors(precision.for_loss(outputs), _leaf), part)
        if loss is not None and len(self._kept) == len(self._all.mine):
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
        tensors, gradients = list[Tensor](), list[Tensor]()
        for output, parts, place in zip(tensors_in(outputs), result.gradients, self._places, strict=True):
            if output.requires_grad and parts is not None:  # an output that is not read gets none
                gradient = parts[microbatch] if place.dim >= 0 or is_first else None
                tensors.append(output)
                gradients.append(torch.zeros_like(output) if gradient is None else gradient)
        total, count = (number * enters for number in result.number)
        if tensors:
            total = _WithGradients.apply(total, gradients, *tensors)
        self._number = total, count
        return _times(result.found, enters)

    def summed(self, result: LossResult, outputs: Any, part: Any, others: Callable[[], Iterable[Any]]) -> Amount:
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
            if sum(len(rows) for shares in group for rows in shares) >= self._batch or index + 1 == len(parts):
                self._groups[index] = group
                group = []

    def evaluated(self, index: int, outputs: Any, part: Any, loss: Loss) -> dict[str, Amount]:
        """Return the sums and counts of the batch that a part ends, or nothing: zeros on other ranks than the first.

        Collective over `dp`, see [Note: collective calls].
        """
        if (group := self._groups.get(index)) is None:
            self._kept[len(self._kept)] = _Kept(outputs, part)
            return {}
        values = [*self._kept.values(), _Kept(outputs, part)]
        table = [[shares[rank] for shares in group] for rank in range(self._ranks.num_ranks)]
        self._begin(table, np.concatenate([rows for shares in group for rows in shares]))
        self._kept = dict(enumerate(values))
        result = _times(self._compute(loss, differentiates=False).found, self._enters)
        self._kept = {}
        return {**result.terms, **result.values}

    @property
    def _enters(self) -> bool:
        """Whether the sums that this rank computes are added to the step's: those of its rows, or of all rows on one rank."""
        return self._by_rows or self._ranks.index == 0

    def _plain(self, outputs: Any, part: Any, loss: Loss) -> LossResult:
        """Return the result of the loss of one rank with one micro-batch."""
        result = loss_result(loss(outputs, part))
        self._number = total, _ = _one_number(result, self._all.number)
        self.graph = (total, tensors_in(outputs)) if total.requires_grad else None
        return result

    # -- gather, compute ---------------------------------------------------------------------------

    def _compute(self, loss: Loss, *, differentiates: bool = True) -> _Result:
        """Return the loss on the outputs and the batch of all samples, and its gradient by this rank's outputs."""
        tries = self._num_computed & (self._num_computed - 1) == 0  # the same on all ranks
        self._num_computed += 1
        tensors = [*self._tensors("outputs"), *self._tensors("batch")]
        outputs = [tensor for tensor in tensors if tensor.of == "outputs"]
        self._places = [tensor.place for tensor in outputs]
        if tries:
            self._all.check_alike(tensors)
        rows = torch.zeros(1, dtype=torch.int64, device=tensors[0].parts[0].device)
        with of_rows(rows) if self._by_rows else nullcontext():
            gathered, leaves, result = self._first_call(loss, tensors)
        roots = [tensor for tensor in leaves[: len(outputs)] if tensor.requires_grad]
        if self._by_rows:
            result, number, grads = self._of_rows(loss, leaves, roots, tries=tries, differentiates=differentiates)
        else:
            number, grads = _one_number(result, self._all.number), [None] * len(roots)
            if differentiates:
                total = with_graph(number[0], result, roots)
                self.graph = (total, roots) if tries else None
                grads = list(torch.autograd.grad(total, roots, allow_unused=True))
                number = total.detach(), number[1]
        if not differentiates:
            return _Result(result, number, [])
        of_roots = iter(grads)
        gradients = [next(of_roots) if tensor.requires_grad else None for tensor in leaves[: len(outputs)]]
        return _Result(result, number, [*map(self._of_parts, outputs, gathered, gradients)])

    def _of_rows(
        self, loss: Loss, leaves: list[Tensor], roots: list[Tensor], *, tries: bool, differentiates: bool
    ) -> tuple[LossResult, Amount, list[Tensor | None]]:
        """Return the loss of the rows of this rank's samples, its sum and count, and its gradients by the roots."""
        call = functools.partial(self._call, loss, leaves)
        if tries:
            self.graph = tried(call, self._all.number, roots)
        rows = self._all.own_places(roots[0].device).split(self._all.mine)
        result, total, gradients = computed(call, rows, roots, differentiates=differentiates)
        return result, (total, result.only[1]) if differentiates else result.only, gradients

    def _of_parts(self, tensor: StepTensor, gathered: Tensor, gradient: Tensor | None) -> list[Tensor | None] | None:
        """Return the gradient by each part of an output from that by all samples; None if the loss does not use it.

        Collective over `dp` if each rank computes some rows of the loss, see [Note: collective calls].
        """
        if not gathered.requires_grad or (gradient is None and not self._by_rows):
            return None
        above = torch.zeros_like(gathered) if gradient is None else gradient  # ranks sum all that the program lists
        parts = torch.autograd.grad(gathered, tensor.parts, above, allow_unused=True)
        return None if gradient is None else list(parts)

    def _first_call(self, loss: Loss, tensors: list[StepTensor]) -> tuple[list[Tensor], list[Tensor], LossResult]:
        """Gather the tensors that the loss reads and call it; return them with a graph to this rank's, as the loss is given them, and its result."""
        gathered, leaves = self._gathered(tensors)
        try:
            result = self._call(loss, leaves)
            if not any(number.is_meta for amount in result.amounts.values() for number in amount):
                return gathered, leaves, result
        except JobError:
            if all(tensor.is_read for tensor in tensors):
                raise
        self._is_known = False  # it reads what the trace did not show
        with outside_step():
            gathered, leaves = self._gathered([tensor._replace(is_read=True) for tensor in tensors])
        return gathered, leaves, self._call(loss, leaves)

    def _gathered(self, tensors: list[StepTensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Return the tensors of all samples with a graph to this rank's, and as leaves."""
        with torch.enable_grad():
            gathered = self._all.gathered(tensors)
        return gathered, [
            _leaf(rows) if tensor.of == "outputs" else rows for tensor, rows in zip(tensors, gathered, strict=True)
        ]

    def _call(self, loss: Loss, leaves: list[Tensor]) -> LossResult:
        """Call the loss with tensors of all samples in the places of those of the first micro-batch."""
        first, tensors = self._kept[0], iter(leaves)
        outputs = map_tensors(first.outputs, lambda _: next(tensors))
        batch = map_tensors(first.batch, lambda _: next(tensors))
        if self._ranks.send or len(self._kept) > 1:
            batch = _without_words(batch)
        with torch.enable_grad(), within(None):  # it sees all samples already
            return loss_result(loss(outputs, batch))

    def _tensors(self, of: Literal["outputs", "batch"]) -> Iterator[StepTensor]:
        """Yield the tensors of the outputs or of the batch, with the places of samples that the trace or their shapes show."""
        values = [self._kept[index] for index in sorted(self._kept)]
        sliced = self._tokens.sliced(*self._kept[0]) if of == "outputs" else None
        columns = zip(*(tensors_in(value.outputs if of == "outputs" else value.batch) for value in values), strict=True)
        for index, parts in enumerate(columns):
            known = self._reads.get((of, index))
            is_read = known is not None or not self._is_known or self._is_alone
            place = RowsPlace(*known.rows) if known is not None and known.rows is not None else self._place(parts[0])
            yield StepTensor(of, index, list(parts), place, is_read, index == sliced)

    def _place(self, tensor: Tensor) -> RowsPlace:
        """Return where the shape of a tensor of the first micro-batch shows its samples."""
        size = max(1, self._all.mine[0])
        if size in tensor.shape:
            return RowsPlace(tensor.shape.index(size), 1)
        return RowsPlace(0) if tensor.dim() and tensor.shape[0] and tensor.shape[0] % size == 0 else RowsPlace(-1)


def _leaf(tensor: Tensor) -> Tensor:
    """Return a tensor without its graph, by which a loss may be differentiated."""
    is_number = (tensor.is_floating_point() or tensor.is_complex()) and not tensor.is_meta
    return tensor.detach().requires_grad_(is_number)


def _without_words(value: Any) -> Any:
    """Return a nested value with lists of words replaced by ones that cannot be read."""
    if isinstance(value, dict):
        return {name: _without_words(item) for name, item in value.items()}
    if type(value) in (list, tuple):
        is_words = bool(value) and all(isinstance(item, str) for item in value)
        return _Words() if is_words else type(value)(map(_without_words, value))
    return value


def _one_number(result: LossResult, num_samples: int) -> Amount:
    """Return the sum and the count that stand for all terms of a whole batch: several are added up as means."""
    if len(result.terms) == 1:
        return result.only
    factors = [torch.where(count > 0, num_samples / count.clamp(min=1e-300), 0.0) for _, count in result.terms.values()]
    total = torch.stack([part * factor for (part, _), factor in zip(result.terms.values(), factors, strict=True)]).sum()
    return total, (result.counted > 0) * float(num_samples)


def _times(result: LossResult, factor: bool) -> LossResult:
    """Return a result without a graph, times 0 or 1."""
    terms, values = (
        {name: (total.detach() * factor, count * factor) for name, (total, count) in part.items()}
        for part in (result.terms, result.values)
    )
    return LossResult(terms, values)


MOST_TRIED = 8
"""Rows on which a loss is tried."""


def computed(
    loss: Callable[[], LossResult], parts: Sequence[Tensor], roots: Sequence[Tensor], *, differentiates: bool
) -> tuple[LossResult, Tensor, list[Tensor | None]]:
    """Return the result of the rows in some parts, their sum, and its gradients by the roots, None of one that the loss does not use;
    a part without rows adds nothing.

    If a loss is a sum over rows, L = l_1 + ... + l_B, where l_i compares sample i with all others, a rank with the rows R computes
    the sum of l_i over i in R, on the outputs z of all samples, with its gradient by all of them, and ranks sum these gradients:

        dL/dz = sum over ranks, sum over i of R,  dl_i/dz

    So a matrix of pairs has |R| x B elements on a rank in place of B x B; the rows of one micro-batch are computed at a time.
    """
    total, gradients = torch.zeros(()), list[Tensor | None]([None] * len(roots))
    total_result: LossResult | None = None
    for part in parts if any(map(len, parts)) else parts[:1]:
        rows, factor = (part, 1.0) if len(part) else (part.new_zeros(1), 0.0)
        with of_rows(rows):
            result = loss()
        own_sum = with_graph(result.only[0], result, list(roots)) * factor
        if differentiates:
            new = torch.autograd.grad(own_sum, roots, allow_unused=True)
            gradients = [a if b is None else b if a is None else a + b for a, b in zip(gradients, new, strict=True)]
        total = total.to(own_sum) + own_sum.detach()
        total_result = _added(total_result, result, factor)
    assert total_result is not None, "at least one part"
    return total_result, total, gradients


def tried(loss: Callable[[], LossResult], num_rows: int, roots: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """Try whether a loss is a sum over rows: that of the first ones is that of their halves; return it with its graph, and the roots.

    Raises:
        JobError: it is none; all ranks raise it, since they try the same rows.
    """
    rows = torch.arange(min(num_rows, MOST_TRIED), device=roots[0].device)
    with of_rows(rows):
        result = loss()
    if len(result.terms) > 1:
        raise JobError(
            "loss-not-a-sum",
            f"samestep.whole_batch(rows=True) marks one sum over rows, and the loss returned the terms {', '.join(result.terms)}. Use (sum over "
            "the rows, their number), or rows=False",
        )
    if len(rows) > 1:
        _compare(result, loss, rows)
    return with_graph(result.only[0], result, list(roots)), [*roots]


def _compare(of_all: LossResult, loss: Callable[[], LossResult], rows: Tensor) -> None:
    results = [of_all]
    for some in (rows[: len(rows) // 2], rows[len(rows) // 2 :]):
        with of_rows(some), torch.no_grad():
            results.append(loss())
    for name, amount_of_all in results[0].amounts.items():
        halves = [result.amounts.get(name) for result in results[1:]]
        for index, what in enumerate(("sum", "count")):
            parts = [half[index].detach().double() for half in halves if half is not None]
            number = amount_of_all[index].detach().double()
            off = (sum(parts) - number).abs() if len(parts) == 2 else torch.ones(())
            limit = min(map(limit_of_values, (amount_of_all[index].dtype, torch.float32)))
            if off > limit * max(1.0, *(float(n.abs()) for n in (number, *parts))):
                raise JobError(
                    "loss-not-a-sum",
                    f"samestep.whole_batch(rows=True) marks a sum over rows, and the {what}{f' of {name}' if name else ''} of {len(rows)} rows "
                    f"is {float(number):.6g}, and of their halves {' and '.join(f'{float(part):.6g}' for part in parts) or 'missing'}. Use (sum over "
                    "the rows that the loss is given, their number), or rows=False",
                )


def _added(total: LossResult | None, result: LossResult, factor: float) -> LossResult:
    """Return the sums and counts of two results, the second one times a factor, without a graph."""
    terms, values = (
        {
            name: tuple(
                part.detach() * factor + (0.0 if known is None else known[name][index])
                for index, part in enumerate(pair)
            )
            for name, pair in new.items()
        }
        for new, known in (
            (result.terms, None if total is None else total.terms),
            (result.values, None if total is None else total.values),
        )
    )
    return LossResult(terms, values)  # type: ignore[arg-type]
