"""Optimizers whose `step` evaluates the loss again, as L-BFGS and SAM do: they are given a closure.

A plain loop hands such a step a closure, which runs a forward and a backward at the weights of the moment. Here the closure does so
in the layout: `Stepper` runs the same batch again with equal masks, and returns the same loss on all ranks. Such a rule depends on all
weights, and every rank must ask for the loss as often; so each rank holds all weights (zero=0 without tp and pp), or the layout is rejected.

The gradients of the step's own backward are those of the first evaluation, unless a weight has moved meanwhile.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from samestep.building.optimizer import OptimizerSource, class_names, members_of
from samestep.building.torch_seams import disable_compiler
from samestep.errors import ModelError
from samestep.runtime.optimizers.loss_scale import LossScale
from samestep.runtime.optimizers.one_process import alone, rejoined
from samestep.runtime.optimizers.optimizer_source import WholeWeights
from samestep.runtime.optimizers.skeletons import over_values, skeleton, small_shape
from samestep.runtime.optimizers.update_rule import is_torchs_own
from samestep.runtime.optimizers.update_trial import TRIED
from samestep.runtime.weights.pieces import Piece
from samestep.state.writes import Marks, exact_norms, marks_of


@dataclass(slots=True)
class Closure:
    """The closure of one update: it evaluates the loss, and lends the gradients to the pieces."""

    pieces: list[Piece]
    evaluate: Callable[[], tuple[float, float]]
    """Runs a forward and a backward at the present weights; returns the loss, and the factor that makes the gradients those of a mean, clipped."""
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
        first, (ids, marks) = self._first, self._present()
        if first is None or first[0] != ids or any(marks.since(first[1])):
            with rejoined():
                self.loss, factor = self.evaluate()
            for piece in self.pieces:
                gradient = piece.gradient()
                if factor != 1.0:
                    gradient.mul_(factor)
                piece.value.grad = gradient.to(piece.value.device).view_as(piece.value)
        self._first = None
        return torch.full((), self.loss, dtype=torch.float64, device=self.pieces[0].value.device)

    def _present(self) -> tuple[list[int], Marks]:
        values, gradients = [piece.value for piece in self.pieces], [piece.value.grad for piece in self.pieces]
        tensors = [*values, *(gradient for gradient in gradients if gradient is not None)]
        return [*map(id, gradients)], marks_of(tensors, norms=exact_norms)


def members_that_evaluate(source: OptimizerSource, whole_weights: WholeWeights) -> frozenset[int]:
    """Return the indices of the members of an optimizer whose step needs a closure: its argument has no default, or it fails without."""
    if not whole_weights.shapes:
        return frozenset()
    members = members_of(skeleton(source, whole_weights.shapes, whole_weights.attributes)[0])
    return frozenset(
        index for index, member in enumerate(members) if _needs_closure(source, whole_weights, index, member)
    )


def check_scale(scale: LossScale, evaluating: frozenset[int], optimizer: Optimizer | None) -> None:
    """Refuse a loss scale, under which gradients may overflow, for an optimizer with members that evaluate the loss.

    Raises:
        ModelError: there are such members, and the scale changes.
    """
    if evaluating and scale.is_dynamic:
        raise ModelError(
            "closure-unsupported",
            f"{class_names(optimizer) if optimizer else 'the optimizer'} evaluates the loss again in its step, where gradients under "
            'a loss scale may overflow. Set numerics.precision = "bf16"',
        )


def _needs_closure(source: OptimizerSource, whole_weights: WholeWeights, index: int, member: Optimizer) -> bool:
    first = [
        parameter
        for parameter in list(inspect.signature(type(member).step).parameters.values())[1:2]
        if parameter.kind in (0, 1)
    ]
    if is_torchs_own(member) or not first:
        return False
    return first[0].default is first[0].empty or (
        first[0].name == "closure" and _misses_closure(source, whole_weights, index)
    )


def _misses_closure(source: OptimizerSource, whole_weights: WholeWeights, index: int) -> bool:
    """Return whether a member's step on small weights fails since it has no closure, as its error says."""
    weights = {
        name: nn.Parameter(torch.full(small_shape(shape, 4096), 0.5)) for name, shape in whole_weights.shapes.items()
    }
    for name, weight in weights.items():
        weight.__dict__.update(whole_weights.attributes.get(name, {}))
        weight.grad = weight.detach().clone()
    member = members_of(over_values(source, whole_weights.shapes, whole_weights.attributes, weights).optimizer)[index]
    generator = torch.get_rng_state()
    try:
        with alone(type(member).__name__), torch.no_grad(), disable_compiler():
            member.step()
    except TRIED as error:
        return any(words in str(error) for words in ("closure", "'NoneType' object is not callable"))
    finally:
        torch.set_rng_state(generator)
    return False
