"""The methods of a run for loops that take the parts of a step themselves: several optimizers, losses in turn, changed gradients."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor

from samestep.building.loss import named_loss
from samestep.examination.examine import Loss
from samestep.runtime.batches.run_batches import RunBatches
from samestep.runtime.checkpoints.run_state import RunState
from samestep.runtime.own_steps.steps_in_parts import StepsInParts
from samestep.runtime.step_batch import StepBatch
from samestep.runtime.step_report import StepReport
from samestep.runtime.stepper import Stepper


class StepsByHand:
    """Backwards and updates of a run, which its loop calls one by one."""

    _stepper: Stepper
    _parts: StepsInParts
    _batches: RunBatches
    _state: RunState

    @abstractmethod
    def _computing(self) -> AbstractContextManager[None]:
        """Return a context in which the run computes."""

    @abstractmethod
    def _taken(
        self, batch: StepBatch | Any, method: str, take: Callable[[StepBatch], StepReport], *, local: bool
    ) -> tuple[StepReport, StepBatch]: ...

    @abstractmethod
    def _received(self, report: StepReport, batch: StepBatch, *, is_part: bool = False) -> StepReport: ...

    def backward(
        self,
        batch: StepBatch | Any,
        loss: Loss | str | None = None,
        into: str | int | None = None,
        *,
        local: bool = False,
    ) -> StepReport:
        """Run the forwards and backwards of a batch, and let the gradients wait for `run.update`; return the report of what waits.

        Gradients add up, each backward's divided by its own count. A step is one batch, however many backwards it has.

        Args:
            batch: one of `samestep.batches`, or values of a whole batch as `step` takes them.
            loss: (outputs, batch) -> (sum, count), or a word of the key `train.loss`; by default that of the run.
            into: the name of an optimizer: for its weights alone, to which all others are constants.
            local: whether each data rank is given its own samples, as `step` takes them.

        Raises:
            ModelError: no optimizer has the name, or gradients are compressed or not exchanged in every step.
            InputError: as `step` says.
        """
        loss = named_loss(loss) if isinstance(loss, str) else loss
        report, _ = self._taken(
            batch, "backward", lambda given: self._parts.backward(given, self._batches.loss_of(loss), into), local=local
        )
        return report

    def update(self, name: str | int | None = None, **options: Any) -> StepReport:
        """Let an optimizer, or all, update their weights by the gradients that wait, which then wait no more; return the report.

        The gradients of what is updated are clipped by their common norm (`optimizer.clip_norm`). `options` go to the optimizer's
        `step`.

        Raises:
            ModelError: no gradient waits, no optimizer has the name, or its `step` does not take the options.
            NonFiniteError: loss or gradients are not finite, and `numerics.on_nonfinite` is "stop".
        """
        self._state.refuse("update")
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

    def call(self, name: str | int | None, method: str, *args: Any, **given: Any) -> Any:
        """Let an optimizer run one of its methods over the weights of this rank, with the gradients that wait; return what it returns.

        So `update_hessian` of Sophia, or the two steps of SAM. `name` is that of the optimizer, or None for the only one. What the
        method does to weights and states counts; the gradients go on waiting, unless the method drops them.

        Raises:
            ModelError: no optimizer has the name, or the optimizer no such method.
            LayoutError: the method couples weights, or elements of one, that the layout divides.
        """
        self._state.refuse("call")
        with self._computing():
            return self._parts.call(name, method, args, given)

    def gradients(self) -> dict[str, Tensor]:
        """Return the gradients that wait, by weight: summed over all ranks, divided by the counts, not clipped.

        They may be changed in place, which `run.update` then uses. Under zero=2, zero=3 and tp they are DTensors, of which a rank has
        its part; under pp a rank has those of its stage.

        Collective over the axes that divide the weights, see [Note: collective calls].

        Raises:
            ModelError: no gradient waits.
        """
        return self._parts.gradients()
