"""A step between its backwards and its update: what its scalars say, once they are read."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass

from torch import Tensor

from samestep.models.loss_names import LossNames
from samestep.runtime.assembly import Assembly
from samestep.runtime.deciders import StepState
from samestep.runtime.guards.step_trials import StepTrials
from samestep.runtime.host_copies import Reading
from samestep.runtime.microbatches import StepBatch
from samestep.runtime.optimizers.optimizer_step import Updater
from samestep.runtime.step_report import StepReport


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


WHOLE = StepBackward()


@dataclass(slots=True)
class OpenStep:
    """A step after its all_reduce."""

    batch: StepBatch
    began_s: float
    running_buffers: list[tuple[Tensor, Tensor]]
    """Buffers that the forwards wrote, with their values before the step."""
    sums: Reading
    """The summed scalars, and the two numbers of its decider's `begin`."""
    numerator: float
    """The scale of the gradients is this over the count."""
    lr_factor: float | Mapping[int, float]
    """The factor of the schedule on the learning rate; for each group by itself where a loop has made updates of its own."""
    data_wait_s: float
    state: StepState
    names: LossNames
    """The names of what its loss reports."""
    of: StepBackward
    report: StepReport | None = None
    """What the caller holds already, of a step whose update was launched: it is completed when the step is closed."""

    def prepare(self, updater: Updater) -> None:
        """Let an updater have the step's learning rate and number."""
        updater.set_lr(self.lr_factor)
        updater.step_index = self.batch.step
