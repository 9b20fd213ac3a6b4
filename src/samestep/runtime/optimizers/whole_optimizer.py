"""The user's optimizer over the whole weights of a model: what is known of it before ranks build theirs over pieces.

It is asked once, of an optimizer over weights without values; the last one that the user's function makes is the one in use.

The `step` of some optimizers evaluates the loss again, as L-BFGS and SAM do: they are given a closure. A plain loop's closure runs a forward and
a backward at the weights of the moment. Here it does so in the layout: `Stepper` runs the same batch again with equal masks, and returns the
same loss on all ranks. Such a rule depends on all weights, and every rank must ask for the loss as often; so each rank holds all weights (zero=0
without tp and pp), or the layout is rejected. The gradients of the step's own backward are those of the first evaluation, unless a weight has
moved meanwhile.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.optim import Optimizer

from samestep.building.optimizer import OptimizerSource, class_names, members_of
from samestep.building.torch_seams import disable_compiler
from samestep.errors import JobError, ModelError
from samestep.job import Job
from samestep.layout import Layout
from samestep.models.spec import ModelSpec
from samestep.runtime.optimizers.loss_scale import LossScale
from samestep.runtime.optimizers.optimizer_source import (
    ALONE,
    WholeWeights,
    check_optimizer,
    couples_weights,
    member_of_weight,
    updates_in_chunks,
)
from samestep.runtime.optimizers.optimizers_by_name import UpdatedPart
from samestep.runtime.optimizers.skeletons import alone, over_values, skeleton, small_shape
from samestep.runtime.optimizers.update_rule import is_torchs_own
from samestep.runtime.optimizers.update_trial import TRIED


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


@dataclass(frozen=True, slots=True)
class WholeOptimizer:
    """The user's optimizer, and the facts about it that hold for every part of the weights."""

    source: OptimizerSource
    weights: WholeWeights = ALONE
    member_of_weight: Mapping[str, int] = field(default_factory=dict)
    """The index of the member that holds each weight of the whole model, where the user gave several optimizers."""
    evaluating: frozenset[int] = frozenset()
    """The members of the optimizer whose step evaluates the loss again."""
    couples_weights: bool = False
    """Whether the update of a weight is known to depend on which others it holds; asked for runs with steps under watch."""
    updates_in_chunks: bool = False
    """Whether it may update some weights before others, where the job's numerics make anything depend on it."""
    by_rows: frozenset[str] = frozenset()
    """The weights of which it updates only the rows that are in their sparse gradients."""

    def evaluates(self, part: UpdatedPart) -> bool:
        """Return whether the step of a member of a part evaluates the loss again."""
        return bool(self.evaluating) and (part.members is None or not self.evaluating.isdisjoint(part.members))

    @classmethod
    def of(
        cls,
        source: OptimizerSource,
        model: ModelSpec,
        attributes: Mapping[str, Mapping[str, object]],
        job: Job,
        layout: Layout,
    ) -> tuple[WholeOptimizer, ModelSpec]:
        """Return an optimizer, and the model, its weights marked that the layout divides and it must update whole.

        Raises:
            LayoutError: its rule couples what the layout spreads; the text says which layout word works.
            ModelError: it cannot be used in any layout.
            JobError: it updates rows of sparse gradients, which the job compresses or exchanges.
        """
        weights = WholeWeights.of(model, attributes)
        evaluating = members_that_evaluate(source, weights)
        marked = check_optimizer(source, model, layout, attributes, evaluating)
        # Asked now, for the canary: the optimizer that is used must be the last one that the function makes.
        is_watched = 0 < job.train.watch_every <= job.train.steps or bool(model.tried)
        couples = bool(evaluating) or (is_watched and couples_weights(source, marked, attributes))
        in_chunks = updates_in_chunks(source, job.numerics, weights)
        by_rows = frozenset(param.name for param in marked.params if param.is_updated_by_rows)
        if by_rows and (job.numerics.compression != "none" or job.numerics.exchange_every > 1):
            raise JobError(
                "optimizer-sparse",
                f"the update of {min(by_rows)} has only the rows of its sparse gradient, and a gradient that is compressed, or of replicas that "
                "are trained independently, has all rows. Use sparse=False with adamw, or whole gradients in every step",
            )
        return cls(source, weights, member_of_weight(source, weights), evaluating, couples, in_chunks, by_rows), marked
