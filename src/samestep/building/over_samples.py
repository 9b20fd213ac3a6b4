"""Sums, means and rows over all samples of a step, for the code of a model or a loss.

On one device that runs the whole batch at once, `batch_sum(x)` is x.sum(0), `batch_mean(x)` is x.mean(0), and `batch_cat(x)` is x.
A layout that divides the batch computes the same of the samples of all ranks (`runtime/axes/batch_values.py`): while one of its
forwards runs, an object that does so is the present scope. Function modes see each of the three as one function.
`after_step` lets a buffer follow such values: written by a keeper once the step's update is made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ContextDecorator, contextmanager
from typing import Protocol

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.overrides import handle_torch_function, has_torch_function
from torch.utils.hooks import RemovableHandle

from samestep.errors import ModelError


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
        form = [list(one.shape) if isinstance(one, Tensor) else type(one).__name__ for one in (buffer, value)]
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
