"""What code can keep outside of modules: variables that a forward or a loss reaches from its functions.

    globals             of the file of a function, by the names in its code
    closures            the variables around a function, and its default arguments and attributes
    classes             attributes of the class of a module, or of an object that is reached
    objects, modules    that one of these variables holds, followed in turn

Only code of the user is followed: libraries (the standard library and installed packages) keep what they keep.
"""

from __future__ import annotations

import enum
import functools
import random
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

_LARGEST_NUMBER = 2**53
_MOST = 20_000
"""Objects that are followed at most."""
_ABSENT: Any = object()
_LIBRARIES = tuple({sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")})
_OWN_PACKAGE = __name__.partition(".")[0]
_PLAIN = (bool, int, float, complex, str, bytes, type(None), tuple, list, dict, set, Tensor, np.ndarray)
_GENERATORS = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)
_SINGLE = (bool, int, float, complex, str, bytes, type(None))


@functools.lru_cache(maxsize=4096)
def is_users(module_name: str | None) -> bool:
    """Return whether a module is the user's own: no part of Python, of an installed package, or of this one."""
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


def reached_from(root: Any) -> Reached:
    """Return the variables that the code of a model, or of a function, reaches."""
    found = _Follower()
    if isinstance(root, nn.Module):
        for path, part in root.named_modules():
            found.of_module(path, part)
    else:
        found.callable(getattr(root, "__name__", type(root).__name__), root)
    found.run()
    return found.reached


class _Follower:
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
        """Follow what is called: a function, or an object of the user's with attributes of its own."""
        if _is_object(value):
            self._variable(name, None, "", value)
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
                self._variable(f"argument {index} of {name}", None, "", item)
        elif isinstance(value, MethodType):
            self.follow(name, value.__func__)
            self._variable(name, None, "", value.__self__)
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
        for cell, name in zip(function.__closure__ or (), function.__code__.co_freevars, strict=True):
            for value in _content(cell):
                self._variable(f"{name} around {where}", cell, name, value)
        code, defaults = function.__code__, function.__defaults__ or ()
        positional = code.co_varnames[code.co_argcount - len(defaults) : code.co_argcount]
        for name, value in (*zip(positional, defaults, strict=True), *(function.__kwdefaults__ or {}).items()):
            if not isinstance(value, _SINGLE):
                self._variable(f"the default of {name} in {where}", None, "", value)
        for name, value in vars(function).items():
            self._variable(f"{where}.{name}", vars(function), name, value)
        names = set(_names(function.__code__))
        self.reached.constants.update(_constants(function.__code__))
        own, shared = function.__globals__, function.__globals__.get("__name__", "")
        for name in sorted(names & own.keys()):
            value = own[name]
            if isinstance(value, ModuleType):
                self._attributes_of(value, names)
            else:
                self._variable(f"{name} of {shared}", own, name, value)

    def _attributes_of(self, module: ModuleType, names: set[str]) -> None:
        if is_users(module.__name__):
            for name in sorted(names & vars(module).keys()):
                self._variable(f"{name} of {module.__name__}", vars(module), name, vars(module)[name])

    def _class(self, kind: type) -> None:
        for base in kind.__mro__:
            if not is_users(base.__module__):
                continue
            for name, value in vars(base).items():
                inner = getattr(value, "__func__", None) or getattr(value, "fget", None) or getattr(value, "func", None)
                if isinstance(inner, FunctionType):
                    self.follow(name, inner)
                elif not (name.startswith("__") and name.endswith("__")) or isinstance(value, FunctionType):
                    holder = None if isinstance(base, enum.EnumMeta) else base  # whose members nobody can replace
                    self._variable(f"{base.__name__}.{name}", holder, name, value)

    def _variable(self, name: str, holder: Any, key: str, value: Any) -> None:
        """Note a variable, if its value can be kept or replaced, and follow the value."""
        if isinstance(value, (*_PLAIN, *_GENERATORS)) or _is_object(value):
            at = (id(holder), key) if holder is not None else (id(value), "")
            if at not in self._noted:
                self._noted.add(at)
                self.reached.variables.append(Variable(name, holder, key, value))
        self.follow(name, value)


_SOME = 256
"""Items of a container that are followed."""
_CODE = (FunctionType, BuiltinFunctionType, MethodType, ModuleType, type, nn.Module, functools.partial)


def _is_object(value: Any) -> bool:
    """Return whether a value is an object of the user's own class, or a container of a class of its own."""
    return not isinstance(value, _CODE) and is_users(type(value).__module__)


def _cells(function: FunctionType) -> Iterator[Any]:
    for cell in function.__closure__ or ():
        yield from _content(cell)


def _content(cell: CellType) -> Iterator[Any]:
    """Yield what a cell of a closure holds, if it holds something yet."""
    with suppress(ValueError):
        yield cell.cell_contents


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _constants(code: CodeType) -> Iterator[int]:
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _constants(constant)
        elif isinstance(constant, int | float) and not isinstance(constant, bool) and abs(constant) < _LARGEST_NUMBER:
            yield int(constant)
