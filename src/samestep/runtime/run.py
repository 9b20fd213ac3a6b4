"""A model in a layout, taking steps: what a user's own loop, the trainer and the proof call.

```python
run = samestep.parallelize(model, loss, optimizer, layout="dp=2 zero=3", job=job)
for batch in samestep.batches(dataset, job):
    report = run.step(batch)
```
The forwards and backwards of a step are carried out by an `Interpreter`. The ranks then agree on the step by one all_reduce,
and each updates its weights, or none does.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from samestep.building.pretrained_form import PretrainedForm
from samestep.errors import DataError, LayoutError
from samestep.job import Job
from samestep.layout import Layout
from samestep.program.program import Program
from samestep.runtime import evaluation, kept_state, whole_state
from samestep.runtime.assembly import Assembly, Weights, assemble, set_modes
from samestep.runtime.axes import recompute
from samestep.runtime.checkpoints import checkpoint
from samestep.runtime.guards import deterministic, nonfinite, watched_steps
from samestep.runtime.guards.canary import Canary
from samestep.runtime.guards.drift import DriftMonitor
from samestep.runtime.guards.refusals import Refusals
from samestep.runtime.guards.skipped_steps import SkippedSteps
from samestep.runtime.guards.step_trials import StepTrials
from samestep.runtime.host_copies import Reading
from samestep.runtime.interpreter import Interpreter
from samestep.runtime.ledger import outside_step, owned
from samestep.runtime.local_replicas import LocalReplicas
from samestep.runtime.loss_spikes import SpikeWatch
from samestep.runtime.microbatches import StepBatch
from samestep.runtime.optimizers.optimizer_step import Updater, clip_factor
from samestep.runtime.preparation import Loss, Source, built
from samestep.runtime.processes import join
from samestep.runtime.processes.join import RankInfo
from samestep.runtime.processes.mesh import forget_groups
from samestep.runtime.processes.messages import gather_values
from samestep.runtime.step_observer import Indices, StepObserver
from samestep.runtime.step_report import StepReport, forget_peak, peak_memory_bytes, peak_reserved_bytes
from samestep.runtime.step_sums import SAVE, WRITTEN, OpenStep, decide, scalars_of

_NOBODY = StepObserver()
_NO_SAMPLES: Indices = np.empty(0, dtype=np.int64)


class Run:
    """A model in a layout, ready to take steps. Every rank makes one, and all call its methods in the same order."""

    def __init__(
        self,
        source: Source,
        layout: Layout,
        job: Job,
        place: RankInfo,
        observer: StepObserver = _NOBODY,
        *,
        owns_weights: bool = False,
    ) -> None:
        """Make a run; with `owns_weights` nobody else holds a weight between two steps, when zero=1 may still gather it."""
        self.job, self.layout, self.place = job, layout, place
        self._owns_weights = owns_weights
        self.steps_taken = 0
        self.changes: tuple[str, ...] = ()
        """What resumes have changed of the job and its layout, and after which steps."""
        self._source, self._observer = source, observer
        if job.numerics.deterministic:
            deterministic.reserve_workspace()
        self._assembly: Assembly | None = None
        self.replicas: LocalReplicas | None = None
        """The replicas that this rank trains, where a job trains them apart; the first one's assembly is the run's."""
        self._num_taken = 0
        self._num_updates = 0
        """Updates of the weights in this process, of which the host waits for the first."""
        self.spikes = SpikeWatch(job.numerics)
        """The losses of the last steps, by which a spike is told."""
        self._skipped = SkippedSteps(job.numerics)
        self._refusals = Refusals(job.run)
        self._open: OpenStep | None = None
        """The step whose update was launched, and whose sums the host has not read."""
        self._writes_unseen = False
        self._data_wait_s = 0.0
        self._load_from: Path | None = None
        """The checkpoint that `prepare` will read."""

    @property
    def is_prepared(self) -> bool:
        """Whether `prepare` has built the model."""
        return self._assembly is not None

    @property
    def assembly(self) -> Assembly:
        """The prepared model, mesh, program and optimizer; its weights are whole.

        Raises:
            LayoutError: the run is not prepared yet.
        """
        held = self._held
        held.weights.store.settle()
        return held

    @property
    def _held(self) -> Assembly:
        """The assembly, whose weights may still be on their way from the ranks that updated them."""
        self._close()
        if self._assembly is None:
            raise LayoutError("the run is not prepared yet: call run.prepare(batch.samples([0])), or take a step")
        return self._assembly

    @property
    def program(self) -> Program:
        """The program of this rank's pipeline stage: the operations of one step."""
        return self._held.parallel.program

    @property
    def model(self) -> nn.Module:
        """This rank's module, after the layout has cut its weights."""
        return self.assembly.model.module

    @property
    def updater(self) -> Updater:
        """The optimizer over the weights that this rank updates, which hold what was written into the model since."""
        self.assembly.weights.store.take_back()
        self.assembly.weights.updater.reread()
        return self.assembly.weights.updater

    def prepare(self, example: Any) -> None:
        """Build the model in its layout, unless that is done; `example` is a batch from `batch.samples`.

        Collective over the world: every rank calls it; if one does not, the others wait until the time limit.
        """
        if self._assembly is None:
            self._assembly = self._assembled(example)
            for waived in self._assembly.model.remarks:
                self._refusals.remark(waived)
            where = self.program.step.layout
            if where != self.layout:
                self._refusals.remark(recompute.TAKEN)
            self.layout = where
            if self._load_from is not None:
                checkpoint.load(self, self._load_from)

    def _assembled(self, example: Any) -> Assembly:
        """Return the assembly of this rank; of a rank that trains several replicas the first one's."""
        given = self._source, self.layout, self.job, self.place, example
        if self.job.numerics.exchange_every == 1:
            return assemble(*given)
        self.replicas = LocalReplicas.assembled(*given)
        return self.replicas.assemblies[0]

    def adopt(self, change: Callable[[Assembly], Assembly]) -> None:
        """Continue with an assembly derived from this run's own, for example one with another optimizer."""
        if self.replicas is None:
            self._assembly = change(self.assembly)
            return
        self.replicas.change(change)
        self._assembly = self.replicas.assemblies[0]

    @contextmanager
    def _outer_weights(self) -> Iterator[None]:
        """Let the model have the outer weights inside, where replicas are trained apart."""
        if self._assembly is None or self.replicas is None:
            yield
            return
        self._held.weights.store.settle()
        with self.replicas.outer():
            yield

    def _own_replicas(self) -> Iterator[tuple[int, Assembly]]:
        """Yield the number and the assembly of each replica that this rank trains, which is the run's meanwhile."""
        if self.replicas is None:
            yield 0, self._held
            return
        try:
            for number, assembly in self.replicas.numbered:
                self._assembly = assembly
                yield number, assembly
        finally:
            self._assembly = self.replicas.assemblies[0]

    def save(self, folder: str | Path) -> Path:
        """Write a checkpoint below `folder`, named by the steps taken, and return its folder.

        Of the earlier ones there the job's `checkpoint.keep` newest stay.

        Collective over the world: every rank calls it; if one does not, the others wait until the time limit.

        Raises:
            LayoutError: the run is not prepared yet.
            CheckpointError: the optimizer keeps state that no file can hold.
            SaveError: the file system does not allow it; what was saved before is untouched.
        """
        self._refuse_averaged("save")
        return checkpoint.save(self, Path(folder), self.job.checkpoint.keep)

    def save_pretrained(self, folder: str | Path) -> Path:
        """Write the model as a new folder that transformers' `from_pretrained` loads as it is, and return it.

        The folder must lie where all ranks can write; each of them writes files of its own.

        Collective over the world: every rank calls it; if one does not, the others wait until the time limit.

        Raises:
            LayoutError: the run is not prepared yet.
            ModelError: the model is none of transformers.
            SaveError: the folder exists, or the file system does not allow it.
        """
        self._refuse_averaged("save_pretrained")
        form = self._held.model.form or PretrainedForm.of(built(self._source, self.job), self.job)
        checkpoint.save_pretrained(self, form, Path(folder))
        return Path(folder)

    def load(self, folder: str | Path) -> None:
        """Continue from a checkpoint that any layout has saved; of a folder of checkpoints, from the newest.

        `steps_taken` is then the first step of `samestep.batches`. A run that is not prepared reads the files when it is.

        Collective over the world: every rank calls it; if one does not, the others wait until the time limit.

        Raises:
            CheckpointError: there is none, or it is damaged, lacks a tensor, or belongs to a job with another result.
        """
        self._refuse_averaged("load")
        found = checkpoint.found_in(Path(folder))
        if self._assembly is not None:
            checkpoint.load(self, found)
            self._num_updates = 0
            return
        self.steps_taken = checkpoint.step_of(found, self.job)
        self._load_from = found

    def state_dict(self, *, on_every_rank: bool = False) -> dict[str, Tensor]:
        """Return the whole model's weights and persistent buffers, on the host, for `load_state_dict` of the plain module.

        Ranks other than 0 return an empty dict, unless `on_every_rank`. Weights are in master precision.

        Collective over the world: every rank calls it; if one does not, the others wait until the time limit.

        Raises:
            LayoutError: the run is not prepared yet.
        """
        with self._outer_weights():
            return whole_state.state_dict(self, on_every_rank=on_every_rank)

    def step(self, batch: StepBatch) -> StepReport:
        """Take one optimizer step on the global batch; once a rank was asked to stop, it is the last of its stream.

        Collective over the world: every rank calls it with the same batch. If one does not, the others wait in the
        step's first collective until the time limit.

        Raises:
            DataError: every label of the batch is masked, so the step counts no token.
            UnprovenError: the loss is no sum over samples, or the model, the loss, the optimizer or the data set draws
                random numbers that layouts would not share.
            NonFiniteError: loss or gradients are not finite, and `numerics.on_nonfinite` is "stop".
            DriftError: ranks that must hold equal values differ; compared every `train.watch_every` steps.
            RepeatError: a sample that is run again in such a step, or a weight's update, gives something else; in the
                first step it is an UnprovenError, before any weight has changed.
        """
        self._refuse_averaged("step")
        self._prepare_from(batch)
        try:
            with self._kernels():
                report = self._checked_step(batch)
        except BaseException:
            if self.layout.pp > 1:  # messages that nobody has received would meet those of the next run of this process
                forget_groups()
            raise
        if self.replicas is not None:
            self.replicas.exchange(self.steps_taken)
        return report

    def _checked_step(self, batch: StepBatch) -> StepReport:
        """Take a step, and where one is due, do a part of it once more and compare what ranks hold."""
        self._num_taken += 1
        every, taken = self.job.train.watch_every, self._num_taken
        regularly = watched_steps.is_regular(batch.step, every, taken, self.program)
        if self.replicas is not None and len(self.replicas.assemblies) > 1:  # the canary knows one model
            return self._step(batch, may_run_ahead=False)
        if not regularly and not watched_steps.is_early(every, taken, self.program):
            return self._step(batch)
        self._held.weights.store.settle()  # what is repeated or compared reads any weight
        if self._observer.is_proof:  # which compares more
            return self._compared_step(batch) if regularly else self._step(batch)
        self._trials.loss_is_tried &= not regularly  # again: a loss may come to couple samples later
        watching = self._canary.watching(batch, self._observer, is_first=taken == 1, replays=regularly)
        with watching as canary, self._observed_by(canary):
            return canary.checked(self._compared_step(batch) if regularly else self._step(batch))

    def evaluate(self, batch: StepBatch, measure: Loss | None = None) -> tuple[float, float]:
        """Return the sum of the loss over a batch, and the tokens or samples it counts, without gradients.

        `measure` is summed in place of the loss: a function of (outputs, batch) -> (sum, count), such as the right answers.

        Collective over the world: every rank calls it with the same batch; if one does not, the others wait until the
        time limit.
        """
        self._prepare_from(batch)
        with self._kernels(), self._outer_weights():
            return evaluation.evaluate(self.assembly, batch, self.job.train.seed, measure)

    def averaged(self) -> AbstractContextManager[None]:
        """Return a context in which the model has the moving averages of its weights (`train.ema`), to evaluate or read them.

        Collective over the world: every rank enters and leaves it; if one does not, the others wait until the time limit.

        Raises:
            ModelError: when it is entered, the job averages no weights.
        """
        return evaluation.averaged(self)

    def _refuse_averaged(self, word: str) -> None:
        if self._assembly is not None and (averages := self._assembly.weights.updater.averages) is not None:
            averages.refuse_in_use(word)

    def all_waived(self) -> tuple[str, ...]:
        """Return the refusals that any rank met and `run.allow` waived; `job.run.waived` notes each.

        Collective over the world: every rank calls it; if one does not, the others wait until the time limit.
        """
        everyone = gather_values(self.job.run.met, self.layout.world_size)
        return tuple(dict.fromkeys(text for texts in everyone for text in texts))

    def outputs(self, samples: Any) -> Any:
        """Run the model forward on samples that every rank holds, and return its outputs on every rank.

        Collective over the world: every rank calls it; if one does not, the others may wait until the time limit.
        """
        self.prepare(samples)
        with self._outer_weights():
            return evaluation.outputs_of(self.assembly, samples, self.job.train.seed)

    def _kernels(self) -> AbstractContextManager[None]:
        return deterministic.kernels(self.place.device) if self.job.numerics.deterministic else nullcontext()

    def _prepare_from(self, batch: StepBatch) -> None:
        if self._assembly is None:
            self.prepare(batch.samples(batch.shares(0, 1, 1)[0][:1]))

    @functools.cached_property
    def _drift_monitor(self) -> DriftMonitor:
        return DriftMonitor(self._held)

    @functools.cached_property
    def _canary(self) -> Canary:
        return Canary(self._held, self.job, self._source.loss)

    @functools.cached_property
    def _trials(self) -> StepTrials:
        return StepTrials(self._held, self._source.loss, self._refusals, self.place.device)

    def _compared_step(self, batch: StepBatch) -> StepReport:
        """Take a step, and compare what several ranks must hold alike."""
        if self.layout.world_size == 1:
            return self._step(batch, may_run_ahead=False)
        return self._drift_monitor.watch(lambda: self._step(batch, may_run_ahead=False), batch.shares(0, 1, 1)[0])

    @contextmanager
    def _observed_by(self, observer: StepObserver) -> Iterator[None]:
        before, self._observer = self._observer, observer
        try:
            yield
        finally:
            self._observer = before

    # -- inside a step -----------------------------------------------------------------------------

    def _step(self, batch: StepBatch, *, may_run_ahead: bool = True) -> StepReport:
        """Take a step; on a GPU return before the device has done it, if that is possible and allowed."""
        model, weights = self._held.model, self._held.weights
        began = time.perf_counter()
        forget_peak(self.place.device)
        set_modes(model.training_modes)
        self._trials.try_data(self._held, batch)
        running = nonfinite.saved(model.running_buffers)
        if self._runs_ahead:
            weights.updater.live.begin_step(self.place.device)
        is_usual = (
            may_run_ahead and self.replicas is None and self._num_updates > 0 and not self._observer.hears_scalars
        )
        is_ahead = is_usual and self._runs_ahead and not self.spikes.acts
        is_sent = is_usual and weights.updater.is_apart(self.place.device)
        own = [self._own_scalars(batch, index) for index, _ in enumerate(self._own_replicas())]
        sums = self._agree(own, is_ahead)
        numerator = self._held.objective.nominal_count / weights.updater.loss_scale.scale
        decision = decide(sums, numerator, self.job.optimizer.clip_norm) if is_ahead or is_sent else None
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
        self._update(lambda: weights.updater.step_unless(decision.held_back, decision.factor))
        self.steps_taken = batch.step + 1
        opened.report = StepReport.late(self.steps_taken, self._close)
        self._open = opened
        batch.before_next(self._close)
        return opened.report

    def _close(self) -> None:
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
        batch, updater = opened.batch, self._held.weights.updater
        *sums, was_held_back, is_written = opened.sums.numbers()
        agreed, is_written_unseen, is_save_wanted = scalars_of(sums)
        self._refusals.raise_agreed(agreed.stop, self.layout.world_size)
        if is_written_unseen:
            self._wait_from_now_on(batch)
        self._observer.agreed(agreed)
        if agreed.stop > 0:
            batch.end_stream()
        if not all(one.count for one in agreed.replicas):
            whose = "its batch" if self.replicas is None else "a replica's part of its batch"
            raise DataError(f"step {batch.step + 1} counts no token: every label of {whose} is masked")
        scales = [opened.numerator / one.count for one in agreed.replicas]
        norms = [math.sqrt(one.norm_squared) * scale for one, scale in zip(agreed.replicas, scales, strict=True)]
        # Of replicas that are trained apart, the root mean square.
        loss, norm = agreed.loss_sum / agreed.count, math.hypot(*norms) / math.sqrt(len(norms))
        finite = math.isfinite(loss) and math.isfinite(norm)
        spike = self.spikes.judge(loss) if finite else ""
        note = spike if finite else self._diagnose(batch)
        skipped = bool(note) and self._skipped.skips(
            batch.step + 1,
            note,
            loss_is_finite=math.isfinite(loss),
            is_spike=finite,
            is_scaled=updater.loss_scale.scale > 1.0,
        )
        self._skipped.note(skipped=skipped)
        self._num_updates += not skipped
        if skipped:
            nonfinite.put_back(opened.running_buffers)
        factors = [
            scale * clip_factor(norm, self.job.optimizer.clip_norm) for scale, norm in zip(scales, norms, strict=True)
        ]
        for number, assembly in self._own_replicas():
            if skipped or was_held_back or opened.report is None:
                must_reread = bool(is_written) or self.replicas is not None
                self._end_update(opened, None if skipped else factors[number], must_reread, was_held_back > 0)
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
            remarks=self._refusals.news(),
        )

    def _end_update(self, opened: OpenStep, factor: float | None, must_reread: bool, was_held_back: bool) -> None:
        """Make the update that the device has not made, with gradients times `factor`; make none where that is None."""
        updater = self._held.weights.updater
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
        if weights.updater.loss_scale.scale != before and self.replicas is None:
            weights.store.scale_given_back(weights.updater.loss_scale.scale / before)

    def _own_scalars(self, batch: StepBatch, index: int) -> Tensor:
        """Run the forwards and backwards of a replica; return this rank's share of its loss, count and squared norm."""
        totals = self.forward_backward(batch, index)
        weights = self._held.weights
        for name in weights.store.written():
            self._refusals.add(
                "state", f"step {batch.step + 1}: {kept_state.lost_write(name, f'zero={self.layout.zero}')}"
            )
        norm_squared = weights.store.norm_squared() + weights.updater.overflow(self.place.device)
        weights.store.take_back()
        return torch.cat([totals, norm_squared.view(1)])

    def forward_backward(self, batch: StepBatch, index: int = 0) -> Tensor:
        """Run the forwards and backwards of the program; return this rank's loss sum and count, float64 [2].

        Of a rank that trains several replicas, they are those of the replica at `index`.

        Collective over the world: every rank calls it with the same batch; if one does not, the others wait until the
        time limit.
        """
        interpreter = Interpreter(self._held, self.job, self.place, self._observer, self._trials, self.steps_taken + 1)
        totals = interpreter.forward_backward(batch, index)
        self._data_wait_s = interpreter.data_wait_s
        for line in self.assembly.model.compiled.news():
            self._refusals.remark(line)
        return totals

    def _agree(self, own: Sequence[Tensor], is_ahead: bool = False) -> Tensor:
        """Sum the loss, the count and the squared gradient norm of each replica and the flags over all ranks, waiting for
        none: float64 [4], or 3 numbers more for each further replica that is trained apart.
        """
        weights, device = self._held.weights, self.place.device
        flag = join.stop_requested() + join.save_requested() * SAVE + self._refusals.flag
        stop = torch.full((1,), flag, dtype=torch.float64, device=device)  # filled there, not copied from the host
        if self._runs_ahead and not is_ahead:
            stop += weights.updater.live.was_written_unseen(device) * WRITTEN
        scalars = own[0] if self.replicas is None else self.replicas.sums(own, device)
        sums = torch.cat([scalars, stop])
        if self.layout.world_size > 1:
            with owned("scalars"):
                dist.all_reduce(sums, group=self._held.parallel.mesh.groups["world"])
        return sums

    @property
    def _runs_ahead(self) -> bool:
        """Whether updates may be launched before the host knows the sums: on a GPU, where the optimizer allows it."""
        return self.place.device.type == "cuda" and not self._writes_unseen and self._updaters_hold_back

    @functools.cached_property
    def _updaters_hold_back(self) -> bool:
        """Whether the optimizer of every rank can; every rank asks in its first step."""
        with outside_step():
            return all(gather_values(self._held.weights.updater.can_hold_back, self.layout.world_size))

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
            self._refusals.remark(self.job.run.waived("state", reason))

    def _update(self, update: Callable[[], None]) -> None:
        """Update this rank's weights, and make them visible to the next forward."""
        weights = self._held.weights
        with self._observer.running(self.program.tasks[-1], _NO_SAMPLES):
            self._trials.settle(whole=True)
            update()
            self._trials.check_generators(self._held, self.steps_taken + 1, "the optimizer")
            self._refusals.raise_own()
            weights.updater.publish()
            weights.store.publish(waits=not self._owns_weights)

    def _diagnose(self, batch: StepBatch) -> str:
        """Run the step's forwards and backwards once more, and name the first module that makes a non-finite value."""
        return nonfinite.cause_of_nonfinite(self._held, lambda: self.forward_backward(batch)[0])
