"""A function that only a checkpoint or a run folder names is not run; a checkpoint of one's own goes on as before."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import samestep
from samestep.errors import CheckpointError
from samestep.job import Job
from samestep.runtime.checkpoints import manifests
from samestep.training import foreign_code
from tests import small

OWN = """
import torch
from torch import nn

def net(width=8):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.Tanh(), nn.Linear(width, 10))

def loss(outputs, batch):
    found = nn.functional.cross_entropy(outputs, batch[1], reduction="sum")
    return found, torch.tensor(outputs.shape[0])

def sgd(params):
    return torch.optim.SGD(params, 0.1)
"""
KEYS = {
    "model.source": "{module}:net",
    "model.config": {},
    "data.source": "digits",
    "data.held_out": 0.1,
    "train.loss": "{module}:loss",
    "train.global_batch": 8,
    "train.steps": 2,
    "schedule.warmup_steps": 0,
    "checkpoint.every": 0,
}


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """Return the name of a module of one's own, and the folder of a run of its model."""
    folder = tmp_path_factory.mktemp("own")
    (folder / "own_net_of_a_run.py").write_text(OWN)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(folder))
        patch.syspath_prepend(str(folder))
        keys = {
            key: value.format(module="own_net_of_a_run") if isinstance(value, str) else value
            for key, value in KEYS.items()
        }
        words = [word for key, value in keys.items() for word in ("--set", f"{key}={small._toml(value)}")]
        assert small.main("train", *words, "--ranks", "1", "--out", folder / "run") == 0
        yield "own_net_of_a_run", folder / "run"
    sys.modules.pop("own_net_of_a_run", None)


def _signed(run: Path, to: Path, change: Any) -> Path:
    """Return a copy of a run's folder whose manifest was changed, and signed again, by somebody."""
    shutil.copytree(run, to)
    checkpoint = manifests.latest(to / "checkpoints")
    assert checkpoint is not None
    path = checkpoint / "manifest.json"
    manifest = json.loads(path.read_text())
    del manifest["digest"]
    change(manifest["job"])
    path.write_text(json.dumps({"digest": manifests._digest(manifest), **manifest}))
    return to


def _runs(command: Path) -> dict[str, Any]:
    return {"source": "subprocess:getoutput", "config": {"cmd": f"touch {command}"}}


CHANGES: dict[str, Any] = {
    "model": lambda job, file: job["model"].update(_runs(file)),
    "data": lambda job, file: job["data"].update(source="this:s"),
    "held out": lambda job, file: job["data"].update(held_out_sets={"x": "antigravity:geohash"}),
    "loss": lambda job, file: job["train"].update(loss="os:getcwd"),
    "optimizer": lambda job, file: job["optimizer"].update(name="os:getcwd"),
    "group": lambda job, file: job["optimizer"].update(groups=[{"match": ["*"], "name": "os.path:join"}]),
    "schedule": lambda job, file: job["schedule"].update(name="os:getcwd"),
    "receiver": lambda job, file: job["run"].update(report=["shutil:rmtree"]),
}
VERBS = {
    "export": lambda run, out: ("export", run, "--out", out, "--format", "dcp"),
    "evaluate": lambda run, out: ("evaluate", run),
    "sample": lambda run, out: ("sample", run),
    "init-from": lambda run, out: ("train", *small.settings(), "--init-from", run, "--out", out),
}


@pytest.mark.parametrize(("change", "verb"), [*zip(CHANGES, [*VERBS] * 2, strict=True)])
def test_a_word_that_only_a_manifest_names_is_not_run(
    change: str, verb: str, own: tuple[str, Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    ran, before = tmp_path / "ran", set(sys.modules)
    run = _signed(own[1], tmp_path / "run", lambda job: CHANGES[change](job, ran))
    assert small.main(*VERBS[verb](run, tmp_path / "out")) == 2
    said = capfd.readouterr().err.strip().splitlines()
    assert len(said) == 1
    assert re.search(r"names the function [\w.]+:\w+, which no run of yours has named: --allow code runs it", said[0])
    assert not ran.exists()
    assert not (tmp_path / "out").exists()
    assert not {"this", "antigravity"} & (set(sys.modules) - before)


def test_allow_code_runs_it(own: tuple[str, Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    harmless = {"source": "os.path:join", "config": {"a": "x"}}
    run = _signed(own[1], tmp_path / "run", lambda job: job["model"].update(harmless))
    small.main("export", run, "--out", tmp_path / "out", "--format", "dcp", "--allow", "code")
    assert "os.path:join returned a str" in capfd.readouterr().err


@pytest.mark.parametrize("verb", ["export", "evaluate"])
def test_a_run_of_ones_own_goes_on_as_before(verb: str, own: tuple[str, Path], tmp_path: Path) -> None:
    assert small.main(*VERBS[verb](own[1], tmp_path / "out")) == 0


def test_a_run_of_ones_own_resumes_by_its_folder_alone(own: tuple[str, Path], tmp_path: Path) -> None:
    shutil.copytree(own[1], tmp_path / "run")
    assert small.main("train", "--resume", "--out", tmp_path / "run") == 0


def test_a_run_folder_that_names_a_strangers_function_does_not_resume(
    own: tuple[str, Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    ran = tmp_path / "ran"
    shutil.copytree(own[1], tmp_path / "run")
    job = tmp_path / "run" / "job.toml"
    changed = re.sub(r'source = "own_net_of_a_run:net"', 'source = "subprocess:getoutput"', job.read_text())
    job.write_text(changed)
    for word in ("--resume", "--auto-resume"):
        assert small.main("train", word, "--out", tmp_path / "run") == 2
        assert "job.toml names the function subprocess:getoutput" in capfd.readouterr().err
    assert not ran.exists()


def test_a_module_of_the_same_name_in_a_strangers_folder_is_not_ones_own(
    own: tuple[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder that one works in holds the stranger's run, and a file with the name of one's own module."""
    (tmp_path / f"{own[0]}.py").write_text("raise SystemExit('ran')")
    monkeypatch.delitem(sys.modules, own[0])
    monkeypatch.setattr(sys, "path", [one for one in sys.path if one != str(own[1].parent)])
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match=f"names the function {own[0]}:net"):
        samestep.export(own[1], tmp_path / "out", form="dcp")


def test_the_same_word_in_ones_own_job_is_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    stranger = Job(model={"source": "somewhere.else:net", "config": {}})
    foreign_code.refuse(stranger, tmp_path, own=stranger)
    with pytest.raises(CheckpointError, match=r"somewhere\.else:net"):
        foreign_code.refuse(stranger, tmp_path, own=Job())


def test_a_run_starts_from_strangers_weights_without_their_code(tmp_path: Path) -> None:
    given: tuple[Any, ...] = ("--ranks", "1", "--steps", "1")
    assert small.train(*given, "--out", tmp_path / "old") == 0
    ran = tmp_path / "ran"
    strange = _signed(tmp_path / "old", tmp_path / "strange", lambda job: job["model"].update(_runs(ran)))
    assert small.train(*given, "--init-from", tmp_path / "old", "--out", tmp_path / "a") == 0
    assert small.train(*given, "--init-from", strange, "--out", tmp_path / "b") == 0
    assert small.losses(tmp_path / "a") == small.losses(tmp_path / "b")
    assert not ran.exists()


def test_every_word_that_is_imported_is_looked_at() -> None:
    """The keys with which the source imports functions are those of `CHANGES`; a new one needs a case there."""
    source = Path(samestep.__file__).parent
    texts = [path.read_text() for path in source.rglob("*.py")]
    keys = {key for text in texts for key in re.findall(r'import_function\([\w.]+, f?"([^"]+)"', text)}
    assert keys == {
        "model.source", "optimizer.name", "optimizer.groups.{index}.name", "optimizer.groups", "schedule.name", "train.loss", "run.report",
    }  # fmt: skip
    importing = {
        str(path.relative_to(source))
        for path in source.rglob("*.py")
        if re.search(r"importlib\.import_module\(|\bimported\(", path.read_text())
    }
    # Of these, the first imports what a job names; the others import libraries and parts of samestep by names of their own.
    assert importing == {
        "datasets/imported.py", "wings/adapters/lora.py", "building/attention/fused.py", "building/families.py",
        "building/stored_weights.py", "datasets/files.py", "wings/readers/images.py", "datasets/tokens.py",
        "kernels/kernel_choice.py", "runtime/codecs/codec.py", "runtime/processes/local_workers.py",
    }  # fmt: skip


def test_names_that_are_no_functions_are_no_code() -> None:
    job = Job(
        model={"source": "hf:llama", "config": {"x": "a:b"}}, train={"prompt": "Q:A"}, data={"source": "text:corpus"}
    )
    assert foreign_code.code_of(job) == ()
