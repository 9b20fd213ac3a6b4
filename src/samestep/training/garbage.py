"""Python's garbage collections in a training: after the same steps on every rank, and without what exists after the first step.

A process that has imported torch and transformers holds 400,000 objects that it keeps. A full collection goes through all of them:
a quarter of a second, in which every other rank waits, at a time of each rank's own. `gc.freeze` leaves them out, and the young
ones are collected after every tenth step, when all ranks are between two steps. In between Python collects by itself only where
a step makes many more objects than usual, so that cycles which hold memory do not pile up.

Frozen objects that become garbage are freed only when the training ends. So this is done where samestep itself takes the steps: a
user's loop may drop a model that it has trained before, and would keep its memory. A user's code that calls `gc.enable`,
`gc.disable` or `gc.set_threshold` in a step decides from then on.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")

EVERY = 10
"""Steps between two collections."""
THRESHOLD = 50_000
"""Objects that must have become more since the last collection for Python to collect by itself."""


def collect_after_steps(steps: Iterable[T]) -> Iterator[T]:
    """Yield all steps; collect garbage after every tenth, without the objects that exist after the first one.

    Where other code has frozen objects, which cannot be distinguished from these, nothing is done.
    """
    before = (gc.isenabled(), gc.get_threshold())
    ours = (gc.isenabled(), (THRESHOLD, *before[1][1:]))
    is_frozen = False
    try:
        for number, step in enumerate(steps):
            yield step
            if number == 0 and not gc.get_freeze_count():
                gc.collect()
                gc.freeze()
                is_frozen = True
                if before == (True, gc.get_threshold()):
                    gc.set_threshold(*ours[1])
            elif is_frozen and number % EVERY == 0 and ours == (gc.isenabled(), gc.get_threshold()):
                gc.collect(1)
    finally:
        if is_frozen:
            gc.unfreeze()
        if is_frozen and ours == (gc.isenabled(), gc.get_threshold()):
            gc.set_threshold(*before[1])
