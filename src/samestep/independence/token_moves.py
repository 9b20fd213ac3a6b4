"""Functions that compute a token from those at a fixed distance: short convolutions along tokens, and shifts of tokens.

A rank of `cp` that has the tokens a to b - 1 needs `left` tokens of the rank before it, and `right` of the one behind:

    conv1d, kernel K, dilation D, P zeros before     left = P, right = D (K - 1) - P
    pad by P before and Q behind                     left = P, right = Q
    cat((first, x[:, :-1]), 1)                       left = 1: x at the token before, `first` at token 0
    y[:, 1:] = x[:, :-1]                             left = 1
    roll(x, 1, 1)                                    left = 1, around the sequence
    x[:, 0] = 0                                      none: the first rank alone does it

What a function returns has at most a row more for each token of its margins, as it has of the whole sequence:

    conv1d with zeros before and behind    T + P rows, of which code keeps the first T
    pad                                    T + P + Q rows, of which code reads T in a row, from each place up to P + Q

A form is found by `form_of` in a trace (`traced_moves.py`), and again by ranks that carry it out (`runtime/axes/context/neighbours.py`).
`Extend` returns an operand with tokens of neighbours in front of and behind its own; on the first rank and on the last one there are
what the code has put there, or around the sequence the tokens of the other end.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from samestep.models.layer_parts import MoveKind

_KINDS: dict[Any, MoveKind] = {
    **dict.fromkeys((torch.conv1d, torch.conv2d), "conv"),
    F.pad: "pad",
    **dict.fromkeys((torch.cat, torch.concat, torch.concatenate), "cat"),
    **dict.fromkeys((torch.roll, Tensor.roll), "roll"),
    Tensor.__setitem__: "write",
}
Edge = Tensor | float
"""What stands in front of the first token of a sequence, or behind the last: rows, or one number."""


class Extend(Protocol):
    """Adds tokens of neighbours to an operand, before and after those of this rank."""

    def __call__(
        self, x: Tensor, dim: int, left: int, right: int, first: Edge | None = None, last: Edge | None = None
    ) -> Tensor:
        """Return the operand with the tokens; `first` and `last` stand at the ends of the sequence, None for those of the other end."""
        ...


class TokenPlace(NamedTuple):
    """The operand with tokens: its number among those of the call, its dimension of tokens, and its first token."""

    operand: int
    dim: int
    start: int = 0


class MoveForm(NamedTuple):
    """A call as a function of tokens at fixed distances."""

    kind: MoveKind
    place: TokenPlace
    left: int
    right: int
    rows: int
    """Rows of the result along its dimension of tokens."""
    last: int
    """Last row of the result at which as many rows begin as there are tokens, of which each belongs to its token."""
    what: tuple[Any, ...]
    """Everything else that says what is computed."""
    given: tuple[Tensor, ...]
    """The operands, that with tokens first."""
    compute: Callable[[Extend], Any]


class _Call(NamedTuple):
    """A call of which one operand has tokens."""

    func: Any
    named: dict[str, Any]
    """Its arguments by their names in `_ARGUMENTS`."""
    place: TokenPlace
    tokens: int
    margin: int
    """Rows that the operand has more than tokens, which neighbours have given before."""
    whole: Tensor
    """The operand with what code has cut off of it."""


_ARGUMENTS: dict[MoveKind, tuple[str, ...]] = {
    "conv": ("input", "weight", "bias", "stride", "padding", "dilation", "groups"),
    "pad": ("input", "pad", "mode", "value"),
    "cat": ("tensors", "dim"),
    "roll": ("input", "shifts", "dims"),
    "write": ("input", "index", "value"),
}


def _named(func: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    return dict(zip(_ARGUMENTS[_KINDS[func]], args, strict=False)) | kwargs


def kind_of(func: Any) -> MoveKind | None:
    """Return the kind of call that a function makes; None for a function of another kind."""
    try:
        return _KINDS.get(func)
    except TypeError:  # not hashable
        return None


class ViewSources:
    """The tensor of which each view has been taken.

    A gradient that enters a view's base goes past the functions between both, as the sum over ranks of `tp`, whose output is a view of
    its input too; the tensor that code has sliced is behind them.
    """

    def __init__(self) -> None:
        self._sources = WeakIdKeyDictionary()

    def note(self, result: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """Note of which tensor the results of a call are views."""
        source = args[0] if args else kwargs.get("input")
        if not isinstance(source, Tensor):
            return
        base = source if source._base is None else source._base
        for output in result if isinstance(result, tuple | list) else (result,):
            if isinstance(output, Tensor) and output is not source and output._base is base:
                self._sources[output] = source, output.requires_grad

    def of(self, view: Tensor) -> Tensor | None:
        """Return the tensor of which a view has been taken.

        It is None where none is known, and for a view that a function has returned: within the function it had no gradient.
        """
        source, had_gradient = self._sources.get(view, (None, False))
        return source if view.requires_grad == had_gradient else None


def form_of(
    func: Any, args: Any, kwargs: Any, place: TokenPlace, tokens: int, sources: ViewSources, margin: int = 0
) -> MoveForm | None:
    """Return a call in this form; None if it is none that a slice of so many tokens allows.

    `margin` is the number of rows that an operand has more than tokens, which neighbours have given before.
    """
    try:
        x = operands_of(func, args, kwargs)[place.operand]
        whole = x if margin else whole_of(x, place, tokens, sources)
        form = _FORMS[_KINDS[func]](_Call(func, _named(func, args, kwargs), place, tokens, margin, whole))
    except (IndexError, KeyError, TypeError, ValueError):  # arguments that its rule does not foresee
        return None
    return form if form is not None and max(form.left, form.right) <= tokens <= form.rows else None


def operands_of(func: Any, args: Any, kwargs: Any) -> Sequence[Tensor]:
    """Return the operands of a call of which one may have tokens."""
    named = _named(func, args, kwargs)
    if "tensors" in named:
        return [*named["tensors"]] if isinstance(named["tensors"], list | tuple) else []
    operands = (named.get("input"), named.get("value"))
    return [operand for operand in operands if isinstance(operand, Tensor)]


# -- the forms -------------------------------------------------------------------------------------


def _conv(call: _Call) -> MoveForm | None:
    func, named, (_, dim, start), tokens, margin, _ = call
    x, weight, bias, num = named["input"], named["weight"], named.get("bias"), 1 if call.func is torch.conv1d else 2
    at = dim - (x.dim() - num)
    stride, dilation, padding = (
        _each(named.get(name, value), num) for name, value in (("stride", 1), ("dilation", 1), ("padding", 0))
    )
    if at < 0 or stride[at] != 1 or start or x.shape[dim] != tokens + margin:
        return None
    sizes = [step * (size - 1) for step, size in zip(dilation, weight.shape[2:], strict=True)]
    reach, before = sizes[at], padding[at]
    behind = before
    if named.get("padding") == "same":
        if any(size % 2 for other, size in enumerate(sizes) if other != at):
            return None
        before, behind, padding = reach // 2, reach - reach // 2, [size // 2 for size in sizes]
    if not reach or before > reach or (margin and before):
        return None
    right = 0 if margin else reach - before
    padding[at] = 0
    groups, extra = named.get("groups", 1), 0 if margin else behind - right

    def compute(extend: Extend) -> Tensor:
        wider = extend(x, dim, before, right, 0.0, 0.0) if before or right else x
        result = func(wider, weight, bias, stride, padding, dilation, groups)
        return _padded(result, dim, extra) if extra else result

    what = tuple(stride), tuple(padding), tuple(dilation), groups, before, behind
    rows = tokens + margin - reach if margin else tokens + extra
    operands = (x, weight, *([] if bias is None else [bias]))
    return MoveForm("conv", call.place, before, right, rows, rows - tokens if margin else 0, what, operands, compute)


def _pad(call: _Call) -> MoveForm | None:
    func, named, (_, dim, start), tokens, margin, whole = call
    x, pad, mode, value = named["input"], [*named["pad"]], named.get("mode", "constant"), named.get("value")
    at = 2 * (x.dim() - 1 - dim)
    if margin or at + 1 >= len(pad) or not (pad[at] or pad[at + 1]):
        return None
    before, behind, cut = *pad[at : at + 2], (start, tokens - start - x.shape[dim])
    if any(cut):  # what code has cut off is a pad by fewer than none, unless others stand in its place
        if mode != "constant" or (cut[0] and before > 0) or (cut[1] and behind > 0):
            return None
        x, before, behind = whole, before - cut[0], behind - cut[1]
    others = [*pad]
    others[at : at + 2] = 0, 0
    left, right = max(before, 0), max(behind, 0)
    rows = tokens + before + behind

    def compute(extend: Extend) -> Tensor:
        padded = func(x, others, mode, value) if any(others) else x
        ends: tuple[Edge | None, Edge | None] = (None, None)  # of a circular pad
        if mode == "constant":
            ends = value or 0.0, value or 0.0
        elif mode != "circular":
            edges = func(x, [*others[:at], left, right, *others[at + 2 :]], mode)
            ends = edges.narrow(dim, 0, left), edges.narrow(dim, left + tokens, right)
        wider = extend(padded, dim, left, right, *ends)
        return _own(wider.narrow(dim, max(-before, 0), rows), rows == tokens)

    return MoveForm("pad", call.place, left, right, rows, rows - tokens, (pad, mode, value, cut), (x,), compute)


def _cat(call: _Call) -> MoveForm | None:
    _, named, (operand, dim, start), tokens, margin, whole = call
    parts = [*named["tensors"]]
    if margin or named.get("dim", 0) % parts[operand].dim() != dim:
        return None
    sizes, first, last = [part.shape[dim] for part in parts], parts[:operand], parts[operand + 1 :]
    before, behind = sum(sizes[:operand]), sum(sizes[operand + 1 :])
    cut, rows = tokens - start - sizes[operand], sum(sizes)
    if (before and start) or (behind and cut) or not (before or behind) or cut < 0:
        return None

    def compute(extend: Extend) -> Tensor:
        ends = (torch.cat(edge, dim) if edge else 0.0 for edge in (first, last))
        wider = extend(whole, dim, before, behind, *ends)
        return _own(wider.narrow(dim, start, rows), rows == tokens)

    what, operands = (before, behind, cut, start), (parts[operand], *first, *last)
    return MoveForm("cat", call.place, before, behind, rows, rows - tokens, what, operands, compute)


def _roll(call: _Call) -> MoveForm | None:
    _, named, (_, dim, start), tokens, margin, _ = call
    x, by, along = named["input"], named["shifts"], named["dims"]
    by, along = (value[0] if isinstance(value, list | tuple) and len(value) == 1 else value for value in (by, along))
    if margin or not isinstance(by, int) or not isinstance(along, int) or along % x.dim() != dim or not by:
        return None
    if start or x.shape[dim] != tokens:
        return None

    def compute(extend: Extend) -> Tensor:
        return _own(extend(x, dim, max(by, 0), max(-by, 0)).narrow(dim, max(-by, 0), tokens), True)

    return MoveForm("roll", call.place, max(by, 0), max(-by, 0), tokens, 0, (by,), (x,), compute)


def _write(call: _Call) -> MoveForm | None:
    _, named, (operand, dim, start), tokens, margin, whole = call
    target, value, rows = named["input"], named["value"], _written_rows(named["input"], named["index"], call)
    if margin or rows is None:
        return None
    if operand == 0:
        return _edge(call, rows)
    cut, before, behind = tokens - start - value.shape[dim], rows.start, tokens - rows.stop
    is_moved = (before and not start and cut == before and not behind) or (
        behind and not before and not cut and start == behind
    )
    if not is_moved or target.dim() != value.dim():
        return None

    def compute(extend: Extend) -> None:
        ends = target.narrow(dim, 0, before).clone(), target.narrow(dim, tokens - behind, behind).clone()
        wider = extend(whole, dim, before, behind, *ends)
        target[(slice(None),) * dim] = wider.narrow(dim, behind, tokens)

    return MoveForm("write", call.place, before, behind, tokens, 0, (before, behind), (value, target), compute)


def _edge(call: _Call, rows: range) -> MoveForm | None:
    """Return the form of a number that is written into the first or the last tokens alone."""
    target, index, value = (call.named[name] for name in _ARGUMENTS["write"])
    is_first = rows.start == 0
    if len(rows) * 2 > call.tokens or isinstance(value, Tensor) or not (is_first or rows.stop == call.tokens):
        return None

    def compute(extend: Extend) -> None:
        ends = extend(target, call.place.dim, 0, 0, 1.0 if is_first else None, None if is_first else 1.0)
        if ends is not target:  # this rank has that end
            call.func(target, index, value)

    return MoveForm("edge", call.place, 0, 0, call.tokens, 0, (is_first, len(rows), repr(value)), (target,), compute)


_FORMS: dict[MoveKind, Callable[..., MoveForm | None]] = {
    "conv": _conv,
    "pad": _pad,
    "cat": _cat,
    "roll": _roll,
    "write": _write,
}


def whole_of(part: Tensor, place: TokenPlace, tokens: int, sources: ViewSources) -> Tensor:
    """Return all tokens of a slice, of which code has cut some off: the rows next to the view in the tensor that was sliced.

    Raises:
        ValueError: it is no view of them.
    """
    dim, start = place.dim, place.start
    if not start and part.shape[dim] == tokens:
        return part
    first = part.storage_offset() - start * part.stride(dim)
    shape = [*part.shape]
    shape[dim] = tokens
    last = first + _reach(shape, part.stride())
    view = part
    while (source := sources.of(view)) is not None:
        begin = source.storage_offset()
        if begin <= first and last <= begin + _reach(source.shape, source.stride()):
            return source.as_strided(shape, part.stride(), first)
        view = source
    raise ValueError("no view of all tokens")


def _reach(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Return the number of elements between the first of a tensor and its last."""
    return sum((size - 1) * step for size, step in zip(shape, strides, strict=True))


def _written_rows(target: Tensor, index: Any, call: _Call) -> range | None:
    """Return the rows that an item is set in along the dimension of tokens, where it is so along this one alone."""
    parts = [*index] if isinstance(index, tuple) else [index]
    if any(part is None or isinstance(part, Tensor | list | bool) for part in parts):
        return None
    if Ellipsis in parts:
        at = parts.index(Ellipsis)
        parts[at : at + 1] = [slice(None)] * (target.dim() - len(parts) + 1)
    ranges = {}
    for dim, (part, size) in enumerate(zip(parts, target.shape, strict=False)):
        rows = range(part % size, part % size + 1) if isinstance(part, int) else range(size)[part]
        if isinstance(part, int) or rows != range(size):
            ranges[dim] = rows
    rows = ranges.get(call.place.dim)
    fits = rows is not None and len(ranges) == 1 and rows.step == 1 and target.shape[call.place.dim] == call.tokens
    return rows if fits else None


def _each(value: Any, num: int) -> list[int]:
    if isinstance(value, str):
        return [0] * num
    return [value] * num if isinstance(value, int) else [*value] * (num if len(value) == 1 else 1)


def _padded(x: Tensor, dim: int, rows: int) -> Tensor:
    return F.pad(x, [*itertools.repeat(0, 2 * (x.dim() - 1 - dim)), 0, rows])


def _own(x: Tensor, is_view: bool) -> Tensor:
    """Return a result, in separate memory where code will read parts of its rows."""
    return x if is_view else x.contiguous()
