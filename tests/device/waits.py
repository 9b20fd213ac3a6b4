"""Where a host waits for the simulated device, and what it copies: counted by kind and by function.

A function of samestep counts for everything below it, so that a line that moves changes no table; what stands below it
outside torch (a model's own code) is named behind it.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

WAITS = frozenset(
    {"item", "nonzero", "masked_select", "unique", "equal", "bincount", "x[mask]", "repeat_interleave", "synchronize"}
)
"""Kinds of operations after which the host has waited until the device had done all that was asked before."""


class Place(NamedTuple):
    """A kind of wait or copy, and the functions in which it happens."""

    kind: str
    where: str


counted: Counter[Place] = Counter()
"""The waits and copies of this process since the last `clear`."""

arrive: list[Callable[[], None]] = []
"""Asynchronous copies to the host that have not arrived: they do once the host waits."""


def note(kind: str) -> None:
    """Count one wait or copy of the code that asked for it; a wait lets asynchronous copies arrive."""
    counted[Place(kind, _where())] += 1
    if is_wait(kind):
        land()


def is_wait(kind: str) -> bool:
    """Return whether the host waits: an asynchronous copy waits too, unless its host memory is pinned."""
    return kind in WAITS or (kind.startswith(("to device", "to host")) and not kind.endswith("pinned asynchronous"))


def land() -> None:
    """Let asynchronous copies to the host arrive."""
    while arrive:
        arrive.pop(0)()


def clear() -> None:
    """Forget what was counted."""
    counted.clear()


def _where() -> str:
    """Return the innermost function of samestep, and the innermost of a model's own code below it."""
    frame, below = sys._getframe(2), ""
    while frame is not None:
        name = frame.f_code.co_filename
        function = frame.f_code.co_qualname.partition(".<locals>")[0]
        if "/src/samestep/" in name and not _is_around_operations(name, function):
            ours = f"{name.rpartition('/src/samestep/')[2]}:{function}"
            return f"{ours} < {below}" if below else ours
        if not below and _is_of_a_model(name):
            below = f"{'/'.join(name.rsplit('/', 2)[1:])}:{function}"
        frame = frame.f_back
    return below or "torch"


def _is_around_operations(file: str, function: str) -> bool:
    """Return whether a function of samestep only passes on what others ask: modes, hooks that cast, numbers that are read."""
    if function.startswith("Reading."):
        return True
    return file.endswith("axes/precision.py") or function.endswith(("__torch_function__", "__torch_dispatch__"))


def _is_of_a_model(file: str) -> bool:
    outside = ("/torch/", "/tests/device/simulated", "/tests/device/waits", "/src/samestep/", "<")
    return not any(part in file for part in outside) and ("/lib/python" not in file or "/site-packages/" in file)
