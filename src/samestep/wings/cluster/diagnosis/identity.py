"""Who and where a process is: its launcher, its rank, the address of its rendezvous, and the names and interfaces of its host.

A process that finds a world of one, although a daemon of an engine has started several of its kind, is named too: that engine's
variables did not reach it. Of a host's names their addresses are found, and the interface that a run would send over.
"""

from __future__ import annotations

import os
import socket
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import psutil

from samestep.errors import JobError
from samestep.runtime.processes import rank_variables
from samestep.runtime.processes.launch_info import ALONE, LOOPBACK, LaunchInfo, host_of, interface_towards
from samestep.runtime.processes.launchers import discover

_FIRST_PORT, _NUM_PORTS, _NUM_SPARE = 20000, 10000, 2
_DAEMONS = {"mpirun", "mpiexec", "orted", "orterun", "prted", "prterun", "hydra_pmi_proxy", "slurmstepd"}


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
    identity = Identity(host, key, os.getpid(), info.launcher, rank_variables.shown(info.launcher, env), listed=listed)
    if rendezvous is not None and not info.is_engine:
        at, port, num_hosts = rendezvous
        return replace(
            identity,
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
        identity = replace(identity, rank=info.host_index, size=info.num_hosts, is_host=True)
    else:
        identity = replace(identity, rank=info.rank, size=info.world_size, local_rank=info.local_rank)
    if identity.size == 1:
        return replace(identity, inside=info.inside, others=_others() if info.launcher == ALONE else "")
    is_held = info.launcher == "Ray" or (info.launcher == "torchrun" and info.store_is_kept)  # by a store of theirs
    ports = () if is_held else (info.port,)
    return replace(
        identity, meets_at=info.host, port=0 if is_held else info.port, ports=(*ports, *_spare_ports(info.port))
    )


def _spare_ports(port: int) -> list[int]:
    """Return ports that all processes derive from the one of their run, for where that one is held or blocked."""
    return [
        _FIRST_PORT + zlib.crc32(f"samestep doctor {port} {turn}".encode()) % _NUM_PORTS for turn in range(_NUM_SPARE)
    ]


def _others() -> str:
    """Return how many processes with this command the parent of this one has started, where it is a daemon of an engine."""
    try:
        process = psutil.Process()
        parent = process.parent()
        if parent is None or parent.name() not in _DAEMONS:
            return ""
        same = sum(child.cmdline() == process.cmdline() for child in parent.children())
        return f"{same} processes of this command by {parent.name()}" if same > 1 else ""
    except psutil.Error:
        return ""


LOOPBACK_ADDRESSES = ("127.", "::1")
INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


@dataclass(frozen=True)
class Interface:
    """An interface of a host, and one of its addresses."""

    name: str
    address: str
    is_up: bool


@dataclass(frozen=True)
class Network:
    """The names and interfaces of one host."""

    name: str
    """Its own name."""
    meets_at: str
    meeting_addresses: tuple[str, ...]
    """The addresses of the host at which all meet; empty where it has none here."""
    interfaces: tuple[Interface, ...]
    chosen: str
    """The interface that a run sends over."""
    chosen_by: str
    """What chooses it: a variable, or the way to the host at which all meet."""
    first_addresses: tuple[str, ...] = ()
    """The addresses of the first host that the launcher lists; empty where it lists none, or that one has none here."""
    unknown: tuple[str, ...] = ()
    """Variables that name an interface which is not here, as NAME=VALUE."""

    @property
    def addresses(self) -> tuple[str, ...]:
        """The addresses of this host, those of the chosen interface first, the loopback ones last."""
        chosen = [interface.address for interface in self.interfaces if interface.name == self.chosen]
        others = [
            interface.address
            for interface in self.interfaces
            if interface.name not in (self.chosen, LOOPBACK) and interface.is_up
        ]
        return tuple(dict.fromkeys([*chosen, *others]))

    def interface_of(self, address: str) -> str:
        """Return the name of the interface that has an address."""
        return next((interface.name for interface in self.interfaces if interface.address == address), "no interface")


def find_network(meets_at: str, listed: Sequence[str] = (), env: Mapping[str, str] | None = None) -> Network:
    """Return the names and interfaces of this host.

    Args:
        meets_at: the name of the host at which all meet.
        listed: the hosts that the launcher lists.
        env: the variables of the environment; by default those of this process.
    """
    env = os.environ if env is None else env
    name, interfaces = socket.gethostname(), _interfaces()
    chosen, chosen_by, unknown = _choose(meets_at, interfaces, env)
    return Network(
        name=name,
        meets_at=meets_at,
        meeting_addresses=addresses_of(meets_at) if meets_at else (),
        interfaces=interfaces,
        chosen=chosen,
        chosen_by=chosen_by,
        first_addresses=addresses_of(listed[0]) if listed else (),
        unknown=unknown,
    )


def addresses_of(name: str) -> tuple[str, ...]:
    """Return the addresses of a name; none where it has none here."""
    try:
        return tuple(
            dict.fromkeys(str(entry[4][0]) for entry in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM))
        )
    except (OSError, UnicodeError):
        return ()


def _interfaces() -> tuple[Interface, ...]:
    stats = psutil.net_if_stats()
    return tuple(
        Interface(name, address.address.partition("%")[0], name in stats and stats[name].isup)
        for name, addresses in psutil.net_if_addrs().items()
        for address in addresses
        if address.family in (socket.AF_INET, socket.AF_INET6) and not address.address.startswith("fe80")
    )


def _choose(meets_at: str, interfaces: Iterable[Interface], env: Mapping[str, str]) -> tuple[str, str, tuple[str, ...]]:
    """Return the interface that gloo and NCCL would take, what chooses it, and the variables that name none."""
    here = [*dict.fromkeys(interface.name for interface in interfaces)]
    chosen, chosen_by, unknown = "", "", []
    for variable in INTERFACE_VARIABLES:
        if not (value := env.get(variable, "")):
            continue
        matches = _named_by(value, here, is_exact=variable.startswith("GLOO"))
        if matches is None:
            unknown.append(f"{variable}={value}")
        elif not chosen:
            chosen, chosen_by = matches, f"{variable}={value}"
    if not chosen:
        towards = interface_towards(meets_at) if meets_at else ""
        chosen, chosen_by = towards or LOOPBACK, f"the way to {meets_at}" if towards else "no other host"
    return chosen, chosen_by, tuple(unknown)


def _named_by(value: str, here: Iterable[str], *, is_exact: bool) -> str | None:
    """Return the first interface that a variable names; NCCL takes beginnings of names, `=NAME` and `^NAME`."""
    words = [word for word in value.lstrip("^=").split(",") if word]
    if is_exact or value.startswith("="):
        return next((name for name in here if name in words), None)
    begins = [name for name in here if any(name.startswith(word) for word in words)]
    if value.startswith("^"):
        return next((name for name in here if name not in begins and name != LOOPBACK), None)
    return next(iter(begins), None)
