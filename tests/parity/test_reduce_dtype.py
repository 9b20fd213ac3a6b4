"""Gradients may be sent in another dtype than masters: one property of the step says which, and all else follows.

The stand-in for a codec: sums in bfloat16 under float32 masters. Every rank sends what its program lists, in half the
bytes, and the gradients are those of one device to the rounding of bfloat16.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from samestep.hardware import load
from samestep.job import Job
from samestep.layout import Layout
from samestep.planning.bounds.layer_costs import Prices
from samestep.planning.bounds.step_time import Bounds
from samestep.program.step import StepSpec
from samestep.simulation.prediction import predict
from tests.laboratory import Observed, assert_ledger, job_of, largest_error, observe, reference, whole
from tests.laws.test_search import MODELS
from tests.pool import pool

LAYOUTS = [
    "dp=2",
    "dp=2 zero=1",
    "dp=2 zero=3",
    "dp_replicate=2 dp_shard=2 zero=1 microbatch=1",
    "dp=4 reduce=root",
]
ROUNDING = 2.0**-8
"""Half a unit in the last of bfloat16's 8 bits."""


@contextmanager
def sent_in_bfloat16() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StepSpec, "reduce_dtype", property(lambda _: "bfloat16"))
        yield


def observe_sending(rank: int, world: int, model: str, layout: str, job: Job) -> Observed:
    """Observe a run whose gradients are sent in bfloat16."""
    with sent_in_bfloat16():
        return observe(rank, world, model, layout, job, record=True)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_sums_in_bfloat16_are_sent_as_listed_and_rounded_alone(layout: str) -> None:
    job = job_of("float32", 1)
    ranks = pool(Layout.parse(layout).world_size).run(observe_sending, "plain", layout, job)
    assert_ledger(ranks, layout)
    reduced = [
        row for rows in ranks[0].ledger.values() for row in rows if row.kind.startswith(("all_reduce", "reduce"))
    ]
    assert {row.dtype for row in reduced if row.owner != "scalars"} == {"bfloat16"}
    error, _ = largest_error(whole([seen.gradients[0] for seen in ranks]), whole(reference("plain", job).gradients))
    assert 1e-5 < error <= 2 * Layout.parse(layout).world_size * ROUNDING  # each rank's part is rounded, and each sum


@pytest.mark.parametrize("what", ["tiny", "experts"])
@pytest.mark.parametrize("layout", ["dp=4 microbatch=1", "dp=4 zero=1 microbatch=1", "dp=4 zero=3 microbatch=1"])
def test_bounds_know_what_is_sent(what: str, layout: str) -> None:
    hardware, job = load("a100-80x8"), Job(train={"global_batch": 16})
    plain = predict(MODELS[what], job, Layout.parse(layout), hardware)
    with sent_in_bfloat16():
        step = StepSpec.of(MODELS[what], job, Layout.parse(layout), hardware.devices_per_node)
        bounds, played = Bounds(Prices(MODELS[what], job, hardware)), predict(MODELS[what], job, step.layout, hardware)
        for times in (bounds.closed_times, bounds.played_times, bounds.slowed_times):
            assert bounds.step_s(step, times(step)) <= played.step_s * (1 + 1e-9)
    assert played.step_s < plain.step_s
