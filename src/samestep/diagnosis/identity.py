"""Who a process is: its launcher, its rank, and the address of its rendezvous.

A process that finds a world of one, although a daemon of an engine has started several of its kind, is named too: that engine's
variables did not reach it.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace

import psutil

from samestep.errors import JobError
from samestep.runtime.processes import rank_variables
from samestep.runtime.processes.host_names import host_of
from samestep.runtime.processes.launch_info import ALONE, LaunchInfo
from samestep.runtime.processes.launchers import discover

_FIRST_PORT, _NUM_PORTS, _NUM_SPARE = 20000, 10000, 2
_DAEMONS = {"mpirun", "mpiexec", "orted", "orterun", "prted", "prterun", "hydra_pmi_proxy", "slurmstepd", "flux-shell"}


@dataclass(frozen=True)
class Identity:
    """The position of one process, as its launcher gives it."""

    host: str
    """The name of its host."""
    key: str
    """A text that no other host has."""
    pid: int
    launcher: str
    variables: tuple[str, ...] = ()
    """The variables that say so, as NAME=VALUE."""
    rank: int = 0
    """The number of the process among all; of a launcher that starts one on each host, that of the host."""
    size: int = 1
    """The number of processes."""
    local_rank: int = 0
    meets_at: str = ""
    """The name of the host at which all meet; empty for a process that is alone."""
    ports: tuple[int, ...] = ()
    """The ports to meet at, in the order in which they are tried."""
    port: int = 0
    """The port that a run would listen at; 0 where its launcher listens there itself."""
    listed: tuple[str, ...] = ()
    """The hosts by the launcher's own list."""
    refused: str = ""
    """Why the variables give no position."""
    inside: str = ""
    """The allocation of a process that is alone in it."""
    others: str = ""
    """The processes of this kind that the same daemon has started, each of which is alone; empty where there are none."""
    is_host: bool = False
    """Whether the launcher starts one process on each host."""

    @property
    def is_first_of_host(self) -> bool:
        """Whether this process looks at its host, as far as it knows by itself."""
        return self.local_rank <= 0 or self.is_host

    def named(self) -> str:
        """Return the process in words."""
        return f"process {self.pid} on {self.host}"


def identify(env: Mapping[str, str], rendezvous: tuple[str, int, int] | None = None) -> Identity:
    """Return who this process is.

    Args:
        env: the variables of the environment.
        rendezvous: the host and the port to meet at, and the number of hosts, where the user gives them.
    """
    listed = rank_variables.listed_hosts(env)
    try:
        info = discover(env)
    except JobError as error:
        host, key = host_of(LaunchInfo(ALONE))
        return Identity(host, key, os.getpid(), "", listed=listed, refused=str(error))
    host, key = host_of(info)
    found = Identity(host, key, os.getpid(), info.launcher, rank_variables.shown(info.launcher, env), listed=listed)
    if rendezvous is not None and not info.is_engine:
        at, port, num_hosts = rendezvous
        return replace(
            found,
            launcher="--rendezvous",
            variables=(),
            rank=-1,
            size=num_hosts,
            meets_at=at,
            ports=(port,),
            port=port,
            is_host=True,
        )
    if info.num_hosts > 1:
        found = replace(found, rank=info.host_index, size=info.num_hosts, is_host=True)
    else:
        found = replace(found, rank=info.rank, size=info.world_size, local_rank=info.local_rank)
    if found.size == 1:
        return replace(found, inside=info.inside, others=_others() if info.launcher == ALONE else "")
    is_held = info.launcher == "Ray" or (info.launcher == "torchrun" and info.store_is_kept)  # by a store of theirs
    ports = () if is_held else (info.port,)
    return replace(
        found, meets_at=info.host, port=0 if is_held else info.port, ports=(*ports, *_spare_ports(info.port))
    )


def _spare_ports(port: int) -> list[int]:
    """Return ports that all processes derive from the one of their run, for where that one is held or blocked."""
    return [
        _FIRST_PORT + zlib.crc32(f"samestep doctor {port} {turn}".encode()) % _NUM_PORTS for turn in range(_NUM_SPARE)
    ]


def _others() -> str:
    """Return how many processes with this command the parent of this one has started, where it is a daemon of an engine."""
    try:
        mine = psutil.Process()
        parent = mine.parent()
        if parent is None or parent.name() not in _DAEMONS:
            return ""
        same = sum(child.cmdline() == mine.cmdline() for child in parent.children())
        return f"{same} processes of this command by {parent.name()}" if same > 1 else ""
    except psutil.Error:
        return ""
