"""The network interfaces of this host: by name, as gloo and nccl take them, from the addresses that are bound or reached."""

from __future__ import annotations

import socket
import sys

import psutil

LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"


def interface_of(address: str) -> str:
    """Return the name of this host's interface that has an address."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(one.address.partition("%")[0] == address for one in addresses):
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
