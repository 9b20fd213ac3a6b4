"""The names of this host and of its network interfaces; no torch.

Interfaces have names, as gloo and nccl take them, and are found by the addresses that are bound or reached.
"""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path

import psutil

from samestep.errors import JobError
from samestep.runtime.processes.launch_info import LaunchInfo

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
    given, here = os.environ.get(variable, ""), [name for _, name in socket.if_nameindex()]
    names = tuple(filter(None, given.lstrip("=").split(",")))
    if not names or given.startswith("^") or any(name.startswith(names) for name in here):
        return
    raise JobError(
        "network-interface",
        f"{variable}={given} in the environment names no network interface of this host, which has {', '.join(here)}. Remove the "
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
