"""The watch over generators: they are compared around each call, or over all forwards and backwards of a step at once."""

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
    "torch": lambda: torch.rand(1),
    "numpy": np.random.rand,
    "Python": random.random,
}


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    before = states_of()
    yield
    generators.put_all_back(before)


@pytest.mark.parametrize("is_close", [True, False])
@pytest.mark.parametrize("name", DRAWS)
def test_a_draw_is_found_in_its_call_or_at_the_end_of_its_step(name: str, is_close: bool) -> None:
    watch, draw = GeneratorWatch(torch.device("cpu")), DRAWS[name]
    watch.is_close = is_close
    for _ in range(2):
        watch.leave()
        draw()  # the loop
        watch.settle()
        assert watch.moved() == ""
        draw()
        watch.settle()  # samples are read, after which the generators stand where they stood
        found = [watch.moved(), watch.moved(ends=True)]
        if is_close:
            assert found == ["", ""]
        else:
            assert found[0] == ""
            assert name in found[1]
        draw()
        found = [watch.moved(), watch.moved(ends=True)]
        assert [name in one for one in found] == [is_close, not is_close]


@pytest.mark.parametrize("name", DRAWS)
def test_a_draw_of_an_update_is_found_in_it(name: str) -> None:
    watch = GeneratorWatch(torch.device("cpu"))
    watch.is_close = False
    watch.settle()
    assert watch.moved(ends=True) == ""
    for _ in range(2):  # of two optimizers, between which the loop draws
        watch.leave()
        DRAWS[name]()
        watch.settle()
        assert watch.moved(ends=True) == ""
    DRAWS[name]()
    assert name in watch.moved(ends=True)


def test_a_step_reads_the_states_as_often_whatever_the_number_of_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []

    def states() -> object:
        asked.append(None)
        return states_of()

    monkeypatch.setattr(randomness, "states_of", states)
    watch = GeneratorWatch(torch.device("cpu"))
    watch.is_close = False
    for _ in range(8):
        watch.settle()
        assert watch.moved() == watch.moved() == ""
    assert watch.moved(ends=True) == ""
    assert len(asked) == 2
