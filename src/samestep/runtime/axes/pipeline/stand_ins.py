"""What a stage's forward finds in place of layers that other stages run, and of weights that the model's code reads.

A weight that the model's code itself reads in a forward is a value of the recorded flow (`tracing/flow.py`), which
every stage that reads it holds. While a forward of one chunk runs, the modules hold in place of these weights:

    read in this chunk     the weight itself; under zero=2|3 a copy, because the gathered weight is freed too soon
    read in others alone   a tensor that nothing reads
"""

from __future__ import annotations

import functools
import math
import types
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from samestep.building.families import name_of_hidden
from samestep.examination.traced_model import TracedModel
from samestep.program.program import Program
from samestep.program.step import StepSpec
from samestep.runtime.axes.pipeline.stage_flow import StageForward, placeholder
from samestep.runtime.axes.precision import DTYPES
from samestep.tracing.flow import Flow, makes_event
from samestep.trees import tree_map_only

_Call = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
"""A function that is given the call of a layer, and its arguments."""
_CALL = "_samestep_call"


@functools.cache
def _called_by(kind: type[nn.Module]) -> type[nn.Module]:
    """Return a class of modules like those of a class, with calls that a function of each module carries out."""

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        instead: _Call = vars(self)[_CALL]
        return instead(functools.partial(kind.__call__, self), args, kwargs)

    names: dict[str, Any] = {"__call__": call, "__module__": kind.__module__, "__qualname__": kind.__qualname__}
    return types.new_class(kind.__name__, (kind,), exec_body=lambda body: body.update(names))


@dataclass(slots=True)
class _Slot:
    """The place of a tensor of another stage in a module of a layer."""

    table: dict[str, Any]
    key: str
    other: Tensor
    """The tensor that is not there: during a forward the one without values, else what stands for it."""


class StageLayers:
    """The layers of the model that a forward of a stage calls; those of other stages have shapes and no values.

    While the forward runs, functions of the stage carry out the calls of layers, so that their hooks and their forward do not run. The
    model's code reads and sets attributes of the layers themselves. A tensor of another stage is replaced meanwhile by one that takes no
    memory, for code that asks for its dtype or device. It is of zeros if a trace shows that nothing reads what is computed with it, and
    of NaN if the code looks at values, so that no trace holds for all samples.
    """

    def __init__(self, traced: TracedModel, step: StepSpec, device: torch.device) -> None:
        self._device = device
        value = math.nan if step.model.varies_at and not step.model.varies_within else 0.0
        paths = [(path, index) for index, layer in enumerate(step.model.layers) for path in layer.modules if path]
        self._by_path = {path: traced.module.get_submodule(path) for path, _ in paths}
        # Rotary angles and the like make no event: every stage computes them for itself.
        self._called = [(path, index) for path, index in paths if makes_event(self._by_path[path])]
        named = dict(traced.module.named_parameters(remove_duplicate=False))
        self._dtypes = {
            id(named[name]): DTYPES[step.working_dtype(param)]
            for param in traced.spec.params
            for name in (param.name, *param.aliases)
            if name in named
        }
        self._slots: dict[tuple[int, str], _Slot] = {}
        for module in self._by_path.values():
            for table, key in _tensors_in(module):
                if table[key].is_meta:
                    stands = self._placeholder(table[key], value)
                    is_weight = isinstance(table[key], nn.Parameter)
                    other = nn.Parameter(stands, requires_grad=False) if is_weight else stands
                    self._slots[id(table), key] = _Slot(table, key, other)

    def __getitem__(self, path: str) -> nn.Module:
        """Return the module with this path."""
        return self._by_path[path]

    @contextmanager
    def called(self, by: Callable[[str, int], _Call | None]) -> Iterator[None]:
        """Let functions carry out calls inside; `by` is given a module's path and the index of its layer."""
        calls = {self._by_path[path]: by(path, index) for path, index in self._called}  # two paths may be of one module
        kinds = {module: type(module) for module, call in calls.items() if call is not None}
        classes = {module: _called_by(kind) for module, kind in kinds.items()}  # type: ignore[arg-type]
        _exchange(self._slots.values())
        try:
            for module, kind in classes.items():
                vars(module)[_CALL] = calls[module]
                object.__setattr__(module, "__class__", kind)
            yield
        finally:
            for module, kind in kinds.items():
                object.__setattr__(module, "__class__", kind)
                vars(module).pop(_CALL, None)
            _exchange(self._slots.values())

    def pass_on(self, path: str) -> _Call:
        """Return a function that stands for a layer of another stage: it returns a view of the input, so that a hook on its gradient is on
        nothing that this stage computes; for an embedding zeros that take no memory.
        """
        return functools.partial(self._passed, self._by_path[path])

    def _passed(
        self, module: nn.Module, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        hidden = args[0] if args else kwargs[name_of_hidden(kwargs)]
        if not isinstance(hidden, Tensor):  # it is given a shape, say
            return self._result_of(module, call, args, kwargs)
        if not isinstance(module, nn.Embedding):
            return hidden.view_as(hidden)
        weight, slot = module.weight, self._slots.get((id(module._parameters), "weight"))
        zero = torch.zeros((), dtype=weight.dtype, device=hidden.device)
        trains = (weight if slot is None else slot.other).requires_grad
        zero.requires_grad_(trains and torch.is_grad_enabled())  # code may put a hook on it
        return zero.expand(*hidden.shape, module.embedding_dim)

    def _result_of(self, module: nn.Module, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Return tensors of zeros of the shapes that a layer returns, which it computes from shapes alone."""
        slots = [self._slots[id(table), key] for table, key in _tensors_in(module) if (id(table), key) in self._slots]
        on_meta = tree_map_only(Tensor, lambda tensor: tensor.to("meta"), (args, kwargs))
        _exchange(slots)
        try:
            with torch.no_grad():
                return tree_map_only(Tensor, self._placeholder, call(*on_meta[0], **on_meta[1]))
        finally:
            _exchange(slots)

    def _placeholder(self, tensor: Tensor, value: float = 0.0) -> Tensor:
        """Return a tensor that stands in for one without values, in the dtype that a weight has on the stage that holds it."""
        if not tensor.is_meta:
            return tensor
        return placeholder(tensor.shape, self._dtypes.get(id(tensor), tensor.dtype), self._device, value)


def _tensors_in(module: nn.Module) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield the dicts of a module and of the modules in it that hold tensors, with their keys."""
    for part in module.modules():
        for table in (part._parameters, part._buffers, vars(part)):
            yield from ((table, key) for key, value in list(table.items()) if isinstance(value, Tensor))


def _exchange(slots: Iterable[_Slot]) -> None:
    """Put the other tensor of each place into it."""
    for slot in slots:
        slot.table[slot.key], slot.other = slot.other, slot.table[slot.key]


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
        originals: list[tuple[nn.Module, str, nn.Parameter | None]] = []
        values = dict(flow.weights)

        def enter(*_: Any) -> None:
            # After the hooks of FSDP2, which gather the weights.
            for name in {**values, **dict.fromkeys(self._copied)}:
                value = values.get(name)
                stands = self._stands(name, flow, mode, is_value=value is not None)
                for module, leaf in self._slots[name]:
                    originals.append((module, leaf, module._parameters[leaf]))
                    module._parameters[leaf] = stands  # type: ignore[assignment]
                if value is not None:
                    mode.holds(stands, value)

        def leave(*_: Any) -> None:
            while originals:
                module, leaf, param = originals.pop()
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
            recorded = flow.values[dict(flow.weights)[name]]
            return nn.Parameter(placeholder(recorded.shape, recorded.dtype, self._device), requires_grad=False)
        return weight.clone() if name in self._copied else weight
