"""One forward of a model on the meta device, traced under a list of observers, and the means to run it again."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from samestep.building.initial_values import Blueprint
from samestep.building.loss_result import Loss
from samestep.building.named_tensors import cast_floating
from samestep.datasets import blame_samples
from samestep.datasets.values import first_of
from samestep.examination.read_originals import refused_reads
from samestep.examination.recording import MaskRecorder, record_masks
from samestep.independence import cut_proof, kept_state, sequence_boundaries, tensor_plan
from samestep.models.analysis import ExpertModules
from samestep.models.layer_parts import ExpertDispatch
from samestep.models.spec import ModelSpec
from samestep.state import snapshot
from samestep.tracing import experts as experts_module
from samestep.tracing.checkpointed import Checkpointed, TracedPlaces, record_checkpointed
from samestep.tracing.operations import Recorder
from samestep.tracing.trace import samples_traced, trace


@dataclass(frozen=True, slots=True)
class BuiltModel:
    """A model on the meta device with its loss, and one real sample that its forward is run on."""

    name: str
    blueprint: Blueprint
    loss: Loss
    example: Any
    sample: Any
    """A batch of the first sample of the example, its floating tensors in the dtype of the weights."""
    stages: Sequence[str]
    """The modules with which pipeline stages begin, if others than blocks."""
    experts: ExpertModules

    @classmethod
    def of(
        cls,
        name: str,
        blueprint: Blueprint,
        loss: Loss,
        example: Any,
        stages: Sequence[str],
        experts: ExpertModules | None = None,
    ) -> BuiltModel:
        """Return a model with the first sample of an example; its experts are looked for unless they are known."""
        module = blueprint.module
        dtype = next((param.dtype for param in module.parameters() if param.is_floating_point()), torch.float32)
        sample = cast_floating(first_of(example), dtype)
        return cls(name, blueprint, loss, example, sample, stages, experts or experts_module.experts_of(module))

    @property
    def module(self) -> nn.Module:
        """The model, on the meta device."""
        return self.blueprint.module

    @property
    def num_samples(self) -> int:
        """Number of copies of the sample in a traced forward."""
        return samples_traced(self.module)

    def value_of(self, name: str) -> Tensor:
        """Return the values of a weight or buffer, on the CPU."""
        return self.blueprint.materialize(name, device=torch.device("cpu"))

    def trace(
        self,
        places: TracedPlaces,
        styles: Mapping[str, str] | None = None,
        recorder: Recorder | None = None,
        *,
        keeps_all: bool = False,
    ) -> ModelSpec:
        """Return the spec that one forward gives, with what a tensor plan adds to it; the parameters are those of `tracing.trace`.

        Raises:
            ModelError: the forward fails, or needs values that are not known.
        """
        with blame_samples(self.example):
            return trace(
                self.module, self.sample, self.name, self.value_of, places, styles, recorder,
                loss=self.loss, stages=self.stages, keeps_all=keeps_all,
            )  # fmt: skip

    @contextmanager
    def repeating(self) -> Iterator[None]:
        """Let a forward of the whole model run once more, from the state that the modules have now.

        At their first forward modules make tables, and install hooks that record their outputs: both are taken back.
        """
        with (
            snapshot.preserve_modules(self.module),
            record_checkpointed(self.module),
            record_masks(self.module, self.num_samples),
            experts_module.record_dispatches(self.module, self.experts),
        ):
            yield


@dataclass(frozen=True, slots=True)
class CutObservations:
    """The observations of a forward that the proof and the costs of a tensor plan need."""

    costs: tensor_plan.CutCosts
    calls: sequence_boundaries.Calls
    recorder: Recorder


@dataclass(frozen=True, slots=True)
class TracedForward:
    """A traced forward: the spec that its trace gives, and the records of its observers."""

    spec: ModelSpec
    changes: kept_state.Changes
    masks: MaskRecorder
    dispatches: list[ExpertDispatch]
    expert_calls: dict[str, tuple[Any, Any]]
    checkpointed: Checkpointed
    cuts: CutObservations | None
    """None of a forward that was traced without a tensor plan."""


def trace_forward(built: BuiltModel, planned: tensor_plan.Cuts | None) -> TracedForward:
    """Trace one forward of a model under all observers; those of cuts watch it only where there is a tensor plan.

    Raises:
        ModelError: the forward fails, or needs values that are not known.
    """
    module, expert_calls, places = built.module, dict[str, tuple[Any, Any]](), TracedPlaces()
    with ExitStack() as observers:
        observe = observers.enter_context
        observe(refused_reads(built.blueprint))
        changes = observe(kept_state.record_changes(module))  # it looks when those below have gone
        cuts = None
        if planned is not None:
            observe(cut_proof.record_ends(module, planned.styles, recorder := Recorder(), planned.looking))
            costs = observe(tensor_plan.record_cuts(module, planned, places))
            cuts = CutObservations(costs, observe(sequence_boundaries.record_calls(module, places)), recorder)
            run = functools.partial(built.trace, places, planned.styles, recorder, keeps_all=bool(planned.looking))
        else:
            run = functools.partial(built.trace, places)
        masks = observe(record_masks(module, built.num_samples))
        dispatches = observe(experts_module.record_dispatches(module, built.experts, expert_calls, places))
        checkpointed = observe(record_checkpointed(module))
        spec = run()
    checkpointed.entered |= places.covered
    return TracedForward(spec, changes, masks, dispatches, expert_calls, checkpointed, cuts)
