"""The state that code can keep outside of modules: variables that a forward, a loss or an optimizer's step reaches from its functions.

Of a forward and a loss:

    globals             of the file of a function, by the names in its code
    closures            the variables around a function, and its default arguments and attributes
    classes             attributes of the class of a module, or of an object that is reached
    objects, modules    that one of these variables holds, followed in turn

Only code of the user is followed: libraries (the standard library and installed packages) keep what they keep.

Of an optimizer's step, whose functions also hold numbers that decide how it updates:

```
class Warm(Optimizer):
    def step(self): ... rate(self.k) ...      options, attributes, objects in them, the class's functions
def rate(k): return k > LATE                  functions that they name, in any module but torch's own; constants
LATE = 100                                    variables that they name, closures, default values
```
A trial of the optimizer reads thresholds and counters here, and puts back what its steps have changed.
"""

from __future__ import annotations

import collections
import enum
import functools
import inspect
import math
import random
import sys
import sysconfig
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

_LARGEST_NUMBER = 2**53
_MOST = 20_000
"""Objects that are followed at most."""
_ABSENT: Any = object()
_LIBRARIES = tuple({sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")})
_OWN_PACKAGE = __name__.partition(".")[0]
_PLAIN = (bool, int, float, complex, str, bytes, type(None), tuple, list, dict, set, Tensor, np.ndarray)
GENERATORS = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)
"""Generators of random numbers, as a module or a variable may hold one."""
_SINGLE = (bool, int, float, complex, str, bytes, type(None))


@functools.lru_cache(maxsize=4096)
def is_users(module_name: str | None) -> bool:
    """Return whether a module is the user's: no part of Python, of an installed package, or of samestep."""
    if not module_name or module_name.partition(".")[0] == _OWN_PACKAGE:
        return False
    module = sys.modules.get(module_name)
    file = getattr(module, "__file__", None)
    if file is None:
        return module_name == "__main__"
    places = (file, str(Path(file).resolve()))
    if any(place.startswith(_LIBRARIES) for place in places):
        return False
    depth = module_name.count(".") + (Path(file).name == "__init__.py")
    return not any(_holds_packages(folder) for place in places for folder in [*Path(place).parents][depth : depth + 1])


@functools.cache
def _holds_packages(folder: Path) -> bool:
    """Return whether packages are installed in a folder, as by pip with `--user` or `--target`, or below another environment."""
    return next(folder.glob("*.dist-info"), None) is not None


@dataclass(frozen=True, slots=True)
class Variable:
    """A variable outside of modules."""

    name: str
    """How the user knows it, for messages."""
    holder: Any
    """A dictionary or a class that holds it by its key, a cell of a closure, or None for what cannot be set."""
    key: str
    value: Any
    """Its value when it was found."""

    def put(self, value: Any) -> None:
        """Give the variable a value."""
        if isinstance(self.holder, dict):
            self.holder[self.key] = value
        elif isinstance(self.holder, CellType):
            self.holder.cell_contents = value
        elif self.holder is not None:
            setattr(self.holder, self.key, value)


@dataclass(slots=True)
class Reached:
    """The objects that functions reach."""

    variables: list[Variable] = field(default_factory=list)
    modules: list[tuple[str, nn.Module]] = field(default_factory=list)
    caches: list[tuple[Any, Any]] = field(default_factory=list)
    """Functions of which `functools.lru_cache` keeps results, and what it has counted."""
    constants: set[int] = field(default_factory=set)
    """Integers in the code."""


def reachable_from(root: Any) -> Reached:
    """Return the variables that the code of a model, or of a function, reaches."""
    found = _CodeFollower()
    if isinstance(root, nn.Module):
        for path, part in root.named_modules():
            found.of_module(path, part)
    else:
        found.callable(getattr(root, "__name__", type(root).__name__), root)
    found.run()
    return found.reached


class _CodeFollower:
    """Follows functions, classes and objects, each once."""

    def __init__(self) -> None:
        self.reached = Reached()
        self._seen: dict[int, Any] = {}
        self._rest: list[tuple[str, Any]] = []
        self._noted: set[tuple[int, str]] = set()

    def follow(self, name: str, value: Any) -> None:
        """Put a value on the list of those to be followed."""
        if isinstance(value, _SINGLE) or id(value) in self._seen or len(self._seen) > _MOST:
            return
        self._seen[id(value)] = value  # held, so that no id is given to another object
        self._rest.append((name, value))

    def callable(self, name: str, value: Any) -> None:
        """Follow a callable: a function, or an object of the user's with attributes."""
        if _is_object(value):
            self._variable(Variable(name, None, "", value))
        else:
            self.follow(name, value)

    def run(self) -> None:
        """Follow everything on the list, and what that adds to it."""
        while self._rest:
            self._one(*self._rest.pop())

    def of_module(self, path: str, part: nn.Module) -> None:
        """Follow the class of a module, its hooks, and the functions and objects among its attributes."""
        self._seen[id(part)] = part
        self.follow(type(part).__name__, type(part))
        for name, value in vars(part).items():
            if name.endswith("hooks"):
                for hook in value.values() if isinstance(value, dict) else ():
                    self.follow(f"{path}.{name}", hook)
            elif not name.startswith("_") or isinstance(value, FunctionType):
                self._held(f"{path}.{name}".lstrip("."), value)

    def _one(self, name: str, value: Any) -> None:
        if isinstance(value, functools._lru_cache_wrapper):
            self.reached.caches.append((value, value.cache_info()))
            self.follow(name, value.__wrapped__)
        elif isinstance(value, functools.partial):
            self.follow(name, value.func)
            for index, item in enumerate((*value.args, *value.keywords.values())):
                self._variable(Variable(f"argument {index} of {name}", None, "", item))
        elif isinstance(value, MethodType):
            self.follow(name, value.__func__)
            self._variable(Variable(name, None, "", value.__self__))
        elif isinstance(value, FunctionType):
            if is_users(value.__globals__.get("__name__")):
                self._function(value)
            else:  # a decorator of a library, around the user's own
                for held in (getattr(value, "__wrapped__", None), *_cells(value)):
                    if isinstance(held, FunctionType | MethodType | functools.partial | nn.Module) or _is_object(held):
                        self.callable(name, held)
        elif isinstance(value, type):
            self._class(value)
        elif isinstance(value, nn.Module):
            self.reached.modules.append((name, value))
            for path, part in value.named_modules():
                self.of_module(f"{name}.{path}".rstrip("."), part)
        else:
            self._held(name, value)

    def _held(self, name: str, value: Any) -> None:
        """Follow functions and objects that a value holds, and the class of an object."""
        if isinstance(value, FunctionType | MethodType | functools.partial | functools._lru_cache_wrapper):
            self.follow(name, value)
        elif isinstance(value, list | tuple | dict):
            items = value.values() if isinstance(value, dict) else value
            for item in list(items)[:_SOME]:
                if not isinstance(item, (*_SINGLE, Tensor, np.ndarray)):
                    self.follow(name, item)
        elif not isinstance(value, nn.Module) and is_users(type(value).__module__):
            self.follow(type(value).__name__, type(value))
            for key, item in list(getattr(value, "__dict__", {}).items())[:_SOME]:
                if not isinstance(item, (*_SINGLE, Tensor, np.ndarray)):
                    self.follow(f"{name}.{key}", item)

    def _function(self, function: FunctionType) -> None:
        where = function.__qualname__
        code, defaults = function.__code__, function.__defaults__ or ()
        positional = code.co_varnames[code.co_argcount - len(defaults) : code.co_argcount]
        for name, value in (*zip(positional, defaults, strict=True), *(function.__kwdefaults__ or {}).items()):
            if not isinstance(value, _SINGLE):
                self._variable(Variable(f"the default of {name} in {where}", None, "", value))
        for name, value in vars(function).items():
            self._variable(Variable(f"{where}.{name}", vars(function), name, value))
        numbers = (one for one in _constants(code) if not isinstance(one, tuple))
        self.reached.constants.update(int(one) for one in numbers if abs(one) < _LARGEST_NUMBER)
        for variable in _variables_of(function, is_users):
            self._variable(variable)

    def _class(self, kind: type) -> None:
        for base, name, value in _members_of(kind, lambda base: is_users(base.__module__)):
            if isinstance(value, FunctionType):
                self.follow(name, value)
            else:
                holder = None if isinstance(base, enum.EnumMeta) else base  # whose members nobody can replace
                self._variable(Variable(f"{base.__name__}.{name}", holder, name, value))

    def _variable(self, found: Variable) -> None:
        """Note a variable, if its value can be kept or replaced, and follow the value."""
        if isinstance(found.value, (*_PLAIN, *GENERATORS)) or _is_object(found.value):
            at = (id(found.holder), found.key) if found.holder is not None else (id(found.value), "")
            if at not in self._noted:
                self._noted.add(at)
                self.reached.variables.append(found)
        self.follow(found.name, found.value)


_SOME = 256
"""Items of a container that are followed."""
_CODE = (FunctionType, BuiltinFunctionType, MethodType, ModuleType, type, nn.Module, functools.partial)


def _is_object(value: Any) -> bool:
    """Return whether a value is an instance of a class that the user wrote, containers included."""
    return not isinstance(value, _CODE) and is_users(type(value).__module__)


def _cells(function: FunctionType) -> Iterator[Any]:
    for cell in function.__closure__ or ():
        yield from _content(cell)


def _content(cell: CellType) -> Iterator[Any]:
    """Yield what a cell of a closure holds, if it holds something yet."""
    with suppress(ValueError):
        yield cell.cell_contents


def _codes(code: CodeType) -> Iterator[CodeType]:
    """Yield the code of a function and of those that are defined in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def _constants(code: CodeType) -> Iterator[Any]:
    """Yield the numbers, and the tuples of constants, in the code of a function."""
    for constant in (constant for one in _codes(code) for constant in one.co_consts):
        if isinstance(constant, int | float | tuple) and not isinstance(constant, bool):
            yield constant


def _variables_of(function: FunctionType, follows: Callable[[str], bool]) -> Iterator[Variable]:
    """Yield the variables that the code of a function names: of closures, of its file, and of the modules whose names `follows` takes."""
    for cell, name in zip(function.__closure__ or (), function.__code__.co_freevars, strict=True):
        for value in _content(cell):
            yield Variable(f"{name} around {function.__qualname__}", cell, name, value)
    names = {name for code in _codes(function.__code__) for name in code.co_names}
    own = function.__globals__
    for name in sorted(names & own.keys()):
        value = own[name]
        if not isinstance(value, ModuleType):
            yield Variable(f"{name} of {own.get('__name__', '')}", own, name, value)
        elif follows(value.__name__):
            held = vars(value)
            for inner in sorted(names & held.keys()):
                yield Variable(f"{inner} of {value.__name__}", held, inner, held[inner])


def _members_of(kind: type, follows: Callable[[type], bool]) -> Iterator[tuple[type, str, Any]]:
    """Yield class, name and value of the attributes of a class and its bases, the functions of methods and properties among them."""
    for base in filter(follows, kind.__mro__):
        for name, value in list(vars(base).items()):
            inner = getattr(value, "__func__", None) or getattr(value, "fget", None) or getattr(value, "func", None)
            if isinstance(inner, FunctionType):
                yield base, name, inner
            elif not (name.startswith("__") and name.endswith("__")) or isinstance(value, FunctionType):
                yield base, name, value


_OTHERS = frozenset(("torch", "numpy", "samestep", *sys.stdlib_module_names)) - {"__main__", "test"}
"""Packages whose functions hold no thresholds of a user's."""
_MOST_SLOTS = 4096
"""Values that are looked at: an optimizer that holds a whole data set is not read to its end."""
_HOLDERS = (types.SimpleNamespace, collections.UserDict, collections.UserList, collections.ChainMap)
Place = tuple[Any, str]
"""A dictionary and a key in it, or a closure's cell."""


class StepCode:
    """The numbers that an optimizer's step reaches, and the places outside of its state that it may change."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.numbers: set[float] = set()
        self.optimizers: list[Any] = [optimizer]
        """The optimizer, and those that it reaches: a wrapper's own ones, which hold groups and states of theirs."""
        self.tensors: set[int] = set()
        """Ids of the tensors that its code reaches, in a closure as in an attribute."""
        self.places: list[Place] = []
        """Where numbers stand that the step may read: closures, variables, attributes."""
        self._containers: list[Any] = []
        self._seen: set[int] = set()
        self._kept: list[Any] = []
        """What was looked at, kept so that no other object gets its id."""
        own = {key: value for key, value in vars(optimizer).items() if key not in ("state", "param_groups")}
        self._look_at(own)
        self._class(type(optimizer))
        for group in optimizer.param_groups:
            self._look_at(_options_of(group))
        self.places += [(vars(optimizer), key) for key in own]

    def _look_at(self, value: Any, place: Place | None = None) -> None:
        if isinstance(value, bool | str | bytes | None):
            return
        if isinstance(value, int | float):
            if math.isfinite(value):
                self.numbers.add(value)
            self.places += [place] if place is not None else []
            return
        if isinstance(value, Tensor):
            self.tensors.add(id(value))
            self.places += [place] if place is not None and value.numel() == 1 else []
            return
        if id(value) in self._seen or len(self._seen) > _MOST_SLOTS:
            return
        self._seen.add(id(value))
        self._kept.append(value)
        for inner, where in self._within(value):
            self._look_at(inner, where)

    def _within(self, value: Any) -> Iterator[tuple[Any, Place | None]]:
        """Yield what a value holds, each with its place if it can be set there."""
        if isinstance(value, types.MethodType):
            yield from ((value.__func__, None), (value.__self__, None))
        elif isinstance(value, types.FunctionType):
            yield from self._of_function(value)
        elif isinstance(value, functools.partial):
            yield from ((inner, None) for inner in (value.func, *value.args, *value.keywords.values()))
        elif isinstance(value, dict):
            self._containers.append(value)
            for key, inner in list(value.items())[:_MOST_SLOTS]:
                yield inner, (value, key) if isinstance(key, str) else None
                if isinstance(key, Tensor):
                    yield key, None
        elif isinstance(value, list | tuple | set | frozenset | collections.deque):
            self._containers += [value] if isinstance(value, list | set | collections.deque) else []
            yield from ((inner, None) for inner in list(value)[:_MOST_SLOTS])
        elif isinstance(value, type):
            self._class(value)
        elif isinstance(value, _HOLDERS):
            yield from ((inner, None) for inner in vars(value).values())
        elif _is_users(type(value)) or isinstance(value, Optimizer):
            self._class(type(value))
            held = getattr(value, "__dict__", {})
            slots = [slot for base in type(value).__mro__ for slot in getattr(base, "__slots__", ())]
            yield from ((getattr(value, slot, None), None) for slot in slots if slot != "__dict__")
            skipped = ("state", "param_groups") if isinstance(value, Optimizer) else ()
            yield from ((inner, (held, key)) for key, inner in list(held.items()) if key not in skipped)
            if isinstance(value, Optimizer) and all(value is not one for one in self.optimizers):
                self.optimizers.append(value)
                yield from ((options, None) for options in map(_options_of, value.param_groups))

    def _class(self, kind: type) -> None:
        for _, _, value in _members_of(kind, _is_users):
            self._look_at(value)

    def _of_function(self, function: types.FunctionType) -> Iterator[tuple[Any, Place | None]]:
        wrapped = getattr(function, "__wrapped__", None)
        if wrapped is not None:
            yield wrapped, None
        if not _is_users(function):
            return
        yield from ((constant, None) for constant in _constants(function.__code__))
        yield from ((value, None) for value in (function.__defaults__ or (), function.__kwdefaults__ or {}))
        for found in _variables_of(function, lambda name: name.partition(".")[0] not in _OTHERS):
            yield found.value, (found.holder, found.key)

    @contextmanager
    def put_back(self) -> Iterator[None]:
        """Put back, in the end, the numbers and the containers that the code can reach outside of the optimizer."""
        numbers = [(place, _copy_value(read(place))) for place in self.places]
        containers = [(value, _copy_value(value)) for value in self._containers]
        try:
            yield
        finally:
            for value, before in containers:
                value.clear()
                value.update(before) if isinstance(value, dict | set) else value.extend(before)
            for place, before in numbers:
                write(place, before)


def optimizers_in(optimizer: Optimizer) -> list[Any]:
    """Return an optimizer and those that its step reaches."""
    return StepCode(optimizer).optimizers


def optimizers_with_states(optimizer: Optimizer) -> list[Any]:
    """Return an optimizer, and those of the optimizers inside it, as in a wrapper, that keep other states."""
    return list({id(one.state): one for one in reversed(optimizers_in(optimizer))}.values())[::-1]


def states_by_key(optimizers: Sequence[Any], weight: Tensor) -> dict[str, Any]:
    """Return the states of a weight in an optimizer, and in its inner ones under keys that `state_at` reads."""
    if not optimizers:
        return {}
    found = dict(optimizers[0].state.get(weight, {}))
    for index, inner in enumerate(optimizers[1:], 1):
        found |= {f"{_INNER}{index}.{key}": value for key, value in inner.state.get(weight, {}).items()}
    return found


def state_at(optimizers: Sequence[Any], weight: Tensor, key: str) -> tuple[dict[str, Any], str]:
    """Return the dict that holds a state which `states_by_key` lists under a key, created if it is missing, and its key in it."""
    index = "0"
    if key.startswith(_INNER):
        index, _, key = key.removeprefix(_INNER).partition(".")
    states = optimizers[int(index)].state
    if weight not in states:
        states[weight] = {}
    return states[weight], key


_INNER = "inner."


def _options_of(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def read(place: Place) -> Any:
    """Return the value in a slot (dict key or closure cell); None if it is unset."""
    holder, key = place
    if not isinstance(holder, types.CellType):
        return holder.get(key)
    try:
        return holder.cell_contents
    except ValueError:
        return None


def write(place: Place, value: Any) -> None:
    """Set the value in a slot, or fill the tensor of one element that it holds."""
    holder, key = place
    now = read(place)
    if isinstance(now, Tensor) and now.numel() == 1 and not now.is_meta:
        now.detach().fill_(float(value))
    elif isinstance(holder, types.CellType):
        holder.cell_contents = value
    else:
        holder[key] = value


def _copy_value(value: Any) -> Any:
    if isinstance(value, Tensor):
        return float(value) if value.numel() == 1 and not value.is_meta else value
    return value.copy() if isinstance(value, list | dict | set | collections.deque) else value


def _is_users(what: Callable[..., Any] | type) -> bool:
    """Return whether a function or a class is of none of the libraries that hold no rule of a user's."""
    return (inspect.unwrap(what).__module__ or "").partition(".")[0] not in _OTHERS
