"""A model that was built on the meta device and traced once: the input of everything that cuts, fills and runs it."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from torch import nn

from samestep.building.families import FamilyFacts
from samestep.building.initial_values import Blueprint
from samestep.independence.cut_proof import CutProof
from samestep.independence.samples import NUM_SAMPLES
from samestep.layout import Layout
from samestep.models.analysis import ModelAnalysis
from samestep.models.spec import ModelSpec
from samestep.strategies.tensor import refuse_degree
from samestep.tracing.flow import Flow

Lack = Literal["plan", "counts", "trials", "tokens", "slices", "calls", "chunks"]
"""A finding that a layout needs: the plan of tensor parallelism, the counts of its ranks and the trials that the plan rests on, a
proof that blocks work token by token between cut parts, one that they work on slices of a sequence, the modules that the
samples of a micro-batch call several times, and whether the loss works on chunks of tokens."""


@dataclass(frozen=True, slots=True)
class TracedModel:
    """A model on the meta device, the tape that makes its tensors, and the analysis of its trace.

    One run alone cuts and fills the blueprint's modules; the analysis holds for every copy.
    """

    blueprint: Blueprint
    analysis: ModelAnalysis
    facts: FamilyFacts
    """Facts about the model's family."""
    cuts: CutProof | None
    """The cuts of a tensor plan, and what is proven of them; None where no plan was looked for."""
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

    def covers(self, layout: Layout, num_samples: int = 1) -> bool:
        """Return whether all is known that a layout with micro-batches of so many samples needs."""
        return not self.lacks(layout, num_samples)

    def lacks(self, layout: Layout, num_samples: int = 1) -> frozenset[Lack]:
        """Return what a layout needs and nobody has found out, nor why it is refused."""
        analysis, spec, degree = self.analysis, self.spec, layout.tp
        found: set[Lack] = set()
        if degree > 1 and self.cuts is None:
            found.add("plan")
        elif degree > 1:
            if degree not in analysis.counts and not refuse_degree(spec, degree):
                found.add("counts")
            if self.cuts is not None and not {*self.cuts.tried} <= {*spec.tried}:
                found.add("trials")
            is_known = degree in analysis.slices_between or spec.sequence_refusal or spec.sequence % degree
            if layout.sequence_parallel and not is_known:
                found.add("tokens")
        if num_slices(layout) not in (1, *analysis.parts_examined):
            found.add("slices")
        if layout.loss_chunk is not None and not analysis.chunks_examined:
            found.add("chunks")
        is_gathered = layout.zero == 3 and layout.num_shards > 1
        if is_gathered and num_samples > NUM_SAMPLES and num_samples not in analysis.samples_examined:
            found.add("calls")
        return frozenset(found)


def num_slices(layout: Layout) -> int:
    """Return into how many slices of the sequence a layout needs blocks to be cut; 1 where it needs none."""
    return max(layout.cp, 1 if layout.mlp_chunk is None else 2)
