"""The methods of a run for forwards without gradients: the mean of a loss, and the outputs of samples."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from samestep import calls
from samestep.datasets.batch import Dataset
from samestep.datasets.opening import batch_to_evaluate
from samestep.job import Job
from samestep.runtime.checkpoints.saved_run import Lent, RunState
from samestep.runtime.evaluation import evaluate, outputs_of, predict
from samestep.runtime.held_assembly import HeldAssembly
from samestep.runtime.run_batches import RunBatches
from samestep.runtime.step_observer import StepBatch
from samestep.runtime.stepper import Stepper

Measure = Callable[[Any, Any], Any]
"""A function of (outputs, batch) -> (sum, count), or a dict of names and such pairs."""


class EvaluatedRun:
    """Forwards of a run outside of its steps."""

    job: Job
    _own: HeldAssembly
    _stepper: Stepper
    _state: RunState
    _batches: RunBatches

    @abstractmethod
    def _computing(self) -> AbstractContextManager[None]:
        """Return a context in which the run computes."""

    @abstractmethod
    def prepare(self, example: Any) -> None:
        """Build the model in its layout, unless that is done."""

    @abstractmethod
    def batch_of(self, given: Any, method: str, *, local: bool = False, step: int | None = None) -> StepBatch:
        """Return what a method of this run was given as a batch."""

    @abstractmethod
    def labelled(self, batch: StepBatch) -> StepBatch:
        """Return a batch as the loss is given it."""

    @calls.checked
    def evaluate(
        self, batch: StepBatch | Dataset | Any, metrics: Measure | None = None, *, local: bool = False
    ) -> dict[str, float]:
        """Return the mean of the loss over a dataset or a batch, as {"loss": ...}, without gradients; each sample counts once.

        `metrics`, a function of (outputs, batch) -> {"name": (sum, count), ...}, adds the means of these sums, such as
        {"accuracy": (right, answers)}. (sum, count) alone has the function's name. Values are taken as by `step`.

        Raises:
            UnprovenError: a metric is not a sum over samples, and they are evaluated in several parts.
        """
        given = self._to_evaluate(batch, "evaluate", local=local)
        guards, seed = self._stepper.guards, self.job.train.seed
        guards.find_loss(self._stepper.held, given)
        with self._computing(), self._own.outer():
            if metrics is None:
                return evaluate(self._stepper.whole_assembly, given, seed, metrics)
            with guards.trying_measure(self._stepper.whole_assembly, given, metrics):
                return evaluate(self._stepper.whole_assembly, given, seed, metrics)

    @calls.checked
    def predict(self, batch: StepBatch | Dataset | Any, *, local: bool = False) -> Any:
        """Return the model's outputs for all samples of a dataset or a batch, in order, on every rank's CPU, without gradients.

        They are dicts, lists and tuples of tensors as the forward nests them, the samples first; other objects, such as caches, are
        left out. If samples differ in size, it is a list with the outputs of each. Values are taken as by `step`.

        Raises:
            DataError: an output has no dimension of samples, and is not the same for all of them.
        """
        given = self._to_evaluate(batch, "predict", local=local)
        with self._computing(), self._own.outer():
            return predict(self._stepper.whole_assembly, given, self.job.train.seed)

    def _to_evaluate(self, given: Any, word: str, *, local: bool) -> StepBatch:
        """Return a data set or a batch that a method is given, as one batch with labels."""
        self._state.refuse(word, Lent.WHOLE)
        method = f"run.{word}"
        batch = batch_to_evaluate(given, method, self.job.train.global_batch, self._batches.dims)
        return self.labelled(self.batch_of(batch, method, local=local))

    def outputs(self, samples: Any) -> Any:
        """Run the model forward on samples that every rank holds, and return its outputs on every rank."""
        self._state.refuse("outputs", Lent.WHOLE)
        self.prepare(samples)
        with self._computing(), self._own.outer():
            return outputs_of(self._stepper.whole_assembly, samples, self.job.train.seed)
