"""The one who decides on a step's update: on a GPU the device, before the host has read the scalars, wherever that is possible.

```
the host      all_reduce ─► the host reads ─► update, or none
the device    all_reduce ─► update, which changes nothing in an unusual step ─► the host reads, before the next step
```
An unusual step (a number is not finite, no token counts, a rank refuses it) is decided by the host in either case: where the
device has held the update back, from the same weights and gradients. torch's fused kernels can: they divide gradients by
`grad_scale`, and change nothing where `found_inf` is 1.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from samestep.program.ops import FLAG_SLOTS, REPLICA_SCALARS, StepFlag
from samestep.runtime.guards.refusals import Refusals
from samestep.runtime.guards.unusual_steps import SpikeWatch
from samestep.runtime.held_assembly import HeldAssembly
from samestep.runtime.host_copies import Reading
from samestep.runtime.ledger import outside_step
from samestep.runtime.optimizers.optimizer_step import Updater
from samestep.runtime.optimizers.update_rule import has_hooks
from samestep.runtime.optimizers.used_weights import UsedWeights
from samestep.runtime.processes.messages import gather_values
from samestep.runtime.weights.pieces import gradients_of


@dataclass(frozen=True, slots=True)
class Decision:
    """The decisions that follow from a step's scalars, as tensors on the device."""

    factor: Tensor
    """What the gradients are multiplied by: the division by the count, and the clipping (float64 [])."""
    held_back: Tensor
    """1 where the update must change nothing, since the host has to decide, else 0 (float32 [])."""


def decide(
    sums: Tensor, numerator: float, clip_norm: float | None, unused: Tensor | None = None, least: float = 0.0
) -> Decision:
    """Return what follows from the summed scalars of one replica; gradients are scaled by the count, which is at `least` that, over `numerator`.

    An update is held back where a number is not finite, no token counts, a rank refuses the step or has other unused weights
    than before, and where the numbers of weights are not 0 exactly where `unused` (bool) says so.
    """
    loss_sum, count, norm_squared = sums[: len(REPLICA_SCALARS)]
    flags = sums[-FLAG_SLOTS:]
    count = count.clamp(min=least) if least else count
    scale = numerator / count
    norm = norm_squared.sqrt() * scale
    factor = scale if clip_norm is None else scale * (clip_norm / (norm + 1e-6)).clamp(max=1.0)
    is_usual = (loss_sum / count).isfinite() & norm.isfinite()
    is_usual &= flags[StepFlag.REFUSES] + flags[StepFlag.UNUSED_CHANGED] == 0.0
    if unused is not None:
        uses = sums[len(REPLICA_SCALARS) :][: len(unused)]
        is_usual &= ((uses == 0.0) == unused).all()
    return Decision(factor, (~is_usual).float())


class StepState(Enum):
    """Who makes the update of a step after its all_reduce, and of which gradients.

    the device decides ─► LAUNCHED ─┐
                                    ├─ the host reads that the step is unusual ─► HELD_BACK
    the host decides ─┬─► SENT ─────┘
                      └─► HELD_BACK
    """

    LAUNCHED = "the device makes it, which the CPU knows once it has read the sums"
    SENT = "the CPU makes it, if it decides so, of gradients that are on their way to it and are multiplied by then"
    HELD_BACK = "the CPU makes it, if it decides so, of gradients as the backwards have left them"


@dataclass(slots=True)
class Decider:
    """Who decides on one step's update: the host once it has read the scalars, for which the device waits, or the device."""

    updater: Updater
    state: StepState = StepState.HELD_BACK
    """In which state it leaves the step."""
    decide: Callable[[Tensor], Decision] | None = None
    """Returns what follows from the summed scalars, on the device; None where nothing is done before the host has read them."""
    is_exception: bool = False
    """Whether the device decides on other steps, which overlook what is written unseen."""
    _decision: Decision | None = None

    def reading(self, sums: Tensor) -> Reading:
        """Return what the host reads of summed scalars: these, 1 where no update is launched and gradients are not multiplied, and 1 if weights
        were written since the last update. Send the gradients to an optimizer on the host, where it is given them before.
        """
        live = self.updater.live
        if self.decide is None and not live.are_copied:
            return Reading(sums, (1.0, 0.0))
        held_back, written = torch.ones_like(sums[0]), torch.zeros_like(sums[0])
        if self.decide is not None:
            self._decision = decision = self.decide(sums)
            held_back = decision.held_back.double()
            if self.state is StepState.SENT:
                send_unless(self.updater, decision.held_back, decision.factor)
        if self.state is not StepState.LAUNCHED:
            written = live.was_written(sums.device)
        return Reading(torch.cat([sums, torch.stack([held_back, written])]))

    def update(self) -> None:
        """Update the weights, or change nothing in an unusual step, if the device decides."""
        assert self._decision is not None
        step_unless(self.updater, self._decision.held_back, self._decision.factor)


class Deciders:
    """The choice of who decides on each step of a run: on a CPU always the host, which has nothing to wait for there. All ranks choose alike."""

    def __init__(self, assemblies: HeldAssembly, spikes: SpikeWatch) -> None:
        self._own = assemblies
        self.num_updates = 0
        """Updates of the weights in this process, of which the host waits for the first."""
        self._acts_on_spikes = spikes.acts
        self._device = assemblies.place.device
        self.writes_unseen = False
        """Whether steps write weights as no count of torch shows; the host then decides on all of them."""

    def begin_step(self, updater: Updater) -> None:
        """Note the weights before the forwards of a step on which the device may decide."""
        if self._device.type == "cuda" and self._gpu_may_decide:
            updater.live.begin_step(self._device)

    def choose(self, numerator: float, used: UsedWeights, *, host_reads: bool, least: float) -> Decider:
        """Return who decides on a step whose backwards are launched; with `host_reads` the host reads its scalars in any case."""

        def follow(sums: Tensor) -> Decision:
            return decide(sums, numerator, self._own.job.optimizer.clip_norm, used.expected_flags(), least)

        updater = self._own.current.weights.updater
        if self._device.type != "cuda":
            return Decider(updater)
        may_decide = self._gpu_may_decide
        is_usual = not host_reads and self.num_updates > 0 and not self._own.is_apart
        if is_usual and may_decide and not self._acts_on_spikes and used.can_be_expected():
            return Decider(updater, StepState.LAUNCHED, follow)
        if is_usual and updater.offload.is_apart(self._device):
            return Decider(updater, StepState.SENT, follow, may_decide)
        return Decider(updater, is_exception=may_decide)

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
                "writes of the steps between may be lost. Write them under torch.no_grad()"
            )
            refusals.remark(self._own.job.run.waived("state", "forward-state", reason))

    @property
    def _gpu_may_decide(self) -> bool:
        """Whether updates may be launched before the host knows the sums: where the optimizer allows it."""
        return not self.writes_unseen and self._updaters_hold_back

    @functools.cached_property
    def _updaters_hold_back(self) -> bool:
        """Whether the optimizer of every rank can; every rank asks in its first step."""
        with outside_step():
            return all(gather_values(can_hold_back(self._own.current.weights.updater), self._own.layout.world_size))


def can_hold_back(updater: Updater) -> bool:
    """Return whether the device can leave an update out by a number that the host has not read, as torch's fused kernels do.

    Other optimizers, and hooks on one, would see gradients that are not finite.
    """
    optimizer = updater.optimizer
    return optimizer is None or (
        type(optimizer).__module__.startswith("torch.optim.")
        and getattr(optimizer, "_step_supports_amp_scaling", False)
        and "step" not in vars(optimizer)
        and not has_hooks(optimizer)
        and all(piece.value.device.type == "cuda" for piece in updater.pieces)
    )


@torch.no_grad()
def step_unless(updater: Updater, held_back: Tensor, factor: Tensor) -> None:
    """Multiply the gradients by `factor` and update the pieces; change neither where `held_back` is 1.

    The host waits for neither number, which `can_hold_back` must allow.
    """
    if updater.optimizer is None:
        return
    gradients = gradients_of(updater.pieces)
    scaling: Any = updater.optimizer
    scaling.found_inf = held_back
    if all(gradient.dtype == torch.float32 for gradient in gradients):
        scaling.grad_scale = (1.0 / factor).float()  # the kernel divides by it, in float32
    else:
        torch._foreach_mul_(gradients, torch.where(held_back > 0, 1.0, factor))
    try:
        updater.update(gradients, held_back)
    finally:
        scaling.__dict__.pop("grad_scale", None)
        del scaling.found_inf


@torch.no_grad()
def send_unless(updater: Updater, held_back: Tensor, factor: Tensor) -> None:
    """Multiply the gradients by `factor` and send them to the host for `Updater.step`; by 1 where `held_back` is 1.

    The host waits for neither number. They are there once it has read a number that it asks for later.
    """
    gradients = gradients_of(updater.pieces)
    torch._foreach_mul_(gradients, torch.where(held_back > 0, 1.0, factor))
    updater.offload.send(gradients)
