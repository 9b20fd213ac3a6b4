"""What the code of an optimizer's step reaches: its functions, the numbers in them, and what they keep between steps.

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
import functools
import inspect
import math
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

_OTHERS = frozenset(("torch", "numpy", "samestep", *sys.stdlib_module_names)) - {"__main__", "test"}
"""Packages whose functions hold no thresholds of a user's."""
_MOST = 4096
"""Values that are looked at: an optimizer that holds a whole data set is not read to its end."""
_HOLDERS = (types.SimpleNamespace, collections.UserDict, collections.UserList, collections.ChainMap)
Place = tuple[Any, str]
"""A dictionary and a key in it, or a closure's cell."""


class StepCode:
    """The numbers that an optimizer's step reaches, and the places outside of its own state that it may change."""

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
        if id(value) in self._seen or len(self._seen) > _MOST:
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
            for key, inner in list(value.items())[:_MOST]:
                yield inner, (value, key) if isinstance(key, str) else None
                if isinstance(key, Tensor):
                    yield key, None
        elif isinstance(value, list | tuple | set | frozenset | collections.deque):
            self._containers += [value] if isinstance(value, list | set | collections.deque) else []
            yield from ((inner, None) for inner in list(value)[:_MOST])
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
        for base in kind.__mro__:
            if _is_users(base):
                for key, value in list(vars(base).items()):
                    if isinstance(value, property):
                        self._look_at(value.fget)
                    elif not key.startswith("__") or isinstance(value, types.FunctionType):
                        self._look_at(getattr(value, "__func__", value))

    def _of_function(self, function: types.FunctionType) -> Iterator[tuple[Any, Place | None]]:
        wrapped = getattr(function, "__wrapped__", None)
        if wrapped is not None:
            yield wrapped, None
        if not _is_users(function):
            return
        names = set[str]()
        for code in _codes(function.__code__):
            names |= set(code.co_names)
            yield from ((constant, None) for constant in code.co_consts if isinstance(constant, int | float | tuple))
        yield from ((value, None) for value in (function.__defaults__ or (), function.__kwdefaults__ or {}))
        for cell in function.__closure__ or ():
            try:
                yield cell.cell_contents, (cell, "")
            except ValueError:
                continue
        for name in sorted(names & function.__globals__.keys()):
            value = function.__globals__[name]
            if not isinstance(value, types.ModuleType):
                yield value, (function.__globals__, name)
            elif value.__name__.partition(".")[0] not in _OTHERS:
                held = vars(value)
                yield from ((held[inner], (held, inner)) for inner in sorted(names & held.keys()))

    @contextmanager
    def put_back(self) -> Iterator[None]:
        """Put back, in the end, the numbers and the containers that the code can reach outside of the optimizer."""
        numbers = [(place, _copied(read(place))) for place in self.places]
        containers = [(value, _copied(value)) for value in self._containers]
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


def _options_of(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def read(place: Place) -> Any:
    """Return what stands in a place; None if nothing does."""
    holder, key = place
    if not isinstance(holder, types.CellType):
        return holder.get(key)
    try:
        return holder.cell_contents
    except ValueError:
        return None


def write(place: Place, value: Any) -> None:
    """Put a value in a place, or a number into the tensor that is there."""
    holder, key = place
    now = read(place)
    if isinstance(now, Tensor) and now.numel() == 1 and not now.is_meta:
        now.detach().fill_(float(value))
    elif isinstance(holder, types.CellType):
        holder.cell_contents = value
    else:
        holder[key] = value


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return float(value) if value.numel() == 1 and not value.is_meta else value
    return value.copy() if isinstance(value, list | dict | set | collections.deque) else value


def _codes(code: types.CodeType) -> Iterable[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)


def _is_users(what: Callable[..., Any] | type) -> bool:
    """Return whether a function or a class is of none of the libraries that hold no rule of a user's."""
    return (inspect.unwrap(what).__module__ or "").partition(".")[0] not in _OTHERS
