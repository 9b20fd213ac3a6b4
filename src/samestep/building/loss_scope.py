"""Losses over all samples of a step: how a loss is marked as one, and the sum and the count that it returns.

A contrastive loss compares each sample with all others, so it is no sum over samples: a rank that sees a part of the batch
cannot compute its part of it. `samestep.whole_batch` marks such a loss; a layout then gives it the outputs and the batch of
all samples of the step (`runtime/axes/whole_batch.py`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, overload

import torch
from torch import Tensor

from samestep.building.loss_result import Loss
from samestep.errors import JobError
from samestep.job import Job
from samestep.trees import tensors_in

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
    before = _OWN_ROWS.set(rows)
    try:
        yield
    finally:
        _OWN_ROWS.reset(before)


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
        found = loss(outputs, batch, *([_own_rows(outputs, batch)] if rows else []), **options)
        number, values = (found[0], found[1:]) if _has_values(found) else (found, ())
        if isinstance(number, Tensor) and rows:
            raise JobError(
                "loss-not-a-sum",
                "samestep.whole_batch(rows=True) marks a sum over rows, and the loss returned a number. Use (sum over the rows, their number)",
            )
        if isinstance(number, Tensor):
            size = num_samples(batch)
            return (number * size, size, *values)
        return found

    setattr(over_all, _MARK, OverBatch(pad, rows))
    return over_all


def _own_rows(outputs: Any, batch: Any) -> Tensor:
    """Return the places of the rows that the loss computes: all, unless a rank computes some."""
    given = _OWN_ROWS.get()
    if given is not None:
        return given
    devices = sorted({tensor.device for tensor in tensors_in(outputs)}, key=lambda one: one.type == "meta")
    return torch.arange(num_samples(batch), device=devices[0] if devices else None)


def _has_values(found: Any) -> bool:
    """Return whether a loss has returned a number and values to report."""
    is_pair = isinstance(found, tuple | list) and len(found) == 2
    return is_pair and isinstance(found[0], Tensor) and isinstance(found[1], Mapping)


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
    """Return the number of samples of a batch, which is the size of its first tensor's first dimension."""
    return next((len(tensor) for tensor in tensors_in(batch) if tensor.dim()), 1)
