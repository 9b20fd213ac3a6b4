"""Collections leave out what there is behind the first step of a training, and afterwards nothing stays left out.

Each case runs in an interpreter of its own, since a collection of what a session of tests holds takes a second.
"""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest

from samestep.training.rank_part import collect_after_steps


class Loop:
    """An object that only a collection frees."""

    def __init__(self) -> None:
        self.me = self


def in_new_interpreter(case: Callable[..., None], *words: str) -> None:
    code = f"from {case.__module__} import {case.__name__} as case; case(*{words!r})"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr


def freezes_once() -> None:
    counts, held = [], Loop()
    freed = weakref.ref(held)
    for step in collect_after_steps(range(3)):
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


def ends_with_nothing_frozen(ends: str) -> None:
    try:
        for step in collect_after_steps(range(1 if ends == "one step" else 9)):
            if step == 2 and ends == "break":
                break
            if step == 2:
                raise ValueError(ends)
    except ValueError:
        assert ends == "error"
    gc.collect()
    assert gc.get_freeze_count() == 0


def leaves_what_is_frozen() -> None:
    gc.freeze()
    count = gc.get_freeze_count()
    assert len([*collect_after_steps(range(3))]) == 3
    assert gc.get_freeze_count() >= count - 100 > 0  # what has no more references is freed at once


def test_objects_are_frozen_once_behind_the_first_step_and_freed_at_the_end() -> None:
    in_new_interpreter(freezes_once)


@pytest.mark.parametrize("ends", ["break", "error", "one step"])
def test_however_a_training_ends_nothing_stays_frozen(ends: str) -> None:
    in_new_interpreter(ends_with_nothing_frozen, ends)


def test_what_somebody_else_has_frozen_stays() -> None:
    in_new_interpreter(leaves_what_is_frozen)


def collects_in_agreed_steps() -> None:
    found: list[tuple[int, int]] = []
    now, before = 0, gc.get_threshold()
    gc.callbacks.append(lambda phase, info: found.append((now, info["generation"])) if phase == "start" else None)
    for now in collect_after_steps(range(200)):  # noqa: B007
        held = [Loop() for _ in range(300)]
        del held
    steps = [step for step, generation in found if generation == 1]
    assert steps == [*range(10, 200, 10)], steps
    assert len(found) <= len(steps) + 5, found
    assert gc.get_threshold() == before


def leaves_it_to_the_user() -> None:
    found: list[int] = []
    gc.callbacks.append(lambda phase, info: found.append(info["generation"]) if phase == "start" else None)
    for step in collect_after_steps(range(100)):
        if step == 5:
            gc.set_threshold(123, 5, 5)
            found.clear()
    assert 1 not in found
    assert gc.get_threshold() == (123, 5, 5)


def leaves_collections_off() -> None:
    gc.disable()
    found: list[int] = []
    gc.callbacks.append(lambda phase, info: found.append(info["generation"]) if phase == "start" else None)
    for step in collect_after_steps(range(100)):
        if step == 1:
            found.clear()
    assert not found
    assert not gc.isenabled()


@pytest.mark.parametrize("case", [collects_in_agreed_steps, leaves_it_to_the_user, leaves_collections_off])
def test_garbage_is_collected_after_agreed_steps_unless_the_user_decides(case: Callable[..., None]) -> None:
    in_new_interpreter(case)
