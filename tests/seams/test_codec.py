"""A gradient codec is one file and one row: `float24.py`, here in the test folder, and every reader takes it.

Besides, a user says it with one word of `numerics.compression`, which a job is given here past its check.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import samestep
from samestep.hardware import load
from samestep.job import Job
from samestep.layout import Layout
from samestep.program.codecs import CODECS, PLAIN
from samestep.program.ops import Op
from samestep.program.step import StepSpec
from samestep.strategies import program_of
from samestep.wings.plan.bounds.layer_costs import Prices
from samestep.wings.plan.bounds.step_time import Bounds
from samestep.wings.plan.simulation.simulate import predict
from tests.laboratory import Observed, assert_ledger, job_of, largest_error, observe, reference, whole
from tests.laws.test_search import MODELS
from tests.pool import pool
from tests.seams.float24 import ROW

LAYOUTS = ["dp=2", "dp=2 zero=1", "dp_replicate=2 dp_shard=2 zero=3", "pp=2 dp=2"]
ROUNDING = 2.0**-15


@contextmanager
def known() -> Iterator[None]:
    """Add the row to the table, in this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(CODECS, ROW.name, ROW)
        yield


def coded(job: Job, replicas: int) -> Job:
    """The same job, with gradients that the codec writes down."""
    numerics = job.numerics.model_copy(update={"compression": ROW.name, "replicas": replicas})
    return job.model_copy(update={"numerics": numerics})


def observe_knowing(rank: int, world: int, model: str, layout: str, job: Job) -> Observed:
    """Observe a run on a rank that knows the codec."""
    with known():
        return observe(rank, world, model, layout, job, record=True)


def gradient_ops(what: str, layout: str, job: Job) -> list[Op]:
    program = program_of(MODELS[what], job, Layout(layout))
    return [op for _, op in program.ops() if op.codec is not None]


@pytest.mark.parametrize("what", ["tiny", "experts"])
@pytest.mark.parametrize("layout", ["dp=4", "dp=4 pp=2 microbatch=1"])
def test_the_program_names_it_and_lists_its_bytes(what: str, layout: str) -> None:
    job = Job(train={"global_batch": 16})
    plain = gradient_ops(what, layout, job)
    with known():
        mine = gradient_ops(what, layout, coded(job, 4))
    assert {op.codec for op in plain} == {PLAIN}
    assert {(str(op.kind), op.codec, op.dtype) for op in mine} == {
        ("all_to_all", ROW.name, "uint8"),
        ("all_gather", ROW.name, "uint8"),
    }
    for kind in ("all_to_all", "all_gather"):
        sent = sum(op.size_bytes for op in mine if op.kind == kind)
        assert sent == pytest.approx(3 / 4 * sum(op.size_bytes for op in plain), rel=0.01)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_it_is_sent_as_listed_and_only_rounds(layout: str) -> None:
    job = job_of("float32", 1)
    ranks = pool(Layout(layout).world_size).run(observe_knowing, "deep_llama", layout, coded(job, 2))
    assert_ledger(ranks, layout)
    error, _ = largest_error(
        whole([seen.gradients[0] for seen in ranks]), whole(reference("deep_llama", job).gradients)
    )
    assert 1e-6 < error <= 4 * ROUNDING  # each contribution is rounded, and their sum


@pytest.mark.parametrize("what", ["tiny", "experts"])
@pytest.mark.parametrize("layout", ["dp=4 microbatch=1", "dp=4 zero=1 microbatch=1"])
def test_bounds_of_the_search_hold(what: str, layout: str) -> None:
    hardware, job = load("a100-80x8"), coded(Job(train={"global_batch": 16}), 4)
    with known():
        step = StepSpec.of(MODELS[what], job, Layout(layout), hardware.devices_per_node)
        bounds, played = Bounds(Prices(MODELS[what], job, hardware)), predict(MODELS[what], job, step.layout, hardware)
        assert bounds.step_s(step) <= played.step_s * (1 + 1e-9)


def test_a_row_is_priced_by_its_bytes() -> None:
    assert ROW.size_bytes(10, 1) == 30
    assert CODECS["int8"].size_bytes(512, 256) == 514


@pytest.mark.parametrize("store", ["replicated", "sharded", "owning", "fsdp_units", "unit_order"])
def test_a_store_asks_for_no_codec_and_no_replica(store: str) -> None:
    """`store.codes` does, in `gradient_codes.py`."""
    path = Path(samestep.__file__).parent / "runtime" / "weights" / f"{store}.py"
    tree = ast.parse(path.read_text(encoding="utf-8"))
    asked = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    asked |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    rare = {"codec", "sharing", "codec_backend", "contributions", "scatters_codes", "trains_apart", "num_apart"}
    assert not asked & {*rare, "exchange_every", "samestep.runtime.codecs.exchange", "samestep.program.codecs"}
