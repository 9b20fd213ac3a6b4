"""Objects that exist after the first step of a training are left out of Python's garbage collections until the training
ends.

A process that has imported torch and transformers holds 400,000 objects that it keeps. A full collection goes through all of them:
a quarter of a second, in which every other rank waits, at a time of each rank's own. `gc.freeze` leaves them out.

Frozen objects that become garbage are freed only when the training ends. So this is done where samestep itself takes
the steps: a user's loop may drop a model that it has trained before, and would keep its memory.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")


def freeze_after_first(steps: Iterable[T]) -> Iterator[T]:
    """Yield all steps; objects that exist after the first one are left out of collections until the last.

    Where other code has frozen objects, which cannot be distinguished from these, nothing is done.
    """
    is_frozen = False
    try:
        for number, step in enumerate(steps):
            yield step
            if number == 0 and not gc.get_freeze_count():
                gc.collect()
                gc.freeze()
                is_frozen = True
    finally:
        if is_frozen:
            gc.unfreeze()
