"""State: what modules contain, and what objects contain that a model or a loss holds, at one moment: to be compared, and to be put back.

    buffers              running statistics, queues, counters
    attributes           numbers, containers and tensors that a forward sets: `self.calls += 1`; objects in them, five levels deep
    variables            those that the code of modules, hooks, losses and objects names (`named_variables.py`), and what is in them
    generators           the process-wide ones of torch, numpy and Python, and those that a module or a variable holds

Inside `ModelState.restored()` the model has the values that it had when the state was taken; afterwards it has again those
that it has now. So a forward inside leaves no trace but in the generators, which `preserve_generators` puts back.
"""

from __future__ import annotations

import builtins
import functools
import logging
import math
import operator
from collections import ChainMap, Counter, OrderedDict, UserDict, UserList, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from io import IOBase
from itertools import repeat
from types import BuiltinFunctionType, FunctionType, MemberDescriptorType, MethodType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from samestep.building.named_tensors import OF_TORCH, address
from samestep.building.torch_seams import set_versions
from samestep.datasets.generators import GENERATORS, put_all_back, put_back, state_of, states_of
from samestep.state.named_variables import OF_USER, SEARCHED, Variable, home_of, variables_of
from samestep.state.writes import version_of
from samestep.trees import have_same_values

DEPTH = 5
"""Levels of objects and containers that are looked into."""
LARGEST_COPY = 2**24
_LARGEST = 4096
"""Containers of more items are compared by their length alone."""
_UNCHANGING = (type, FunctionType, BuiltinFunctionType, MethodType, ModuleType, nn.Module, torch.dtype, torch.device)

_SINGLE = (bool, int, float, complex, str, bytes, type(None))
HOLDERS = (SimpleNamespace, UserDict, UserList, ChainMap)
"""Classes of Python whose objects hold attributes like those of a user's class."""
PLAIN = (*_SINGLE, *HOLDERS, tuple, list, dict, set, deque, Tensor, np.ndarray, *GENERATORS)
"""Values of variables that are state, besides objects of the user's classes."""
_LARGEST_NUMBER = 2**53
_EXACT = frozenset((dict, OrderedDict))
"""Classes of dictionaries in which no code of a user stands between an item and who reads it."""
_OURS = "samestep.building."
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
    """The attributes, buffers and parameters of all modules, and the variables that their code names, at one moment.

    `root` is a model, or a function such as a loss. While a run holds a model's weights, hooks and modes (`weights=False`),
    what torch itself keeps in every module is left alone, but for the buffers.
    """

    homes = OF_USER
    """The origins of code that is searched for names, and of objects in variables that are state."""

    def __init__(self, root: nn.Module | Callable[..., Any], *, weights: bool = True) -> None:
        self._weights = weights
        self.containers: list[tuple[Any, Any]] = []
        """Mutable containers, each with a copy of its items."""
        self._put_back: list[Callable[[], Any]] = []
        """Sets arrays to what they were."""
        self.generators: list[tuple[Any, Callable[[], Any]]] = []
        """Generators of random numbers, each with a function that puts it back."""
        self.iterators: list[str] = []
        """The names of iterators, which nothing puts back: `itertools.count()`, a running generator."""
        self._seen: dict[int, Any] = {}
        self._alive: list[Any] = []  # so that no id is given to another object
        self.values: dict[Slot, Content] = {}
        self.variables: dict[str, Variable] = {}
        """Variables outside of the modules, by their names."""
        self.modules: list[tuple[str, nn.Module]] = []
        """Modules that are no part of the root, and the names by which code or objects hold them."""
        self.numbers: set[float] = set()
        """The numbers in the code that was searched, in variables and in attributes."""
        self._caches: list[tuple[Any, Any]] = []
        """Functions whose results `functools.lru_cache` keeps, and its counts."""
        self._data: list[tuple[nn.Parameter, Tensor, int]] = []
        self._places: set[tuple[int, Any]] = set()
        self._searched: dict[int, Any] = {}
        self._rest: deque[tuple[str, Any]] = deque()
        if isinstance(root, nn.Module):
            self._parts("", root)
        else:
            self._variable(Variable(getattr(root, "__name__", type(root).__name__), None, "", root))
        while self._rest:
            name, value = self._rest.popleft()
            if isinstance(value, nn.Module):
                self.modules.append((name, value))
                self._parts(name, value)
                continue
            if isinstance(value, functools._lru_cache_wrapper):
                self._caches.append((value, value.cache_info()))
            for variable in variables_of(name, value, self.homes):
                self._variable(variable)

    @property
    def named_generators(self) -> Iterator[tuple[str, Any]]:
        """The generators, with the names of what holds them."""
        for generator, _ in self.generators:
            slot = next(
                (slot for slot, value in self.values.items() if id(generator) in value.generators), ("", "of its own")
            )
            yield ".".join(part for part in slot if part not in ("", OUTSIDE)), generator

    def _meet(self, name: str, value: Any) -> None:
        """Search a function or a class later, or look into a module, each once."""
        if isinstance(value, (*SEARCHED, nn.Module)) and id(value) not in self._searched:
            self._searched[id(value)] = value
            self._rest.append((name, value))

    def _is_state(self, value: Any) -> bool:
        """Return whether the content of a variable is state."""
        return isinstance(value, PLAIN) or home_of(type(value).__module__) in self.homes

    def _is_iterator(self, value: Any) -> bool:
        """Return whether a value is an iterator of which no attribute holds the place; files are none."""
        is_own = home_of(type(value).__module__) in self.homes
        return isinstance(value, Iterator) and not (is_own or isinstance(value, IOBase))

    def _variable(self, variable: Variable) -> None:
        """Note a variable of which the value is state; search what else it holds; a number that nobody can set is a constant."""
        name, holder, key, value = variable
        if isinstance(value, (*SEARCHED, nn.Module)):
            self._meet(name, value)
        elif holder is None and isinstance(value, _SINGLE):
            self._skeleton(name, value, [], 0)
        elif self._is_iterator(value):
            self.iterators.append(name)
        elif holder is None and callable(value) and type(value).__module__.startswith(_OURS):  # as a mean over a loss
            for inner in vars(value).values():
                self._variable(Variable(name, None, "", inner))
        elif self._is_state(value):
            place = (id(value), "") if holder is None else (id(holder), key)
            if place not in self._places:
                self._places.add(place)
                name = name if name not in self.variables else f"{name} ({len(self.variables)})"
                self.variables[name] = variable
                self.values[OUTSIDE, name] = self._value(name, value)

    def _parts(self, name: str, root: nn.Module) -> None:
        """Take the modules of a root, of which the parts are no modules of their own."""
        parts = [(path, part) for path, part in root.named_modules() if part is root or id(part) not in self._searched]
        self._searched |= {id(part): part for _, part in parts}
        for path, part in parts:
            self._module(f"{name}.{path}".strip("."), part)

    def _module(self, path: str, part: nn.Module) -> None:
        of_torch = frozenset() if self._weights else OF_TORCH
        items = {name: value for name, value in vars(part).items() if name not in of_torch}
        self.containers.append((vars(part), items))
        self._meet(type(part).__name__, type(part))
        for name, value in vars(part).items():
            if name == "_buffers" or (self._weights and name in ("_parameters", "_modules")):
                self.containers.append((value, dict(value)))
                self.values |= {
                    (path, key): self._value(f"{path}.{key}".lstrip("."), item) for key, item in value.items()
                }
            elif name.startswith(_HOOKS):
                # A forward that installs hooks once notes that in an attribute: both go back, or hooks come twice.
                self.containers += [(value, dict(value))] if isinstance(value, dict) else []
                for hook in value.values() if isinstance(value, dict) else ():
                    self._variable(Variable(f"{path}.{name}", None, "", hook))
            elif name not in of_torch:
                self.values[path, name] = self._value(f"{path}.{name}".lstrip("."), value)
        weights = part._parameters.values() if self._weights else ()
        self._data += [(param, param.data, address(param)) for param in weights if param is not None]

    def restore(self, *, generators: bool = True) -> None:
        """Set every module, variable and container to what it held; empty caches of functions that were filled since."""
        for container, items in self.containers:
            if items or type(container) not in _EXACT or container:  # most hold nothing, as a module's hooks
                put_items(container, items)
        for variable in self.variables.values():
            if variable.present is not variable.value:
                variable.put(variable.value)
        for function, counted in self._caches:
            if function.cache_info().misses != counted.misses:
                function.cache_clear()
        for act in (*self._put_back, *(put for _, put in self.generators if generators)):
            act()
        for param, data, where in self._data:
            if address(param) != where:
                param.data = data

    def _value(self, name: str, value: Any) -> Content:
        tensors: list[Tensor] = []
        num_generators = len(self.generators)
        skeleton = self._skeleton(name, value, tensors, DEPTH)
        self._alive += [tensor.untyped_storage() for tensor in tensors]  # which keep their addresses
        generators = {id(generator) for generator, _ in self.generators[num_generators:]}
        return Content(skeleton, tensors, list(map(address, tensors)), generators)

    def _skeleton(self, name: str, value: Any, tensors: list[Tensor], depth: int) -> Any:
        """Return a value's numbers and structure in a form that can be compared; collect its tensors, modules and code."""
        if isinstance(value, Tensor):
            tensors.append(value)
            return ("tensor", value.dtype)
        if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < _LARGEST_NUMBER:
            self.numbers.add(value)
        if value is None or isinstance(value, str | bytes | bool | int | complex):
            return value
        if isinstance(value, float):
            return repr(value)
        self._alive.append(value)
        self._meet(name, value)
        if isinstance(value, _UNCHANGING):
            return id(value)
        if isinstance(value, np.ndarray):
            if value.size > _LARGEST or value.dtype.hasobject:
                return value.shape
            self._put_back.append(partial(np.copyto, value, value.copy()))
            return (value.shape, value.tobytes())
        if isinstance(value, GENERATORS):
            state = state_of(value)
            self.generators.append((value, partial(put_back, value, state)))
            return state
        if self._is_iterator(value):
            self.iterators.append(name)
            return type(value).__name__
        if id(value) in self._seen or depth == 0:
            return self._seen.get(id(value), type(value).__name__)
        self._seen[id(value)] = type(value).__name__  # for what contains itself
        return self._items(name, value, tensors, depth - 1)

    def _items(self, name: str, value: Any, tensors: list[Tensor], depth: int) -> Any:
        """Return the skeleton of a container, or of an object's attributes."""
        if isinstance(value, list | tuple | deque):
            if not isinstance(value, tuple):
                self.containers.append((value, list(value)))
            if len(value) > _LARGEST:
                return (type(value).__name__, len(value))
            return (type(value).__name__, *(self._skeleton(name, item, tensors, depth) for item in value))
        if isinstance(value, set | frozenset):
            if isinstance(value, set):
                self.containers.append((value, set(value)))
            return sorted(map(repr, value)) if len(value) <= _LARGEST else len(value)
        if type(value).__module__.startswith(_MACHINERY):
            return type(value).__name__
        self._meet(type(value).__name__, type(value))
        fields = value if isinstance(value, dict) else getattr(value, "__dict__", None)
        slots = dict(slots_of(value)) if home_of(type(value).__module__) in self.homes else {}
        self._put_back += [partial(object.__setattr__, value, key, item) for key, item in slots.items()]
        if not isinstance(fields, dict) and not slots:
            return type(value).__name__
        items = {}
        if isinstance(fields, dict):
            items = items_of(fields)
            self.containers.append((fields, items))
        if len(items) > _LARGEST:
            return len(items)
        below = "" if isinstance(value, dict) else name + "."
        return {
            repr(key): self._skeleton(f"{below}{key}" if below else name, item, tensors, depth)
            for key, item in (*items.items(), *slots.items())
        }


def changed_slots(before: Snapshot, after: Snapshot) -> set[Slot]:
    """Return the slots whose numbers, structure or tensors differ."""
    none = Content(None, [])
    slots = before.values.keys() | after.values.keys()
    pairs = ((slot, before.values.get(slot, none), after.values.get(slot, none)) for slot in slots)
    return {slot for slot, old, new in pairs if old.skeleton != new.skeleton or old.identities != new.identities}


def modules_of(function: Callable[..., Any]) -> nn.Module:
    """Return a module whose children are those that a function such as a loss reaches, and itself if it is one."""
    named = [("loss", function)] if isinstance(function, nn.Module) else Snapshot(function).modules
    modules, later = nn.Module(), Counter(name for name, _ in named)
    for name, part in named:  # of a list of modules the last one has the list's name
        place = f"[-{later[name]}]" if later[name] > 1 else ""
        modules.add_module(f"{name}{place}".replace(".", "/"), part)
        later[name] -= 1
    return modules


@contextmanager
def holding(weights: Sequence[tuple[Any, Any]]) -> Iterator[None]:
    """Let modules hold these weights inside, items for each module's dictionary, and afterwards again those that they hold now."""
    now = [(container, dict(container)) for container, _ in weights]
    for container, items in weights:
        put_items(container, items)
    try:
        yield
    finally:
        for container, items in now:
            put_items(container, items)


class KeptValues:
    """A snapshot with copies of the tensors, so that what was written into them in place is put back too."""

    def __init__(
        self, root: nn.Module | Callable[..., Any], largest: float = math.inf, *, weights: bool = True
    ) -> None:
        self._root, self.before = root, Snapshot(root, weights=weights)
        tensors = {id(tensor): tensor for value in self.before.values.values() for tensor in value.tensors}
        copied = (t for t in tensors.values() if not (isinstance(t, nn.Parameter) or t.is_meta or t.numel() > largest))
        self._copies = [(tensor, tensor.detach().clone(), version_of(tensor)) for tensor in copied]

    def changed(self) -> str:
        """Return the name of something that is another value now, in a function; empty if nothing is."""
        written = {id(tensor) for tensor, copied, _ in self._copies if not have_same_values(tensor, copied)}
        slots = changed_slots(self.before, Snapshot(self._root))
        slots |= {slot for slot, value in self.before.values.items() if not written.isdisjoint(map(id, value.tensors))}
        return min((name for _, name in slots), default="")

    @torch.no_grad()
    def restore(self, *, generators: bool = True) -> None:
        """Put everything back, with the versions that a graph compares. A weight is taken as read alone."""
        self.before.restore(generators=generators)
        for tensor, copied, version in self._copies:
            if tensor.shape != copied.shape:
                tensor.data = copied.clone()
            elif not have_same_values(tensor, copied):
                tensor.data.copy_(copied)
            if version_of(tensor) != version:
                set_versions((tensor,), (version,))


@contextmanager
def _unheard() -> Iterator[None]:
    """Drop what code prints and logs inside, in calls that are no part of a step."""
    level, printing = logging.root.manager.disable, builtins.print
    if (
        level < logging.CRITICAL
    ):  # else nothing is heard already; it takes torch's and transformers' hundreds of loggers
        logging.disable()
    builtins.print = lambda *_, **__: None
    try:
        yield
    finally:
        builtins.print = printing
        if logging.root.manager.disable != level:
            logging.disable(level)


@contextmanager
def preserve_modules(module: nn.Module) -> Iterator[None]:
    """Restore all modules after what runs inside, so that nothing of a trace stays in them."""
    snapshot = Snapshot(module)
    try:
        with _unheard():
            yield
    finally:
        snapshot.restore()


@contextmanager
def preserve_function(function: Callable[..., Any]) -> Iterator[KeptValues]:
    """Restore what a function reaches after calls inside, which print nothing: itself a module, a method, a partial, or variables around it."""
    kept_values = KeptValues(function, LARGEST_COPY)
    try:
        with _unheard():
            yield kept_values
    finally:
        kept_values.restore()


def built_in_kind(items: dict[Any, Any]) -> type[dict[Any, Any]]:
    """Return the built-in class that stores a dict's items, below subclasses that read or write them otherwise."""
    return OrderedDict if isinstance(items, OrderedDict) else dict


def items_of(items: dict[Any, Any]) -> dict[Any, Any]:
    """Return the items that a dict holds; a subclass may compute others when it is asked for them."""
    return {key: dict.__getitem__(items, key) for key in built_in_kind(items).__iter__(items)}


def slots_of(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the attributes of an object that its classes name in `__slots__`, as far as they are set."""
    for base in type(value).__mro__:
        for key, slot in list(vars(base).items()):
            if isinstance(slot, MemberDescriptorType):
                with suppress(AttributeError):
                    yield key, slot.__get__(value)


def put_items(container: Any, items: Any) -> None:
    """Give a container the items that it held; in a module's dictionary torch's entries stay."""
    if isinstance(container, dict):
        more = len(container) - len(items)  # most often none, or besides the entries of a module those of torch
        is_module = more == len(OF_TORCH) and OF_TORCH.isdisjoint(items) and container.keys() >= OF_TORCH
        has_as_many = is_module or not more
        if (
            type(container) in _EXACT
            and has_as_many
            and all(map(operator.is_, map(container.get, items, repeat(items)), items.values()))
        ):
            return
        kind, now = built_in_kind(container), items_of(container)
        of_torch = OF_TORCH if "_modules" in now and "_modules" not in items else frozenset()
        for key in now.keys() - items.keys() - of_torch:
            kind.__delitem__(container, key)
        for key, item in items.items():
            kind.__setitem__(container, key, item)
    elif isinstance(container, set):
        if container != items:  # one that is filled anew is gone through in another order
            container.intersection_update(items)
            container.update(items)
    elif len(container) != len(items) or any(a is not b for a, b in zip(container, items, strict=True)):
        container.clear()
        container.extend(items)


class ModelState(KeptValues):
    """The values of a model's buffers, attributes and variables, which it may have again for a while."""

    _is_restored = False

    @property
    def generators(self) -> list[Any]:
        """The generators that a module or a variable holds."""
        return [generator for generator, _ in self.before.generators]

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Give the model the values it had, inside; afterwards give it back what it holds now, or inside another such context nothing."""
        now = None if self._is_restored else KeptValues(self._root, weights=False)
        is_inner, self._is_restored = self._is_restored, True
        try:
            self.restore(generators=False)
            with _unheard():
                yield
        finally:
            self._is_restored = is_inner
            if now is not None:
                now.restore(generators=False)


@contextmanager
def preserve_generators(values: Iterable[Any] = ()) -> Iterator[None]:
    """Put every random number generator back, afterwards: those of the process, and those among some `values`."""
    generators = [value for value in values if isinstance(value, GENERATORS)]
    of_gpu = torch.cuda.get_rng_state() if torch.cuda.is_available() and torch.cuda.is_initialized() else None
    states = states_of(generators)
    try:
        yield
    finally:
        put_all_back(states, generators)
        if of_gpu is not None:
            torch.cuda.set_rng_state(of_gpu)
