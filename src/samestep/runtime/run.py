"""A model in a layout, taking steps: the interpreter that carries out the program's tasks.

```python
run = samestep.parallelize(model, loss, optimizer, layout="dp=2 zero=3", job=job)
for batch in samestep.batches(dataset, job):
    report = run.step(batch)
```
A loss is a sum over samples or tokens, and their count. Backward runs on the sum, divided by a power of two near the
count, which loses no bit. All ranks learn the true count after the last micro-batch, in the one all_reduce that also
carries the loss, the gradient norm and the stop flag; the gradients are divided by it then. So nothing is ever a mean
of means, and a user's loss need not know its count before its forward.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from samestep.errors import DataError, LayoutError, NonFiniteError
from samestep.job import Job
from samestep.layout import Layout
from samestep.program.bodies import Task
from samestep.program.program import Program
from samestep.runtime import evaluation
from samestep.runtime.assembly import Assembly, Loss, Source, assemble, set_modes
from samestep.runtime.axes import precision
from samestep.runtime.dropout import mode as dropout
from samestep.runtime.evaluation import as_number
from samestep.runtime.guards import nonfinite
from samestep.runtime.guards.drift import DriftMonitor
from samestep.runtime.ledger import owned
from samestep.runtime.microbatches import Microbatches, StepBatch
from samestep.runtime.optimizer_step import Updater, clip_factor, optimizer_source
from samestep.runtime.processes import join
from samestep.runtime.processes.join import RankInfo
from samestep.runtime.step_observer import Indices, StepObserver, StepScalars
from samestep.runtime.step_report import StepReport, peak_memory_bytes
from samestep.schedules import TaskKind

_NOBODY = StepObserver()
_NO_SAMPLES: Indices = np.empty(0, dtype=np.int64)


class Run:
    """A model in a layout, ready to take steps. Every rank makes one, and all call its methods in the same order."""

    def __init__(
        self, source: Source, layout: Layout, job: Job, place: RankInfo, observer: StepObserver = _NOBODY
    ) -> None:
        self.job, self.layout, self.place = job, layout, place
        self.steps_taken = 0
        self._source, self._observer = source, observer
        self._assembly: Assembly | None = None

    @property
    def is_prepared(self) -> bool:
        """Whether `prepare` has built the model."""
        return self._assembly is not None

    @property
    def assembly(self) -> Assembly:
        """The prepared model, mesh, program and optimizer.

        Raises:
            LayoutError: the run is not prepared yet.
        """
        if self._assembly is None:
            raise LayoutError("the run is not prepared yet: call run.prepare(sample), or take a step")
        return self._assembly

    @property
    def program(self) -> Program:
        """The program of this rank's pipeline stage: the operations of one step."""
        return self.assembly.parallel.program

    @property
    def model(self) -> nn.Module:
        """This rank's module, after the layout has cut its weights."""
        return self.assembly.model.module

    @property
    def updater(self) -> Updater:
        """The optimizer over the weights that this rank updates."""
        return self.assembly.weights.updater

    def prepare(self, example: Any) -> None:
        """Build the model in its layout, unless that is done; `example` is a batch from `batch.samples`.

        Collective over the world: every rank calls it; if one does not, the others wait until the time limit.
        """
        if self._assembly is None:
            self._assembly = assemble(self._source, self.layout, self.job, self.place, example)

    def adopt(self, assembly: Assembly) -> None:
        """Continue with an assembly derived from this run's own, for example one with another optimizer."""
        self._assembly = assembly

    def step(self, batch: StepBatch) -> StepReport:
        """Take one optimizer step on the global batch.

        Collective over the world: every rank calls it with the same batch. If one does not, the others wait in the
        step's first collective until the time limit.

        Raises:
            DataError: every label of the batch is masked, so the step counts no token.
            NonFiniteError: loss or gradients are not finite, and `numerics.on_nonfinite` is "stop".
            DriftError: ranks that must hold equal values differ; compared every `train.watch_every` steps.
        """
        self._prepare_from(batch)
        every = self.job.train.watch_every
        if self.layout.world_size > 1 and every > 0 and (batch.step + 1) % every == 0:
            return self._drift_monitor.watch(lambda: self._step(batch), batch.shares(0, 1, 1)[0])
        return self._step(batch)

    def evaluate(self, batch: StepBatch) -> tuple[float, float]:
        """Return the sum of the loss over a batch, and the tokens or samples it counts, without gradients.

        Collective over the world: every rank calls it with the same batch; if one does not, the others wait until the
        time limit.
        """
        self._prepare_from(batch)
        return evaluation.evaluate(self.assembly, batch)

    def outputs(self, samples: Any) -> Any:
        """Run the model forward on samples that every rank holds, and return its outputs on every rank.

        Collective over the world: every rank calls it; if one does not, the others may wait until the time limit.
        """
        self.prepare(samples)
        return evaluation.outputs_of(self.assembly, samples)

    def _prepare_from(self, batch: StepBatch) -> None:
        if self._assembly is None:
            self.prepare(batch.samples(batch.shares(0, 1, 1)[0][:1]))

    @functools.cached_property
    def _drift_monitor(self) -> DriftMonitor:
        return DriftMonitor(self.assembly)

    # -- inside a step -----------------------------------------------------------------------------

    def _step(self, batch: StepBatch) -> StepReport:
        began = time.perf_counter()
        model, weights = self.assembly.model, self.assembly.weights
        updater = weights.updater
        set_modes(model.training_modes)
        running = nonfinite.saved(model.running_buffers)
        totals = self.forward_backward(batch)
        agreed = self._agree(totals)
        self._observer.agreed(agreed)
        if agreed.count == 0:
            raise DataError(f"step {batch.step + 1} counts no token: every label of its batch is masked")
        scale = self.assembly.objective.nominal_count / agreed.count / updater.loss_scale.scale
        loss, norm = agreed.loss_sum / agreed.count, math.sqrt(agreed.norm_squared) * scale
        finite = math.isfinite(loss) and math.isfinite(norm)
        note = "" if finite else self._diagnose(batch)
        skipped = not finite and self._skips(note, math.isfinite(loss))
        lr_factor = weights.lr_factor(batch.step)
        updater.set_lr(lr_factor)
        if skipped:
            nonfinite.put_back(running)
        else:
            self._update(scale * clip_factor(norm, self.job.optimizer.clip_norm))
        if math.isfinite(loss):
            updater.loss_scale.after(overflowed=not finite)
        self.steps_taken = batch.step + 1
        step_s = time.perf_counter() - began
        return StepReport(
            step=self.steps_taken,
            loss=loss,
            grad_norm=norm,
            lr=updater.first_lr[0] * lr_factor if updater.first_lr else math.nan,
            tokens=int(agreed.count),
            step_s=step_s,
            tokens_per_s=agreed.count / step_s,
            memory_bytes=peak_memory_bytes(self.place.device),
            skipped=skipped,
            stop=agreed.stop > 0,
            note=note,
        )

    def forward_backward(self, batch: StepBatch) -> Tensor:
        """Run the forwards and backwards of the program; return this rank's loss sum and count, float64 [2].

        Collective over the world: every rank calls it with the same batch; if one does not, the others wait until the
        time limit.
        """
        parallel, store = self.assembly.parallel, self.assembly.weights.store
        totals = torch.zeros(2, dtype=torch.float64, device=self.place.device)
        held: dict[tuple[int, int], Tensor | None] = {}
        microbatches = Microbatches(self.assembly, batch)
        store.begin_step()
        parallel.stage.begin_step(microbatches.shapes_of)
        for task in parallel.program.tasks:
            if task.kind is TaskKind.UPDATE:
                continue
            with self._observer.running(task, microbatches.indices(task.microbatch)), store.running(task):
                if task.kind is TaskKind.WEIGHT:
                    parallel.deferred.add_up(task.microbatch)
                elif task.kind is TaskKind.FORWARD:
                    held[task.microbatch, task.chunk] = self._forward(task, microbatches, totals)
                else:
                    self._backward(task, held.pop((task.microbatch, task.chunk)))
        store.finish_gradients()
        if self._observer.dropout_mode() is None:
            self.assembly.model.dropout.end_step(self.model)
        parallel.stage.finish()
        return totals / self.layout.model_ranks  # which count the same samples

    def _forward(self, task: Task, microbatches: Microbatches, totals: Tensor) -> Tensor | None:
        """Run the forward of one chunk on a micro-batch; return its scaled loss where the chunk ends the model."""
        parallel, objective = self.assembly.parallel, self.assembly.objective
        samples, weight = microbatches.samples(task.microbatch)
        if task.chunk == parallel.stage.num_chunks - 1:
            microbatches.forget(task.microbatch)
        with self._forward_modes(microbatches, task.microbatch):
            with parallel.slicing.of(samples):
                outputs = parallel.stage.forward(task.microbatch, task.chunk, samples)
            if not parallel.stage.is_last(task.chunk):
                return None
            loss_sum, count = objective.loss(precision.for_loss(outputs), parallel.slicing.part(samples))
            loss_sum = objective.balance.added_to(loss_sum, outputs, count, weight)
        totals += torch.stack([as_number(loss_sum.detach(), totals), as_number(count, totals)]) * weight
        return loss_sum * (weight * self.updater.loss_scale.scale / objective.nominal_count)

    @contextmanager
    def _forward_modes(self, microbatches: Microbatches, microbatch: int) -> Iterator[None]:
        """Return the context of a training forward: raised float32 islands, and the dropout mode if one is needed."""
        parallel, model = self.assembly.parallel, self.assembly.model
        make_mode = self._observer.dropout_mode()
        with precision.raised_islands(parallel.program):
            if make_mode is None and model.dropout.dropout is dropout.Dropout.ABSENT:
                yield
                return
            samples = torch.as_tensor(microbatches.drawn(microbatch), device=self.place.device)
            draw = dropout.Draw(self.job.train.seed, microbatches.batch.step, samples)
            with (make_mode or dropout.DropoutMode)(model.module, draw, model.mask_part) as mode:
                yield
            model.dropout.end_forward(mode.num_draws)

    def _backward(self, task: Task, loss: Tensor | None) -> None:
        parallel = self.assembly.parallel
        parallel.deferred.microbatch = task.microbatch
        parallel.stage.backward(task.microbatch, task.chunk, loss)

    def _agree(self, totals: Tensor) -> StepScalars:
        """Sum the loss, the count, the squared gradient norm and the stop flag over all ranks."""
        weights, device = self.assembly.weights, self.place.device
        stop = torch.tensor([float(join.stop_requested())], dtype=torch.float64, device=device)
        norm_squared = weights.store.norm_squared() + weights.updater.overflow(device)
        scalars = torch.cat([totals, norm_squared.view(1), stop])
        if self.layout.world_size > 1:
            with owned("scalars"):
                dist.all_reduce(scalars, group=self.assembly.parallel.mesh.groups["world"])
        return StepScalars(*scalars.tolist())

    def _update(self, factor: float) -> None:
        """Multiply the gradients by `factor`, update this rank's weights, and make them visible to the next forward."""
        weights = self.assembly.weights
        with self._observer.running(self.program.tasks[-1], _NO_SAMPLES):
            weights.updater.step(factor)
            weights.updater.publish()
            weights.store.publish()

    def _diagnose(self, batch: StepBatch) -> str:
        """Run the step's forwards and backwards once more, and name the first module that makes a non-finite value."""
        return nonfinite.cause_of_nonfinite(self.assembly, lambda: self.forward_backward(batch)[0])

    def _skips(self, note: str, loss_is_finite: bool) -> bool:
        """Return whether a step that is not finite is skipped; every rank decides alike.

        Raises:
            NonFiniteError: `numerics.on_nonfinite` is "stop".
        """
        policy = self.job.numerics.on_nonfinite
        if loss_is_finite and self.updater.loss_scale.scale > 1.0:
            return True  # an overflow of scaled gradients: the next step runs at half the scale
        if policy == "stop":
            raise NonFiniteError(f"step {self.steps_taken + 1}: {note}; numerics.on_nonfinite = 'skip' would go on")
        return policy == "skip"


def parallelize(
    model: Callable[[], nn.Module] | nn.Module,
    loss: Loss,
    optimizer: Callable[[list[Tensor]], Optimizer] | Optimizer,
    *,
    layout: str | Layout = "",
    job: Job | None = None,
) -> Run:
    """Put any model into a layout; `run.step(batch)` then takes one optimizer step of the job.

    Every rank calls it with equal arguments, started by `samestep.launch`, torchrun or srun, or as the only process.

    Args:
        model: a build function, whose weights start as functions of (seed, name); or an instance, whose values stay.
        loss: (outputs, batch) -> (sum, count).
        optimizer: a function of a list of parameters, or an instance over the model instance that has not stepped.
        layout: one line of text such as "dp=2 zero=3"; empty replicates over all ranks.
        job: global batch, steps, seed, schedule, numerics and `optimizer.clip_norm`. Its model, data, loss and the rest
            of its optimizer table are not read: the arguments above replace them.

    Raises:
        InputError: a model, optimizer or layout that cannot run; the text says what would.
    """
    job = job or Job()
    place = join.join(job.run.device, timeout_s=job.run.timeout_s, ranks_per_node=job.run.ranks_per_node)
    where = Layout.parse(layout) if isinstance(layout, str) else layout
    if layout == "":
        where = Layout(dp_replicate=place.world_size)
    names = {id(param): name for name, param in model.named_parameters()} if isinstance(model, nn.Module) else None
    name = type(model).__name__ if isinstance(model, nn.Module) else getattr(model, "__name__", "model")
    return Run(Source(model, loss, optimizer_source(optimizer, names), name), where, job, place)
