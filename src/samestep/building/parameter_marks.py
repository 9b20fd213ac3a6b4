"""Attributes and gradient hooks that a user's code puts on parameters.

Both are lost when a run replaces the parameters by its own, so the blueprint records them. A hook may hold tensors
that the build function made, such as a mask; those have no values yet, so the blueprint makes them, and `with_values`
returns the hook over the values.

    mask = torch.ones(64, 16)                                  in the build function, on the meta device
    embed.weight.register_hook(lambda grad: grad * mask)       the mask is a cell of the hook's closure
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

Hook = Callable[..., Any]
TAKEN = "_samestep_taken"
"""The attribute of a parameter without values that is the parameter of an instance in whose place it is."""


@dataclass(frozen=True, slots=True)
class ParameterMarks:
    """The attributes and hooks of one parameter."""

    attributes: dict[str, Any] = field(default_factory=dict)
    """Python attributes; tensors on the meta device are left out, since they have no values."""
    hooks: tuple[Hook, ...] = ()
    """Functions of the gradient, of `register_hook`."""
    late_hooks: tuple[Hook, ...] = ()
    """Functions of the parameter and its accumulated gradient, of `register_post_accumulate_grad_hook`."""


def gradient_hooks_of(param: Tensor) -> tuple[dict[int, Any], dict[int, Any]]:
    """Return the dictionaries in which a parameter keeps its hooks on gradients, and those after accumulation."""
    return param._backward_hooks or {}, getattr(param, "_post_accumulate_grad_hooks", None) or {}


def take_marks(module: nn.Module, *, takes: bool) -> dict[str, ParameterMarks]:
    """Return the marks of each parameter that has any, by its first name.

    Hooks are removed from parameters without values, and from all if a run `takes` them.
    """
    marks: dict[str, ParameterMarks] = {}
    for name, param in module.named_parameters():
        attributes = {
            key: value
            for key, value in vars(param).items()
            if not (isinstance(value, Tensor) and value.is_meta) and key != "_is_param"
        }
        hooks, late = (tuple(kind.values()) for kind in gradient_hooks_of(param))
        if attributes or hooks or late:
            marks[name] = ParameterMarks(attributes, hooks, late)
        if takes or param.is_meta:
            for table in gradient_hooks_of(param):
                table.clear()
    return marks


def tensors_of_hooks(name: str, marks: ParameterMarks) -> dict[str, Tensor]:
    """Return the tensors without values that a parameter's hooks hold, under names derived from the parameter's."""
    tensors = (
        tensor for hook in (*marks.hooks, *marks.late_hooks) for tensor in _captured_tensors(hook) if tensor.is_meta
    )
    return {f"{name}.hook.{index}": tensor for index, tensor in enumerate(tensors)}


def with_values(name: str, marks: ParameterMarks, value_of: Callable[[str], Tensor]) -> ParameterMarks:
    """Return the marks with hooks that hold the values of the tensors of `tensors_of_hooks`."""
    values = iter([value_of(key) for key in tensors_of_hooks(name, marks)])

    def valued(tensor: Tensor) -> Tensor:
        return next(values) if tensor.is_meta else tensor

    hooks, late = (tuple(_map_captured(hook, valued) for hook in kind) for kind in (marks.hooks, marks.late_hooks))
    return ParameterMarks(marks.attributes, hooks, late)


def _captured_tensors(hook: Any) -> Iterator[Tensor]:
    """Yield the tensors in a function's closure, defaults and bound arguments."""
    tensors: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        tensors.append(tensor)
        return tensor

    _map_captured(hook, note)
    yield from tensors


def _map_captured(hook: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return a function with the tensors that it holds changed."""

    def of(value: Any) -> Any:
        if isinstance(value, Tensor):
            return change(value)
        return _map_captured(value, change) if isinstance(value, types.FunctionType | functools.partial) else value

    if isinstance(hook, functools.partial):
        args, named = [of(value) for value in hook.args], {key: of(value) for key, value in hook.keywords.items()}
        return functools.partial(of(hook.func), *args, **named)
    if not isinstance(hook, types.FunctionType):
        return hook
    cells = [cell.cell_contents for cell in hook.__closure__ or () if _is_filled(cell)]
    parts = [*cells, *(hook.__defaults__ or ()), *(hook.__kwdefaults__ or {}).values()]
    if not any(isinstance(part, Tensor | types.FunctionType | functools.partial) for part in parts) or hook in cells:
        return hook
    closure = tuple(
        types.CellType(of(cell.cell_contents)) if _is_filled(cell) else cell for cell in hook.__closure__ or ()
    )
    defaults = tuple(map(of, hook.__defaults__)) if hook.__defaults__ is not None else None
    function = types.FunctionType(hook.__code__, hook.__globals__, hook.__name__, defaults, closure or None)
    function.__kwdefaults__ = {key: of(value) for key, value in (hook.__kwdefaults__ or {}).items()} or None
    return function


def _is_filled(cell: types.CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018 (an empty cell raises)
    except ValueError:
        return False
    return True


def filled_parameter(param: nn.Parameter, value: Tensor, *, trains: bool) -> nn.Parameter:
    """Return the parameter that has a value in place of one without values: that of the instance, if it has the same shape."""
    instance: nn.Parameter | None = vars(param).get(TAKEN)
    if instance is None or instance.shape != value.shape:
        return nn.Parameter(value, requires_grad=trains)
    instance.data, instance.grad = value, None
    instance.requires_grad_(trains)
    return instance


# -- the function of the gradient ------------------------------------------------------------------


def gradient_function(marks: ParameterMarks, value: Tensor) -> Callable[[Tensor], Tensor]:
    """Return the function by which all hooks of a parameter change its gradient; `value` is the parameter in late
    hooks."""

    def changed(gradient: Tensor) -> Tensor:
        for hook in marks.hooks:
            copied = gradient.clone()  # a hook may change it in place
            result = hook(copied)
            gradient = (copied if result is None else result).to(gradient.dtype)
        if marks.late_hooks:
            stand_in = nn.Parameter(value.detach().to(gradient.device, gradient.dtype))
            stand_in.__dict__.update(marks.attributes)
            stand_in.grad = gradient.clone()
            for hook in marks.late_hooks:
                hook(stand_in)
            gradient = torch.zeros_like(gradient) if stand_in.grad is None else stand_in.grad
        return gradient

    return changed
