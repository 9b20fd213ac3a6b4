"""Replicas that are trained apart: what is predicted of them follows from their program."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import replace

import pytest

from samestep.errors import JobError, LayoutError
from samestep.hardware import load
from samestep.job import Job
from samestep.layout import Layout
from samestep.memory.memory_use import at_rest
from samestep.program.exchange_times import ExchangeTimes, Phase, parts_of
from samestep.program.ops import Ops
from samestep.program.step import StepSpec
from samestep.strategies import program_of
from samestep.wings.plan.bounds.layer_costs import Prices
from samestep.wings.plan.bounds.step_time import Bounds
from samestep.wings.plan.simulation.simulate import predict
from tests.laws.test_search import MODELS

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
    (exchange,) = program.exchanges
    moved = sum(op.size_bytes for op in exchange[Phase.START] if op.axis == made.axis)
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
    hardware, mine = load("a100-80x8"), job(20)
    step = StepSpec.of(MODELS[what], mine, Layout(layout), hardware.devices_per_node)
    bounds, played = Bounds(Prices(MODELS[what], mine, hardware)), predict(MODELS[what], mine, step.layout, hardware)
    assert bounds.step_s(step) <= played.step_s * (1 + 1e-9)


def test_one_device_holds_every_replica() -> None:
    plain, apart = (at_rest(program_of(MODELS["tiny"], job(every), Layout())) for every in (1, 2))
    weights = plain.weights
    assert apart.weights == 4 * weights
    assert apart.optimizer == 4 * plain.optimizer + 2 * weights


# -- parts that are exchanged while steps go on --------------------------------------------------------------------

TIMES = [ExchangeTimes(every, parts, delay, 43) for every, parts, delay in [(2, 1, 0), (6, 1, 6), (6, 3, 2), (7, 3, 2), (20, 5, 1), (9, 4, 0)]]  # fmt: skip


@pytest.mark.parametrize("times", TIMES, ids=str)
def test_each_part_is_exchanged_once_in_a_period_and_ends_when_it_is_said_to(times: ExchangeTimes) -> None:
    of_part: dict[int, list[tuple[Phase, int]]] = {part: [] for part in range(times.parts)}
    for step in range(1, times.last + 1):
        for phase, part in times.behind(step):
            of_part[part].append((phase, step))
    for events in of_part.values():
        assert [phase for phase, _ in events] == [Phase.START, Phase.SUM, Phase.END] * (len(events) // 3)
        starts, sums, ends = ([step for phase, step in events if phase is one] for one in Phase)
        *before, last = starts
        assert last == sums[-1] == ends[-1] == times.last  # the last step ends all of them at once
        assert {after - start for start, after in itertools.pairwise(before)} <= {times.every}
        assert all(end - start == times.delay for start, end in zip(starts, ends, strict=True) if end < times.last)
        assert all(start <= middle <= end for start, middle, end in zip(starts, sums, ends, strict=True))


@pytest.mark.parametrize("times", TIMES, ids=str)
def test_one_part_is_under_way_at_a_time(times: ExchangeTimes) -> None:
    under_way: set[int] = set()
    for step in range(1, times.last):
        for phase, part in times.behind(step):
            if phase is Phase.START:
                assert not under_way
                under_way.add(part)
            elif phase is Phase.END:
                under_way.remove(part)


def streamed(parts: int, delay: int, codec: str = "none") -> Job:
    numerics = {"replicas": 4, "exchange_every": 20, "exchange_parts": parts, "exchange_delay": delay}
    return Job(train={"global_batch": 16, "steps": 1000}, numerics={**numerics, "compression": codec})


@pytest.mark.parametrize("codec", ["none", "int8"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_parts_are_the_same_in_every_layout_and_are_together_what_one_exchange_sends(layout: str, codec: str) -> None:
    model = MODELS["tiny"]
    whole, parts = (program_of(model, one, Layout(layout)) for one in (job(20, codec), streamed(3, 2, codec)))
    assert parts.step.sharing.parts == parts_of(model, 3)
    assert {*parts.step.sharing.parts} == {param.name for param in model.params if param.trainable}
    for bucket in parts.buckets:
        assert {parts_of(model, 3)[member.name] for member in bucket.members} == {bucket.part}
    sizes = [[_sent_bytes(exchange) for exchange in program.exchanges] for program in (whole, parts)]
    assert sum(sizes[1]) == pytest.approx(sum(sizes[0]), rel=0.02)  # buffers are padded
    assert max(sizes[1]) < 0.7 * sum(sizes[0]) or "pp" in layout


def _sent_bytes(exchange: Mapping[Phase, Ops]) -> int:
    return sum(op.size_bytes for ops in exchange.values() for op in ops)


@pytest.mark.parametrize("codec", ["none", "int8"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_steps_hide_what_is_exchanged_while_they_go_on(layout: str, codec: str) -> None:
    model, where, hosts = MODELS["tiny"], Layout(layout), replace(load("a100-80x8"), devices_per_node=2)
    fast = predict(model, streamed(2, 0, codec), where, hosts)
    rate = hosts.inter.bytes_per_s * fast.exchange_s / (8 * fast.timeline.step_s)  # each part takes some four steps
    slow = replace(hosts, inter=replace(hosts.inter, latency_s=0.0, bytes_per_s=rate))
    found = [predict(model, streamed(2, delay, codec), where, slow) for delay in range(11)]
    step_s, exposed = found[0].timeline.step_s, [one.exchange_s for one in found]
    for delay, (longer, shorter) in enumerate(itertools.pairwise(exposed)):
        assert shorter <= longer * (1 + 1e-9) or codec == "int8"  # a second collective may go on late
        assert exposed[delay] >= exposed[0] - 2 * delay * 1.1 * step_s  # of two parts, each behind so many steps
    assert exposed[10] < 0.5 * exposed[0]


@pytest.mark.parametrize(
    ("numerics", "works"),
    [
        ({"exchange_parts": 2}, "Set exchange_every = 20"),
        ({"exchange_delay": 1}, "Set exchange_every = 20"),
        ({"exchange_every": 4, "replicas": 2, "exchange_parts": 5}, "Set exchange_parts = 4"),
        ({"exchange_every": 5, "replicas": 2, "exchange_parts": 2, "exchange_delay": 3}, "Set exchange_delay = 2"),
    ],
)
def test_times_that_do_not_fit_say_what_works(numerics: dict[str, int], works: str) -> None:
    with pytest.raises(JobError, match=works):
        Job(numerics=numerics)


def test_more_parts_than_layers_are_refused() -> None:
    with pytest.raises(LayoutError, match=r"layers with trained weights. Set exchange_parts = "):
        program_of(MODELS["tiny"], streamed(20, 1), Layout("dp=4"))
