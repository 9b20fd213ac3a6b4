"""Steps whose optimizer evaluates the loss again (`optimizers/closures.py`): its closure repeats their forwards and backwards."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Protocol

from samestep.job import Job
from samestep.runtime.assembly import Assembly
from samestep.runtime.open_step import OpenStep
from samestep.runtime.optimizers.closures import Closure
from samestep.runtime.optimizers.optimizer_step import clip_factor
from samestep.runtime.optimizers.optimizers_by_name import UpdatedPart
from samestep.runtime.step_backward import StepBackward
from samestep.runtime.step_batch import StepBatch
from samestep.runtime.step_scalars import StepNumbers, SummedScalars


class Halves(Protocol):
    """The first half of a step, and the reading of its sums: a `Stepper`."""

    job: Job

    @property
    def held(self) -> Assembly:
        """The assembly."""

    def open(self, batch: StepBatch, of: StepBackward) -> OpenStep:
        """Run the forwards and backwards of a step, and sum its scalars."""

    def read(self, opened: OpenStep) -> SummedScalars:
        """Wait for the sums."""


def with_closure(part: UpdatedPart, steps: Halves, opened: OpenStep, numbers: StepNumbers) -> UpdatedPart:
    """Return a part of the optimizer with a closure that repeats an opened step, for its members that evaluate the loss."""
    updater = steps.held.weights.updater
    closure = Closure(updater.pieces_of(part), functools.partial(_evaluate, steps, opened), numbers.loss)
    return replace(part, evaluating=updater.whole.evaluating, closure=closure)


def _evaluate(steps: Halves, opened: OpenStep) -> tuple[float, float]:
    """Return the loss at the present weights, and the factor that makes the gradients those of a mean, clipped."""
    weights = steps.held.weights
    weights.updater.publish()
    weights.store.publish()
    repeated = steps.open(opened.batch, replace(opened.of, is_apart=True, waits=False))
    found = StepNumbers.of(steps.read(repeated).agreed, repeated.numerator)
    return found.loss, (found.scales[0] or 0.0) * clip_factor(found.norms[0], steps.job.optimizer.clip_norm)
