"""Laws of the slowest rank: equal devices take unequal times for the same work, and all wait for the slowest of them."""

from __future__ import annotations

import itertools
import random
import statistics
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from samestep import hardware
from samestep.job import Job
from samestep.layout import Layout
from samestep.models.presets import preset
from samestep.planning.bounds.layer_costs import Prices
from samestep.planning.bounds.step_time import Bounds
from samestep.simulation.clock import Score
from samestep.simulation.prediction import predict
from tests.laws.models import LAW

GPU = hardware.load("h100x8")
JOB = Job(train={"global_batch": 1024}, numerics={"precision": "bf16"})
MODEL = preset("gpt2")
ranks, spreads = st.integers(1, 2**14), st.floats(0.001, 0.2)


def longer(num_ranks: int, spread: float) -> float:
    """Return how much longer the slowest of so many devices computes than one of them is expected to."""
    return GPU.sustained / replace(GPU, spread=spread).slowest_of(num_ranks).sustained


@LAW
@given(spreads)
def test_one_rank_waits_for_nobody_and_equal_ones_for_nobody_either(spread: float) -> None:
    one = replace(GPU, spread=spread)
    assert one.slowest_of(1) is one
    assert replace(GPU, spread=0.0).slowest_of(4096) == replace(GPU, spread=0.0)


@LAW
@given(ranks, st.integers(1, 1000), spreads)
def test_the_slowest_of_more_ranks_is_slower(few: int, more: int, spread: float) -> None:
    assert 1.0 <= longer(few, spread) < longer(few + more, spread)


@LAW
@given(st.integers(2, 2**14), spreads, spreads)
def test_twice_the_spread_is_twice_the_wait(count: int, spread: float, other: float) -> None:
    assert (longer(count, spread) - 1) / spread == pytest.approx((longer(count, other) - 1) / other)


@pytest.mark.parametrize("count", [2, 8, 64, 512])
def test_the_slowest_of_drawn_times_is_as_slow_as_expected(count: int) -> None:
    draw = random.Random(count)
    largest = [max(draw.gauss(1.0, 0.05) for _ in range(count)) for _ in range(2000)]
    assert longer(count, 0.05) == pytest.approx(statistics.fmean(largest), rel=0.005)


def test_a_step_grows_with_ranks_by_no_more_than_its_compute_does() -> None:
    layouts = [Layout.parse(f"dp={count} microbatch=1") for count in (1, 8, 64, 512)]
    plain, spread = (
        [predict(MODEL, JOB, layout, replace(GPU, spread=part)).step_s for layout in layouts] for part in (0.0, 0.05)
    )
    waits = [one / other for one, other in zip(spread, plain, strict=True)]
    assert waits[0] == 1.0
    for count, wait in zip((8, 64, 512), waits[1:], strict=True):
        assert 1.0 < wait <= longer(count, 0.05)
    assert all(one < other for one, other in itertools.pairwise(waits))


@pytest.mark.parametrize(
    "words", ["dp=8 zero=1 tp=2 pp=4 microbatch=2", "dp=64 zero=3 microbatch=2", "dp=8 pp=4 microbatch=8"]
)
def test_seconds_without_a_timeline_are_those_of_the_timeline_and_no_less_than_their_bound(words: str) -> None:
    layout, machine = Layout.parse(words), replace(GPU, spread=0.05)
    found = predict(MODEL, JOB, layout, machine)
    assert Score(found.programs, machine).step_s(machine) == found.timeline.step_s
    bounds = Bounds(Prices(MODEL, JOB, machine.slowest_of(layout.world_size)))
    assert bounds.step_s(found.programs[0].step) <= found.step_s * (1 + 1e-9)
