"""Frozen weights, by `model.freeze`: one device's result in every layout, no gradient, no state, and no bytes sent for them."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from samestep.building.initial_values import blueprint
from samestep.building.loss import loss_of
from samestep.building.model import model_source
from samestep.building.optimizer import optimizer_of
from samestep.datasets import batches
from samestep.errors import JobError
from samestep.examination.examine import Source
from samestep.job import Job
from samestep.layout import Layout
from samestep.memory.memory_use import at_rest
from samestep.runtime.run import Run
from tests.folders import SIZES, saved
from tests.laboratory import TOLERANCE, Observed, assert_ledger, assert_same, clipped, follow, traced_run
from tests.models import Tokens
from tests.pool import pool

FREEZE = ["model.embed_tokens.*", "*layers.0.*", "*.q_proj.*", "*norm.weight"]
WAYS = ("gate", "up", "down")
HIDDEN = 16
GRADIENTS = ("all_reduce", "reduce_scatter")


def run_of(rank: int, world: int, layout: str, job: Job, *, for_any: bool = False) -> Run:
    source = Source(model_source(job), loss_of(job), optimizer_of(job), job.model.source)
    return traced_run(job.model.model_dump_json(), source, Tokens(), layout, job, rank, world, for_any=for_any)


def observe(rank: int, world: int, layout: str, job: Job) -> Observed:
    run = run_of(rank, world, layout, job)
    seen = follow(run, Tokens(), job, record=True)
    assert not any(param.grad is not None for param in run.model.parameters() if not param.requires_grad)
    return seen


def on_ranks(layout: str, job: Job) -> list[Observed]:
    run_of(0, 1, layout, job)  # the ranks inherit what is traced
    return pool(Layout(layout).world_size).run(observe, layout, job)


def bytes_of_gradients(seen: Observed) -> int:
    rows = [row for rows in seen.ledger.values() for row in rows if row.kind in GRADIENTS]
    return sum(row.size_bytes for row in rows if row.owner != "scalars")


@functools.cache
def alone(job: str) -> Observed:
    return observe(0, 1, "dp=1", Job.model_validate_json(job))


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    model = {"source": f"hf:{saved(tmp_path_factory.mktemp('llama'), 'llama')}", "freeze": FREEZE}
    return Job(**{**clipped().model_dump(), "model": model})


LAYOUTS: list[Any] = ["dp=2 zero=1", "dp=2 zero=2", "dp=2 zero=3", "pp=2 microbatch=4", "cp=2 recompute=full"]
LAYOUTS += ["tp=2 sequence_parallel recompute=full"]
NIGHTLY = ["dp_replicate=2 dp_shard=2", "dp=2 tp=2 zero=3 sequence_parallel", "dp=2 pp=2 microbatch=2 zero=3"]
NIGHTLY += ["dp=2 pp=2 microbatch=2 zero=1 schedule=zero-bubble", "tp=2 recompute=selective"]
LAYOUTS += [pytest.param(layout, marks=pytest.mark.nightly) for layout in NIGHTLY]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_frozen_weights_are_frozen_in_every_layout(layout: str, job: Job) -> None:
    ranks = on_ranks(layout, job)
    assert_same(ranks, alone(job.model_dump_json()), TOLERANCE)
    assert_ledger(ranks, layout)


def test_nothing_is_sent_or_kept_for_frozen_weights(job: Job) -> None:
    trained = [(name, stop - start) for name, start, stop, _ in alone(job.model_dump_json()).weights]
    assert {name for name, _ in trained} == {
        f"model.layers.1.{path}.weight"
        for path in ("self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", *(f"mlp.{way}_proj" for way in WAYS))
    } | {"lm_head.weight"}
    size_bytes = 8 * sum(numel for _, numel in trained)
    seen, sharded = (on_ranks(layout, job)[0] for layout in ("dp=2", "dp=2 zero=3"))
    assert bytes_of_gradients(seen) == size_bytes
    padding = 8 * HIDDEN  # of 61 rows of the head to 62
    assert bytes_of_gradients(sharded) == size_bytes + padding
    run = run_of(0, 1, "dp=1", job)
    run.prepare(next(batches(Tokens(), job)).samples([0]))
    use = at_rest(run.program)
    assert use.gradients == size_bytes
    assert use.optimizer == 2 * size_bytes  # as many states as Adam's, whatever the optimizer is


def test_patterns_that_freeze_nothing_or_all_and_parts_of_a_shape_are_refused() -> None:
    for freeze, text in (
        ("model.layer.0.*", r"'model.layer.0.\*' matches no parameter \(did you mean 'model.layers.0.\*'\?\)"),
        ("*", r"leaves no weight to train. Use patterns that match fewer names"),
    ):
        with pytest.raises(JobError, match=text):
            blueprint(model_source(Job(model={"source": "hf:llama", "config": SIZES, "freeze": [freeze]})), 0)
    with pytest.raises(
        JobError, match=r"freeze names parts of a module, and preset:gpt2 is a shape. Use hf:FAMILY and module:function"
    ):
        Job(model={"source": "preset:gpt2", "freeze": ["*"]})
