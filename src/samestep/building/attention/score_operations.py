"""What code does to scores, in any spelling, as changes of their form: factors, caps, masks, sinks, casts, moved dimensions, a softmax.

A function of which nothing is said here needs elements.

Legend: as in `score_form.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from samestep.building.attention.score_form import LEAST_FILL, ScoreForm, ScoreMask
from samestep.building.attention.scores import Scores
from samestep.building.torch_seams import DisableTorchFunctionSubclass, disable_current_modes


class _Change(NamedTuple):
    """The form that a function gives to scores, their dtype where it changes, and what there is of each query."""

    form: ScoreForm
    dtype: torch.dtype | None = None
    rows: str = ""


def noted(name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the result of a function as a form; None where it has none."""
    plain = name.strip("_")
    if plain in ("cat", "concat", "concatenate"):
        return _with_sinks(func, args, kwargs)
    if plain == "where":
        return _where(func, args, kwargs)
    if plain in _SYMMETRIC and args and not isinstance(args[0], Scores):
        if len(args) < 2 or kwargs.get("alpha", 1) != 1:  # it multiplies the scores
            return None
        args = (args[1], args[0], *args[2:])
    if not args or not isinstance(args[0], Scores):
        return None
    handler = _HANDLERS.get(plain)
    scores, rest = args[0], args[1:]
    if handler is None or (scores.rows and plain not in _OF_ROWS):
        return None
    change = handler(scores, plain, rest, kwargs)
    if change is None or not isinstance(change, _Change):
        return change
    dtype = change.dtype or scores.dtype
    return Scores.of(scores.formulas, change.form, dtype, (func, args, kwargs), change.rows)


def _number(scores: Scores, value: Any) -> float | None:
    if isinstance(value, bool | int | float):
        return float(value)
    if not isinstance(value, Tensor) or value.numel() != 1:
        return None
    hides = 0.0 if scores.form.stage == "weights" else float(torch.finfo(torch.float32).min)
    return scores.formulas.number_in(value, hides)


def _scaled(scores: Scores, name: str, rest: tuple[Any, ...], kwargs: dict[str, Any]) -> _Change | None:
    """Multiply or divide."""
    form, other = scores.form, rest[0] if rest else kwargs.get("other")
    divides = "div" in name
    if kwargs.get("rounding_mode") is not None:
        return None
    if isinstance(other, Scores):
        is_sum = divides and other.rows == "sum" and other.form is form and form.stage == "exponentials"
        return _Change(replace(form, stage="weights")) if is_sum else None
    if isinstance(other, int | float) and not isinstance(other, bool):
        times = 1.0 / other if divides else float(other)
        if form.stage == "weights":
            return _Change(replace(form, after=form.after * times))
        if form.stage != "scores" or form.sinks is not None or (form.masks and times <= 0):
            return None
        masks = tuple(one.scaled(times) for one in form.masks)
        if any(one.fill is not None and one.fill > LEAST_FILL for one in masks):
            return None
        if form.is_capped:
            return _Change(replace(form, cap=form.cap * times, masks=masks))
        return _Change(replace(form, scale=form.scale * times, masks=masks))
    if (
        not isinstance(other, Tensor)
        or form.stage != "scores"
        or form.is_capped
        or form.masks
        or form.sinks is not None
    ):
        return None
    placed = form.in_normal_order(other)
    if placed is None or placed.shape[-1] != 1 or not other.is_floating_point():
        return None
    query = form.query / placed if divides else form.query * placed
    return _Change(replace(form, query=query.to(form.query.dtype)))


def added(scores: Scores, other: Any, sign: float, alpha: Any = 1) -> Scores | None:
    """Return scores to which something is added; None where they have no form then."""
    found = _masked(scores, other, sign * float(alpha))
    return (
        None
        if found is None
        else Scores.of(scores.formulas, found.form, scores.dtype, (_add, (scores, other, sign * float(alpha)), {}))
    )


def _add(scores: Tensor, other: Any, times: float) -> Tensor:
    return scores + other * times


def _summed(scores: Scores, name: str, rest: tuple[Any, ...], kwargs: dict[str, Any]) -> _Change | None:
    """Add or subtract."""
    other = rest[0] if rest else kwargs.get("other")
    sign = -1.0 if "sub" in name else 1.0
    return _masked(scores, other, sign * float(kwargs.get("alpha", 1)))


def _masked(scores: Scores, other: Any, times: float) -> _Change | None:
    form = scores.form
    if isinstance(other, Scores):
        if times != -1.0 or not other.rows or form.stage != "scores" or other.form is not form:
            return None
        return _Change(form) if other.rows == "max" else None  # no weight depends on it
    if form.stage != "scores" or form.sinks is not None:
        return None
    if isinstance(other, int | float):
        return _Change(form)
    placed = form.in_normal_order(other) if isinstance(other, Tensor) else None
    if placed is None or not other.is_floating_point() or other.numel() == 1:
        return None
    return _Change(replace(form, masks=(*form.masks, ScoreMask(placed, None, times, other))))


def _filled(scores: Scores, name: str, rest: tuple[Any, ...], kwargs: dict[str, Any]) -> _Change | None:
    """Fill in a number where a mask is true."""
    form = scores.form
    mask = rest[0] if rest else kwargs.get("mask")
    value = _number(scores, rest[1] if len(rest) > 1 else kwargs.get("value"))
    if not isinstance(mask, Tensor) or mask.dtype is not torch.bool or value is None:
        return None
    if form.stage == "weights":
        is_hidden = value == 0.0 and any(one.given is mask and one.fill is not None for one in form.masks)
        return _Change(form) if is_hidden else None
    placed = form.in_normal_order(mask)
    if placed is None or value > LEAST_FILL or form.stage != "scores" or form.sinks is not None:
        return None
    return _Change(replace(form, masks=(*form.masks, ScoreMask(placed, value, 1.0, mask))))


def _where(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Fill in a number where a condition is false, or true."""
    if len(args) == 2 and len(kwargs) == 1:
        args = (*args, *kwargs.values())
    if len(args) != 3:
        return None
    condition, first, second = args
    if isinstance(condition, Scores):  # a method of scores: scores.where(condition, other)
        condition, first = first, condition
    if (
        not isinstance(condition, Tensor)
        or isinstance(condition, Scores)
        or isinstance(first, Scores) == isinstance(second, Scores)
    ):
        return None
    scores, other = (first, second) if isinstance(first, Scores) else (second, first)
    assert isinstance(scores, Scores), "one of them is"
    hidden = ~condition if scores is first else condition
    change = None if scores.rows else _filled(scores, "masked_fill", (hidden, other), {})
    return None if change is None else Scores.of(scores.formulas, change.form, scores.dtype, (func, args, {}))


def _capped(scores: Scores, name: str, rest: Any, kwargs: Any) -> _Change | None:
    form = scores.form
    if form.is_capped or form.masks or form.sinks is not None or form.stage != "scores":
        return None
    return _Change(replace(form, is_capped=True))


def _at_keys(scores: Scores, dim: Any) -> ScoreForm | None:
    """Return the form in which a dimension is that of keys; None where it is another one."""
    form = scores.form
    if not isinstance(dim, int):
        return None
    normal = form.order[dim % len(form.order)]
    if normal == len(form.order) - 1:
        return form
    may_swap = normal == len(form.order) - 2 and form.sinks is None and not scores.rows
    return form.swapped() if may_swap and form.stage == "scores" else None


def _softmax(scores: Scores, name: str, rest: tuple[Any, ...], kwargs: dict[str, Any]) -> _Change | None:
    form = _at_keys(scores, rest[0] if rest else kwargs.get("dim"))
    if form is None or form.stage != "scores":
        return None
    dtype = next((one for one in (*rest, *kwargs.values()) if isinstance(one, torch.dtype)), None)
    return _Change(replace(form, stage="weights"), dtype)


def _over_keys(scores: Scores, name: str, rest: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Take the largest score, or the sum, of each query."""
    dim = rest[0] if rest else kwargs.get("dim")
    dim = dim[0] if isinstance(dim, list | tuple) and len(dim) == 1 else dim
    keeps = rest[1] if len(rest) > 1 else kwargs.get("keepdim", False)
    form = _at_keys(scores, dim)
    wanted = "exponentials" if name == "sum" else "scores"
    if form is None or form is not scores.form or not keeps or form.stage != wanted:
        return None
    rows = "sum" if name == "sum" else "max"
    made: Any = (
        ((lambda one: one.sum(dim, True)) if rows == "sum" else (lambda one: one.amax(dim, True))),
        (scores,),
        {},
    )
    found = Scores.of(scores.formulas, form, scores.dtype, made, rows)
    return _Largest(found, None) if name == "max" else found


class _Largest(NamedTuple):
    values: Scores
    indices: None


def _exponentials(scores: Scores, name: str, rest: Any, kwargs: Any) -> _Change | None:
    form = scores.form
    return _Change(replace(form, stage="exponentials")) if form.stage == "scores" and form.sinks is None else None


def _dropped(scores: Scores, name: str, rest: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Drop weights where no mode draws masks, as in a trace."""
    named = dict(zip(("p", "training", "inplace"), rest, strict=False)) | kwargs
    p = named.get("p", 0.5)
    if not named.get("training", named.get("train", True)) or p == 0:
        return scores
    return scores.dropped(p, None, (torch.nn.functional.dropout, (scores, p), {}))


def _cast(scores: Scores, name: str, rest: tuple[Any, ...], kwargs: dict[str, Any]) -> _Change | None:
    if name in _CASTS:
        return _Change(scores.form, _CASTS[name], scores.rows)
    given = [one for one in (*rest, *kwargs.values()) if isinstance(one, torch.dtype | Tensor)]
    found = next((one if isinstance(one, torch.dtype) else one.dtype for one in given), None)
    if found is not None and not found.is_floating_point:
        return None
    return _Change(scores.form, found, scores.rows)


_CASTS = {"float": torch.float32, "double": torch.float64, "half": torch.float16, "bfloat16": torch.bfloat16}


def _same(scores: Scores, name: str, rest: Any, kwargs: Any) -> _Change | None:
    if name == "nan_to_num" and scores.form.stage != "weights":
        return None
    if name == "detach" and scores.rows != "max":
        return None
    return _Change(scores.form, None, scores.rows)


def _permuted(scores: Scores, name: str, rest: tuple[Any, ...], kwargs: dict[str, Any]) -> _Change | None:
    """Move dimensions."""
    form = scores.form
    places = torch.empty(tuple(range(2, 2 + len(form.order))), device="meta")
    with DisableTorchFunctionSubclass(), disable_current_modes():
        moved = getattr(places, name)(*rest, **kwargs) if name not in ("mT", "T") else getattr(places, name)
    if moved.dim() != places.dim():
        return None
    return _Change(replace(form, order=tuple(form.order[size - 2] for size in moved.shape)))


def _reshaped(scores: Scores, name: str, rest: tuple[Any, ...], kwargs: dict[str, Any]) -> _Change | None:
    """Merge or divide the dimensions that queries and keys share."""
    form = scores.form
    if not form.is_normal or form.has_sink_column or form.sinks is not None:
        return None
    with DisableTorchFunctionSubclass(), disable_current_modes():
        found = tuple(getattr(torch.empty(form.shape, device="meta"), name)(*rest, **kwargs).shape)
    shape = form.normal_shape
    if (
        found[-2:] != shape[-2:]
        or (len(found) > 2 and math.prod(found[:-2]) != math.prod(shape[:-2]))
        or len(found) < 3
    ):
        return None
    shared, before = found[:-2], shape[:-2]

    def moved(tensor: Tensor) -> Tensor:
        return tensor.expand(*before, *tensor.shape[-2:]).reshape(*shared, *tensor.shape[-2:])

    def moved_mask(mask: Tensor) -> Tensor:
        if math.prod(mask.shape[:-2]) == 1:
            return mask.reshape(*(1,) * len(shared), *mask.shape[-2:])
        return moved(mask)

    masks = tuple(one._replace(tensor=moved_mask(one.tensor)) for one in form.masks)
    order = tuple(range(len(found)))
    return _Change(replace(form, query=moved(form.query), key=moved(form.key), masks=masks, order=order))


def _with_sinks(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Append to the scores of the keys one that has no value."""
    parts = args[0] if args else kwargs.get("tensors", ())
    dim = args[1] if len(args) > 1 else kwargs.get("dim", 0)
    if len(parts) != 2 or not isinstance(parts[0], Scores) or isinstance(parts[1], Scores) or parts[0].rows:
        return None
    scores, sinks = parts
    form = scores.form
    if (
        form.stage != "scores"
        or form.sinks is not None
        or not form.is_normal
        or dim % len(form.order) != len(form.order) - 1
    ):
        return None
    is_alike = (
        sinks.dim() == len(form.order) and sinks.shape[-1] == 1 and (sinks.shape[-2] == 1 or not sinks.stride(-2))
    )
    if not is_alike or any(size > 1 and sinks.stride(dim) for dim, size in enumerate(sinks.shape[:-3])):
        return None
    found = replace(form, sinks=sinks[..., 0, 0], has_sink_column=True)
    return Scores.of(scores.formulas, found, scores.dtype, (func, args, kwargs))


def _picked(scores: Scores, name: str, rest: tuple[Any, ...], kwargs: dict[str, Any]) -> _Change | None:
    """Leave out the weight of the sink."""
    form, picks = scores.form, rest[0]
    is_last = isinstance(picks, tuple) and picks == (Ellipsis, slice(None, -1))
    if is_last and form.has_sink_column and form.stage == "weights":
        return _Change(replace(form, has_sink_column=False))
    return None


_SYMMETRIC = ("mul", "multiply", "rmul", "add", "radd")
_OF_ROWS = ("detach", "to", "float", "double", "half", "bfloat16", "type_as", "contiguous", "clone")
_HANDLERS: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(
        ["mul", "rmul", "imul", "multiply", "div", "idiv", "divide", "truediv", "itruediv", "true_divide"], _scaled
    ),
    **dict.fromkeys(["add", "radd", "iadd", "sub", "isub", "subtract"], _summed),
    **dict.fromkeys(["float", "double", "half", "bfloat16", "to", "type", "type_as"], _cast),
    **dict.fromkeys(["contiguous", "clone", "nan_to_num", "detach"], _same),
    **dict.fromkeys(["transpose", "permute", "swapaxes", "swapdims", "movedim", "moveaxis", "mT"], _permuted),
    **dict.fromkeys(["view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze"], _reshaped),
    **dict.fromkeys(["max", "amax", "sum"], _over_keys),
    "masked_fill": _filled,
    "tanh": _capped,
    "softmax": _softmax,
    "exp": _exponentials,
    "dropout": _dropped,
    "getitem": _picked,
}
"""What is part of the formula of an attention, by the name of the function."""
