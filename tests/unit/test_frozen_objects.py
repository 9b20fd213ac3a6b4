"""Collections leave out what there is behind the first step of a training, and afterwards nothing stays left out."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from samestep.training.frozen_objects import frozen_behind_first


class Loop:
    """An object that only a collection frees."""

    def __init__(self) -> None:
        self.me = self


@pytest.fixture(autouse=True)
def nothing_frozen() -> Iterator[None]:
    was_frozen = gc.get_freeze_count() > 0  # the tests' own process
    gc.unfreeze()
    yield
    gc.unfreeze()
    if was_frozen:
        gc.freeze()


def test_objects_are_frozen_once_behind_the_first_step_and_freed_at_the_end() -> None:
    counts, held = [], Loop()
    freed = weakref.ref(held)
    for step in frozen_behind_first(range(3)):
        counts.append(gc.get_freeze_count())
        if step == 1:
            del held
            gc.collect()
            assert freed() is not None, "it was frozen"
    assert counts[0] == 0
    assert counts[1] == counts[2] > 1000
    assert gc.get_freeze_count() == 0
    gc.collect()
    assert freed() is None


@pytest.mark.parametrize("ends", ["break", "error", "one step"])
def test_however_a_training_ends_nothing_stays_frozen(ends: str) -> None:
    try:
        for step in frozen_behind_first(range(1 if ends == "one step" else 9)):
            if step == 2 and ends == "break":
                break
            if step == 2:
                raise ValueError(ends)
    except ValueError:
        assert ends == "error"
    gc.collect()
    assert gc.get_freeze_count() == 0


def test_what_somebody_else_has_frozen_stays() -> None:
    gc.freeze()
    count = gc.get_freeze_count()
    assert len([*frozen_behind_first(range(3))]) == 3
    assert gc.get_freeze_count() >= count - 100 > 0  # what has no more references is freed at once
