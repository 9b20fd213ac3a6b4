"""Nested containers of tensors: batches, outputs and arguments, walked here and nowhere else.

    tree_leaves, tree_map_only, what users nest: whatever torch's pytree knows, and mappings, dataclasses, tuples and lists of other
    tree_flatten, tree_unflatten  classes, where they hold a tensor (a `BatchEncoding` of transformers is such a mapping)
    tensors_in, map_tensors     the same for tensors alone, and objects besides that hold a tensor, or a list or dict of some, as a
                                plain attribute
    parts_of, with_parts        one container of any of these classes: its parts, and a copy with other parts
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
import functools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MemberDescriptorType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributions import Distribution, Transform
from torch.distributions.transforms import _InverseTransform
from torch.utils._pytree import GetAttrKey, MappingKey, SequenceKey, TreeSpec, keystr, tree_map
from torch.utils._pytree import tree_flatten as _flatten
from torch.utils._pytree import tree_flatten_with_path as _flatten_with_path
from torch.utils._pytree import tree_leaves as _leaves
from torch.utils._pytree import tree_unflatten as _unflatten

_DEPTH = 4
_NUMBERS = (str, bool, int, float, complex, type(None))
_LEAVES = frozenset((*_NUMBERS, Tensor, nn.Parameter))
"""Classes that no walk looks into."""

__all__ = [
    "can_be_kept",
    "fold",
    "have_same_values",
    "keystr",
    "map_tensors",
    "noted",
    "operands",
    "parts_of",
    "replace_tensors",
    "tensors_in",
    "tree_flatten",
    "tree_flatten_with_path",
    "tree_leaves",
    "tree_map",
    "tree_map_only",
    "tree_unflatten",
    "with_parts",
]


def tree_map_only(kind: Any, change: Callable[[Any], Any], value: Any) -> Any:
    """Return a nested value with `change` applied to its leaves of a kind; of a class that torch's pytree does not know, a container
    without such leaves is the same object.

    torch's function of this name takes the host microseconds for each item of a plain tuple or dict.
    """
    if isinstance(value, kind):
        return change(value)
    if type(value) not in (tuple, list, dict):
        return tree_map(lambda leaf: _changed(kind, change, leaf), value)
    changed = []
    for item in value.values() if type(value) is dict else value:
        if isinstance(item, kind):
            changed.append(change(item))
        else:
            changed.append(item if type(item) in _LEAVES else tree_map_only(kind, change, item))
    return dict(zip(value, changed, strict=True)) if type(value) is dict else type(value)(changed)


def _changed(kind: Any, change: Callable[[Any], Any], leaf: Any) -> Any:
    """Return what a leaf of torch's pytree becomes, into which its walk does not look."""
    if isinstance(leaf, kind):
        return change(leaf)
    if not _is_opened(type(leaf)) or not any(isinstance(leaf_, kind) for leaf_ in _inner_leaves(leaf)):
        return leaf
    return with_parts(leaf, {key: tree_map_only(kind, change, part) for key, part in parts_of(leaf).items()})


def tree_leaves(value: Any, _above: tuple[int, ...] = ()) -> list[Any]:
    """Return the leaves of a nested value in torch's order, faster than torch, which takes microseconds for each."""
    if type(value) in _LEAVES:
        return [value]
    if type(value) not in (tuple, list, dict):
        leaves = _leaves(value)
        if len(leaves) == 1 and leaves[0] is value:
            return _opened(value, _above)
        return [opened for leaf in leaves for opened in _opened(leaf, _above)]
    leaves = []
    for item in value.values() if type(value) is dict else value:
        if type(item) in _LEAVES:
            leaves.append(item)
        else:
            leaves += tree_leaves(item, _above)
    return leaves


def _opened(leaf: Any, above: tuple[int, ...] = ()) -> list[Any]:
    """Return the leaves of a container that torch's pytree does not know, if it holds a tensor; else itself."""
    inner = _inner_leaves(leaf, above) if _is_opened(type(leaf)) else ()
    return [*inner] if any(isinstance(leaf, Tensor) for leaf in inner) else [leaf]


class _HoldsItselfError(Exception):
    """A container is found among the parts of itself."""


def _inner_leaves(container: Any, above: tuple[int, ...] = ()) -> list[Any]:
    """Return the leaves of the parts of a container; none where it holds itself, which no walk opens."""
    if id(container) in above:
        raise _HoldsItselfError(id(container))
    below = (*above, id(container))
    try:
        return [leaf for part in parts_of(container).values() for leaf in tree_leaves(part, below)]
    except _HoldsItselfError as error:
        if error.args[0] != id(container):
            raise
        return []


def _are_containers(kind: type) -> bool:
    """Return whether objects of a class are containers: of any kind, known to torch's pytree or not."""
    if issubclass(kind, Tensor | nn.Module | type | torch.Size):
        return False
    return issubclass(kind, Mapping | list | tuple | Distribution | Transform) or dataclasses.is_dataclass(kind)


_is_opened: Callable[[Any], bool] = functools.cache(_are_containers)


@dataclasses.dataclass(frozen=True)
class _Form:
    """What `tree_flatten` leaves of a nested value that torch's pytree does not know throughout, besides its leaves."""

    outer: TreeSpec
    inner: tuple[_Form | None, ...]
    """For each leaf of torch's pytree the form of its parts, where they are looked into."""
    keys: tuple[Any, ...] = ()
    container: Any = dataclasses.field(default=None, compare=False)

    @property
    def num_leaves(self) -> int:
        """The number of leaves."""
        return sum(1 if form_ is None else form_.num_leaves for form_ in self.inner)


Path = tuple[Any, ...]
"""The keys of torch's pytree on the way to a leaf."""


def tree_flatten_with_path(
    value: Any, *, is_leaf: Callable[[Any], bool] | None = None
) -> tuple[list[tuple[Path, Any]], Any]:
    """Return the leaves of a nested value with their paths, and the form from which `tree_unflatten` makes it again."""
    flat, outer = _flatten_with_path(value, is_leaf=is_leaf)
    if not any(_is_inside(leaf, is_leaf) for _, leaf in flat):
        return flat, outer
    leaves: list[tuple[Path, Any]] = []
    forms: list[_Form | None] = []
    for path, leaf in flat:
        if not _is_inside(leaf, is_leaf):
            leaves.append((path, leaf))
            forms.append(None)
            continue
        parts = parts_of(leaf)
        inner, form = tree_flatten_with_path([*parts.values()], is_leaf=is_leaf)
        keys = [_key_of(leaf, key) for key in parts]
        leaves += [((*path, keys[way[0].idx], *way[1:]), leaf) for way, leaf in inner]
        known = form if isinstance(form, _Form) else _Form(form, (None,) * len(inner))
        forms.append(dataclasses.replace(known, keys=(type(leaf), *parts), container=leaf))
    return leaves, _Form(outer, tuple(forms))


def _is_inside(leaf: Any, is_leaf: Callable[[Any], bool] | None) -> bool:
    """Return whether a leaf of torch's pytree is a container that is looked into."""
    if not _is_opened(type(leaf)) or (is_leaf is not None and is_leaf(leaf)):
        return False
    return any(isinstance(leaf_, Tensor) for leaf_ in _inner_leaves(leaf))


def _key_of(container: Any, key: Any) -> Any:
    """Return a part's key as torch's pytree writes it in a path."""
    if isinstance(container, Mapping):
        return MappingKey(key)
    return SequenceKey(key) if isinstance(container, list | tuple) else GetAttrKey(key)


def tree_flatten(value: Any, *, is_leaf: Callable[[Any], bool] | None = None) -> tuple[list[Any], Any]:
    """Return the leaves of a nested value, and the form from which `tree_unflatten` makes it again."""
    flat, outer = _flatten(value, is_leaf=is_leaf)
    if not any(_is_inside(leaf, is_leaf) for leaf in flat):
        return flat, outer
    leaves, form = tree_flatten_with_path(value, is_leaf=is_leaf)
    return [leaf for _, leaf in leaves], form


def tree_unflatten(leaves: Iterable[Any], form: Any) -> Any:
    """Return a nested value of the form that `tree_flatten` found, with other leaves."""
    if not isinstance(form, _Form):
        return _unflatten(leaves, form)
    rest = iter(leaves)
    outer = [next(rest) if inner is None else _refilled_container(rest, inner) for inner in form.inner]
    return _unflatten(outer, form.outer)


def _refilled_container(rest: Iterator[Any], form: _Form) -> Any:
    """Return a container with its leaves, the next of `rest`."""
    parts = tree_unflatten([next(rest) for _ in range(form.num_leaves)], dataclasses.replace(form, container=None))
    return with_parts(form.container, dict(zip(form.keys[1:], parts, strict=True)))


def have_same_values(tensor: Tensor, other: Tensor) -> bool:
    """Return whether two tensors have the same shape, dtype and elements, where NaN equals NaN."""
    if tensor.shape != other.shape or tensor.dtype != other.dtype:
        return False
    return torch.equal(tensor, other) or bool(((tensor == other) | ((tensor != tensor) & (other != other))).all())


def tensors_in(value: Any, _above: tuple[int, ...] = ()) -> list[Tensor]:
    """Return the tensors in a nested value, in the order in which `map_tensors` changes them."""
    if isinstance(value, Tensor):
        return [value]
    tensors: list[Tensor] = []
    for leaf in tree_leaves(value):
        if isinstance(leaf, Tensor):
            tensors.append(leaf)
        elif type(leaf) not in _LEAVES:
            tensors += _tensors_of(leaf, _above)
    return tensors


def _tensors_of(leaf: Any, above: tuple[int, ...] = ()) -> list[Tensor]:
    """Return the tensors that a leaf of torch's pytree holds; none where it holds itself."""
    if not (items := _items_of(leaf)):
        return []
    if id(leaf) in above:
        raise _HoldsItselfError(id(leaf))
    below = (*above, id(leaf))
    try:
        return [tensor for item in items.values() for tensor in tensors_in(item, below)]
    except _HoldsItselfError as error:
        if error.args[0] != id(leaf):
            raise
        return []


def map_tensors(value: Any, change: Callable[[Tensor], Any]) -> Any:
    """Return a copy of a nested value with `change` applied to its tensors; what holds none is the same object."""

    if isinstance(value, Tensor):
        return change(value)
    if type(value) is dict:
        return {key: map_tensors(item, change) for key, item in value.items()}
    if type(value) in (tuple, list):
        return type(value)([map_tensors(item, change) for item in value])
    if type(value) in _LEAVES:
        return value

    def leaf(item: Any) -> Any:
        if isinstance(item, Tensor):
            return change(item)
        if not _tensors_of(item):
            return item
        return with_parts(item, {key: map_tensors(child, change) for key, child in _items_of(item).items()})

    return tree_map(leaf, value)


def _items_of(leaf: Any) -> dict[Any, Any]:
    """Return what a leaf of torch's pytree holds by its keys, places or names: an object of a class unknown to it."""
    if _is_opened(type(leaf)) or isinstance(leaf, type | nn.Module):
        return parts_of(leaf)
    attributes: dict[str, Any] = getattr(leaf, "__dict__", {})
    return dict(attributes) if any(map(_holds_tensors, attributes.values())) else {}


def parts_of(value: Any) -> dict[Any, Any]:
    """Return the parts of a list, a tuple, a mapping, a dataclass or a distribution by their places, keys or names; nothing for other
    values."""
    if not _is_opened(type(value)):
        return {}
    if isinstance(value, Mapping):
        return dict(value.items())
    if isinstance(value, Distribution | Transform):
        return {
            name: attribute for name, attribute in vars(value).items() if not isinstance(attribute, _InverseTransform)
        }
    return dict(enumerate(value) if isinstance(value, list | tuple) else _stored_fields(value))


def with_parts(value: Any, parts: Mapping[Any, Any]) -> Any:
    """Return a copy of a container with other parts by the keys of `parts_of`: of the same class, or a plain dict where a mapping
    cannot be written."""
    if isinstance(value, tuple):
        return tuple.__new__(type(value), parts.values())
    if isinstance(value, Mapping) and not hasattr(value, "__setitem__"):
        return dict(parts)
    twin = copy.copy(value)
    for key, part in parts.items():
        if isinstance(value, Mapping | list):
            twin[key] = part
        else:
            object.__setattr__(twin, key, part)  # a dataclass may be frozen
    if isinstance(value, Distribution):
        _set_batch(twin, tensors_in(parts_of(value)), tensors_in([*parts.values()]))
    return twin


def _set_batch(twin: Distribution, tensors: Sequence[Tensor], after: Sequence[Tensor]) -> None:
    """Give a distribution with other numbers of samples in its tensors a batch of as many."""
    batch_shape = twin._batch_shape[:1]
    sizes = [
        other.shape[:1]
        for tensor, other in zip(tensors, after, strict=True)
        if tensor.shape[:1] == batch_shape != other.shape[:1]
    ]
    if batch_shape and sizes:
        twin._batch_shape = sizes[0] + twin._batch_shape[1:]


def _stored_fields(record: Any) -> Iterator[tuple[str, Any]]:
    """Yield the fields that a dataclass stores, with their values; an attribute access could run code of its class, which may raise anything."""
    attributes = getattr(record, "__dict__", {})
    for field in dataclasses.fields(record):
        if field.name in attributes:
            yield field.name, attributes[field.name]
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
        for key, item in _items_of(value).items():
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
