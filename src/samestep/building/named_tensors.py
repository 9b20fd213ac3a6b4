"""Every tensor of a module by its full name: parameters, buffers, and tensors in plain attributes; and the attributes that code sets.

A wrapper (`torch.compile`, `nn.DataParallel`, ...) adds a component to the names of what it wraps. What depends on a name,
such as a first value, takes the name without it, so that a wrapped module computes what the module alone does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from samestep.building.module_copies import deep_copy
from samestep.building.torch_seams import get_unwrapped, is_functorch_wrapped_tensor
from samestep.trees import map_tensors, replace_tensors, tensors_in

OF_TORCH = frozenset(vars(nn.Module()))
"""The names of what torch itself keeps in every module."""


def set_attributes(module: nn.Module) -> dict[str, Any]:
    """Return the attributes that code has set on one module, by name, as they are now."""
    return {name: value for name, value in vars(module).items() if name not in OF_TORCH}


_RESERVED = frozenset({"_parameters", "_buffers", "_modules"})
_WRAPPED = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")
"""Names under which wrappers of torch hold the module that they wrap."""
_PARALLEL = (nn.DataParallel, nn.parallel.DistributedDataParallel)
"""Wrappers that hold it under the name `module`, which other modules use too."""


@dataclass(frozen=True, slots=True)
class NamedTensor:
    """A tensor and its position in a module."""

    name: str
    kind: str
    """One of parameter, buffer, attribute, hook."""
    tensor: Tensor


def tensors_of(module: nn.Module) -> Iterator[NamedTensor]:
    """Yield every tensor under every name: parameters, then buffers, then attributes, each in the module's order."""
    modules = list(module.named_modules(remove_duplicate=False))
    for kind, table in (("parameter", "_parameters"), ("buffer", "_buffers")):
        for prefix, owner in modules:
            for key, tensor in getattr(owner, table).items():
                if tensor is not None:
                    yield NamedTensor(join_name(prefix, key), kind, tensor)
    parameters = {id(parameter) for parameter in module.parameters()}
    attributes: list[NamedTensor] = []

    def find(name: str, tensor: Tensor) -> Tensor:
        if id(tensor) not in parameters:
            attributes.append(NamedTensor(name, "attribute", tensor))
        return tensor

    for prefix, owner in modules:
        map_attributes(prefix, owner, find)
    yield from attributes


def copy_module(module: nn.Module) -> nn.Module:
    """Return a deep copy of a module; tensors computed from parameters, as pruning and weight_norm keep them, are constants in it.

    Raises:
        RuntimeError, TypeError: an attribute cannot be copied.
    """
    memo: dict[int, Any] = {
        id(entry.tensor): entry.tensor.detach().clone() for entry in tensors_of(module) if not entry.tensor.is_leaf
    }
    return deep_copy(module, memo)


def map_attributes(prefix: str, module: nn.Module, change: Callable[[str, Tensor], Tensor]) -> None:
    """Replace every tensor attribute of one module by `change(name, tensor)`."""
    attributes = vars(module)
    for key in [key for key in attributes if key not in _RESERVED]:
        value = attributes[key]
        after = replace_tensors(join_name(prefix, key), value, change, depth=3)
        if after is not value:
            attributes[key] = after


def join_name(prefix: str, key: str) -> str:
    """Return a full name."""
    return f"{prefix}.{key}" if prefix else key


def unwrap(module: nn.Module) -> nn.Module:
    """Return the module that is wrapped, or a module itself that is no wrapper."""
    children = module._modules
    for key in _WRAPPED:
        if (inner := children.get(key)) is not None:
            return unwrap(inner)
    return unwrap(module.module) if "module" in children and isinstance(module, _PARALLEL) else module


def unwrapped_prefixes(module: nn.Module) -> dict[str, str]:
    """Return the name of every submodule without the components that wrappers add, by its name with them."""
    prefixes = {"": ""}
    owners = dict(module.named_modules(remove_duplicate=False))
    for prefix in owners:  # a parent comes before its children
        if prefix:
            parent, _, key = prefix.rpartition(".")
            is_wrapped = key in _WRAPPED or (key == "module" and isinstance(owners[parent], _PARALLEL))
            prefixes[prefix] = prefixes[parent] if is_wrapped else join_name(prefixes[parent], key)
    return prefixes


def unwrapped_name(name: str, prefixes: Mapping[str, str]) -> str:
    """Return a tensor's name without the components that wrappers add; `prefixes` are those of its module."""
    owner, _, key = name.rpartition(".")
    while owner not in prefixes:  # a tensor within a list or a dict, which has dots of its own
        owner, _, more = owner.rpartition(".")
        key = f"{more}.{key}"
    return join_name(prefixes[owner], key)


def cast_floating(batch: Any, dtype: torch.dtype) -> Any:
    """Return a batch with its floating tensors cast to `dtype`."""
    # The arguments of a module, most often; torch's walk of a tree takes the host microseconds each.
    if type(batch) is not tuple and type(batch) is not dict:
        return _cast_leaf(batch, dtype)
    values = []
    for value in batch.values() if type(batch) is dict else batch:
        if isinstance(value, Tensor):
            values.append(value.to(dtype) if value.is_floating_point() and value.dtype != dtype else value)
        else:
            values.append(_cast_leaf(value, dtype))
    return dict(zip(batch, values, strict=True)) if type(batch) is dict else tuple(values)


def cast_batch(batch: Any, dtype: torch.dtype, *, keeps_double: bool) -> Any:
    """Return a batch with its floating tensors cast to `dtype`, but for float64 ones that would lose something where these are kept."""

    def is_kept(tensor: Tensor) -> bool:
        return tensor.dtype is torch.float64 and not torch.equal(tensor.to(dtype).nan_to_num(), tensor.nan_to_num())

    if not keeps_double or dtype is torch.float64:
        return cast_floating(batch, dtype)
    doubles = [tensor for tensor in tensors_in(batch) if tensor.dtype is torch.float64]
    if doubles and any(map(is_kept, doubles)):
        return map_tensors(batch, lambda t: t if is_kept(t) or not t.is_floating_point() else t.to(dtype))
    return cast_floating(batch, dtype)


def _cast_leaf(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if value is None or isinstance(value, _PLAIN):
        return value
    return map_tensors(value, lambda t: t.to(dtype) if t.is_floating_point() else t)


_PLAIN = (int, float, str, bytes)


def address(tensor: Tensor) -> int:
    """Return a number that identifies a tensor's storage while it lives."""
    return inner_tensor(tensor).untyped_storage()._cdata


def inner_tensor(tensor: Tensor) -> Tensor:
    """Return the tensor inside a wrapper of `torch.func` (of vmap, grad, jvp); any other tensor as it is."""
    while is_functorch_wrapped_tensor(tensor):
        tensor = get_unwrapped(tensor)
    return tensor
