"""Connections between every two hosts: which addresses and ports are reached, at which rate, with which latency.

Each host listens at two free ports, as gloo and NCCL do, and answers whoever has the token with its number:

```
dialling host                        listening host
proofs of the token (wings/cluster/hosts/channel.py) in both directions
        ◄──────────────────────────── number
"ping" and single bytes ────────────► each is sent back:                latency = half of the shortest way there and back
"rate" and blocks, for a while ─────► counts what arrives from the first block on:       rate = bytes / seconds
        ◄──────────────────────────── bytes, seconds
```
The receiving side keeps the time, so that what the sender's system has taken in and not sent yet does not count.
"""

from __future__ import annotations

import contextlib
import errno
import select
import socket
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from samestep.wings.cluster.hosts.channel import GreetingError, TokenError, admit, introduce

_NUM_PORTS = 2
_CONNECT_S = 1.4  # TCP sends a lost first packet again after 1 s
_RATE_S, _RATE_END_S, _DRAIN_S = 0.4, 2.5, 1.0
_BLOCK = b"\0" * (1 << 18)
_PINGS = 12
_MOST_AT_ONCE = 32
REACHED = "reached"


@dataclass(frozen=True)
class Target:
    """A host that is to be reached: its number, the addresses at which it may be, and its ports."""

    number: int
    addresses: tuple[str, ...]
    """The address that a run would take, first."""
    ports: tuple[int, ...]


@dataclass(frozen=True)
class Attempt:
    """One attempt to reach a port."""

    address: str
    port: int
    outcome: str
    """`reached`, or what happened instead."""


@dataclass(frozen=True)
class Rate:
    """The rate and the latency from one host to another."""

    bytes_per_s: float
    latency_s: float
    error: str = ""


class Door:
    """The ports at which this host listens for the others."""

    def __init__(self, token: bytes) -> None:
        self.number = -1
        """The number of this host among those that have come; it is known later than the ports."""
        self._token = token
        self._listening = [_listen() for _ in range(_NUM_PORTS)]
        self.ports = tuple(int(listener.getsockname()[1]) for listener in self._listening)
        for listening in self._listening:
            threading.Thread(target=self._accept, args=(listening,), daemon=True).start()

    def close(self) -> None:
        """Listen no longer."""
        for listening in self._listening:
            with contextlib.suppress(OSError):
                listening.shutdown(socket.SHUT_RDWR)
            listening.close()

    def _accept(self, listening: socket.socket) -> None:
        while True:
            try:
                connected, _ = listening.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(connected,), daemon=True).start()

    def _serve(self, connected: socket.socket) -> None:
        with contextlib.suppress(OSError, TokenError), connected:
            admit(connected, self._token)
            connected.settimeout(_RATE_END_S)
            connected.sendall(f"{self.number}\n".encode())
            word = _line(connected)
            if word == "ping":
                connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                while byte := connected.recv(1):
                    connected.sendall(byte)
            elif word == "rate":
                count, seconds = _count(connected)
                connected.sendall(f"{count} {seconds:.9f}\n".encode())
                _drain(connected)


def _listen() -> socket.socket:
    if socket.has_dualstack_ipv6():
        return socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", 0))


def _count(connected: socket.socket) -> tuple[int, float]:
    """Receive for a while, and return the bytes after the first block, and the seconds in which they came."""
    buffer = bytearray(1 << 20)
    if not connected.recv_into(buffer):
        return 0, 0.0
    began_s, count = time.perf_counter(), 0
    while (passed_s := time.perf_counter() - began_s) < _RATE_S:
        more = connected.recv_into(buffer)
        if not more:
            break
        count += more
    return count, passed_s


def _drain(connected: socket.socket) -> None:
    """Read what still comes, since an end that closes with bytes unread takes its last words back."""
    end_s = time.monotonic() + _DRAIN_S
    while (left_s := end_s - time.monotonic()) > 0:
        connected.settimeout(left_s)
        if not connected.recv(1 << 20):
            return


def _line(connected: socket.socket) -> str:
    read = b""
    while not read.endswith(b"\n") and len(read) < 100:
        byte = connected.recv(1)
        if not byte:
            break
        read += byte
    return read.decode(errors="replace").strip()


def _dial(address: str, port: int, token: bytes) -> tuple[socket.socket, int]:
    """Connect to a door; return the connection, and the number of the host that answers, -1 if it sends none.

    Raises:
        OSError: nobody answers.
        GreetingError: another program answers.
        TokenError: another run answers.
    """
    connected = socket.create_connection((address, port), timeout=_CONNECT_S)
    try:
        introduce(connected, token)
        connected.settimeout(_RATE_END_S)
        number = _line(connected)
        return connected, int(number) if number.lstrip("-").isdecimal() else -1
    except BaseException:
        connected.close()
        raise


def attempt(address: str, port: int, token: bytes, number: int | None = None) -> Attempt:
    """Try to reach a port; with a number, the door of that host must answer, else anything that listens will do."""
    try:
        if number is None:
            socket.create_connection((address, port), timeout=_CONNECT_S).close()
            return Attempt(address, port, REACHED)
        connected, outcome = _dial(address, port, token)
        connected.close()
        return Attempt(address, port, REACHED if outcome == number else "another host answers")
    except (GreetingError, TokenError):
        return Attempt(address, port, "another program answers")
    except TimeoutError:
        return Attempt(address, port, f"no answer within {_CONNECT_S:g} s")
    except OSError as error:
        words = {errno.ECONNREFUSED: "refused", errno.EINVAL: "no way there"}
        return Attempt(address, port, words.get(error.errno or 0, (error.strerror or str(error)).lower()))


def reach(targets: Sequence[Target], token: bytes) -> list[list[Attempt]]:
    """Try to reach every target, all at once: the first address at every port, and where one fails, the other addresses."""
    if not targets:
        return []
    with ThreadPoolExecutor(min(len(targets), _MOST_AT_ONCE)) as pool:
        return list(pool.map(lambda target: _reach_one(target, token), targets))


def _reach_one(target: Target, token: bytes) -> list[Attempt]:
    if not target.addresses:
        return [Attempt("", 0, "it has no address")]
    first, *others = target.addresses
    with ThreadPoolExecutor(8) as pool:
        tried = list(pool.map(lambda port: attempt(first, port, token, target.number), target.ports))
        if all(attempt_.outcome == REACHED for attempt_ in tried):
            return tried
        return tried + list(
            pool.map(lambda address: attempt(address, target.ports[0], token, target.number), others[:8])
        )


def rate(address: str, port: int, token: bytes) -> Rate:
    """Measure the latency and the rate to a door."""
    try:
        latency_s = _latency(address, port, token)
        connected, _ = _dial(address, port, token)
        with connected:
            connected.sendall(b"rate\n")
            connected.setblocking(False)
            count, seconds = _flood(connected)
    except (OSError, GreetingError, TokenError, ValueError) as error:
        return Rate(0.0, 0.0, str(error) or type(error).__name__)
    return Rate(count / seconds if seconds else 0.0, latency_s, "" if count else "no byte arrived in time")


def _flood(connected: socket.socket) -> tuple[int, float]:
    """Send until the other side has counted; return what it counted, and the seconds."""
    end_s, said = time.monotonic() + _RATE_END_S, b""
    while time.monotonic() < end_s and not said.endswith(b"\n"):
        readable, writable, _ = select.select([connected], [connected], [], 0.1)
        if readable:
            more = connected.recv(100)
            if not more:
                break
            said += more
        elif writable:
            with contextlib.suppress(BlockingIOError):
                connected.send(_BLOCK)
    count, _, seconds = said.decode(errors="replace").strip().partition(" ")
    return (int(count), float(seconds)) if said.endswith(b"\n") else (0, 0.0)


def _latency(address: str, port: int, token: bytes) -> float:
    connected, _ = _dial(address, port, token)
    with connected:
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connected.sendall(b"ping\n")
        took = []
        for _turn in range(_PINGS):
            began_s = time.perf_counter()
            connected.sendall(b"x")
            if not connected.recv(1):
                break
            took.append(time.perf_counter() - began_s)
    return min(took, default=0.0) / 2
