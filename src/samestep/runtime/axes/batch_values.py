"""Sums and rows of all samples of a step for a model's code, over data ranks (twin of `strategies/batch_values.py`).

With x_i the row of sample i, and g_r the gradient of what rank r has computed from the result,

    sum     y = sum over all i of x_i            gradient of x_i = sum over r of g_r
    rows    Y = (x_1, ..., x_B)                  gradient of x_i = row i of the sum over r of g_r

so the forward sums or gathers once, and the backward sums once. A place without samples adds nothing, and gets no gradient. The
repeated forward of a checkpointed one takes the results of the first: nothing is sent again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from samestep.building.over_samples import within
from samestep.errors import ModelError
from samestep.program.program import Program
from samestep.runtime.axes.data_ranks import DataRanks
from samestep.shares import Shares
from samestep.strategies.batch_values import OWNER


class BatchValues:
    """The scope of `samestep.batch_sum` and its like in the forwards of one rank."""

    def __init__(self, program: Program, ranks: DataRanks) -> None:
        step = program.step
        self.are_used, self._ranks = step.model.uses_batch_values, ranks
        self._batch = step.global_batch
        self._sizes: list[int] = []
        """Samples of each rank in the present forward."""
        self._records: list[list[Tensor]] = []
        """Where the results of a checkpointed forward are recorded, outermost first."""
        self._repeats: Iterator[Tensor] | None = None

    def begin_step(self, num_samples: int) -> None:
        """Follow the size of a step's batch."""
        self._batch = num_samples

    def of_step(self) -> AbstractContextManager[None]:
        """Return the context of a forward, or a loss, of the step's samples, which a rank runs as one micro-batch.

        Collective over `dp` where the code inside asks for values of all samples, in its backward too.
        """
        return self.of(self._batch)

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
                yield
                return
            before = self._repeats, self._records, self._sizes
            self._repeats, self._records, self._sizes = iter(found), [], sizes
            try:
                with within(self):
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
            raise ModelError(
                f"samestep.batch_cat was given {len(x)} rows of {max(1, self.mine)} samples: one row for each works, as two views "
                "joined in two calls have"
            )
        result: Tensor = _Rows.apply(x, self)
        return result

    def num_rows(self, x: Tensor) -> int:
        """Return the number of rows of all samples, of which `x` has those of this rank."""
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
