"""`samestep train`: every layout prints the losses of one rank, however it is started, and leaves the same files."""

from __future__ import annotations

import functools
import json
import tempfile
from pathlib import Path

import pytest

import samestep
from tests import small

STEPS = 20
# The default job itself, twenty steps of it.
DEFAULT = {
    "model.config.hidden_size": 64,
    "model.config.intermediate_size": 176,
    "model.config.num_hidden_layers": 4,
    "model.config.num_attention_heads": 4,
    "model.config.num_key_value_heads": 4,
    "model.config.max_position_embeddings": 256,
    "data.sequence_length": 64,
    "train.global_batch": 32,
    "train.steps": 1000,
    "schedule.warmup_steps": 50,
}
LAYOUTS = [
    "dp=4",
    "dp=2 zero=1",
    "dp=2 zero=2",
    "dp=4 zero=3",
    "dp_replicate=2 dp_shard=2",
    "tp=2",
    "pp=2 microbatch=8",
    "dp=2 tp=2 pp=2 zero=3 schedule=interleaved virtual_stages=2 microbatch=4",
]
TOLERANCES = {"float64": 1e-6, "float32": 1e-4}  # Adam amplifies the noise of reordered sums
# A smaller batch of shorter samples will do, and leaves float64 nothing to chance.
FEWER = {
    "float64": {"data.sequence_length": 16, "train.global_batch": 8},
    "float32": {"data.sequence_length": 32, "train.global_batch": 16},
}


def _train_default(precision: str, layout: list[str], out: Path) -> list[float]:
    words = ["--steps", str(STEPS), "--out", out, *layout]
    assert small.train(*words, **{**DEFAULT, **FEWER[precision]}, numerics__precision=precision) == 0
    return small.losses(out)


@functools.cache
def _of_one_rank(precision: str) -> list[float]:
    with tempfile.TemporaryDirectory() as folder:
        return _train_default(precision, ["--ranks", "1"], Path(folder, "one"))


@pytest.mark.parametrize(
    ("layout", "precision"),
    [
        *(pytest.param(layout, "float64", marks=pytest.mark.nightly) for layout in LAYOUTS),
        *(pytest.param(layout, "float32", marks=pytest.mark.nightly) for layout in LAYOUTS if layout != "tp=2"),
        ("tp=2", "float32"),
    ],
)
def test_the_default_job_has_the_losses_of_one_rank(layout: str, precision: str, tmp_path: Path) -> None:
    found, expected = _train_default(precision, ["--layout", layout], tmp_path / "run"), _of_one_rank(precision)
    assert len(found) == STEPS
    assert found == pytest.approx(expected, rel=TOLERANCES[precision], abs=0)
    assert found[-1] < found[0] - 0.5, "it learns"


def test_a_run_leaves_its_files(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run"
    evaluated = {"train.evaluate_samples": 8, "train.sample_tokens": 12, "checkpoint.every": 2, "checkpoint.keep": 2}
    assert small.train("--layout", "dp=2 zero=1", "--out", out, **evaluated) == 0
    said = capfd.readouterr().out
    assert "--- sample, before" not in said, "weights that were drawn write nothing"
    assert "--- sample, after training\nThe " in said

    rows = small.metrics(out, timings=True)
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    keys = ["step", "loss", "grad_norm", "lr", "tokens", "step_s", "tokens_per_s", "data_wait_s", "memory_bytes"]
    keys += ["tflops_per_device"]
    others = ("mfu", "time")  # of a measured machine, and of the step before
    assert all([key for key in row if key not in others] == keys for row in rows)
    assert all(row["tokens"] == 8 * 16 and row["memory_bytes"] > 0 for row in rows)
    assert [row["lr"] for row in rows[:2]] == pytest.approx([3e-3, 6e-3])

    summary = json.loads((out / "summary.json").read_text())
    assert summary["steps"] == 6
    assert summary["loss"] == rows[-1]["loss"]
    assert 0 < summary["held_out_loss"] < 6
    assert summary["stopped"] is False
    assert f"validation loss {summary['held_out_loss']:.4f}" in said

    job = samestep.load(out / "job.toml")
    assert job.layout == {"dp_replicate": 1, "dp_shard": 2, "zero": 1}
    assert str(samestep.Layout(**job.layout)) == (out / "layout.txt").read_text().strip() == "dp=2 zero=1"
    assert job.train.steps == 6
    (tmp_path / "again.toml").write_text(job.to_toml())
    assert samestep.load(tmp_path / "again.toml") == job

    assert small.checkpoints(out) == ["step-000004", "step-000006"]
    assert list((out / "tensorboard").glob("events.out.tfevents.*"))
    assert not list(out.rglob("*draft*"))


OWN = ["train", "--layout", "dp=2 zero=2", *small.settings(train__evaluate_samples=4)]


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of our own launcher."""
    folder = tmp_path_factory.mktemp("own") / "run"
    assert small.main(*OWN, "--out", folder) == 0
    return folder


def test_the_job_file_of_a_run_repeats_it_from_python(own: Path, tmp_path: Path) -> None:
    summary = samestep.train(samestep.load(own / "job.toml"), out=tmp_path / "again")
    assert summary is not None
    assert small.metrics(own) == small.metrics(tmp_path / "again")
    assert _held_out_loss(own) == summary.held_out_loss
    assert (own / "job.toml").read_text() == (tmp_path / "again" / "job.toml").read_text()


def _held_out_loss(run: Path) -> float:
    return float(json.loads((run / "summary.json").read_text())["held_out_loss"])


FEW = {"train.global_batch": 2, "train.evaluate_samples": 3, "train.sample_tokens": 9, "train.steps": 2}


@pytest.mark.parametrize(
    "layouts",
    [
        ["dp=3 zero=3", "tp=2 sequence_parallel", "pp=2"],
        pytest.param(["dp=4 zero=3", "dp=2", "tp=2"], marks=pytest.mark.nightly),
    ],
)
def test_every_layout_evaluates_and_speaks_alike(
    layouts: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """More ranks than samples, too."""
    one = tmp_path / "one"
    assert small.train("--ranks", "1", "--out", one, **FEW, numerics__precision="float64") == 0
    alone = capfd.readouterr().out
    for layout in layouts:
        run = tmp_path / layout
        assert small.train("--layout", layout, "--out", run, **FEW, numerics__precision="float64") == 0
        said = capfd.readouterr().out
        assert said.split("---")[1] == alone.split("---")[1], f"{layout}: the same untrained model says the same"
        assert small.losses(run) == pytest.approx(small.losses(one), rel=1e-9, abs=0), layout
        assert _held_out_loss(run) == pytest.approx(_held_out_loss(one), rel=1e-9, abs=0), layout
        assert {row["tokens"] for row in small.metrics(run)} == {2 * 16}


def test_a_model_with_more_embeddings_than_the_tokenizer_has_tokens_speaks(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    padded = {"model.config.vocab_size": 3000, "train.sample_tokens": 30, "train.steps": 2}
    assert small.train("--ranks", "1", "--out", tmp_path / "run", **padded) == 0
    said = capfd.readouterr().out
    assert "--- sample, after training\nThe " in said
    assert "\x1b" not in said, "what the model wrote may not steer the terminal"
