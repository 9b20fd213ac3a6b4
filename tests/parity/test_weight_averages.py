"""Moving averages of weights: those of torch's AveragedModel in a plain loop, in every layout, checkpoint and verb."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import samestep
from samestep.building.loss import loss_of
from samestep.building.optimizer import optimizer_of
from samestep.datasets import Batch, batches
from samestep.errors import CheckpointError, JobError, ModelError
from samestep.examination.examine import Source
from samestep.job import Job
from samestep.memory.memory_use import at_rest, saving_host_bytes
from samestep.runtime.checkpoints import checkpoint
from samestep.runtime.run import Run
from samestep.runtime.weights.moving_averages import WeightAverages
from samestep.runtime.weights.pieces import Piece
from tests import small
from tests.laboratory import TOLERANCE, Observed, assert_same, follow, job_of, perturbed, traced_run
from tests.models import Tokens
from tests.parity.test_update_rules import Small
from tests.pool import pool

DECAY = 0.8
GROUPS = [{"match": ["blocks.*.up.weight"], "name": "muon", "lr": 0.02}]
OPTIMIZER = {"name": "adamw", "lr": 0.01, "options": {"eps": 1e-3}, "groups": GROUPS}


def job_with(precision: str = "float64", **tables: Any) -> Job:
    train = {"global_batch": 4, "ema": DECAY}
    return job_of(precision, 3, train=train, optimizer=OPTIMIZER, **tables)


def run_of(rank: int, world: int, layout: str, job: Job) -> Run:
    source = Source(perturbed(Small), loss_of(job), optimizer_of(job), "small")
    run = traced_run(("small", Tokens), source, Tokens(), layout, job, rank, world, for_any=True)
    run.prepare(next(batches(Tokens(), job)).samples([0]))
    return run


def held_out(run: Run) -> float:
    return run.evaluate(Batch(0, np.arange(6), Tokens()))["loss"]


def averages_of(run: Run) -> Observed:
    """The averages stand where weights stand, so that they are compared like weights; and the loss with them."""
    before = [piece.master().clone() for piece in run.updater.pieces]
    seen = Observed()
    with run.averaged():
        seen.losses.append(held_out(run))
        again = follow(run, Tokens(), without_steps(run.job))
        seen.weights, seen.index, seen.cuts = again.weights, again.index, again.cuts
    assert all(torch.equal(old, piece.master()) for old, piece in zip(before, run.updater.pieces, strict=True))
    return seen


def without_steps(job: Job) -> Job:
    return job.model_copy(update={"train": job.train.model_copy(update={"steps": 0})})


def observe(rank: int, world: int, layout: str, job: Job, start: Path | None = None, until: int = 3) -> list[Observed]:
    run = run_of(rank, world, layout, job)
    if start is not None:
        checkpoint.load(run, start / "step-000002")
    trained = Observed()
    for batch in batches(Tokens(), job, first_step=run.steps_taken):
        if batch.step < until:
            trained.losses.append(run.step(batch).loss)
    return [trained, averages_of(run)]


@functools.cache
def alone() -> list[Observed]:
    return observe(0, 1, "dp=1", job_with())


def saved(rank: int, world: int, layout: str, job: Job, folder: Path) -> None:
    run = run_of(rank, world, layout, job)
    for batch in batches(Tokens(), job):
        if batch.step < 2:
            run.step(batch)
    checkpoint.save(run, folder, keep=1)


def test_averages_are_resumed_in_another_layout(tmp_path: Path) -> None:
    pool(2).run(saved, "dp=2 zero=3", job_with(), tmp_path)
    for ranks in ([observe(0, 1, "dp=1", job_with(), tmp_path)], pool(2).run(observe, "tp=2", job_with(), tmp_path)):
        assert_same([averages for _, averages in ranks], alone()[1], TOLERANCE)
    other = job_with().model_copy(update={"train": job_with().train.model_copy(update={"ema": 0.9})})
    run = run_of(0, 1, "dp=1", other)
    with pytest.raises(CheckpointError, match=r"another train.ema: resume with the job"):
        checkpoint.load(run, tmp_path / "step-000002")


def test_a_run_that_goes_back_to_its_start_averages_anew(tmp_path: Path) -> None:
    job = job_with()
    run = run_of(0, 1, "dp=1", job)
    run.save(tmp_path)
    stream = list(batches(Tokens(), job))
    run.step(stream[0])
    run.step(stream[1])
    run.load(tmp_path)
    averages = run.updater.averages
    assert averages is not None
    assert all(averages.of(piece) is None for piece in run.updater.pieces)
    run.step(stream[0])
    assert all(torch.equal(averages.of(piece), piece.master()) for piece in run.updater.pieces)  # type: ignore[arg-type]


def in_half_precision(rank: int, world: int, layout: str) -> None:
    """Masters in two halves come back to the bit, and a rank holds as much as memory says."""
    job = job_with("bf16")
    run = run_of(rank, world, layout, job)
    plain = run_of(rank, world, layout, job.model_copy(update={"train": job.train.model_copy(update={"ema": None})}))
    for batch in batches(Tokens(), job):
        run.step(batch)
        plain.step(batch)
    averages_of(run)
    for ours, theirs in zip(run.updater.pieces, plain.updater.pieces, strict=True):
        assert torch.equal(ours.master(), theirs.master())
    averages = run.updater.averages
    assert averages is not None
    held = sum(4 * average.numel() for piece in run.updater.pieces if (average := averages.of(piece)) is not None)
    with_and_without = [
        (at_rest(one.program, 2, rank).optimizer, saving_host_bytes(one.program, 2, rank)) for one in (run, plain)
    ]
    for more, less in zip(*with_and_without, strict=True):
        assert more - less == held > 0


def test_training_and_memory_with_averages() -> None:
    pool(2).run(in_half_precision, "dp=2 zero=1")


def test_a_skipped_step_is_not_averaged() -> None:
    job = job_with(numerics={"on_nonfinite": "skip", "precision": "float64"})
    run = run_of(0, 1, "dp=1", job)
    stream = list(batches(Tokens(), job))
    run.step(stream[0])
    averages = run.updater.averages
    assert averages is not None
    first = [averages.of(piece).clone() for piece in run.updater.pieces]  # type: ignore[union-attr]
    run.model.get_parameter("head.bias").register_hook(lambda gradient: gradient * torch.nan)
    assert run.step(stream[1]).skipped
    assert all(torch.equal(one, averages.of(piece)) for one, piece in zip(first, run.updater.pieces, strict=True))  # type: ignore[arg-type]


def test_weights_are_neither_trained_nor_saved_while_averages_stand_in_their_place(tmp_path: Path) -> None:
    run = run_of(0, 1, "dp=1", job_with())
    batch = next(batches(Tokens(), job_with()))
    run.step(batch)
    with run.averaged():
        for act in (lambda: run.step(batch), lambda: run.save(tmp_path), lambda: run.averaged().__enter__()):
            with pytest.raises(ModelError, match=r"run\.\w+ within run.averaged\(\)"):
                act()
    plain = run_of(0, 1, "dp=1", job_of("float64", 1))
    with pytest.raises(ModelError, match=r"Set train.ema = 0.999"), plain.averaged():
        pass
    with pytest.raises(JobError, match=r"train.evaluate_ema evaluates the averages of weights: train.ema = 0.999"):
        Job(train={"evaluate_ema": True})
    with pytest.raises(
        JobError, match=r"train.ema averages .* and numerics.exchange_every = 4 trains replicas separately"
    ):
        Job(train={"ema": 0.9}, numerics={"exchange_every": 4, "replicas": 2})


def test_verbs_take_the_averages(tmp_path: Path) -> None:
    run = tmp_path / "run"
    settings = {"train.ema": 0.5, "train.evaluate_samples": 8, "train.evaluate_every": 3}
    assert small.train("--layout", "dp=2 zero=1", "--out", run, **settings) == 0
    weights, averages = samestep.evaluate(run).loss, samestep.evaluate(run, ema=True).loss
    assert weights != averages
    other = tmp_path / "evaluated"
    assert small.train("--layout", "dp=2", "--out", other, **settings, **{"train.evaluate_ema": True}) == 0
    assert json.loads((other / "summary.json").read_text())["held_out_loss"] == pytest.approx(averages, rel=1e-5)
    assert samestep.evaluate(other).loss == pytest.approx(averages, rel=1e-5)
    assert samestep.sample(run, "a", tokens=4, temperature=0.0, ema=True) == samestep.sample(
        other, "a", tokens=4, temperature=0.0
    )
    for ema in (False, True):
        samestep.export(run, tmp_path / str(ema), ema=ema)
    plain, averaged = ((tmp_path / str(ema) / "model.safetensors").read_bytes() for ema in (False, True))
    assert plain != averaged
    bare = tmp_path / "bare"
    assert small.train("--out", bare, "--layout", "dp=1") == 0
    with pytest.raises(CheckpointError, match=r"holds no averages of weights, .*Leave out --ema"):
        samestep.export(bare, tmp_path / "out", ema=True)


def test_the_device_leaves_a_step_out_of_the_average() -> None:
    """As it does where an update is launched before the host knows whether it is skipped."""
    weight = torch.tensor([1.0, 2.0])
    piece = Piece("weight", 0, 2, weight, lambda: weight)
    averages = WeightAverages(0.75)
    averages.update([piece])
    weight.add_(4.0)
    for held_back, expected in ((1.0, [1.0, 2.0]), (0.0, [2.0, 3.0])):
        averages.update([piece], torch.tensor(held_back))
        assert averages.of(piece).tolist() == expected  # type: ignore[union-attr]
