"""The backwards of a step that a loop calls by itself (`own_steps/`): which losses and weights each is for, and when its gradients are reduced."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass

from torch import Tensor

from samestep.runtime.assembly import Assembly
from samestep.runtime.guards.step_trials import StepTrials


@dataclass(frozen=True, slots=True)
class StepBackward:
    """One of the backwards of a step. A step of `run.step` has one, of the run's loss and for all weights."""

    number: int = 0
    """The number of backwards of the step before this one."""
    names: Set[str] | None = None
    """The weights whose gradients count; None for all."""
    held: Assembly | None = None
    """The assembly with the loss of this backward; None where it is the run's."""
    trials: StepTrials | None = None
    """The trials of that loss."""
    is_apart: bool = False
    """Whether the update is a call of its own, which may come later."""
    waits: bool = False
    """Whether its gradients are reduced later, with those of the backwards that follow."""
    into: Sequence[Tensor] | None = None
    """The weights that alone get gradients, where autograd can leave the others out; None for all."""
    count: float = 0.0
    """What the backward divides the sum by, where hooks see gradients of the mean; 0 where it is the nominal count."""


WHOLE = StepBackward()
