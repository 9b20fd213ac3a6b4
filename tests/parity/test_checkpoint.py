"""A run that stops and goes on is the run that never stopped: to the bit in its layout, and in every other one."""

from __future__ import annotations

import json
import shutil
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.optim import Optimizer

from samestep.datasets import batches
from samestep.errors import CheckpointError
from samestep.job import Job
from samestep.runtime.checkpoints import checkpoint, manifests, writer
from samestep.runtime.checkpoints.writer import Retention, Share, Writing
from samestep.runtime.run import Run
from tests import small
from tests.laboratory import job_of, losses_of_steps, make_run, on_ranks, prepared_run, resume
from tests.models import Tokens

STEPS, CUT = 4, 3
"""Steps of a run, and those in front of its save: a loss scale has grown once by then, and taken a step since."""
NIGHTLY = pytest.mark.nightly


class Counting(Optimizer):
    """Keeps what torch's own optimizers do not: a number, a text and a tensor of another shape."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.05})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state[param]
                state["count"] = state.get("count", 0) + 1
                state["name"] = "counting"
                trail = state.setdefault("trail", torch.zeros(5, dtype=torch.float64))
                trail[state["count"] % 5] += state["count"]
                param.sub_(param.grad, alpha=group["lr"] * float(trail.sum()) / state["count"])


def counting(params: list[Tensor]) -> Optimizer:
    return Counting(params)


ADAMW = {"name": "adamw", "lr": 1e-2, "options": {}, "weight_decay": 0.1, "clip_norm": 0.5}


def _newest(folder: Path) -> Path:
    return manifests.list_checkpoints(folder)[-1]


Scale = tuple[float, int] | None


def _whole_and_resumed(
    rank: int, world: int, model: str, layout: str, job: Job, folder: str
) -> tuple[list[list[float]], list[Scale]]:
    """Take all steps, with a save amid them, and take the last ones again from what was saved.

    Return the losses of the last steps both times, and the loss scales at the save and at both ends.
    """
    losses, scales = list[list[float]](), list[Scale]()

    def keep(run: Run, name: str) -> None:
        checkpoint.save(run, Path(folder, name))
        scale = run.updater.loss_scale
        scales.append((scale.scale, scale.steps_since) if scale.is_dynamic else None)

    for name in ("whole", "rest"):
        run = prepared_run(rank, world, model, layout, job)
        if name == "rest":
            checkpoint.load(run, _newest(Path(folder, "first")))
        else:
            losses_of_steps(run, Tokens(), 0, CUT)
            keep(run, "first")
        losses.append(losses_of_steps(run, Tokens(), CUT, STEPS))
        keep(run, name)
    return losses, scales


def _adam(name: str, **options: Any) -> dict[str, Any]:
    return {"name": name, "lr": 1e-2, "options": options}


EXACT = [
    ("dp=2 zero=2", "fp16", "gpt2", ADAMW),
    ("dp=2 zero=3 microbatch=2 recompute=full", "float32", "plain_with_dropout", _adam("adam", amsgrad=True, foreach=True)),
    ("dp=2 ep=2 zero=1", "bf16", "mixtral", ADAMW),
    ("dp=2 offload", "bf16", "plain", ADAMW),
    ("pp=2 microbatch=2", "float32", "deep_tied", ADAMW),
    ("dp=2 zero=1", "float64", "plain", _adam("tests.parity.test_checkpoint:counting")),
    ("dp=2 zero=2", "float64", "plain", _adam("adagrad")),
    ("dp=2 zero=1", "float64", "plain", _adam("asgd")),
    ("dp=2", "float64", "plain", _adam("adafactor")),
    *(
        pytest.param(layout, "float32", model, optimizer, marks=NIGHTLY)
        for layout, model, optimizer in (
            ("dp=2 zero=3", "plain", _adam("nadam")),
            ("dp=2", "plain", _adam("rprop")),
            ("dp=2 zero=3", "plain", _adam("rmsprop", momentum=0.9, centered=True)),
            ("dp=2", "llama", ADAMW),
            ("dp=4", "plain", ADAMW),
            ("dp_replicate=2 dp_shard=2", "plain", ADAMW),
            ("dp=2 tp=2 zero=1", "deep_tied", ADAMW),
            ("tp=2 pp=2 microbatch=2", "deep_tied", ADAMW),
        )
    ),
]  # fmt: skip


@pytest.mark.parametrize(("layout", "precision", "model", "optimizer"), EXACT)
def test_resuming_is_exact(layout: str, precision: str, model: str, optimizer: dict[str, Any], tmp_path: Path) -> None:
    # A scale that grows every other step.
    scaling = {"loss_scale": 2.0**14, "loss_scale_growth_steps": 2} if precision == "fp16" else {}
    job = job_of(
        precision, STEPS + 1, optimizer=optimizer, numerics=scaling, schedule={"name": "cosine", "warmup_steps": 2}
    )
    for (whole, rest), (before, at_once, after) in on_ranks(layout, _whole_and_resumed, model, job, str(tmp_path)):
        assert whole == rest
        assert len(whole) == STEPS - CUT
        assert at_once == after
        assert precision != "fp16" or before == (2.0**15, 1), "the scale is not what a run starts with"
    ends = [_newest(tmp_path / name) for name in ("whole", "rest")]
    small.assert_equal(*map(small.stored, ends))
    assert optimizer is not ADAMW or any(name.endswith("/exp_avg_sq") for name in small.stored(ends[1]))
    parts = [json.loads((end / "manifest.json").read_text())["parts"] for end in ends]
    assert [part["plain"] for part in parts[0]] == [part["plain"] for part in parts[1]]


def test_a_changed_model_is_refused_by_its_weights(tmp_path: Path) -> None:
    job = job_of("float64", STEPS)
    resume(0, 1, "plain", "dp=1", job, None, 1, str(tmp_path))
    with pytest.raises(CheckpointError, match=r"holds another model's weights: .* and \d+ more"):
        resume(0, 1, "gpt2", "dp=1", job, str(tmp_path), 2, None)


def test_only_the_newest_are_kept_and_left_overs_go(tmp_path: Path) -> None:
    job = job_of("float64", STEPS)
    run = make_run(0, 1, "plain", "dp=1", job)
    (tmp_path / ".step-000001.draft").mkdir()
    (tmp_path / ".step-000001.draft" / "rank-0000.safetensors").write_bytes(b"half")
    for batch in batches(Tokens(), job):
        run.step(batch)
        checkpoint.save(run, tmp_path, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000003", "step-000004"]


# -- through the command line ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def two_checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two ranks, stopped after step 4 of 6, with checkpoints of steps 2 and 4."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    words = ["--layout", "dp=2 zero=1", "--steps", "4", "--out", folder]
    assert small.train(*words, checkpoint__every=2) == 0
    return folder


@pytest.fixture
def run(two_checkpoints: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(two_checkpoints, tmp_path / "run"))


def _resume(run: Path, *words: str) -> int:
    return small.main("train", "--resume", "--out", run, *words)


def _gone(*_: object) -> None:
    raise RuntimeError("the store's server has gone")


def test_a_thread_of_a_save_may_outlive_the_run_and_its_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, may_write, failed = HashStore(), threading.Event(), list[Any]()
    monkeypatch.setattr(writer, "write", lambda *_: may_write.wait(20))
    monkeypatch.setattr(threading, "excepthook", failed.append)
    share = Share(tmp_path, tmp_path / "whole", 1, 2, {"a": torch.ones(1)}, {}, {}, Retention(1), 7, timeout_s=5)
    with monkeypatch.context() as group:
        group.setattr(writer, "default_store", lambda: store)
        writing = Writing.begin(share, None)
    may_write.set()
    assert writing.wait() == ""
    assert store.check(["samestep/checkpoint/7/written/1"])
    with monkeypatch.context() as group:
        group.setattr(writer, "default_store", lambda: SimpleNamespace(set=_gone))
        writing = Writing.begin(share, None)
    assert "has gone" in writing.wait()
    assert not failed


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was never stopped."""
    folder = tmp_path_factory.mktemp("runs") / "whole"
    assert small.train("--layout", "dp=2", "--out", folder) == 0
    return folder


def test_a_resumed_run_leaves_the_log_of_one(whole: Path, tmp_path: Path) -> None:
    cut = tmp_path / "cut"
    assert small.train("--layout", "dp=2", "--out", cut, "--steps", "2") == 0
    assert json.loads((cut / "summary.json").read_text())["stopped"] is False
    assert _resume(cut) == 0  # in the layout it was started in
    assert small.metrics(cut) == small.metrics(whole)
    small.assert_equal(small.stored(_newest(whole / "checkpoints")), small.stored(_newest(cut / "checkpoints")))
    assert (cut / "job.toml").read_text() == (whole / "job.toml").read_text()


def test_a_run_goes_on_in_another_layout(whole: Path, run: Path) -> None:
    assert _resume(run, "--layout", "dp=1") == 0
    assert small.losses(run) == pytest.approx(small.losses(whole), rel=1e-4)
    assert (run / "layout.txt").read_text() == "dp=1\n"


def test_the_newest_run_goes_on_without_a_damaged_checkpoint_until_nothing_is_left(
    run: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(run.parent)
    assert small.main("train", "--resume") == 2
    assert "there is no run below runs/ to resume. Use --out DIR" in capfd.readouterr().err
    Path("runs").mkdir()
    mine = run.rename("runs/mine")
    newest = mine / "checkpoints" / "step-000004"
    _flip(newest)
    assert small.main("train", "--resume") == 2
    assert f"once {newest} is removed, step-000002 is the newest" in capfd.readouterr().err
    shutil.rmtree(newest)
    changes = ["checkpoint.every=1", "numerics.on_nonfinite=skip", "train.sample_tokens=2", "train.steps=7"]
    words = [word for change in changes for word in ("--set", change)]  # which change no result
    assert small.main("train", "--resume", *words) == 0
    assert [row["step"] for row in small.metrics(mine)] == [1, 2, 3, 4, 5, 6, 7]
    before = small.files_of(mine)
    capfd.readouterr()
    assert small.main("train", "--resume", *words) == 0
    assert "step 7 was the last step: nothing is left to train" in capfd.readouterr().out
    after = small.files_of(mine)
    changed = {name for name in after if after[name] != before.get(name)}
    assert all(name.startswith("tensorboard/") for name in changed)


def _truncate(checkpoint: Path) -> str:
    path = checkpoint / "rank-0001.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    return path.name


def _flip(checkpoint: Path) -> str:
    path = checkpoint / "rank-0000.safetensors"
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)
    return path.name


def _lose(checkpoint: Path) -> str:
    (checkpoint / "rank-0001.safetensors").unlink()
    return "rank-0001.safetensors"


def _lose_manifest(checkpoint: Path) -> str:
    (checkpoint / "manifest.json").unlink()
    return "manifest.json"


def _truncate_manifest(checkpoint: Path) -> str:
    path = checkpoint / "manifest.json"
    path.write_text(path.read_text()[:200])
    return path.name


@pytest.mark.parametrize("damage", [_truncate, _flip, _lose, _lose_manifest, _truncate_manifest])
def test_a_damaged_checkpoint_is_named_and_not_passed_over(
    damage: Any, run: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    newest = run / "checkpoints" / "step-000004"
    name = damage(newest)
    before = small.files_of(run)
    assert _resume(run) == 2
    assert small.without_code(capfd.readouterr().err) == (
        f"samestep: {newest / name} is missing or damaged; once {newest} is removed, step-000002 is the newest\n"
    )
    assert small.files_of(run) == before


def test_a_lone_damaged_checkpoint_has_no_older_one(run: Path, capfd: pytest.CaptureFixture[str]) -> None:
    shutil.rmtree(run / "checkpoints" / "step-000002")
    _lose_manifest(run / "checkpoints" / "step-000004")
    assert _resume(run) == 2
    assert "is missing or damaged; there is no older one" in capfd.readouterr().err


def test_another_format_is_refused(run: Path, capfd: pytest.CaptureFixture[str]) -> None:
    manifest = run / "checkpoints" / "step-000004" / "manifest.json"
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "format_version": 99}))
    assert _resume(run) == 2
    assert "has format 99; this version reads 3" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("setting", "differs"),
    [
        ("optimizer.lr=0.5", "optimizer.lr"),
        ("model.config.num_hidden_layers=3", "model.config"),
        ("train.seed=4", "train.seed"),
        ("numerics.precision=bf16", "numerics.precision"),
        ("data.sequence_length=8", "data.sequence_length"),
    ],
)
def test_the_checkpoint_of_another_job_is_refused(
    setting: str, differs: str, run: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    before = small.files_of(run)
    assert _resume(run, "--set", setting) == 2
    assert small.without_code(capfd.readouterr().err) == (
        f"samestep: {run}/checkpoints/step-000004 was written by a job with another {differs}: "
        f"resume with the job in its run folder{'; --allow optimizer.lr lets it change' * (differs == 'optimizer.lr')}\n"
    )
    assert small.files_of(run) == before


@pytest.mark.parametrize(
    ("lose", "says"),
    [
        (["job.toml"], "holds no run to resume"),
        (["checkpoints"], "holds no checkpoint to resume from: another --out starts a new run"),
    ],
)
def test_where_there_is_nothing_to_resume(
    lose: list[str], says: str, run: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for name in lose:
        shutil.move(run / name, run.parent / name)
    assert _resume(run) == 2
    assert small.without_code(capfd.readouterr().err) == f"samestep: {run} {says}\n"


def test_a_run_that_would_end_before_its_checkpoint_is_refused(run: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert _resume(run, "--steps", "3") == 2
    assert (
        "step-000004 was saved after step 4, and the run would end at step 3. Use --steps 4 or more"
        in capfd.readouterr().err
    )


@pytest.mark.parametrize("left", ["job.toml", "metrics.jsonl", "checkpoints"])
def test_a_new_run_never_writes_into_an_old_one(left: str, run: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for path in list(run.iterdir()):
        if path.name != left:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    before = small.files_of(run)
    assert small.train("--ranks", "1", "--out", run) == 2
    assert f"{run} holds a run already: --resume resumes it" in capfd.readouterr().err
    assert small.files_of(run) == before
