"""What a loss does in a call: the operations that it runs, and the counts that it guards against zero.

A count such as `n.clamp(min=1)` or `max(1, int(n))` has one right meaning: the count n of the whole step, guarded once. So of a
guarded count what travels through a step is n, and the least that it may be; the sum over all ranks and micro-batches is guarded
at its end.

    torch's functions    clamp, maximum, where, n + (n == 0) and their like: which tensor they were given
    numbers of Python    the loss is called once more with another number in the place of one that it reads: if its count is that, it is guarded

A loss that runs other operations than before, as one that a flag or its values let take another branch, is tried again in that step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from samestep.building.loss_result import LEAST, NONE, NUMBER, UNNAMED, VALUES, Loss, LossResult, loss_result
from samestep.building.over_samples import IGNORING, within
from samestep.errors import DataError
from samestep.models.spec import LossNames
from samestep.state.snapshot import preserve_function, preserve_generators

_IN_PLACE = frozenset(("clamp_", "clip_", "clamp_min_"))
_CLAMPS = frozenset(("clamp", "clip", "clamp_min")) | _IN_PLACE
_LARGER = frozenset(("maximum", "max", "where", "masked_fill", "fmax"))
_ONES = frozenset(("ones", "ones_like", "new_ones"))
_FILLED = frozenset(("tensor", "as_tensor", "scalar_tensor", "new_tensor", "full", "full_like", "new_full"))
_READS = frozenset(("item", "__int__", "__float__", "__index__", "__len__", "numel", "__bool__", "size", "__get__"))
_SAME = frozenset(
    ("to", "float", "double", "long", "int", "type", "type_as", "cpu", "detach", "clone", "reshape", "view", "squeeze")
)
_NONE = {"eq": 0, "__eq__": 0, "le": 0, "lt": 1}
"""Comparisons that hold for a count of none, with the number to which it is compared."""
_OF_NONE = _NONE.keys() | {"logical_not", "add"}
_NOTED = _CLAMPS | _LARGER | _ONES | _FILLED | _READS | _SAME | _OF_NONE
_NUMBERS = (int, float)
_LARGEST_GUARD = 1.0
"""Counts of more are not asked for a guard of Python's, since each question is a call of the loss; the trial rejects such a guard."""
_MOST = 4
"""So many of the numbers that a loss reads may stand for its count."""


class LossWatch(TorchFunctionMode):
    """Sees the functions of torch that a loss calls."""

    def __init__(self) -> None:
        super().__init__()
        self.least: dict[str, float] = {}
        """The least that a guarded count of a step may be, by the name of its term or value, as this rank has seen it."""
        self.agreed: dict[str, float] = {}
        """The same, as all ranks have exchanged it."""
        self.pairs: set[Any] = set()
        """The functions that were called, each with the one before it and with a zero or negative number that it was given."""
        self.tried: set[Any] = set()
        """Those of them that were called when the loss was tried."""
        self._last: Any = None
        self._read: set[float] = set()
        self._last_read: float | None = None
        """The number that was read last by int() or item()."""
        self._other: tuple[float, float] | None = None
        """A number, and what stands for it in a call that only shows what follows from it."""
        self._unsteady: set[str] = set()
        """The counts that are no such guard after all."""

    def marked(self, outputs: Any) -> Any:
        """Return the outputs of a forward that has run in this context: a count of Python behind its loss knows how it is guarded."""
        if type(outputs) is not tuple or len(outputs) != 2 or not _is_number(outputs[1]) or self._last_read is None:
            return outputs
        total, count = outputs
        if count != max(self._last_read, 1.0):
            return outputs
        marked = torch.full((), count, device=total.device)
        vars(marked)[LEAST] = torch.full_like(marked, int(self._last_read)), 1.0
        return total, marked

    def agree(self, everyone: Iterable[Mapping[str, float]]) -> None:
        """Note what all ranks have found."""
        for least in everyone:
            self.least |= {name: max(number, self.least.get(name, 0.0)) for name, number in least.items()}
        self.agreed = dict(self.least)

    def least_count(self, names: LossNames) -> float:
        """Return the least that the count of a whole step may be, as all ranks know it; several terms are guarded one by one."""
        terms = names.terms or (UNNAMED,)
        return self.agreed.get(terms[0], 0.0) if len(terms) == 1 else 0.0

    @property
    def is_new(self) -> bool:
        """Whether the loss has run what it had not when it was tried."""
        return not self.pairs <= self.tried

    def result(self, loss: Loss, call: Callable[[], Any], what: str = "the loss") -> LossResult:
        """Return the result of a call of a loss, whose counts are those before they are guarded."""
        self._last = None
        self._read.clear()
        with self:
            returned = call()
        result = loss_result(returned, what)
        marks = {name: vars(count) for name, (_, count) in result.amounts.items()}
        guarded = {name: mark[LEAST] for name, mark in marks.items() if LEAST in mark}
        if self._read and self._other is None:  # else a call within that question
            counts = {name: mark[NUMBER] for name, mark in marks.items() if NUMBER in mark}
            guarded |= self._of_numbers(counts, loss, call)
        for name, (value, least) in guarded.items():
            if self.least.get(name, least) != least or (self.is_new and not _is_guard(result, name, value, least)):
                self._unsteady.add(name)
        guarded = {name: both for name, both in guarded.items() if name not in self._unsteady}
        self.least |= {name: least for name, (_, least) in guarded.items()}
        if not guarded:
            return result
        terms = {name: (pair[0], _before(guarded, name, pair[1])) for name, pair in result.terms.items()}
        values = {name: (pair[0], _before(guarded, f"{VALUES}{name}", pair[1])) for name, pair in result.values.items()}
        return replace(result, terms=terms, values=values, least={name: least for name, (_, least) in guarded.items()})

    def _of_numbers(
        self, counts: dict[str, float], loss: Loss, call: Callable[[], Any]
    ) -> dict[str, tuple[Any, float]]:
        """Return the numbers of Python behind counts that are guarded, each with the least that it may be."""
        guarded: dict[str, tuple[Any, float]] = {}
        known, read, names = {*self.least.values()}, sorted(self._read), set(self.pairs)
        for name, number in counts.items():
            for less in [
                item
                for item in read
                if item < number and (number in known or (self.is_new and number <= _LARGEST_GUARD))
            ][:_MOST]:
                self._other = other = less, math.ceil(number) + 1.0  # which a tensor of integers holds too
                try:
                    with torch.no_grad(), preserve_function(loss), preserve_generators(), within(None), IGNORING, self:
                        returned = call()
                    again = loss_result(returned)
                    if float(again.amounts[name][1]) == other[1]:
                        guarded[name] = less, number
                except Exception:  # of the user's own code, which may not be defined for it
                    continue
                finally:
                    self._other = None
        self.pairs = names
        return guarded

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Call a function, and note it."""
        dim = None  # a zero or a negative number, which may be the dimension of samples
        for item in (*args, *kwargs.values()) if kwargs else args:  # a loop, since each step comes by here
            if (item.__class__ in _NUMBERS and not item) or (item.__class__ is int and item < 0):
                dim = item
        self.pairs.add((self._last, func, dim))
        self._last, name = func, getattr(func, "__name__", "")
        if name == "ctc_loss":
            _check_labels_of_ctc(args, kwargs or {})
        if name in _NOTED:
            operand = args[0].clone() if name in _IN_PLACE else args[0] if args else None
            result = func(*args, **(kwargs or {}))
            self._note(name, operand, args, kwargs or {}, result)
        else:
            result = func(*args, **kwargs) if kwargs else func(*args)
        if name == "any" and self._other is not None and not self._other[0]:
            return torch.ones_like(result)
        return result if self._other is None else _in_place_of(*self._other, result)

    def _note(self, name: str, operand: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        if name in _READS:
            self._read.update((0.0,) if name == "__bool__" else _numbers_in(result))
            self._last_read = float(result) if name in ("item", "__int__") and _is_number(result) else self._last_read
            if isinstance(operand, Tensor) and LEAST in vars(operand):
                self._read.add(vars(operand)[LEAST][0].item())
            return
        if not isinstance(result, Tensor) or result.numel() != 1:
            return
        if name in _SAME and args:
            vars(result).update({key: mark for key, mark in vars(operand).items() if key in (LEAST, NUMBER, NONE)})
        elif name in _OF_NONE:
            _note_none(name, args, result)
        elif name in _CLAMPS:
            low, high = (*args[1:], None, None)[:2]
            low, high = kwargs.get("min", low), kwargs.get("max", high)
            if (least := _number(low)) is not None and high is None:
                vars(result)[LEAST] = operand, least
        elif name in _LARGER:
            operands = [item for item in (*args, *kwargs.values()) if not _is_condition(item)]
            numbers = [number for item in operands if (number := _number(item)) is not None]
            others = [item for item in operands if isinstance(item, Tensor) and _number(item) is None]
            if len(numbers) == len(others) == 1 and others[0].numel() == 1:
                vars(result)[LEAST] = others[0], numbers[0]
        else:
            numbers = [1.0] if name in _ONES else [item for item in (*args[::-1], *kwargs.values()) if _is_number(item)]
            if numbers:
                vars(result)[NUMBER] = float(numbers[0])


def _note_none(name: str, args: tuple[Any, ...], result: Tensor) -> None:
    """Note whether a tensor says that a count is none, or is a count to which that is added."""
    if name == "add":
        for count, none in (args[:2], args[1::-1]):
            if isinstance(none, Tensor) and vars(none).get(NONE) is count:
                vars(result)[LEAST] = count, 1.0
    elif args and (name == "logical_not" or _number(args[-1]) == _NONE[name]):
        vars(result)[NONE] = args[0]


def _check_labels_of_ctc(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Check the labels that torch's CTC loss reads, since its kernels for CPUs check none, and a label outside the classes ends Python.

    Raises:
        DataError: a label is no class.
    """
    names = ("log_probs", "targets", "input_lengths", "target_lengths")
    log_probs, labels, _, lengths = (args[i] if i < len(args) else kwargs.get(name) for i, name in enumerate(names))
    if not isinstance(log_probs, Tensor) or not isinstance(labels, Tensor) or labels.device.type != "cpu":
        return
    if labels.dim() == 2:
        lengths = torch.as_tensor(lengths).reshape(-1, 1)
        labels = labels[torch.arange(labels.shape[1]) < lengths]
    outside = labels[(labels < 0) | (labels >= log_probs.shape[-1])]
    if outside.numel():
        raise DataError(
            "label-out-of-range",
            f"ctc_loss: a label is {int(outside[0])}, and the classes are 0 to {log_probs.shape[-1] - 1}. Use target_lengths that end before "
            "labels that do not count, or remove these labels",
        )


def _before(guarded: dict[str, tuple[Any, float]], name: str, count: Tensor) -> Tensor:
    """Return a count before it is guarded."""
    if name not in guarded:
        return count
    value = guarded[name][0]
    return value.detach().reshape(()) if isinstance(value, Tensor) else torch.full_like(count, value)


def _is_guard(result: LossResult, name: str, value: Any, least: float) -> bool:
    return float(result.amounts[name][1]) == max(value.item() if isinstance(value, Tensor) else value, least)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_condition(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype is torch.bool


def _number(value: Any) -> float | None:
    """Return a number, or that of which a loss has made a tensor; None for other tensors."""
    if isinstance(value, Tensor):
        return vars(value).get(NUMBER)
    return float(value) if _is_number(value) else None


def _numbers_in(result: Any) -> list[float]:
    return [float(item) for item in (result if isinstance(result, torch.Size) else (result,)) if _is_number(item)]


def _in_place_of(number: float, other: float, result: Any) -> Any:
    """Return what a function has found, with another number in the place of one."""
    if (
        isinstance(result, Tensor) and type(result) is not Tensor
    ):  # of logits that are made in chunks, each question is a computation
        return result
    if isinstance(result, torch.Size):
        return torch.Size(int(other) if size == number else size for size in result)
    if _is_number(result):
        return type(result)(other) if result == number else result
    if (
        not isinstance(result, Tensor)
        or result.dim()
        or _is_condition(result)
        or result.is_complex()
        or NUMBER in vars(result)
    ):
        return result
    return torch.full_like(result, other) if float(result) == number else result
