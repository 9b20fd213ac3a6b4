"""Processes with the variables that launchers give them, on hosts that are names: one device's losses, and how they end."""

from __future__ import annotations

import json
import os
import signal
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import small

pytestmark = pytest.mark.usefixtures("stop_signals", "nothing_is_left_running")


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of one rank."""
    folder = tmp_path_factory.mktemp("one") / "run"
    assert small.train("--layout", "dp=1", "--out", folder, **{"numerics.precision": "float64"}) == 0
    return small.losses(folder)


def _port() -> str:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return str(server.getsockname()[1])


Variables = Callable[[int, str], dict[str, str]]
HOSTS: dict[str, Variables] = {
    "Kubernetes": lambda index, port: {
        "PET_NNODES": "2",
        "JOB_COMPLETION_INDEX": f"{index}",
        "PET_NPROC_PER_NODE": "2",
        "PET_MASTER_ADDR": "localhost",
        "PET_MASTER_PORT": port,
    }
}


def _tasks(prefix: dict[str, str], port: str, host: str) -> dict[str, str]:
    return {**prefix, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "HOSTNAME": host}


RANKS: dict[str, Variables] = {
    "srun": lambda rank, port: _tasks(
        {"SLURM_PROCID": f"{rank}", "SLURM_STEP_NUM_TASKS": "4", "SLURMD_NODENAME": f"n{rank % 2}"}, port, "login"
    ),
    "Open MPI": lambda rank, port: _tasks(
        {"OMPI_COMM_WORLD_RANK": f"{rank}", "OMPI_COMM_WORLD_SIZE": "4", "PMIX_HOSTNAME": "abba"[rank]}, port, "login"
    ),
}


def _start(variables: Variables, count: int, folder: Path, *words: str | Path, **changes: object) -> list[int]:
    port, command = _port(), ["train", *small.settings(**changes), *map(str, words)]
    return [small.in_background(command, folder / f"{index}", **variables(index, port)) for index in range(count)]


def _wait_for_steps(run: Path) -> None:
    log = run / "metrics.jsonl"
    small.wait_for(lambda: log.exists() and log.read_text().count("\n") >= 2, 120)


def _said(folder: Path) -> str:
    return "".join(path.read_text() for path in sorted(folder.glob("[0-9]/err")))


@pytest.mark.parametrize(
    "launcher",
    [
        pytest.param(name, marks=() if name == "Kubernetes" else pytest.mark.nightly)
        for name in (*HOSTS, *RANKS)
        if name != "srun"  # which is stopped and started again below
    ],
)
def test_its_variables_give_the_losses_of_one_rank(launcher: str, one_rank: list[float], tmp_path: Path) -> None:
    run, count = tmp_path / "run", 2 if launcher in HOSTS else 4
    variables = {**HOSTS, **RANKS}[launcher]
    pids = _start(
        variables, count, tmp_path, "--layout", "dp=2 tp=2", "--out", run, **{"numerics.precision": "float64"}
    )
    assert [small.status_of(pid, 300) for pid in pids] == [0] * count, _said(tmp_path)
    assert small.losses(run) == pytest.approx(one_rank, abs=1e-9)
    if launcher in RANKS:
        assert f"samestep: 4 ranks by {launcher}, on 2 hosts: " in _said(tmp_path)
    else:
        assert (tmp_path / "0" / "out").read_text().count("step      6/6") == 1


@pytest.mark.parametrize(("launcher", "who"), [("srun", 2), pytest.param("Kubernetes", 1, marks=pytest.mark.nightly)])
def test_whoever_is_asked_to_stop_all_save_and_end_with_its_status(launcher: str, who: int, tmp_path: Path) -> None:
    run, count = tmp_path / "run", 2 if launcher in HOSTS else 4
    variables = {**HOSTS, **RANKS}[launcher]
    keys = {"train.steps": 100_000, "numerics.precision": "float64"}
    words = ["--layout", "dp=2 tp=2", "--out", run, "--auto-resume"]
    pids = _start(variables, count, tmp_path, *words, **keys)
    _wait_for_steps(run)
    os.kill(pids[who], signal.SIGTERM)
    assert [small.status_of(pid, 120) for pid in pids] == [143] * count, _said(tmp_path)
    if launcher in RANKS:
        assert f"samestep: 4 ranks by {launcher}, on 2 hosts: " in _said(tmp_path)
    (saved,) = small.checkpoints(run)
    assert json.loads((run / "summary.json").read_text())["stopped"] is True
    step = int(saved.removeprefix("step-"))
    again = _start(variables, count, tmp_path / "again", *words, "--steps", f"{step + 3}", **keys)
    assert [small.status_of(pid, 300) for pid in again] == [0] * count, _said(tmp_path / "again")
    whole = tmp_path / "whole"
    assert small.train("--layout", "dp=1", "--out", whole, "--steps", f"{step + 3}", **keys) == 0
    assert small.losses(run) == pytest.approx(small.losses(whole), abs=1e-9)


def test_a_pod_that_fails_ends_those_of_the_others(tmp_path: Path) -> None:
    run = tmp_path / "run"
    pids = _start(HOSTS["Kubernetes"], 2, tmp_path, "--layout", "dp=4", "--out", run, **{"train.steps": 100_000})
    _wait_for_steps(run)
    os.kill(pids[1], signal.SIGKILL)
    assert small.status_of(pids[0], 120) == 1
    assert "samestep: rank" in (tmp_path / "0" / "err").read_text()


@pytest.mark.parametrize(
    ("env", "words", "text"),
    [
        ({"RANK": "0"}, ["--layout", "dp=2"], "RANK is set but WORLD_SIZE not; torchrun sets all of them"),
        ({"JOB_COMPLETION_INDEX": "1"}, [], "JOB_COMPLETION_INDEX is set but PET_NNODES"),
        (HOSTS["Kubernetes"](0, "1"), ["--layout", "dp=3"], "2 hosts by Kubernetes cannot share 3 ranks equally"),
        (
            HOSTS["Kubernetes"](0, "1"),
            ["--layout", "dp=8"],
            "8 ranks are 4 on each of 2 hosts by Kubernetes, which has 2",
        ),
        (HOSTS["Kubernetes"](0, "1"), ["--layout", "dp=4", "--prove"], "--prove starts workers of its own"),
    ],
)
def test_what_cannot_start_is_refused_in_one_line(
    env: dict[str, str],
    words: list[str],
    text: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    assert small.train(*words, "--out", tmp_path / "run") == 2
    said = capsys.readouterr().err
    assert text in said
    assert said.count("\n") == 1


def test_a_shell_inside_an_allocation_starts_its_own_workers_and_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for name, value in {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_JOB_NUM_NODES": "2"}.items():
        monkeypatch.setenv(name, value)
    assert small.train("--layout", "dp=2", "--steps", "1", "--out", tmp_path / "run") == 0
    assert "samestep: inside Slurm job 7 of 2 nodes, and no task of several: the workers are" in capsys.readouterr().err
