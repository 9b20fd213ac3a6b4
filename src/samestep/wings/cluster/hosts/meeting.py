"""The rendezvous of a run's hosts at one address: one listens, the others connect, and all compare their settings.

The host to which the address belongs listens, on this address alone; it leads the run and has rank 0. The others follow,
in the order of their addresses. A follower that has another version, another job or other flags ends the run by name. A
host without the token is turned away, and the run waits on for those that have it. A process at the address that does
not greet counts as not listening yet: only a false proof of the token is final.

Any process that can reach the address may connect to it: a port scanner, a probe of a cluster, a host that died and was
started again. A connection is therefore greeted in a separate thread, within the time limit of a greeting, and a host
counts only while its connection is good. At most `_MOST_GREETED` connections are greeted at once. One more ends the
oldest: an honest host needs two round trips and is seldom the oldest; it tries again where it is.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import secrets
import signal
import socket
import stat
import threading
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing import connection
from pathlib import Path
from types import TracebackType
from typing import Any

from samestep.errors import JobError, SamestepError, WorkerError
from samestep.runtime.processes.launch_info import interface_of
from samestep.wings.cluster.hosts.channel import Channel, GreetingError, TokenError, greet, shorten, welcome

_RETRY_S = 0.3
_LEADER_GRACE_S = 5.0  # a leading host that gives up says so itself
_LEAST_TOKEN_BYTES = 32
_LEAST_TOKEN_SYMBOLS = 8  # 32 random bytes, or 64 random hexadecimal digits, have more in all but 1 of 10^9 draws
_MOST_GREETED = 64
_LOOK_AGAIN_S = 0.05  # while a greeting goes on


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
            raise JobError(
                "rendezvous-address", f"--rendezvous must be HOST:PORT, such as 10.0.0.1:29400, got {address}"
            )
        if len(token) < _LEAST_TOKEN_BYTES or len({*token}) < _LEAST_TOKEN_SYMBOLS:
            raise JobError(
                "token-file",
                f"--token-file holds {len(token)} bytes, {len({*token})} of them different: at least "
                f"{_LEAST_TOKEN_BYTES} are needed, drawn at random, for example by openssl rand -hex 32",
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
        raise JobError(
            "token-file", f"--token-file {path}: {error.strerror}. Use a file with a secret of your own"
        ) from None
    if stat.S_ISREG(mode) and mode & 0o077:
        raise JobError("token-file", f"--token-file {path} can be read by other users. Use chmod 600 {path}")
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
    code = error.code if isinstance(error, SamestepError) else "leading-host-failed"
    return {"error": type(error).__name__, "code": code, "text": shorten(str(error)) or type(error).__name__}


def meet(at: Rendezvous, facts: Mapping[str, str], timeout_s: float) -> Meeting:
    """Meet the other hosts of a run at an address, and find out that they have the same versions, job and flags.

    Every host calls it; if one does not, the others wait for `timeout_s`.

    Args:
        at: where, how many hosts, and the token.
        facts: the settings that must be equal on all hosts, by the words that name them in an error.
        timeout_s: seconds to wait for the others.

    Raises:
        JobError: the token is not that of the address, or a host differs in `mine`.
        WorkerError: the other hosts did not come in time.
    """
    end_s = time.monotonic() + timeout_s
    try:
        family, _, _, _, address = socket.getaddrinfo(at.host, at.port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise JobError(
            "rendezvous-address", f"--rendezvous {at}: {error.strerror}. Use the address of a host"
        ) from None
    if ipaddress.ip_address(address[0]).is_unspecified:
        raise JobError(
            "rendezvous-address",
            f"--rendezvous {at} is every interface of a host. Use the address of one, as others reach it",
        )
    process = f"process {os.getpid()} of {socket.gethostname()}, number {secrets.token_hex(4)}"
    while True:
        try:
            with socket.create_server((str(address[0]), at.port), family=family) as listening:
                return _lead(listening, at, facts, end_s)
        except OSError as error:
            if error.errno not in (errno.EADDRNOTAVAIL, errno.EADDRINUSE):
                raise JobError(
                    "rendezvous-address", f"--rendezvous {at} cannot be listened at: {error.strerror}"
                ) from None
        meeting = _follow((str(address[0]), at.port), at, {**facts, "process": process}, timeout_s)
        if isinstance(meeting, Meeting):
            return meeting
        if time.monotonic() > end_s:
            if meeting:
                raise JobError(
                    "rendezvous-address",
                    f"--rendezvous {at}: {meeting}. Use the address of the host that leads the run",
                )
            raise WorkerError(
                "hosts-not-met",
                f"no host listened at {at} within {timeout_s:g} s: the host of this address leads a run",
            )
        time.sleep(_RETRY_S)


def _lead(listening: socket.socket, at: Rendezvous, facts: Mapping[str, str], end_s: float) -> Meeting:
    """Wait for the followers, and compare them with this host."""
    num_followers, began_s = at.num_hosts - 1, time.monotonic()
    if num_followers:
        print(f"waiting at {at} for {num_followers} more of {at.num_hosts} hosts", flush=True)
    compared: list[Arrival] = []
    with Lobby(listening, at.token) as lobby:
        while True:
            came = lobby.look(min(1.0, max(0.01, end_s - time.monotonic()))) if num_followers else []
            for arrival in [arrival for arrival in came if arrival not in compared]:
                _compare(arrival, facts, lobby)
                _drop_earlier(arrival, [arrival for arrival in compared if arrival in came], lobby)
                compared.append(arrival)
            came = [arrival for arrival in compared if arrival in came and not arrival.channel.lost]
            if len(came) >= num_followers:
                break
            if time.monotonic() > end_s:
                have, waited_s = (
                    ", ".join(arrival.channel.peer for arrival in came) or "none",
                    time.monotonic() - began_s,
                )
                text = f"{len(came) + 1} of {at.num_hosts} hosts came to {at} within {waited_s:.0f} s"
                lobby.dismiss({"refused": text})
                raise WorkerError("hosts-not-met", f"{text}; hosts apart from this one: {have}")
        chosen = came[:num_followers]
        lobby.keep(chosen)
        lobby.dismiss({"refused": f"all {at.num_hosts} hosts of the run at {at} have come already"})
    for arrival in chosen:
        arrival.channel.send({"agreed": True})
    followers = sorted((arrival.channel for arrival in chosen), key=lambda channel: ipaddress.ip_address(channel.peer))
    return Meeting(listening.getsockname()[0], followers=tuple(followers))


def _compare(arrival: Arrival, facts: Mapping[str, str], lobby: Lobby) -> None:
    """Refuse a follower that differs from this host.

    Raises:
        JobError: it does; all that have come are told so.
    """
    for name, value in facts.items():
        if arrival.says.get(name) != value:
            text = (
                f"{arrival.channel.peer} has {name} {arrival.says.get(name)}, and the leading host {value}. Use "
                f"one for all hosts"
            )
            lobby.dismiss({"refused": text})
            raise JobError("leading-host-refuses", text)


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


def _follow(address: tuple[str, int], at: Rendezvous, facts: Mapping[str, str], timeout_s: float) -> Meeting | str:
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
        raise JobError(
            "token-file", f"--rendezvous {at}: {error}. Use the token file of the host that listens there"
        ) from None
    address_here: str = connected.getsockname()[0]
    channel.send(facts)
    answer = channel.next(timeout_s + _LEADER_GRACE_S)
    if answer is not None and "agreed" in answer:
        return Meeting(address_here, leader=channel)
    lost = channel.lost or f"it did not report within {timeout_s:g} s that all hosts have come"
    channel.close()
    if answer is None:
        raise WorkerError("rank-lost", f"the leading host at {at} is gone: {lost}")
    raise JobError("leading-host-refuses", str(answer.get("refused", "the leading host rejects this one")))


@dataclass(eq=False)
class Arrival:
    """A host that knows the token."""

    channel: Channel
    says: dict[str, Any] = field(default_factory=dict)
    """What it says of itself in its first message; empty until that has come."""

    @property
    def name(self) -> str:
        """The address of the host, and its process there."""
        return f"{self.channel.peer} ({self.says.get('process', 'a process')})"


class Lobby:
    """The hosts that have come to a listening socket; leaving the context ends the greetings that go on."""

    def __init__(self, listening: socket.socket, token: bytes) -> None:
        self._listening, self._token = listening, token
        self._lock = threading.Lock()
        self._greeted: list[tuple[str, Channel | Exception]] = []
        self._greetings: dict[socket.socket, threading.Thread] = {}
        self._arrivals: list[Arrival] = []
        listening.setblocking(False)

    def __enter__(self) -> Lobby:
        return self

    def __exit__(self, *error: object) -> None:
        for connected, thread in list(self._greetings.items()):
            _shut(connected)
            thread.join()
        for _peer, greeted in self._greeted:
            if isinstance(greeted, Channel):
                greeted.close()

    def look(self, wait_s: float) -> list[Arrival]:
        """Wait for something to happen, at most `wait_s` seconds, and return the hosts that are there, in the order of arrival."""
        sources: list[Any] = [self._listening, *(arrival.channel for arrival in self._arrivals)]
        connection.wait(sources, timeout=min(wait_s, _LOOK_AGAIN_S) if self._greetings else wait_s)
        self._accept()
        self._take_in()
        for arrival in self._arrivals:
            arrival.channel.receive_more()
            if not arrival.says:
                arrival.says = next(iter(arrival.channel.receive()), {})
        for gone in [arrival for arrival in self._arrivals if arrival.channel.lost]:
            print(f"{gone.name} left before all hosts had come: {gone.channel.lost}", flush=True)
            self.drop(gone)
        return [arrival for arrival in self._arrivals if arrival.says]

    def drop(self, arrival: Arrival) -> None:
        """Forget a host, and end its connection."""
        self._arrivals.remove(arrival)
        arrival.channel.close()

    def dismiss(self, word: Mapping[str, Any]) -> None:
        """Send a last message to all hosts that are there, and end their connections."""
        for arrival in self._arrivals:
            arrival.channel.send(word)
        for arrival in list(self._arrivals):
            self.drop(arrival)

    def keep(self, chosen: list[Arrival]) -> None:
        """Leave the connections of these hosts to the caller."""
        self._arrivals = [arrival for arrival in self._arrivals if arrival not in chosen]

    def _accept(self) -> None:
        """Begin the greeting of whoever has connected."""
        while True:
            try:
                connected, (peer, *_) = self._listening.accept()
            except OSError:
                return
            with self._lock:
                going_on = list(self._greetings)
            for oldest in going_on[: len(going_on) - _MOST_GREETED + 1]:
                _shut(oldest)
            thread = threading.Thread(target=self._greet, args=(connected, peer), daemon=True)
            with self._lock:
                self._greetings[connected] = thread
            thread.start()

    def _greet(self, connected: socket.socket, peer: str) -> None:
        channel: Channel | Exception
        try:
            channel = welcome(connected, self._token)
        except (GreetingError, TokenError, OSError) as error:
            connected.close()
            channel = error
        with self._lock:
            del self._greetings[connected]
            self._greeted.append((peer, channel))

    def _take_in(self) -> None:
        """Take in the greetings that are over."""
        with self._lock:
            over, self._greeted = self._greeted, []
        for peer, greeted in over:
            if isinstance(greeted, Channel):
                self._arrivals.append(Arrival(greeted))
            else:
                warnings.warn(f"a host at {peer} was turned away: {greeted}", stacklevel=3)


def _shut(connected: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connected.shutdown(socket.SHUT_RDWR)
