"""Offload of the optimizer: a GPU computes gradients, and the host holds masters and states and updates them.

```
gradient, on the device ─► pinned memory ─► optimizer.step() over values on the host ─► target, on the device
                 send          `host_copies.py`                                 `live_weights.py`
```
A store makes such pieces (`host_copies.master_on_host`). Their gradients are sent before the host has decided on the step,
multiplied by what follows from its sums, so that the host waits for both at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from samestep.runtime import host_copies


@dataclass(slots=True)
class Offload:
    """The transfer of gradients to values that are on the host; nothing is sent to values on the device of the gradients."""

    values: Sequence[Tensor]
    """The master values of a rank's pieces."""
    _sent: list[Tensor] | None = None

    def is_apart(self, device: torch.device) -> bool:
        """Return whether the optimizer works on the host, while this device, a GPU, computes the gradients."""
        return device.type == "cuda" and any(value.device.type == "cpu" for value in self.values)

    def send(self, gradients: Sequence[Tensor]) -> None:
        """Send the gradients of a step, which are there once the host has read a number that it asks for later."""
        self._sent = host_copies.send_to_values(gradients, self.values)

    def take(self) -> list[Tensor] | None:
        """Return the gradients that were sent for this step; None if none were."""
        sent, self._sent = self._sent, None
        return sent

    def forget(self) -> None:
        """Drop gradients that were sent for a step that is skipped."""
        self._sent = None
