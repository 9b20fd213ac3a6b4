"""Nested containers of tensors: batches, outputs and arguments, walked here and nowhere else.

    tensors_in, map_tensors     what users nest: whatever torch's pytree knows, and mappings, dataclasses, tuples and lists of
                                other classes; with `records` also objects that hold a tensor, or a list or dict of some, as a plain attribute
    operands                    what torch's operators nest: one list at most
    fold                        nested lists and tuples, made into a text or something that can be compared
    replace_tensors             the attributes of a module, whose lists and dicts stay the same objects
    can_be_kept, noted          tensors, numbers and plain containers, noted so that they can be put back in place
    have_same_values            whether two tensors are equal, where NaN equals NaN

`torch.utils._pytree` was seen in torch 2.11 and 2.13; `torch.utils.pytree` of 2.13 is its public successor.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import MemberDescriptorType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import (
    keystr,
    tree_flatten,
    tree_flatten_with_path,
    tree_map,
    tree_unflatten,
)
from torch.utils._pytree import tree_leaves as _leaves
from torch.utils._pytree import tree_map_only as _map_only

_DEPTH = 4
_NUMBERS = (str, bool, int, float, complex, type(None))
_LEAVES = frozenset((*_NUMBERS, Tensor, nn.Parameter))
"""Classes that no walk looks into."""

__all__ = [
    "can_be_kept",
    "fields_of",
    "fold",
    "have_same_values",
    "keystr",
    "map_tensors",
    "noted",
    "operands",
    "replace_tensors",
    "tensors_in",
    "tree_flatten",
    "tree_flatten_with_path",
    "tree_leaves",
    "tree_map",
    "tree_map_only",
    "tree_unflatten",
    "with_fields",
]


def tree_map_only(kind: Any, change: Callable[[Any], Any], value: Any) -> Any:
    """Return a nested value with `change` applied to its leaves of a kind, as torch's function of this name does, whose walk of a
    plain tuple or dict takes the host microseconds for each item."""
    if isinstance(value, kind):
        return change(value)
    if type(value) not in (tuple, list, dict):
        return _map_only(kind, change, value)
    changed = []
    for item in value.values() if type(value) is dict else value:
        if isinstance(item, kind):
            changed.append(change(item))
        else:
            changed.append(item if type(item) in _LEAVES else tree_map_only(kind, change, item))
    return dict(zip(value, changed, strict=True)) if type(value) is dict else type(value)(changed)


def tree_leaves(value: Any) -> list[Any]:
    """Return the leaves of a nested value in torch's order, faster than torch, which takes microseconds for each."""
    if type(value) in _LEAVES:
        return [value]
    if type(value) not in (tuple, list, dict):
        return _leaves(value)
    found = []
    for item in value.values() if type(value) is dict else value:
        if type(item) in _LEAVES:
            found.append(item)
        else:
            found += tree_leaves(item)
    return found


def have_same_values(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors have the same shape, dtype and elements, where NaN equals NaN."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return torch.equal(one, other) or bool(((one == other) | ((one != one) & (other != other))).all())


def tensors_in(value: Any, *, records: bool = False) -> list[Tensor]:
    """Return the tensors in a nested value, in the order in which `map_tensors` changes them."""
    if isinstance(value, Tensor):
        return [value]
    found: list[Tensor] = []
    for leaf in tree_leaves(value):
        if isinstance(leaf, Tensor):
            found.append(leaf)
        else:
            for _, item in _items_of(leaf, records):
                found += tensors_in(item, records=records)
    return found


def map_tensors(value: Any, change: Callable[[Tensor], Any], *, records: bool = False) -> Any:
    """Return a copy of a nested value with `change` applied to its tensors; what holds none is the same object."""

    if isinstance(value, Tensor):
        return change(value)

    def leaf(item: Any) -> Any:
        if isinstance(item, Tensor):
            return change(item)
        items = _items_of(item, records)
        if not any(tensors_in(held, records=records) for _, held in items):
            return item
        changed = [(key, map_tensors(held, change, records=records)) for key, held in items]
        if isinstance(item, tuple):
            return tuple.__new__(type(item), [held for _, held in changed])
        twin = copy.copy(item)
        for key, held in changed:
            if isinstance(item, Mapping | list):
                twin[key] = held
            else:
                object.__setattr__(twin, key, held)  # a dataclass may be frozen
        return twin

    return tree_map(leaf, value)


def _items_of(leaf: Any, records: bool) -> list[tuple[Any, Any]]:
    """Return what a leaf of torch's pytree holds by its keys, places or names: an object of a class unknown to it."""
    if isinstance(leaf, Mapping):
        return list(leaf.items())
    if isinstance(leaf, tuple | list):
        return list(enumerate(leaf))
    if isinstance(leaf, type | nn.Module):
        return []
    if dataclasses.is_dataclass(leaf):
        return list(_stored_fields(leaf))
    held = getattr(leaf, "__dict__", {}) if records else {}
    return list(held.items()) if any(map(_holds_tensors, held.values())) else []


def fields_of(value: Any) -> dict[str, Any]:
    """Return the fields that a dataclass stores, with their values; nothing for other values, and for one that is a mapping."""
    is_record = dataclasses.is_dataclass(value) and not isinstance(value, Mapping | type | nn.Module)
    return dict(_stored_fields(value)) if is_record else {}


def with_fields(value: Any, changed: Mapping[str, Any]) -> Any:
    """Return a copy of a dataclass with other values of some fields."""
    twin = copy.copy(value)
    for name, held in changed.items():
        object.__setattr__(twin, name, held)  # a dataclass may be frozen
    return twin


def _stored_fields(record: Any) -> Iterator[tuple[str, Any]]:
    """Yield the fields that a dataclass stores, with their values; an attribute access could run code of its class, which may raise anything."""
    held = getattr(record, "__dict__", {})
    for field in dataclasses.fields(record):
        if field.name in held:
            yield field.name, held[field.name]
        elif isinstance(slot := getattr(type(record), field.name, None), MemberDescriptorType):
            with contextlib.suppress(AttributeError):  # it has no value yet
                yield field.name, slot.__get__(record)


def _holds_tensors(attribute: Any) -> bool:
    """Return whether a plain attribute is a tensor, or a list, a tuple or a dict with one."""
    items = attribute.values() if type(attribute) is dict else attribute if type(attribute) in (list, tuple) else ()
    return isinstance(attribute, Tensor) or any(isinstance(item, Tensor) for item in items)


def operands(*values: Any) -> list[Tensor]:
    """Return the tensors among an operator's arguments or results, which are nested in one list at most."""
    flat = (item for value in values for item in (value if isinstance(value, (list, tuple)) else (value,)))
    return [item for item in flat if isinstance(item, Tensor)]


def fold(value: Any, leaf: Callable[[Any], Any], join: Callable[[Iterable[Any]], Any] = tuple) -> Any:
    """Return what `join` makes of the items of nested lists and tuples, and `leaf` of everything else."""
    if isinstance(value, list | tuple):
        return join(fold(item, leaf, join) for item in value)
    return leaf(value)


def replace_tensors(name: str, value: Any, change: Callable[[str, Tensor], Tensor], depth: int) -> Any:
    """Return a value with `change(path, tensor)` for its tensors: in a list, a dict or a plain object in place, in a tuple as a new tuple."""
    if isinstance(value, Tensor):
        return change(name, value)
    if depth == 0:
        return value
    items: Iterable[tuple[Any, Any]]
    if type(value) is dict or type(value) is list:
        items = list(value.items() if isinstance(value, dict) else enumerate(value))
        for key, item in items:
            after = replace_tensors(f"{name}.{key}", item, change, depth - 1)
            if after is not item:
                value[key] = after
    elif type(value) is tuple:
        after = tuple(replace_tensors(f"{name}.{key}", item, change, depth - 1) for key, item in enumerate(value))
        return after if any(a is not b for a, b in zip(after, value, strict=True)) else value
    elif not isinstance(value, Mapping | list | tuple):
        for key, item in _items_of(value, records=True):
            after = replace_tensors(f"{name}.{key}", item, change, depth - 1)
            if after is not item:
                object.__setattr__(value, key, after)  # a dataclass may be frozen
    return value


def can_be_kept(value: Any, depth: int = _DEPTH) -> bool:
    """Return whether a value is a tensor, a number, or a plain container of such values."""
    if isinstance(value, nn.Parameter):
        return False
    if type(value) in (list, tuple, deque, dict):
        items = value.values() if isinstance(value, dict) else value
        return depth > 0 and all(can_be_kept(item, depth - 1) for item in items)
    return isinstance(value, Tensor) or type(value) in _NUMBERS


def noted(value: Any) -> Callable[[], Any]:
    """Return a function that gives a value the numbers and items it has now, and returns it."""
    if isinstance(value, Tensor):
        return _noted_tensor(value)
    if type(value) is dict:
        items = {key: noted(item) for key, item in value.items()}
        return lambda: _refilled(value, value.update, {key: put() for key, put in items.items()})
    if isinstance(value, list | deque):
        rows = [noted(item) for item in value]
        return lambda: _refilled(value, value.extend, [put() for put in rows])
    if type(value) is tuple:
        parts = [noted(item) for item in value]
        return lambda: tuple(put() for put in parts)
    return lambda: value


def _noted_tensor(value: Tensor) -> Callable[[], Tensor]:
    before = value.detach().clone()

    def put_back() -> Tensor:
        if value.shape == before.shape:
            value.data.copy_(
                before
            )  # a backward that has saved the tensor finds the same numbers once the forward has run again
        else:
            value.data = before.clone()
        return value

    return put_back


def _refilled(held: Any, fill: Callable[[Any], Any], items: Any) -> Any:
    held.clear()
    fill(items)
    return held
