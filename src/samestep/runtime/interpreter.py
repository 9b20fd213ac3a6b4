"""The interpreter of a step's tasks: it carries out the forwards, backwards and weight gradients of a program on one rank.

```
forward    samples ─► stage.forward ─► objective.part ─► sums of loss and count; the loss is kept
backward   the kept loss ─► stage.backward ─► gradients, which the store reduces after the last one
```
How a loss becomes the sum that is minimised stands in `objective.py`.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from samestep.building.loss import LabelError
from samestep.building.torch_seams import autograd_sequence_number
from samestep.program.ops import Task
from samestep.randomness import mode as dropout
from samestep.randomness.dropout_state import Dropout
from samestep.runtime.assembly import Assembly
from samestep.runtime.axes import precision
from samestep.runtime.axes.exchanging_calls import NOTHING_LEFT_OUT
from samestep.runtime.axes.lanes import LaneBatch
from samestep.runtime.axes.whole_batch import WholeBatch
from samestep.runtime.guards.loss_trials import LossTrials
from samestep.runtime.guards.step_guards import StepGuards
from samestep.runtime.host_copies import to_device
from samestep.runtime.microbatches import Microbatches
from samestep.runtime.open_step import WHOLE, StepBackward
from samestep.runtime.step_observer import StepBatch
from samestep.schedules import TaskKind


@dataclass(slots=True)
class Interpreter:
    """Carries out the tasks of one step on one rank."""

    assembly: Assembly
    seed: int
    """The seed of the job's random numbers."""
    guards: StepGuards
    trials: LossTrials
    step: int
    """The step, counted from 1."""
    of: StepBackward = WHOLE
    """Which backward of the step it is."""
    data_wait_s: float = field(default=0.0, init=False)
    """Seconds for which it has waited for data."""
    _losses: dict[tuple[int, int], Tensor | None] = field(default_factory=dict, init=False)
    """The scaled loss of each micro-batch and chunk whose backward is to come; None where the chunk does not end the model."""
    _constant: set[int] = field(default_factory=set, init=False)
    """Micro-batches whose loss is a constant, so that their gradients are no use of a weight."""
    _left_out: dict[int, frozenset[int]] = field(default_factory=dict, init=False)
    """The ids of the weights that the backward of a micro-batch reaches, though its loss does not need them."""

    def forward_backward(self, batch: StepBatch) -> Tensor:
        """Run the forwards and backwards; return this rank's loss sum and count, followed by the
        sum and the count of each named term and value of the loss (float64 [2 + `StepSpec.num_reported`]).

        Collective over the world, see [Note: collective calls].
        """
        model, parallel, store = self.assembly.model, self.assembly.parallel, self.assembly.weights.store
        objective, layout = self.assembly.objective, parallel.program.step.layout
        totals = torch.zeros(2 + objective.names.num_numbers, dtype=torch.float64, device=parallel.mesh.device)
        microbatches = Microbatches(self.assembly, batch)
        self.guards.generators.leave()  # the loop's code has run, which may draw
        model.dropout.begin_step()
        store.begin_step(waits=self.of.waits)
        for part in parallel.step_parts:
            part.begin_step(batch, microbatches.shapes_of)
        parallel.batch_norms.of_losses.held.clear()  # a step that was skipped has written none
        objective.sums.begin_step(batch.shares)
        with parallel.checkpoints, self.trials.begin_step():
            for task in parallel.program.tasks[:-1]:
                samples = microbatches.shares[task.microbatch]
                counts = bool(len(samples)) and task.microbatch not in self._constant
                left_out = self._left_out.pop(task.microbatch, NOTHING_LEFT_OUT)
                recording = self.guards.recorder.running(task, samples, self.guards.observer)
                with recording, store.running(task, counts=counts, left_out=left_out):
                    if not store.gave_up:
                        self._run(task, microbatches, totals)
        if not parallel.stage.is_last(parallel.stage.num_chunks - 1):
            self.trials.is_tried = True  # where the model ends
        if generator := self.guards.generators.moved():
            again = functools.partial(microbatches.samples_again, 0)
            self.guards.refuse_generator(generator, self.assembly, self.step, again)
        if self.of.is_apart:  # the loop's code runs before the update
            self.guards.generators.leave()
        self.data_wait_s = microbatches.wait_s
        if not self.of.waits:
            store.finish_gradients(delivers=not self.of.is_apart)
        if self.guards.observer.dropout_mode() is None and not store.gave_up:
            model.dropout.end_step()
        for part in parallel.step_parts:
            part.end_backwards()
        return totals if layout.model_ranks == 1 else totals / layout.model_ranks  # which count the same samples

    def _run(self, task: Task, microbatches: Microbatches, totals: Tensor) -> None:
        """Carry out one task, and add the loss and the count of a micro-batch to the totals."""
        place, parallel = (task.microbatch, task.chunk), self.assembly.parallel
        kind = task.body.kind
        if kind is TaskKind.OUTPUTS:
            self._outputs_alone(task, microbatches)
        elif kind is TaskKind.FORWARD:
            self._losses[place] = self._forward(task, microbatches, totals)
        elif kind is TaskKind.WEIGHT:
            parallel.stage.weight_gradients(task.microbatch)
        else:
            self._backward(task, self._losses.pop(place))

    def _forward(self, task: Task, microbatches: Microbatches, totals: Tensor) -> Tensor | None:
        """Run the forward of one chunk on a micro-batch; return its scaled loss where the chunk ends the model.

        A micro-batch of weight 0 runs the sample of another rank, and counts nothing.
        """
        parallel, objective = self.assembly.parallel, self.assembly.objective
        is_last_use = task.chunk == parallel.stage.num_chunks - 1
        samples, weight = microbatches.samples(task.microbatch, is_last=is_last_use)
        indices = microbatches.shares[task.microbatch]
        with self._forward_modes(microbatches, task.microbatch):
            began = autograd_sequence_number()
            outputs = self._outputs(task, samples)
            self.guards.note_forward(task, autograd_sequence_number() - began, outputs)
            self.assembly.model.replaced.note()
            if not parallel.stage.is_last(task.chunk):
                return None
            if isinstance(microbatches.batch, LaneBatch):  # what its samples hand to those of the next step
                microbatches.batch.keep(indices, outputs)
            # The loss: what the user's function finds in the outputs, and the part of the step's sum that it makes.
            loss_inputs = precision.for_loss(outputs)
            part = samples if objective.sums.is_whole else parallel.slicing.part(samples)
            share = part, len(indices)
            objective.watch.pairs.clear()
            try:
                with parallel.batch_norms.of_loss(task.microbatch):
                    result = objective.sums.result(task.microbatch, loss_inputs, part, objective.loss)
            except LabelError as error:
                raise error.of(indices) from error
            later = functools.partial(self._later, task, microbatches)
            loss = objective.part(result, outputs, loss_inputs, share, later, weight)
        if objective.sums.moved:
            self.trials.refuse_moved_counts(objective.sums.moved)
        objective.watch.least |= result.least
        if weight:
            self.trials.ask(self.assembly, loss.own, outputs, part, indices)
        # What is kept of it: the numbers for the report, and for the backward which of its gradients are uses of weights.
        numbers = loss.numbers(result, objective.names, totals)
        totals += numbers if weight == 1.0 else numbers * weight
        self._left_out[task.microbatch] = loss.left_out
        if loss.is_constant:
            self._constant.add(task.microbatch)
        divisor = self.of.count or objective.nominal_count
        return loss.total * (weight * self.assembly.weights.updater.loss_scale.scale / divisor)

    def _later(self, task: Task, microbatches: Microbatches) -> Iterator[tuple[Any, int]]:
        """Yield this rank's part of each micro-batch after that of a task, and its number of samples."""
        parallel = self.assembly.parallel
        for index in range(task.microbatch + 1, parallel.program.step.num_microbatches):
            yield parallel.slicing.part(microbatches.samples(index)[0]), len(microbatches.shares[index])

    def _outputs(self, task: Task, samples: Any) -> Any:
        """Run the forward of one chunk on a micro-batch; return the model's outputs where the chunk ends the model."""
        parallel = self.assembly.parallel
        self.guards.generators.settle()
        for part in parallel.step_parts:
            part.begin_forward()
        norms = parallel.batch_norms.of(task.microbatch)
        with parallel.slicing.of(samples), parallel.pending(), norms:
            return parallel.stage.forward(task.microbatch, task.chunk, samples)

    def _outputs_alone(self, task: Task, microbatches: Microbatches) -> None:
        """Run a forward that no backward follows, for a loss over all samples of the step."""
        model, objective, parallel = self.assembly.model, self.assembly.objective, self.assembly.parallel
        over_batch = objective.sums
        assert isinstance(over_batch, WholeBatch), "only its program has such tasks"
        samples, _ = microbatches.samples(task.microbatch)
        takes_gradients = bool(model.spec.differentiates_at)
        with self._forward_modes(microbatches, task.microbatch):
            with over_batch.outputs_alone(model.module, takes_gradients=takes_gradients):
                outputs = self._outputs(task, samples)
            if not over_batch.left:
                parallel.stage.finish_forward()
            if parallel.stage.is_last(task.chunk):
                with parallel.batch_norms.of_loss(task.microbatch):
                    over_batch.keep(task.microbatch, outputs, samples, objective.loss)

    def _forward_modes(self, microbatches: Microbatches, microbatch: int) -> AbstractContextManager[None]:
        """Return the context of a training forward: raised float32 islands, and the dropout mode if one is needed."""
        make_mode, state = self.guards.observer.dropout_mode(), self.assembly.model.dropout
        islands = self.assembly.parallel.precise.of_forward()
        if make_mode is None and state.dropout is Dropout.ABSENT:
            return islands
        samples = to_device(torch.as_tensor(microbatches.drawn(microbatch)), self.assembly.parallel.mesh.device)
        draw = dropout.Draw(self.seed, microbatches.batch.step, samples, self.of.number)
        return state.drawing(draw, make_mode, within=islands)

    def _backward(self, task: Task, loss: Tensor | None) -> None:
        if self.of.into is None or loss is None:
            self.assembly.parallel.stage.backward(task.microbatch, task.chunk, loss)
        else:
            loss.backward(inputs=self.of.into)
