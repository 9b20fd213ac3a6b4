"""Deep copies of modules whose functions refer to the copy.

`copy.deepcopy` shares functions: a lambda in an attribute or a hook that closes over `self` would go on reading the weights of the
module that was copied, which nobody trains. Here a function with a part of the module in a variable around it, or in a default, is
made anew, and those variables hold the parts of the copy. Variables without such a part stay shared, as they are with the
code around. Weak references and methods in attributes of modules are made anew too: `copy.deepcopy` shares the function of a method.
"""

from __future__ import annotations

import copy
import functools
import weakref
from collections.abc import Iterator
from types import CellType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from samestep.building.torch_seams import is_traceable_wrapper_subclass

_MOST = 200_000
"""Objects that are followed at most."""
_LEAVES = (bool, int, float, complex, str, bytes, type(None), type)


def deep_copy(module: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """Return a deep copy of a module; `memo` has by identity what stands in the copy in an object's place.

    Raises:
        RuntimeError, TypeError: an attribute cannot be copied.
    """
    holders = _Holders(module)
    cells: dict[int, tuple[CellType, CellType]] = {}
    twins: list[tuple[FunctionType, FunctionType]] = []
    for function in holders.functions():
        around = tuple(
            cells.setdefault(id(cell), (cell, CellType()))[1] if holders.holds(cell) else cell
            for cell in function.__closure__ or ()
        )
        twin = FunctionType(
            function.__code__, function.__globals__, function.__name__, function.__defaults__, around or None
        )
        twin.__qualname__, twin.__doc__ = function.__qualname__, function.__doc__
        memo[id(function)] = twin
        twins.append((function, twin))
    copied = copy.deepcopy(module, memo)

    def of_copy(value: Any) -> Any:
        return copy.deepcopy(value, memo) if holders.holds(value) else value

    for cell, twin_cell in cells.values():
        twin_cell.cell_contents = of_copy(cell.cell_contents)
    for function, twin in twins:
        if function.__defaults__:
            twin.__defaults__ = tuple(map(of_copy, function.__defaults__))
        if function.__kwdefaults__:
            twin.__kwdefaults__ = {key: of_copy(value) for key, value in function.__kwdefaults__.items()}
        vars(twin).update((key, of_copy(value)) for key, value in vars(function).items())
    for part in copied.modules():
        for key, value in [*vars(part).items()]:
            if isinstance(value, weakref.ref) and id(referent := value()) in memo and isinstance(referent, nn.Module):
                vars(part)[key] = weakref.ref(memo[id(referent)])
            elif isinstance(value, MethodType) and id(value.__func__) in memo:
                vars(part)[key] = MethodType(memo[id(value.__func__)], value.__self__)
    return copied


def tensors_in_functions(module: nn.Module) -> tuple[str, Tensor | None]:
    """Return what functions of the module hold, in variables around them or in defaults, that a rank has otherwise or not at all.

    The first is the name of a parameter or buffer, empty if they hold none; a tensor in the memory of a trained parameter, such as its
    transposition, is held like the parameter itself. The second is a tensor on the meta device that is no part of the module.
    """
    names = {id(tensor): name for name, tensor in (*module.named_parameters(), *module.named_buffers())}
    memory = {
        place: name for name, param in module.named_parameters() if param.requires_grad and (place := _memory_of(param))
    }
    holders = _Holders(module)
    held_names = (
        name
        for function in holders.functions()
        for item in _held_by(function, is_around=True)
        for value in (item, *(_held_by(item, is_around=True) if isinstance(item, CellType) else ()))
        if isinstance(value, Tensor) and (name := names.get(id(value)) or memory.get(_memory_of(value)))
    )
    return next(held_names, ""), next(iter(holders.without_values), None)


def _memory_of(tensor: Tensor) -> int:
    """Return the address of a tensor's memory; 0 where it has none, as a lazy module's, or shares it."""
    if is_lazy(tensor):
        return 0
    is_plain = tensor.layout == torch.strided and not tensor.is_meta and not is_traceable_wrapper_subclass(tensor)
    return tensor.untyped_storage().data_ptr() if is_plain else 0


class _Holders:
    """The objects around a module that hold parts of it: modules, parameters and buffers.

    An object of another class that a function alone comes to, such as the trainer that a hook reports to, belongs to the code around:
    it is not followed.
    """

    def __init__(self, module: nn.Module) -> None:
        known = {id(part) for part in (*module.modules(), *module.parameters(), *module.buffers())}
        memory = {_memory_of(param) for param in module.parameters() if param.requires_grad} - {0}
        holders: dict[int, set[int]] = {}
        self._alive: dict[int, Any] = {}
        self.without_values: list[Tensor] = []
        """Tensors on the meta device that functions hold."""
        followed = set[tuple[int, bool]]()
        todo = [(part, value, False) for part in module.modules() for value in vars(part).values()]
        while todo and len(self._alive) < _MOST:
            holder, value, is_around = todo.pop()
            if isinstance(value, _LEAVES):
                continue
            holders.setdefault(id(value), set()).add(id(holder))
            self._alive[id(value)] = value
            if isinstance(value, Tensor) and _memory_of(value) in memory:
                known.add(id(value))
            if id(value) in known or (id(value), is_around) in followed:
                continue
            if is_around and isinstance(value, Tensor) and value.is_meta:
                self.without_values.append(value)
            followed.add((id(value), is_around))
            is_around |= isinstance(value, FunctionType)
            todo += [(value, inner, is_around) for inner in _held_by(value, is_around)]
        self._found = set[int]()
        reached: list[int] = [*known]
        while reached:
            for other in holders.get(reached.pop(), set()) - self._found - known:
                self._found.add(other)
                reached.append(other)
        self._found |= known

    def holds(self, value: Any) -> bool:
        """Return whether an object is a part of the module, or holds one."""
        return id(value) in self._found

    def functions(self) -> list[FunctionType]:
        """Return the functions that hold parts."""
        return [item for item in self._alive.values() if isinstance(item, FunctionType) and self.holds(item)]


def _held_by(value: Any, is_around: bool) -> Iterator[Any]:
    """Yield what an object holds, as far as a deep copy comes to it, or the code of a function (`is_around`)."""
    if isinstance(value, dict):
        yield from value.values()
    elif isinstance(value, list | tuple | set | frozenset):
        yield from value
    elif isinstance(value, FunctionType):
        yield from value.__closure__ or ()
        yield from value.__defaults__ or ()
        yield from (value.__kwdefaults__ or {}).values()
        yield from vars(value).values()
    elif isinstance(value, CellType):
        try:
            yield value.cell_contents
        except ValueError:  # a variable that was never set
            return
    elif isinstance(value, MethodType):
        yield value.__self__
        yield value.__func__
    elif isinstance(value, functools.partial):
        yield value.func
        yield from value.args
        yield from value.keywords.values()
    elif isinstance(value, nn.Module) or not (is_around or isinstance(value, Tensor)):
        yield from getattr(value, "__dict__", {}).values()
