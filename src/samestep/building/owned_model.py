"""The model instance that a run owns, as DDP and `fully_shard` own theirs: no other run takes a part of it until the run gives it back.

    parallelize(model, ...)  ─►  take  ─►  steps  ─►  run.release()          the instance is whole, with trained values
                                             └─────►  the run is dropped     the same if ranks hold whole weights, otherwise it is lost

    given               taken                     in its layout                     within run.gathered(), and after run.release()
    nn.Parameter   ─►   one without values   ─►   the same nn.Parameter, or     ─►  whole weights
                                                  one with this rank's part
    class, forward, hooks, attributes        ─►   those of the layout           ─►  those of the code

Only entries that the layout has changed are put back (`PlainForm`): counters, modes and hooks of a loop stay as they are. A build function
that returns weights with values, such as those of a backbone, gives copies of them. Two runs must not train copies of one weight either.
"""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import FunctionType, MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from samestep.building.named_tensors import OF_TORCH, join_name, map_attributes, set_attributes
from samestep.building.parameter_marks import gradient_hooks_of
from samestep.building.several_models import as_given, put_aside
from samestep.building.torch_seams import DisableTorchFunction, disable_current_modes
from samestep.errors import ModelError
from samestep.trees import tensors_in

_NOTHING = object()
"""Stands for a key that a dict lacks."""
_APART = frozenset(("_parameters", "_buffers", "training"))
"""Attributes of a module that are no part of this form: its tensors are treated separately, and a loop sets its mode."""
_OURS = "samestep."
_OPAQUE = (Tensor, nn.Module, FunctionType, MethodType, type)


class _Entry(NamedTuple):
    """A key of a dict, and its value in one of the two forms."""

    table: dict[str, Any]
    key: str
    value: Any


class _Slot(NamedTuple):
    """The place of a weight or a buffer, and the tensor that code has put there."""

    name: str
    owner: nn.Module
    table: dict[str, Tensor | None]
    leaf: str
    tensor: Tensor
    dtype: torch.dtype
    shape: torch.Size
    hooks: tuple[dict[int, Any], ...]


class PlainForm:
    """The classes, attributes, hooks and tensors of a module and its parts, as they were when this was made."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self._classes = {part: type(part) for part in module.modules()}
        self._tables = self._built = [(table, dict(table)) for table in _tables_of(module)]
        self._slots = [*_slots_of(module)]
        self._attributes: dict[str, Tensor] = {}
        self._map_attributes(lambda name, tensor: self._attributes.setdefault(name, tensor))
        self._of_layout: list[_Entry] = []
        """The entries that the layout has changed, with their values before."""
        self._changes: list[_Entry] | None = None
        """These, and those that any run changes, with the values of this form; None while some are still changed."""

    @property
    def has_its_parameters(self) -> bool:
        """Whether the parameters that code has made are in their places."""
        slots = [slot for slot in self._slots if isinstance(slot.tensor, nn.Parameter)]
        return all(slot.table.get(slot.leaf) is slot.tensor and slot.tensor.shape == slot.shape for slot in slots)

    def take(self, twins: Mapping[int, Tensor]) -> None:
        """Put the twin of each tensor, by the tensor's identity, in its place."""
        for slot in self._slots:
            slot.table[slot.leaf] = twins[id(slot.tensor)]
        self._map_attributes(lambda _, tensor: twins.get(id(tensor), tensor))

    def begin(self) -> None:
        """Note what any run changes, whatever its layout is."""
        self._built = [(table, dict(table)) for table, _ in self._tables]

    def settle(self, value_of: Callable[[str], Tensor], *, frees: bool) -> None:
        """Note what the layout has changed; `value_of` returns the whole value of a buffer.

        With `frees`, parameters that the layout has replaced lose their values.
        """
        self._of_layout, self._changes = [*_changed(self._built)], [*_changed(self._tables)]
        for slot in self._slots:
            present = slot.table.get(slot.leaf)
            if isinstance(slot.tensor, nn.Parameter):
                if frees and present is not slot.tensor:
                    slot.tensor.data = torch.empty(0, dtype=slot.dtype)
            elif present is not None and present.shape != slot.shape:
                self._of_layout.append(_Entry(slot.table, slot.leaf, value_of(slot.name).to(present)))

    @contextmanager
    def worn(self) -> Iterator[None]:
        """Let the module have this form inside, with the tensors that it has in its layout."""
        classes = {part: type(part) for part in self._classes}
        in_layout = [_Entry(table, key, table.get(key, _NOTHING)) for table, key, _ in self._of_layout]
        order = [(table, [*table]) for table, _ in self._tables]
        self._wear(self._of_layout)
        try:
            yield
        finally:
            for part, kind in classes.items():
                part.__class__ = kind
            put_aside(self.module)
            _put(in_layout, order)

    def give_back(self, values: Mapping[str, Tensor] | None = None) -> None:
        """Let the module have this form again: with the tensors that code has given it, and trained `values` in them by name.

        Weights and buffers without such a value have that of the layout, if it is whole; without any `values` they are as they were.
        What a build function has made has new tensors.
        """
        new = dict[int, Tensor]()
        for slot in self._slots:
            present, tensor = slot.table.get(slot.leaf), slot.tensor
            if values is not None and tensor.is_meta:
                is_weight = isinstance(tensor, nn.Parameter)
                empty = torch.empty(0, dtype=slot.dtype)
                tensor = new.setdefault(id(tensor), nn.Parameter(empty, tensor.requires_grad) if is_weight else empty)
            if isinstance(tensor, nn.Parameter):
                for kind, hooks in zip(gradient_hooks_of(tensor), slot.hooks, strict=True):
                    kind.clear()
                    kind.update(hooks)
                _unmark(tensor)
                tensor.grad = None
                tensor.requires_grad_((tensor if present is None else present).requires_grad)
            value = tensor if values is None else values.get(slot.name, present)
            if value is not None and value.shape == slot.shape and not value.is_meta and not tensor.is_meta:
                tensor.data = value.detach().to(slot.dtype)
            slot.table[slot.leaf] = tensor
            if isinstance(slot.owner, nn.RNNBase):  # has a list of its weights, which an assignment brings up to date
                setattr(slot.owner, slot.leaf, tensor)
        self._wear([*_changed(self._tables)] if self._changes is None else self._changes)
        self._map_attributes(self._given_attribute)
        _forget_shards(self._classes)

    def _given_attribute(self, name: str, present: Tensor) -> Tensor:
        """Return the tensor that code has put into an attribute, with the values that it has in the layout."""
        tensor = self._attributes.get(name, present)
        if tensor.is_meta:
            return present
        is_shared = tensor is present or isinstance(tensor, nn.Parameter) or present.is_meta
        if not is_shared and present.shape == tensor.shape:
            tensor.data = present.detach().to(tensor.dtype)
        return tensor

    def _wear(self, entries: Iterable[_Entry]) -> None:
        for part, kind in self._classes.items():
            part.__class__ = kind
        _put(entries, self._tables)
        as_given(self.module)

    def _map_attributes(self, change: Callable[[str, Tensor], Tensor]) -> None:
        for prefix, part in self.module.named_modules(remove_duplicate=False):
            map_attributes(prefix, part, change)


def _changed(tables: Iterable[tuple[dict[str, Any], dict[str, Any]]]) -> Iterator[_Entry]:
    """Yield the entries of dicts that differ from their copies, but for tensors."""
    for table, values in tables:
        for key in {**values, **table}.keys() - _APART:
            value, present = values.get(key, _NOTHING), table.get(key, _NOTHING)
            if present is not value and not _holds_tensors(value) and not _holds_tensors(present):
                yield _Entry(table, key, value)


def _put(entries: Iterable[_Entry], order: Iterable[tuple[dict[str, Any], Iterable[str]]]) -> None:
    """Set entries of dicts, whose keys, such as those of hooks, are then in an order that is given, with others behind."""
    changed = {id(table) for table, _, _ in entries}
    for table, key, value in entries:
        if value is _NOTHING:
            table.pop(key, None)
        else:
            table[key] = value
    for table, keys in order:
        if id(table) in changed:
            present = dict(table)
            table.clear()
            table.update({key: present[key] for key in keys if key in present} | present)


def _tables_of(module: nn.Module) -> Iterator[dict[str, Any]]:
    """Yield the dicts of a module and its parts: attributes, submodules and hooks, and those of plain objects in attributes, such as a
    configuration."""
    seen = set[int]()
    for part in module.modules():
        yield vars(part)
        yield from (vars(part)[key] for key in OF_TORCH - _APART if isinstance(vars(part).get(key), dict))
        for value in set_attributes(part).values():
            if id(value) not in seen and not isinstance(value, _OPAQUE) and hasattr(value, "__dict__"):
                seen.add(id(value))
                yield vars(value)


def _slots_of(module: nn.Module) -> Iterator[_Slot]:
    for prefix, owner in module.named_modules(remove_duplicate=False):
        for table in (owner._parameters, owner._buffers):
            for leaf, tensor in table.items():
                if tensor is not None:
                    hooks = tuple(dict(kind) for kind in gradient_hooks_of(tensor))
                    yield _Slot(join_name(prefix, leaf), owner, table, leaf, tensor, tensor.dtype, tensor.shape, hooks)


def _unmark(param: nn.Parameter) -> None:
    """Take the class and the marks from a parameter that a layout has given it."""
    if type(param).__module__.startswith(_OURS):
        param.__class__ = nn.Parameter
    marks = [key for key, value in vars(param).items() if type(value).__module__.startswith(_OURS)]
    for key in marks:
        del vars(param)[key]


def _holds_tensors(value: Any) -> bool:
    return isinstance(value, Tensor | list | tuple | dict) and bool(tensors_in(value))


def _forget_shards(parts: Iterable[nn.Module]) -> None:
    """Let FSDP2 take modules again, of which it keeps a state each."""
    if (states := sys.modules.get("torch.distributed._composable_state")) is not None:
        for part in parts:
            states._module_state_mapping.pop(part, None)


_LIVE: weakref.WeakSet[OwnedModel] = weakref.WeakSet()
"""The owners of the runs of this process."""
_LOST: weakref.WeakSet[nn.Module] = weakref.WeakSet()
"""Modules with parts of weights that a run has left."""


class OwnedModel:
    """The modules and weights of one run of a loop."""

    def __init__(self, model: object) -> None:
        """Own an instance; a build function has nothing to own yet.

        Raises:
            ModelError: another run owns a part of it.
        """
        self._has_ended = False
        self.form: PlainForm | None = None
        """The form of the instance while the run has taken it."""
        self.optimizers: list[Any] = []
        """What gives back the instances of optimizers that the run has taken."""
        module = model if isinstance(model, nn.Module) else nn.Module()
        self._weights = {name: weakref.ref[Tensor](param) for name, param in module.named_parameters()}
        self._trained = frozenset(self._weights)
        self._parts = {id(part._parameters): path for path, part in module.named_modules()} if module is model else {}
        if lost := next((path or "the model" for path, part in module.named_modules() if part in _LOST), ""):
            raise ModelError(
                "two-runs-one-model",
                f"{lost} still has the shards of a run that was deleted without run.release(). Build the model again, and call run.release() "
                "before you delete a run.",
            )
        self._refuse_others()
        if any(hasattr(param, "device_mesh") for param in module.parameters()):
            text = "the model has sharded weights (DTensor). Use it without fully_shard or parallelize_module: zero=3 or tp=N shards it"
            raise ModelError("tensor-form", text)
        _LIVE.add(self)

    def copies(self, weights: Mapping[str, weakref.ref[Tensor]], trained: frozenset[str]) -> None:
        """Note weights of which a build function gives copies, and names of the `trained` ones.

        Raises:
            ModelError: another run trains one of them too, or a copy.
        """
        if self.form is None:
            self._weights, self._trained = dict(weights), trained
            self._refuse_others()

    def take(self, module: nn.Module) -> PlainForm:
        """Return the form of the instance, or of a module around its parts, which then may lose its values."""
        kind = type(module)  # of a forward around it, which stays when the module is built again
        self.give_back()
        module.__class__ = kind
        put_aside(module)
        self.form = PlainForm(module)
        return self.form

    def give_back(self, values: Mapping[str, Tensor] | None = None) -> None:
        """Give the instance back, with trained `values` by name; without them as it was taken."""
        if self.form is not None:
            self.form.give_back(values)
            self.form = None
        for optimizer in self.optimizers:
            optimizer.give_back()

    def end(self) -> None:
        """Let other runs take what this one has given back."""
        self.give_back()
        self._has_ended = True

    def abandon(self) -> None:
        """Give the instance back if this rank has whole weights, because the run is gone."""
        if self.form is not None and not self.form.has_its_parameters:
            _LOST.update(self.form.module.modules())
            self.form = None
        with disable_current_modes(), DisableTorchFunction():  # a collection may run within the forward of another run
            self.give_back({})
        self.end()

    def _refuse_others(self) -> None:
        if self._shared_with_another():
            gc.collect()  # a run that nobody holds may be in a cycle
            if name := self._shared_with_another():
                raise ModelError(
                    "two-runs-one-model",
                    f"{name} belongs to a run that is still there. Use run.release(), which gives the trained model back; or "
                    "copy.deepcopy(model); or one run over a module that holds all parts.",
                )

    def _shared_with_another(self) -> str:
        """Return the name of a weight or a module that another run has too; empty if none has."""
        weights = {id(weight): name for name, ref in self._weights.items() if (weight := ref()) is not None}
        for other in [owner for owner in _LIVE if owner is not self and not owner._has_ended]:
            for name, ref in other._weights.items():
                here = weights.get(id(ref()))
                if here is not None and (here in self._trained or name in other._trained):
                    return here
            if shared := self._parts.keys() & other._parts.keys():
                return self._parts[min(shared)] or "the model"
        return ""
