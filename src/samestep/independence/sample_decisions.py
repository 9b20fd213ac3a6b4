"""Whether code acts on a number of all samples, as `if x.max() > 2` or a loop until `error.norm() < 1e-3` does.

A number that follows from floating values of several samples is another one in each part of a batch, and a trial of a few samples
may still meet the same branch. So the forward is traced once more for each look at such a number, with another answer:

    if x.max() > 2: x = x / 2           other operations: the code acts on it
    assert x.max() < 1e4                an exception: a check, on which no result depends
    seen.append(float(x.max()))         the same operations: noted, and nothing more

A bound far from the number, as `x.max() > 1e4` of values near one, asks nothing either: the answer is that of all parts. A look at
whole numbers (`lengths.max()`) mostly concerns padding that is masked, or the experts that `topk` has chosen: that is tried on real
batches, as all other looks are.

A yes or no of all samples (`done.all()`, `moved.any()`, `torch.allclose(z, new)`, `moved.sum() == 0`) mostly ends a loop in which samples that are done stay as
they are. Another sample that is not done lets the loop go on, so that look alone is answered otherwise, and the outputs say what it does:

    z = torch.where(moved, new, z); if not moved.any(): break      the same outputs
    z = new; if torch.allclose(z, old): break                      other ones: the code acts on it
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from samestep.errors import line_of

ValueOfTensor = Callable[[Tensor], Tensor | None]
_aten = torch.ops.aten
_MOST_LOOKS = 8
"""Looks of a forward that are answered otherwise, one forward or two for each."""
_CHANGE = 16
"""By so many times its own size a number is changed, up and down: that of a part of a batch lies in between."""
_ROUNDED = 0.75
"""The power of a dtype's epsilon up to which outputs differ by roundings."""
_SPARE = 1000
"""Values more than twice those of the first forward, after which one with another answer counts as different."""


class _Look(NamedTuple):
    """A look at a number of all samples, or at a yes or no of them."""

    text: str
    """The operation that made it."""
    others: tuple[Any, ...]
    """The answers that other samples may give."""
    is_of_each: bool = False
    """Whether it follows from a yes or no of each sample, so that the forward's outputs must be the same with another answer."""


class _Fact(NamedTuple):
    """What is known of a storage."""

    kind: Literal["number", "answer", "count", "alike"]
    """A number of all samples; a yes or no of them; how many are yes, where none or all are; or an answer that is alike in all parts."""
    text: str = ""
    """The operation that made it."""
    other: Any = None
    """The answer that another sample may change, or what one may add to a count."""


class Decisions:
    """The looks of one forward at numbers of all samples, and what it computed.

    With `other`, the place of a look among them and the index of another answer, that look is given this one.
    """

    def __init__(self, other: tuple[int, int] | None = None, most: float = math.inf) -> None:
        self.looks: list[_Look] = []
        self.computed: list[Any] = []
        """The numbers of all values that the forward has computed, and of its outputs (`value_numbers.py`)."""
        self.outputs: list[Tensor | None] = []
        """The values of the forward's floating outputs, None where they are not known."""
        self._other, self._most = other, most
        self._facts: dict[int, _Fact] = {}
        """What is known of the storages of numbers, and of answers yes or no, of all samples."""

    def follow(
        self,
        func: Any,
        operands: Sequence[tuple[int, Tensor, bool]],
        results: Iterable[tuple[int, Tensor, bool]],
        where: str,
        value_of: ValueOfTensor,
        *,
        asks: bool,
    ) -> None:
        """Follow an operation: its operands, each with its storage and whether it has a row for each sample, and its results, each with
        whether it depends on several samples. `asks` is false for a question that is answered alike in all parts."""
        packet, facts = func.overloadpacket, [self._facts.get(key) for key, _, _ in operands]
        first = {fact.kind: fact for fact in reversed(facts) if fact is not None}
        of_rows = _Fact("number", _decided_by(func, where, "number"))
        sources = (
            fact if fact and fact.kind == "number" else of_rows if in_rows and tensor.is_floating_point() else None
            for fact, (_, tensor, in_rows) in zip(facts, operands, strict=True)
        )
        source = next(filter(None, sources), None)
        answers = [fact for fact, (_, tensor, _) in zip(facts, operands, strict=True) if tensor.dtype is torch.bool]
        is_alike = not asks or (bool(answers) and all(fact and fact.kind == "alike" for fact in answers))
        text, counted = _decided_by(func, where, "answer"), first.get("count")
        for key, result, is_mixed in results:
            fact = None
            if asks and is_mixed and source and not _is_place(func, result):
                fact = source
            elif is_alike:
                fact = _Fact("alike") if result.dtype is torch.bool else None
            elif not is_mixed:
                fact = None
            elif packet is _aten.sum and answers and (added := _open_count(value_of(result), operands[0][1].numel())):
                fact = _Fact("count", text, added)
            elif result.dtype is torch.bool and "answer" in first:
                fact = first["answer"]._replace(other=first["answer"].other != (packet in _OPPOSITES))
            elif packet in _OF_EACH:
                fact = _Fact("answer", text, _OF_EACH[packet])
            elif packet in _COMPARISONS and counted and (value := value_of(result)) is not None and value.numel() == 1:
                fact = _Fact("answer", counted.text, bool(value))
            self._facts.pop(key, None)
            if fact is not None:
                self._facts[key] = fact

    def check_length(self, count: int) -> None:
        """Check the number of values that the forward has computed so far.

        Raises:
            _TooLongError: they are far more than those of the first one.
        """
        if count > self._most:
            raise _TooLongError

    def answer(self, key: int, outcome: Any) -> Any:
        """Return what code is answered that looks at a tensor with this storage."""
        if (fact := self._facts.get(key)) is None or fact.kind == "alike":
            return outcome
        if fact.kind == "number":
            others = [_opposite(outcome)] if _is_answer(outcome) else [_changed(outcome, sign) for sign in (1, -1)]
            return self._answer(_Look(fact.text, tuple(others)), outcome)
        if fact.kind == "count":
            return self._answer(_Look(fact.text, (outcome + fact.other,), is_of_each=True), outcome)
        is_one = _is_answer(outcome) and (isinstance(outcome, bool) or outcome.numel() == 1)
        if is_one and bool(outcome) is fact.other:
            return self._answer(_Look(fact.text, (_opposite(outcome),), is_of_each=True), outcome)
        return outcome

    def answer_about_rows(self, func: Any, outcome: Any, where: str) -> Any:
        """Return what code is answered that compares tensors with a row for each sample."""
        if func.overloadpacket in _OF_EACH and outcome is _OF_EACH[func.overloadpacket]:
            return self._answer(_Look(_decided_by(func, where, "answer"), (not outcome,), is_of_each=True), outcome)
        return outcome

    def _answer(self, look: _Look, outcome: Any) -> Any:
        place = len(self.looks)
        self.looks.append(look._replace(text=look.text + line_of()))
        return look.others[self._other[1]] if self._other is not None and self._other[0] == place else outcome


def act_on(first: Decisions, again: Callable[[Decisions], None]) -> str:
    """Return the operation that computed a number of all samples on which the code acts; empty if none is found.

    `first` is what a forward has noted, and `again` runs the same one.
    """
    most = 2 * len(first.computed) + _SPARE
    for place, look in enumerate(first.looks[:_MOST_LOOKS]):
        for index in range(len(look.others)):
            other = Decisions((place, index), most)
            with suppress(Exception):  # of the user's own code: a check, which ends the forward
                _run(again, other)
                is_other = (
                    _are_other(first.outputs, other.outputs) if look.is_of_each else other.computed != first.computed
                )
                if is_other and _repeats(first, again):
                    return look.text
    return ""


def _are_other(first: list[Tensor | None], second: list[Tensor | None]) -> bool:
    """Return whether outputs are other numbers, by more than roundings; false where they cannot be compared."""
    for output, other in zip(first, second, strict=True) if len(first) == len(second) else ():
        if output is None or other is None or output.shape != other.shape or not bool(other.isfinite().all()):
            return False
        allowed = (
            torch.finfo(output.dtype).eps ** _ROUNDED * max(float(output.abs().max()), 1e-6) if output.numel() else 0.0
        )
        if output.numel() and float((output - other).abs().max()) > allowed:
            return True
    return False


def _run(again: Callable[[Decisions], None], other: Decisions) -> None:
    """Run the forward; what is too long has run other operations."""
    with suppress(_TooLongError):
        again(other)


def _repeats(first: Decisions, again: Callable[[Decisions], None]) -> bool:
    """Return whether the forward runs the same operations where it is answered alike."""
    again(same := Decisions())
    return same.computed == first.computed


def asks_of_parts(func: Any, args: tuple[Any, ...], value_of: ValueOfTensor) -> bool:
    """Return whether a comparison may be answered otherwise in a part of a batch; true of all other operations.

    `isfinite` and `isnan` are made of comparisons with infinity and of a number with itself, and a bound may be far from the number.
    """
    if func.overloadpacket in (_aten.isnan, _aten.isinf):
        return False
    if func.overloadpacket not in _COMPARISONS:
        return True
    number, other = (value_of(side) if isinstance(side, Tensor) else side for side in args[:2])
    if args[0] is args[1] or (isinstance(other, float) and not math.isfinite(other)):
        return False
    if number is None or other is None:
        return True
    answers = [func(_changed(number, sign), other) for sign in (0, 1, -1)]
    return not all(bool((answer == answers[0]).all()) for answer in answers)


def _decided_by(func: Any, where: str, what: str) -> str:
    """Return what to say of code that acts on a number, or an answer, for all samples."""
    return f"{where} by {func.overloadpacket.__name__}, and its code acts on the {what} for all of them"


def _is_place(func: Any, result: Tensor) -> bool:
    """Return whether a result names places, as the experts that `topk` chooses, and is no number that was rounded."""
    is_whole = not (result.is_floating_point() or result.is_complex() or result.dtype is torch.bool)
    return is_whole and func.overloadpacket is not _aten._to_copy


def _is_answer(outcome: Any) -> bool:
    """Return whether what code has asked for is a yes or no."""
    return isinstance(outcome, bool) or (isinstance(outcome, Tensor) and outcome.dtype is torch.bool)


def _opposite(answer: Any) -> Any:
    return not answer if isinstance(answer, bool) else ~answer


def _open_count(value: Tensor | None, of: int) -> int:
    """Return what another sample may add to the number of those that are yes, or no where none is left: 0 where some are either."""
    if value is None or value.numel() != 1:
        return 0
    return {0: 1, of: -1}.get(int(value), 0)


def _changed(number: Any, sign: int) -> Any:
    """Return a number, or the numbers of a tensor, changed up or down."""
    is_whole = isinstance(number, int) or (isinstance(number, Tensor) and not number.dtype.is_floating_point)
    return number + sign * (abs(number) + 1 if is_whole else _CHANGE * abs(number))


_OF_EACH = {_aten.all: True, _aten.any: False, _aten.allclose: True, _aten.equal: True}
"""Operations that answer yes or no for all samples, each with the answer that one further sample may change."""
_OPPOSITES = (_aten.logical_not, _aten.bitwise_not)
_COMPARISONS = (_aten.gt, _aten.lt, _aten.ge, _aten.le, _aten.eq, _aten.ne)


class _TooLongError(BaseException):
    """A forward runs far more operations with another answer: no exception that the user's code would catch."""
