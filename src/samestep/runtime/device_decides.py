"""The one who decides on a step's update: on a GPU the device, before the host has read the scalars, wherever that is possible.

```
HostDecides     all_reduce ─► the host reads ─► update, or none
DeviceDecides   all_reduce ─► update, which changes nothing in an unusual step ─► the host reads, before the next step
```
An unusual step (a number is not finite, no token counts, a rank refuses it) is decided by the host in either case: where the
device has held the update back, from the same weights and gradients. torch's fused kernels can: they divide gradients by
`grad_scale`, and change nothing where `found_inf` is 1.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from samestep.program.ops import FLAG_SLOTS, REPLICA_SCALARS, StepFlag
from samestep.runtime.guards.refusals import Refusals
from samestep.runtime.guards.unusual_steps import SpikeWatch
from samestep.runtime.held_assembly import HeldAssembly
from samestep.runtime.host_copies import Reading
from samestep.runtime.ledger import outside_step
from samestep.runtime.open_step import HostDecides, StepState, read_with
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


@dataclass(slots=True)
class HostDecidesHere(HostDecides):
    """The host decides on a step of a GPU."""

    is_exception: bool
    """Whether the device decides on other steps, which overlook what is written unseen."""

    def wrote_unseen(self, device: torch.device) -> bool | Tensor:
        """Return whether the backwards of the step wrote weights unseen, on the device (float64 [])."""
        return self.is_exception and self.updater.live.was_written_unseen(device)


@dataclass(slots=True)
class HostDecidesOnSent(HostDecidesHere):
    """The host decides on a step of a GPU, which sends the gradients to an optimizer on the host meanwhile."""

    first_state: ClassVar[StepState] = StepState.SENT
    decide: Callable[[Tensor], Decision]
    """Returns what follows from the summed scalars, on the device."""

    def reading(self, sums: Tensor) -> Reading:
        """Return what the host reads: the sums, 1 where gradients are not multiplied, and 1 if weights were written."""
        decision = self.decide(sums)
        send_unless(self.updater, decision.held_back, decision.factor)
        return read_with(sums, decision.held_back.double(), self.updater.live.was_written(sums.device))


@dataclass(slots=True)
class DeviceDecides(HostDecides):
    """The device decides, for which the host does not wait: `can_hold_back` allows it."""

    first_state: ClassVar[StepState] = StepState.LAUNCHED
    decide: Callable[[Tensor], Decision]
    """Returns what follows from the summed scalars, on the device."""
    _decision: Decision | None = None

    def reading(self, sums: Tensor) -> Reading:
        """Return what the host reads later: the sums, 1 where the update is held back, and 0."""
        self._decision = self.decide(sums)
        held_back = self._decision.held_back.double()
        return read_with(sums, held_back, torch.zeros_like(held_back))

    def update(self) -> None:
        """Update the weights, or change nothing in an unusual step."""
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
        if self._device_may_decide:
            updater.live.begin_step(self._device)

    def choose(self, numerator: float, used: UsedWeights, *, host_reads: bool, least: float) -> HostDecides:
        """Return who decides on a step whose backwards are launched; with `host_reads` the host reads its scalars in any case."""

        def follow(sums: Tensor) -> Decision:
            return decide(sums, numerator, self._own.job.optimizer.clip_norm, used.expected_flags(), least)

        updater = self._own.current.weights.updater
        if self._device.type != "cuda":
            return HostDecides(updater)
        may_decide = self._device_may_decide
        is_usual = not host_reads and self.num_updates > 0 and not self._own.are_apart
        if is_usual and may_decide and not self._acts_on_spikes and used.can_be_expected():
            return DeviceDecides(updater, follow)
        if is_usual and updater.offload.is_apart(self._device):
            return HostDecidesOnSent(updater, may_decide, follow)
        return HostDecidesHere(updater, may_decide)

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
    def _device_may_decide(self) -> bool:
        """Whether updates may be launched before the host knows the sums: where the optimizer allows it."""
        return self._device.type == "cuda" and not self.writes_unseen and self._updaters_hold_back

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
