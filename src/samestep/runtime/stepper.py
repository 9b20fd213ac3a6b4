"""Taking the steps of a prepared run on one rank: each is a backward and an update.

```
backward   trials ─► forwards, backwards ─► agree         loss, count, norm², flags: one all_reduce
read       what the ranks have agreed on                  a step that some rank gave up is run again
update     decide ─► clip ─► optimizer ─► report
```
`run.step` is the three in a row. A loop that calls `run.backward` and `run.update` itself has other calls between them (`own_steps/`).
The forwards and backwards are carried out by an `Interpreter`. The host decides on the update, or on a GPU the device
(`device_decides.py`): the step is then *open* until the host needs to know, at the latest before its next one. The checks of watched
steps surround a step and see it through its observer.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from samestep.program.ops import StepFlag
from samestep.runtime.assembly import Assembly
from samestep.runtime.axes.forward_state import explain_lost_write
from samestep.runtime.device_decides import Deciders, StepState
from samestep.runtime.guards.step_guards import StepGuards
from samestep.runtime.held_assembly import HeldAssembly
from samestep.runtime.interpreter import Interpreter
from samestep.runtime.ledger import outside_step, owned
from samestep.runtime.open_step import WHOLE, OpenStep, Progress, ReadStep, StepBackward
from samestep.runtime.optimizers.optimizer_step import clip_factor
from samestep.runtime.optimizers.optimizers_by_name import ALL, Closure, UpdatedPart
from samestep.runtime.optimizers.used_weights import UsedWeights
from samestep.runtime.processes import join
from samestep.runtime.recording.step_recorder import StepRecorder
from samestep.runtime.step_observer import Indices, StepBatch, StepNumbers, StepObserver, StepScalars, flag_slots
from samestep.runtime.step_report import StepReport, peaks_of
from samestep.state.snapshot import KeptValues

_NO_SAMPLES: Indices = np.empty(0, dtype=np.int64)


class Stepper:
    """Takes the steps of a run. Every rank makes one, and all call its methods in the same order."""

    def __init__(
        self, assemblies: HeldAssembly, observer: StepObserver, recorder: StepRecorder, *, owns_weights: bool
    ) -> None:
        """Make it before the run is prepared; with `owns_weights` nobody else holds a weight between two steps."""
        self._own, self._owns_weights = assemblies, owns_weights
        self.job, self.place = assemblies.job, assemblies.place
        self.steps_taken = 0
        self.guards = StepGuards(assemblies, observer, recorder)
        self.refusals = self.guards.refusals
        self._deciders = Deciders(assemblies, self.guards.spikes)
        self.progress = Progress.BETWEEN
        self.launched: OpenStep | None = None
        """The step whose update was launched, and whose sums the host has not read, if there is one."""
        self._data_wait_s = 0.0
        self._count_each = 0.0
        """The count of a sample in the last step in which hooks have seen how large gradients are."""

    @property
    def held(self) -> Assembly:
        """The assembly, whose weights may still be on their way from the ranks that updated them.

        Raises:
            LayoutError: the run is not prepared yet.
        """
        if self.launched is not None:
            self._close()
        return self._own.current

    @property
    def whole_assembly(self) -> Assembly:
        """The assembly, whose weights are whole.

        Raises:
            LayoutError: the run is not prepared yet.
        """
        assembly = self.held
        assembly.weights.store.settle()
        return assembly

    def wait_for_first_update(self) -> None:
        """Let the host wait for the next update, as for the first one of the process: the weights were read from files."""
        self._deciders.num_updates = 0

    def take(
        self, batch: StepBatch, take: Callable[[], StepReport] | None = None, *, watches: bool = True
    ) -> StepReport:
        """Take a step, or a part of one by `take`; with `watches` the guards run samples again in a watched step, and compare ranks.

        Collective over the world, see [Note: collective calls].
        """
        assembly = self.held
        if self.progress is Progress.BETWEEN:
            for reason in assembly.model.replaced.take_over(inside=False):  # what the loop has put in place of weights
                self.guards.refuse_state(batch, reason)
        self.guards.find_loss(assembly, batch)
        self.progress = Progress.WITHIN
        steps = take or functools.partial(self._step, batch)
        report = self.guards.watch(batch, steps, replays=take is None) if watches else steps()
        self.progress = Progress.BETWEEN
        return report

    @functools.cached_property
    def used(self) -> UsedWeights:
        """The agreement of the ranks on the weights that steps use."""
        parallel = self.held.parallel
        return UsedWeights.of(parallel.program, parallel.mesh, self.held.model.spec, self._own.index)

    # -- inside a step -----------------------------------------------------------------------------

    def _step(self, batch: StepBatch) -> StepReport:
        """Take a step; on a GPU return before the device has done it, if that is possible and allowed."""
        opened = self.backward(batch)
        if opened.state is StepState.LAUNCHED:
            return self._launch(opened)
        return self.update(self.read(opened))

    def _launch(self, opened: OpenStep) -> StepReport:
        """Launch the update of a step on which the device decides; return its report, which whoever reads it completes."""
        assembly, updater = self.held, opened.decider.updater
        opened.prepare(updater)
        if updater.live.was_written_early():
            updater.live.take_over()
        updater.unused = self.used.expected()
        self.change(assembly, opened.decider.update)
        self.steps_taken = opened.batch.step + 1
        opened.report = StepReport.late(self.steps_taken, self._close)
        self.launched = opened
        opened.batch.before_next(self._close)
        return opened.report

    def _close(self) -> None:
        """Read the sums of a step whose update was launched, if there is one, and do what they ask for.

        Collective over the world where the step is not finite or is refused, see [Note: collective calls]: at the latest before
        its next step.
        """
        opened, self.launched = self.launched, None
        if opened is None:
            return
        assert opened.report is not None
        self.steps_taken = opened.batch.step
        try:
            opened.report.fill(self.update(self.read(opened)))
        except BaseException as error:
            opened.report.fail(error)
            raise

    def backward(self, batch: StepBatch, of: StepBackward = WHOLE) -> OpenStep:
        """Run the forwards and backwards of a step, or of one backward of it, and begin to sum its scalars over the ranks.

        The host does not wait for the sums: `read` does.

        Collective over the world, see [Note: collective calls].
        """
        began = time.perf_counter()
        if self.place.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.place.device)
        # Trials: what the loop has changed since the last step, and whether all ranks read the same samples.
        assembly = self.held
        self.guards.begin_step(assembly, batch)
        # Forwards and backwards.
        weights = assembly.weights
        running = assembly.model.running_buffers.keep()
        self._deciders.begin_step(weights.updater)
        names = (of.held or assembly).objective.names
        if (assembly.objective.divides_exactly or self.guards.outside.has_hooks) and not of.count:
            of = replace(of, count=self._count_each * batch.num_samples or assembly.objective.nominal_count)
        values = [KeptValues(code) for code in (*assembly.objective.hooks, self._own.source.loss)] if of.count else []
        values += [KeptValues(assembly.model.module, weights=False)] if of.count else []
        numerator = (of.count or assembly.objective.nominal_count) / weights.updater.loss_scale.scale
        with outside_step() if self.progress is Progress.REPEATING else nullcontext():
            scalars = self._own_scalars(batch, of)
            # Agree: one all_reduce, whose sums the host does not wait for.
            host_reads = (
                of.count > 0 or of.is_apart or self.progress is Progress.REPEATING or self.guards.observer.hears_scalars
            )
            least = self.refusals.watch.least_count(names)
            decider = self._deciders.choose(numerator, self.used, host_reads=host_reads, least=least)
            unseen = decider.is_exception and decider.updater.live.was_written_unseen(self.place.device)
            sums = self._agree(scalars, unseen)
        return OpenStep(
            batch=batch,
            began_s=began,
            running_buffers=running,
            sums=decider.reading(sums),
            numerator=numerator,
            lr_factor=weights.updater.rates.factors(weights.lr_factor, batch.step),
            data_wait_s=self._data_wait_s,
            decider=decider,
            state=decider.state,
            names=names,
            of=of,
            values_before=values,
        )

    def read(self, opened: OpenStep) -> ReadStep:
        """Wait for the sums of a backward, and note whether its numbers are unusual.

        Collective over the world, see [Note: collective calls].
        """
        summed = self._sums_of(opened)
        numbers = StepNumbers.of(summed, opened.numerator, self._own.index)
        note = ""
        if not numbers.are_finite:
            again = functools.partial(self.forward_backward, of=opened.of)
            note = self.guards.note_of(numbers, self.held, opened.batch, again)
        elif self.guards.spikes.acts and not opened.of.is_apart:
            note = self.guards.spikes.judge(numbers.loss)
        return ReadStep(opened, summed, numbers, note)

    def update(self, read: ReadStep, part: UpdatedPart = ALL, unused: frozenset[str] | None = None) -> StepReport:
        """Decide on the update of a part of the optimizer unless the device has, make it, and return the report.

        `unused` are the weights without a gradient; by default those that the ranks have agreed on.

        Raises:
            NonFiniteError, SpikeError, DataError: as `SkippedSteps.judge` says.
        """
        opened, numbers, weights = read.opened, read.numbers, self.held.weights
        updater, number = weights.updater, opened.batch.step + 1
        is_scaled = updater.loss_scale.scale > 1.0
        if skipped := self.guards.skipped.judge(number, read.note, numbers, is_scaled=is_scaled):
            opened.running_buffers.restore()
        else:
            self.used.updated(is_first=not self._deciders.num_updates)
            self._deciders.num_updates += 1
        if part is not ALL:  # whose own updates count
            opened.lr_factor = updater.rates.factors(weights.lr_factor, opened.batch.step)
        if opened.state is not StepState.LAUNCHED:
            updater.unused = self.used.agreed if unused is None else unused
            self._update_weights(read, part, skipped=skipped)
        if math.isfinite(numbers.loss):
            updater.loss_scale.after(overflowed=not numbers.are_finite, has_moves=self._own.is_apart)
        self.steps_taken = max(self.steps_taken, number) if opened.of.is_apart else number
        return self.report(read, part, skipped=skipped)

    def _update_weights(self, read: ReadStep, part: UpdatedPart, *, skipped: bool) -> None:
        """Update the weights as the host has decided, or none in a step that is skipped, or in which their model counts nothing."""
        opened, numbers, assembly = read.opened, read.numbers, self.held
        updater, scale = assembly.weights.updater, numbers.scale
        if opened.report is None:  # else it was when its update was launched
            opened.prepare(updater)
        if skipped or scale is None:
            updater.offload.forget()
            return
        if opened.was_written or opened.of.is_apart or self._own.is_apart:
            updater.live.reread()
        if opened.of.is_apart:
            assembly.weights.store.deliver()
        if updater.whole.evaluates(part):
            closure = Closure(updater.pieces_of(part), functools.partial(self._evaluate, opened), numbers.loss)
            part = replace(part, evaluating=updater.whole.evaluating, closure=closure)
        factor = scale * clip_factor(numbers.own_norm, self.job.optimizer.clip_norm)
        were_sent = opened.state is StepState.SENT
        self.change(assembly, functools.partial(updater.step, factor, were_sent=were_sent, part=part))

    def _evaluate(self, opened: OpenStep) -> tuple[float, float]:
        """Return the loss of a step at the present weights, and the factor that makes the gradients those of a mean, clipped.

        Collective over the world, see [Note: collective calls].
        """
        weights = self.held.weights
        weights.updater.live.publish()
        weights.store.publish()
        again = self.backward(opened.batch, replace(opened.of, is_apart=True, waits=False))
        numbers = StepNumbers.of(self._sums_of(again), again.numerator)
        return numbers.loss, (numbers.scale or 0.0) * clip_factor(numbers.own_norm, self.job.optimizer.clip_norm)

    def _sums_of(self, opened: OpenStep) -> StepScalars:
        """Wait for a step's sums and exchange what a flag asks for; a step that some rank gave up, or in which hooks have seen gradients of
        a mean over another count, is taken once more.

        A count that the loss guards against zero is that of the whole step, guarded.

        Collective over the world, see [Note: collective calls]; all ranks read the same flags.

        Raises:
            UnprovenError: some rank refuses the step.
        """
        summed = opened.read(len(self.used.unsure), self._own.index)
        world_size = self._own.layout.world_size
        while (summed.flags[StepFlag.REFUSES] and self.refusals.raise_agreed(world_size)) or (
            opened.of.count and self._has_other_count(summed, opened)
        ):
            self._repeat(opened)
            summed = opened.read(len(self.used.unsure), self._own.index)
        self._answer(summed, opened.batch)
        least = self.refusals.watch.least_count(opened.names)
        return summed.guarded(least) if least else summed

    def _repeat(self, opened: OpenStep) -> None:
        """Run the forwards and backwards of a step once more, from where it began, since some rank gave them up.

        Collective over the world, see [Note: collective calls].
        """
        opened.running_buffers.restore()
        for values in opened.values_before:
            values.restore()
        self.held.weights.updater.offload.forget()
        progress, self.progress = self.progress, Progress.REPEATING
        again = self.backward(opened.batch, opened.of)
        self.progress = progress
        opened.sums, opened.state, opened.numerator = again.sums, again.state, again.numerator

    def _has_other_count(self, summed: StepScalars, opened: OpenStep) -> bool:
        """Return whether the count of a step is another than what its backward has divided by, and let its repetition divide by it."""
        counted = max(summed.count, self.refusals.watch.least_count(opened.names))
        if not counted or self._own.is_apart:
            return False
        self._count_each = counted / opened.batch.num_samples
        divided_by, opened.of = opened.of.count, replace(opened.of, count=counted)
        return not math.isclose(counted, divided_by, rel_tol=1e-9)

    def _answer(self, summed: StepScalars, batch: StepBatch) -> None:
        """Do what the flags of all ranks ask for: agree on the weights of the step, record, stop.

        Collective over the world, see [Note: collective calls]; all ranks read the same flags.
        """
        self.used.read(summed.uses, exchanges=summed.flags[StepFlag.UNUSED_CHANGED] > 0)
        if summed.flags[StepFlag.WROTE_UNSEEN]:
            self._deciders.leave_to_host(batch.step, self.refusals, has_left_out=self.guards.num_taken > 1)
        self.guards.observer.agreed(summed)
        if summed.flags[StepFlag.RECORD] and (line := self.guards.recorder.asked_to_record(batch.step + 1)):
            self.refusals.remark(line)
        if summed.flags[StepFlag.STOP]:
            batch.end_stream()
            join.note_stop()

    def report(self, read: ReadStep, part: UpdatedPart = ALL, *, skipped: bool = False) -> StepReport:
        """Return the report of a step whose sums are read, or of one of its backwards."""
        opened, summed, numbers = read.opened, read.summed, read.numbers
        count, device, step_s = summed.count, self.place.device, time.perf_counter() - opened.began_s
        terms, values = opened.names.means(summed.reported, self.refusals.watch.agreed)
        memory_bytes, reserved_bytes = peaks_of(device)
        return StepReport(
            step=opened.batch.step + 1,
            loss=numbers.loss,
            grad_norm=numbers.norm,
            lr=self.held.weights.updater.rates.first_with(opened.lr_factor, part),
            tokens=int(count),
            step_s=step_s,
            tokens_per_s=count / step_s,
            data_wait_s=opened.data_wait_s,
            memory_bytes=memory_bytes,
            reserved_bytes=reserved_bytes,
            note=read.note,
            skipped=skipped,
            spike=numbers.are_finite and bool(read.note),
            stop=summed.flags[StepFlag.STOP] > 0,
            save=summed.flags[StepFlag.SAVE] > 0,
            terms=terms,
            values=values,
            remarks=self.refusals.news(),
        )

    def _own_scalars(self, batch: StepBatch, of: StepBackward) -> Tensor:
        """Run the forwards and backwards; return this rank's share of loss, count and squared norm, and its uses of weights."""
        totals = self.forward_backward(batch, of)
        weights = self.held.weights
        without = weights.store.without_gradient()
        uses = self.used.note({name: without[name] for name in without if name in (of.names or without)})
        if self.used.cut_by and (reason := self.used.unproven()):
            self.guards.refuse_state(batch, reason)
        for name in weights.store.lost_writes():
            self.guards.refuse_state(batch, explain_lost_write(name, f"zero={self._own.layout.zero}"))
        updater = weights.updater
        norm_squared = weights.store.norm_squared(of.names)
        if updater.loss_scale.scale > 1.0:
            norm_squared = updater.loss_scale.with_overflow(norm_squared, updater.pieces, of.names)
        weights.store.take_back()
        if totals.numel() == 2:  # the loss reports nothing
            return torch.cat([totals, norm_squared.view(1), uses])
        return torch.cat([totals[:2], norm_squared.view(1), uses, totals[2:]])

    def forward_backward(self, batch: StepBatch, of: StepBackward = WHOLE) -> Tensor:
        """Run the forwards and backwards of the program; return this rank's loss sum and count, and what the loss reports, float64.

        Collective over the world, see [Note: collective calls].
        """
        current = self.held
        assembly, trials = of.held or current, of.trials or self.guards.trials
        self.refusals.watch = assembly.objective.watch
        self.refusals.try_step = functools.partial(self.guards.try_step, trials, assembly, batch)
        interpreter = Interpreter(assembly, self.job.train.seed, self.guards, trials, self.steps_taken + 1, of)
        try:
            totals = interpreter.forward_backward(batch)
        except Exception:
            self.refusals.raise_own()  # such as a replaced module, by which the forward fails
            raise
        self._data_wait_s = interpreter.data_wait_s
        self.refusals.gave_up_at = current.weights.store.gave_up
        for reason in current.model.replaced.take_over(inside=True):  # what the forward has
            self.guards.refuse_state(batch, reason)
        current.weights.store.settle()
        for line in current.model.compiled.news() if self.job.run.compile != "none" else ():
            self.refusals.remark(line)
        return totals

    def _agree(self, scalars: Tensor, wrote_unseen: bool | Tensor = False) -> Tensor:
        """Sum the scalars and the flags over all ranks, waiting for none (float64 [StepSpec.num_scalars])."""
        flags = {
            **join.requests(),
            StepFlag.WROTE_UNSEEN: wrote_unseen,
            StepFlag.REFUSES: self.refusals.is_pending,
            StepFlag.UNUSED_CHANGED: self.used.has_changed,
        }
        sums = torch.cat([self._own.to_sum(scalars), flag_slots(flags, self.place.device)])
        if self.place.world_size > 1:
            with owned("scalars"):
                dist.all_reduce(sums, group=self.held.parallel.mesh.groups["world"])
        return sums

    def change(self, assembly: Assembly, update: Callable[[], None]) -> None:
        """Let code of the optimizer change this rank's weights, and make them visible to the next forward."""
        weights = assembly.weights
        guards, task = self.guards, assembly.parallel.program.tasks[-1]
        with guards.recorder.running(task, _NO_SAMPLES, guards.observer):
            guards.generators.settle()
            update()
            if generator := guards.generators.moved():
                guards.refuse_generator(generator, assembly, self.steps_taken + 1)
            guards.generators.leave()  # to the loop
            self.refusals.raise_own()
            for part in assembly.parallel.step_parts:
                part.end_update()
            if assembly.parallel.batch_norms.of_losses.held:
                assembly.parallel.batch_norms.of_losses.write()
            weights.updater.live.publish()
            weights.store.publish(waits=not self._owns_weights)

    def end_step(self, step: int) -> None:
        """Let models that follow others move after a step, and models that are trained independently exchange weights when that is due."""
        self.follow(step)
        self._own.exchange(step + 1)

    def follow(self, step: int, updated: frozenset[str] | None = None) -> None:
        """Let models that follow others move after a step, or after an update of some of its weights.

        Collective over the stages of a pipeline, see [Note: collective calls].
        """
        if self._own.averages.following:
            assembly = self.whole_assembly
            self._own.averages.follow(
                assembly.model.module, assembly.parallel.program, assembly.parallel.mesh, step, updated
            )
