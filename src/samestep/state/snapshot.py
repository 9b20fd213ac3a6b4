"""The attributes of modules, and the variables that their code reaches, at one moment: to be compared, and to be put back.

What a model keeps from one forward to the next, besides its weights, and a context in which it is as it was before.

    buffers              running statistics, queues, counters
    attributes           numbers, containers and tensors that a forward sets: `self.calls += 1`
    variables            what its code keeps outside of the modules (`state/reachable.py`)
    generators           the process-wide ones of torch, numpy and Python, and those that a module or a variable holds

Inside `ModelState.restored()` the model has the values that it had when the state was taken; afterwards it has again those
that it has now. So a forward inside leaves no trace but in the generators, which `preserve_generators` puts back.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from samestep.building.module_attributes import OF_TORCH
from samestep.building.named_tensors import address
from samestep.datasets.generators import GENERATORS, put_all_back, put_back, state_of, states_of
from samestep.state.reachable import Reached, Variable, built_in_kind, items_of
from samestep.trees import have_same_values

_DEPTH = 5
_LARGEST_COPY = 2**24
_LARGEST = 4096
"""Containers of more items are compared by their length alone."""
_UNCHANGING = (type, FunctionType, BuiltinFunctionType, MethodType, ModuleType, nn.Module, torch.dtype, torch.device)

_MACHINERY = ("samestep", "torch.distributed", "torch.utils.hooks", "logging", "threading", "multiprocessing")
"""Packages whose objects are no state of a model."""
OUTSIDE = "outside of the modules"
"""Stands for the path of a module in the slots of variables that no module holds."""
Slot = tuple[str, str]
"""The path of a module, and the name of one of its attributes, buffers or parameters."""


@dataclass(slots=True)
class Content:
    """The content of one attribute: its numbers and structure, and the tensors in it."""

    skeleton: Any
    tensors: list[Tensor]
    places: list[int] = field(default_factory=list)
    """The storages of the tensors, by their addresses."""

    generators: set[int] = field(default_factory=set)
    """The generators in it, by their ids."""

    @property
    def identities(self) -> list[tuple[int, int]]:
        """The tensors and their storages."""
        return [(id(tensor), place) for tensor, place in zip(self.tensors, self.places, strict=True)]


_HOOKS = ("_forward", "_backward", "_state_dict", "_load_state", "_is_full")
"""Beginnings of the names of a module's attributes that hold hooks."""


class Snapshot:
    """The attributes, buffers and parameters of all modules, and the variables that code reaches, at one moment.

    `root` is a model, or a function such as a loss. While a run holds a model's weights, hooks and modes (`weights=False`),
    what torch itself keeps in every module is left alone, but for the buffers.
    """

    def __init__(self, root: nn.Module | Callable[..., Any], *, weights: bool = True) -> None:
        self._weights = weights
        self._undo: list[tuple[Any, Any]] = []
        """Each mutable container with a copy of its items."""
        self._put_back: list[Callable[[], Any]] = []
        """Sets arrays to what they were."""
        self.generators: list[tuple[Any, Callable[[], Any]]] = []
        """Generators of random numbers, each with a function that puts it back."""
        self._seen: dict[int, Any] = {}
        self._kept: list[Any] = []  # so that no id is given to another object
        self.values: dict[Slot, Content] = {}
        self._data: list[tuple[nn.Parameter, Tensor, int]] = []
        self._reached = Reached(root)
        modules = list(root.named_modules()) if isinstance(root, nn.Module) else []
        for name, part in self._reached.modules:
            modules += [(f"{name}.{path}".rstrip("."), inner) for path, inner in part.named_modules()]
        for path, part in modules:
            self._module(path, part)
        for variable in self._reached.variables:
            self.values[OUTSIDE, variable.name] = self._value(variable.value)

    @property
    def containers(self) -> list[tuple[Any, Any]]:
        """Mutable containers, each with a copy of its items."""
        return self._undo

    @property
    def variables(self) -> list[Variable]:
        """Variables outside of the modules, with their values."""
        return self._reached.variables

    @property
    def named_generators(self) -> Iterator[tuple[str, Any]]:
        """The generators, with the names of what holds them."""
        for generator, _ in self.generators:
            slot = next(
                (slot for slot, value in self.values.items() if id(generator) in value.generators), ("", "of its own")
            )
            yield ".".join(part for part in slot if part not in ("", OUTSIDE)), generator

    @property
    def constants(self) -> set[int]:
        """The integers in the code that is reached."""
        return self._reached.constants

    def _module(self, path: str, part: nn.Module) -> None:
        kept = frozenset() if self._weights else OF_TORCH
        self._undo.append((vars(part), {name: value for name, value in vars(part).items() if name not in kept}))
        for name, value in vars(part).items():
            if name == "_buffers" or (self._weights and name in ("_parameters", "_modules")):
                self._undo.append((value, dict(value)))
                self.values |= {(path, key): self._value(item) for key, item in value.items()}
            elif name.startswith(_HOOKS):
                # A forward that installs hooks once notes that in an attribute: both go back, or hooks come twice.
                self._undo += [(value, dict(value))] if isinstance(value, dict) else []
            elif name not in kept:
                self.values[path, name] = self._value(value)
        weights = part._parameters.values() if self._weights else ()
        self._data += [(param, param.data, address(param)) for param in weights if param is not None]

    def restore(self, *, generators: bool = True) -> None:
        """Set every module, variable and container to what it held; empty caches of functions that were filled since."""
        for held, items in self._undo:
            put_items(held, items)
        for variable in self._reached.variables:
            variable.put(variable.value)
        for function, counted in self._reached.caches:
            if function.cache_info().misses != counted.misses:
                function.cache_clear()
        for act in (*self._put_back, *(put for _, put in self.generators if generators)):
            act()
        for param, data, where in self._data:
            if address(param) != where:
                param.data = data

    def _value(self, value: Any) -> Content:
        tensors: list[Tensor] = []
        known = len(self.generators)
        skeleton = self._skeleton(value, tensors, _DEPTH)
        self._kept += [tensor.untyped_storage() for tensor in tensors]  # which keep their addresses
        found = {id(generator) for generator, _ in self.generators[known:]}
        return Content(skeleton, tensors, list(map(address, tensors)), found)

    def _skeleton(self, value: Any, tensors: list[Tensor], depth: int) -> Any:
        """Return a value's numbers and structure in a form that can be compared, and collect its tensors."""
        if isinstance(value, Tensor):
            tensors.append(value)
            return ("tensor", value.dtype)
        if value is None or isinstance(value, str | bytes | bool | int | complex):
            return value
        if isinstance(value, float):
            return repr(value)
        self._kept.append(value)
        if isinstance(value, _UNCHANGING):
            return id(value)
        if isinstance(value, np.ndarray):
            if value.size > _LARGEST or value.dtype.hasobject:
                return value.shape
            self._put_back.append(partial(_set_array, value, value.copy()))
            return (value.shape, value.tobytes())
        if isinstance(value, GENERATORS):
            state = state_of(value)
            self.generators.append((value, partial(put_back, value, state)))
            return state
        if id(value) in self._seen or depth == 0:
            return self._seen.get(id(value), type(value).__name__)
        self._seen[id(value)] = type(value).__name__  # for what contains itself
        return self._items(value, tensors, depth)

    def _items(self, value: Any, tensors: list[Tensor], depth: int) -> Any:
        """Return the skeleton of a container, or of an object's attributes."""
        if isinstance(value, list | tuple | deque):
            if not isinstance(value, tuple):
                self._undo.append((value, list(value)))
            if len(value) > _LARGEST:
                return (type(value).__name__, len(value))
            return (type(value).__name__, *(self._skeleton(item, tensors, depth - 1) for item in value))
        if isinstance(value, set | frozenset):
            if isinstance(value, set):
                self._undo.append((value, set(value)))
            return sorted(map(repr, value)) if len(value) <= _LARGEST else len(value)
        if type(value).__module__.startswith(_MACHINERY):
            return type(value).__name__
        fields = value if isinstance(value, dict) else getattr(value, "__dict__", None)
        if not isinstance(fields, dict):
            return type(value).__name__
        items = copied_items(fields)
        self._undo.append((fields, items))
        if len(items) > _LARGEST:
            return len(items)
        return {repr(key): self._skeleton(item, tensors, depth - 1) for key, item in items.items()}


def modules_of(function: Callable[..., Any]) -> nn.Module:
    """Return a module whose children are those that a function such as a loss reaches, and itself if it is one."""
    found = nn.Module()
    reached = [("loss", function)] if isinstance(function, nn.Module) else Reached(function).modules
    for name, part in reached:
        found.add_module(name.replace(".", "/"), part)
    return found


class GivenWeights:
    """The weights of all modules at one moment, for which a forward may put others."""

    def __init__(self, root: nn.Module) -> None:
        self._held = [(part._parameters, dict(part._parameters)) for part in root.modules()]

    @contextmanager
    def given(self) -> Iterator[None]:
        """Let the modules hold these weights inside, and afterwards again those that they hold now."""
        now = [(held, dict(held)) for held, _ in self._held]
        for held, items in self._held:
            put_items(held, items)
        try:
            yield
        finally:
            for held, items in now:
                put_items(held, items)


class KeptValues:
    """A snapshot with copies of the tensors, so that what was written into them in place is put back too."""

    def __init__(
        self, root: nn.Module | Callable[..., Any], largest: float = math.inf, *, weights: bool = True
    ) -> None:
        self.before = Snapshot(root, weights=weights)
        found = {id(t): t for value in self.before.values.values() for t in value.tensors}
        kept = [t for t in found.values() if not isinstance(t, nn.Parameter) and not t.is_meta and t.numel() <= largest]
        self._copies = [(tensor, tensor.detach().clone()) for tensor in kept]

    @torch.no_grad()
    def restore(self, *, generators: bool = True) -> None:
        """Put everything back. A weight is taken as read alone."""
        self.before.restore(generators=generators)
        for tensor, copied in self._copies:
            if tensor.shape != copied.shape:
                tensor.data = copied.clone()
            elif not have_same_values(tensor, copied):
                tensor.data.copy_(copied)


@contextmanager
def preserve_modules(module: nn.Module) -> Iterator[None]:
    """Restore all modules after what runs inside, so that nothing of a trace stays in them."""
    before = Snapshot(module)
    try:
        yield
    finally:
        before.restore()


@contextmanager
def preserve_function(function: Callable[..., Any]) -> Iterator[None]:
    """Restore what a function reaches after calls inside: itself a module, a method, a partial, or variables around it."""
    before = KeptValues(function, _LARGEST_COPY)
    try:
        yield
    finally:
        before.restore()


def copied_items(held: Any) -> Any:
    """Return the items of a mutable container, for `put_items`."""
    return items_of(held) if isinstance(held, dict) else set(held) if isinstance(held, set) else list(held)


def put_items(held: Any, items: Any) -> None:
    """Give a container the items that it held; in a module's dictionary torch's entries stay."""
    if isinstance(held, dict):
        kind, now = built_in_kind(held), items_of(held)
        kept = OF_TORCH if "_modules" in now and "_modules" not in items else frozenset()
        if now.keys() - kept != items.keys() or any(now[key] is not item for key, item in items.items()):
            for key in now.keys() - items.keys() - kept:
                kind.__delitem__(held, key)
            for key, item in items.items():
                kind.__setitem__(held, key, item)
    elif isinstance(held, set):
        held.intersection_update(items)
        held.update(items)
    elif len(held) != len(items) or any(a is not b for a, b in zip(held, items, strict=True)):
        held.clear()
        held.extend(items)


def _set_array(array: Any, copied: Any) -> None:
    array[...] = copied


class ModelState:
    """The values of a model's buffers, attributes and variables."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._kept = KeptValues(model, weights=False)

    @property
    def generators(self) -> list[Any]:
        """The generators that a module or a variable holds."""
        return [generator for generator, _ in self._kept.before.generators]

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Give the model the values it had, inside; afterwards give it back what it holds now."""
        now = KeptValues(self._model, weights=False)
        try:
            self._kept.restore(generators=False)
            yield
        finally:
            now.restore(generators=False)


@contextmanager
def preserve_generators(held: Iterable[Any] = ()) -> Iterator[None]:
    """Put every random number generator back, afterwards: those of the process, and those among the objects `held`."""
    own = [value for value in held if isinstance(value, GENERATORS)]
    of_gpu = torch.cuda.get_rng_state() if torch.cuda.is_available() and torch.cuda.is_initialized() else None
    before = states_of(own)
    try:
        yield
    finally:
        put_all_back(before, own)
        if of_gpu is not None:
            torch.cuda.set_rng_state(of_gpu)
