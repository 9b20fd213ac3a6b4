"""Collections leave out what there is behind the first step of a training, and afterwards nothing stays left out.

Each case runs in a fork of one new interpreter, since a collection of what a session of tests holds takes a second.
"""

from __future__ import annotations

import functools
import gc
import json
import os
import subprocess
import sys
import traceback
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest

from samestep.training.rank_part import collect_after_steps

ENDS = ("break", "error", "one step")


class Loop:
    """An object that only a collection frees."""

    def __init__(self) -> None:
        self.me = self


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


CASES: dict[str, Callable[[], None]] = {
    "objects are frozen once behind the first step and freed at the end": freezes_once,
    **{f"nothing stays frozen after {ends}": functools.partial(ends_with_nothing_frozen, ends) for ends in ENDS},
    "what somebody else has frozen stays": leaves_what_is_frozen,
    "garbage is collected after agreed steps": collects_in_agreed_steps,
    "a threshold of the user stays": leaves_it_to_the_user,
    "collections that are off stay off": leaves_collections_off,
}


def run_all() -> None:
    """Run each case in a fork of this process, and print what each has raised as one line of JSON."""
    warnings.filterwarnings("ignore", message=".*multi-threaded, use of fork", category=DeprecationWarning)
    raised: dict[str, str] = {}
    for name, case in CASES.items():
        reads, writes = os.pipe()
        if (pid := os.fork()) == 0:
            try:
                case()
            except BaseException:
                os.write(writes, traceback.format_exc().encode())
                os._exit(1)
            os._exit(0)
        os.close(writes)
        with os.fdopen(reads, "rb") as said:
            raised[name] = said.read().decode()
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        raised[name] = raised[name] or ("" if status == 0 else f"it ended with {status}")
    print(json.dumps(raised))


@pytest.fixture(scope="module")
def raised() -> dict[str, str]:
    """What each case has raised."""
    code = f"from {__name__} import run_all; run_all()"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, str] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("case", CASES)
def test_garbage_is_left_out_or_collected_as_agreed(case: str, raised: dict[str, str]) -> None:
    assert raised[case] == ""
