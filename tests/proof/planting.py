"""How a deliberate fault is entered into the list: where it shows, what it is, and what `verify` must call it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor

from samestep.proof.verdict import Cause

Patch = pytest.MonkeyPatch


@dataclass(frozen=True)
class Fault:
    """One fault: where it shows, what it is, what `verify` must call it."""

    cause: Cause
    layout: str
    install: Callable[[Patch], None]
    model: str = "plain"
    job: dict[str, Any] = field(default_factory=dict)
    own_precision: bool = False
    """It shows in the job's own precision alone."""


FAULTS: dict[str, Fault] = {}


def fault(cause: Cause, layout: str, model: str = "plain", *, own_precision: bool = False, **job: Any) -> Any:
    """Enter a function into the list under its own name."""

    def enter(install: Callable[[Patch], None]) -> Callable[[Patch], None]:
        FAULTS[install.__name__] = Fault(cause, layout, install, model, job, own_precision)
        return install

    return enter


def around(patch: Patch, owner: Any, name: str, wrapper: Callable[..., Any]) -> None:
    """Let `wrapper(original, *args)` stand in for a function."""
    original = getattr(owner, name)
    patch.setattr(owner, name, lambda *args, **kwargs: wrapper(original, *args, **kwargs))


def rank() -> int:
    return dist.get_rank()


def unless(axis: str) -> Callable[..., Any]:
    """Return a stand-in for the sending of gradients that sends nothing over an axis."""
    return lambda send, self, flat, op, whole: None if op.axis == axis else send(self, flat, op, whole)


_SUMS = ("loss_sum", "count", "norm_squared")


def changed(sums: Tensor, **values: float) -> Tensor:
    """Return the sums of a step with other values of some, named as in `StepScalars`."""
    sums = sums.clone()
    for name, value in values.items():
        sums[_SUMS.index(name)] = value
    return sums
