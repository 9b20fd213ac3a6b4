"""A pipeline schedule is one `ScheduleSpec`: one that the product does not know is added here, and every verb takes it.

Its order is gpipe's, with weight gradients that all wait until the last backward is over: neither the product's gpipe nor
its zero bubble, so whatever asks for a schedule by its name fails here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from samestep.errors import LayoutError
from samestep.hardware import load
from samestep.job import Job
from samestep.layout import Layout
from samestep.models.decoder import Decoder
from samestep.models.decoder_spec import spec
from samestep.program.step import StepSpec
from samestep.schedules import SCHEDULES, Action, Order, ScheduleSpec, TaskKind, check, gpipe, order
from samestep.strategies import programs_of
from samestep.wings.plan import search
from samestep.wings.plan.bounds.layer_costs import Prices
from samestep.wings.plan.bounds.least_memory import Needs
from samestep.wings.plan.bounds.step_time import Bounds
from samestep.wings.plan.simulation.simulate import predict
from tests.laboratory import TOLERANCE, Observed, assert_ledger, assert_same, clipped, observe, reference
from tests.pool import pool

LAYOUT = "pp=2 schedule=late-weights microbatch=2"


def late_weights(stage: int, num_stages: int, num_microbatches: int, num_chunks: int = 1) -> Order:
    """All forwards, all backwards, and then all gradients of weights."""
    plain = gpipe(stage, num_stages, num_microbatches, num_chunks)
    return (*plain, *(Action(TaskKind.WEIGHT, microbatch) for microbatch in range(num_microbatches)))


SPEC = ScheduleSpec(name="late-weights", order=late_weights, splits_backward=True)


@contextmanager
def known() -> Iterator[None]:
    """Add the row to the table, in this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(SCHEDULES, SPEC.name, SPEC)
        yield


def observe_knowing(rank: int, world: int, model: str, layout: str, job: Job) -> Observed:
    """Observe a run on a rank that knows the schedule."""
    with known():
        return observe(rank, world, model, layout, job, record=True)


MODEL = spec(Decoder(layers=4, hidden=64, heads=4, vocab=512, sequence=64), "small")


def test_only_a_row_of_the_table_makes_a_schedule() -> None:
    with pytest.raises(LayoutError, match=f"schedule=late-weights must be one of {', '.join(SCHEDULES)}"):
        Layout(LAYOUT)
    with known():
        assert str(Layout(LAYOUT)) == "dp=1 pp=2 schedule=late-weights microbatch=2"


@pytest.mark.parametrize("num_stages", [1, 2, 5])
def test_its_orders_pass_the_check(num_stages: int) -> None:
    with known():
        check([order(SPEC.name, stage, num_stages, 7) for stage in range(num_stages)], 1)


def test_its_program_is_built_and_played() -> None:
    with known():
        layout, job = Layout(LAYOUT), Job(train={"global_batch": 8})
        programs = programs_of(MODEL, job, layout)
        assert [task.action for task in programs[0].tasks[:-1]] == list(late_weights(0, 2, 4))
        late = predict(MODEL, job, layout, load("h100x8"))
        plain = predict(MODEL, job, Layout(pp=2, microbatch=2, schedule="gpipe"), load("h100x8"))
        least = predict(MODEL, job, Layout(pp=2, microbatch=2, schedule="1f1b"), load("h100x8"))
    assert late.timeline.step_s >= plain.timeline.step_s
    assert late.peak.activations >= plain.peak.activations > least.peak.activations


def test_it_is_planned_and_its_bounds_hold() -> None:
    hardware, job = load("h100x8"), Job(train={"global_batch": 9}, numerics={"precision": "bf16"})
    with known():
        tried = [one.layout for one in search.plan(MODEL, job, hardware, 4, top=3).rejections]
        mine = [layout for layout in tried if layout.schedule == SPEC.name]
        prices = Prices(MODEL, job, hardware)
        bounds, needs = Bounds(prices), Needs(prices, 2)
        for layout in mine:
            try:
                played = predict(MODEL, job, layout, hardware)
            except LayoutError:
                continue
            step = StepSpec.of(MODEL, job, layout, hardware.devices_per_node)
            assert bounds.step_s(step) <= played.step_s * (1 + 1e-9), layout
            assert needs.need(step).total <= played.peak.total * (1 + 1e-9), layout
    assert len(mine) > 10


def test_it_computes_what_one_device_computes() -> None:
    with known():
        ranks = pool(2).run(observe_knowing, "deep_llama", LAYOUT, clipped())
        assert_ledger(ranks, LAYOUT)
    assert_same(ranks, reference("deep_llama"), TOLERANCE)
