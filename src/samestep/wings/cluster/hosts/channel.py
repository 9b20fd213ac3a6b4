"""A connection between two hosts of a run: messages in JSON, of which each side knows that the other one wrote them.

```
listening host                                    joining host
nonce a ─────────────────────────────────────────►
        ◄───────────────────────────────────────── nonce b, HMAC(token, "joins" a b)
HMAC(token, "listens" a b) ──────────────────────►
```
Both then have the key HMAC(token, "key" a b). Each later line is `HMAC(key, direction number text) text`, where the number
counts the lines of its direction, so that none can be changed, left out, repeated or sent back. The token itself is never
sent. Nothing is encrypted, and nothing is unpickled. Source: Krawczyk, Bellare, Canetti 1997 (RFC 2104).

Where the second line is no proof, the listening host answers with random digits, which the other side cannot take for one.

Each side says every second that it is there. A side is lost when its connection ends, or when it was silent for 10 s: a
cable that was pulled for 4 s, after which TCP waits for up to 3 s more, loses nobody.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import math
import os
import secrets
import socket
import threading
import time
import weakref
from collections.abc import Mapping
from multiprocessing import connection
from typing import Any

from samestep.errors import WorkerError

_SILENT_S = 10.0
_ALIVE_EVERY_S = 1.0
_GREETING_S = 3.0  # for the whole of a greeting
_CLOSE_S = 3.0
_MOST_BYTES = 1 << 20  # of a line
_MOST_CHARACTERS = 1 << 14  # of a text that is sent, each of which is at most 12 bytes in JSON
_SAYS_NONSENSE = "it sent an unknown message"
_NONCE_BYTES = 32
_GREETING_BYTES = 256  # at most, of each line of a greeting

_open: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def _close_in_child() -> None:
    """Close the connections that a forked process has inherited, or else they would outlast this one."""
    for inherited in list(_open):
        inherited.close()


if hasattr(os, "register_at_fork"):  # a system that forks
    os.register_at_fork(after_in_child=_close_in_child)


class TokenError(Exception):
    """The other side does not know the token."""


class GreetingError(Exception):
    """Raised where the process at the address does not greet as a host of a run; it may do so later."""


class Channel:
    """One end of an authenticated connection: both sides have proven that they have the token."""

    def __init__(self, connected: socket.socket, key: bytes, *, listens: bool) -> None:
        self.peer: str = connected.getpeername()[0]
        self.lost = ""
        """Why no more messages will arrive, as the rest of a sentence; empty while the connection is good."""
        self._socket, self._key = connected, key
        self._names = (b"listens", b"joins") if listens else (b"joins", b"listens")
        self._num_sent = self._num_heard = 0
        self._received = b""
        self._unread: list[dict[str, Any]] = []
        self._heard_s = time.monotonic()
        self._lock = threading.Lock()
        connected.settimeout(_SILENT_S)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        _open.add(connected)
        self._is_closed = threading.Event()
        threading.Thread(target=self._stay_alive, daemon=True).start()

    def fileno(self) -> int:
        """Return the number of the descriptor, for waiting."""
        return self._socket.fileno()

    def send(self, message: Mapping[str, Any]) -> None:
        """Send a message; one that cannot be sent is dropped, and the other side is lost.

        Raises:
            WorkerError: the message is too long.
        """
        text = json.dumps(message).encode()
        if len(text) >= _MOST_BYTES:
            raise WorkerError(
                "value-out-of-range", f"a message of {len(text)} bytes to {self.peer}. Use less than {_MOST_BYTES}"
            )
        with self._lock:
            seal = _seal(self._key, self._names[0], self._num_sent, text)
            self._num_sent += 1
            try:
                self._socket.sendall(seal + b" " + text + b"\n")
            except OSError:
                self.lost = self.lost or "its connection ended"

    def receive(self) -> list[dict[str, Any]]:
        """Return the messages that have come, without waiting; `lost` says whether the other side still is there."""
        self.receive_more()
        messages, self._unread = self._unread, []
        return messages

    def next(self, timeout_s: float = math.inf) -> dict[str, Any] | None:
        """Wait for a message and return it; None where the other side is lost, or sends none within `timeout_s`."""
        end_s = time.monotonic() + timeout_s
        while not self._unread:
            if self.lost or time.monotonic() > end_s:
                return None
            connection.wait([self._socket], timeout=_ALIVE_EVERY_S)
            self.receive_more()
        return self._unread.pop(0)

    def receive_more(self) -> None:
        """Receive the bytes that have arrived, and find out whether the other side is lost."""
        while not self.lost and self._socket.fileno() >= 0 and connection.wait([self._socket], timeout=0):
            try:
                more = self._socket.recv(1 << 16)
            except OSError:
                more = b""
            self._received += more
            self._heard_s = time.monotonic()
            if not more:
                self.lost = "its connection ended"
            elif len(self._received) > 2 * _MOST_BYTES:
                break
        while b"\n" in self._received[: 2 * _MOST_BYTES]:
            line, _, self._received = self._received.partition(b"\n")
            seal, _, text = line.partition(b" ")
            if not hmac.compare_digest(seal, _seal(self._key, self._names[1], self._num_heard, text)):
                self.lost, self._received = "something came that it did not send", b""
                break
            self._num_heard += 1
            try:
                message = json.loads(text)
            except (ValueError, RecursionError):
                message = None
            if not isinstance(message, dict):
                self.lose()
                break
            if message:
                self._unread.append(message)
        if len(self._received) > _MOST_BYTES:
            self.lost = "a message has no end"
        if time.monotonic() - self._heard_s > _SILENT_S:
            self.lost = self.lost or f"it was silent for {_SILENT_S:.0f} s"

    def lose(self) -> None:
        """Count the other side as lost, since it has the token and yet says what no host of a run says."""
        self.lost, self._received = self.lost or _SAYS_NONSENSE, b""
        self._unread.clear()

    def close(self) -> None:
        """End the connection; what was sent still arrives."""
        self._is_closed.set()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)
            # What was sent would be thrown away if this end closed with bytes unread: the other end closes first.
            end_s = time.monotonic() + _CLOSE_S
            while not self.lost and (left_s := end_s - time.monotonic()) > 0:
                self._socket.settimeout(left_s)
                if not self._socket.recv(1 << 16):
                    break
        self._socket.close()

    def _stay_alive(self) -> None:
        while not self._is_closed.wait(_ALIVE_EVERY_S) and not self.lost:
            self.send({})


def shorten(text: str, most: int = _MOST_CHARACTERS) -> str:
    """Return a text of at most `most` characters: the whole, or its beginning and how many characters were left out."""
    if len(text) <= most:
        return text
    note = f" ... ({len(text)} characters)"
    return text[: most - len(note)] + note


def welcome(connected: socket.socket, token: bytes) -> Channel:
    """Greet a host that has connected, and return the channel to it.

    Raises:
        TokenError: it does not know the token, or does not say so in time.
    """
    return Channel(connected, admit(connected, token), listens=True)


def greet(connected: socket.socket, token: bytes) -> Channel:
    """Greet the host that this process has connected to, and return the channel to it.

    Raises:
        TokenError: it does not know the token.
        GreetingError: it does not greet, or ends the greeting.
    """
    return Channel(connected, introduce(connected, token), listens=False)


def admit(connected: socket.socket, token: bytes) -> bytes:
    """Exchange proofs of the token with a process that has connected, and return the key of the connection.

    Raises:
        TokenError: it does not know the token, or does not say so in time.
    """
    lines = _Lines(connected)
    nonce = secrets.token_hex(_NONCE_BYTES).encode()
    lines.write(nonce)
    other, _, seal = lines.read().partition(b" ")
    if len(other) != len(nonce) or not hmac.compare_digest(seal, _hmac(token, b"joins", nonce, other)):
        lines.write(secrets.token_hex(_NONCE_BYTES).encode())
        connected.close()
        raise TokenError("it does not know the token")
    lines.write(_hmac(token, b"listens", nonce, other))
    return _hmac(token, b"key", nonce, other)


def introduce(connected: socket.socket, token: bytes) -> bytes:
    """Exchange proofs of the token with the process that this one has connected to, and return the key of the connection.

    Raises:
        TokenError: it does not know the token.
        GreetingError: it does not greet, or ends the greeting.
    """
    lines = _Lines(connected)
    other, nonce = lines.read(), secrets.token_hex(_NONCE_BYTES).encode()
    if len(other) != len(nonce):
        raise GreetingError("what listens there is no run of samestep")
    proof = _hmac(token, b"listens", other, nonce)
    lines.write(nonce + b" " + _hmac(token, b"joins", other, nonce))
    answer = lines.read()
    if len(answer) != len(proof):
        raise GreetingError("what listens there ended the greeting")
    if not hmac.compare_digest(answer, proof):
        raise TokenError("it has another token")
    return _hmac(token, b"key", other, nonce)


class _Lines:
    """The short lines of a greeting, all of which must come within a few seconds."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket, self._end_s = connected, time.monotonic() + _GREETING_S

    def write(self, line: bytes) -> None:
        with contextlib.suppress(OSError):
            self._socket.sendall(line + b"\n")

    def read(self) -> bytes:
        """Return a line; what came of it where the other side stops."""
        line = b""
        while len(line) < _GREETING_BYTES and (left_s := self._end_s - time.monotonic()) > 0:
            self._socket.settimeout(left_s)
            try:
                byte = self._socket.recv(1)
            except OSError:
                break
            if byte in (b"", b"\n"):
                break
            line += byte
        return line


def _hmac(token: bytes, *parts: bytes) -> bytes:
    return hmac.new(token, b" ".join(parts), hashlib.sha256).hexdigest().encode()


def _seal(key: bytes, side: bytes, number: int, text: bytes) -> bytes:
    return _hmac(key, side, str(number).encode(), text)
