"""The hosts of a run meet at one address: one listens there, the others connect, and all find out whether they agree.

The host to which the address belongs listens, on this address alone; it leads the run and has rank 0. The others follow,
in the order of their addresses. A follower that has another version, another job or other flags ends the run by name. Who
does not know the token is turned away, and the run waits on for those who do.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import signal
import socket
import stat
import time
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from samestep.errors import JobError, WorkerError
from samestep.runtime.processes.channel import Channel, TokenError, greet, welcome
from samestep.runtime.processes.interfaces import interface_of

_RETRY_S = 0.3
_LEAST_TOKEN_BYTES = 16


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """The address at which the hosts of a run meet, their number, and the secret that they share."""

    host: str
    port: int
    num_hosts: int
    token: bytes = field(repr=False)

    @classmethod
    def of(cls, address: str, num_hosts: int, token: bytes) -> Rendezvous:
        """Read the address, as HOST:PORT.

        Raises:
            JobError: the address is none, or the token is too short.
        """
        host, _, port = address.rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
            raise JobError(f"--rendezvous {address} is no address: HOST:PORT is, such as 10.0.0.1:29400")
        if len(token) < _LEAST_TOKEN_BYTES:
            raise JobError(
                f"--token-file holds {len(token)} bytes: at least {_LEAST_TOKEN_BYTES} are needed, such as those of "
                f"openssl rand -hex 32"
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
        """Tell the followers why the run is over, and end the connections."""
        for follower in self.followers:
            if error is not None:
                follower.send({"bye": _last_word(error)})
            follower.close()
        if self.leader is not None:
            self.leader.close()


def _last_word(error: BaseException) -> dict[str, Any]:
    """Return what a follower is told of the error that has ended a run."""
    if isinstance(error, KeyboardInterrupt):
        return {"status": 128 + signal.SIGINT}
    if isinstance(error, SystemExit):
        return {"status": error.code}
    return {"error": type(error).__name__, "text": str(error) or type(error).__name__}


def meet(at: Rendezvous, mine: Mapping[str, str], timeout_s: float, least_hosts: int | None = None) -> Meeting:
    """Meet the other hosts of a run at an address, and find out that they have the same versions, job and flags.

    Every host calls it; if one does not, the others wait for `timeout_s`.

    Args:
        at: where, how many hosts, and the token.
        mine: what must be equal on all hosts, by the words that name it in an error.
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
    while True:
        try:
            with socket.create_server((str(address[0]), at.port), family=family) as listening:
                return _led(listening, at, mine, end_s, least_hosts or at.num_hosts)
        except OSError as error:
            if error.errno not in (errno.EADDRNOTAVAIL, errno.EADDRINUSE):
                raise JobError(f"--rendezvous {at} cannot be listened at: {error.strerror}") from None
        if (found := _followed((str(address[0]), at.port), at, mine)) is not None:
            return found
        if time.monotonic() > end_s:
            raise WorkerError(f"no host listened at {at} within {timeout_s:g} s: the host of this address leads a run")
        time.sleep(_RETRY_S)


def _led(listening: socket.socket, at: Rendezvous, mine: Mapping[str, str], end_s: float, least_hosts: int) -> Meeting:
    """Wait for the followers, and compare them with this host."""
    came: list[Channel] = []
    if at.num_hosts > 1:
        print(f"waiting at {at} for {at.num_hosts - 1} more of {at.num_hosts} hosts", flush=True)
    began_s = time.monotonic()
    with contextlib.ExitStack() as stack:
        while len(came) < at.num_hosts - 1:
            listening.settimeout(max(0.01, end_s - time.monotonic()))
            try:
                connected, (peer, *_) = listening.accept()
            except TimeoutError:
                if len(came) + 1 >= least_hosts:
                    break
                have = ", ".join(one.peer for one in came) or "none"
                waited_s = time.monotonic() - began_s
                raise WorkerError(
                    f"{len(came) + 1} of {at.num_hosts} hosts came to {at} within {waited_s:.0f} s; besides this one {have}"
                ) from None
            try:
                channel = welcome(connected, at.token)
            except TokenError as error:
                warnings.warn(f"a host at {peer} was turned away: {error}", stacklevel=2)
                continue
            stack.callback(channel.close)
            if (theirs := channel.next()) is None:
                continue
            _compare(theirs, mine, channel, came)
            came.append(channel)
        for channel in came:
            channel.send({"agreed": True})
        stack.pop_all()
    came.sort(key=lambda one: ipaddress.ip_address(one.peer))
    return Meeting(listening.getsockname()[0], followers=tuple(came))


def _compare(theirs: Mapping[str, str], mine: Mapping[str, str], channel: Channel, came: list[Channel]) -> None:
    """Refuse a follower that differs from this host.

    Raises:
        JobError: it does; all that have come are told so.
    """
    for name, value in mine.items():
        if theirs.get(name) != value:
            text = (
                f"{channel.peer} has {name} {theirs.get(name)}, and the leading host {value}: one for all hosts works"
            )
            for told in (*came, channel):
                told.send({"refused": text})
            raise JobError(text)


def _followed(address: tuple[str, int], at: Rendezvous, mine: Mapping[str, str]) -> Meeting | None:
    """Connect to the leading host, and wait until all hosts have come; None where nobody listens yet."""
    try:
        connected = socket.create_connection(address, timeout=_RETRY_S * 10)
    except OSError:
        return None
    try:
        channel = greet(connected, at.token)
    except TokenError as error:
        connected.close()
        raise JobError(f"--rendezvous {at}: {error}; the token file of the host that listens there works") from None
    address_here: str = connected.getsockname()[0]
    channel.send(mine)
    answer = channel.next()
    if answer is None or "refused" in answer:
        channel.close()
        if answer is None:
            raise WorkerError(f"the leading host at {at} is gone: {channel.lost}")
        raise JobError(answer["refused"])
    return Meeting(address_here, leader=channel)
