"""Runs on two hosts, which are network namespaces of this machine: one result, one end, and cables that are pulled."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from benchmarks.network_namespaces import Host, lacking, network
from tests import small

_LACKING = lacking()
pytestmark = [
    pytest.mark.usefixtures("stop_signals", "nothing_is_left_running"),
    pytest.mark.skipif(bool(_LACKING), reason=_LACKING or "hosts can be made here"),
]
_PORT = 29400


@pytest.fixture(scope="module")
def three() -> Iterator[list[Host]]:
    with network(3) as made:
        yield made


@pytest.fixture(scope="module")
def hosts(three: list[Host]) -> list[Host]:
    return three[:2]


@pytest.fixture
def token(tmp_path: Path) -> Path:
    return _token(tmp_path / "token", "a secret of 42 letters that both hosts have")


def _token(file: Path, text: str) -> Path:
    file.touch(0o600)
    file.write_text(text)
    return file


def _start(hosts: list[Host], folder: Path, token: Path, *words: str | Path, **changes: Any) -> list[int]:
    """Start the same command on every host, with steps that are watched; return the process of each, the leading one first."""
    changes = {"train.watch_every": 100, **changes}
    meeting = ["--nodes", str(len(hosts)), "--rendezvous", f"{hosts[0].address}:{_PORT}", "--token-file", str(token)]
    command = ["train", *small.settings(**changes), *meeting, *map(str, words)]
    return [small.in_background(command, folder / f"host-{index}", host.name) for index, host in enumerate(hosts)]


def _said(folder: Path, index: int) -> str:
    return (folder / f"host-{index}" / "err").read_text()


def test_two_hosts_are_one_machine_to_the_bit_whatever_happens_to_the_cable(
    hosts: list[Host], token: Path, tmp_path: Path
) -> None:
    run, one, words = tmp_path / "run", tmp_path / "one", ["--layout", "dp=4 reduce=hierarchical", "--steps", "20"]
    keys = {"train.steps": 20}
    assert small.train(*words, "--out", one, **{"run.ranks_per_node": 2}, **keys) == 0
    pids = _start(hosts, tmp_path, token, *words, "--out", run, **keys)
    listening: set[str] = set()
    while small.num_steps(run) < 3:
        for host in hosts:
            listening |= _listening(host)
    hosts[1].set_link(False)
    threading.Event().wait(3.0)
    hosts[1].set_link(True)
    assert [small.status_of(pid) for pid in pids] == [0, 0], _said(tmp_path, 0) + _said(tmp_path, 1)
    assert {address.rpartition(":")[0] for address in listening} <= {host.address for host in hosts}
    assert len(listening) >= 4
    assert small.metrics(run) == small.metrics(one)
    small.assert_equal(*(small.stored(path / "checkpoints" / "step-000020") for path in (run, one)))
    talk = "".join(path.read_text() for path in tmp_path.glob("host-*/*")) + (run / "job.toml").read_text()
    assert token.read_text() not in talk


def _listening(host: Host) -> set[str]:
    """The addresses at which processes of a host listen."""
    said = subprocess.run(host.command("ss", "-Htln"), capture_output=True, text=True, check=True).stdout
    return {line.split()[3] for line in said.splitlines()}


def test_whichever_host_is_asked_to_stop_both_end_with_a_checkpoint(
    hosts: list[Host], token: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    pids = _start(hosts, tmp_path, token, "--layout", "dp=2", "--out", run, **{"train.steps": 100_000})
    small.wait_for(lambda: small.num_steps(run) >= 2)
    os.kill(pids[1], signal.SIGTERM)
    assert [small.status_of(pid) for pid in pids] == [143, 143]
    assert len(small.checkpoints(run)) == 1


def test_the_first_error_is_told_on_both_hosts(hosts: list[Host], token: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    keys = {"optimizer.lr": 1e30, "train.steps": 100_000, "schedule.warmup_steps": 0}
    pids = _start(hosts, tmp_path, token, "--layout", "dp=2", "--out", run, **keys)
    assert [small.status_of(pid) for pid in pids] == [1, 1]
    first, second = (_said(tmp_path, index).splitlines()[-1] for index in (0, 1))
    assert "not finite" in first
    assert first == second


@pytest.mark.nightly
def test_a_cable_that_stays_pulled_ends_one_side_and_the_other_goes_on(
    hosts: list[Host], token: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    keys = {"train.steps": 100, "checkpoint.every": 5, "run.restarts": 2}
    words = ["--layout", "dp=4", "--ranks", "2:4", "--out", str(run)]
    pids = _start(hosts, tmp_path, token, *words, **keys)
    small.wait_for(lambda: small.num_steps(run) >= 6)
    hosts[1].set_link(False)
    try:
        assert [small.status_of(pid) for pid in pids] == [0, 1]
    finally:
        hosts[1].set_link(True)
    assert "continues with 2 of 4 ranks, layout 'dp=2'" in (tmp_path / "host-0" / "out").read_text()
    assert f"the leading host {hosts[0].address} is gone: it was silent for 10 s" in _said(tmp_path, 1)
    assert small.num_steps(run) == 100


KEYS = {"train.steps": 12, "checkpoint.every": 3, "run.restarts": 2}


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of one device."""
    run = tmp_path_factory.mktemp("one") / "run"
    assert small.train("--layout", "dp=1", "--out", run, **KEYS) == 0
    return small.losses(run)


def test_a_run_names_a_host_that_is_lost_and_goes_on(
    hosts: list[Host], token: Path, one: list[float], tmp_path: Path
) -> None:
    run, keys = tmp_path / "run", KEYS
    words = ["--layout", "dp=2 tp=2", "--ranks", "2:4"]
    pids = _start(hosts, tmp_path, token, *words, "--out", run, **keys)
    small.wait_for(lambda: small.num_steps(run) >= 4)
    os.kill(pids[1], signal.SIGKILL)
    assert small.status_of(pids[0]) == 0, _said(tmp_path, 0)
    said = (tmp_path / "host-0" / "out").read_text()
    assert re.search(rf"rank [23] of 4 on {hosts[1].address} is lost with its host: its connection ended", said)
    assert "continues with 2 of 4 ranks, layout 'dp=1 tp=2'" in said
    assert small.losses(run) == pytest.approx(one, rel=1e-4)


@pytest.mark.nightly
def test_two_agents_of_torchrun_start_a_run_again(hosts: list[Host], tmp_path: Path) -> None:
    run, one = tmp_path / "run", tmp_path / "one"
    keys = {"train.steps": 60, "checkpoint.every": 5, "run.device": "cpu"}
    words = ["-m", "samestep", "train", *small.settings(**keys), "--layout", "dp=2", "--auto-resume", "--out", str(run)]
    agents = []
    for host in hosts:
        agent = ["--nnodes", "2", "--nproc-per-node", "1", "--rdzv-backend", "c10d", "--max-restarts", "3"]
        agent += ["--rdzv-endpoint", f"{hosts[0].address}:29500", "--rdzv-id", "one", "--local-addr", host.address]
        agent += [
            "--rdzv-conf",
            f"is_host={int(host is hosts[0])}",
        ]  # by names, which all hosts here share, none would be
        command = host.command(sys.executable, "-m", "torch.distributed.run", *agent, *words)
        with (tmp_path / host.name).open("wb") as talk:
            agents.append(subprocess.Popen(command, stdout=talk, stderr=subprocess.STDOUT))
    try:
        small.wait_for(lambda: small.num_steps(run) >= 6, 120)
        (worker,) = psutil.Process(agents[1].pid).children()  # ip has become the agent
        worker.kill()
        said = [(tmp_path / host.name).read_text() for host in hosts]
        assert [agent.wait(180) for agent in agents] == [0, 0], said
    finally:
        for agent in agents:
            agent.kill()
            agent.wait()
    assert small.train("--layout", "dp=2", "--out", one, **keys) == 0
    assert small.losses(run) == small.losses(one)


def test_without_the_leading_host_a_run_ends_and_is_resumed(
    three: list[Host], token: Path, one: list[float], tmp_path: Path
) -> None:
    run, keys = tmp_path / "run", KEYS
    pids = _start(three, tmp_path, token, "--layout", "dp=3", "--ranks", "1:3", "--out", run, **keys)
    small.wait_for(lambda: small.num_steps(run) >= 4)
    os.kill(pids[0], signal.SIGKILL)
    assert [small.status_of(pid) for pid in pids] == [-signal.SIGKILL, 1, 1], _said(tmp_path, 1) + _said(tmp_path, 2)
    for index in (1, 2):
        assert f"the leading host {three[0].address} is gone: its connection ended. Use --auto-resume" in _said(
            tmp_path, index
        )
    assert small.train("--layout", "dp=2", "--out", run, "--auto-resume", **keys) == 0
    assert small.losses(run) == pytest.approx(one, rel=1e-4)
