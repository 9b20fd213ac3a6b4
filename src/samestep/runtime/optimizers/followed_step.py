"""Operations followed on meta tensors: what each tensor of an optimizer's step depends on, as a label.

`update_rule.py` reads the rule of an optimizer from these labels.

The steps that a trial of an optimizer takes: the first ones, and those around every number in its options and code.

A counter is a number that has risen by as much in each of the first steps (by one, or by one for each weight), wherever
the optimizer keeps it: its state, its groups, its attributes, a closure, a variable. It is set forward, so that a rule which changes at step 5,000 does so.

    1 2 3 4      99 100 101 (a constant of the code is 100)      16 32 64 128 ... 16384
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType, SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode

from samestep.building.torch_seams import DispatchMode
from samestep.independence.dimension_maps import FILLS, OVERWRITES, PRODUCTS, is_elementwise, keeps_first_dim
from samestep.runtime.optimizers.stacked_labels import (
    StackedPart,
    label_joined_parts,
    parts_of_result,
    within,
)
from samestep.state.reachable import Variable
from samestep.state.step_code import StepCode, write
from samestep.trees import operands


class UpdateLabel(NamedTuple):
    """The elements and numbers on which a tensor depends."""

    beside: str | None = None
    """The weight beside whose elements its own lie, each depending on the one at its place."""
    entered: frozenset[str] = frozenset()
    """Weights of which other elements, or all, entered."""
    is_uniform: bool = True
    """Whether its elements do not depend on their place, for a tensor that depends on no weight."""

    @property
    def weights(self) -> frozenset[str]:
        """All weights on which the tensor depends."""
        return self.entered | ({self.beside} if self.beside is not None else frozenset())


Entry = tuple[str, tuple[Any, ...], tuple[UpdateLabel, ...]]
_NOT_BY_ELEMENT = ("_foreach_norm", "_foreach_max")


class _Facts(NamedTuple):
    """The facts about an operation that its schema and the table of operations (`dimension_maps.py`) state."""

    name: str
    pointwise: bool
    draws: bool
    fills: bool
    """Whether it gives its result equal elements, or uninitialised ones."""
    overwrites: bool
    """Whether what its target was does not matter."""
    writes: tuple[int, ...]
    """Positions of the arguments that it writes."""
    writes_named: tuple[str, ...]


@functools.cache
def _facts_of(func: Any) -> _Facts:
    name = func._schema.name.split("::")[1]
    packet = getattr(torch.ops.aten, name.removeprefix("_foreach_"), func.overloadpacket)  # for each tensor of a list
    draws = torch.Tag.nondeterministic_seeded in func.tags
    pointwise = (is_elementwise(func) and not draws) or (
        name.startswith(("_foreach_", "_fused_")) and not name.startswith(_NOT_BY_ELEMENT)
    )
    written = [
        (i, a) for i, a in enumerate(func._schema.arguments) if a.alias_info is not None and a.alias_info.is_write
    ]
    return _Facts(
        name,
        pointwise,
        draws,
        packet in FILLS,
        packet in OVERWRITES,
        tuple(i for i, argument in written if not argument.kwarg_only),
        tuple(argument.name for _, argument in written),
    )


_KEEPS_FORM: dict[Any, bool] = {}
"""Whether an operation element by element gives a tensor of the shape and dtype of its operands, as arithmetic does and comparisons do not."""


def _shortcut(facts: _Facts, func: Any, args: Any, kwargs: Any, tensors: list[Tensor]) -> Any:
    """Run an operation; of arithmetic without values, return only where its result would be, in a tenth of the time."""
    if func.overloadpacket in PRODUCTS and all(tensor.is_meta for tensor in tensors):
        left, right = args[-2:]
        if right.dim() > 1 and left.dtype == right.dtype and left.shape[-1] == right.shape[-2]:
            return left.new_empty(*left.shape[:-1], right.shape[-1])
    if not facts.pointwise or not args:
        return func(*args, **kwargs)
    if facts.name.endswith("_") and facts.writes == (0,):
        targets = operands(args[0])
        if targets and all(target.is_meta for target in targets):
            return args[0] if isinstance(args[0], Tensor) else None
    like = next((tensor for tensor in tensors if tensor.dim()), None)
    if like is None or not like.is_floating_point() or kwargs.keys() - {"alpha", "value"}:
        return func(*args, **kwargs)
    if any(t.dim() and not (t.is_meta and t.shape == like.shape and t.dtype == like.dtype) for t in tensors):
        return func(*args, **kwargs)
    if _KEEPS_FORM.get(func, False) and like.is_contiguous():
        return torch.empty_like(like)
    result = func(*args, **kwargs)
    is_one = isinstance(result, Tensor) and result.shape == like.shape and result.dtype == like.dtype
    _KEEPS_FORM.setdefault(func, is_one and not facts.writes)
    return result


def _is_masked(args: Any) -> bool:
    """Return whether an assignment by index is one by a mask of the same shape, of one number: element by element."""
    indices = [index for index in args[1] if index is not None]
    is_mask = len(args[1]) == len(indices) == 1 and indices[0].dtype == torch.bool and indices[0].shape == args[0].shape
    return is_mask and args[2].numel() == 1


class ReadsNumbersError(RuntimeError):
    """The code reads a number of its data."""


class FollowedStep(DispatchMode):
    """Labels every tensor, and lists the operations."""

    def __init__(self) -> None:
        super().__init__()
        self._labels: dict[int, tuple[StorageWeakRef, UpdateLabel | list[StackedPart]]] = {}
        self.entries: list[Entry] = []
        self.where: dict[str, str] = {}
        """The first operation in which a weight's elements, or other weights, entered its own."""
        self.draws = ""

    def mark(self, tensor: Tensor, label: UpdateLabel | list[StackedPart]) -> None:
        """Label a tensor's memory, or each part of it."""
        weak = StorageWeakRef(tensor.untyped_storage())
        self._labels[weak.cdata] = (weak, label)

    def forget_the_dead(self) -> None:
        """Drop the labels of memory that nobody holds."""
        self._labels = {key: kept for key, kept in self._labels.items() if not kept[0].expired()}

    def label(self, tensor: Tensor) -> UpdateLabel:
        """Return what a tensor depends on; a view of a part or in another order is not aligned with the weight."""
        storage = tensor.untyped_storage()
        kept = self._labels.get(storage._cdata)
        if kept is None:
            return UpdateLabel(is_uniform=tensor.numel() == 1)
        if isinstance(kept[1], list):
            part = within(tensor, kept[1])
            if part is None:
                return UpdateLabel(None, frozenset().union(*(one.label.weights for one in kept[1])), False)
            label, covers = part.label, tensor.numel() == part.stop - part.start
        else:
            label, covers = kept[1], tensor.numel() * tensor.element_size() == storage.nbytes()
        covers = covers and tensor.is_contiguous()
        return label if covers or label.beside is None else UpdateLabel(None, label.weights, False)

    def _parts(self, tensor: Tensor) -> list[StackedPart] | None:
        """Return the parts of a tensor's memory, if its elements belong to several."""
        kept = self._labels.get(tensor.untyped_storage()._cdata)
        if kept is None or not isinstance(kept[1], list):
            return None
        return kept[1] if within(tensor, kept[1]) is None or len(kept[1]) == 1 else None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation, and label what it writes."""
        kwargs = kwargs or {}
        facts = _facts_of(func)
        values = [*args, *kwargs.values()]
        tensors = operands(*values)
        before = {id(tensor): self.label(tensor) for tensor in tensors}
        if facts.name == "_local_scalar_dense" and (before[id(args[0])].weights or args[0].is_meta):
            raise ReadsNumbersError("it reads numbers of weights and gradients")
        if facts.draws and not self.draws:
            self.draws = facts.name
        if facts.name.startswith("index_put") and _is_masked(args):
            self._note(facts.name, values, tensors, before)
            for target in (args[0],) if facts.name.endswith("_") else ():
                self._write(facts._replace(pointwise=True), target, [(t, before[id(t)]) for t in tensors])
                return target
        known = {tensor.untyped_storage()._cdata for tensor in tensors}
        keeps = facts.pointwise or facts.fills or keeps_first_dim(SimpleNamespace(func=func, args=args, kwargs=kwargs))
        stacked = {id(t): parts for t in tensors if (parts := self._parts(t)) is not None} if keeps else {}
        result = _shortcut(facts, func, args, kwargs, tensors)
        written = [args[i] for i in facts.writes if i < len(args)] + [
            kwargs[k] for k in facts.writes_named if k in kwargs
        ]
        made = [t for t in operands(result) if t.untyped_storage()._cdata not in known]
        if not written and not made:
            return result  # a view: its memory is labelled
        self._note(facts.name, values, tensors, before)
        if (parts := label_joined_parts(facts.name, args, kwargs, [before[id(t)] for t in tensors])) is not None:
            self.mark(result, parts)
            return result
        for row in _rows_of(values, written, result, made):
            read = [(tensor, before[id(tensor)]) for tensor in row.read]
            for target in row.written:
                self._write(facts, target, read, stacked)
        return result

    def _note(self, name: str, values: list[Any], tensors: list[Tensor], before: Mapping[int, UpdateLabel]) -> None:
        numbers = tuple(v for v in values if type(v) in (int, float))
        numbers += tuple(x for v in values if isinstance(v, list | tuple) for x in v if type(x) is float)
        self.entries.append((name, numbers, tuple(before[id(tensor)] for tensor in tensors)))

    def _write(
        self,
        facts: _Facts,
        target: Tensor,
        read: list[tuple[Tensor, UpdateLabel]],
        stacked: Mapping[int, list[StackedPart]] = MappingProxyType({}),
    ) -> None:
        """Label what an operation has written, from the labels of what it read, and of the parts that it does not mix."""
        name = facts.name
        if facts.overwrites:
            read = [(t, label) for t, label in read if t is not target]
        if facts.fills:
            read = [(t, label) for t, label in read if t.numel() == 1 and name.startswith("fill")]
        storage = target.untyped_storage()
        kept = self._labels.get(storage._cdata)
        covers = target.numel() * target.element_size() == storage.nbytes() and target.is_contiguous()

        def label_of(inputs: list[tuple[Tensor, UpdateLabel]], shape: Sequence[int]) -> UpdateLabel:
            if facts.pointwise or facts.fills:
                return _beside(inputs, shape)
            entered = frozenset[str]().union(*(label.weights for _, label in inputs))
            return UpdateLabel(None, entered, not entered and math.prod(shape) == 1)

        given = [(tensor, label, stacked.get(id(tensor))) for tensor, label in read]
        parts = parts_of_result(target, given, label_of) if covers else None
        if parts is not None:
            for part in parts:
                self._enter(part.label, name)
            self.mark(target, parts)
            return
        label = label_of(read, target.shape)
        if kept is not None and not covers:
            old = kept[1]
            if isinstance(old, list):
                self._write_part(target, old, label, name)
                return
            label = UpdateLabel(old.beside, old.entered | label.weights | old.weights, False)
        self._enter(label, name)
        self.mark(target, label)

    def _write_part(self, target: Tensor, parts: list[StackedPart], label: UpdateLabel, name: str) -> None:
        """Label the part of a memory that an operation has written, or all parts to which its target belongs."""
        mine = within(target, parts)
        is_whole = mine is not None and target.numel() == mine.stop - mine.start and target.is_contiguous()
        changed = []
        for part in parts:
            if mine is not None and part is not mine:
                changed.append(part)
                continue
            old = part.label
            new = label if is_whole else UpdateLabel(old.beside, old.entered | label.weights | old.weights, False)
            self._enter(new, name)
            changed.append(part._replace(label=new))
        self.mark(target, changed)

    def _enter(self, label: UpdateLabel, name: str) -> None:
        if label.entered:
            for weight in label.weights:
                self.where.setdefault(weight, name)


class CountsOnHost(TorchFunctionMode):
    """Makes counts and rates, tensors without dimensions, on the host: the code may read their values."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function of torch; a tensor of one number is not created on the meta device."""
        kwargs = kwargs or {}
        if func in _MAKING and "device" in kwargs and torch.device(kwargs["device"] or "cpu").type == "meta":
            size = args[0] if args else kwargs.get("size", kwargs.get("data"))
            if (isinstance(size, int | float) and func in _OF_DATA) or (isinstance(size, tuple | list) and not size):
                kwargs = {**kwargs, "device": "cpu"}
        return func(*args, **kwargs)


_OF_DATA = (torch.tensor, torch.as_tensor, torch.scalar_tensor)
_MAKING = (*_OF_DATA, torch.zeros, torch.ones, torch.full, torch.empty)


class _JoinedRow(NamedTuple):
    read: list[Tensor]
    written: list[Tensor]


def _rows_of(values: list[Any], written: list[Any], result: Any, made: list[Tensor]) -> Iterator[_JoinedRow]:
    """Yield what an operation reads and writes; an operation on lists is one for each place in them."""
    lists = [value for value in values if isinstance(value, list | tuple) and value and isinstance(value[0], Tensor)]
    is_list = any(isinstance(value, list | tuple) for value in written) or isinstance(result, list | tuple)
    if lists and is_list and len({len(value) for value in lists}) == 1:
        shared = [value for value in values if isinstance(value, Tensor)]
        outputs = [value for value in written if isinstance(value, list | tuple)] or [result]
        for index in range(len(lists[0])):
            yield _JoinedRow([value[index] for value in lists] + shared, [value[index] for value in outputs])
        return
    yield _JoinedRow(operands(*values), [*operands(*written), *made])


def _beside(inputs: list[tuple[Tensor, UpdateLabel]], shape: Sequence[int]) -> UpdateLabel:
    """Return the label of what an operation makes element by element."""
    entered = frozenset[str]().union(*(label.entered for _, label in inputs))
    besides = {label.beside for tensor, label in inputs if label.beside is not None and tensor.shape == shape}
    broadcast = {label.beside for tensor, label in inputs if label.beside is not None and tensor.shape != shape}
    placed = any(not label.is_uniform and not label.weights for _, label in inputs)
    entered |= {weight for weight in broadcast if weight is not None}
    if len(besides) > 1 or placed:
        entered |= {weight for weight in besides if weight is not None}
    beside = next(iter(besides)) if len(besides) == 1 else None
    return UpdateLabel(beside, entered, not placed and beside is None and not entered)


_PLAIN_STEPS = 4
_LARGEST_COUNT = 10_000
_MOST_COUNTS = 64
_MOST_PLAIN_STEPS = 128
"""Steps that are taken one by one where no counter is to be seen."""
_GRID = [2**power for power in range(3, 15)]
"""Steps at which a threshold shows that is none of the numbers, as 0.06 times one of them."""


def march(code: StepCode, take: Callable[[], None]) -> None:
    """Take the first steps of an optimizer, those around every number among the options and in the code, and some at large."""
    with code.put_back():
        counts = sorted({int(n) for n in code.numbers if n == n // 1 and 2 <= n <= _LARGEST_COUNT})[-_MOST_COUNTS:]
        before = _numbers(code)
        rising: dict[tuple[int, str], float] = {}
        for _ in range(_PLAIN_STEPS):
            take()
            after = _numbers(code)
            risen = {key: now - before[key][1] for key, (_, now) in after.items() if key in before}
            rising = {key: by for key, by in risen.items() if by >= 1 and by == rising.get(key, by) and by == by // 1}
            before = after
        if not rising:
            for _ in range(min(counts[-1] + 1, _MOST_PLAIN_STEPS) - _PLAIN_STEPS if counts else 0):
                take()
            return
        for count, steps in [*((count, 3) for count in counts), *((count, 1) for count in _GRID)]:
            for key, (place, _) in _numbers(code).items():
                if key in rising:
                    start = count - rising[key]
                    write(place, start if isinstance(place.value, Tensor) else type(place.value)(start))
            for _ in range(steps):
                take()


def _numbers(code: StepCode) -> dict[tuple[int, str], tuple[Variable, float]]:
    """Return the numbers that an optimizer keeps, by the dictionary and the key, or the closure's cell, that hold them."""
    own: list[Any] = [vars(code.optimizer)]
    for one in code.optimizers:
        own += [*one.param_groups, *one.state.values()]
    places = [Variable("", held, key, None) for held in own if isinstance(held, dict) for key in held]
    found = {}
    for place in (*places, *code.places):
        value = place.present
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if is_number or (isinstance(value, Tensor) and value.numel() == 1 and not value.is_meta):
            found[id(place.holder), str(place.key)] = (place._replace(value=value), float(value))
    return found
