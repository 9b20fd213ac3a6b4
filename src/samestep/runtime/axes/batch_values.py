"""Rows and sums of all samples of a step for a model's code, over data ranks (twin of `strategies/batch_values.py`).

With x_i the row of sample i, and g_r the gradient of what rank r has computed from the result,

    rows    Y = (x_1, ..., x_B)                  gradient of x_i = row i of the sum over r of g_r
    sum     y = Y.sum(0), of which ranks         gradient of x_i = the sum over r of g_r
            send the sums of their rows

so the forward sends once, and the backward sums once. A place without samples adds nothing, and gets no gradient. The
repeated forward of a checkpointed one takes the results of the first: nothing is sent again.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from samestep.building.over_samples import IGNORING, Keeping, NextValues, within
from samestep.errors import ModelError
from samestep.program.program import Program
from samestep.runtime.axes.data_ranks import DataRanks
from samestep.runtime.axes.forward_only import is_forward_only
from samestep.runtime.axes.precision import DTYPES
from samestep.runtime.axes.step_part import RepeatedValues, nest_pairs
from samestep.runtime.contexts import Anew
from samestep.runtime.ledger import owned
from samestep.runtime.processes.mesh import Mesh
from samestep.runtime.step_observer import StepBatch
from samestep.shares import Shares
from samestep.strategies.batch_values import KEPT, OWNER
from samestep.tracing.checkpointed import Contexts

_NOTHING = nullcontext()


class BatchValues(NextValues):
    """The scope of `samestep.batch_cat` and its like in the forwards of one rank, and the keeper of `samestep.after_step`."""

    def __init__(self, program: Program, ranks: DataRanks) -> None:
        super().__init__()
        model = program.step.model
        self.are_used, self._ranks = model.uses_batch_values, ranks
        self._is_entered = self.are_used or bool(model.kept_after)
        """Whether forwards ask for values of all samples, or give buffers values after the step."""
        self._batch: StepBatch | None = None
        self._sizes: list[int] = []
        """Samples of each rank in the present forward."""
        self._results = RepeatedValues[Tensor]()
        """The results of checkpointed forwards."""

    def begin_step(self, batch: StepBatch) -> None:
        """Begin a step, or another backward of it, of a batch."""
        self._batch = batch

    def of_step(self) -> AbstractContextManager[None]:
        """Return the context of a forward of a micro-batch of the step.

        Collective over `dp` where the code inside asks for values of all samples, in its backward too.
        """
        return self.of_loss() if self._is_entered else _NOTHING

    def of_loss(self) -> AbstractContextManager[None]:
        """Return the context of a loss, which may set its buffers after the step; it is collective where `of_step` is."""
        return _NOTHING if self._batch is None else self._of_step(self._batch.num_samples)

    @contextmanager
    def _of_step(self, num_samples: int) -> Iterator[None]:
        with IGNORING if is_forward_only() else Keeping(self), self.of(num_samples):
            yield

    def of(self, num_samples: int) -> AbstractContextManager[None]:
        """Return the context of a forward of so many samples of all ranks; collective as `of_step` is."""
        if not self.are_used or not self._ranks.send:
            return nullcontext()
        return self._of(Shares(num_samples, self._ranks.num_ranks, 1))

    @contextmanager
    def _of(self, shares: Shares) -> Iterator[None]:
        previous = self._sizes
        self._sizes = [shares.size(rank, 0) for rank in range(self._ranks.num_ranks)]
        try:
            with within(self):
                yield
        finally:
            self._sizes = previous

    def recompute_contexts(self) -> Contexts:
        """Return the contexts of a checkpointed forward, which records results, and of its repetition, which takes them."""
        sizes = self._sizes

        @contextmanager
        def repeated() -> Iterator[None]:
            previous, self._sizes = self._sizes, sizes
            try:
                with within(self if sizes else None), IGNORING:
                    yield
            finally:
                self._sizes = previous

        return nest_pairs(self._results.contexts(), (nullcontext(), Anew(repeated)))

    # -- what code asks for ------------------------------------------------------------------------

    def sum(self, x: Tensor) -> Tensor:
        """Return the sum over the rows of all samples.

        Collective over `dp`, and in the backward too, see [Note: collective calls].
        """
        result: Tensor = _OverRanks.apply(x, self, True)
        return result

    def cat(self, x: Tensor) -> Tensor:
        """Return the rows of all samples in their order.

        Collective over `dp`, and in the backward too, see [Note: collective calls].

        Raises:
            ModelError: there is not one row for each sample.
        """
        size = max(1, self.mine)
        if len(x) != size:
            raise ModelError(
                "rows-per-sample",
                f"samestep.batch_cat was given {len(x)} rows of {size} samples. Use one row for each, as two views joined in two calls have",
            )
        result: Tensor = _OverRanks.apply(x, self, False)
        return result

    def num_rows(self, x: Tensor) -> int:
        """Return the number of rows of all samples, of which `x` has those of this rank.

        Raises:
            ModelError: the samples do not have equally many rows.
        """
        each, rest = divmod(len(x), max(1, self.mine))
        if rest:
            raise ModelError(
                "rows-per-sample",
                f"samestep.batch_mean was given {len(x)} rows of {self.mine} samples. Use equally many rows for each sample",
            )
        return each * sum(self._sizes)

    @property
    def mine(self) -> int:
        """Samples of this rank."""
        return self._sizes[self._ranks.index]

    @property
    def window(self) -> slice:
        """The places of this rank's samples among those of all."""
        start = sum(self._sizes[: self._ranks.index])
        return slice(start, start + self.mine)

    def joined(self, x: Tensor, *, is_sum: bool) -> Tensor:
        """Return the rows of all ranks, or their sum, as a constant; a repeated forward takes the result of the first."""
        results = self._results
        result = results.left()
        if result is None:
            rows = _wide(x if self.mine else x[:0])
            result = (
                self._ranks.sum(rows.sum(0), OWNER) if is_sum else self._ranks.gather_rows(rows, self._sizes, OWNER)
            )
            is_number = x.is_floating_point() or x.is_complex()
            result = result.to(x.dtype if is_number or not is_sum else torch.int64)
        results.add(result)
        return result.clone() if results.is_recording or results.is_repeating else result

    def sum_back(self, gradient: Tensor) -> Tensor:
        """Return the sum of the gradients of all ranks."""
        return self._ranks.sum(_wide(gradient).clone(memory_format=torch.contiguous_format), OWNER)


class _OverRanks(torch.autograd.Function):
    """The rows of all ranks, or their sum: each rank is given the gradient of its own rows, of what all ranks have computed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, values: BatchValues, is_sum: bool) -> Tensor:
        ctx.values, ctx.like, ctx.size = values, (x.shape, x.dtype), values.mine
        ctx.window = None if is_sum else values.window
        return values.joined(x, is_sum=is_sum)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        shape, dtype = ctx.like
        total = ctx.values.sum_back(gradients[0]).to(dtype)
        gradient = total.expand(shape) if ctx.window is None else total[ctx.window]
        return gradient if ctx.size else total.new_zeros(shape), None, None


def _wide(x: Tensor) -> Tensor:
    """Return a tensor in a dtype in which sums are taken and sent: half precision in float32, what is no floating number as int64."""
    if x.is_floating_point() or x.is_complex():
        return x.float() if x.dtype.itemsize < 4 else x
    return x.long()


@dataclass(frozen=True, slots=True)
class _StageBuffer:
    name: str
    dtype: torch.dtype
    """The dtype in which it is sent."""
    is_mine: bool
    """Whether this stage computes its next value."""


@dataclass(frozen=True, slots=True)
class StageBuffers:
    """The buffers that the stages of a pipeline send each other after an update; none without `pp`.

    Every stage runs the model's own code, and has its buffers. The call of `samestep.after_step` is an event of the forward's flow
    (`tracing/flow.py`), which the stage of the layer in front of it carries out: it alone has the next value of the buffer. Behind the
    update it gives it to the others, whose code may read the buffer in the next step:

        stage of the call    value        all_reduce over pp     value + 0 + ... + 0, which is the value
        all others           zeros
    """

    model: nn.Module
    buffers: tuple[_StageBuffer, ...] = ()
    group: dist.ProcessGroup | None = None

    @classmethod
    def of(cls, model: nn.Module, program: Program, mesh: Mesh) -> StageBuffers:
        """Return the buffers of a rank's model."""
        step = program.step
        if step.layout.pp == 1:
            return cls(model)
        here = {index for chunk in program.chunks for index in chunk}
        buffers = tuple(
            _StageBuffer(k.name, getattr(torch, k.dtype) if k.dtype else DTYPES[step.master_dtype], index in here)
            for index, layer in enumerate(step.model.layers)
            for k in layer.kept
        )
        return cls(model, buffers, mesh.groups["pp"] if buffers else None)

    @torch.no_grad()
    def share(self) -> None:
        """Let all stages have the values of the stages that have computed them.

        Collective over `pp`, see [Note: collective calls].
        """
        for b in self.buffers:
            buffer = self.model.get_buffer(b.name)
            sent = buffer.to(b.dtype, copy=True) if b.is_mine else torch.zeros_like(buffer, dtype=b.dtype)
            with owned(KEPT):
                dist.all_reduce(sent, group=self.group)
            if not b.is_mine:
                buffer.copy_(sent)
