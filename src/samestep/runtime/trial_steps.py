"""The steps that a trial of an optimizer takes: the first ones, and those around every integer in its options and code."""

from __future__ import annotations

import inspect
import math
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_flatten

_PLAIN_STEPS = 4
_LARGEST_COUNT = 10_000
_MOST_COUNTS = 32


def march(optimizer: Optimizer, take: Callable[[], None]) -> None:
    """Take the first steps, and those around every integer among the options and the constants of the code."""
    counts = sorted(_counts(optimizer))[-_MOST_COUNTS:]
    taken, before, rising = 0, _counters(optimizer), set[tuple[int, str]]()
    for _ in range(_PLAIN_STEPS):
        take()
        taken += 1
        after = _counters(optimizer)
        rising = {key for key, (_, value) in after.items() if key in before and value == before[key][1] + 1}
        before = after
    for count in counts:
        now = [value for key, (_, value) in _counters(optimizer).items() if key in rising]
        if not now:
            while taken <= count:
                take()
                taken += 1
            continue
        if count + 1 <= min(now):
            continue
        for key, (container, value) in _counters(optimizer).items():
            if key in rising and value < count - 2:
                _set(container, key[1], count - 2)
        for _ in range(4):
            take()


def _counts(optimizer: Optimizer) -> set[int]:
    """Return the integers, from 2 to 10,000, among an optimizer's options, its attributes and its code's constants."""
    found: set[int] = set()
    own = {key: value for key, value in vars(optimizer).items() if key not in ("state", "param_groups")}
    options = [
        {k: v for k, v in group.items() if k not in ("params", "param_names")} for group in optimizer.param_groups
    ]
    for leaf in tree_flatten([own, options])[0]:
        if isinstance(leaf, int | float) and not isinstance(leaf, bool) and leaf == leaf // 1:
            found.add(int(leaf))
    functions = [f for kind in type(optimizer).__mro__ if kind not in (Optimizer, object) for f in vars(kind).values()]
    if not type(optimizer).__module__.startswith("torch.optim"):
        functions += [leaf for leaf in tree_flatten([own, options])[0] if isinstance(leaf, types.FunctionType)]
        for function in functions:
            code = getattr(inspect.unwrap(function) if callable(function) else None, "__code__", None)
            found |= set(_constants(code)) if isinstance(code, types.CodeType) else set()
    return {count for count in found if 2 <= count <= _LARGEST_COUNT}


def _constants(code: types.CodeType) -> Iterator[int]:
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _constants(constant)
        elif isinstance(constant, int | float) and not isinstance(constant, bool) and math.isfinite(constant):
            yield int(constant)


def _counters(optimizer: Optimizer) -> dict[tuple[int, str], tuple[dict[str, Any], float]]:
    """Return the numbers that an optimizer keeps, by the dictionary and the key that hold them."""
    places: Iterable[dict[str, Any]] = [vars(optimizer), *optimizer.param_groups, *optimizer.state.values()]
    found = {}
    for place in places:
        if not isinstance(place, dict):
            continue
        for key, value in place.items():
            if (isinstance(value, Tensor) and value.numel() == 1 and not value.is_meta) or (
                isinstance(value, int | float) and not isinstance(value, bool)
            ):
                found[id(place), str(key)] = (place, float(value))
    return found


def _set(place: dict[str, Any], key: str, count: int) -> None:
    value = place[key]
    if isinstance(value, Tensor):
        value.fill_(count)
    else:
        place[key] = type(value)(count)
