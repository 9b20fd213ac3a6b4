"""Sums, means, rows and losses over all samples of a step, for the code of a model or a loss.

On one device that runs the whole batch at once, `batch_sum(x)` is x.sum(0), `batch_mean(x)` is x.mean(0), and `batch_cat(x)` is x.
A layout that divides the batch computes the same of the samples of all ranks (`runtime/axes/batch_values.py`): while one of its
forwards runs, an object that does so is the present scope. Function modes see each of the three as one function.
`after_step` lets a buffer follow such values: written by a keeper once the step's update is made.

A contrastive loss compares each sample with all others, so it is no sum over samples: a rank that sees a part of the batch
cannot compute its part of it. `samestep.whole_batch` marks such a loss; a layout then gives it the outputs and the batch of
all samples of the step (`runtime/axes/whole_batch.py`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ContextDecorator, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol, overload

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.overrides import handle_torch_function, has_torch_function
from torch.utils.hooks import RemovableHandle

from samestep.building.loss_result import Loss
from samestep.datasets.values import num_samples as num_of_values
from samestep.errors import JobError, ModelError
from samestep.job import Job
from samestep.trees import tensors_in


class Keeper(Protocol):
    """Holds the next values of buffers until a step's update."""

    def keep(self, buffer: Tensor, value: Tensor) -> None:
        """Hold the value that a buffer gets after the step."""


class Scope(Protocol):
    """The samples over which sums are taken, and rows are joined."""

    def sum(self, x: Tensor) -> Tensor:
        """Return the sum over the rows of all samples."""

    def cat(self, x: Tensor) -> Tensor:
        """Return the rows of all samples in their order."""

    def num_rows(self, x: Tensor) -> int:
        """Return the number of rows of all samples, of which `x` has those of this rank."""


_present: list[Scope | None] = [None]
_keepers: list[Keeper] = []


@contextmanager
def within(scope: Scope | None) -> Iterator[None]:
    """Let a scope be the present one, inside; None computes with the rows at hand, as outside of any run."""
    _present.append(scope)
    try:
        yield
    finally:
        _present.pop()


class Keeping(ContextDecorator):
    """A context, or a decorator, in which a keeper holds the next values of buffers; it may be entered again, and within itself."""

    def __init__(self, keeper: Keeper) -> None:
        self._keeper = keeper

    def __enter__(self) -> None:
        _keepers.append(self._keeper)

    def __exit__(self, *_: object) -> None:
        _keepers.pop()


class Ignored:
    """The keeper of forwards that are no part of a step: they leave no trace."""

    def keep(self, buffer: Tensor, value: Tensor) -> None:
        """Hold nothing."""


IGNORING = Keeping(Ignored())
"""The context of code that is no part of a step."""


class NextValues:
    """The keeper that holds the next values of buffers until `write` is called."""

    def __init__(self) -> None:
        self.held: dict[int, tuple[Tensor, Tensor]] = {}
        """Buffers with their next values, by the buffers' identities."""

    def keep(self, buffer: Tensor, value: Tensor) -> None:
        """Hold a value; of several for one buffer the last one counts."""
        self.held[id(buffer)] = buffer, value.detach().clone()

    def write(self) -> None:
        """Write the values into their buffers."""
        values, self.held = list(self.held.values()), {}
        write(values)


class _OfAnyLoop(NextValues):
    """The keeper outside of a run: values are written when the next optimizer has stepped."""

    def __init__(self) -> None:
        super().__init__()
        self._handle: RemovableHandle | None = None

    def keep(self, buffer: Tensor, value: Tensor) -> None:
        """Hold a value until the next step of any optimizer of torch."""
        super().keep(buffer, value)
        if self._handle is None:
            self._handle = register_optimizer_step_post_hook(self._write)

    def _write(self, *_: object) -> None:
        self.write()
        if self._handle is not None:
            self._handle.remove()
            self._handle = None


_of_any_loop = _OfAnyLoop()


@torch.no_grad()
def write(values: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Write values into their buffers."""
    for buffer, value in values:
        buffer.copy_(value)


def after_step(buffer: Tensor, value: Tensor) -> None:
    """Set a buffer after the update of the step, such as a center or a codebook that follows the samples of the step.

    Call it in a forward or a loss. All code of this step reads the old value. Compute the value only from data that is equal on all ranks:
    the buffer, `batch_sum`, `batch_mean` and `batch_cat`. If a buffer is set several times, the last call counts. Outside of a run, the
    value is written after the next step of a torch optimizer.

    Raises:
        ModelError: the value is not a tensor of the buffer's shape.
    """
    if not isinstance(buffer, Tensor) or not isinstance(value, Tensor) or value.shape != buffer.shape:
        form = [list(item.shape) if isinstance(item, Tensor) else type(item).__name__ for item in (buffer, value)]
        raise ModelError(
            "after-step-value",
            f"samestep.after_step was given a value {form[1]} for a buffer {form[0]}. Use a tensor of the buffer's shape, or, under tp, a buffer of a module that is not cut",
        )
    hold_after_step(buffer, value)


def hold_after_step(buffer: Tensor, value: Tensor) -> Tensor:
    """Let the present keeper hold the next value of a buffer, and return the value: function modes see it as one function."""
    if has_torch_function((buffer, value)):
        tensor: Tensor = handle_torch_function(hold_after_step, (buffer, value), buffer, value)
        return tensor
    (_keepers[-1] if _keepers else _of_any_loop).keep(buffer, value)
    return value


def batch_sum(x: Tensor) -> Tensor:
    """Return x.sum(0) over all samples of the step, including the samples of other data ranks.

    Gradients flow back to the samples of every rank. Outside of a run it is x.sum(0). Every data rank must call it in the same order.

    Raises:
        ModelError: `x` has no dimension of samples.
    """
    return _over_samples(batch_sum, x, lambda: x.sum(0), lambda scope: scope.sum(x))


def batch_mean(x: Tensor) -> Tensor:
    """Return x.mean(0) over all samples of the step, as `batch_sum` does.

    Raises:
        ModelError: `x` has no dimension of samples.
    """
    return _over_samples(batch_mean, x, lambda: x.mean(0), lambda scope: scope.sum(x) / scope.num_rows(x))


def batch_cat(x: Tensor) -> Tensor:
    """Return the rows of all samples of the step, in the order of the global batch; `x` has one row for each sample.

    Gradients flow back to the samples of every rank. Outside of a run it is x. Every data rank calls it in the same order.

    Raises:
        ModelError: `x` has no dimension of samples, or not one row for each.
    """
    return _over_samples(batch_cat, x, lambda: x, lambda scope: scope.cat(x))


def _over_samples(
    function: Callable[[Tensor], Tensor], x: Tensor, alone: Callable[[], Tensor], shared: Callable[[Scope], Tensor]
) -> Tensor:
    """Return what a function of rows computes outside of any run, or in the present scope; a function mode is given the function."""
    if has_torch_function((x,)):
        result: Tensor = handle_torch_function(function, (x,), x)
        return result
    if not isinstance(x, Tensor) or not x.dim():
        form = f"a tensor {list(x.shape)}" if isinstance(x, Tensor) else f"a {type(x).__name__}"
        raise ModelError(
            "rows-per-sample",
            f"samestep.{function.__name__} takes a tensor with a row for each sample, and was given {form}. Use x[None] for one row",
        )
    scope = _present[-1]
    return alone() if scope is None else shared(scope)


_MARK = "over_whole_batch"


@dataclass(frozen=True, slots=True)
class OverBatch:
    """The settings of a loss of the whole batch."""

    pad: float | None = None
    """The value with which tensors of different sizes are padded; None refuses them."""
    rows: bool = False
    """Whether it is a sum over rows, and computes those that it is given the places of."""


_OWN_ROWS: ContextVar[Tensor | None] = ContextVar("own rows", default=None)


@contextmanager
def of_rows(rows: Tensor) -> Iterator[None]:
    """Return the context of a loss that computes the rows with these places in the batch."""
    token = _OWN_ROWS.set(rows)
    try:
        yield
    finally:
        _OWN_ROWS.reset(token)


@overload
def whole_batch(loss: Callable[..., Any], *, pad: float | None = None, rows: bool = False) -> Loss: ...


@overload
def whole_batch(
    loss: None = None, *, pad: float | None = None, rows: bool = False
) -> Callable[[Callable[..., Any]], Loss]: ...


def whole_batch(loss: Callable[..., Any] | None = None, *, pad: float | None = None, rows: bool = False) -> Any:
    """Mark a loss over the outputs and the batch of all samples of a step, in the order of the global batch.

    The loss is a function of (outputs, batch). It returns the loss of the step as a scalar tensor, which is not divided; or (sum, count), or
    terms. Each may be followed by metrics. Each rank computes it on the gathered outputs of all ranks, and runs the backward pass through its
    own samples. If ranks run several micro-batches, each one runs its forward pass twice: once for its outputs, and once for the backward
    pass. An output without a dimension of samples, such as a temperature, must be the same on all ranks.

    Args:
        loss: the loss; without it the call returns a decorator.
        pad: the padding value for outputs and labels of different sizes on different ranks; by default these are rejected.
        rows: whether the loss is a sum over samples, each compared with all. It is then a function of (outputs, batch, rows), with the
            indices of some samples, and returns (sum over these, their number). Each rank computes its own rows, so a matrix of pairs
            has only these rows.

    Raises:
        JobError: the loss is not a function.
    """
    if loss is None:
        return functools.partial(whole_batch, pad=pad, rows=rows)
    if not callable(loss):
        raise JobError(
            "argument-type",
            f"samestep.whole_batch marks a function of (outputs, batch), and was given a {type(loss).__name__}",
        )

    @functools.wraps(loss)
    def over_all(outputs: Any, batch: Any, **options: Any) -> Any:
        result = loss(outputs, batch, *([_own_rows(outputs, batch)] if rows else []), **options)
        number, values = (result[0], result[1:]) if _has_values(result) else (result, ())
        if isinstance(number, Tensor) and rows:
            raise JobError(
                "loss-not-a-sum",
                "samestep.whole_batch(rows=True) marks a sum over rows, and the loss returned a number. Use (sum over the rows, their number)",
            )
        if isinstance(number, Tensor):
            size = num_samples(batch)
            return (number * size, size, *values)
        return result

    setattr(over_all, _MARK, OverBatch(pad, rows))
    return over_all


def _own_rows(outputs: Any, batch: Any) -> Tensor:
    """Return the places of the rows that the loss computes: all, unless a rank computes some."""
    rows = _OWN_ROWS.get()
    if rows is not None:
        return rows
    devices = sorted({tensor.device for tensor in tensors_in(outputs)}, key=lambda device: device.type == "meta")
    return torch.arange(num_samples(batch), device=devices[0] if devices else None)


def _has_values(result: Any) -> bool:
    """Return whether a loss has returned a number and values to report."""
    is_pair = isinstance(result, tuple | list) and len(result) == 2
    return is_pair and isinstance(result[0], Tensor) and isinstance(result[1], Mapping)


def mark_of(loss: Loss) -> OverBatch | None:
    """Return what a loss of the whole batch asks for; None for a loss that is a sum over samples."""
    function: Any = loss
    while function is not None and not hasattr(function, _MARK):
        function = function.func if isinstance(function, functools.partial) else getattr(function, "__wrapped__", None)
    mark: OverBatch | None = getattr(function, _MARK, None)
    return mark


def scoped(loss: Loss, job: Job) -> Loss:
    """Return a loss, marked as one of the whole batch where the job says so."""
    return whole_batch(loss) if job.train.loss_over == "batch" and mark_of(loss) is None else loss


def num_samples(batch: Any) -> int:
    """Return the number of samples of a batch; of an object that does not show it, the size of its first tensor's first dimension."""
    shown = num_of_values(batch)
    return next((len(tensor) for tensor in tensors_in(batch) if tensor.dim()), 1) if shown is None else shown
