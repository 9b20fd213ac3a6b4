"""A step between its backwards and its update: its backwards (`StepBackward`), and what its scalars say, once they are read.

The host decides on the update once it has read them, or on a GPU the device before that (`device_decides.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from enum import Enum

from torch import Tensor

from samestep.models.spec import LossNames
from samestep.runtime.assembly import Assembly
from samestep.runtime.device_decides import Decider, StepState
from samestep.runtime.guards.loss_trials import LossTrials
from samestep.runtime.host_copies import Reading
from samestep.runtime.optimizers.optimizer_step import Updater
from samestep.runtime.step_observer import StepBatch, StepNumbers, StepScalars
from samestep.runtime.step_report import StepReport
from samestep.state.snapshot import KeptValues
from samestep.state.writes import KeptTensors


@dataclass(frozen=True, slots=True)
class StepBackward:
    """One of the backwards of a step. A step of `run.step` has one, of the run's loss and for all weights."""

    number: int = 0
    """The number of backwards of the step before this one."""
    names: Set[str] | None = None
    """The weights whose gradients count; None for all."""
    held: Assembly | None = None
    """The assembly with the loss of this backward; None where it is the run's."""
    trials: LossTrials | None = None
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


class Progress(Enum):
    """The progress of a run from one update to the next.

    BETWEEN ─ take ─► WITHIN ─┬──────────────────────► BETWEEN
       └───── close ──────────┴─► REPEATING ─► (back)
    A step that fails leaves WITHIN or REPEATING.
    """

    BETWEEN = "no step is being taken; the update of the last one may be launched and not read (`StepState.LAUNCHED`)"
    WITHIN = "a step is being taken or has failed, so that weights may still be gathered"
    REPEATING = "a step is taken once more, which some rank gave up: the CPU decides on it"


@dataclass(slots=True)
class OpenStep:
    """A step after its all_reduce."""

    batch: StepBatch
    began_s: float
    running_buffers: KeptTensors
    """Buffers that the forwards wrote, with their values before the step."""
    sums: Reading
    """The summed scalars, and the two numbers of its decider's `reading`."""
    numerator: float
    """The scale of the gradients is this over the count."""
    lr_factor: float | Mapping[int, float]
    """The factor of the schedule on the learning rate; for each group by itself where a loop has made updates of its own."""
    data_wait_s: float
    decider: Decider
    state: StepState
    names: LossNames
    """The names of what its loss reports."""
    of: StepBackward
    values_before: Sequence[KeptValues] = ()
    """What hooks, the loss and the models kept before the backward, if it may be repeated with the count of the step."""
    was_written: bool = False
    """Whether weights were written since the last update, so that the updater must read them again."""
    report: StepReport | None = None
    """What the caller holds already, of a step whose update was launched: it is completed when the step is closed."""

    def prepare(self, updater: Updater) -> None:
        """Let an updater have the step's learning rate and number."""
        updater.rates.set(self.lr_factor)
        updater.step_index = self.batch.step

    def read(self, num_unsure: int, index: int) -> StepScalars:
        """Wait for the sums, of which each model has the uses of `num_unsure` weights, this rank's at `index`, and for the two numbers of
        the decider."""
        *sums, held_back, written = self.sums.numbers()
        self.was_written = bool(written)
        if held_back > 0:
            self.state = StepState.HELD_BACK
        return StepScalars.of(sums, num_unsure, self.names.num_numbers, index)


@dataclass(frozen=True, slots=True)
class ReadStep:
    """A step whose sums the host has read: what the ranks have agreed on."""

    opened: OpenStep
    summed: StepScalars
    numbers: StepNumbers
    note: str
    """Why its numbers are unusual; mostly empty."""
