"""A worker that fails, dies or hangs is named, its mistake is told once, and nothing outlives the parent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist

from samestep.errors import LayoutError, NonFiniteError, WorkerError
from samestep.runtime.processes import local_workers, worker, workers
from samestep.runtime.processes.join import RankInfo
from samestep.runtime.processes.workers import run_workers

FAR_BELOW_THE_TIMEOUT_S = 30.0  # of the collectives, which is 120 s in these tests


def _fail(place: RankInfo, how: str, culprit: int) -> None:
    dist.barrier()
    if place.rank != culprit:
        dist.all_reduce(torch.ones(1))
    match how:
        case "mistake":
            raise LayoutError("tp-indivisible", "tp=16 does not divide the 40 attention heads. Use tp=8")
        case "nonfinite":
            raise NonFiniteError("non-finite", "step 3: the loss is nan")
        case "bug":
            print("words on stderr", file=sys.stderr)
            raise RuntimeError("boom")
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "abort":
            os.abort()
        case "exit":
            os._exit(0)


def _run(how: str, culprit: int = 1, ranks: int = 2) -> None:
    start = time.monotonic()
    try:
        run_workers(_fail, (how, culprit), ranks=ranks, timeout_s=120, quiet=True)
    finally:
        assert time.monotonic() - start < FAR_BELOW_THE_TIMEOUT_S
        assert not [p for p in psutil.Process().children() if p.status() == psutil.STATUS_ZOMBIE]


@pytest.mark.parametrize("culprit", [0, 1])
def test_a_mistake_is_raised_as_if_it_were_made_here(culprit: int) -> None:
    with pytest.raises(LayoutError) as caught:
        _run("mistake", culprit)
    assert type(caught.value) is LayoutError
    assert str(caught.value) == "tp=16 does not divide the 40 attention heads. Use tp=8"
    with pytest.raises(NonFiniteError, match=r"^step 3: the loss is nan$"):
        _run("nonfinite", culprit)


def test_another_error_names_the_rank_and_has_its_last_words() -> None:
    with pytest.raises(WorkerError) as caught:
        _run("bug", culprit=2, ranks=4)
    first, *words = str(caught.value).splitlines()
    assert first == "rank 2 of 4 failed: RuntimeError: boom"
    assert "  words on stderr" in words
    assert words[-1] == "  RuntimeError: boom"
    assert any("in _fail" in line for line in words)
    assert len(words) <= 15


@pytest.mark.parametrize("culprit", [0, 1])
@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("kill", r"killed by SIGKILL(\n|$)"),
        ("abort", "killed by SIGABRT"),
        ("exit", "it exited with status 0 before it was done"),
    ],
)
def test_a_death_is_named_and_not_its_echo(how: str, words: str, culprit: int) -> None:
    with pytest.raises(WorkerError, match=f"^rank {culprit} of 2 died: {words}"):
        _run(how, culprit)


def _hang(place: RankInfo) -> None:
    dist.barrier()
    if place.rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    dist.all_reduce(torch.ones(1))


def test_a_hung_worker_is_named_after_the_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "_ECHO_GRACE_S", 1.0)
    with pytest.raises(WorkerError, match=r"^rank 1 of 2 did not answer; rank 0 of 2 failed: "):
        run_workers(_hang, ranks=2, timeout_s=2, quiet=True)


def test_a_worker_that_never_joins_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def write_to_files(folder: str, rank: int) -> None:
        if rank == 1:
            time.sleep(600)

    monkeypatch.setattr(worker, "_write_to_files", write_to_files)
    with pytest.raises(WorkerError, match=r"^rank 1 of 2 did not (join within 2 s|answer; rank 0)"):
        run_workers(_hang, ranks=2, timeout_s=2)


def _unpicklable(place: RankInfo) -> object:
    return lambda: None


def test_a_result_that_cannot_be_sent_is_said() -> None:
    with pytest.raises(WorkerError, match=r"rank 0 of 2 failed: .*pickle"):
        run_workers(_unpicklable, ranks=2, timeout_s=60)


def _tell_pid_and_wait(place: RankInfo, folder: str) -> None:
    child = subprocess.Popen(["sleep", "600"]) if place.rank == 1 else None
    Path(folder, f"{os.getpid()}.tmp").write_text(str(child.pid if child else ""))
    Path(folder, f"{os.getpid()}.tmp").rename(Path(folder, f"{os.getpid()}.pid"))
    if place.rank == 1 and Path(folder, "die").exists():
        time.sleep(0.5)
        os._exit(3)
    dist.barrier()
    time.sleep(600)


def _wait_until_gone(pids: list[int]) -> None:
    end = time.monotonic() + FAR_BELOW_THE_TIMEOUT_S
    while alive := [pid for pid in pids if psutil.pid_exists(pid)]:
        alive = [pid for pid in alive if psutil.Process(pid).status() != psutil.STATUS_ZOMBIE]
        if not alive:
            return
        assert time.monotonic() < end, f"processes {alive} are still there"
        time.sleep(0.05)


def test_workers_die_with_their_parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))  # a parent that is killed cannot clean up
    parent = os.fork()
    if parent == 0:
        try:
            run_workers(_tell_pid_and_wait, (str(tmp_path),), ranks=2, timeout_s=60, quiet=True)
        finally:
            os._exit(1)
    end = time.monotonic() + FAR_BELOW_THE_TIMEOUT_S
    while len(list(tmp_path.glob("*.pid"))) < 2:
        assert time.monotonic() < end
        time.sleep(0.02)
    os.kill(parent, signal.SIGKILL)
    os.waitpid(parent, 0)
    _wait_until_gone([int(file.stem) for file in tmp_path.glob("*.pid")])
    for file in tmp_path.glob("*.pid"):  # the grandchild knows nothing of us
        if pid := file.read_text():
            os.kill(int(pid), signal.SIGKILL)


def test_what_a_dead_worker_started_dies_too(tmp_path: Path) -> None:
    (tmp_path / "die").touch()
    with pytest.raises(WorkerError, match=r"^rank 1 of 2 died: it exited with status 3"):
        run_workers(_tell_pid_and_wait, (str(tmp_path),), ranks=2, timeout_s=60, quiet=True)
    _wait_until_gone([int(pid) for file in tmp_path.glob("*.pid") if (pid := file.read_text())])


def test_kills_are_counted_in_the_control_group_or_on_the_machine() -> None:
    assert local_workers.evidence(local_workers.count()) == ""
    assert local_workers.evidence(local_workers.count() - 1).endswith("has counted such a kill since the start)")
