"""The position that a launcher gives to a process, and the checks of its numbers; the names of this host and of its network interfaces. No torch.

Interfaces have names, as gloo and nccl take them, and are found by the addresses that are bound or reached.
"""

from __future__ import annotations

import os
import re
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from samestep.errors import JobError

ALONE = "alone"
_LAST_PORT = 65535
UNKNOWN = -1
"""The local rank of a process to which its launcher gives none."""


@dataclass(frozen=True)
class LaunchInfo:
    """The position that a launcher gives to one process, before it joins."""

    launcher: str
    """Name of the launcher: samestep, torchrun, srun, Open MPI, ..., or alone."""
    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    ranks_per_node: int = 1
    host: str = ""
    port: int = 0
    path: str = ""
    """File through which samestep's workers find each other; others use host:port."""
    store_is_kept: bool = False
    """Whether the store at host:port is that of another process, and may hold what earlier starts wrote; else rank 0 holds it."""
    node: str = ""
    """The launcher's name of this host; empty where it gives none."""
    num_hosts: int = 1
    """The hosts on each of which the launcher has started one process, which starts the ranks; 1 where it starts the ranks."""
    host_index: int = 0
    """The position of this host among them."""
    inside: str = ""
    """The allocation of a process that no launcher has started as one of several, in words; empty outside of any."""

    @property
    def is_engine(self) -> bool:
        """Whether another launcher than samestep's has started this process as a rank."""
        return self.launcher not in (ALONE, "samestep", "the user") and self.num_hosts == 1


def check_rank(name: str, rank: int, count_name: str, count: int) -> None:
    """Refuse a number that is none of a count.

    Raises:
        JobError: it is none.
    """
    if not 0 <= rank < count:
        raise JobError(
            "launcher-variables",
            f"{name}={rank} is not a rank of {count_name}={count}; ranks are 0 to {count_name} - 1",
        )


def check_local(local: tuple[str, int], here: tuple[str, int], world: tuple[str, int]) -> None:
    """Refuse a number of ranks of this host that the world does not have, and a local rank beyond it.

    Raises:
        JobError: there are too many.
    """
    if not 1 <= here[1] <= world[1]:
        raise JobError(
            "launcher-variables",
            f"{here[0]}={here[1]} contradicts {world[0]}={world[1]}: a host has 1 to {world[1]} of the ranks",
        )
    if local[1] != UNKNOWN and not 0 <= local[1] < here[1]:
        raise JobError(
            "launcher-variables",
            f"{local[0]}={local[1]} contradicts {here[0]}={here[1]}: local ranks are 0 to {here[1] - 1}",
        )


def number(env: Mapping[str, str], name: str, default: int | None = None) -> int:
    """Return a whole number from the environment.

    Raises:
        JobError: the variable is not an integer.
    """
    text = env.get(name, "")
    if text == "" and default is not None:
        return default
    if not re.fullmatch(r"\s*-?[0-9]{1,18}\s*", text):
        shown = text if len(text) <= 40 else f"{text[:40]}..."
        raise JobError("launcher-variables", f"{name}={shown} is not a whole number; the launcher sets it")
    return int(text)


def port(env: Mapping[str, str], name: str, default: int | None = None) -> int:
    """Return the port number of a store from the environment.

    Raises:
        JobError: the variable is no port.
    """
    value = number(env, name, default)
    if not 1 <= value <= _LAST_PORT:
        raise JobError("launcher-variables", f"{name}={value} must be a port from 1 to {_LAST_PORT}, such as 29500")
    return value


LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"


def interface_of(address: str) -> str:
    """Return the name of this host's interface that has an address."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(interface.address.partition("%")[0] == address for interface in addresses):
            return name
    return LOOPBACK  # 127.0.0.2 is the loopback interface's too


def interface_towards(host: str) -> str:
    """Return the name of the interface over which this host reaches another one; empty where it does not know the way."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:  # of datagrams: connecting one sends nothing
            probe.connect(address)
            return interface_of(probe.getsockname()[0])
    except OSError:
        return ""


def check_interfaces(variable: str) -> None:
    """Refuse a variable of which no name, or beginning of one, is that of an interface of this host; nccl leaves out those after `^`.

    Raises:
        JobError: it was left from another host.
    """
    value, here = os.environ.get(variable, ""), [name for _, name in socket.if_nameindex()]
    names = tuple(filter(None, value.lstrip("=").split(",")))
    if not names or value.startswith("^") or any(name.startswith(names) for name in here):
        return
    raise JobError(
        "network-interface",
        f"{variable}={value} in the environment names no network interface of this host, which has {', '.join(here)}. Remove the "
        f"variable, and samestep chooses one, or set {variable}={here[-1]}",
    )


def host_of(info: LaunchInfo) -> tuple[str, str]:
    """Return the name of this host, and a text that no other host has.

    A launcher's name for the host, its own, and the start of its system: containers of one system differ in their names, and hosts that
    are all called localhost in the other.
    """
    name = info.node or socket.gethostname()
    try:
        start = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        start = ""
    return name, "|".join((info.node, socket.gethostname(), os.environ.get("HOSTNAME", ""), start))
