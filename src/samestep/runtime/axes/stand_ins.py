"""Modules in place of the layers that other stages run, in the model's own forward."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from samestep.building.families import FamilyFacts
from samestep.program.step import StepSpec
from samestep.runtime.axes.precision import DTYPES
from samestep.runtime.axes.stage_flow import StageForward, placeholder
from samestep.tracing.flow import makes_event
from samestep.tracing.traced_model import TracedModel


@dataclass(frozen=True)
class Placeholders:
    """Makes tensors in place of the weights that another stage holds, for code that asks for their dtype or device."""

    device: torch.device
    dtypes: Mapping[int, torch.dtype]
    """Dtype that each weight has within the module on the stage that holds it, by the identity of the weight here."""

    @classmethod
    def of(cls, traced: TracedModel, step: StepSpec, device: torch.device) -> Placeholders:
        """Return what makes the placeholders of a run."""
        named = dict(traced.module.named_parameters(remove_duplicate=False))
        names = ((name, param) for param in traced.spec.params for name in (param.name, *param.aliases))
        return cls(
            device, {id(named[name]): DTYPES[step.working_dtype(param)] for name, param in names if name in named}
        )

    def of_weight(self, weight: Tensor) -> Tensor:
        """Return a tensor that stands in for a weight, unless this stage holds it."""
        if not weight.is_meta:
            return weight
        return placeholder(weight.shape, self.dtypes.get(id(weight), weight.dtype), self.device)


class LayerStandIn(nn.Module):
    """Replaces a layer that another stage runs; attributes that the model's code reads are those of the layer."""

    def __init__(self, real: nn.Module, facts: FamilyFacts, placeholders: Placeholders) -> None:
        super().__init__()
        object.__setattr__(self, "_real", real)
        self._facts, self._placeholders = facts, placeholders
        self._parameters = {  # for code that asks the model for its parameters
            name: nn.Parameter(placeholders.of_weight(param), requires_grad=False) if param.is_meta else param
            for name, param in real.named_parameters()
        }

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """The layer's class, for code that asks with `isinstance`."""
        return type(self.__dict__["_real"])

    def __getattr__(self, name: str) -> Any:
        found = getattr(object.__getattribute__(self, "_real"), name)
        if isinstance(found, Tensor):
            return self._placeholders.of_weight(found)
        if isinstance(found, nn.Module) and any(param.is_meta for param in found.parameters()):
            return LayerStandIn(found, self._facts, self._placeholders)
        return found

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the input; an embedding returns zeros that take no memory."""
        real = object.__getattribute__(self, "_real")
        given = args[0] if args else kwargs[self._facts.name_of_hidden(kwargs)]
        if not makes_event(real):
            return real(*args, **kwargs)  # rotary angles and the like, which every stage computes for itself
        if isinstance(real, nn.Embedding) and isinstance(given, Tensor):
            dtype = self._placeholders.of_weight(real.weight).dtype
            return torch.zeros((), dtype=dtype, device=given.device).expand(*given.shape, real.embedding_dim)
        if isinstance(given, Tensor):
            return given
        on_meta = tree_map_only(Tensor, lambda tensor: tensor.to("meta"), (args, kwargs))  # it is given a shape, say
        with torch.no_grad():
            return tree_map_only(Tensor, self._placeholders.of_weight, real(*on_meta[0], **on_meta[1]))


class Reporting(LayerStandIn):
    """Replaces a layer of any stage in a forward that follows a recorded flow, and reports its calls."""

    def __init__(self, stand_in: LayerStandIn, path: str, mode: StageForward) -> None:
        real = object.__getattribute__(stand_in, "_real")
        super().__init__(real, stand_in._facts, stand_in._placeholders)
        object.__setattr__(self, "_call", functools.partial(mode.call, path, real))
        self._makes_event = makes_event(real)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the layer returns if it is this stage's, or what stands in for that."""
        if not self._makes_event:
            return object.__getattribute__(self, "_real")(*args, **kwargs)
        return self._call(args, kwargs)
