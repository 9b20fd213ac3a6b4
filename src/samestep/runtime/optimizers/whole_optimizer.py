"""The user's optimizer over the whole weights of a model: what is known of it before ranks build theirs over pieces.

It is asked once, of an optimizer over weights without values; the last one that the user's function makes is the one in use.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from samestep.building.optimizer import OptimizerSource
from samestep.job import Job
from samestep.layout import Layout
from samestep.models.spec import ModelSpec
from samestep.runtime.optimizers.closures import members_that_evaluate
from samestep.runtime.optimizers.optimizer_source import (
    ALONE,
    WholeWeights,
    check_optimizer,
    couples_weights,
    member_of_weight,
    updates_in_chunks,
)
from samestep.runtime.optimizers.optimizers_by_name import UpdatedPart


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
        """
        weights = WholeWeights.of(model, attributes)
        evaluating = members_that_evaluate(source, weights)
        marked = check_optimizer(source, model, layout, attributes, evaluating)
        # Asked now, for the canary: the optimizer that is used must be the last one that the function makes.
        is_watched = 0 < job.train.watch_every <= job.train.steps or bool(model.tried)
        couples = bool(evaluating) or (is_watched and couples_weights(source, marked, attributes))
        in_chunks = updates_in_chunks(source, job.numerics, weights)
        return cls(source, weights, member_of_weight(source, weights), evaluating, couples, in_chunks), marked
