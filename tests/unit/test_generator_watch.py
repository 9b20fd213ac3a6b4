"""The watch over generators: they are compared over all forwards and backwards of a step at once, and over each update."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import samestep
from samestep.datasets import generators
from samestep.datasets.generators import states_of
from samestep.errors import UnprovenError
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


COUNTER = itertools.count()


def _by_global(outputs: Tensor, batch: Any) -> tuple[Tensor, int]:
    return outputs.sum() * (1 + 0.1 * next(COUNTER)), len(outputs)


def _by_closure() -> Any:
    weights = iter([0.1, 0.5, *[1.0] * 100])
    return lambda outputs, batch: (outputs.sum() * next(weights), len(outputs))


class ByAttribute:
    def __init__(self) -> None:
        self.numbers = (number for number in range(100))

    def __call__(self, outputs: Tensor, batch: Any) -> tuple[Tensor, int]:
        return outputs.sum() * next(self.numbers), len(outputs)


class Counting(nn.Linear):
    def __init__(self) -> None:
        super().__init__(3, 2)
        self.calls = itertools.count()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1 + 0.1 * next(self.calls))


def _summed(outputs: Tensor, batch: Any) -> tuple[Tensor, int]:
    return outputs.sum(), len(outputs)


@pytest.mark.parametrize(
    ("model", "loss"),
    [(nn.Linear, _by_global), (nn.Linear, _by_closure()), (nn.Linear, ByAttribute()), (Counting, _summed)],
    ids=["global", "closure", "attribute", "model"],
)
def test_an_iterator_is_refused_by_name_before_the_first_update(model: Any, loss: Any) -> None:
    """Trials advance it, and nothing puts it back."""
    job = samestep.Job(train={"global_batch": 4}, run={"device": "cpu"})
    module = model(3, 2) if model is nn.Linear else model()
    weight = module.weight.detach().clone()
    run = samestep.parallelize(module, loss, torch.optim.SGD, layout="dp=1", job=job)
    with pytest.raises(UnprovenError, match="is an iterator, which trials of the model and of the loss advance"):
        run.step((torch.randn(4, 3), torch.zeros(4)))
    assert torch.equal(run.model.weight, weight)
