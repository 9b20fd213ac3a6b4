"""Stragglers: a rank with more work of its own is named once, and noise, waits and other stages are not."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from samestep.runtime.recording.sums import WINDOW, StepSums, StragglerWatch, describe_stragglers, straggler_among


class _Store(dict[str, Any]):
    """A store of one process, as torch's is used."""

    def set(self, key: str, value: str) -> None:
        self[key] = value

    def check(self, keys: list[str]) -> bool:
        return all(key in self for key in keys)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return [self[key].encode() for key in keys]


def _times(ranks: int, slow: int | None, factor: float, noise: float, seed: int) -> dict[int, list[float]]:
    drawn = random.Random(seed)
    return {
        rank: [(factor if rank == slow else 1.0) * (1 + noise * drawn.random()) for _ in range(WINDOW)]
        for rank in range(ranks)
    }


@given(st.integers(2, 9), st.integers(0, 8), st.floats(1.5, 5.0), st.integers(0, 99))
def test_a_slow_rank_is_found(ranks: int, slow: int, factor: float, seed: int) -> None:
    slow %= ranks
    found = straggler_among(_times(ranks, slow, factor, 0.1, seed), dict.fromkeys(range(ranks), 0), step_s=2.0)
    assert found is not None
    assert found[0] == slow
    assert found[1] == pytest.approx(factor - 1, abs=0.2 * factor)


@given(st.integers(1, 9), st.floats(0.0, 0.2), st.integers(0, 99))
def test_noise_is_no_straggler(ranks: int, noise: float, seed: int) -> None:
    assert straggler_among(_times(ranks, None, 1.0, noise, seed), dict.fromkeys(range(ranks), 0), step_s=2.0) is None


@given(st.integers(0, 99))
def test_a_few_slow_steps_are_no_straggler(seed: int) -> None:
    """Collections of garbage and saves make some steps of a rank long."""
    times = _times(4, None, 1.0, 0.1, seed)
    times[2][: WINDOW // 2] = [9.0] * (WINDOW // 2)
    assert straggler_among(times, dict.fromkeys(range(4), 0), step_s=2.0) is None


def test_stages_have_other_work() -> None:
    """The stage with the head computes longer; among ranks of one stage the slow one is found."""
    times = {0: [1.0] * WINDOW, 1: [1.0] * WINDOW, 2: [3.0] * WINDOW, 3: [3.0] * WINDOW}
    stages = {0: 0, 1: 0, 2: 1, 3: 1}
    assert straggler_among(times, stages, step_s=4.0) is None
    assert straggler_among({**times, 3: [5.0] * WINDOW}, stages, step_s=6.0) == (3, 2.0)


def test_little_of_a_step_is_not_worth_a_word() -> None:
    """Twice as long, and a hundredth of a step."""
    assert straggler_among({0: [0.01] * WINDOW, 1: [0.02] * WINDOW}, {0: 0, 1: 0}, step_s=2.0) is None


@pytest.mark.parametrize("is_gpu", [False, True])
def test_the_watch_names_it_once_and_never_waits(is_gpu: bool) -> None:
    """Rank 0 names it in the window after the others have written; ranks that have written nothing are not waited for."""
    store = _Store()
    watches = [StragglerWatch(rank, [0, 0, 0], store, is_gpu=is_gpu) for rank in range(3)]
    name = "forward_s" if is_gpu else "cpu_s"
    heard: list[dict[str, Any]] = []
    for step in range(1, 4 * WINDOW + 1):
        for rank, watch in enumerate(watches):
            own_s = 2.0 if rank == 1 else 1.0
            found = watch.step(StepSums(step, {name: own_s, "wait_dp_s": 3.0}), 4.0)
            assert rank == 0 or not found
            heard += [found] if found else []
    assert len(heard) == 1
    assert (heard[0]["rank"], heard[0]["more_s"], heard[0]["of_step"]) == (1, 1.0, 0.25)
    assert "rank 1 on " in describe_stragglers(heard[0])
    assert StragglerWatch(0, [0, 0], _Store(), is_gpu=is_gpu).step(StepSums(1, {name: 1.0}), 1.0) == {}


def test_a_step_whose_sums_are_not_known_yet_is_not_counted_twice() -> None:
    """The sums of a step come later on a GPU: the same ones may be given again."""
    store = _Store()
    watch = StragglerWatch(1, [0, 0], store, is_gpu=True)
    for _ in range(3 * WINDOW):
        watch.step(StepSums(7, {"forward_s": 1.0}), 1.0)
    assert not store
