"""Slurm for real, on one machine with two nodes: the emitted script is what runs, is requeued and resumes."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from samestep.wings.cluster.engines.launch_request import SlurmSettings
from tests import small
from tests.launchers import real
from tests.launchers.slurm_cluster import Cluster, cluster, lacking

_LACKING = lacking()
pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(bool(_LACKING), reason=_LACKING or "a cluster can be made here"),
    pytest.mark.time_limit(900),
]


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with cluster(tmp_path_factory.mktemp("slurm"), nodes=3) as made:
        yield made


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    return real.one_rank(tmp_path_factory.mktemp("one") / "run")


def _log(folder: Path) -> str:
    return "".join(path.read_text() for path in folder.glob("default-*.log"))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (SlurmSettings(), "n1 0 to 1; n2 2 to 3"),
        (SlurmSettings(options=("--distribution=cyclic",)), "n1 0 to 1 (RANK 0, 2); n2 2 to 3 (RANK 1, 3)"),
        (SlurmSettings(by="torchrun"), "agent 0 0 to 1; agent 1 2 to 3"),
    ],
)
def test_the_emitted_script_gives_the_losses_of_one_rank(
    settings: SlurmSettings, said: str, slurm: Cluster, one_rank: list[float], tmp_path: Path
) -> None:
    script = real.emitted(
        "slurm", tmp_path / "x.sbatch", nodes=2, layout="dp=2 tp=2", out="run", site={"slurm": settings}
    )
    variables = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    ended = slurm.run("sbatch", "--wait", script, folder=tmp_path, **variables)
    assert ended.returncode == 0, ended.stderr + _log(tmp_path)
    assert said in _log(tmp_path)
    assert small.losses(tmp_path / "run") == pytest.approx(one_rank, abs=1e-9)


def test_tasks_in_uneven_numbers_on_nodes(slurm: Cluster, one_rank: list[float], tmp_path: Path) -> None:
    keys = [word for setting in real.settings() for word in ("--set", setting)]
    command = [sys.executable, "-m", "samestep", "train", *keys, "--layout", "dp=3", "--out", "run"]
    variables = {"PYTHONPATH": f"{real.ROOT}/src", "OMP_NUM_THREADS": "1"}
    ended = slurm.run("srun", "-N2", "-n3", "-m", "cyclic", *command, folder=tmp_path, **variables)
    assert ended.returncode == 0, ended.stderr
    assert "n1 0 to 1 (RANK 0, 2); n2 2" in ended.stderr
    assert small.losses(tmp_path / "run") == pytest.approx(one_rank, abs=1e-9)


@pytest.mark.parametrize("by", ["srun", "torchrun"])
def test_a_run_that_is_asked_to_stop_is_requeued_and_resumes_exactly(by: str, slurm: Cluster, tmp_path: Path) -> None:
    """The signal is the one that `--signal` sends before the time limit, to those to whom it sends it."""
    keys = {"train.steps": 100_000}
    site = {"slurm": SlurmSettings(by=by, time="10", signal_s=60)}  # type: ignore[arg-type]
    script = real.emitted("slurm", tmp_path / "x.sbatch", keys, site, nodes=2, layout="dp=2 tp=2", out="run")
    variables = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    job = slurm.run("sbatch", "--parsable", script, folder=tmp_path, **variables).stdout.strip()
    log = tmp_path / "run" / "metrics.jsonl"
    small.wait_for(lambda: log.exists() and log.read_text().count("\n") >= 2, 300)
    to_script = ["--batch"] if by == "torchrun" else []
    assert slurm.run("scancel", *to_script, "--signal=TERM", job, folder=tmp_path).returncode == 0
    small.wait_for(lambda: slurm.state(job).get("Restarts") == "1", 120)
    (saved,) = small.checkpoints(tmp_path / "run")
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["stopped"] is True
    step = int(saved.removeprefix("step-"))
    small.wait_for(lambda: small.losses(tmp_path / "run")[step + 2 :] != [], 400)
    assert slurm.run("scancel", job, folder=tmp_path).returncode == 0
    small.wait_for(lambda: slurm.state(job).get("JobState") == "CANCELLED", 120)
    time.sleep(1.0)
    assert slurm.state(job)["Restarts"] == "1", "a run that is cancelled does not come back"
    whole = tmp_path / "whole"
    assert small.train("--layout", "dp=1", "--out", whole, "--steps", str(step + 3), **keys, **real.FLOAT64) == 0
    assert small.losses(tmp_path / "run")[: step + 3] == pytest.approx(small.losses(whole), abs=1e-9)


def test_a_run_goes_on_without_a_node_that_is_lost(slurm: Cluster, tmp_path: Path) -> None:
    """As when its power fails: what ran there sends nothing more, Slurm notices, and puts the job back into the queue."""
    keys = {"train.steps": 100_000, "checkpoint.every": 2}
    script = real.emitted("slurm", tmp_path / "x.sbatch", keys, nodes=2, layout="dp=2 tp=2", out="run")
    job = slurm.run("sbatch", "--parsable", script, folder=tmp_path).stdout.strip()
    log = tmp_path / "run" / "metrics.jsonl"
    small.wait_for(lambda: log.exists() and log.read_text().count("\n") >= 5, 300)
    dead = slurm.stop_node("n2")
    try:
        ended = slurm.run("scontrol", "update", "NodeName=n2", "State=DOWN", "Reason=power", folder=tmp_path)
        assert ended.returncode == 0, ended.stderr
        small.wait_for(lambda: slurm.state(job).get("Restarts") == "1", 120)
    finally:
        for pid in dead:
            os.kill(pid, signal.SIGKILL)
    small.wait_for(lambda: slurm.state(job).get("JobState") == "RUNNING", 300)
    assert slurm.state(job)["NodeList"] == "n[1,3]"
    before = len(small.losses(tmp_path / "run"))
    small.wait_for(lambda: "resume" in _log(tmp_path) and len(small.losses(tmp_path / "run")) > before + 2, 300)
    assert slurm.run("scancel", job, folder=tmp_path).returncode == 0
    small.wait_for(lambda: slurm.state(job).get("JobState") == "CANCELLED", 120)
    found = small.losses(tmp_path / "run")[: before + 3]
    whole = tmp_path / "whole"
    assert small.train("--layout", "dp=1", "--out", whole, "--steps", str(len(found)), **keys, **real.FLOAT64) == 0
    assert found == pytest.approx(small.losses(whole), abs=1e-9)


def test_a_shell_in_an_allocation_starts_its_own_workers(slurm: Cluster, tmp_path: Path) -> None:
    keys = [word for setting in real.settings() for word in ("--set", setting)]
    command = [sys.executable, "-m", "samestep", "train", *keys, "--layout", "dp=2", "--steps", "1", "--out", "run"]
    variables = {"PYTHONPATH": f"{real.ROOT}/src", "OMP_NUM_THREADS": "1"}
    ended = slurm.run("salloc", "-N2", *command, folder=tmp_path, **variables)
    assert ended.returncode == 0, ended.stderr
    assert "samestep: inside Slurm job" in ended.stderr
    assert "of 2 nodes, and no task of several" in ended.stderr
