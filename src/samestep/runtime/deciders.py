"""The one who decides on a step's update: the host once it has read the scalars, or the device before that.

```
HostDecides     all_reduce ─► the host reads ─► update, or none
DeviceDecides   all_reduce ─► update, which changes nothing in an unusual step ─► the host reads, before the next step
```
An unusual step (a number is not finite, no token counts, a rank refuses it) is decided by the host in either case: where the
device has held the update back, from the same weights and gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import ClassVar

import torch
from torch import Tensor

from samestep.runtime.optimizers.optimizer_step import Updater
from samestep.runtime.step_scalars import Decision


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
        return torch.stack([held_back, self.updater.was_written(sums.device)])


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
