"""Goodput: each second of a run is given to one thing, over restarts too, and what a crash has undone does not count."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from samestep.training.run_log import TIMES_FILE, Goodput


@dataclass
class _Clock:
    now_s: float = 1000.0

    def __call__(self) -> float:
        return self.now_s


def _trains(goodput: Goodput, clock: _Clock, steps: range, save_at: int, *, start_s: float = 5.0) -> None:
    clock.now_s += start_s
    goodput.give("start")
    for step in steps:
        clock.now_s += 10.0
        goodput.give("steps")
        if step == save_at:
            with goodput.spend("saves"):
                clock.now_s += 2.0
            goodput.save(step)


def test_all_seconds_are_given_to_something(tmp_path: Path) -> None:
    clock = _Clock()
    goodput = Goodput.of(tmp_path, 0, clock)
    _trains(goodput, clock, range(1, 5), save_at=2)
    assert sum(goodput.seconds.values()) == clock.now_s - 1000.0
    assert goodput.seconds["steps"] == 40.0
    assert goodput.fraction == pytest.approx(40 / 47)
    assert goodput.to_line() == "goodput 85.1%: 40.0 of 47.0 s were training steps; start 5.0 s, saves 2.0 s"


def test_steps_that_a_crash_has_undone_are_lost_with_the_pause(tmp_path: Path) -> None:
    clock = _Clock()
    _trains(Goodput.of(tmp_path, 0, clock), clock, range(1, 5), save_at=2)  # dies after step 4
    clock.now_s += 30.0
    again = Goodput.of(tmp_path, 2, clock)
    _trains(again, clock, range(3, 5), save_at=4)
    assert again.seconds["steps"] == 40.0  # 1, 2 of the first process, 3 and 4 of the second
    assert again.seconds["restarts"] == 20.0 + 30.0
    assert sum(again.seconds.values()) == clock.now_s - 1000.0


def test_a_pause_behind_an_end_in_order_is_nobodys_loss(tmp_path: Path) -> None:
    clock = _Clock()
    first = Goodput.of(tmp_path, 0, clock)
    _trains(first, clock, range(1, 3), save_at=2)
    first.save(2, ended=True)
    clock.now_s += 86_400.0
    again = Goodput.of(tmp_path, 2, clock)
    assert again.seconds["restarts"] == 0.0
    assert again.seconds["steps"] == 20.0


def test_going_back_to_a_checkpoint_undoes_steps(tmp_path: Path) -> None:
    clock = _Clock()
    goodput = Goodput.of(tmp_path, 0, clock)
    _trains(goodput, clock, range(1, 6), save_at=3)
    goodput.roll_back()
    assert goodput.seconds["steps"] == 30.0
    assert goodput.seconds["skipped"] == 20.0


def test_a_new_run_and_a_torn_line_begin_anew(tmp_path: Path) -> None:
    clock = _Clock()
    _trains(Goodput.of(tmp_path, 0, clock), clock, range(1, 3), save_at=2)
    with (tmp_path / TIMES_FILE).open("a") as file:
        file.write('{"step": 3, "unix')
    assert Goodput.of(tmp_path, 2, clock).seconds["steps"] == 20.0
    assert Goodput.of(tmp_path, 0, clock).seconds["steps"] == 0.0
