"""The watch over generators: each is compared around each call, Python's over a whole step once a step has left all where they were."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch

from samestep.datasets import generators
from samestep.datasets.generators import states_of
from samestep.runtime.guards import randomness
from samestep.runtime.guards.randomness import GeneratorWatch

DRAWS: dict[str, Callable[[], object]] = {
    "torch's": lambda: torch.rand(1),
    "numpy's": np.random.rand,
    "Python's": random.random,
}


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    before = states_of()
    yield
    generators.put_all_back(before)


def quiet_step(watch: GeneratorWatch) -> None:
    watch.leave()
    watch.settle()
    assert watch.moved() == watch.moved() == watch.end_backwards() == ""


@pytest.mark.parametrize("name", DRAWS)
@pytest.mark.parametrize("steps", [0, 1, 3])
def test_a_draw_is_found_in_its_step_whatever_the_loop_draws_between_two(name: str, steps: int) -> None:
    watch, draw = GeneratorWatch(torch.device("cpu")), DRAWS[name]
    for _ in range(steps):
        quiet_step(watch)
        draw()  # the loop
    watch.leave()
    watch.settle()
    draw()
    found = [watch.moved(), watch.end_backwards()]
    assert [one.startswith(name) for one in found] == ([False, True] if name == "Python's" and steps else [True, False])
    watch.leave()
    watch.settle()
    draw()
    assert watch.moved().startswith(name)  # each call again, in the step after


@pytest.mark.parametrize("name", DRAWS)
def test_a_draw_of_an_update_is_found_in_it(name: str) -> None:
    watch = GeneratorWatch(torch.device("cpu"))
    quiet_step(watch)
    for _ in range(2):  # of two optimizers, between which the loop draws
        watch.leave()
        DRAWS[name]()
        watch.settle()
        assert watch.moved(ends=True) == ""
    DRAWS[name]()
    assert watch.moved(ends=True).startswith(name)


def test_a_step_asks_python_for_its_state_as_often_whatever_the_number_of_calls(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[object] = []

    def state() -> object:
        asked.append(None)
        return generators.state_of_python()

    monkeypatch.setattr(randomness, "state_of_python", state)
    watch = GeneratorWatch(torch.device("cpu"))
    quiet_step(watch)
    asked.clear()
    watch.leave()
    for _ in range(8):
        watch.settle()
        assert watch.moved() == watch.moved() == ""
    assert watch.end_backwards() == ""
    assert len(asked) == 2
