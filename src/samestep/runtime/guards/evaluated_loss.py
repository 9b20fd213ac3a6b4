"""A loss evaluated on samples and on their halves: its sums, counts and gradients, in float64 if it can be.

Halves are evaluated after the whole, so that `samestep.batch_sum` and its like give them the values of all samples. Each evaluation begins
from the state that the loss kept before the first one. Tensors that the loss holds itself are raised to float64 too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from samestep.building.loss_result import Loss, LossResult, loss_result
from samestep.building.named_tensors import cast_floating
from samestep.building.over_samples import within
from samestep.building.torch_seams import disable_current_modes
from samestep.independence.roundings import EXACT, LIMITS_OF_SUMS
from samestep.runtime.axes.precision import RaiseIslands
from samestep.runtime.guards.divided_samples import WHOLE, DividedSamples
from samestep.state.snapshot import KeptValues, preserve_generators

RAISED = (True, False)
"""Whether a loss is evaluated in float64, or as it is, if it cannot be in float64."""


@dataclass(frozen=True, slots=True)
class LossValue:
    """The result of one evaluation."""

    amounts: dict[str, tuple[float, float]]
    """The sum and the count of each term, and of each value."""
    limit: float
    """The largest relative difference of two orders of such sums: of float64, if the loss was evaluated so and returned it."""
    went_back: bool
    """Whether the loss has computed gradients by `backward`."""
    gradients: dict[str, list[Tensor | None]]
    """Those of the sum of each term, by the tensors through which a backward goes."""
    rounded_to: str = ""
    """The half precision in which it returned a sum; empty if there is none."""

    def counts(self, name: str) -> bool:
        """Return whether a term or value is finite and counts something."""
        total, count = self.amounts[name]
        return math.isfinite(total) and math.isfinite(count) and count != 0.0


def evaluate_alone(loss: Loss, some: DividedSamples, part: int = WHOLE, *, raised: bool) -> LossValue:
    """Return the sums of a loss on all samples or a part of them, with the random numbers that every such call draws."""
    with preserve_generators(), within(values := EvaluatedLoss(loss)):
        return values.evaluate(some, part, raised=raised, gradients=False)


def _evaluate(loss: Loss, some: DividedSamples, part: int, *, raised: bool, gradients: bool) -> LossValue:
    """Evaluate a loss on one of `PARTS`, in float64 if it is `raised`, and if asked the `gradients` of its sums."""
    leaves = cast_floating(some.tensors[WHOLE], torch.float64) if raised else some.tensors[WHOLE]
    leaves = [leaf.detach().requires_grad_() if i in some.graded else leaf for i, leaf in enumerate(leaves)]
    with disable_current_modes(), torch.enable_grad():
        outputs, batch = some.part(leaves, part, raised=raised)
        with InFloat64() if raised else nullcontext():
            result = loss_result(loss(outputs, batch))
            is_graded = gradients and len(some.graded) > 0
            of_sums = _gradients_of(result, [leaves[i] for i in some.graded]) if is_graded else {}
    is_wide = raised and all(total.dtype is torch.float64 for total, _ in result.terms.values())
    limit = LIMITS_OF_SUMS[torch.float64 if is_wide else torch.float32]
    went_back = any(leaf.grad is not None for leaf in leaves)
    amounts = {name: (float(total.detach()), float(count)) for name, (total, count) in result.amounts.items()}
    halves = (str(total.dtype).removeprefix("torch.") for total, _ in result.terms.values() if total.dtype.itemsize < 4)
    return LossValue(amounts, limit, went_back, of_sums, next(halves, ""))


def _gradients_of(result: LossResult, leaves: list[Tensor]) -> dict[str, list[Tensor | None]]:
    sums = {name: total for name, (total, _) in result.terms.items() if total.requires_grad}
    return {
        name: [*torch.autograd.grad(total, leaves, retain_graph=True, allow_unused=True)]
        for name, total in sums.items()
    }


class EvaluatedLoss:
    """Evaluations of a loss, and the scope of `samestep.batch_sum` and its like in them: halves get the values of the first one, of the whole.

    It is the keeper of `samestep.after_step` too: what a buffer gets then must follow from these alone.
    """

    def __init__(self, loss: Loss, state: KeptValues | None = None) -> None:
        """Evaluate a loss, each time from the `state` that it kept before, if one is given."""
        self._loss, self._state = loss, state
        self._kept: list[dict[int, Tensor]] = []
        """Next values of buffers in each evaluation, by the identities of the buffers."""
        self._found: list[Any] = []
        self._next: Iterator[Any] | None = None

    def evaluate(self, some: DividedSamples, part: int, *, raised: bool, gradients: bool = True) -> LossValue:
        """Evaluate the loss on one of `PARTS`, the first time on all samples."""
        self._kept.append({})
        if self._state is not None:
            self._state.restore(generators=False)
        value = _evaluate(self._loss, some, part, raised=raised, gradients=gradients)
        self._next = iter(self._found)
        return value

    @property
    def is_unread(self) -> bool:
        """Whether no evaluation has asked for a value of all samples."""
        return not self._found

    def keep(self, buffer: Tensor, value: Tensor) -> None:
        """Note what a buffer gets after the step."""
        self._kept[-1][id(buffer)] = value.detach().clone()

    def parts_differ(self) -> bool:
        """Return whether a buffer gets another value from a part of the samples than from all of them."""
        together, *others = self._kept
        return any(
            other.keys() != together.keys()
            or not all(torch.allclose(other[key], value, rtol=EXACT, equal_nan=True) for key, value in together.items())
            for other in others
        )

    def sum(self, x: Tensor) -> Tensor:
        """Return the sum of the rows of the whole."""
        return cast("Tensor", self._of_whole(x.sum(0)))

    def cat(self, x: Tensor) -> Tensor:
        """Return the rows of the whole."""
        return cast("Tensor", self._of_whole(x))

    def num_rows(self, x: Tensor) -> int:
        """Return the number of rows of the whole."""
        return cast("int", self._of_whole(len(x)))

    def _of_whole(self, value: Any) -> Any:
        if self._next is not None:
            return next(self._next, value)
        self._found.append(value.detach() if isinstance(value, Tensor) else value)
        return value


class InFloat64(RaiseIslands):
    """A function mode in which a loss computes in float64: the floating tensors that it holds itself are raised too."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        if name == "__get__":
            return func(*args)
        wide = cast_floating(args, torch.float64)
        result = super().__torch_function__(func, types, wide, kwargs and cast_floating(kwargs, torch.float64))
        if not _writes(name) or wide[0] is args[0]:
            return result
        args[0].copy_(wide[0])  # a tensor of the loss's own, in its own precision
        return args[0] if result is wide[0] else result


def _writes(name: str) -> bool:
    """Return whether a function of this name writes into its first argument."""
    in_place = name.startswith("__i") and name.endswith("__") and name not in ("__index__", "__int__", "__invert__")
    return in_place or name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))
