"""Replicas that are trained apart: what is predicted of them follows from their program."""

from __future__ import annotations

import pytest

from samestep.hardware import load
from samestep.job import Job
from samestep.layout import Layout
from samestep.planning.bounds.layer_costs import Prices
from samestep.planning.bounds.step_time import Bounds
from samestep.program.exchange_times import Phase
from samestep.program.step import StepSpec
from samestep.simulation.memory import at_rest
from samestep.simulation.prediction import predict
from samestep.strategies import program_of
from tests.laws.test_search import MODELS

LAYOUTS = ["dp=4", "dp_replicate=4 dp_shard=2 zero=1", "dp_replicate=4 dp_shard=2 zero=3", "dp=4 pp=2 microbatch=1"]


def job(every: int, codec: str = "none") -> Job:
    numerics = {"replicas": 4 if every > 1 else 1, "exchange_every": every, "compression": codec}
    return Job(train={"global_batch": 16, "steps": 1000}, numerics=numerics)


@pytest.mark.parametrize("codec", ["none", "int8"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_only_an_exchange_sends_more_than_scalars_between_replicas(layout: str, codec: str) -> None:
    program = program_of(MODELS["tiny"], job(20, codec), Layout.parse(layout))
    made = program.step.contributions
    assert made is not None
    assert not [op for _, op in program.ops() if op.axis == made.axis]
    (exchange,) = program.exchanges
    moved = sum(op.size_bytes for op in exchange[Phase.START] if op.axis == made.axis)
    trained = sum(param.numel for param in program.step.model.params) / (2 if "dp_shard" in layout else 1)
    assert moved == pytest.approx(
        trained * (4 if codec == "none" else 1), rel=0.06
    )  # 16 elements have a scale of a byte


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_step_takes_its_share_of_an_exchange(layout: str) -> None:
    hardware, model = load("a100-80x8"), MODELS["tiny"]
    often, seldom = (predict(model, job(every), Layout.parse(layout), hardware) for every in (2, 20))
    assert often.timeline.step_s == seldom.timeline.step_s
    assert often.exchange_s == seldom.exchange_s > 0
    assert often.step_s - often.timeline.step_s == pytest.approx(10 * (seldom.step_s - seldom.timeline.step_s))


@pytest.mark.parametrize("what", ["tiny", "experts"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_bounds_of_the_search_hold(what: str, layout: str) -> None:
    hardware, mine = load("a100-80x8"), job(20)
    step = StepSpec.of(MODELS[what], mine, Layout.parse(layout), hardware.devices_per_node)
    bounds, played = Bounds(Prices(MODELS[what], mine, hardware)), predict(MODELS[what], mine, step.layout, hardware)
    for times in (bounds.closed_times, bounds.played_times, bounds.slowed_times):
        assert bounds.step_s(step, times(step)) <= played.step_s * (1 + 1e-9)


def test_one_device_holds_every_replica() -> None:
    plain, apart = (at_rest(program_of(MODELS["tiny"], job(every), Layout())) for every in (1, 2))
    weights = plain.weights
    assert apart.weights == 4 * weights
    assert apart.optimizer == 4 * plain.optimizer + 2 * weights
