"""The states of the process's generators, read as words: equal exactly where nothing was drawn, and put back to the number."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch

from samestep.datasets.generators import plain_states, put_all_back, states_of, states_of_plain


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()
    yield
    torch.set_rng_state(before[0])
    random.setstate(before[1])
    np.random.set_state(before[2])


DRAWS: dict[str, Callable[[], object]] = {
    "torch": lambda: torch.rand(1).item(),
    "torch's normal numbers": lambda: torch.randn(3).tolist(),
    "Python": random.random,
    "Python's normal numbers": lambda: random.gauss(0.0, 1.0),
    "numpy": np.random.rand,
    "numpy's normal numbers": np.random.randn,
    "a seed": lambda: torch.manual_seed(torch.randint(1 << 30, ()).item()).initial_seed(),
}


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
@pytest.mark.parametrize("seed", range(3))
def test_states_differ_where_something_was_drawn_and_go_back_to_the_number(draw, seed):
    random.seed(seed)
    np.random.seed(seed)
    for number in range(2 * seed):  # an odd number of normal ones leaves one that no word shows
        (np.random.randn, random.gauss)[number % 2](*(() if number % 2 == 0 else (0.0, 1.0)))
    for _ in range(3):
        before = states_of()
        assert states_of() == before
        found = draw()
        after = states_of()
        assert after != before
        put_all_back(before)
        assert states_of() == before
        assert draw() == found
        assert states_of() == after


@pytest.mark.parametrize("draw", [torch.rand, lambda size: [random.random() for _ in range(size)], np.random.rand])
def test_states_differ_too_where_as_many_words_were_drawn_as_a_state_has(draw: Callable[[int], object]) -> None:
    draw(1)
    before = states_of()
    draw(624)
    assert states_of() != before


def test_states_go_through_a_file_as_plain_values() -> None:
    for _ in range(2):  # the second time numpy holds a normal number
        stored = plain_states(states_of())
        found = torch.rand(3).tolist(), random.random(), np.random.randn(), np.random.rand()
        put_all_back(states_of_plain(stored))
        assert (torch.rand(3).tolist(), random.random(), np.random.randn(), np.random.rand()) == found


def test_another_generator_in_the_place_of_numpys_is_followed() -> None:
    if not hasattr(np.random, "set_bit_generator"):
        pytest.skip("this numpy keeps its generator")
    held = np.random.get_bit_generator()
    try:
        np.random.set_bit_generator(np.random.PCG64(3))
        before = states_of()
        found = np.random.rand()
        assert states_of() != before
        put_all_back(before)
        assert np.random.rand() == found
    finally:
        np.random.set_bit_generator(held)
