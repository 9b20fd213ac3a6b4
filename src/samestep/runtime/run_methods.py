"""The methods of a run besides `step`: for loops that take the parts of a step themselves, and for forwards without gradients."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor

from samestep import calls
from samestep.building.loss import loss_from
from samestep.datasets.batch import Dataset
from samestep.datasets.opening import batch_to_evaluate
from samestep.examination.examine import Loss
from samestep.runtime.checkpoints.saved_run import Lent, SavedRun
from samestep.runtime.evaluation import evaluate, outputs_of, predict
from samestep.runtime.own_steps.steps_in_parts import StepsInParts
from samestep.runtime.processes import whereabouts
from samestep.runtime.run_batches import RunBatches
from samestep.runtime.step_observer import StepBatch
from samestep.runtime.step_report import StepReport

Measure = Callable[[Any, Any], Any]
"""A function of (outputs, batch) -> (sum, count), or a dict of names and such pairs."""


class RunMethods(SavedRun):
    """Backwards and updates of a run, which its loop calls one by one, and forwards outside of its steps."""

    _parts: StepsInParts
    _batches: RunBatches
    ended: StepReport | None

    @abstractmethod
    def _computing(self) -> AbstractContextManager[None]:
        """Return a context in which the run computes."""

    @abstractmethod
    def _taken(
        self, batch: StepBatch | Any, method: str, take: Callable[[StepBatch], StepReport], *, local: bool
    ) -> tuple[StepReport, StepBatch]:
        """Take a step or a backward on a batch; return the report, and that batch as the loss is given it."""

    @abstractmethod
    def _received(self, report: StepReport, batch: StepBatch, *, is_part: bool = False) -> StepReport:
        """Return a report as its receivers leave it."""

    @abstractmethod
    def prepare(self, example: Any) -> None:
        """Build the model in its layout, unless that is done."""

    @abstractmethod
    def batch_of(self, given: Any, method: str, *, local: bool = False, step: int | None = None) -> StepBatch:
        """Return what a method of this run was given as a batch."""

    @abstractmethod
    def labelled(self, batch: StepBatch) -> StepBatch:
        """Return a batch as the loss is given it."""

    # -- the parts of a step -----------------------------------------------------------------------

    def backward(
        self,
        batch: StepBatch | Any,
        loss: Loss | str | None = None,
        into: str | int | None = None,
        *,
        local: bool = False,
    ) -> StepReport:
        """Run the forward and backward passes of a batch, and accumulate the gradients for `run.update`; return their report.

        Gradients add up, each backward's divided by its own count. A step is one batch, with any number of backwards.

        Args:
            batch: one of `samestep.batches`, or values of a full batch as `step` takes them.
            loss: (outputs, batch) -> (sum, count), or a word of the key `train.loss`; by default the loss of the run.
            into: the name of an optimizer: only its weights get gradients, and all others are constants.
            local: whether each data rank has its own samples, as `step` takes them.

        Raises:
            ModelError: no optimizer has the name, or gradients are compressed or not exchanged in every step.
            InputError: as for `step`.
        """
        loss = None if loss is None else loss_from(loss)
        with whereabouts.taking(self._stepper.steps_taken + 1, hang_s=self._stepper.job.run.hang_s):
            report, _ = self._taken(
                batch,
                "backward",
                lambda given: self._parts.backward(given, self._batches.loss_of(loss), into),
                local=local,
            )
        return report

    def update(self, name: str | int | None = None, **options: Any) -> StepReport:
        """Update the weights of an optimizer, or of all, with the accumulated gradients, and clear these; return the report.

        These gradients are clipped by their common norm (`optimizer.clip_norm`). `options` go to the optimizer's
        `step`.

        Raises:
            ModelError: no gradient is accumulated, no optimizer has the name, or its `step` does not take the options.
            NonFiniteError: loss or gradients are not finite, and `numerics.on_nonfinite` is "stop".
        """
        self._refuse_lent("update")
        if self.ended is not None:
            return self.ended
        with self._computing():
            report, batch = self._parts.update(name, options)
            self._stepper.follow(batch.step, self._parts.weights_of(name))
        return self._received(report, batch, is_part=True)

    def zero_grad(self, name: str | int | None = None) -> None:
        """Forget the gradients that wait for an optimizer, or for all. Every rank calls it; it sends nothing.

        Raises:
            ModelError: no optimizer has the name.
        """
        self._parts.zero_grad(name)

    def call(self, name: str | int | None, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of an optimizer over the weights of this rank, with the accumulated gradients; return its result.

        Use it for `update_hessian` of Sophia, or the two steps of SAM. `name` is the name of the optimizer, or None for the only one. The method
        may change weights and states. The gradients stay, unless the method drops them.

        Raises:
            ModelError: no optimizer has the name, or the optimizer no such method.
            LayoutError: the method couples weights, or elements of one, that the layout divides.
        """
        self._refuse_lent("call")
        with self._computing():
            return self._parts.call(name, method, args, kwargs)

    def gradients(self) -> dict[str, Tensor]:
        """Return the accumulated gradients by weight: summed over all ranks, divided by the counts, not clipped.

        You may change them in place; `run.update` then uses them. With zero=2, zero=3 and tp they are DTensors, sharded or replicated. With pp a
        rank has the gradients of all stages, and changes count for its own stage.

        Collective over the axes that divide the weights, see [Note: collective calls].

        Raises:
            ModelError: no gradient is accumulated.
        """
        return self._parts.gradients()

    # -- forwards without gradients ----------------------------------------------------------------

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
        samples = self._to_evaluate(batch, "evaluate", local=local)
        guards, seed = self._stepper.guards, self.job.train.seed
        guards.find_loss(self._stepper.held, samples)
        with self._computing(), self._own.outer():
            assembly = self._stepper.whole_assembly
            with guards.trying_measure(assembly, samples, metrics) if metrics is not None else nullcontext():
                return evaluate(assembly, samples, seed, metrics)

    @calls.checked
    def predict(self, batch: StepBatch | Dataset | Any, *, local: bool = False) -> Any:
        """Return the model's outputs for all samples of a dataset or a batch, in order, on every rank's CPU, without gradients.

        They are dicts, lists and tuples of tensors as the forward nests them, the samples first; other objects, such as caches, are
        left out. If samples differ in size, it is a list with the outputs of each. Values are taken as by `step`.

        Raises:
            DataError: an output has no dimension of samples, and is not the same for all of them.
        """
        samples = self._to_evaluate(batch, "predict", local=local)
        with self._computing(), self._own.outer():
            return predict(self._stepper.whole_assembly, samples, self.job.train.seed)

    def _to_evaluate(self, given: Any, word: str, *, local: bool) -> StepBatch:
        """Return a data set or a batch that a method is given, as one batch with labels."""
        self._refuse_lent(word, Lent.WHOLE)
        method = f"run.{word}"
        batch = batch_to_evaluate(given, method, self.job.train.global_batch, self._batches.dims)
        return self.labelled(self.batch_of(batch, method, local=local))

    def outputs(self, samples: Any) -> Any:
        """Run the model forward on samples that every rank holds, and return its outputs on every rank."""
        self._refuse_lent("outputs", Lent.WHOLE)
        self.prepare(samples)
        with self._computing(), self._own.outer():
            return outputs_of(self._stepper.whole_assembly, samples, self.job.train.seed)
