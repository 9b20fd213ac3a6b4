"""Stand-ins in the model's forward: for layers that other stages run, and for weights that the model's code reads.

A weight that the model's code itself reads in a forward is a value of the recorded flow (`tracing/flow.py`), which
every stage that reads it holds. While a forward of one chunk runs, the modules hold in place of these weights:

    read in this chunk     the weight itself; under zero=2|3 a copy, because the gathered weight is freed too soon
    read in others alone   a tensor that nothing reads
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from samestep.building.families import FamilyFacts
from samestep.examination.traced_model import TracedModel
from samestep.program.program import Program
from samestep.program.step import StepSpec
from samestep.runtime.axes.pipeline.stage_flow import StageForward, placeholder
from samestep.runtime.axes.precision import DTYPES
from samestep.tracing.flow import Flow, makes_event
from samestep.trees import tree_map_only


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
    """Replaces a layer that another stage runs; attributes that the model's code reads or sets are those of the layer.

    So are its modules: code that sets a flag of each adapter in `model.modules()`, and sets it back behind a part of the forward, finds
    those of this stage.
    """

    def __new__(cls, real: nn.Module, *_: Any, **__: Any) -> LayerStandIn:
        """Return one with the special methods of the layer's class: Python looks for these in classes alone."""
        return super().__new__(_with_special_methods(cls, real.__class__))  # type: ignore[arg-type]

    def __init__(
        self, real: nn.Module, facts: FamilyFacts, placeholders: Placeholders, *, is_part: bool = False
    ) -> None:
        super().__init__()
        is_here = not any(param.is_meta for param in real.parameters())
        own = {"_real": real, "_facts": facts, "_placeholders": placeholders, "_is_here": is_here, "_makes_event": None}
        self.__dict__.update(own, _is_part=is_part, _elsewhere={})
        del self.__dict__["training"]

    @property
    def _parameters(self) -> dict[str, Any]:
        """The layer's parameters as they stand, for code that asks the model for its parameters; those of a part are its layer's."""
        own = self.__dict__
        if own["_is_here"] or own["_is_part"]:
            return own["_real"]._parameters if own["_is_here"] else {}
        return {name: self._found(name, param) for name, param in own["_real"].named_parameters()}

    @_parameters.setter
    def _parameters(self, _: Any) -> None:
        """Ignore the dict that the constructor of a module makes."""

    def _found(self, name: str, param: nn.Parameter) -> nn.Parameter:
        """Return a parameter, or what stands for one that is on another stage."""
        elsewhere: dict[str, nn.Parameter] = self.__dict__["_elsewhere"]
        if param.is_meta and name not in elsewhere:
            elsewhere[name] = nn.Parameter(self._placeholders.of_weight(param), requires_grad=False)
        return elsewhere[name] if param.is_meta else param

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """The layer's class, for code that asks with `isinstance`."""
        return type(self.__dict__["_real"])

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.__dict__["_real"], name, value)

    def named_children(self) -> Iterator[tuple[str, nn.Module]]:
        """Yield the modules of the layer: what stands in for them, where another stage runs it."""
        for name, child in self.__dict__["_real"].named_children():
            is_here = self._is_here
            yield name, child if is_here else LayerStandIn(child, self._facts, self._placeholders, is_part=True)

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """Yield this module and those of the layer, with their paths."""
        memo = set() if memo is None else memo
        if self in memo:
            return
        if remove_duplicate:
            memo.add(self)
        yield prefix, self
        for name, child in self.named_children():
            yield from child.named_modules(memo, f"{prefix}.{name}" if prefix else name, remove_duplicate)

    def __getattr__(self, name: str) -> Any:
        return self._standing_for(getattr(object.__getattribute__(self, "_real"), name))

    def _standing_for(self, found: Any) -> Any:
        """Return what the layer holds, or what stands for it where it has weights of another stage."""
        if isinstance(found, Tensor):
            return self._placeholders.of_weight(found)
        if isinstance(found, nn.Module) and any(param.is_meta for param in found.parameters()):
            return LayerStandIn(found, self._facts, self._placeholders)
        return found

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return a view of the input, so that a hook on its gradient is on nothing that this stage computes; an embedding returns zeros
        that take no memory.
        """
        own = self.__dict__
        real = own["_real"]
        given = args[0] if args else kwargs[self._facts.name_of_hidden(kwargs)]
        if own["_makes_event"] is None:
            own["_makes_event"] = makes_event(real)
        if not own["_makes_event"]:
            return real(*args, **kwargs)  # rotary angles and the like, which every stage computes for itself
        if isinstance(real, nn.Embedding) and isinstance(given, Tensor):
            zero = torch.zeros((), dtype=self._placeholders.of_weight(real.weight).dtype, device=given.device)
            zero.requires_grad_(real.weight.requires_grad and torch.is_grad_enabled())  # code may put a hook on it
            return zero.expand(*given.shape, real.embedding_dim)
        if isinstance(given, Tensor):
            return given.view_as(given)
        on_meta = tree_map_only(Tensor, lambda tensor: tensor.to("meta"), (args, kwargs))  # it is given a shape, say
        with torch.no_grad():
            return tree_map_only(Tensor, self._placeholders.of_weight, real(*on_meta[0], **on_meta[1]))


_SPECIAL = ("__len__", "__getitem__", "__iter__", "__reversed__", "__contains__", "__bool__")
"""The special methods of containers, which blocks may be."""


@functools.cache
def _with_special_methods(base: type, kind: type) -> type:
    """Return the class of what stands for a module of a class."""

    def method(name: str) -> Callable[..., Any]:
        def call(self: LayerStandIn, *args: Any) -> Any:
            found = getattr(kind, name)(self.__dict__["_real"], *args)
            is_iterator = name in ("__iter__", "__reversed__")
            return map(self._standing_for, found) if is_iterator else self._standing_for(found)

        return call

    methods = {name: method(name) for name in _SPECIAL if hasattr(kind, name)}
    return type(base.__name__, (base,), methods) if methods else base


class Reporting(LayerStandIn):
    """Replaces a layer of any stage in a forward, and reports its calls, as to one that follows a recorded flow."""

    def __init__(self, stand_in: LayerStandIn, call: Callable[[nn.Module, Any, Any], Any]) -> None:
        real = object.__getattribute__(stand_in, "_real")
        super().__init__(real, stand_in._facts, stand_in._placeholders)
        self.__dict__.update(_call=functools.partial(call, real), _makes_event=makes_event(real))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the layer returns if it is this stage's, or what stands in for that."""
        if not self._makes_event:
            return object.__getattribute__(self, "_real")(*args, **kwargs)
        return self._call(args, kwargs)


_Slots = list[tuple[nn.Module, str]]
"""The modules that hold a weight, each with its name in it."""


class ReadWeights:
    """Puts the weights or stand-ins of a chunk in place of the weights that the model's code reads."""

    def __init__(self, traced: TracedModel, program: Program, device: torch.device) -> None:
        self._model, self._device = traced.module, device
        self._slots: dict[str, _Slots] = {}
        for param in traced.spec.params:
            names = [name.rpartition(".") for name in (param.name, *param.aliases)]
            self._slots[param.name] = [(traced.module.get_submodule(path), leaf) for path, _, leaf in names]
        self._copied = {name for unit in program.units if unit.modules == ("",) for name in unit.params}

    @contextmanager
    def placed(self, flow: Flow, mode: StageForward) -> Iterator[None]:
        """Put the weights in place while a forward of the model runs inside."""
        before: list[tuple[nn.Module, str, nn.Parameter | None]] = []
        values = dict(flow.weights)

        def enter(*_: Any) -> None:
            # After the hooks of FSDP2, which gather the weights.
            for name in {**values, **dict.fromkeys(self._copied)}:
                value = values.get(name)
                stands = self._stands(name, flow, mode, is_value=value is not None)
                for module, leaf in self._slots[name]:
                    before.append((module, leaf, module._parameters[leaf]))
                    module._parameters[leaf] = stands  # type: ignore[assignment]
                if value is not None:
                    mode.holds(stands, value)

        def leave(*_: Any) -> None:
            while before:
                module, leaf, param = before.pop()
                module._parameters[leaf] = param

        handles = (
            self._model.register_forward_pre_hook(enter),
            self._model.register_forward_hook(leave, prepend=True, always_call=True),
        )
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _stands(self, name: str, flow: Flow, mode: StageForward, *, is_value: bool) -> Tensor:
        """Return the tensor that the modules hold in place of a weight."""
        module, leaf = self._slots[name][0]
        weight = module._parameters[leaf]
        assert weight is not None
        if is_value and not mode.reads(name):
            found = flow.values[dict(flow.weights)[name]]
            return nn.Parameter(placeholder(found.shape, found.dtype, self._device), requires_grad=False)
        return weight.clone() if name in self._copied else weight
