"""Ranks that part while a run trains are stopped, with the odd one's number and the tensor's name."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from samestep.datasets import batches
from samestep.errors import DriftError
from samestep.job import Job
from samestep.layout import Layout
from samestep.runtime.weights import flat_buffers, replicated
from tests.laboratory import job_of, make_run, on_ranks
from tests.models import Tokens
from tests.pool import pool, telling

JOB = job_of("float32", 3, train={"watch_every": 2})


def told(rank: int, world: int, model: str, layout: str, job: Job, odd: int | None, name: str = "") -> tuple[int, str]:
    """Take steps, on one rank with a weight that goes astray; return how many there were, and what was said."""
    run = make_run(rank, world, model, layout, job)
    try:
        for batch in batches(Tokens(), job):
            report = run.step(batch)
            if rank == odd:
                for piece in run.updater.pieces:
                    if piece.name == name:
                        piece.value.detach().view(-1)[0] += 0.25
            assert report.step == run.steps_taken
    except DriftError as error:
        return run.steps_taken, str(error)
    return run.steps_taken, ""


@pytest.mark.parametrize(
    ("layout", "model"),
    [
        ("dp_replicate=2 dp_shard=2 zero=3", "plain"),
        ("dp=2 tp=2", "qwen3"),
        ("dp=2 pp=2 microbatch=2", "deep_tied"),
        ("dp=2 ep=2 zero=1", "mixtral"),
        ("dp=1 cp=2", "llama"),
    ],
)
def test_nothing_is_said_of_a_clean_run(layout, model):
    ranks = Layout(layout).world_size
    assert on_ranks(layout, told, model, JOB, None) == [(3, "")] * ranks


def test_a_replica_that_drifts_is_named():
    said = on_ranks("dp=4", told, "plain", JOB, 2, "blocks.1.mix.weight")
    assert {steps for steps, _ in said} == {2}
    assert len({text for _, text in said}) == 1
    assert "ranks disagree on blocks.1.mix.weight after step 2: rank 2 against the others" in said[0][1]


def test_a_whole_weight_that_drifts_between_tp_ranks_is_named():
    said = on_ranks("dp=1 tp=2", told, "attentive", JOB, 1, "blocks.0.norm.weight")
    assert said[0] == said[1]
    assert "blocks.0.norm.weight" in said[0][1]


@telling
def other_samples(rank: int, world: int) -> None:
    run = make_run(rank, world, "plain", "dp=2", JOB)
    for batch in batches(Tokens(), JOB):
        run.step(replace(batch, indices=batch.indices[::-1].copy()) if rank and batch.step else batch)


def test_ranks_with_other_samples_are_told():
    expected = "ranks disagree on the samples after step 2: ranks 0, 1 against each other"
    assert all(expected in text for text in pool(2).run(other_samples))


@telling
def with_other_things(rank: int, world: int, layout: str) -> None:
    """Take the first step, watched; two ranks send gradients in two dtypes of the same size."""
    job = job_of("float32", 1, train={"watch_every": 1}, numerics={"on_nonfinite": "skip"})
    run = make_run(rank, world, "plain", layout, job)
    send = flat_buffers.start_collective

    def in_another_dtype(kind, flat, group):
        return send(kind, flat.to((torch.bfloat16, torch.float16)[rank]), group)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replicated, "start_collective", in_another_dtype)
        run.step(next(iter(batches(Tokens(), job))))


def test_a_collective_with_different_things_is_named():
    said = pool(2).run(with_other_things, "dp=2 zero=1")
    assert said[0] == said[1]
    assert "in step 1 ranks 0,1 disagree on one collective" in said[0]
    assert "bfloat16" in said[0]
    assert "rank 1 with" in said[0]


def test_a_fingerprint_sees_every_bit():
    from samestep.state.fingerprints import word_sums

    value = torch.randn(5000)
    for index in (0, 4095, 4096, 4999):
        other = value.clone()
        other.view(torch.int32)[index] ^= 2
        assert not torch.equal(word_sums(value), word_sums(other)), index
    assert not torch.equal(word_sums(value), word_sums(value.flip(0)))
