"""Sums and rows of all samples of a step for a model's code, over data ranks (twin of `strategies/batch_values.py`).

With x_i the row of sample i, and g_r the gradient of what rank r has computed from the result,

    sum     y = sum over all i of x_i            gradient of x_i = sum over r of g_r
    rows    Y = (x_1, ..., x_B)                  gradient of x_i = row i of the sum over r of g_r

so the forward sums or gathers once, and the backward sums once. A place without samples adds nothing, and gets no gradient. The
repeated forward of a checkpointed one takes the results of the first: nothing is sent again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor

from samestep.building.over_samples import IGNORING, Keeping, within, write
from samestep.errors import ModelError
from samestep.program.program import Program
from samestep.runtime.axes.data_ranks import DataRanks
from samestep.runtime.axes.forward_only import is_forward_only
from samestep.runtime.axes.later_values import LaterTensor, value_of
from samestep.runtime.step_batch import StepBatch
from samestep.shares import Shares
from samestep.strategies.batch_values import OWNER, is_sent_once

Indices = np.ndarray[Any, np.dtype[np.int64]]

_NOTHING = nullcontext()


class BatchValues:
    """The scope of `samestep.batch_sum` and its like in the forwards of one rank, and the keeper of `samestep.after_step`."""

    def __init__(self, program: Program, ranks: DataRanks) -> None:
        step = program.step
        self.are_used, self._ranks = step.model.uses_batch_values, ranks
        self.keeps, self._is_late = bool(step.model.kept_after), is_sent_once(step)
        self._num_microbatches = step.num_microbatches
        self._batch: StepBatch | None = None
        self._sizes: list[int] = []
        """Samples of each rank in the present forward."""
        self._records: list[list[Tensor]] = []
        """Where the results of a checkpointed forward are recorded, outermost first."""
        self._repeats: Iterator[Tensor] | None = None
        self._late = LateValues(ranks)
        self._values: dict[int, tuple[Tensor, Tensor]] = {}
        """Buffers with their next values, by their identities."""

    def begin_step(self, batch: StepBatch) -> None:
        """Begin a step, or another backward of it, of a batch."""
        self._batch = batch
        if self._is_late:
            ranks = self._ranks.num_ranks
            self._late.begin(
                [batch.shares(rank, ranks, self._num_microbatches) for rank in range(ranks)], batch.shares(0, 1, 1)[0]
            )

    def of_step(self, microbatch: int) -> AbstractContextManager[None]:
        """Return the context of a forward of a micro-batch of the step.

        Collective over `dp` where the code inside asks for values of all samples, in its backward too.
        """
        if not (self.are_used or self.keeps) or self._batch is None:
            return _NOTHING
        return self._of_step(microbatch, self._batch.num_samples)

    def of_loss(self, microbatch: int) -> AbstractContextManager[None]:
        """Return the context of a loss, which may set its buffers after the step; it is collective where `of_step` is."""
        return _NOTHING if self._batch is None else self._of_step(microbatch, self._batch.num_samples)

    @contextmanager
    def _of_step(self, microbatch: int, num_samples: int) -> Iterator[None]:
        with IGNORING if is_forward_only() else Keeping(self):
            if self._is_late:
                with self._late.of(microbatch):
                    yield
            else:
                with self.of(num_samples):
                    yield

    def of(self, num_samples: int) -> AbstractContextManager[None]:
        """Return the context of a forward of so many samples of all ranks; collective as `of_step` is."""
        if not self.are_used or not self._ranks.send:
            return nullcontext()
        return self._of(Shares(num_samples, self._ranks.num_ranks, 1))

    @contextmanager
    def _of(self, shares: Shares) -> Iterator[None]:
        before = self._sizes
        self._sizes = [shares.size(rank, 0) for rank in range(self._ranks.num_ranks)]
        try:
            with within(self):
                yield
        finally:
            self._sizes = before

    def keep(self, buffer: Tensor, value: Tensor) -> None:
        """Hold the value that a buffer gets after the step."""
        self._values[id(buffer)] = buffer, value if isinstance(value, LaterTensor) else value.detach().clone()

    def finish(self) -> None:
        """Compute the next values of buffers, once all micro-batches have run.

        Collective over `dp` where they are made of values of all samples, see [Note: collective calls].
        """
        if self._is_late:
            self._late.exchange()
        with torch.no_grad():
            self._values = {key: (buffer, value_of(value)) for key, (buffer, value) in self._values.items()}

    def write(self) -> None:
        """Write the next values into the buffers, after the update of the weights."""
        values, self._values = self._values, {}
        write(values.values())

    def recompute_contexts(self) -> tuple[Callable[[], AbstractContextManager[None]], ...]:
        """Return what makes the contexts of a checkpointed forward, which records results, and of its repetition, which takes them."""
        found: list[Tensor] = []
        sizes: list[int] = []

        @contextmanager
        def recording() -> Iterator[None]:
            sizes[:] = self._sizes
            self._records.append(found)
            try:
                yield
            finally:
                self._records.remove(found)

        @contextmanager
        def replaying() -> Iterator[None]:
            if not sizes:
                with within(Absent() if self._is_late else None), IGNORING:
                    yield
                return
            before = self._repeats, self._records, self._sizes
            self._repeats, self._records, self._sizes = iter(found), [], sizes
            try:
                with within(self), IGNORING:
                    yield
            finally:
                self._repeats, self._records, self._sizes = before

        return recording, replaying

    # -- what code asks for ------------------------------------------------------------------------

    def sum(self, x: Tensor) -> Tensor:
        """Return the sum over the rows of all samples.

        Collective over `dp`, and in the backward too, see [Note: collective calls].
        """
        result: Tensor = _Sum.apply(x, self)
        return result

    def cat(self, x: Tensor) -> Tensor:
        """Return the rows of all samples in their order.

        Collective over `dp`, and in the backward too, see [Note: collective calls].

        Raises:
            ModelError: there is not one row for each sample.
        """
        if len(x) != max(1, self.mine):
            raise _not_one_row(len(x), max(1, self.mine))
        result: Tensor = _Rows.apply(x, self)
        return result

    def num_rows(self, x: Tensor) -> int:
        """Return the number of rows of all samples, of which `x` has those of this rank.

        Raises:
            ModelError: the samples do not have equally many rows.
        """
        each, rest = divmod(len(x), max(1, self.mine))
        if rest:
            raise ModelError(
                f"samestep.batch_mean was given {len(x)} rows of {self.mine} samples: equally many rows for each sample work"
            )
        return each * sum(self._sizes)

    @property
    def mine(self) -> int:
        """Samples of this rank."""
        return self._sizes[self._ranks.index]

    @property
    def start(self) -> int:
        """Samples of the ranks before this one."""
        return sum(self._sizes[: self._ranks.index])

    def summed(self, x: Tensor) -> Tensor:
        """Return the sum of the rows of all ranks, as a constant."""
        return self._known_or(lambda: self._ranks.sum(_wide(x if self.mine else x[:0]).sum(0), OWNER).to(_sum_dtype(x)))

    def gathered(self, x: Tensor) -> Tensor:
        """Return the rows of all ranks, as a constant."""
        return self._known_or(lambda: self._ranks.gather_rows(_wide(x[: self.mine]), self._sizes, OWNER).to(x.dtype))

    def sum_back(self, gradient: Tensor) -> Tensor:
        """Return the sum of the gradients of all ranks."""
        return self._ranks.sum(_wide(gradient).clone(memory_format=torch.contiguous_format), OWNER)

    def _known_or(self, compute: Callable[[], Tensor]) -> Tensor:
        found = next(self._repeats, None) if self._repeats is not None else None
        found = compute() if found is None else found
        for record in self._records:
            record.append(found)
        return found.clone() if self._records or self._repeats is not None else found


class LateValues:
    """The sums and rows of the samples of several micro-batches, which are known once the last of these has run."""

    def __init__(self, ranks: DataRanks) -> None:
        self._ranks = ranks
        self._table: Sequence[Sequence[Indices]] = []
        self._everything: Indices = np.empty(0, dtype=np.int64)
        self._places: dict[int, int] = {}
        """The number of calls so far in the forward of each micro-batch."""
        self._sums: dict[int, Tensor] = {}
        self._rows: dict[int, list[Tensor]] = {}
        self._microbatch = 0
        self._counts = True

    def begin(self, table: Sequence[Sequence[Indices]], everything: Indices) -> None:
        """Begin a step; `table` has the samples of each rank in each micro-batch, of `everything`."""
        self._table, self._everything = table, everything
        self._places, self._sums, self._rows = {}, {}, {}

    @contextmanager
    def of(self, microbatch: int) -> Iterator[None]:
        """Return the context of the forward of a micro-batch; what runs for its outputs alone adds nothing."""
        before = self._microbatch, self._counts
        self._microbatch, self._counts = microbatch, not is_forward_only()
        try:
            with within(self):
                yield
        finally:
            self._microbatch, self._counts = before

    def sum(self, x: Tensor) -> Tensor:
        """Return the sum of the rows of all samples, which is known later."""
        place = self._place()
        if self._counts:
            mine = _wide(x.detach()[: len(x) if self._size else 0]).sum(0)
            self._sums[place] = self._sums[place] + mine if place in self._sums else mine
        form = torch.empty(x.shape[1:], dtype=_sum_dtype(x), device="meta")
        return LaterTensor(form, x.device, lambda: self._sums[place].to(form.dtype))

    def cat(self, x: Tensor) -> Tensor:
        """Return the rows of all samples in their order, which are known later.

        Raises:
            ModelError: there is not one row for each sample.
        """
        if len(x) != max(1, self._size):
            raise _not_one_row(len(x), max(1, self._size))
        place = self._place()
        if self._counts:
            self._rows.setdefault(place, []).append(x.detach()[: self._size])
        form = torch.empty((len(self._everything), *x.shape[1:]), dtype=x.dtype, device="meta")
        return LaterTensor(form, x.device, lambda: self._rows[place][0])

    def num_rows(self, x: Tensor) -> int:
        """Return the number of rows of all samples, of which `x` has those of this micro-batch."""
        return len(x) // max(1, self._size) * len(self._everything)

    def exchange(self) -> None:
        """Sum and gather over ranks what the micro-batches of this one have given.

        Collective over `dp`, see [Note: collective calls].
        """
        order = order_of(np.concatenate([part for parts in self._table for part in parts]), self._everything)
        sizes = [sum(map(len, parts)) for parts in self._table]
        for place in sorted({*self._sums, *self._rows}):
            if place in self._sums:
                self._ranks.sum(self._sums[place], OWNER)
                continue
            mine = torch.cat(self._rows[place])
            rows = self._ranks.gather_rows(_wide(mine), sizes, OWNER).to(mine.dtype)
            self._rows[place] = [rows if order is None else rows[order.to(rows.device)]]

    @property
    def _size(self) -> int:
        return len(self._table[self._ranks.index][self._microbatch])

    def _place(self) -> int:
        place = self._places.get(self._microbatch, 0)
        self._places[self._microbatch] = place + 1 if self._counts else place
        return place


class Absent:
    """The scope of a repeated forward, whose results for a buffer's next value nobody needs: the rows at hand."""

    def sum(self, x: Tensor) -> Tensor:
        """Return the sum of the rows at hand."""
        return x.sum(0)

    def cat(self, x: Tensor) -> Tensor:
        """Return the rows at hand."""
        return x

    def num_rows(self, x: Tensor) -> int:
        """Return the number of rows at hand."""
        return len(x)


def order_of(gathered: Indices, everything: Indices) -> Tensor | None:
    """Return the place of each sample of `everything` among those gathered; None where it is the same."""
    if np.array_equal(gathered, everything):
        return None
    order = np.empty(len(everything), dtype=np.int64)
    order[np.argsort(everything, kind="stable")] = np.argsort(gathered, kind="stable")
    return torch.from_numpy(order)


def _not_one_row(given: int, size: int) -> ModelError:
    return ModelError(
        f"samestep.batch_cat was given {given} rows of {size} samples: one row for each works, as two views joined in two calls have"
    )


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, values: BatchValues) -> Tensor:
        ctx.values, ctx.shape, ctx.dtype, ctx.counts = values, x.shape, x.dtype, values.mine > 0
        return values.summed(x)

    @staticmethod
    def backward(ctx: Any, *given: Tensor) -> Any:
        gradient = ctx.values.sum_back(given[0]).to(ctx.dtype)
        return (gradient if ctx.counts else torch.zeros_like(gradient)).expand(ctx.shape), None


class _Rows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, values: BatchValues) -> Tensor:
        ctx.values, ctx.dtype, ctx.window = values, x.dtype, slice(values.start, values.start + values.mine)
        return values.gathered(x)

    @staticmethod
    def backward(ctx: Any, *given: Tensor) -> Any:
        rows = ctx.values.sum_back(given[0]).to(ctx.dtype)[ctx.window]
        return rows if len(rows) else torch.zeros_like(given[0][:1]).to(ctx.dtype), None


def _wide(x: Tensor) -> Tensor:
    """Return a tensor in a dtype in which sums are taken and sent: half precision in float32, what is no floating number as int64."""
    if x.is_floating_point() or x.is_complex():
        return x.float() if x.dtype.itemsize < 4 else x
    return x.long()


def _sum_dtype(x: Tensor) -> torch.dtype:
    return x.dtype if x.is_floating_point() or x.is_complex() else torch.int64
