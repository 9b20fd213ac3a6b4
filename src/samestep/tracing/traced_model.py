"""A model that was built on the meta device and looked at once, as it is handed to all that cuts, fills and runs it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from samestep.building.families import FamilyFacts
from samestep.building.initial_values import Blueprint
from samestep.models.analysis import ModelAnalysis
from samestep.models.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class TracedModel:
    """A model on the meta device, how its tensors are made, and what was learned of it.

    One run alone cuts and fills the blueprint's modules; the analysis holds of every copy.
    """

    blueprint: Blueprint
    analysis: ModelAnalysis
    facts: FamilyFacts
    """What is known of its family."""

    @property
    def module(self) -> nn.Module:
        """The model itself."""
        return self.blueprint.module

    @property
    def spec(self) -> ModelSpec:
        """The model's shape."""
        return self.analysis.spec
