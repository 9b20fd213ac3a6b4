"""The states of the process's generators: every draw changes them, and put back they give the same numbers."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
import torch

from samestep.datasets import generators

DRAWS: dict[str, Callable[[], object]] = {
    "torch": lambda: torch.rand(3).tolist(),
    "torch, normal": lambda: torch.randn(()).item(),
    "python": random.random,
    "python, first of two normal": lambda: random.gauss(0, 1),
    "python, many": lambda: [random.random() for _ in range(700)],
    "python, seed": lambda: random.seed(3),
    "numpy": lambda: np.random.rand(),
    "numpy, normal": lambda: np.random.randn(),
}


@pytest.fixture(autouse=True, params=["words in place", "asked"])
def _read_in_both_ways(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "asked":
        monkeypatch.setattr(generators, "_IN_PYTHON", None)


@pytest.mark.parametrize("name", DRAWS)
def test_a_draw_changes_the_states_and_is_repeated_once_they_are_put_back(name: str) -> None:
    before = generators.states_of()
    first = DRAWS[name]()
    assert generators.states_of() != before
    for states in (before, generators.states_of_plain(generators.plain_states(before))):
        generators.put_all_back(states)
        assert generators.states_of() == before
        assert DRAWS[name]() == first


def test_the_second_of_two_normal_numbers_of_python_moves_no_word_and_is_seen() -> None:
    random.seed(0)
    random.gauss(0, 1)
    before = generators.states_of()
    random.gauss(0, 1)
    assert generators.states_of() != before


def test_states_as_a_file_holds_them_are_those_of_getstate() -> None:
    assert generators.plain_states(generators.states_of())[1] == random.getstate()
