"""The steps that a trial of an optimizer takes: the first ones, and those around every number in its options and code.

A counter is a number that has risen by as much in each of the first steps (by one, or by one for each weight), wherever
the optimizer keeps it: its state, its groups, its attributes, a closure, a variable. It is set forward, so that a rule which changes at step 5,000 does so.

    1 2 3 4      99 100 101 (a constant of the code is 100)      16 32 64 128 ... 16384
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from samestep.runtime.optimizers.step_code import Place, StepCode, read, write

_PLAIN_STEPS = 4
_LARGEST_COUNT = 10_000
_MOST_COUNTS = 64
_MOST_PLAIN_STEPS = 128
"""Steps that are taken one by one where no counter is to be seen."""
_GRID = [2**power for power in range(3, 15)]
"""Steps at which a threshold shows that is none of the numbers, as 0.06 times one of them."""


def march(optimizer: Optimizer, take: Callable[[], None]) -> None:
    """Take the first steps, those around every number among the options and in the code, and some at large."""
    code = StepCode(optimizer)
    with code.put_back():
        counts = sorted({int(n) for n in code.numbers if n == n // 1 and 2 <= n <= _LARGEST_COUNT})[-_MOST_COUNTS:]
        before = _numbers(optimizer, code)
        rising: dict[tuple[int, str], float] = {}
        for _ in range(_PLAIN_STEPS):
            take()
            after = _numbers(optimizer, code)
            risen = {key: now - before[key][1] for key, (_, now) in after.items() if key in before}
            rising = {key: by for key, by in risen.items() if by >= 1 and by == rising.get(key, by) and by == by // 1}
            before = after
        if not rising:
            for _ in range(min(counts[-1] + 1, _MOST_PLAIN_STEPS) - _PLAIN_STEPS if counts else 0):
                take()
            return
        for count, steps in [*((count, 3) for count in counts), *((count, 1) for count in _GRID)]:
            for key, (place, _) in _numbers(optimizer, code).items():
                if key in rising:
                    now = read(place)
                    start = count - rising[key]
                    write(place, start if isinstance(now, Tensor) else type(now)(start))
            for _ in range(steps):
                take()


def _numbers(optimizer: Optimizer, code: StepCode) -> dict[tuple[int, str], tuple[Place, float]]:
    """Return the numbers that an optimizer keeps, by the dictionary and the key, or the closure's cell, that hold them."""
    own: list[Any] = [vars(optimizer)]
    for one in code.optimizers:
        own += [*one.param_groups, *one.state.values()]
    places = [(holder, key) for holder in own if isinstance(holder, dict) for key in holder]
    found = {}
    for place in (*places, *code.places):
        value = read(place)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if is_number or (isinstance(value, Tensor) and value.numel() == 1 and not value.is_meta):
            found[id(place[0]), str(place[1])] = (place, float(value))
    return found
