"""A loop of the user's own saves, loads and gathers its model in any layout: what a plain module then holds is the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import samestep
from samestep.datasets import batches
from samestep.errors import CheckpointError
from samestep.job import Job
from tests.laboratory import job_of, make_run, on_ranks
from tests.models import MODELS, Tokens
from tests.parity.test_every_pair import assert_written_once

NIGHTLY = pytest.mark.nightly


def _job() -> Job:
    # The gradient of a bias of keys is rounding alone, which Adam divides by itself but for eps.
    return job_of("float64", 4, optimizer={"name": "adamw", "options": {"eps": 1e-5}})


def _loop(
    rank: int, world: int, model: str, layout: str, job: Job, folder: str, until: int, everywhere: bool
) -> tuple[list[float], dict[str, Tensor]]:
    """The loop of the documentation: continue where there is a checkpoint, take steps, save; return losses and the whole."""
    run = make_run(rank, world, model, layout, job)
    if (found := samestep.latest(folder)) is not None:
        run.load(found)
    losses = []
    for batch in samestep.batches(Tokens(), job, first_step=run.steps_taken):
        if batch.step >= until:
            break
        losses.append(run.step(batch).loss)
    run.save(folder)
    return losses, run.state_dict(on_every_rank=everywhere)


@pytest.mark.parametrize(
    ("model", "first", "second"),
    [
        ("deep_tied", "tp=2 pp=2 microbatch=2", "dp=2 zero=3"),
        ("mixtral", "dp=2 ep=2 zero=1", "tp=2"),
        pytest.param("gpt2", "dp=2 zero=3", "pp=2 microbatch=2", marks=NIGHTLY),
        pytest.param("qwen3", "tp=2", "dp_replicate=2 dp_shard=2", marks=NIGHTLY),
    ],
)
def test_a_loop_that_saves_and_loads_is_the_one_that_did_not_stop(
    model: str, first: str, second: str, tmp_path: Path
) -> None:
    job = _job()
    start = on_ranks(first, _loop, model, job, str(tmp_path / "cut"), 2, True)
    assert_written_once(tmp_path / "cut" / "step-000002")
    end = on_ranks(second, _loop, model, job, str(tmp_path / "cut"), 4, False)
    (losses, expected) = on_ranks("dp=1", _loop, model, job, str(tmp_path / "whole"), 4, False)[0]
    assert start[0][0] + end[0][0] == pytest.approx(losses, rel=1e-9)
    assert all(_differ_by_nothing(held, start[0][1]) for _, held in start), "every rank holds the whole, if asked to"
    assert all(not held for _, held in end[1:]), "else rank 0 does"
    found = end[0][1]
    assert [*found] == [*expected], "the names of a plain module, in its order"
    for name, value in found.items():
        assert torch.allclose(value, expected[name], rtol=1e-9, atol=1e-12), name
    MODELS[model]().to(torch.float64).load_state_dict(found, strict=True)


def _reading(rank: int, world: int, model: str, layout: str, job: Job, reads: bool) -> list[float]:
    """A loop that looks at whole weights between a backward and the update."""
    run, losses = make_run(rank, world, model, layout, job), []
    for batch in samestep.batches(Tokens(), job):
        losses.append(run.backward(batch).loss)
        if reads:
            with run.gathered() as whole:
                assert sum(float(param.detach().norm()) for param in whole.parameters()) > 0
        run.update()
    return losses


@pytest.mark.parametrize("layout", ["dp=2 zero=3", pytest.param("tp=2", marks=NIGHTLY)])
def test_weights_that_are_only_read_leave_the_gradients_that_wait(layout: str) -> None:
    found = [on_ranks(layout, _reading, "plain", _job(), reads)[0] for reads in (True, False)]
    assert found[0] == found[1]


def _differ_by_nothing(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_a_folder_of_checkpoints_means_its_newest_and_an_empty_one_is_refused(tmp_path: Path) -> None:
    job = _job()
    _loop(0, 1, "plain", "dp=1", job, str(tmp_path), 2, False)
    run = make_run(0, 1, "plain", "dp=1", job)
    run.load(tmp_path)
    assert run.steps_taken == 2
    run.prepare(_example(job))
    again = make_run(0, 1, "plain", "dp=1", job)
    again.prepare(_example(job))
    again.load(tmp_path / "step-000002")
    assert _differ_by_nothing(run.state_dict(), again.state_dict())
    with pytest.raises(CheckpointError, match=r"nowhere holds no checkpoint. Use a folder that run\.save was given"):
        run.load(tmp_path / "nowhere")
    assert samestep.latest(tmp_path / "nowhere") is None


def _example(job: Job) -> Any:
    return next(batches(Tokens(), job)).samples([0])
