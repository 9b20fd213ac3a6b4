"""A cluster of Slurm on this machine: munged, slurmctld and one slurmd for each node, all in a folder of their own.

Needs root, and Debian's packages slurmctld, slurmd, slurm-client and munge. All nodes have the address 127.0.0.1, and names that
do not resolve. Sources: slurm.conf(5), munged(8).
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "scancel", "salloc")


def lacking() -> str:
    """Why no cluster can be made here; empty if it can."""
    absent = [name for name in _PROGRAMS if shutil.which(name) is None]
    if absent:
        return f"{', '.join(absent)} not installed (Debian: slurmctld slurmd slurm-client munge)"
    return "" if os.geteuid() == 0 else "a cluster of Slurm needs root here"


@dataclass(frozen=True)
class Cluster:
    """A running cluster."""

    config: Path

    def run(self, *words: str | Path, folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run a command with this cluster in a folder; a batch job that fails is no error."""
        environment = {**os.environ, "SLURM_CONF": str(self.config), **variables}
        given = [str(word) for word in words]
        return subprocess.run(
            given, cwd=folder, env=environment, text=True, capture_output=True, check=False, timeout=500
        )

    def state(self, job: str) -> dict[str, str]:
        """What scontrol says of a job, by name."""
        said = self.run("scontrol", "show", "job", job, folder=self.config.parent).stdout
        return dict(word.split("=", 1) for word in said.split() if "=" in word)

    def stop_node(self, node: str) -> list[int]:
        """Freeze the daemon of a node, and what it has started there; return their pids, which are to be killed."""
        found = [int((self.config.parent / f"slurmd.{node}.pid").read_text())]
        for folder in Path("/proc").iterdir():
            with contextlib.suppress(OSError, ValueError):
                variables = (folder / "environ").read_bytes().split(b"\0")
                if f"SLURMD_NODENAME={node}".encode() in variables and str(self.config).encode() in b"".join(variables):
                    parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
                    is_step = Path(f"/proc/{parent}/cmdline").read_bytes().startswith(b"slurmstepd")
                    found += [int(folder.name), *[parent] * is_step]
        for pid in found:
            os.kill(pid, signal.SIGSTOP)
        return [*dict.fromkeys(found)]


@contextlib.contextmanager
def cluster(folder: Path, nodes: int = 2, cpus: int = 4) -> Iterator[Cluster]:
    """A cluster of as many nodes, which ends with the context."""
    for name in ("state", "spool", "munge"):
        (folder / name).mkdir(parents=True)
    (folder / "munge").chmod(0o700)
    key = folder / "munge" / "key"
    key.touch(0o400)
    key.write_bytes(secrets.token_bytes(1024))
    config = folder / "slurm.conf"
    config.write_text(_config(folder, nodes, cpus))
    try:
        munge = [f"--{name}={folder / 'munge' / name}" for name in ("socket", "pid-file", "log-file", "seed-file")]
        _start(["munged", "--force", f"--key-file={key}", *munge])
        _start(["slurmctld", "-f", str(config)])
        for number in range(1, nodes + 1):
            _start(["slurmd", "-f", str(config), "-N", f"n{number}"])
        made = Cluster(config)
        for _ in range(120):
            if made.run("sinfo", "-h", "-t", "idle", "-o", "%D", folder=folder).stdout.strip() == str(nodes):
                break
            time.sleep(0.25)
        yield made
    finally:
        for path in (*folder.glob("slurmd.*.pid"), folder / "slurmctld.pid", folder / "munge" / "pid-file"):
            with contextlib.suppress(OSError, ValueError):
                os.kill(int(path.read_text()), signal.SIGTERM)


def _start(words: list[str]) -> None:
    subprocess.run(words, check=True, capture_output=True, timeout=60)


def _config(folder: Path, nodes: int, cpus: int) -> str:
    ports = []
    for _ in range(nodes + 1):
        with socket.create_server(("127.0.0.1", 0)) as server:
            ports.append(server.getsockname()[1])
    host = socket.gethostname().partition(".")[0]
    lines = f"""
        ClusterName=one
        SlurmctldHost={host}(127.0.0.1)
        SlurmUser=root
        SlurmdUser=root
        AuthType=auth/munge
        AuthInfo=socket={folder}/munge/socket,cred_expire=5
        CryptoType=crypto/munge
        SlurmctldPort={ports[0]}
        StateSaveLocation={folder}/state
        SlurmdSpoolDir={folder}/spool/%n
        SlurmctldPidFile={folder}/slurmctld.pid
        SlurmdPidFile={folder}/slurmd.%n.pid
        SlurmctldLogFile={folder}/slurmctld.log
        SlurmdLogFile={folder}/slurmd.%n.log
        ProctrackType=proctrack/linuxproc
        TaskPlugin=task/none
        SwitchType=switch/none
        MpiDefault=none
        SelectType=select/cons_tres
        SelectTypeParameters=CR_CPU
        ReturnToService=2
        JobAcctGatherType=jobacct_gather/none
        AccountingStorageType=accounting_storage/none
        SlurmdParameters=config_overrides
        PartitionName=all Nodes=n[1-{nodes}] Default=YES MaxTime=INFINITE State=UP
    """
    rows = [line.strip() for line in lines.strip().splitlines()]
    rows += [
        f"NodeName=n{number} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs={cpus} RealMemory=4000 State=UNKNOWN"
        for number, port in enumerate(ports[1:], start=1)
    ]
    return "\n".join(rows) + "\n"
