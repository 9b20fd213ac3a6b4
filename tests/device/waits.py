"""Where a host waits for the simulated device, and what it copies: counted by kind and by function.

On a real GPU `on_a_gpu` counts waits alone: those that torch itself warns of, whose kind it does not tell, and calls by name.

A function of samestep counts for everything below it, so that a line that moves changes no table; what stands below it
outside torch (a model's own code) is named behind it.
"""

from __future__ import annotations

import functools
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch

TOLD = "told by torch"
"""The kind of a wait that torch has warned of."""
WAITS = frozenset(
    {
        TOLD,
        "item",
        "nonzero",
        "masked_select",
        "unique",
        "equal",
        "bincount",
        "x[mask]",
        "repeat_interleave",
        "synchronize",
    }
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
_arrived = 0


def asked() -> int:
    """Return how many asynchronous copies to the host were asked for so far."""
    return _arrived + len(arrive)


def note(kind: str, asked: int | None = None) -> None:
    """Count one wait or copy of the code that asked for it; a wait lets copies arrive, or those `asked` for before."""
    counted[Place(kind, _where())] += 1
    if is_wait(kind):
        land(asked)


def is_wait(kind: str) -> bool:
    """Return whether the host waits: an asynchronous copy waits too, unless its host memory is pinned."""
    return kind in WAITS or (kind.startswith(("to device", "to host")) and not kind.endswith("pinned asynchronous"))


def by_function(counts: Counter[Place]) -> Counter[str]:
    """Return how often the host waited in each function, whatever for: so waits of a real GPU compare with simulated ones."""
    found: Counter[str] = Counter()
    for place, count in counts.items():
        found[place.where] += count * is_wait(place.kind)
    return +found


def counting() -> AbstractContextManager[None]:
    """Return a context in which waits are counted; on the simulated device they always are."""
    return on_a_gpu() if torch.version.cuda is not None and torch.cuda.is_available() else nullcontext()


@contextmanager
def on_a_gpu() -> Iterator[None]:
    """Count the waits of a real GPU, as far as torch knows them."""
    said = "called a synchronizing CUDA operation"
    named = [(torch.cuda, "synchronize"), (torch.cuda.Event, "synchronize"), (torch.cuda.Stream, "synchronize")]
    before = [getattr(owner, name) for owner, name in named]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.cuda.set_sync_debug_mode("warn")  # which itself warns, that it does not know every operation
    with warnings.catch_warnings():
        warnings.filterwarnings("always", message=said)
        show = warnings.showwarning

        def shown(message: Warning | str, *rest: Any, **named: Any) -> None:
            if str(message).startswith(said):
                note(TOLD)
            else:
                show(message, *rest, **named)

        warnings.showwarning = shown
        for (owner, name), function in zip(named, before, strict=True):
            setattr(owner, name, _noting(function))
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")
            for (owner, name), function in zip(named, before, strict=True):
                setattr(owner, name, function)


def _noting(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def noted(*args: Any, **kwargs: Any) -> Any:
        note("synchronize")
        return function(*args, **kwargs)

    return noted


def land(until: int | None = None) -> None:
    """Let asynchronous copies to the host arrive, all or the first ones up to a number."""
    global _arrived
    while arrive and (until is None or _arrived < until):
        _arrived += 1
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
