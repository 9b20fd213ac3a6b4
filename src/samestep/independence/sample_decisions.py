"""Whether code acts on a number of all samples, as `if x.max() > 2` or a loop until `error.norm() < 1e-3` does.

A number that follows from floating values of several samples is another one in each part of a batch, and a trial of a few samples
may still meet the same branch. So the forward is traced once more for each look at such a number, with another answer:

    if x.max() > 2: x = x / 2           other operations: the code acts on it
    assert x.max() < 1e4                an exception: a check, on which no result depends
    seen.append(float(x.max()))         the same operations: noted, and nothing more

A bound far from the number, as `x.max() > 1e4` of values near one, asks nothing either: the answer is that of all parts. A look at
whole numbers, or at a yes or no of each sample (`lengths.max()`, `done.all()`, `torch.isnan(x).any()`), mostly concerns padding that
is masked, samples that are done, or the experts that `topk` has chosen: that is tried on real batches, as all other looks are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from samestep.trees import tree_flatten

_aten = torch.ops.aten
_MOST_LOOKS = 8
"""Looks of a forward that are answered otherwise, one forward or two for each."""
_CHANGE = 16
"""By so many times its own size a number is changed, up and down: that of a part of a batch lies in between."""
_SPARE = 1000
"""Operations more than twice those of the first forward, after which one with another answer counts as different."""


class Decisions:
    """The looks of one forward at numbers of all samples, and the operations that it ran.

    With `other`, the place of a look among them and a sign, that look is given another answer.
    """

    def __init__(self, other: tuple[int, int] | None = None, most: float = math.inf) -> None:
        self.looks: list[tuple[str, bool]] = []
        """The operation that made each number, as text, and whether code was told yes or no."""
        self.ran: list[Any] = []
        self._other, self._most = other, most
        self._numbers: dict[int, int] = {}
        self._of_all: dict[int, str] = {}
        """The storages of numbers of all samples, with the operation that made them."""

    def follow(
        self, given: Iterable[tuple[int, Tensor, bool]], results: Iterable[tuple[int, bool]], text: str, *, asks: bool
    ) -> None:
        """Follow an operation: its operands, each with its storage and whether it has a row for each sample, and the storages of its
        results, each with whether it depends on several samples. `asks` is false for a question that is answered alike in all parts."""
        found = [
            self._of_all.get(key) or (text if in_rows and one.is_floating_point() else "")
            for key, one, in_rows in given
        ]
        source = next(filter(None, found), "") if asks else ""
        for key, is_mixed in results:
            if is_mixed and source:
                self._of_all[key] = source
            else:
                self._of_all.pop(key, None)

    def number(self, key: int) -> int:
        """Return the number of a storage, by the order in which storages were first seen."""
        return self._numbers.setdefault(key, len(self._numbers))

    def run(
        self, func: Any, args: Any, kwargs: dict[str, Any], results: list[Tensor], key: Callable[[Tensor], int]
    ) -> None:
        """Note an operation, with its operands, the numbers that it is given, and its results.

        Raises:
            _TooLongError: the forward runs far more operations than the first one.
        """
        leaves = tree_flatten((args, kwargs, results))[0]
        noted = ((one.shape, self.number(key(one))) if isinstance(one, Tensor) else repr(one) for one in leaves)
        self.ran.append((str(func), *noted))
        if len(self.ran) > self._most:
            raise _TooLongError

    def answer(self, key: int, outcome: Any) -> Any:
        """Return what code is answered that looks at a tensor with this storage."""
        if not (text := self._of_all.get(key, "")):
            return outcome
        place = len(self.looks)
        self.looks.append((text, isinstance(outcome, bool)))
        if self._other is None or self._other[0] != place:
            return outcome
        if isinstance(outcome, bool):
            return not outcome
        if isinstance(outcome, Tensor) and outcome.dtype is torch.bool:
            return ~outcome
        return _changed(outcome, self._other[1])


def act_on(first: Decisions, again: Callable[[Decisions], None]) -> str:
    """Return the operation that computed a number of all samples on which the code acts; empty if none is found.

    `first` is what a forward has noted, and `again` runs the same one.
    """
    most = 2 * len(first.ran) + _SPARE
    for place, (text, is_yes_or_no) in enumerate(first.looks[:_MOST_LOOKS]):
        for sign in (1,) if is_yes_or_no else (1, -1):
            other = Decisions((place, sign), most)
            with suppress(Exception):  # of the user's own code: a check, which ends the forward
                _run(again, other)
                if other.ran != first.ran and _repeats(first, again):
                    return text
    return ""


def _run(again: Callable[[Decisions], None], other: Decisions) -> None:
    """Run the forward; what is too long has run other operations."""
    with suppress(_TooLongError):
        again(other)


def _repeats(first: Decisions, again: Callable[[Decisions], None]) -> bool:
    """Return whether the forward runs the same operations where it is answered alike."""
    again(same := Decisions())
    return same.ran == first.ran


def asks_of_parts(func: Any, args: tuple[Any, ...], value_of: Callable[[Tensor], Tensor | None]) -> bool:
    """Return whether a comparison may be answered otherwise in a part of a batch; true of all other operations.

    `isfinite` and `isnan` are made of comparisons with infinity and of a number with itself, and a bound may be far from the number.
    """
    if func.overloadpacket in (_aten.isnan, _aten.isinf):
        return False
    if func.overloadpacket not in _COMPARISONS:
        return True
    one, other = (value_of(side) if isinstance(side, Tensor) else side for side in args[:2])
    if args[0] is args[1] or (isinstance(other, float) and not math.isfinite(other)):
        return False
    if one is None or other is None:
        return True
    answers = [func(_changed(one, sign), other) for sign in (0, 1, -1)]
    return not all(bool((answer == answers[0]).all()) for answer in answers)


def _changed(number: Any, sign: int) -> Any:
    """Return a number, or the numbers of a tensor, changed up or down."""
    return number + sign * (abs(number) + 1 if isinstance(number, int) else _CHANGE * abs(number))


_COMPARISONS = (_aten.gt, _aten.lt, _aten.ge, _aten.le, _aten.eq, _aten.ne)


class _TooLongError(BaseException):
    """A forward runs far more operations with another answer: no exception that the user's code would catch."""
