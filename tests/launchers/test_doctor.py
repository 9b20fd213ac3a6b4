"""`samestep doctor` on hosts that are really broken: network namespaces, mounts, a clock and a driver of their own; twelve ways, and none.

Two processes are two hosts by their variables (RANK, WORLD_SIZE, MASTER_ADDR), each in a network namespace. What is not real: the
driver is a program of its name, and hosts share one kernel.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from benchmarks import network_namespaces
from benchmarks.network_namespaces import Host, network
from tests.launchers import slurm_cluster

pytestmark = [pytest.mark.nightly, pytest.mark.time_limit(300)]
ROOT = Path(__file__).parents[2]
PORT = 29533


def _free_port() -> str:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return str(server.getsockname()[1])


def _lacking() -> str:
    if missing := network_namespaces.lacking():
        return missing
    return "" if shutil.which("unshare") else "unshare is not installed (Debian: util-linux)"


@pytest.fixture
def hosts() -> Iterator[list[Host]]:
    """Two hosts on one network."""
    if missing := _lacking():
        pytest.skip(missing)
    with network(2) as made:
        yield made


@dataclass
class Start:
    """How the doctor is started on one host: variables, a folder, lines of a shell in a mount namespace, words before the command."""

    env: dict[str, str]
    folder: Path
    setup: list[str] = field(default_factory=list)
    before: list[str] = field(default_factory=list)
    words: list[str] = field(default_factory=list)


def _starts(hosts: list[Host], folder: Path) -> list[Start]:
    shared = folder / "shared"
    shared.mkdir()
    at = {"MASTER_ADDR": hosts[0].address, "MASTER_PORT": f"{PORT}", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}
    return [Start({**at, "RANK": f"{rank}", "HOSTNAME": f"h{rank}"}, shared) for rank in range(2)]


def _run(hosts: list[Host], starts: list[Start], folder: Path) -> list[tuple[int, str]]:
    """Run the doctor on all hosts at once; return their exit statuses and what they said."""
    running = []
    for rank, (host, start) in enumerate(zip(hosts, starts, strict=True)):
        doctor = [sys.executable, "-m", "samestep", "doctor", "--json", f"{folder}/h{rank}.json", *start.words]
        script = " && ".join(
            ["mount --make-rprivate /", f"hostname h{rank}", *start.setup, f"cd {start.folder}", 'exec "$@"']
        )
        words = host.command("unshare", "--mount", "--uts", "sh", "-c", script, "sh", *start.before, *doctor)
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "OMPI", "PMI"))}
        environment = {**kept, "PYTHONPATH": f"{ROOT}/src", "OMP_NUM_THREADS": "1", **start.env}
        running.append(
            subprocess.Popen(words, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        )
    said = [process.communicate(timeout=200)[0] for process in running]
    return [(process.returncode, text) for process, text in zip(running, said, strict=True)]


def _faults(folder: Path) -> list[dict[str, Any]]:
    """The faults of every report that was written, each once."""
    found = [line for path in sorted(folder.glob("h*.json")) for line in json.loads(path.read_text())["lines"]]
    return [line for place, line in enumerate(found) if line["level"] == "fault" and line not in found[:place]]


def test_two_healthy_hosts_have_no_fault(hosts: list[Host], tmp_path: Path) -> None:
    ended = _run(hosts, _starts(hosts, tmp_path), tmp_path)
    assert _faults(tmp_path) == [], ended
    assert [status for status, _ in ended] == [0, 0], ended
    assert "every host reaches every other: 2 ways" in ended[0][1]
    assert "is one folder for all 2 hosts, with locks" in ended[0][1]


def _clean(folder: Path, ended: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    """The report of healthy processes."""
    assert ended.returncode == 0, ended.stdout + ended.stderr
    report: dict[str, Any] = json.loads((folder / "report.json").read_text())
    assert [line for line in report["lines"] if line["level"] == "fault"] == []
    return report


_DOCTOR = (sys.executable, "-m", "samestep", "doctor", "--json", "report.json")


def _started(folder: Path, *words: str, **variables: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}/src", "OMP_NUM_THREADS": "1", **variables}
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen([*words, *_DOCTOR], cwd=folder, env=environment, text=True, **pipes)


def _ended(running: subprocess.Popen[str]) -> subprocess.CompletedProcess[str]:
    out, err = running.communicate(timeout=200)
    return subprocess.CompletedProcess(running.args, running.returncode, out, err)


def test_one_machine_alone_has_no_fault(tmp_path: Path) -> None:
    report = _clean(tmp_path, _ended(_started(tmp_path)))
    assert {line["about"] for line in report["lines"]} >= {"identity", "names", "folder", "shm", "software", "torch"}


def test_ranks_of_mpirun_have_no_fault(tmp_path: Path) -> None:
    _need("mpirun", "openmpi-bin")
    ended = _ended(_started(tmp_path, "mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "2"))
    assert "all 2 ranks by Open MPI came on one host" in json.dumps(_clean(tmp_path, ended))
    assert "samestep doctor: 1 host by Open MPI" in ended.stdout


def test_ranks_of_mpirun_without_its_variables_are_worlds_of_one(tmp_path: Path) -> None:
    _need("mpirun", "openmpi-bin")
    hidden = ("env", "-u", "OMPI_COMM_WORLD_RANK", "-u", "OMPI_COMM_WORLD_SIZE")
    ended = _ended(_started(tmp_path, "mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "2", *hidden))
    assert ended.returncode == 1
    assert "a world of one, yet 2 processes of this command by mpirun" in ended.stdout


def test_two_agents_of_torchrun_have_no_fault(tmp_path: Path) -> None:
    at = (
        "--nnodes",
        "2",
        "--nproc-per-node",
        "2",
        "--rdzv-backend",
        "c10d",
        "--rdzv-endpoint",
        f"127.0.0.1:{_free_port()}",
    )
    agent = (sys.executable, "-m", "torch.distributed.run", *at, "--rdzv-id", "doctor", "--no-python")
    ended = [_ended(one) for one in [_started(tmp_path, *agent) for _ in range(2)]]
    assert [one.returncode for one in ended] == [0, 0], ended
    assert "all 4 ranks by torchrun came on 2 hosts" in json.dumps(_clean(tmp_path, ended[0]))


def _pods(index: int, port: str) -> dict[str, str]:
    ranks = {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "2", "JOB_COMPLETION_INDEX": f"{index}"}
    return {**ranks, "PET_MASTER_ADDR": "localhost", "PET_MASTER_PORT": port, "HOSTNAME": f"pod{index}"}


def test_pods_of_kubernetes_have_no_fault_by_their_variables(tmp_path: Path) -> None:
    port = _free_port()
    ended = [_ended(one) for one in [_started(tmp_path, **_pods(index, port)) for index in range(2)]]
    assert [one.returncode for one in ended] == [0, 0], ended
    assert "all 2 hosts by Kubernetes came, each once" in json.dumps(_clean(tmp_path, ended[0]))


def test_hosts_with_a_secret_have_no_fault(hosts: list[Host], tmp_path: Path) -> None:
    (tmp_path / "token").write_text(secrets.token_hex(32))
    (tmp_path / "token").chmod(0o600)
    starts = _starts(hosts, tmp_path)
    for start in starts:
        start.env.clear()
        start.words += [
            "--nodes",
            "2",
            "--rendezvous",
            f"{hosts[0].address}:{PORT}",
            "--token-file",
            f"{tmp_path}/token",
        ]
    ended = _run(hosts, starts, tmp_path)
    assert _faults(tmp_path) == [], ended
    assert [status for status, _ in ended] == [0, 0], ended


def test_a_stranger_s_run_is_not_met(hosts: list[Host], tmp_path: Path) -> None:
    starts = _starts(hosts, tmp_path)
    for index, start in enumerate(starts):
        (tmp_path / f"token{index}").write_text(secrets.token_hex(32))
        (tmp_path / f"token{index}").chmod(0o600)
        start.words += ["--token-file", f"{tmp_path}/token{index}", "--wait", "3"]
    ended = _run(hosts, starts, tmp_path)
    assert [status for status, _ in ended] == [1, 1], ended
    assert "rank 1 of 2 was silent" in ended[0][1]
    assert "another run, or one with another token, listens there" in ended[1][1]


@pytest.mark.skipif(bool(slurm_cluster.lacking()), reason=slurm_cluster.lacking() or "a cluster can be made here")
def test_tasks_of_slurm_have_no_fault(tmp_path: Path) -> None:
    with slurm_cluster.cluster(tmp_path / "slurm") as made:
        environment = {"PYTHONPATH": f"{ROOT}/src", "OMP_NUM_THREADS": "1"}
        ended = made.run("srun", "--nodes=2", "--ntasks-per-node=2", *_DOCTOR, folder=tmp_path, **environment)
        assert "all 4 ranks by srun came on 2 hosts" in json.dumps(_clean(tmp_path, ended))


def _wrong_interface(hosts: list[Host], starts: list[Start], _folder: Path) -> None:
    starts[1].setup += [
        "ip link add eth1 type veth peer name other1",
        "ip addr add 10.99.0.2/24 dev eth1",
        "ip link set eth1 up",
        "ip link set other1 up",
    ]
    starts[1].env |= {"GLOO_SOCKET_IFNAME": "eth1", "NCCL_SOCKET_IFNAME": "eth1"}


def _blocked_port(hosts: list[Host], starts: list[Start], _folder: Path) -> None:
    rules = f"add table inet t; add chain inet t i {{ type filter hook input priority 0; }}; add rule inet t i tcp dport {PORT} drop"
    _need("nft", "nftables")
    starts[0].setup += [f"nft '{rules}'"]


def _firewall(hosts: list[Host], starts: list[Start], _folder: Path) -> None:
    rules = f"add table inet t; add chain inet t i {{ type filter hook input priority 0; }}; add rule inet t i iif eth0 tcp dport != {PORT} ct state new drop"
    _need("nft", "nftables")
    starts[0].setup += [f"nft '{rules}'"]


def _unshared_folder(hosts: list[Host], starts: list[Start], _folder: Path) -> None:
    starts[1].setup += [f"mount -t tmpfs none {starts[1].folder}"]


def _other_commit(hosts: list[Host], starts: list[Start], folder: Path) -> None:
    def git(where: Path, *words: str) -> None:
        subprocess.run(
            ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-C", str(where), *words],
            check=True,
            capture_output=True,
        )

    first, second = folder / "work", folder / "copy"
    first.mkdir()
    git(first, "init", "-q")
    git(first, "commit", "-q", "--allow-empty", "-m", "one")
    subprocess.run(["git", "clone", "-q", str(first), str(second)], check=True, capture_output=True)
    git(second, "commit", "-q", "--allow-empty", "-m", "two")
    for start, where in zip(starts, (first, second), strict=True):
        start.words += ["--folder", str(start.folder)]
        start.folder = where


def _skewed_clock(hosts: list[Host], starts: list[Start], _folder: Path) -> None:
    _need("faketime", "faketime")
    starts[1].before = ["faketime", "-f", "+1h"]


def _duplicate_ranks(hosts: list[Host], starts: list[Start], _folder: Path) -> None:
    starts[1].env["RANK"] = "0"


def _world_of_one(hosts: list[Host], starts: list[Start], _folder: Path) -> None:
    for start in starts:
        start.env |= {"WORLD_SIZE": "1", "RANK": "0", "PMI_RANK": "0", "PMI_SIZE": "2"}


def _full_shm(hosts: list[Host], starts: list[Start], _folder: Path) -> None:
    starts[1].setup += ["mount -t tmpfs -o size=1m none /dev/shm", "(head -c 1048576 /dev/zero > /dev/shm/left)"]


def _wrong_driver(hosts: list[Host], starts: list[Start], folder: Path) -> None:
    tool = folder / "bin" / "nvidia-smi"
    tool.parent.mkdir()
    tool.write_text("#!/bin/sh\necho 'Failed to initialize NVML: Driver/library version mismatch'\nexit 18\n")
    tool.chmod(0o755)
    starts[1].env["PATH"] = f"{tool.parent}:{os.environ['PATH']}"


def _dead_name(hosts: list[Host], starts: list[Start], folder: Path) -> None:
    (folder / "hosts").write_text(f"127.0.0.1 localhost\n{hosts[0].address} h0\n")
    starts[0].setup += [f"mount --bind {folder}/hosts /etc/hosts"]
    for start in starts:
        start.env["MASTER_ADDR"] = "h0"


def _slow_link(hosts: list[Host], starts: list[Start], _folder: Path) -> None:
    starts[1].setup += ["tc qdisc add dev eth0 root tbf rate 40mbit burst 32kb latency 200ms"]


def _read_only_folder(hosts: list[Host], starts: list[Start], _folder: Path) -> None:
    starts[1].setup += [
        f"mount --bind {starts[1].folder} {starts[1].folder}",
        f"mount -o remount,ro,bind {starts[1].folder}",
    ]


def _need(program: str, package: str) -> None:
    if shutil.which(program) is None:
        pytest.skip(f"{program} is not installed (Debian: {package})")


BROKEN: dict[str, tuple[Callable[[list[Host], list[Start], Path], None], str, str]] = {
    "wrong interface": (_wrong_interface, "interface", "eth1, 10.99.0.2 (by GLOO_SOCKET_IFNAME=eth1), is not reached"),
    "blocked port": (
        _blocked_port,
        "ports",
        f"port {PORT} of 10.77.0.1, at which a run would meet, is blocked: no answer",
    ),
    "firewall": (_firewall, "ports", "not reached at any port: no answer"),
    "unshared folder": (_unshared_folder, "folder", "is not shared"),
    "other commit": (_other_commit, "commit", "commit: "),
    "skewed clock": (_skewed_clock, "clock", "its clock is 3"),
    "duplicate ranks": (_duplicate_ranks, "world", "rank 0 was given to 2 processes"),
    "a task with a world of one": (_world_of_one, "identity", "PMI_SIZE=2, yet WORLD_SIZE=1"),
    "full /dev/shm": (_full_shm, "shm", "no file can be written to /dev/shm: no space left on device"),
    "a stand-in for a wrong driver": (_wrong_driver, "driver", "Failed to initialize NVML"),
    "dead name": (_dead_name, "names", "h0, at which all ranks meet, has no address here"),
    "slow link": (_slow_link, "bandwidth", "a slow link"),
    "read-only folder": (_read_only_folder, "folder", "it is mounted read-only"),
}


@pytest.mark.parametrize("broken", BROKEN)
def test_a_broken_set_up_is_named_in_one_line(broken: str, hosts: list[Host], tmp_path: Path) -> None:
    plant, about, text = BROKEN[broken]
    starts = _starts(hosts, tmp_path)
    plant(hosts, starts, tmp_path)
    ended = _run(hosts, starts, tmp_path)
    named = [line for line in _faults(tmp_path) if line["about"] == about and text in line["found"]]
    assert len(named) == (2 if broken == "a task with a world of one" else 1), ended
    assert all(line["remedy"] for line in named)
    assert 1 in [status for status, _ in ended], ended
