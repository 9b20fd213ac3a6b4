"""Held-out losses while a run trains: logged, resumed, the best checkpoint kept, and the end of a run that gets no better."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import samestep
from samestep.errors import DataError, JobError
from samestep.job import Job
from samestep.training import evaluations
from tests import small


def rows(run: Path) -> list[tuple[int, float]]:
    return evaluations.read(run, 10**9)


def test_the_best_checkpoint_is_kept_and_a_resume_goes_on(tmp_path: Path) -> None:
    settings = {"train.evaluate_every": 2, "train.evaluate_samples": 8, "checkpoint.keep_best": True}
    whole, run = tmp_path / "whole", tmp_path / "run"
    assert small.train("--layout", "dp=2 zero=1", "--out", whole, **settings) == 0
    assert [step for step, _ in rows(whole)] == [2, 4, 6]
    assert rows(whole)[-1][1] == json.loads((whole / "summary.json").read_text())["held_out_loss"]
    assert small.train("--layout", "dp=2 zero=1", "--out", run, "--steps", "4", **settings) == 0
    assert small.train("--layout", "dp=2 zero=1", "--out", run, "--resume", **settings) == 0
    assert rows(run) == rows(whole)
    step, least = min(rows(run), key=lambda row: row[1])
    (best,) = (run / evaluations.BEST).iterdir()
    found = samestep.evaluate(best)
    assert found.step == step
    assert found.loss == pytest.approx(least, rel=1e-5)


def test_a_run_without_a_better_loss_ends_early(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    settings = {"train.evaluate_every": 1, "train.evaluate_samples": 4, "train.patience": 2, "optimizer.lr": 0.0}
    assert small.train("--ranks", "2", "--out", run, **settings) == 0
    assert "ends early: no held-out loss since step 1 was below" in capfd.readouterr().out
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["steps"], summary["stopped"]) == (3, False)
    assert (run / "checkpoints" / "step-000003").is_dir()
    assert small.train("--ranks", "2", "--out", run, "--resume", **settings) == 0
    assert json.loads((run / "summary.json").read_text())["steps"] == 3


def test_settings_without_evaluations_are_refused() -> None:
    with pytest.raises(JobError, match=r"train.patience needs evaluations .* train.evaluate_every = 100 works"):
        Job(train={"patience": 3})
    with pytest.raises(JobError, match=r"checkpoint.keep_best needs evaluations"):
        Job(checkpoint={"keep_best": True})
    with pytest.raises(DataError, match=r"needs samples that are held out: data.held_out above 0"):
        evaluations.check(Job(train={"evaluate_every": 5}, data={"held_out": 0.0}))
