"""A gradient codec is one file and one row: `bf16_sums.py`, here in the test folder, and every reader takes it.

The job has no word for a codec yet, so the test says which one a step uses in the one place that will read the word
(`StepSpec.codec`); nothing else of the product is changed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest

from samestep.hardware import load
from samestep.job import Job
from samestep.layout import Layout
from samestep.planning.bounds.layer_costs import Prices
from samestep.planning.bounds.step_time import Bounds
from samestep.program.codecs import CODECS, PLAIN
from samestep.program.ops import BYTES_OF, Op
from samestep.program.program import LedgerRow
from samestep.program.step import StepSpec
from samestep.simulation.prediction import predict
from samestep.strategies import program_of
from tests.laboratory import Observed, assert_ledger, job_of, largest_error, observe, reference, whole
from tests.laws.test_search import MODELS
from tests.pool import pool
from tests.seams.bf16_sums import ROW

LAYOUTS = [
    "dp=2",
    "dp=2 zero=1",
    "dp=2 zero=2",
    "dp=2 zero=3 microbatch=1",
    "dp_replicate=2 dp_shard=2 zero=1 microbatch=1",
    "dp_replicate=2 dp_shard=2 zero=3",
    "dp=4 reduce=root",
    "pp=2 dp=2",
]
ROUNDING = 2.0**-8
"""Half a unit in the last of bfloat16's 8 bits."""


@contextmanager
def known() -> Iterator[None]:
    """Add the row to the table, and let every step use it, in this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(CODECS, ROW.name, ROW)
        patch.setattr(StepSpec, "codec", property(lambda _: ROW.name))
        yield


def observe_knowing(rank: int, world: int, model: str, layout: str, job: Job) -> Observed:
    """Observe a run on a rank that knows the codec."""
    with known():
        return observe(rank, world, model, layout, job, record=True)


def gradient_ops(what: str, layout: str) -> list[Op]:
    program = program_of(MODELS[what], Job(train={"global_batch": 16}), Layout.parse(layout))
    return [op for _, op in program.ops() if op.codec is not None]


@pytest.mark.parametrize("what", ["tiny", "experts"])
@pytest.mark.parametrize("layout", ["dp=4", "dp=4 zero=1", "dp=4 zero=3", "dp=4 reduce=root", "dp=2 pp=2 microbatch=1"])
def test_the_program_names_it_and_lists_its_bytes(what: str, layout: str) -> None:
    plain = gradient_ops(what, layout)
    with known():
        mine = gradient_ops(what, layout)
    assert plain
    assert {op.codec for op in plain} == {PLAIN}
    halved = [op.but(codec=ROW.name, dtype="bfloat16", size_bytes=op.size_bytes // 2) for op in plain]
    assert mine == halved


def test_what_fsdp2_sums_over_replicas_is_a_plain_sum() -> None:
    """FSDP2 lets its reduce_scatter be replaced, and not the all_reduce that follows it."""
    with known():
        found = {
            (str(op.kind), op.axis, op.codec, op.dtype) for op in gradient_ops("tiny", "dp_replicate=2 dp_shard=2")
        }
    assert found == {
        ("reduce_scatter", "dp_shard", ROW.name, "bfloat16"),
        ("all_reduce", "dp_replicate", PLAIN, "float32"),
    }


@pytest.mark.parametrize("layout", LAYOUTS)
def test_it_is_sent_as_listed_and_only_rounds(layout: str) -> None:
    job = job_of("float32", 1)
    ranks = pool(Layout.parse(layout).world_size).run(observe_knowing, "deep_llama", layout, job)
    assert_ledger(ranks, layout)
    sent = [row for rows in ranks[0].ledger.values() for row in rows if is_reduction(row)]
    assert {row.dtype for row in sent} == (
        {"bfloat16", "float32"} if "zero=3" in layout and "rep" in layout else {"bfloat16"}
    )
    error, _ = largest_error(
        whole([seen.gradients[0] for seen in ranks]), whole(reference("deep_llama", job).gradients)
    )
    assert 1e-5 < error <= 2 * Layout.parse(layout).world_size * ROUNDING  # each rank's part is rounded, and each sum


def is_reduction(row: LedgerRow) -> bool:
    return row.kind in ("all_reduce", "reduce", "reduce_scatter") and row.owner != "scalars"


@pytest.mark.parametrize("what", ["tiny", "experts"])
@pytest.mark.parametrize("layout", ["dp=4 microbatch=1", "dp=4 zero=1 microbatch=1", "dp=4 zero=3 microbatch=1"])
def test_the_clock_prices_fewer_bytes_and_bounds_hold(what: str, layout: str) -> None:
    hardware, job = load("a100-80x8"), Job(train={"global_batch": 16})
    plain = predict(MODELS[what], job, Layout.parse(layout), hardware)
    with known():
        step = StepSpec.of(MODELS[what], job, Layout.parse(layout), hardware.devices_per_node)
        bounds, played = Bounds(Prices(MODELS[what], job, hardware)), predict(MODELS[what], job, step.layout, hardware)
        for times in (bounds.closed_times, bounds.played_times, bounds.slowed_times):
            assert bounds.step_s(step, times(step)) <= played.step_s * (1 + 1e-9)
    assert played.step_s < plain.step_s


def test_a_row_is_priced_by_its_dtype() -> None:
    assert ROW.size_bytes(10, "float32") == 20
    assert replace(ROW, dtype="int8").size_bytes(10, "float32") == 10
    assert CODECS[PLAIN].size_bytes(10, "float64") == 10 * BYTES_OF["float64"]
