"""A run that is asked to stop, killed or broken ends in one line and a whole folder, and goes on as if nothing was."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from samestep.output import durable_files
from samestep.runtime.checkpoints import manifests
from samestep.runtime.interpreter import Interpreter
from samestep.training import metrics, train
from tests import small

pytestmark = pytest.mark.usefixtures("stop_signals", "nothing_is_left_running")

LONG = {"train.steps": 100_000, "train.evaluate_samples": 8, "train.sample_tokens": 4}


def _start(run: Path, talk: Path, *words: str, **changes: Any) -> int:
    """Start a run in the background and wait until it has taken a few steps."""
    pid = small.in_background(["train", *small.settings(**LONG, **changes), "--out", str(run), *words], talk)
    small.wait_for(lambda: small.num_steps(run) >= 3)
    return pid


def _workers(pid: int) -> list[psutil.Process]:
    return sorted(psutil.Process(pid).children(), key=lambda process: process.pid)


def _goes_on(run: Path, layout: str | None = None) -> None:
    """The run takes three more steps, and its log has every step once."""
    newest = manifests.latest(run / "checkpoints")
    at = int(newest.name[5:]) if newest else 0
    words = ["--layout", layout] if layout else []
    assert small.main("train", "--resume", "--out", run, "--steps", str(at + 3), *words) == 0
    assert [row["step"] for row in small.metrics(run)] == list(range(1, at + 4))


def test_a_stop_signal_ends_a_run_with_a_checkpoint(tmp_path: Path) -> None:
    run, number = tmp_path / "run", signal.SIGHUP
    pid = _start(run, tmp_path / "talk", "--layout", "dp=2 zero=1")
    os.kill(pid, number)
    assert small.status_of(pid) == 128 + number
    steps = small.num_steps(run)
    assert small.checkpoints(run) == [f"step-{steps:06d}"]
    said, complaints = ((tmp_path / "talk" / name).read_text() for name in ("out", "err"))
    assert f"stopped after step {steps}; --resume --out {run} resumes it" in said
    assert f"step {steps:>6}/100000" in said, "the last step is shown"
    assert "sample, after" not in said, "who is asked to stop does not write stories"
    assert "held-out" not in said
    assert complaints == ""
    _goes_on(run)


def test_a_real_process_ends_cleanly_too(tmp_path: Path) -> None:
    """As a terminal does it: SIGINT to the whole foreground group, of a process that has imported nothing yet."""
    run = tmp_path / "run"
    words = ["train", *small.settings(**LONG), "--ranks", "2", "--out", str(run)]
    process = subprocess.Popen(
        [sys.executable, "-m", "samestep.cli", *words],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        small.wait_for(lambda: small.num_steps(run) >= 3)
        os.killpg(process.pid, signal.SIGINT)
        said, complaints = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130
    assert complaints == ""
    assert f"stopped after step {small.num_steps(run)}" in said
    assert small.checkpoints(run) == [f"step-{small.num_steps(run):06d}"]


def test_a_killed_worker_is_named_and_the_run_goes_on(tmp_path: Path) -> None:
    run, rank = tmp_path / "run", 1
    pid = _start(run, tmp_path / "talk", "--layout", "dp=2", **{"checkpoint.every": 2})
    _workers(pid)[rank].send_signal(signal.SIGKILL)
    assert small.status_of(pid) == 1
    complaints = small.without_code((tmp_path / "talk" / "err").read_text())
    first = re.match(
        rf"samestep: rank {rank} of 2 died: killed by SIGKILL; --resume --out (.*) continues from step (\d+)\n",
        complaints,
    )
    assert first is not None, complaints
    assert (first[1], f"step-{int(first[2]):06d}") == (str(run), small.checkpoints(run)[-1])
    assert "Traceback" not in complaints
    _goes_on(run, "dp=2 zero=3")


def test_a_second_ctrl_c_kills(tmp_path: Path) -> None:
    run = tmp_path / "run"
    pid = _start(run, tmp_path / "talk", "--layout", "dp=2")
    workers = _workers(pid)
    for worker in workers:  # so that the first request is not answered
        worker.send_signal(signal.SIGSTOP)
    small.wait_for(lambda: all(worker.status() == "stopped" for worker in workers))
    os.kill(pid, signal.SIGINT)
    small.wait_for(lambda: all(_has_pending(worker, signal.SIGTERM) for worker in workers))  # two at once would be one
    os.kill(pid, signal.SIGINT)
    small.wait_for(lambda: not any(worker.is_running() and worker.status() != "zombie" for worker in workers))
    assert small.status_of(pid) == 130
    assert (tmp_path / "talk" / "err").read_text() == "samestep: interrupted\n"


def _has_pending(process: psutil.Process, number: signal.Signals) -> bool:
    (mask,) = re.findall(r"^ShdPnd:\s*(\w+)", Path(f"/proc/{process.pid}/status").read_text(), re.MULTILINE)
    return bool(int(mask, 16) >> (number - 1) & 1)


# -- dying at the worst moment ---------------------------------------------------------------------


def _die_when(happens: Callable[[], bool]) -> None:
    if happens():
        os.kill(os.getpid(), signal.SIGKILL)


def _within_a_log_line(patch: pytest.MonkeyPatch) -> None:
    def half(self: metrics.Metrics, step: Any, **named: Any) -> None:
        write(self, step, **named)
        if step.step == 5:
            self._file.flush()
            os.truncate(self._file.name, os.path.getsize(self._file.name) - 20)
            os.kill(os.getpid(), signal.SIGKILL)

    write = metrics.Metrics.write
    patch.setattr(metrics.Metrics, "write", half)


def _before_the_manifest(patch: pytest.MonkeyPatch) -> None:
    """The files of step 4 are written, and nothing says that they are whole."""
    write = manifests.write_manifest

    def die(folder: Path, manifest: Any) -> None:
        _die_when(lambda: manifest["step"] == 4)
        write(folder, manifest)

    patch.setattr(manifests, "write_manifest", die)


def _while_removing(patch: pytest.MonkeyPatch) -> None:
    """The checkpoint of step 4 is there, that of step 2 on its way out."""
    remove = durable_files.remove_folder

    def die(folder: Path) -> None:
        _die_when(lambda: folder.name.endswith(".removed"))
        remove(folder)

    patch.setattr(durable_files, "remove_folder", die)


SAVING = {"checkpoint.every": 2, "checkpoint.keep": 1}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("undisturbed") / "run"
    assert small.train("--layout", "dp=2 zero=2", "--out", run, **SAVING) == 0
    return run


@pytest.mark.parametrize(
    ("dies", "newest"),
    [(_within_a_log_line, 4), (_before_the_manifest, 2), pytest.param(_while_removing, 4, marks=pytest.mark.nightly)],
)
def test_a_run_that_dies_goes_on_without_gap_or_double(
    dies: Callable[[pytest.MonkeyPatch], None],
    newest: int,
    undisturbed: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    run = tmp_path / "run"
    with pytest.MonkeyPatch.context() as patch:
        dies(patch)
        assert small.train("--layout", "dp=2 zero=2", "--out", run, **SAVING) == 1
    assert "rank 0 of 2 died: killed by SIGKILL" in capfd.readouterr().err
    assert manifests.latest(run / "checkpoints") == run / "checkpoints" / f"step-{newest:06d}"
    assert small.main("train", "--resume", "--out", run) == 0
    assert small.metrics(run) == small.metrics(undisturbed)
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["step-000006"], "nothing is left over"
    assert (run / "job.toml").read_text() == (undisturbed / "job.toml").read_text()


def test_a_number_that_is_not_finite_ends_a_run_by_name(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    wild = {"optimizer.lr": 3e37, "optimizer.clip_norm": 1e30, "checkpoint.every": 1}
    assert small.train("--ranks", "2", "--out", run, **wild) == 1
    complaint = capfd.readouterr().err
    assert complaint.startswith("samestep: step ")
    assert complaint.count("\n") == 1
    assert "numerics.on_nonfinite = 'skip' would continue" in complaint
    assert small.main("train", "--resume", "--out", run, "--set", "numerics.on_nonfinite=skip") == 0
    rows = small.metrics(run)
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert rows[-1]["grad_norm"] is None, "JSON has no NaN"
    assert rows[-1]["skipped"] is True
    assert rows[-1]["note"]


def test_a_folder_that_cannot_be_made_is_said_before_a_worker_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(train.workers, "run_workers", pytest.fail)
    (tmp_path / "file").touch()
    assert small.train("--ranks", "1", "--out", tmp_path / "file" / "run") == 2
    assert small.without_code(capfd.readouterr().err) == (
        f"samestep: --out {tmp_path}/file/run cannot be created: Not a directory ({tmp_path}/file/run)\n"
    )


# -- memory ----------------------------------------------------------------------------------------


def _no_memory_at(step: int) -> Callable[[Any, Any], Any]:
    """A backward that asks torch for more than any machine has, in one step."""
    backward = Interpreter._backward

    def asking(interpreter: Any, task: Any, loss: Any) -> None:
        if (
            interpreter.step == step
            and interpreter.assembly.parallel.mesh.rank == interpreter.assembly.parallel.mesh.size("world") - 1
        ):
            torch.empty(2**60)
        backward(interpreter, task, loss)

    return asking


def test_memory_that_runs_out_is_told_by_its_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Interpreter, "_backward", _no_memory_at(step=2))
    assert small.train("--out", tmp_path / "run", "--layout", "dp=2 zero=3 microbatch=1") == 1
    first, held, predicted, *rest = capfd.readouterr().err.splitlines()
    assert first.startswith("samestep: rank 1 of 2 ran out of memory in the backward of micro-batch 0, step 2:")
    assert "can't allocate memory" in first
    size = r"[\d.]+ (?:[GMK]i)?B"
    assert re.match(
        rf"  held       weights {size}, (?:gradients {size}, )?optimizer {size}, the rest {size}; at most {size} in all, of {size}",
        held,
    )
    assert re.match(
        rf"  predicted  weights {size}, .*activations {size}.*; {size} in all at \w+:\S*, of {size} a rank", predicted
    )
    assert len(rest) == 1
    assert re.match(
        rf'  ".*" is predicted to need {size}, and|  no layout of \d ranks is predicted to need clearly less', rest[0]
    )
