"""Optimizers whose `step` evaluates the loss again, as L-BFGS and SAM do: what they are given for that.

A plain loop hands such a step a closure, which runs a forward and a backward at the weights of the moment. Here the closure does so
in the layout: the weights are published, every rank runs its share of the same batch with equal masks, gradients are reduced, divided by
the count and clipped, and all ranks are given the same loss. What such a rule computes depends on all weights, and every rank must ask
for the loss as often; so each rank holds all weights (zero=0 without tp and pp), or the layout is refused.

The gradients of the step's own backward are those of the first evaluation, unless a weight has moved meanwhile.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim import Optimizer

from samestep.building.optimizer import OptimizerSource, class_names, members_of
from samestep.building.torch_seams import disable_compiler
from samestep.errors import ModelError
from samestep.runtime.optimizers.loss_scale import LossScale
from samestep.runtime.optimizers.one_process import alone, rejoined
from samestep.runtime.optimizers.optimizer_source import WholeWeights
from samestep.runtime.optimizers.skeletons import over_small_weights, skeleton
from samestep.runtime.optimizers.update_rule import TRIED, is_torchs_own
from samestep.runtime.weights.pieces import Piece
from samestep.state.writes import Marks, exact_norms, marks_of

Evaluate = Callable[[], tuple[float, float]]
"""Runs a forward and a backward at the present weights; returns the loss, and the factor that makes the gradients those of a mean, clipped."""


@dataclass(slots=True)
class Closure:
    """The closure of one update: it evaluates the loss, and lends the gradients to the pieces."""

    pieces: list[Piece]
    evaluate: Evaluate
    loss: float
    """The loss of the step's own backward."""
    _first: tuple[list[int], Marks] | None = None
    """The ids of the lent gradients at the beginning of the update, and the marks of the weights and of these."""

    def begin(self) -> None:
        """Note the weights and the gradients that the optimizer is lent, which the step's backward has computed."""
        self._first = self._present()

    @torch.enable_grad()
    def __call__(self) -> Tensor:
        """Return the loss at the present weights, whose gradients the pieces then have.

        Collective over the world, see [Note: collective calls].
        """
        if self._first is None or self._has_changed(*self._first):
            with rejoined():
                self.loss, factor = self.evaluate()
            for piece in self.pieces:
                gradient = piece.gradient()
                if factor != 1.0:
                    gradient.mul_(factor)
                piece.value.grad = gradient.to(piece.value.device).view_as(piece.value)
        self._first = None
        return torch.full((), self.loss, dtype=torch.float64, device=self.pieces[0].value.device)

    def _has_changed(self, gradients: list[int], before: Marks) -> bool:
        """Return whether there are other gradients, or a weight or a gradient was written."""
        now, marks = self._present()
        return now != gradients or any(marks.since(before))

    def _present(self) -> tuple[list[int], Marks]:
        values, gradients = [piece.value for piece in self.pieces], [piece.value.grad for piece in self.pieces]
        held = [*values, *(gradient for gradient in gradients if gradient is not None)]
        return [*map(id, gradients)], marks_of(held, norms=exact_norms)


def members_that_evaluate(source: OptimizerSource, whole: WholeWeights) -> frozenset[int]:
    """Return the indices of the members of an optimizer whose step needs a closure: its argument has no default, or it fails without."""
    if not whole.shapes:
        return frozenset()
    found = set[int]()
    optimizer, _ = skeleton(source, whole.shapes, whole.attributes)
    for index, member in enumerate(members_of(optimizer)):
        if is_torchs_own(member) or (parameter := _closure_of(member)) is None:
            continue
        if parameter.default is parameter.empty or _fails_without(source, whole, index):
            found.add(index)
    return frozenset(found)


def check_scale(scale: LossScale, evaluating: frozenset[int], optimizer: Optimizer | None) -> None:
    """Refuse a loss scale, under which gradients may overflow, for an optimizer with members that evaluate the loss.

    Raises:
        ModelError: there are such members, and the scale changes.
    """
    if evaluating and scale.is_dynamic:
        raise ModelError(
            f"{class_names(optimizer) if optimizer else 'the optimizer'} evaluates the loss again in its step, where gradients under "
            'a loss scale may overflow: numerics.precision = "bf16" works'
        )


def _closure_of(optimizer: Optimizer) -> inspect.Parameter | None:
    """Return the parameter of an optimizer's step that takes a closure: the first one, if it has no default or this name."""
    parameters = list(inspect.signature(type(optimizer).step).parameters.values())[1:2]
    takes = (parameter for parameter in parameters if parameter.kind in (0, 1))
    return next((one for one in takes if one.default is one.empty or one.name == "closure"), None)


def _fails_without(source: OptimizerSource, whole: WholeWeights, index: int) -> bool:
    """Return whether a member's step fails on small weights without a closure, and does not with one."""
    if _steps(source, whole, index, with_closure=False):
        return False
    return _steps(source, whole, index, with_closure=True)


def _steps(source: OptimizerSource, whole: WholeWeights, index: int, *, with_closure: bool) -> bool:
    code, weights = over_small_weights(source, whole.shapes, whole.attributes)
    member = members_of(code.optimizer)[index]

    def closure() -> Tensor:
        for weight in weights.values():
            weight.grad = weight.detach().clone()
        return torch.full((), 0.5 * sum(float(weight.detach().square().sum()) for weight in weights.values()))

    closure()
    generator = torch.get_rng_state()
    try:
        with alone(type(member).__name__), torch.no_grad(), disable_compiler():
            member.step(closure) if with_closure else member.step()  # type: ignore[arg-type]
    except TRIED:
        return False
    finally:
        torch.set_rng_state(generator)
    return True
