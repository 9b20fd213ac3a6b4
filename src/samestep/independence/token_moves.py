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

_CONVS = (torch.conv1d, torch.conv2d)
_KINDS: dict[Any, MoveKind] = {
    **dict.fromkeys(_CONVS, "conv"),
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
    dim: int
    """Dimension of tokens of the result."""
    what: tuple[Any, ...]
    """Everything else that says what is computed."""
    given: tuple[Tensor, ...]
    """The operands, that with tokens first."""
    compute: Callable[[Extend], Any]


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
        form = _FORMS[_KINDS[func]](func, args, kwargs, place, tokens, margin, whole)
    except (IndexError, KeyError, TypeError, ValueError):  # arguments that its rule does not foresee
        return None
    return form if form is not None and max(form.left, form.right) <= tokens <= form.rows else None


def operands_of(func: Any, args: Any, kwargs: Any) -> Sequence[Tensor]:
    """Return the operands of a call of which one may have tokens."""
    kind = _KINDS[func]
    if kind == "cat":
        tensors = kwargs.get("tensors", args[0] if args else ())
        return [*tensors] if isinstance(tensors, list | tuple) else []
    operands = [args[0] if args else kwargs.get("input")]
    if kind == "write":
        operands += [args[2]]
    return [operand for operand in operands if isinstance(operand, Tensor)]


# -- the forms -------------------------------------------------------------------------------------


def _conv(
    func: Any, args: Any, kwargs: Any, place: TokenPlace, tokens: int, margin: int, whole: Tensor
) -> MoveForm | None:
    names = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
    arguments = dict(zip(names, args, strict=False)) | kwargs
    x, weight, num = arguments.pop("input"), arguments.pop("weight"), 1 if func is torch.conv1d else 2
    at = place.dim - (x.dim() - num)
    stride, dilation, padding = (
        _each(arguments.get(name, value), num) for name, value in (("stride", 1), ("dilation", 1), ("padding", 0))
    )
    if at < 0 or stride[at] != 1 or place.start or x.shape[place.dim] != tokens + margin:
        return None
    reach = dilation[at] * (weight.shape[2 + at] - 1)
    if arguments.get("padding") in ("same", "valid"):
        sizes = [step * (size - 1) for step, size in zip(dilation, weight.shape[2:], strict=True)]
        if arguments["padding"] == "same" and any(size % 2 for other, size in enumerate(sizes) if other != at):
            return None
        before = reach // 2 if arguments["padding"] == "same" else 0
        behind = reach - before if arguments["padding"] == "same" else 0
        padding = [size // 2 if arguments["padding"] == "same" else 0 for size in sizes]
    else:
        before = behind = padding[at]
    if not reach or before > reach or (margin and before):
        return None
    right = 0 if margin else reach - before
    padding[at] = 0
    bias, groups = arguments.get("bias"), arguments.get("groups", 1)
    extra = 0 if margin else behind - right

    def compute(extend: Extend) -> Tensor:
        wider = extend(x, place.dim, before, right, 0.0, 0.0) if before or right else x
        result = func(wider, weight, bias, stride, padding, dilation, groups)
        return _padded(result, place.dim, extra) if extra else result

    what = tuple(stride), tuple(padding), tuple(dilation), groups, before, behind
    rows = tokens + margin - reach if margin else tokens + extra
    last = rows - tokens if margin else 0
    operands = (x, weight, *([] if bias is None else [bias]))
    return MoveForm("conv", place, before, right, rows, last, place.dim, what, operands, compute)


def _pad(
    func: Any, args: Any, kwargs: Any, place: TokenPlace, tokens: int, margin: int, whole: Tensor
) -> MoveForm | None:
    arguments = dict(zip(("input", "pad", "mode", "value"), args, strict=False)) | kwargs
    x, pad, mode, value = (
        arguments["input"],
        [*arguments["pad"]],
        arguments.get("mode", "constant"),
        arguments.get("value"),
    )
    at = 2 * (x.dim() - 1 - place.dim)
    if margin or at + 1 >= len(pad) or not (pad[at] or pad[at + 1]):
        return None
    before, behind, cut = *pad[at : at + 2], (place.start, tokens - place.start - x.shape[place.dim])
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
        if mode == "constant":
            ends: tuple[Edge | None, Edge | None] = (value or 0.0, value or 0.0)
        elif mode == "circular":
            ends = None, None
        else:
            edges = func(
                x, [left if other == at else right if other == at + 1 else 0 for other in range(len(pad))], mode
            )
            ends = edges.narrow(place.dim, 0, left), edges.narrow(place.dim, left + tokens, right)
        wider = extend(padded, place.dim, left, right, *ends)
        return _own(wider.narrow(place.dim, max(-before, 0), rows), rows == tokens)

    return MoveForm("pad", place, left, right, rows, rows - tokens, place.dim, (pad, mode, value, cut), (x,), compute)


def _cat(
    func: Any, args: Any, kwargs: Any, place: TokenPlace, tokens: int, margin: int, whole: Tensor
) -> MoveForm | None:
    parts = [*kwargs.get("tensors", args[0] if args else ())]
    x = parts[place.operand]
    if margin or kwargs.get("dim", args[1] if len(args) > 1 else 0) % x.dim() != place.dim:
        return None
    sizes = [part.shape[place.dim] for part in parts]
    before, behind = sum(sizes[: place.operand]), sum(sizes[place.operand + 1 :])
    cut = tokens - place.start - sizes[place.operand]
    if (before and place.start) or (behind and cut) or not (before or behind) or cut < 0:
        return None
    rows = sum(sizes)

    def compute(extend: Extend) -> Tensor:
        first, last = parts[: place.operand], parts[place.operand + 1 :]
        wider = extend(
            whole,
            place.dim,
            before,
            behind,
            torch.cat(first, place.dim) if first else 0.0,
            torch.cat(last, place.dim) if last else 0.0,
        )
        return _own(wider.narrow(place.dim, place.start, rows), rows == tokens)

    what, others = (before, behind, cut, place.start), parts[: place.operand] + parts[place.operand + 1 :]
    return MoveForm("cat", place, before, behind, rows, rows - tokens, place.dim, what, (x, *others), compute)


def _roll(
    func: Any, args: Any, kwargs: Any, place: TokenPlace, tokens: int, margin: int, whole: Tensor
) -> MoveForm | None:
    arguments = dict(zip(("input", "shifts", "dims"), args, strict=False)) | kwargs
    x, by, dim = arguments["input"], arguments["shifts"], arguments["dims"]
    by, dim = (value[0] if isinstance(value, list | tuple) and len(value) == 1 else value for value in (by, dim))
    if margin or not isinstance(by, int) or not isinstance(dim, int) or dim % x.dim() != place.dim or not by:
        return None
    if place.start or x.shape[place.dim] != tokens:
        return None

    def compute(extend: Extend) -> Tensor:
        wider = extend(x, place.dim, max(by, 0), max(-by, 0))
        return _own(wider.narrow(place.dim, max(-by, 0), tokens), True)

    return MoveForm("roll", place, max(by, 0), max(-by, 0), tokens, 0, place.dim, (by,), (x,), compute)


def _write(
    func: Any, args: Any, kwargs: Any, place: TokenPlace, tokens: int, margin: int, whole: Tensor
) -> MoveForm | None:
    target, index, value = args
    at = _written_rows(target, index, tokens)
    if margin or at is None:
        return None
    dim, rows = at
    if place.operand == 0:
        return _edge(func, args, place, rows, tokens) if dim == place.dim else None
    cut = tokens - place.start - value.shape[place.dim]
    before, behind = rows.start, tokens - rows.stop
    is_moved = (before and not place.start and cut == before and not behind) or (
        behind and not before and not cut and place.start == behind
    )
    if not is_moved or target.dim() != value.dim() or dim != place.dim:
        return None

    def compute(extend: Extend) -> None:
        ends = target.narrow(dim, 0, before).clone(), target.narrow(dim, tokens - behind, behind).clone()
        wider = extend(whole, dim, before, behind, *ends)
        target[(slice(None),) * dim] = wider.narrow(dim, behind, tokens)

    what = (before, behind)
    return MoveForm("write", place, before, behind, tokens, 0, dim, what, (value, target), compute)


def _edge(func: Any, args: Any, place: TokenPlace, rows: range, tokens: int) -> MoveForm | None:
    """Return the form of a number that is written into the first or the last tokens alone."""
    target, index, value = args
    is_first = rows.start == 0
    if len(rows) * 2 > tokens or isinstance(value, Tensor) or not (is_first or rows.stop == tokens):
        return None

    def compute(extend: Extend) -> None:
        ends = extend(target, place.dim, 0, 0, 1.0 if is_first else None, None if is_first else 1.0)
        if ends is not target:  # this rank has that end
            func(target, index, value)

    return MoveForm("edge", place, 0, 0, tokens, 0, place.dim, (is_first, len(rows), repr(value)), (target,), compute)


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


def _written_rows(target: Tensor, index: Any, tokens: int) -> tuple[int, range] | None:
    """Return the dimension of tokens and the rows that an item is set in, where it is so of one dimension alone."""
    parts = [*index] if isinstance(index, tuple) else [index]
    if any(part is None or isinstance(part, Tensor | list | bool) for part in parts):
        return None
    if Ellipsis in parts:
        at = parts.index(Ellipsis)
        parts[at : at + 1] = [slice(None)] * (target.dim() - len(parts) + 1)
    ranges = []
    for dim, (part, size) in enumerate(zip(parts, target.shape, strict=False)):
        if isinstance(part, int):
            ranges.append((dim, range(part % size, part % size + 1)))
        elif part != slice(None) and (rows := range(size)[part]) != range(size):
            ranges.append((dim, rows))
    if len(ranges) != 1 or ranges[0][1].step != 1 or target.shape[ranges[0][0]] != tokens:
        return None
    return ranges[0]


def _each(value: Any, num: int) -> list[int]:
    if isinstance(value, str):
        return [0] * num
    return [value] * num if isinstance(value, int) else [*value] * (num if len(value) == 1 else 1)


def _padded(x: Tensor, dim: int, rows: int) -> Tensor:
    return F.pad(x, [*itertools.repeat(0, 2 * (x.dim() - 1 - dim)), 0, rows])


def _own(x: Tensor, is_view: bool) -> Tensor:
    """Return a result, in separate memory where code will read parts of its rows."""
    return x if is_view else x.contiguous()
