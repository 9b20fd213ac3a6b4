"""What a forward keeps: buffers, weights and attributes of modules that it writes and a later forward may read.

A step of one device runs the forward once, on the whole batch. A layout runs it on a part of the samples, or several
times, so whatever a forward writes may differ. The trace compares the modules before and after, and looks at every
operation that writes in place. Where anything has changed, the forward is traced three times more from the same start:

    A   on n samples         what does it write, and does that depend on the samples?
    B   on n samples again   what does it write again, and what does it read of what A has written?
    C   on 2n samples        which numbers depend on how many samples there are?

Dependence is carried along the operations: a storage depends on what those depended on that it was computed from.

    written by A alone, not from samples             a cache (rotary tables, masks): no state
    replaced by B, and not read before               a note of the last forward (activations, statistics): no state
    written by B again, or from samples and read     state

Afterwards the modules are as they were: no tensor of the meta device stays in a cache, and the first real forward makes
its own.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from samestep.errors import ModelError
from samestep.models.analysis import StateSpec
from samestep.models.spec import ModelSpec
from samestep.tracing.forward import (
    ForwardTracer,
    NeedsValuesError,
    ValueOf,
    address,
    operands,
    tensors_in,
    watch_forward,
)

SAMPLES = -1
"""The label of what depends on the values of the samples; other labels are addresses of storages."""
_DEPTH = 5
_LARGEST_COPY = 2**24
_LARGEST = 4096
"""Containers of more items are compared by their length alone."""
_UNCHANGING = (type, FunctionType, BuiltinFunctionType, MethodType, ModuleType, nn.Module, torch.dtype, torch.device)

Slot = tuple[str, str]
"""The path of a module, and the name of one of its attributes, buffers or parameters."""


# -- the attributes of modules ---------------------------------------------------------------------


@dataclass(slots=True)
class _Value:
    """The content of one attribute: its numbers and structure, and the tensors in it."""

    skeleton: Any
    tensors: list[Tensor]


_HOOKS = ("_forward", "_backward", "_state_dict", "_load_state", "_is_full")
"""Beginnings of the names of a module's attributes that hold hooks."""


class Snapshot:
    """The attributes, buffers and parameters of all modules at one moment."""

    def __init__(self, module: nn.Module) -> None:
        self._undo: list[tuple[Any, Any]] = []
        """Each mutable container with a copy of its items."""
        self._seen: dict[int, Any] = {}
        self._kept: list[Any] = []  # so that no id is given to another object
        self.values: dict[Slot, _Value] = {}
        for path, part in module.named_modules():
            self._undo.append((vars(part), dict(vars(part))))
            for name, value in vars(part).items():
                if name in ("_parameters", "_buffers", "_modules"):
                    self._undo.append((value, dict(value)))
                    self.values |= {(path, key): self._value(item) for key, item in value.items()}
                elif name.startswith(_HOOKS):
                    # A forward that installs hooks once notes that in an attribute: both go back, or hooks come twice.
                    self._undo += [(value, dict(value))] if isinstance(value, dict) else []
                else:
                    self.values[path, name] = self._value(value)
            for kind in type(part).__mro__:
                if not kind.__module__.startswith(("torch", "transformers", "builtins", "abc", "typing")):
                    for name, value in vars(kind).items():
                        if isinstance(value, int | float | Tensor | list | deque | dict) and not name.startswith("__"):
                            self.values[path, f"{kind.__name__}.{name}"] = self._value(value)

    def restore(self) -> None:
        """Set every module and container to what it held."""
        for held, items in self._undo:
            if isinstance(held, dict):
                if len(held) != len(items) or any(held.get(key, self) is not item for key, item in items.items()):
                    held.clear()
                    held.update(items)
            elif isinstance(held, set):
                held.intersection_update(items)
                held.update(items)
            elif len(held) != len(items) or any(a is not b for a, b in zip(held, items, strict=True)):
                held.clear()
                held.extend(items)

    def _value(self, value: Any) -> _Value:
        tensors: list[Tensor] = []
        return _Value(self._skeleton(value, tensors, _DEPTH), tensors)

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
            return (value.shape, value.tobytes() if value.size <= _LARGEST else None)
        if isinstance(value, torch.Generator):
            return value.get_state().numpy().tobytes()
        if isinstance(value, random.Random):
            return value.getstate()
        if isinstance(value, np.random.Generator):
            return repr(value.bit_generator.state)
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
        fields = value if isinstance(value, dict) else getattr(value, "__dict__", None)
        if not isinstance(fields, dict):
            return type(value).__name__
        self._undo.append((fields, dict(fields)))
        if len(fields) > _LARGEST:
            return len(fields)
        return {repr(key): self._skeleton(item, tensors, depth - 1) for key, item in list(fields.items())}


@contextmanager
def preserved(module: nn.Module) -> Iterator[None]:
    """Restore all modules after what runs inside, so that nothing of a trace stays in them."""
    before = Snapshot(module)
    try:
        yield
    finally:
        before.restore()


@contextmanager
def preserved_function(function: Any) -> Iterator[None]:
    """Restore what a function holds after calls inside: itself a module, a method, a partial, or values around it.

    Weights are taken as read alone; other tensors that it holds are copied before, and set to their values afterwards.
    """
    holder = nn.Module()
    for index, value in enumerate(_held_by(function)):
        if isinstance(value, nn.Module):
            holder.add_module(str(index), value)
        else:
            holder.__dict__[f"held_{index}"] = value
    before = Snapshot(holder)
    tensors = [t for value in before.values.values() for t in value.tensors if not isinstance(t, nn.Parameter)]
    copies = [(tensor, tensor._version, tensor.clone()) for tensor in tensors if tensor.numel() <= _LARGEST_COPY]
    try:
        yield
    finally:
        before.restore()
        with torch.no_grad():
            for tensor, version, copy in copies:
                if tensor._version != version:
                    tensor.copy_(copy)


def _held_by(function: Any) -> Iterator[Any]:
    """Yield a function that is an object, and the objects that a partial, a method or a closure refers to."""
    if isinstance(function, partial):
        yield from _held_by(function.func)
        yield from (*function.args, *function.keywords.values())
    elif isinstance(function, MethodType):
        yield function.__self__
    elif isinstance(function, FunctionType):
        for cell in function.__closure__ or ():
            with suppress(ValueError):  # an empty cell
                inner = cell.cell_contents
                yield from _held_by(inner) if isinstance(inner, FunctionType | MethodType | partial) else (inner,)
    else:
        yield function


# -- operations that write -------------------------------------------------------------------------


def _written_by(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """Return the tensors into which an operation writes."""
    if not func._schema.is_mutable:
        return []
    found = []
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = args[index] if index < len(args) else kwargs.get(argument.name)
            found += operands(given)
    return found


def _counts_tokens(func: Any, args: tuple[Any, ...]) -> bool:
    """Return whether it is a lookup whose gradient is divided by how often the micro-batch has a token."""
    return func in (torch.ops.aten.embedding.default, torch.ops.aten._embedding_bag.default) and args[3:4] == (True,)


class _WriteRecorder(TorchDispatchMode):
    """Records the storages that operations write into."""

    def __init__(self) -> None:
        super().__init__()
        self.written: set[int] = set()
        self.counts_tokens = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.written.update(map(address, _written_by(func, args, kwargs or {})))
        self.counts_tokens |= _counts_tokens(func, args)
        return func(*args, **(kwargs or {}))


@dataclass(slots=True)
class Changes:
    """Whether a trace has shown anything that a forward may keep."""

    found: bool = False


@contextmanager
def record_changes(module: nn.Module) -> Iterator[Changes]:
    """Record whether a forward inside changes its modules or writes into their tensors; restore them afterwards."""
    changes, before = Changes(), Snapshot(module)
    try:
        with _WriteRecorder() as recorder:
            yield changes
        after = Snapshot(module)
        held = {address(tensor) for value in after.values.values() for tensor in value.tensors}
        changes.found = bool(held & recorder.written) or recorder.counts_tokens or bool(_changed(before, after))
    finally:
        before.restore()


def _changed(before: Snapshot, after: Snapshot) -> set[Slot]:
    """Return the slots whose numbers, structure or tensors differ."""
    none = _Value(None, [])
    slots = before.values.keys() | after.values.keys()
    pairs = ((slot, before.values.get(slot, none), after.values.get(slot, none)) for slot in slots)
    return {slot for slot, old, new in pairs if old.skeleton != new.skeleton or _ids(old) != _ids(new)}


def _ids(value: _Value) -> list[int]:
    return [id(tensor) for tensor in value.tensors]


# -- dependence ------------------------------------------------------------------------------------

_SHAPES_ALONE = (
    torch.ops.aten.zeros_like,
    torch.ops.aten.ones_like,
    torch.ops.aten.full_like,
    torch.ops.aten.empty_like,
    torch.ops.aten.new_zeros,
    torch.ops.aten.new_ones,
    torch.ops.aten.new_full,
    torch.ops.aten.new_empty,
    torch.ops.aten.new_empty_strided,
)
"""Operations whose results depend on the shape of their operand, not on its values."""
_OVERWRITING = (torch.ops.aten.copy_, torch.ops.aten.zero_, torch.ops.aten.fill_)


class _StateTracer(ForwardTracer):
    """A forward tracer that carries, for each storage, the labels of what it was computed from."""

    has_backward = False

    def __init__(self, module: nn.Module, keeps_all: bool) -> None:
        super().__init__(module, lambda region: None, {}, keeps_all=keeps_all)
        self.labels: dict[int, set[int]] = {}
        self.used: set[int] = set()
        """Storages that some operation has read or looked at."""
        self.written: dict[int, set[int]] = {}
        """The labels of what was written into each storage."""
        self.overwritten: set[int] = set()
        """Storages whose first use was to be overwritten as a whole."""
        self.looked_at: set[int] = set()
        """Labels of values that the code has looked at."""
        self.counting: str | None = None
        self._func: Any = None

    def to_meta(self, real: Tensor) -> Tensor:
        """Return a meta tensor for a real one, with its label."""
        found = super().to_meta(real)
        if found is not real:
            self.labels[address(found)] = self.labels.get(address(real), set()) | {address(real)}
            self.used.add(address(real))
        return found

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self._func = func
        if _counts_tokens(func, args):
            self.counting = self.innermost
        given = operands(*args, *(kwargs or {}).values())
        written = _written_by(func, args, kwargs or {})
        keys = {self.key(tensor) for tensor in given}
        for tensor in written:
            is_whole = tensor.numel() == tensor.untyped_storage().nbytes() // max(1, tensor.element_size())
            if self.key(tensor) not in self.used and func.overloadpacket in _OVERWRITING and is_whole:
                self.overwritten.add(self.key(tensor))
        labels = self._labels_of(keys)
        self.used |= keys
        if torch.Tag.data_dependent_output in func.tags:
            self.looked_at |= labels
        outcome = super().__torch_dispatch__(func, types, args, kwargs)
        for tensor in written:
            self.written.setdefault(self.key(tensor), set()).update(labels)
            self.labels.setdefault(self.key(tensor), set()).update(labels)
        return outcome

    def record(self, given: list[Tensor], written: list[Tensor], *cost: Any) -> None:
        """Add an operation, and give its results the labels of its operands."""
        super().record(given, written, *cost)
        keys = {self.key(tensor) for tensor in given}
        self.used |= keys
        if self._func is not None and self._func.overloadpacket in _SHAPES_ALONE:
            return
        labels = self._labels_of(keys)
        for tensor in written:
            if self.key(tensor) not in keys:
                self.labels.setdefault(self.key(tensor), set()).update(labels)

    def given(self, batch: Any) -> Any:
        """Return the batch of the forward, whose tensors are the samples."""
        for tensor in tensors_in(batch):
            self.labels[self.key(tensor)] = {SAMPLES}
        return batch

    def depends(self, tensor: Tensor) -> bool:
        """Return whether a tensor depends on the values of the samples."""
        return SAMPLES in self.labels.get(address(tensor), ())

    def _labels_of(self, keys: set[int]) -> set[int]:
        return keys.union(*(self.labels.get(key, ()) for key in keys))


@dataclass(slots=True)
class _Traced:
    """One traced forward and the modules after it."""

    watch: _StateTracer
    after: Snapshot
    reached: set[int] = field(default_factory=set)
    """Labels of the outputs, and of what the code has looked at."""


def examine(
    module: nn.Module, sample: Any, spec: ModelSpec, containers: tuple[str, ...], num_samples: int, value_of: ValueOf
) -> tuple[StateSpec, ...]:
    """Return what a forward keeps that another forward may read; the modules are unchanged afterwards.

    Raises:
        ModelError: the forward does not run on other samples, or again.
    """

    def run(count: int) -> _Traced:
        watch = _StateTracer(module, keeps_all=bool(spec.varies_at))
        try:
            outputs = watch_forward(module, sample, count, spec.name, containers, watch, value_of)
        except NeedsValuesError:
            raise ModelError(f"{spec.name} cannot be traced again: {watch.reached} looks at a value") from None
        reached = watch._labels_of({address(tensor) for tensor in tensors_in(outputs)}) | watch.looked_at
        return _Traced(watch, Snapshot(module), reached)

    start = Snapshot(module)
    try:
        first = run(num_samples)
        again = run(num_samples)
        start.restore()
        wider = run(2 * num_samples)
    finally:
        start.restore()
    found = [
        *_written_in_place(module, start, first, again),
        *_replaced(start, first, again, wider, bool(spec.varies_at)),
    ]
    if first.watch.counting is not None:
        found.append(StateSpec(owner=first.watch.counting, name="weight", kind="counts"))
    return tuple(state for state in found if not _is_known(module, state, spec))


def _is_known(module: nn.Module, state: StateSpec, spec: ModelSpec) -> bool:
    """Return whether it is a statistic of torch's own norms, which are reproduced by their own rule."""
    return state.owner in spec.coupled_modules and state.name in ("running_mean", "running_var", "num_batches_tracked")


def _written_in_place(module: nn.Module, start: Snapshot, first: _Traced, again: _Traced) -> Iterator[StateSpec]:
    """Yield the tensors that were there at the start and that forwards write into."""
    weights = {address(param) for param in module.parameters()}
    listed: set[int] = set()
    for (owner, name), value in start.values.items():
        for tensor in value.tensors:
            key = address(tensor)
            labels = first.watch.written.get(key, set()) | again.watch.written.get(key, set())
            is_written = key in first.watch.written or key in again.watch.written
            if not is_written or key in listed or key in again.watch.overwritten:
                continue
            listed.add(key)
            if SAMPLES in labels or key in again.watch.written:
                yield StateSpec(
                    owner=owner,
                    name=name,
                    kind="weight" if key in weights else "buffer",
                    of_samples=SAMPLES in labels,
                    is_read=key in (first.reached | again.reached),
                )


def _replaced(start: Snapshot, first: _Traced, again: _Traced, wider: _Traced, looks: bool) -> Iterator[StateSpec]:
    """Yield the attributes that forwards replace, and of which a later forward reads what an earlier one left."""
    none = _Value(None, [])
    for slot in sorted(_changed(start, first.after) | _changed(first.after, again.after)):
        old, new, newer, wide = (seen.values.get(slot, none) for seen in (start, first.after, again.after, wider.after))
        made = [tensor for tensor in new.tensors if id(tensor) not in _ids(old)]
        read = [tensor for tensor in made if address(tensor) in again.watch.used]
        of_samples = any(first.watch.depends(tensor) for tensor in read)
        counts = newer.skeleton != new.skeleton and not (made and not read and _only_tensors(new, newer))
        changes_again = _ids(newer) != _ids(new) or any(address(tensor) in again.watch.written for tensor in read)
        if of_samples or counts or (read and changes_again):
            yield StateSpec(
                owner=slot[0],
                name=slot[1],
                kind="attribute",
                of_samples=of_samples or (counts and (looks or wide.skeleton != new.skeleton)),
                is_read=True,
            )


def _only_tensors(value: _Value, other: _Value) -> bool:
    """Return whether both are flat containers of tensors alone, as a log of activations is."""
    return all(
        isinstance(seen.skeleton, tuple) and len(seen.skeleton) == 1 + len(seen.tensors) for seen in (value, other)
    )
