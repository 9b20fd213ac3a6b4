"""What every run says of itself: proven, when and how, or not proven; and what was allowed though it is not."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from samestep.proof.verdict import Cause, Verdict
from samestep.runtime.run import Run
from samestep.training import rank_part, train
from tests import small


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))


def _summary(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    return found


def test_a_run_proves_its_layout_first_and_later_runs_know_it(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    proven, later, other = (tmp_path / name for name in ("proven", "later", "other"))
    words = ("--layout", "dp=2", "--steps", "2")
    assert small.train(*words, "--out", proven, "--prove") == 0
    assert "\nproven: the same result" in capfd.readouterr().out
    assert _summary(proven)["proof"].startswith("proven on 20")
    assert json.loads((proven / "proof.json").read_text())["layout"] == "dp=2"
    assert small.train(*words, "--out", later, train__steps=5) == 0
    assert "\nproven on 20" in capfd.readouterr().out
    assert small.train(*words, "--out", other, train__seed=5) == 0
    assert "\nnot verified yet: `samestep verify`" in capfd.readouterr().out
    assert _summary(other)["proof"].startswith("not verified yet: ")


def test_a_layout_that_differs_is_not_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    verdict = Verdict(
        layout="dp=2",
        job="hf:llama",
        steps=3,
        precision="float64",
        checks=(),
        cause=Cause.DRIFT,
        explanation="a differs",
    )
    monkeypatch.setattr(train, "verify", lambda job, layout: dataclasses.replace(verdict, layout=str(layout)))
    assert small.train("--layout", "dp=2", "--out", tmp_path / "run", "--prove") == 1
    complaint = capsys.readouterr().err
    assert complaint.startswith("samestep: --prove: the layout differs from one device, nothing is trained:")
    assert "differs: copies of one weight differ between ranks" in complaint
    assert not (tmp_path / "run").exists()


def _waiving(run: Run, workload: Any) -> dict[str, float]:
    if run.place.rank == 1:
        run.job.run.waived("loss", "some-code", "the loss is a mean")
    return {}


def test_what_was_allowed_is_told_whatever_rank_met_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(rank_part, "held_out_losses", _waiving)
    words = ("--layout", "dp=2", "--steps", "1", "--out")
    assert small.train(*words, tmp_path / "run", "--allow", "loss", "samples") == 0
    text = 'the loss is a mean (allowed by run.allow = ["loss"])'
    assert f"\nnot proven, but allowed: {text}\n" in capfd.readouterr().out
    assert _summary(tmp_path / "run")["waived"] == [text]
    assert 'allow = [\n    "loss",\n    "samples",\n]' in (tmp_path / "run" / "job.toml").read_text()
    assert small.train(*words, tmp_path / "again") == 2
    assert 'the loss is a mean; run.allow = ["loss"] lets it run unproven' in capfd.readouterr().err
    assert small.train("--allow", "lose") == 2
    assert "got 'lose' (did you mean 'loss'?)" in capfd.readouterr().err
