"""The watch over generators: they are compared over all forwards and backwards of a step at once, and over each update."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from torch import Tensor, nn

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


@pytest.mark.parametrize("name", DRAWS)
def test_a_draw_is_found_at_the_end_of_its_calls(name: str) -> None:
    """Those of forwards and backwards, and those of updates: of two optimizers, between which the loop draws."""
    watch, draw = GeneratorWatch(torch.device("cpu")), DRAWS[name]
    for _ in range(2):
        watch.leave()
        draw()  # the loop
        watch.settle()
        assert watch.moved() == ""
        draw()
        watch.settle()  # before the next forward
        assert name in watch.moved()
        assert watch.moved() == ""


@pytest.mark.parametrize("name", DRAWS)
def test_the_module_that_draws_is_named(name: str) -> None:
    class Drawing(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            DRAWS[name]()
            return x

    watch, model = GeneratorWatch(torch.device("cpu")), nn.Sequential(nn.Tanh(), nn.Sequential(Drawing()))
    assert watch.first_module_that_draws(model, lambda: model(torch.ones(2))) == "1.0"
    assert watch.first_module_that_draws(model[0], lambda: model[0](torch.ones(2))) == ""
    assert watch.moved() == "", "the watch goes on from there"


def test_a_step_reads_the_states_twice_whatever_the_number_of_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []

    def states() -> object:
        asked.append(None)
        return states_of()

    monkeypatch.setattr(randomness, "states_of", states)
    watch = GeneratorWatch(torch.device("cpu"))
    for _ in range(8):
        watch.settle()
    assert watch.moved() == ""
    assert len(asked) == 2
