"""How far this rank has come in its run, for the process that watches it: the step it takes, or that it takes none.

Between the first step and the last a rank that stands still hangs. What else may take long has a name of its own (`apart`): a
save, an evaluation; there a rank need not move, but it answers who asks it. Preparing the model and the first step, in which
kernels are compiled and chosen, are not watched: the time limit of collectives ends them.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass(slots=True)
class _Progress:
    step: int = 0
    apart: list[str] = field(default_factory=list)
    """The names of what it does apart from steps, the innermost last."""


_NUM_STEPS = 20
_progress = _Progress()
_took_s: deque[float] = deque(maxlen=_NUM_STEPS)


def begin() -> None:
    """Forget what a process that this one was forked from has done."""
    _progress.step = 0
    _progress.apart.clear()
    _took_s.clear()


@contextmanager
def taking(step: int, *, is_first: bool) -> Iterator[None]:
    """Take a step, counted from 1; the first one of a process is not watched."""
    _progress.step = 0 if is_first else step
    began = time.monotonic()
    yield
    _took_s.append(time.monotonic() - began)
    _progress.step = step


@contextmanager
def apart(name: str) -> Iterator[None]:
    """Do between steps what may take long on a healthy rank, and what a message calls so: `a save`."""
    _progress.apart.append(name)
    try:
        yield
    finally:
        _progress.apart.pop()


def watched_step() -> int:
    """Return the step that this rank takes or has taken last; 0 where it need not move."""
    return 0 if _progress.apart else _progress.step


def done_apart() -> str:
    """Return the name of what this rank does apart from steps, after its first one; empty where it does nothing apart."""
    return next(reversed(_progress.apart), "") if _progress.step else ""


def median_step_s() -> float:
    """Return the median of the seconds that the last steps took; 0 before the first."""
    return statistics.median(list(_took_s)) if _took_s else 0.0
