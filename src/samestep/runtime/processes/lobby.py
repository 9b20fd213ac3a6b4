"""The hosts that connect to the leading one before a run begins: greeted in parallel, and forgotten when they leave.

Any process that can reach the address may connect to it: a port scanner, a probe of a cluster, a host that died and was
started again. A connection is therefore greeted in a separate thread, within the time limit of a greeting, and a host
counts only while its connection is good. At most `_MOST_GREETED` connections are greeted at once. One more ends the
oldest: an honest host needs two round trips and is seldom the oldest; it tries again where it is.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from multiprocessing import connection
from typing import Any

from samestep.runtime.processes.channel import Channel, GreetingError, TokenError, welcome

_MOST_GREETED = 64
_LOOK_AGAIN_S = 0.05  # while a greeting goes on


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
        for _peer, found in self._greeted:
            if isinstance(found, Channel):
                found.close()

    def look(self, wait_s: float) -> list[Arrival]:
        """Wait for something to happen, at most `wait_s` seconds, and return the hosts that are there, in the order of arrival."""
        sources: list[Any] = [self._listening, *(one.channel for one in self._arrivals)]
        connection.wait(sources, timeout=min(wait_s, _LOOK_AGAIN_S) if self._greetings else wait_s)
        self._accept()
        self._take_in()
        for arrival in self._arrivals:
            arrival.channel.receive_more()
            if not arrival.says:
                arrival.says = next(iter(arrival.channel.receive()), {})
        for gone in [one for one in self._arrivals if one.channel.lost]:
            print(f"{gone.name} left before all hosts had come: {gone.channel.lost}", flush=True)
            self.drop(gone)
        return [one for one in self._arrivals if one.says]

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
        self._arrivals = [one for one in self._arrivals if one not in chosen]

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
        found: Channel | Exception
        try:
            found = welcome(connected, self._token)
        except (GreetingError, TokenError, OSError) as error:
            connected.close()
            found = error
        with self._lock:
            del self._greetings[connected]
            self._greeted.append((peer, found))

    def _take_in(self) -> None:
        """Take in the greetings that are over."""
        with self._lock:
            over, self._greeted = self._greeted, []
        for peer, found in over:
            if isinstance(found, Channel):
                self._arrivals.append(Arrival(found))
            else:
                warnings.warn(f"a host at {peer} was turned away: {found}", stacklevel=3)


def _shut(connected: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connected.shutdown(socket.SHUT_RDWR)
