"""A model that was built on the meta device and traced once: the input of everything that cuts, fills and runs it."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field

from torch import nn

from samestep.building.initial_values import Blueprint
from samestep.independence.cut_proof import CutProof
from samestep.models.spec import ModelAnalysis, ModelSpec
from samestep.tracing.flow import Flow


@dataclass(frozen=True, slots=True)
class TracedModel:
    """A model on the meta device, the tape that makes its tensors, and the analysis of its trace.

    One run alone cuts and fills the blueprint's modules; the analysis holds for every copy.
    """

    blueprint: Blueprint
    analysis: ModelAnalysis
    cuts: CutProof | None
    """The cuts of a tensor plan, and what is proven of them; None where no plan was looked for."""
    keeps_double: bool = True
    """Whether its forward runs on float64 values of a batch as they are; one that torch refuses has them in its own dtype."""
    flows: Mapping[Hashable, Flow] = field(default_factory=dict)
    """The recorded flows of the forward, which stages of a pipeline follow, by dtypes and shapes (`runtime/axes/pipeline/stage_flow.py`)."""

    @property
    def module(self) -> nn.Module:
        """The model, on the meta device."""
        return self.blueprint.module

    @property
    def spec(self) -> ModelSpec:
        """The spec of the model."""
        return self.analysis.spec
