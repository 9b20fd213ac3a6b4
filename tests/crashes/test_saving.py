"""Whatever call of the file system fails, or is the last one, while a checkpoint is written: the one before is whole."""

from __future__ import annotations

import errno
import functools
import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import samestep
from samestep.building.loss import loss_from
from samestep.errors import CheckpointError, InputError, SaveError
from samestep.examination.examine import Source
from samestep.job import Job
from samestep.layout import Layout
from samestep.output import durable_files
from samestep.runtime.checkpoints import manifests, writer
from samestep.runtime.processes.join import RankInfo
from samestep.runtime.run import Run
from tests.crashes.failing_calls import FailingCalls, refused
from tests.damage import DAMAGES, damaged

JOB = Job(train={"global_batch": 4, "steps": 8}, checkpoint={"keep": 2})
STORED = Path(__file__).parent / "stored_checkpoint"


class Points:
    """Points of the plane, and the side of a line that they are on."""

    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.tensor([float(index % 7) - 3, float(index % 5) - 2])
        return x, (x.sum() > 0).long()


def build() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 2))


def begun(job: Job = JOB) -> Run:
    source = Source(build, loss_from("cross_entropy"), lambda named: torch.optim.Adam([t for _, t in named], lr=0.01))
    return Run(source, Layout(), job, RankInfo(0, 0, 1, 1, torch.device("cpu")))


def steps(run: Run, number: int) -> list[float]:
    """Take so many steps; return their losses."""
    stream = samestep.batches(Points(), run.job, first_step=run.steps_taken)
    return [run.step(next(stream)).loss for _ in range(number)]


def loaded(folder: Path) -> Run:
    run = begun()
    run.load(folder)
    run.prepare(next(samestep.batches(Points(), JOB)).samples([0]))
    return run


def step_of(folder: Path) -> int:
    """Return the step of a checkpoint whose files are all whole."""
    manifest = manifests.read_manifest(folder)
    manifests.check_digests(manifest, folder)
    return int(manifest["step"])


def refusal_of(call: Callable[[], object]) -> str:
    """Return the text with which a call refuses; empty if it does not."""
    try:
        call()
    except (SaveError, CheckpointError) as error:
        return str(error)
    return ""


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EACCES])
def test_a_call_that_fails_is_told_in_one_line_and_the_run_goes_on(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = begun()
    steps(run, 1)
    first = run.save(tmp_path)
    steps(run, 1)
    num_failed = 0
    while True:
        calls = FailingCalls(num_failed + 1, refused(number))
        monkeypatch.setattr(durable_files, "os", calls)
        said = refusal_of(lambda: run.save(tmp_path))
        if not said:
            break
        num_failed += 1
        newest = samestep.latest(tmp_path)
        assert newest is not None
        assert said.startswith("the checkpoint of step 2 cannot be written: rank 0: ")
        assert os.strerror(number) in said
        assert said.endswith(f"; the newest whole checkpoint is {newest}")
        assert step_of(newest) in (1, 2)
        assert {path.name for path in tmp_path.iterdir()} <= {"step-000001", "step-000002"}, "the draft is gone"
    monkeypatch.setattr(durable_files, "os", os)
    assert num_failed > 15, "every call of a save has failed once"
    assert first.exists()
    assert step_of(tmp_path / "step-000002") == 2
    assert {path.name for path in tmp_path.iterdir()} == {"step-000001", "step-000002"}


def test_a_process_that_dies_at_any_call_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    run = begun()
    steps(run, 1)
    run.save(tmp_path)
    steps(run, 1)
    durable_files.os.sync()
    for at in range(1, 100, 2):
        pid = os.fork()
        if pid == 0:
            durable_files.os = FailingCalls(at, lambda _: os._exit(7))  # type: ignore[assignment]
            run.save(tmp_path)
            os._exit(0)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        newest = samestep.latest(tmp_path)
        assert newest is not None
        assert step_of(newest) in (1, 2)
        if status == 0:
            break
        assert status == 7
    assert 15 < at < 99, "a call after the last one is none"


@pytest.mark.parametrize("seed", range(2))
def test_no_damage_is_loaded(seed: int, tmp_path: Path) -> None:
    """A flipped bit, a file cut, emptied, removed, swapped or appended to, an invented manifest: refused in one line."""
    run = begun()
    steps(run, 1)
    run.save(tmp_path / "whole")
    steps(run, 1)
    run.save(tmp_path / "whole")
    expected = steps(run, 2)
    drawn = random.Random(seed)
    for damage in DAMAGES:
        folder = tmp_path / "damaged"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(tmp_path / "whole", folder)
        damaged(folder / "step-000002", damage, drawn)
        try:
            found = loaded(folder / "step-000002")
        except CheckpointError as error:
            if "\n" in str(error):
                pytest.fail(str(error))
            continue
        assert damage in ("flip", "append"), damage  # of a blank between two words
        assert steps(found, 2) == expected, damage


def test_the_address_of_a_store_is_refused() -> None:
    run = begun()
    steps(run, 1)
    with pytest.raises(InputError, match="s3://bucket/run is an address of s3, and samestep reads and writes folders"):
        run.save("s3://bucket/run")
    for call in (samestep.latest, run.load, functools.partial(samestep.export, "run")):
        with pytest.raises(InputError, match="s3://bucket/run is an address of s3"):
            call("s3://bucket/run")


def test_what_is_written_is_what_safetensors_reads(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    kinds = [*writer._WORDS]
    tensors = {str(kind): torch.arange(6).reshape(2, 3).to(kind) for kind in kinds}
    tensors |= {"none": torch.empty(0, 3), "one": torch.tensor(2.5), "turned": torch.rand(3, 4).t()}
    digest = writer.write(tmp_path / "file", tensors)
    assert digest == durable_files.digest_of(tmp_path / "file")
    found = load_file(tmp_path / "file")
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype
        assert found[name].shape == tensor.shape
        assert bytes(found[name].contiguous().flatten().view(torch.uint8).numpy()) == bytes(
            tensor.contiguous().flatten().view(torch.uint8).numpy()
        )


def test_the_stored_checkpoint_of_this_format_is_read() -> None:
    """Written once with format 3; a version that cannot read it needs another number, and a way for those who have one."""
    assert json.loads((STORED / "step-000002" / "manifest.json").read_text())["format_version"] == 3
    assert manifests.FORMAT_VERSION == 3
    straight = begun()
    expected = steps(straight, 4)
    run = loaded(STORED)
    assert run.steps_taken == 2
    assert steps(run, 2) == pytest.approx(expected[2:], rel=1e-6)
