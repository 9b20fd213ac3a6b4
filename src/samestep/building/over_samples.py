"""Sums, means and rows over all samples of a step, for the code of a model or a loss.

On one device that runs the whole batch at once, `batch_sum(x)` is x.sum(0), `batch_mean(x)` is x.mean(0), and `batch_cat(x)` is x.
A layout that divides the batch computes the same of the samples of all ranks (`runtime/axes/batch_values.py`): while one of its
forwards runs, an object that does so is the present scope. Function modes see each of the three as one function.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from samestep.errors import ModelError


class Scope(Protocol):
    """The samples over which sums are taken, and rows are joined."""

    def sum(self, x: Tensor) -> Tensor:
        """Return the sum over the rows of all samples."""

    def cat(self, x: Tensor) -> Tensor:
        """Return the rows of all samples in their order."""

    def num_rows(self, x: Tensor) -> int:
        """Return the number of rows of all samples, of which `x` has those of this rank."""


_present: list[Scope | None] = [None]


@contextmanager
def within(scope: Scope | None) -> Iterator[None]:
    """Let a scope be the present one, inside; None computes with the rows at hand, as outside of any run."""
    _present.append(scope)
    try:
        yield
    finally:
        _present.pop()


def batch_sum(x: Tensor) -> Tensor:
    """Return x.sum(0) over all samples of the step: those of this micro-batch, and of the other data ranks.

    Gradients flow back to the samples of every rank. Outside of a run it is x.sum(0). Every data rank calls it in the same order.

    Raises:
        ModelError: `x` has no dimension of samples.
    """
    if has_torch_function((x,)):
        found: Tensor = handle_torch_function(batch_sum, (x,), x)
        return found
    scope = _scope_for(x, "batch_sum")
    return x.sum(0) if scope is None else scope.sum(x)


def batch_mean(x: Tensor) -> Tensor:
    """Return x.mean(0) over all samples of the step, as `batch_sum` does.

    Raises:
        ModelError: `x` has no dimension of samples.
    """
    if has_torch_function((x,)):
        found: Tensor = handle_torch_function(batch_mean, (x,), x)
        return found
    scope = _scope_for(x, "batch_mean")
    return x.mean(0) if scope is None else scope.sum(x) / scope.num_rows(x)


def batch_cat(x: Tensor) -> Tensor:
    """Return the rows of all samples of the step, in the order of the global batch; `x` has one row for each sample.

    Gradients flow back to the samples of every rank. Outside of a run it is x. Every data rank calls it in the same order.

    Raises:
        ModelError: `x` has no dimension of samples, or not one row for each.
    """
    if has_torch_function((x,)):
        found: Tensor = handle_torch_function(batch_cat, (x,), x)
        return found
    scope = _scope_for(x, "batch_cat")
    return x if scope is None else scope.cat(x)


def _scope_for(x: Tensor, word: str) -> Scope | None:
    if not isinstance(x, Tensor) or not x.dim():
        what = f"a tensor {list(x.shape)}" if isinstance(x, Tensor) else f"a {type(x).__name__}"
        raise ModelError(
            f"samestep.{word} takes a tensor with a row for each sample, and was given {what}: x[None] works for one row"
        )
    return _present[-1]
