"""Replicas that are trained apart: what is predicted of them follows from their program."""

from __future__ import annotations

import pytest

from samestep.errors import JobError, LayoutError
from samestep.hardware import load
from samestep.job import Job
from samestep.layout import Layout
from samestep.memory.memory_use import at_rest
from samestep.program.ops import OpKind
from samestep.strategies import program_of
from samestep.wings.plan.simulation.simulate import predict
from tests.laws.models import MODELS, assert_bounded

LAYOUTS = ["dp=4", "dp_replicate=4 dp_shard=2 zero=1", "dp_replicate=4 dp_shard=2 zero=3", "dp=4 pp=2 microbatch=1"]


def job(every: int, codec: str = "none") -> Job:
    numerics = {"replicas": 4 if every > 1 else 1, "exchange_every": every, "compression": codec}
    return Job(train={"global_batch": 16, "steps": 1000}, numerics=numerics)


@pytest.mark.parametrize("codec", ["none", "int8"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_only_an_exchange_sends_more_than_scalars_between_replicas(layout: str, codec: str) -> None:
    program = program_of(MODELS["tiny"], job(20, codec), Layout(layout))
    made = program.step.contributions
    assert made is not None
    assert not [op for _, op in program.ops() if op.axis == made.axis]
    sent = [op for op in program.exchange if op.axis == made.axis]
    moved = sum(op.size_bytes for op in sent if op.after == (f"{OpKind.UPDATE}:optimizer",))
    trained = sum(param.numel for param in program.step.model.params) / (2 if "dp_shard" in layout else 1)
    assert moved == pytest.approx(
        trained * (4 if codec == "none" else 1), rel=0.06
    )  # 16 elements have a scale of a byte


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_step_takes_its_share_of_an_exchange(layout: str) -> None:
    hardware, model = load("a100-80x8"), MODELS["tiny"]
    often, seldom = (predict(model, job(every), Layout(layout), hardware) for every in (2, 20))
    assert often.timeline.step_s == seldom.timeline.step_s
    assert often.exchange_s == seldom.exchange_s > 0
    assert often.step_s - often.timeline.step_s == pytest.approx(10 * (seldom.step_s - seldom.timeline.step_s))


@pytest.mark.parametrize("what", ["tiny", "experts"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_bounds_of_the_search_hold(what: str, layout: str) -> None:
    assert_bounded(MODELS[what], job(20), layout, load("a100-80x8"))


def test_a_rank_holds_outer_weights_and_their_momentum_too() -> None:
    plain, apart = (at_rest(program_of(MODELS["tiny"], job(every), Layout("dp=4"))) for every in (1, 2))
    assert apart.weights == plain.weights
    assert apart.optimizer == plain.optimizer + 2 * plain.weights


@pytest.mark.parametrize(
    "layout", ["dp=1", "dp=2", "dp=2 zero=1 microbatch=1", "dp=8", "dp_replicate=2 dp_shard=4 zero=3"]
)
@pytest.mark.parametrize(("every", "codec"), [(20, "none"), (20, "int8"), (1, "int8"), (1, "powersgd")])
def test_another_number_of_data_ranks_is_rejected(layout: str, every: int, codec: str) -> None:
    numerics = {"replicas": 4, "exchange_every": every, "compression": codec}
    with pytest.raises(
        LayoutError, match=r"numerics\.replicas = 4: each data rank makes one contribution, and .*\. Use dp"
    ):
        program_of(MODELS["tiny"], Job(train={"global_batch": 16}, numerics=numerics), Layout(layout))


@pytest.mark.parametrize("key", ["exchange_parts", "exchange_delay"])
def test_keys_of_streams_were_removed_and_ask_for_nothing_at_their_defaults(key: str) -> None:
    with pytest.raises(JobError, match="was removed in this version; use exchange_every") as raised:
        Job(numerics={"exchange_every": 4, "replicas": 2, key: 3})
    assert raised.value.code == "job-value-removed"
    tables = Job().model_dump()
    tables["numerics"] |= {"exchange_parts": 1, "exchange_delay": 0, "exchange_mix": 0.5}
    tables["train"]["record_kernels"] = False
    assert Job(**tables) == Job()
