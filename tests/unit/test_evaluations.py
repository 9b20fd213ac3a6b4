"""Held-out losses while a run trains: logged, resumed, the best checkpoint kept, and the end of a run that gets no better."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

import samestep
from samestep.datasets import open_dataset, open_held_out
from samestep.errors import DataError, JobError
from samestep.job import Job
from samestep.training import evaluations
from tests import small


def rows(run: Path) -> list[tuple[int, float]]:
    return [(row.step, row.loss) for row in evaluations.read(run, 10**9)]


_SETTINGS = {"train.evaluate_every": 2, "train.evaluate_samples": 8, "checkpoint.keep_best": True}
_EVERY_STEP = {"checkpoint.every": 1, "checkpoint.keep": 9}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of six steps, of which the last has the least validation loss; it keeps the checkpoints of all."""
    run = tmp_path_factory.mktemp("evaluations") / "whole"
    assert small.train("--out", run, **_SETTINGS, **_EVERY_STEP) == 0
    return run


def continued(whole: Path, folder: Path, newest: int, *words: str, **changes: object) -> Path:
    """Resume a copy of the run that has lost the checkpoints that are newer than one."""
    run = folder / "run"
    shutil.copytree(whole, run)
    for step in range(newest + 1, 7):
        shutil.rmtree(run / "checkpoints" / f"step-{step:06d}")
    assert small.train("--resume", *words, "--out", run, **_SETTINGS, **_EVERY_STEP, **changes) == 0
    return run


def test_the_best_checkpoint_is_kept_and_a_resume_goes_on(whole: Path, tmp_path: Path) -> None:
    assert [step for step, _ in rows(whole)] == [2, 4, 6]
    assert rows(whole)[-1][1] == json.loads((whole / "summary.json").read_text())["held_out_loss"]
    run = continued(whole, tmp_path, 4)
    assert rows(run) == rows(whole)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [(row["step"], row["held_out"]["held_out"]) for row in lines if "held_out" in row] == rows(run)
    assert [row["step"] for row in lines] == [*range(1, 7)]
    step, least = min(rows(run), key=lambda row: row[1])
    (best,) = (run / evaluations.BEST).iterdir()
    found = samestep.evaluate(best)
    assert found.step == step
    assert found.loss == pytest.approx(least, rel=1e-5)


@pytest.mark.parametrize("newest", [4, pytest.param(3, marks=pytest.mark.nightly)])
def test_the_best_of_steps_that_a_resume_drops_is_moved_aside(
    newest: int, whole: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Step 6 had the least loss; the run goes on from an older checkpoint at a rate with which no later one is as good."""
    assert min(rows(whole), key=lambda row: row[1])[0] == 6
    run = continued(whole, tmp_path, newest, "--allow", "optimizer.lr", **{"optimizer.lr": 3.0})
    said = capfd.readouterr().out
    assert f"best held the weights of step 6, which is dropped as the run continues after step {newest}" in said
    # of those of which there are weights
    kept, _ = min((row for row in rows(run) if row[0] >= newest), key=lambda row: row[1])
    (best,) = (run / evaluations.BEST).iterdir()
    found = samestep.evaluate(best)
    assert (found.step, found.loss) == (kept, pytest.approx(dict(rows(run))[kept], rel=1e-5))
    (dropped,) = (run / evaluations.DROPPED).iterdir()
    assert samestep.evaluate(dropped).step == 6


def test_a_run_without_a_better_loss_ends_early(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    settings = {"train.evaluate_every": 1, "train.evaluate_samples": 4, "train.patience": 2, "optimizer.lr": 0.0}
    assert small.train("--ranks", "2", "--out", run, **settings) == 0
    assert "ends early: no validation loss since step 1 was below" in capfd.readouterr().out
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["steps"], summary["stopped"]) == (3, False)
    assert (run / "checkpoints" / "step-000003").is_dir()
    assert small.train("--ranks", "2", "--out", run, "--resume", **settings) == 0
    assert json.loads((run / "summary.json").read_text())["steps"] == 3


def test_settings_without_evaluations_are_refused() -> None:
    with pytest.raises(JobError, match=r"train.patience needs evaluations .*Set .*train.evaluate_every = 100"):
        Job(train={"patience": 3})
    with pytest.raises(JobError, match=r"checkpoint.keep_best needs evaluations"):
        Job(checkpoint={"keep_best": True})
    with pytest.raises(DataError, match=r"needs samples that are held out. Use data.held_out above 0"):
        evaluations.check(Job(train={"evaluate_every": 5}, data={"held_out": 0.0}))


@pytest.fixture
def sets(tmp_path: Path) -> dict[str, Path]:
    """Two texts that nothing trains on."""
    found = {"digits": tmp_path / "digits.txt", "words": tmp_path / "words.txt"}
    found["digits"].write_text("0123456789 " * 40)
    found["words"].write_text("one two three four " * 30)
    return found


def test_several_held_out_sets_are_evaluated_and_one_of_them_decides(
    sets: dict[str, Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    settings: dict[str, object] = {f"data.held_out_sets.{name}": f"text:{path}" for name, path in sets.items()}
    settings |= {"train.evaluate_every": 2, "train.evaluate_samples": 8}
    alone, run = tmp_path / "alone", tmp_path / "run"
    assert small.train("--layout", "dp=1", "--out", alone, **settings) == 0
    said = capfd.readouterr().out
    words = {"train.monitor": "words", "checkpoint.keep_best": True}
    assert small.train("--layout", "dp=2", "--out", run, **settings, **words) == 0
    one, many = evaluations.read(alone, 10**9), evaluations.read(run, 10**9)
    assert [row.step for row in one] == [2, 4, 6]
    for ours, theirs in zip(one, many, strict=True):
        assert list(ours.losses) == list(theirs.losses) == ["held_out", *sets]
        assert theirs.losses == pytest.approx(ours.losses, rel=1e-5)
        assert (ours.loss, theirs.loss) == (ours.losses["held_out"], theirs.losses["words"])
    summaries = [json.loads((folder / "summary.json").read_text()) for folder in (alone, run)]
    for summary, last in zip(summaries, (one[-1], many[-1]), strict=True):
        assert (summary["held_out_loss"], summary["held_out_losses"]) == (last.loss, last.losses)
    losses = one[-1].losses
    line = f"validation loss {losses['held_out']:.4f}, digits {losses['digits']:.4f}, words {losses['words']:.4f}"
    assert f"step 6: {line}" in said
    assert f"\n{line}\n" in said
    (best,) = (run / evaluations.BEST).iterdir()
    found = samestep.evaluate(best)
    assert found.losses["words"] == found.loss == pytest.approx(min(row.loss for row in many), rel=1e-5)
    assert found.to_text().count("validation loss of words") == 1


def test_a_set_is_all_of_its_source_or_what_is_held_out_of_what_is_trained_on(sets: dict[str, Path]) -> None:
    paths = {name: f"text:{path}" for name, path in sets.items()}
    data = {"source": paths["digits"], "held_out": 0.5, "held_out_sets": paths, "sequence_length": 4}
    job = Job(data=data)
    found = open_held_out(job)
    assert job.evaluated_sets == tuple(found) == ("held_out", "digits", "words")
    assert len(found["held_out"]) == len(found["digits"]) == len(open_dataset(job, "held_out"))
    assert len(found["words"]) == len(
        open_dataset(Job(data={**data, "source": paths["words"], "held_out": 0.0}), "train")
    )
    assert Job(data={**data, "held_out": 0.0}).judge == "digits"
    assert Job(data=data, train={"evaluate_samples": 0}).evaluated_sets == ()


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"data.held_out_sets.held_out": "topics"}, "this is the name of the part of the data that is held out"),
        ({"train.monitor": "code"}, r"train.monitor = 'code' is not a set of data.held_out_sets \(there are none\)"),
        ({"train.monitor": "held_out", "data.held_out": 0.0}, "Set data.held_out = 0.1"),
        ({"data.held_out_sets.a": "text:nowhere.txt"}, r"data.held_out_sets.a: .*nowhere.txt"),
        ({"data.held_out_sets.a": "mixture"}, "data.held_out_sets.a: a validation set has one source"),
        ({"data.held_out_sets.a": "digits"}, r"data.held_out_sets.a: a sample of digits has .*. Use a source of the same kind"),
    ],
)  # fmt: skip
def test_wrong_held_out_sets_are_named(
    changes: dict[str, object], text: str, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert small.train("--out", tmp_path / "run", **{"train.evaluate_samples": 8, **changes}) == 2
    assert re.search(text, capfd.readouterr().err)
