"""The names and interfaces of a host: which addresses its names have, and which interface a run would send over."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import psutil

from samestep.runtime.processes.host_names import LOOPBACK, interface_towards

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
    own_addresses: tuple[str, ...]
    """The addresses of its own name; empty where it has none."""
    reverse: str
    """The name of the address over which it sends; empty where nothing gives one."""
    reverse_addresses: tuple[str, ...]
    """The addresses of that name."""
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
        chosen = [one.address for one in self.interfaces if one.name == self.chosen]
        others = [one.address for one in self.interfaces if one.name not in (self.chosen, LOOPBACK) and one.is_up]
        return tuple(dict.fromkeys([*chosen, *others]))

    def interface_of(self, address: str) -> str:
        """Return the name of the interface that has an address."""
        return next((one.name for one in self.interfaces if one.address == address), "no interface")


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
    address = next((one.address for one in interfaces if one.name == chosen), "")
    reverse = _name_of(address)
    return Network(
        name=name,
        own_addresses=addresses_of(name),
        reverse=reverse,
        reverse_addresses=addresses_of(reverse) if reverse else (),
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
        return tuple(dict.fromkeys(str(one[4][0]) for one in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)))
    except (OSError, UnicodeError):
        return ()


def without_address(names: Iterable[str]) -> tuple[str, ...]:
    """Return those of some names that have no address here."""
    return tuple(name for name in names if not addresses_of(name))


def _name_of(address: str) -> str:
    try:
        return socket.gethostbyaddr(address)[0] if address else ""
    except OSError:
        return ""


def _interfaces() -> tuple[Interface, ...]:
    stats = psutil.net_if_stats()
    return tuple(
        Interface(name, one.address.partition("%")[0], name in stats and stats[name].isup)
        for name, addresses in psutil.net_if_addrs().items()
        for one in addresses
        if one.family in (socket.AF_INET, socket.AF_INET6) and not one.address.startswith("fe80")
    )


def _choose(meets_at: str, interfaces: Iterable[Interface], env: Mapping[str, str]) -> tuple[str, str, tuple[str, ...]]:
    """Return the interface that gloo and NCCL would take, what chooses it, and the variables that name none."""
    here = [*dict.fromkeys(one.name for one in interfaces)]
    chosen, chosen_by, unknown = "", "", []
    for variable in INTERFACE_VARIABLES:
        if not (value := env.get(variable, "")):
            continue
        found = _named_by(value, here, is_exact=variable.startswith("GLOO"))
        if found is None:
            unknown.append(f"{variable}={value}")
        elif not chosen:
            chosen, chosen_by = found, f"{variable}={value}"
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
