"""Taking the steps of a prepared run on one rank: what the ranks agree on, the update, and the report.

```
forwards, backwards ─► sums of all ranks ─► update ─► report
                       count, loss, norm², flags: one all_reduce
```
The forwards and backwards are carried out by an `Interpreter`. On a GPU the update is launched before the host has read the
sums, and decided on the device: the step is then *open* until the host needs to know, at the latest before its
next one. The checks of watched steps surround a step and see it through its observer.

The sums of a step over all ranks, and what follows from them: on the device at once, on the host when it reads them.

```
loss, count, norm², flags ─ all_reduce ─┬─► decision on the device: factor on the gradients, and whether to hold back
                                        └─► copy on its way to the host, which reads it when it closes the step
```
On a GPU the update is launched before the host has read the sums. It changes nothing where they are unusual (a number is
not finite, no token counts, or a rank refuses the step); then the host decides, from the same weights and gradients.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from samestep.program.ops import REPLICA_SCALARS
from samestep.runtime.assembly import Assembly, Weights, copy_modes
from samestep.runtime.axes import forward_state
from samestep.runtime.guards import nonfinite, step_trials
from samestep.runtime.guards.canary import Canary
from samestep.runtime.guards.drift import DriftMonitor
from samestep.runtime.guards.outside_changes import LoopChanges, OutsideChanges
from samestep.runtime.guards.refusals import REFUSED, Refusals
from samestep.runtime.guards.skipped_steps import MASKED, SkippedSteps
from samestep.runtime.guards.step_trials import StepTrials
from samestep.runtime.held_assembly import HeldAssembly
from samestep.runtime.host_copies import Reading
from samestep.runtime.interpreter import Interpreter
from samestep.runtime.ledger import outside_step, owned
from samestep.runtime.loss_spikes import SpikeWatch
from samestep.runtime.microbatches import StepBatch
from samestep.runtime.optimizers.optimizer_step import clip_factor
from samestep.runtime.optimizers.used_weights import UsedWeights
from samestep.runtime.processes import join
from samestep.runtime.processes.messages import gather_values
from samestep.runtime.step_observer import Indices, ReplicaScalars, StepObserver, StepScalars
from samestep.runtime.step_report import StepReport, forget_peak, peak_memory_bytes, peak_reserved_bytes

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


_NO_SAMPLES: Indices = np.empty(0, dtype=np.int64)


class Stepper:
    """Takes the steps of a run. Every rank makes one, and all call its methods in the same order."""

    def __init__(self, own: HeldAssembly, observer: StepObserver, *, owns_weights: bool) -> None:
        """Make it before the run is prepared; with `owns_weights` nobody else holds a weight between two steps."""
        self._own, self._observer, self._owns_weights = own, observer, owns_weights
        self.job, self.place = own.job, own.place
        self.steps_taken = 0
        self.spikes = SpikeWatch(self.job.numerics)
        """The losses of the last steps, by which a spike is told."""
        self.refusals = Refusals(self.job.run)
        self.loop_changes: LoopChanges | None = None
        """What the loop changes of the first replica, where this rank trains several."""
        self._skipped = SkippedSteps(self.job.numerics)
        self._num_taken = 0
        self._num_updates = 0
        """Updates of the weights in this process, of which the host waits for the first."""
        self._open: OpenStep | None = None
        """The step whose update was launched, and whose sums the host has not read."""
        self._writes_unseen = self._save_was_requested = False
        self.is_amid_step = False
        """Whether a step is being taken or has failed, so that weights may still be gathered."""
        self._data_wait_s = 0.0

    @property
    def held(self) -> Assembly:
        """The assembly, whose weights may still be on their way from the ranks that updated them.

        Raises:
            LayoutError: the run is not prepared yet.
        """
        self.close()
        return self._own.current

    @property
    def whole_assembly(self) -> Assembly:
        """The assembly, whose weights are whole.

        Raises:
            LayoutError: the run is not prepared yet.
        """
        held = self.held
        held.weights.store.settle()
        return held

    def wait_for_first_update(self) -> None:
        """Let the host wait for the next update, as for the first one of the process: the weights were read from files."""
        self._num_updates = 0

    def take(self, batch: StepBatch) -> StepReport:
        """Take a step, and where one is due, do a part of it once more and compare what ranks hold.

        Collective over the world: every rank calls it with the same batch; if one does not, the others wait until the
        time limit.
        """
        for reason in () if self.is_amid_step else self.held.model.replaced.take_over(inside=False):
            self.refusals.add("state", f"step {batch.step + 1}: {reason}")
        self.is_amid_step = True
        report = self._taken(batch)
        self.is_amid_step = False
        return report

    def _taken(self, batch: StepBatch) -> StepReport:
        self._num_taken += 1
        every, taken = self.job.train.watch_every, self._num_taken
        regularly = step_trials.is_regular(batch.step, every, taken, self.held.parallel.program)
        if self._own.replicas is not None and len(self._own.replicas.assemblies) > 1:  # the canary knows one model
            return self._step(batch, may_run_ahead=False)
        if not regularly and not step_trials.is_early(every, taken, self.held.parallel.program):
            return self._step(batch)
        self.held.weights.store.settle()  # what is repeated or compared reads any weight
        if self._observer.is_proof:  # which compares more
            return self._take_compared_step(batch) if regularly else self._step(batch)
        self._trials.loss_is_tried &= not regularly  # again: a loss may come to couple samples later
        watching = self._canary.watching(batch, self._observer, is_first=taken == 1, replays=regularly)
        with watching as canary, self._observe_with(canary):
            return canary.checked(self._take_compared_step(batch) if regularly else self._step(batch))

    @functools.cached_property
    def _drift_monitor(self) -> DriftMonitor:
        return DriftMonitor(self.held)

    @functools.cached_property
    def _canary(self) -> Canary:
        return Canary(self.held, self.job, self._own.source.loss)

    @functools.cached_property
    def _trials(self) -> StepTrials:
        return StepTrials(self.held, self._own.source.loss, self.refusals, self.place.device)

    @functools.cached_property
    def _used(self) -> UsedWeights:
        number = self.job.numerics.replicas if self._own.replicas is not None else 1
        return UsedWeights.of(self.held.parallel.program, self.held.parallel.mesh, self.held.model.spec, number)

    @functools.cached_property
    def _outside(self) -> OutsideChanges:
        return OutsideChanges(self._own.source.model, self.held)

    def _take_compared_step(self, batch: StepBatch) -> StepReport:
        """Take a step, and compare what several ranks must hold alike."""
        if self._own.layout.world_size == 1:
            return self._step(batch, may_run_ahead=False)
        return self._drift_monitor.watch(lambda: self._step(batch, may_run_ahead=False), batch.shares(0, 1, 1)[0])

    @contextmanager
    def _observe_with(self, observer: StepObserver) -> Iterator[None]:
        before, self._observer = self._observer, observer
        try:
            yield
        finally:
            self._observer = before

    # -- inside a step -----------------------------------------------------------------------------

    def _step(self, batch: StepBatch, *, may_run_ahead: bool = True) -> StepReport:
        """Take a step; on a GPU return before the device has done it, if that is possible and allowed."""
        model, weights = self.held.model, self.held.weights
        began = time.perf_counter()
        forget_peak(self.place.device)
        for _, replica in self._own.each():
            if replica.model is not model:
                copy_modes(model.module, replica.model.module)
        self.refusals.compare(self._outside.evaluated())
        reason = self.loop_changes.refusal() if self.loop_changes is not None else ""
        if reason := reason or self._outside.refusal(self.held):
            self.refusals.add("state", f"step {batch.step + 1}: {reason}")
        self._trials.try_data(self.held, batch)
        running = nonfinite.save_values(model.running_buffers)
        if self._runs_ahead:
            weights.updater.live.begin_step(self.place.device)
        is_usual = (
            may_run_ahead and self._own.replicas is None and self._num_updates > 0 and not self._observer.hears_scalars
        )
        is_ahead = is_usual and self._runs_ahead and not self.spikes.acts
        is_sent = is_usual and weights.updater.is_apart(self.place.device)
        own = [self._own_scalars(batch, index, number) for index, (number, _) in enumerate(self._own.each())]
        is_ahead = is_ahead and self._used.can_be_expected()
        sums = self._agree(own, is_ahead)
        numerator = self.held.objective.nominal_count / weights.updater.loss_scale.scale
        decision = self._decision(sums, numerator) if is_ahead or is_sent else None
        held_back = decision.held_back if decision is not None else torch.ones((), device=sums.device)
        if decision is not None and is_sent:
            weights.updater.send_unless(decision.held_back, decision.factor)
        written = torch.zeros_like(held_back) if is_ahead else weights.updater.was_written(sums.device)
        opened = OpenStep(
            batch=batch,
            began_s=began,
            running_buffers=running,
            sums=Reading(torch.cat([sums, torch.stack([held_back.double(), written.double()])])),
            numerator=numerator,
            lr_factor=weights.lr_factor(batch.step),
            data_wait_s=self._data_wait_s,
        )
        if decision is None or not is_ahead:
            return self._closed(opened)
        weights.updater.set_lr(opened.lr_factor)
        weights.updater.step_index = batch.step
        if weights.updater.live.was_written_early():
            weights.updater.live.take_over()
        weights.updater.unused = self._used.expected()
        self._update(lambda: weights.updater.step_unless(decision.held_back, decision.factor))
        self.steps_taken = batch.step + 1
        opened.report = StepReport.late(self.steps_taken, self.close)
        self._open = opened
        batch.before_next(self.close)
        return opened.report

    def close(self) -> None:
        """Read the sums of a step whose update was launched before, if there is one, and do what they ask for.

        Collective over the world where the step is not finite or is refused: every rank calls it, at the latest before
        its next step; if one does not, the others wait until the time limit.
        """
        opened, self._open = self._open, None
        if opened is None:
            return
        assert opened.report is not None
        self.steps_taken = opened.batch.step
        try:
            opened.report.fill(self._closed(opened))
        except BaseException as error:
            opened.report.fail(error)
            raise

    def _closed(self, opened: OpenStep) -> StepReport:
        """Wait for a step's sums, decide on its update unless the device has made it, and return the report."""
        batch, updater = opened.batch, self.held.weights.updater
        *sums, was_held_back, is_written = opened.sums.numbers()
        agreed, is_written_unseen, is_save_wanted, uses = scalars_of(sums, len(self._used.unsure))
        if exchanges := agreed.stop >= REFUSED:
            agreed = replace(agreed, stop=agreed.stop % REFUSED)
            self.refusals.raise_agreed(self._own.layout.world_size)
        is_save_wanted |= self._used.read(uses, exchanges=exchanges, wants_save=self._save_was_requested)
        if is_written_unseen:
            self._wait_from_now_on(batch)
        self._observer.agreed(agreed)
        if agreed.stop > 0:
            batch.end_stream()
        # A replica whose part counts nothing has no update, and no gradient.
        scales = [opened.numerator / one.count if one.count else None for one in agreed.replicas]
        norms = [
            math.sqrt(one.norm_squared) * (scale or 0.0) for one, scale in zip(agreed.replicas, scales, strict=True)
        ]
        # Of replicas that are trained apart, the root mean square.
        loss = agreed.loss_sum / agreed.count if agreed.count else math.nan
        norm = math.hypot(*norms) / math.sqrt(len(norms))
        is_masked = not agreed.count and math.isfinite(agreed.loss_sum) and math.isfinite(norm)
        finite = math.isfinite(loss) and math.isfinite(norm)
        spike = self.spikes.judge(loss) if finite else ""
        note = MASKED if is_masked else spike if finite else self._diagnose(batch)
        skipped = bool(note) and self._skipped.skips(
            batch.step + 1,
            note,
            loss_is_finite=math.isfinite(loss),
            is_spike=finite,
            is_masked=is_masked,
            is_scaled=updater.loss_scale.scale > 1.0,
        )
        self._skipped.note(skipped=skipped)
        self._used.updated(is_first=not self._num_updates) if not skipped else None
        self._num_updates += not skipped
        if skipped:
            nonfinite.put_back(opened.running_buffers)
        must_reread = bool(is_written) or self._own.replicas is not None
        for number, assembly in self._own.each():
            if skipped or was_held_back or opened.report is None:
                scale = None if skipped else scales[number]
                factor = None if scale is None else scale * clip_factor(norms[number], self.job.optimizer.clip_norm)
                assembly.weights.updater.unused = self._used.unused(number)
                self._end_update(opened, factor, must_reread, was_held_back > 0)
            if math.isfinite(loss):
                self._adapt_loss_scale(assembly.weights, overflowed=not finite)
        self.steps_taken = batch.step + 1
        step_s = time.perf_counter() - opened.began_s
        return StepReport(
            step=self.steps_taken,
            loss=loss,
            grad_norm=norm,
            lr=updater.first_lr[0] * opened.lr_factor if updater.first_lr else math.nan,
            tokens=int(agreed.count),
            step_s=step_s,
            tokens_per_s=agreed.count / step_s,
            data_wait_s=opened.data_wait_s,
            memory_bytes=peak_memory_bytes(self.place.device),
            reserved_bytes=peak_reserved_bytes(self.place.device),
            skipped=skipped,
            spike=bool(spike),
            stop=agreed.stop > 0,
            save=is_save_wanted,
            note=note,
            remarks=self.refusals.news(),
        )

    def _end_update(self, opened: OpenStep, factor: float | None, must_reread: bool, was_held_back: bool) -> None:
        """Make the update that the device has not made, with gradients times `factor`; make none where that is None."""
        updater = self.held.weights.updater
        if opened.report is None:
            updater.set_lr(opened.lr_factor)
            updater.step_index = opened.batch.step
        if factor is None:
            updater.forget_sent()
            return
        if must_reread:
            updater.reread()
        self._update(functools.partial(updater.step, factor, was_held_back=was_held_back))

    def _adapt_loss_scale(self, weights: Weights, *, overflowed: bool) -> None:
        """Adapt the loss scale after a step, and what codes have lost of gradients under it."""
        before = weights.updater.loss_scale.scale
        weights.updater.loss_scale.after(overflowed=overflowed)
        if weights.updater.loss_scale.scale != before and self._own.replicas is None:
            weights.store.codes.scale(weights.updater.loss_scale.scale / before)

    def _decision(self, sums: Tensor, numerator: float) -> Decision:
        return decide(sums, numerator, self.job.optimizer.clip_norm, self._used.expected_flags())

    def _own_scalars(self, batch: StepBatch, index: int, number: int) -> Tensor:
        """Run the forwards and backwards of the replica at `index`, of this number; return this rank's share of its loss, count
        and squared norm, and its uses of weights.
        """
        totals = self.forward_backward(batch, index)
        weights = self.held.weights
        uses = self._used.note(number, weights.store.without_gradient())
        if reason := self._used.unproven(number):
            self.refusals.add("state", f"step {batch.step + 1}: {reason}")
        for name in weights.store.watch.written():
            self.refusals.add(
                "state",
                f"step {batch.step + 1}: {forward_state.explain_lost_write(name, f'zero={self._own.layout.zero}')}",
            )
        norm_squared = weights.store.norm_squared() + weights.updater.overflow(self.place.device)
        weights.store.watch.take_back()
        return torch.cat([totals, norm_squared.view(1), uses])

    def forward_backward(self, batch: StepBatch, index: int = 0) -> Tensor:
        """Run the forwards and backwards of the program; return this rank's loss sum and count, float64 [2].

        Of a rank that trains several replicas, they are those of the replica at `index`.

        Collective over the world: every rank calls it with the same batch; if one does not, the others wait until the
        time limit.
        """
        interpreter = Interpreter(self.held, self.job, self.place, self._observer, self._trials, self.steps_taken + 1)
        totals = interpreter.forward_backward(batch, index)
        self._data_wait_s = interpreter.data_wait_s
        for reason in self.held.model.replaced.take_over(inside=True):
            self.refusals.add("state", f"step {batch.step + 1}: {reason}")
        for line in self.whole_assembly.model.compiled.news():
            self.refusals.remark(line)
        return totals

    def _agree(self, own: Sequence[Tensor], is_ahead: bool = False) -> Tensor:
        """Sum the loss, the count and the squared gradient norm of each replica and the flags over all ranks, waiting for
        none: float64, as many as `StepSpec.num_scalars`.
        """
        weights, device = self.held.weights, self.place.device
        self._save_was_requested = bool(join.save_requested())
        says_more = self.refusals.is_pending or self._used.has_changed
        flag = join.stop_requested() + self._save_was_requested * SAVE + says_more * REFUSED
        stop = torch.full((1,), flag, dtype=torch.float64, device=device)  # filled there, not copied from the host
        if self._runs_ahead and not is_ahead:
            stop += weights.updater.live.was_written_unseen(device) * WRITTEN
        scalars = own[0] if self._own.replicas is None else self._own.replicas.sums(own, device)
        sums = torch.cat([scalars, stop])
        if self._own.layout.world_size > 1:
            with owned("scalars"):
                dist.all_reduce(sums, group=self.held.parallel.mesh.groups["world"])
        return sums

    @property
    def _runs_ahead(self) -> bool:
        """Whether updates may be launched before the host knows the sums: on a GPU, where the optimizer allows it."""
        return self.place.device.type == "cuda" and not self._writes_unseen and self._updaters_hold_back

    @functools.cached_property
    def _updaters_hold_back(self) -> bool:
        """Whether the optimizer of every rank can; every rank asks in its first step."""
        with outside_step():
            return all(gather_values(self.held.weights.updater.can_hold_back, self._own.layout.world_size))

    def _wait_from_now_on(self, batch: StepBatch) -> None:
        """Run ahead no more, since a step writes weights as no count of torch shows.

        Raises:
            UnprovenError: the first step did not, so the steps that ran ahead since may have lost what was written.
        """
        self._writes_unseen = True
        if self._num_taken > 1:
            reason = (
                f"step {batch.step + 1}: a forward or backward writes weights through .data, and the first one did not, so "
                "what was written in the steps between may be lost; to write them under torch.no_grad() works"
            )
            self.refusals.remark(self.job.run.waived("state", reason))

    def _update(self, update: Callable[[], None]) -> None:
        """Update this rank's weights, and make them visible to the next forward."""
        weights = self.held.weights
        with self._observer.running(self.held.parallel.program.tasks[-1], _NO_SAMPLES):
            self._trials.settle()
            update()
            self._trials.check_generators(self.held, self.steps_taken + 1, "the optimizer")
            self.refusals.raise_own()
            weights.updater.publish()
            weights.store.publish(waits=not self._owns_weights)

    def _diagnose(self, batch: StepBatch) -> str:
        """Run the step's forwards and backwards once more, and name the first module that makes a non-finite value."""
        return nonfinite.cause_of_nonfinite(self.held, lambda: self.forward_backward(batch)[0], batch)
