"""The rendezvous of a run's hosts at one address: one listens, the others connect, and all compare their settings.

The host to which the address belongs listens, on this address alone; it leads the run and has rank 0. The others follow,
in the order of their addresses. A follower that has another version, another job or other flags ends the run by name. A
host without the token is turned away, and the run waits on for those that have it. A process at the address that does
not greet counts as not listening yet: only a false proof of the token is final.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import secrets
import signal
import socket
import stat
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from samestep.errors import JobError, WorkerError
from samestep.runtime.processes.channel import Channel, GreetingError, TokenError, greet, shorten
from samestep.runtime.processes.host_names import interface_of
from samestep.runtime.processes.lobby import Arrival, Lobby

_RETRY_S = 0.3
_LEADER_GRACE_S = 5.0  # a leading host that gives up says so itself
_LEAST_TOKEN_BYTES = 32
_LEAST_TOKEN_SYMBOLS = 8  # 32 random bytes, or 64 random hexadecimal digits, have more in all but 1 of 10^9 draws


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """The address for the rendezvous of a run's hosts, their number, and the secret that they share."""

    host: str
    port: int
    num_hosts: int
    token: bytes = field(repr=False)

    @classmethod
    def of(cls, address: str, num_hosts: int, token: bytes) -> Rendezvous:
        """Read the address, as HOST:PORT.

        Raises:
            JobError: the address is none, or the token is too short or repeats itself.
        """
        host, _, port = address.rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
            raise JobError(f"--rendezvous {address} is no address: HOST:PORT is, such as 10.0.0.1:29400")
        if len(token) < _LEAST_TOKEN_BYTES or len({*token}) < _LEAST_TOKEN_SYMBOLS:
            raise JobError(
                f"--token-file holds {len(token)} bytes, {len({*token})} of them different: at least "
                f"{_LEAST_TOKEN_BYTES} are needed, drawn at random, such as those of openssl rand -hex 32"
            )
        return cls(host.strip("[]"), int(port), num_hosts, token)

    def __str__(self) -> str:
        """Return the address."""
        return f"{self.host}:{self.port}"


def read_token(path: Path) -> bytes:
    """Return the secret in a file, without blanks around it.

    Raises:
        JobError: it cannot be read, or can be read by other users.
    """
    try:
        with path.open("rb") as file:
            mode, token = os.fstat(file.fileno()).st_mode, file.read(4096).strip()
    except OSError as error:
        raise JobError(f"--token-file {path}: {error.strerror}; a file with a secret of your own works") from None
    if stat.S_ISREG(mode) and mode & 0o077:
        raise JobError(f"--token-file {path} can be read by other users: chmod 600 {path} works")
    return token


class Meeting:
    """The hosts of a run, seen from one of them, which leads or follows."""

    def __init__(self, address: str, *, followers: tuple[Channel, ...] = (), leader: Channel | None = None) -> None:
        self.address = address
        """The address of this host on the interface over which the hosts meet."""
        self.interface = interface_of(address)
        self.followers, self.leader = followers, leader

    @property
    def num_hosts(self) -> int:
        """The number of hosts, as the leading one counts them."""
        return 1 + len(self.followers)

    def drop_lost(self) -> list[str]:
        """Return the addresses of the followers that are lost, and go on without them."""
        for follower in self.followers:
            follower.receive_more()
        lost = [follower for follower in self.followers if follower.lost]
        self.followers = tuple(follower for follower in self.followers if not follower.lost)
        for follower in lost:
            follower.close()
        return [follower.peer for follower in lost]

    def dismiss(self, summary: Mapping[str, Any]) -> None:
        """Tell the followers the result of the run."""
        for follower in self.followers:
            follower.send({"bye": {"summary": summary}})

    def __enter__(self) -> Meeting:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Send the followers the reason why the run is over, and end the connections."""
        for follower in self.followers:
            if error is not None:
                follower.send({"bye": _last_word(error)})
            follower.close()
        if self.leader is not None:
            self.leader.close()


def _last_word(error: BaseException) -> dict[str, Any]:
    """Return the last message to followers about the error that has ended a run."""
    if isinstance(error, KeyboardInterrupt):
        return {"status": 128 + signal.SIGINT}
    if isinstance(error, SystemExit):
        return {"status": error.code}
    return {"error": type(error).__name__, "text": shorten(str(error)) or type(error).__name__}


def meet(at: Rendezvous, mine: Mapping[str, str], timeout_s: float, least_hosts: int | None = None) -> Meeting:
    """Meet the other hosts of a run at an address, and find out that they have the same versions, job and flags.

    Every host calls it; if one does not, the others wait for `timeout_s`.

    Args:
        at: where, how many hosts, and the token.
        mine: the settings that must be equal on all hosts, by the words that name them in an error.
        timeout_s: seconds to wait for the others.
        least_hosts: the number of hosts that is enough where no more come in time; all, where it is not given.

    Raises:
        JobError: the token is not that of the address, or a host differs in `mine`.
        WorkerError: the other hosts did not come in time.
    """
    end_s = time.monotonic() + timeout_s
    try:
        family, _, _, _, address = socket.getaddrinfo(at.host, at.port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise JobError(f"--rendezvous {at}: {error.strerror}; the address of a host works") from None
    if ipaddress.ip_address(address[0]).is_unspecified:
        raise JobError(f"--rendezvous {at} is every interface of a host: the address of one works, as others reach it")
    process = f"process {os.getpid()} of {socket.gethostname()}, number {secrets.token_hex(4)}"
    while True:
        try:
            with socket.create_server((str(address[0]), at.port), family=family) as listening:
                return _lead(listening, at, mine, end_s, least_hosts or at.num_hosts)
        except OSError as error:
            if error.errno not in (errno.EADDRNOTAVAIL, errno.EADDRINUSE):
                raise JobError(f"--rendezvous {at} cannot be listened at: {error.strerror}") from None
        found = _follow((str(address[0]), at.port), at, {**mine, "process": process}, timeout_s)
        if isinstance(found, Meeting):
            return found
        if time.monotonic() > end_s:
            if found:
                raise JobError(f"--rendezvous {at}: {found}; the address of the host that leads the run works")
            raise WorkerError(f"no host listened at {at} within {timeout_s:g} s: the host of this address leads a run")
        time.sleep(_RETRY_S)


def _lead(listening: socket.socket, at: Rendezvous, mine: Mapping[str, str], end_s: float, least_hosts: int) -> Meeting:
    """Wait for the followers, and compare them with this host."""
    num_followers, began_s = at.num_hosts - 1, time.monotonic()
    if num_followers:
        print(f"waiting at {at} for {num_followers} more of {at.num_hosts} hosts", flush=True)
    compared: list[Arrival] = []
    with Lobby(listening, at.token) as lobby:
        while True:
            came = lobby.look(min(1.0, max(0.01, end_s - time.monotonic()))) if num_followers else []
            for arrival in [one for one in came if one not in compared]:
                _compare(arrival, mine, lobby)
                _drop_earlier(arrival, [one for one in compared if one in came], lobby)
                compared.append(arrival)
            came = [one for one in compared if one in came and not one.channel.lost]
            if len(came) >= num_followers or (time.monotonic() > end_s and len(came) + 1 >= least_hosts):
                break
            if time.monotonic() > end_s:
                have, waited_s = ", ".join(one.channel.peer for one in came) or "none", time.monotonic() - began_s
                text = f"{len(came) + 1} of {at.num_hosts} hosts came to {at} within {waited_s:.0f} s"
                lobby.dismiss({"refused": text})
                raise WorkerError(f"{text}; besides this one {have}")
        chosen = came[:num_followers]
        lobby.keep(chosen)
        lobby.dismiss({"refused": f"all {at.num_hosts} hosts of the run at {at} have come already"})
    for arrival in chosen:
        arrival.channel.send({"agreed": True})
    followers = sorted((one.channel for one in chosen), key=lambda one: ipaddress.ip_address(one.peer))
    return Meeting(listening.getsockname()[0], followers=tuple(followers))


def _compare(arrival: Arrival, mine: Mapping[str, str], lobby: Lobby) -> None:
    """Refuse a follower that differs from this host.

    Raises:
        JobError: it does; all that have come are told so.
    """
    for name, value in mine.items():
        if arrival.says.get(name) != value:
            text = (
                f"{arrival.channel.peer} has {name} {arrival.says.get(name)}, and the leading host {value}: "
                f"one for all hosts works"
            )
            lobby.dismiss({"refused": text})
            raise JobError(text)


def _drop_earlier(arrival: Arrival, earlier: Sequence[Arrival], lobby: Lobby) -> None:
    """Drop the earlier connection of a process that has come again, and name a second process of the same address."""
    for other in earlier:
        if other.channel.lost:
            continue
        if other.says.get("process") == arrival.says.get("process"):
            print(f"{arrival.name} came twice: its first connection is dropped", flush=True)
            lobby.drop(other)
            other.channel.lost = "it came again"
        elif other.channel.peer == arrival.channel.peer:
            print(f"{arrival.name} counts as one more host than {other.name}", flush=True)


def _follow(address: tuple[str, int], at: Rendezvous, mine: Mapping[str, str], timeout_s: float) -> Meeting | str:
    """Connect to the leading host, and wait for at most `timeout_s` until all hosts have come.

    Returns a description of another process that listens there, as a sentence, or an empty text where none does.

    Raises:
        JobError: it has another token, or refuses this host.
        WorkerError: it is gone, or the others did not come in time.
    """
    try:
        connected = socket.create_connection(address, timeout=_RETRY_S * 10)
    except OSError:
        return ""
    try:
        channel = greet(connected, at.token)
    except (GreetingError, TokenError, OSError) as error:
        connected.close()
        if not isinstance(error, TokenError):
            return str(error)
        raise JobError(f"--rendezvous {at}: {error}; the token file of the host that listens there works") from None
    address_here: str = connected.getsockname()[0]
    channel.send(mine)
    answer = channel.next(timeout_s + _LEADER_GRACE_S)
    if answer is not None and "agreed" in answer:
        return Meeting(address_here, leader=channel)
    lost = channel.lost or f"it did not say within {timeout_s:g} s that all hosts have come"
    channel.close()
    if answer is None:
        raise WorkerError(f"the leading host at {at} is gone: {lost}")
    raise JobError(str(answer.get("refused", "the leading host refuses this one")))
