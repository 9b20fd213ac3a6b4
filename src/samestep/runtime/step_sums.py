"""The sums of a step over all ranks, and what follows from them: on the device at once, on the host when it reads them.

```
loss, count, norm², flags ─ all_reduce ─┬─► decision on the device: factor on the gradients, and whether to hold back
                                        └─► copy on its way to the host, which reads it when it closes the step
```
On a GPU the update is launched before the host has read the sums. It changes nothing where they are unusual (a number is
not finite, no token counts, or a rank refuses the step); then the host decides, from the same weights and gradients.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

from samestep.program.ops import REPLICA_SCALARS
from samestep.runtime.guards.refusals import REFUSED
from samestep.runtime.host_copies import Reading
from samestep.runtime.step_observer import ReplicaScalars, StepScalars

if TYPE_CHECKING:
    from samestep.runtime.microbatches import StepBatch
    from samestep.runtime.step_report import StepReport


WRITTEN = 2.0**-22
"""Added to the stop flag by a rank whose weights a step wrote unseen: all ranks add up to less than 1."""

SAVE = 2.0**-43
"""Added to the stop flag by a rank that was asked to save: all ranks add up to less than `WRITTEN`."""


@dataclass(frozen=True, slots=True)
class Decision:
    """The decisions that follow from a step's sums, as tensors on the device."""

    factor: Tensor
    """What the gradients are multiplied by: the division by the count, and the clipping (float64 [])."""
    held_back: Tensor
    """1 where the update must change nothing, since the host has to decide, else 0 (float32 [])."""


@dataclass(slots=True)
class OpenStep:
    """A step whose sums the host has not read."""

    batch: StepBatch
    began_s: float
    running_buffers: list[tuple[Tensor, Tensor]]
    """Buffers that the forwards wrote, with their values before the step."""
    sums: Reading
    """The summed scalars; 1 where the update was held back on the device; 1 where this rank's weights were written in the step."""
    numerator: float
    """The scale of the gradients is this over the count."""
    lr_factor: float
    data_wait_s: float
    report: StepReport | None = None
    """What the caller holds already, and is completed when the step is closed."""


def decide(sums: Tensor, numerator: float, clip_norm: float | None, unused: Tensor | None = None) -> Decision:
    """Return what follows from the summed scalars (float64); gradients are scaled by the count over `numerator`.

    The update is held back too unless the numbers of weights are 0 exactly where `unused` (bool), which may be None, says so.
    """
    loss_sum, count, norm_squared, flags = sums[0], sums[1], sums[2], sums[-1]
    scale = numerator / count
    norm = norm_squared.sqrt() * scale
    factor = scale if clip_norm is None else scale * (clip_norm / (norm + 1e-6)).clamp(max=1.0)
    is_usual = (loss_sum / count).isfinite() & norm.isfinite() & (flags < REFUSED)
    if unused is not None:
        is_usual &= ((sums[len(REPLICA_SCALARS) : -1] == 0.0) == unused).all()
    return Decision(factor, (~is_usual).float())


class ReadScalars(NamedTuple):
    """The scalars that the ranks summed, as the host has read them."""

    agreed: StepScalars
    is_written: bool
    """Whether the step wrote weights of a rank unseen."""
    is_save_wanted: bool
    uses: list[list[float]]
    """The number of ranks that gave a gradient to each weight with a number in the scalars, by replica."""


def scalars_of(numbers: list[float], num_uses: int = 0) -> ReadScalars:
    """Return what the ranks summed; each replica has so many numbers of weights."""
    *sums, flags = numbers
    fraction, stop = math.modf(flags)
    save, written = math.modf(fraction / WRITTEN)
    width = len(REPLICA_SCALARS)
    parts = [sums[start : start + width + num_uses] for start in range(0, len(sums), width + num_uses)]
    replicas = tuple(ReplicaScalars(*part[:width]) for part in parts)
    loss_sum, count, norm_squared = (sum(part[index] for part in parts) for index in range(width))
    agreed = StepScalars(loss_sum, count, norm_squared, stop, replicas)
    return ReadScalars(agreed, written > 0.0, save > 0.0, [part[width:] for part in parts])
