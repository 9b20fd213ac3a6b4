"""What a loop hands to the methods of one run, as the batches of its steps.

given ─► GivenBatches          a batch of `samestep.batches`, or the values of one
      ─► lanes, batch_dim      only where a loop asks for them: the model is then called in another way
      ─► NextLabels            with labels of the next token, where the data has aligned ones
"""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

from samestep.building.batch_dim import BatchDim
from samestep.datasets.values import dims_of
from samestep.errors import ModelError
from samestep.examination.examine import Loss
from samestep.runtime.axes.lanes import CarriedLanes, LaneBatch
from samestep.runtime.batches.given_batches import GivenBatches
from samestep.runtime.batches.next_labels import NextLabels
from samestep.runtime.checkpoints.trained_data import TrainedData
from samestep.runtime.guards.step_guards import StepGuards
from samestep.runtime.held_assembly import HeldAssembly
from samestep.runtime.step_batch import StepBatch


class RunBatches:
    """The batches that one run is given. Every rank has one, and all call its methods alike."""

    def __init__(self, own: HeldAssembly, guards: StepGuards, batch_dim: int) -> None:
        self._own, self._guards = own, guards
        self.data = TrainedData(own.job, own.place)
        """The data that the run is trained on, as checkpoints note it."""
        self.lanes = CarriedLanes()
        """The state that samples hand to those of the next step."""
        self._turn = BatchDim(batch_dim) if batch_dim else None
        self._given = GivenBatches(own.job, own.place, self._turn)
        self._loss = own.source.loss
        """The loss of the run, as it was given."""
        self._labels = NextLabels(own.source.loss, own.job)
        self.dims: dict[str, int] = {}
        """The number of dimensions of each tensor of a batch by its place; empty in a run that is not prepared."""

    def of(self, given: Any, method: str, step: int, *, local: bool) -> StepBatch:
        """Return what `method` was given as the batch of the step with this index.

        Collective over the world where it is no batch of `samestep.batches`, see [Note: collective calls].

        Raises:
            DataError: it is neither a batch nor the values of one.
            ModelError: it has lanes, and the run was prepared for samples without.
        """
        self.data.place(given)
        compares = method != "run.step" or not self._own.is_prepared or self._looks_closer(step)
        batch = self._given.batch_of(given, method, step, self._own.layout, local=local, compares=compares)
        batch = self.lanes.of(batch)
        if isinstance(batch, LaneBatch) and not self.lanes.are_ready:
            self._begin_lanes(batch)
        return batch

    def _looks_closer(self, step: int) -> bool:
        """Return whether a step of a prepared run needs values that ranks have compared, and samples in the order of the batch."""
        return self._guards.looks_closer(step) or self._own.current.parallel.batch_norms.takes_statistics

    def _begin_lanes(self, batch: LaneBatch) -> None:
        """Let the run's model be called with the state of lanes.

        Raises:
            ModelError: the model is built.
        """
        own = self._own
        if own.is_prepared:
            raise ModelError(
                "the run was prepared for samples without lanes: batches(..., lanes=True) from the first step on works"
            )
        first = batch.samples(batch.shares(0, 1, 1)[0][:1])
        own.source = self.lanes.source_of(own.source, own.job, own.layout, first, self._turn)

    def loss_of(self, loss: Loss | None) -> Loss | None:
        """Return the loss of a backward as the run's model is called: given its outputs without the state of lanes, and both in the
        dimension that it knows; None for the run's own."""
        if loss is None or loss is self._loss:
            return None
        loss = loss if self._turn is None else self._turn.loss_of(loss)
        return self.lanes.loss_of(loss)

    def begin(self, example: Any) -> None:
        """Let the run's model and loss be given samples as the example has them, in the dimension that they know; lanes have done so
        already."""
        self.dims = dims_of(example)
        if self._turn is not None and not self.lanes.are_ready:
            source = self._own.source
            model, loss = self._turn.around(source.model, source.loss)
            self._own.source = replace(source, model=model, loss=loss)

    def labelled(self, batch: StepBatch) -> StepBatch:
        """Return a batch as the loss of a prepared run is given it: with labels of the next token, where they are aligned.

        Raises:
            DataError: the samples do not show which token their labels are, or contradict `data.labels`.
        """
        return self._labels.of(batch, self._own.current.model.module)

    def begin_step(self, batch: StepBatch) -> tuple[str, ...]:
        """Take notice of the batch of a step: what its stream has to say, and whose data it is; return what a resume has changed."""
        stream = getattr(batch, "stream", None)
        if stream is not None and stream.remarks:
            for line in stream.remarks:
                self._guards.refusals.remark(line)
                if self._own.place.rank == 0:
                    print(f"samestep: {line}", file=sys.stderr, flush=True)
            stream.remarks = ()
        return self.data.begin_step(batch)
