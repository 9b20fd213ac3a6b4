"""A loop of the user's own ends on Ctrl-C and SIGTERM, on every rank behind the same step, and can save what it has."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import samestep
from samestep.datasets import Batch
from samestep.job import Job
from samestep.runtime.processes.join import RankInfo
from tests import small
from tests.models import Plain, Tokens


def _loop(place: RankInfo, folder: str) -> int:
    job = Job(train={"global_batch": 4, "steps": 100_000})
    run = samestep.parallelize(Plain, "cross_entropy", lambda params: torch.optim.SGD(params, lr=0.1), job=job)
    for batch in samestep.batches(Tokens(), job):
        report = run.step(batch)
        Path(folder, f"rank-{place.rank}").write_text(f"{report.step} {report.stop}")
    Path(folder, f"end-{place.rank}").write_text(str(run.steps_taken))
    return run.steps_taken


@pytest.mark.usefixtures("stop_signals")
def test_one_signal_ends_an_own_loop_behind_the_same_step_on_every_rank(tmp_path: Path) -> None:
    pid = _in_background(tmp_path)
    try:
        small.wait_for(lambda: (tmp_path / "rank-1").exists())
        os.kill(pid, signal.SIGTERM)
        assert small.status_of(pid) == 0
    finally:
        small.end_background()
    ends = {(tmp_path / f"end-{rank}").read_text() for rank in (0, 1)}
    assert len(ends) == 1
    assert {(tmp_path / f"rank-{rank}").read_text() for rank in (0, 1)} == {f"{ends.pop()} True"}


def _in_background(folder: Path) -> int:
    pid = os.fork()
    if pid == 0:
        status = 70
        try:
            os.setpgid(0, 0)
            sys.stdout = sys.stderr = (folder / "said").open("w")
            samestep.launch(_loop, (str(folder),), ranks=2, device="cpu")
            status = 0
        finally:
            os._exit(status)
    small._background.add(pid)
    return pid


def _steps(stream: Iterator[Batch]) -> list[int]:
    return [batch.step for batch in stream]


def test_a_stream_without_a_signal_yields_every_step() -> None:
    job = Job(train={"global_batch": 4, "steps": 5})
    assert _steps(samestep.batches(Tokens(), job)) == [0, 1, 2, 3, 4]
    assert _steps(samestep.batches(Tokens(), job, first_step=3)) == [3, 4]
    first, second = samestep.batches(Tokens(), job), samestep.batches(Tokens(), job)
    next(first).end_stream()
    assert _steps(first) == []
    assert _steps(second) == [0, 1, 2, 3, 4], "another stream goes on"
    Batch(0, next(samestep.batches(Tokens(), job)).indices, Tokens()).end_stream()  # one that no stream has yielded


SCRIPT = """
import atexit, sys, torch, samestep
from tests.models import Plain, Tokens

def main(place):
    job = samestep.Job(train={"global_batch": 4, "steps": 100_000}, run={"device": "cpu"})
    run = samestep.parallelize(Plain, "cross_entropy", lambda params: torch.optim.SGD(params, lr=0.1), job=job)
    for batch in samestep.batches(Tokens(), job):
        run.step(batch)
        if batch.step == 1 and place.rank == 0:
            print("started", flush=True)

if __name__ == "__main__":
    atexit.register(print, "left")
    samestep.launch(main, ranks=1)
    print("behind the loop")
    assert sys.argv[1] != "fails"
"""


@pytest.mark.parametrize(
    ("number", "then", "status"),
    [
        (signal.SIGINT, "ends", 130),
        pytest.param(signal.SIGTERM, "ends", 143, marks=pytest.mark.nightly),
        pytest.param(signal.SIGINT, "fails", 1, marks=pytest.mark.nightly),
    ],
)
def test_a_script_whose_loop_was_interrupted_ends_with_the_status_of_the_signal(
    number: signal.Signals, then: str, status: int, tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with subprocess.Popen(
        [sys.executable, str(script), then],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "started\n"
        os.killpg(process.pid, number)
        said, complaints = process.communicate()
    assert process.returncode == status, complaints
    assert said == ("behind the loop\nleft\n")
    assert f"{number.name} asked the run to stop; this script ends with status {128 + number}" in complaints
