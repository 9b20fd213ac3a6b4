"""The one who decides on a step's update: the host once it has read the scalars, or the device before that.

```
HostDecides     all_reduce ─► the host reads ─► update, or none
DeviceDecides   all_reduce ─► update, which changes nothing in an unusual step ─► the host reads, before the next step
```
An unusual step (a number is not finite, no token counts, a rank refuses it) is decided by the host in either case: where the
device has held the update back, from the same weights and gradients.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import ClassVar

import torch
from torch import Tensor

from samestep.runtime.guards.refusals import Refusals
from samestep.runtime.held_assembly import HeldAssembly
from samestep.runtime.ledger import outside_step
from samestep.runtime.loss_spikes import SpikeWatch
from samestep.runtime.optimizers.optimizer_step import Updater
from samestep.runtime.optimizers.used_weights import UsedWeights
from samestep.runtime.processes.messages import gather_values
from samestep.runtime.step_scalars import Decision, decide


class StepState(Enum):
    """The state of a step after its all_reduce.

    DeviceDecides ─► OPEN ─┬──────────────► CLOSED
                           └─► HELD_BACK ─► CLOSED
    HostDecides ─────────────► HELD_BACK ─► CLOSED
    """

    OPEN = "the update is launched, and the host does not know whether the device has made it"
    HELD_BACK = "no update is made, and the host decides"
    CLOSED = "the update is made, or the step is skipped"


@dataclass(frozen=True, slots=True)
class HostDecides:
    """The host decides, so that the device waits for it: always on a CPU, and on a GPU where the device cannot."""

    first_state: ClassVar[StepState] = StepState.HELD_BACK
    updater: Updater
    decide: Callable[[Tensor], Decision]
    """Returns what follows from the summed scalars, on the device."""
    sends: bool
    """Whether the device sends the gradients to an optimizer on the host meanwhile, multiplied by what follows."""
    is_exception: bool
    """Whether the device decides on other steps, which overlook what is written unseen."""

    def wrote_unseen(self, device: torch.device) -> bool | Tensor:
        """Return whether the backwards of the step wrote weights unseen, on the device (float64 [])."""
        return self.is_exception and self.updater.live.was_written_unseen(device)

    def begin(self, sums: Tensor) -> Tensor:
        """Return numbers that the host reads with the sums: 1 where gradients are not multiplied yet, and where weights were
        written since the last update (float64 [2]).
        """
        held_back = torch.ones((), dtype=torch.float64, device=sums.device)
        if self.sends:
            decision = self.decide(sums)
            self.updater.send_unless(decision.held_back, decision.factor)
            held_back = decision.held_back.double()
        return torch.stack([held_back, self.updater.live.was_written(sums.device)])


@dataclass(slots=True)
class DeviceDecides:
    """The device decides, for which the host does not wait: `Updater.can_hold_back` allows it."""

    first_state: ClassVar[StepState] = StepState.OPEN
    updater: Updater
    decide: Callable[[Tensor], Decision]
    """Returns what follows from the summed scalars, on the device."""
    _decision: Decision | None = None

    def wrote_unseen(self, device: torch.device) -> bool | Tensor:
        """Return False: only steps on which the host decides ask for what was written unseen."""
        return False

    def begin(self, sums: Tensor) -> Tensor:
        """Return numbers that the host reads with the sums: 1 where the update is held back, and 0 (float64 [2])."""
        self._decision = self.decide(sums)
        held_back = self._decision.held_back.double()
        return torch.stack([held_back, torch.zeros_like(held_back)])

    def update(self) -> None:
        """Update the weights, or change nothing in an unusual step."""
        assert self._decision is not None
        self.updater.step_unless(self._decision.held_back, self._decision.factor)


class Deciders:
    """The choice of who decides on each step of a run. Every rank has one, and all choose alike."""

    def __init__(self, own: HeldAssembly, spikes: SpikeWatch) -> None:
        self._own, self._acts_on_spikes = own, spikes.acts
        self._device = own.place.device
        self.num_updates = 0
        """Updates of the weights in this process, of which the host waits for the first."""
        self.writes_unseen = False
        """Whether steps write weights as no count of torch shows; the host then decides on all of them."""

    def begin_step(self, updater: Updater) -> None:
        """Note the weights before the forwards of a step on which the device may decide."""
        if self._device_may_decide:
            updater.live.begin_step(self._device)

    def choose(self, numerator: float, used: UsedWeights, *, host_reads: bool) -> HostDecides | DeviceDecides:
        """Return who decides on a step whose backwards are launched; with `host_reads` the host reads its scalars in any case."""

        def follow(sums: Tensor) -> Decision:
            return decide(sums, numerator, self._own.job.optimizer.clip_norm, used.expected_flags())

        updater, may_decide = self._own.current.weights.updater, self._device_may_decide
        is_usual = not host_reads and self.num_updates > 0 and not self._own.replicas.are_apart
        if is_usual and may_decide and not self._acts_on_spikes and used.can_be_expected():
            return DeviceDecides(updater, follow)
        sends = is_usual and updater.offload.is_apart(self._device)
        return HostDecides(updater, follow, sends=sends, is_exception=may_decide)

    def leave_to_host(self, step: int, refusals: Refusals, *, has_left_out: bool) -> None:
        """Let the host decide from now on, since a step, counted from 0, writes weights as no count of torch shows.

        `has_left_out` says that the device has decided on steps before, which may have lost what was written.

        Raises:
            UnprovenError: it has.
        """
        self.writes_unseen = True
        if has_left_out:
            reason = (
                f"step {step + 1}: a forward or backward writes weights through .data, and the first one did not, so "
                "what was written in the steps between may be lost; to write them under torch.no_grad() works"
            )
            refusals.remark(self._own.job.run.waived("state", reason))

    @property
    def _device_may_decide(self) -> bool:
        """Whether updates may be launched before the host knows the sums: on a GPU, where the optimizer allows it."""
        return self._device.type == "cuda" and not self.writes_unseen and self._updaters_hold_back

    @functools.cached_property
    def _updaters_hold_back(self) -> bool:
        """Whether the optimizer of every rank can; every rank asks in its first step."""
        with outside_step():
            return all(gather_values(self._own.current.weights.updater.can_hold_back, self._own.layout.world_size))
