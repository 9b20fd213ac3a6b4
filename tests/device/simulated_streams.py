"""Streams and events of a simulated device: everything is done at once, and using a result without waiting is refused.

A tensor that is made while a side stream is current may be used on another stream only once that one has waited for the
side stream, or for an event that was recorded there later.
"""

from __future__ import annotations

import itertools
import time
from typing import Any

import torch

from tests.device import waits

DEVICE = torch.device("cuda", 0)
_numbers = itertools.count()
Seen = dict[int, int]
"""How many results of each stream are there, by the stream's number."""

_seen_by_host: Seen = {}
"""What is there since the host has waited."""


def _join(seen: Seen, more: Seen) -> None:
    for stream, number in more.items():
        seen[stream] = max(seen.get(stream, 0), number)


class Stream:
    """A queue of the device."""

    def __init__(self, device: Any = None, priority: int = 0, **_: Any) -> None:
        self.device, self.device_index, self.stream_id = DEVICE, 0, next(_numbers)
        self.cuda_stream = self.stream_id
        self.num_made = 0
        """Tensors that were made on it."""
        self._seen: Seen = {}

    def synchronize(self) -> None:
        waits.note("synchronize")
        _join(_seen_by_host, self.seen())

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def wait_stream(self, other: Stream) -> None:
        _join(self._seen, other.seen())

    def wait_event(self, event: Event) -> None:
        _join(self._seen, event.seen)

    def seen(self) -> Seen:
        """Return what is there for what runs here from now on, its own results among it."""
        return {**self._seen, self.stream_id: self.num_made}

    def finds(self, stream: int, number: int) -> bool:
        """Return whether a result of a stream is there for what runs here."""
        return stream == self.stream_id or number <= max(self._seen.get(stream, 0), _seen_by_host.get(stream, 0))

    def query(self) -> bool:
        return True

    def is_capturing(self) -> bool:
        return False

    def __enter__(self) -> Stream:
        _current.append(self)
        return self

    def __exit__(self, *_: Any) -> None:
        _current.pop()


DEFAULT = Stream()
_current = [DEFAULT]


def current(device: Any = None) -> Stream:
    """Return the stream on which operations run now."""
    return _current[-1]


def set_current(stream: Stream) -> None:
    """Let operations run on a stream from now on."""
    _current[-1] = stream


class Event:
    """A moment on a stream."""

    def __init__(self, enable_timing: bool = False, **_: Any) -> None:
        self.at_s, self.asked = 0.0, 0
        self.seen: Seen = {}

    def record(self, stream: Stream | None = None) -> None:
        self.at_s, self.asked, self.seen = time.perf_counter(), waits.asked(), (stream or current()).seen()

    def synchronize(self) -> None:
        waits.note("synchronize", self.asked)
        _join(_seen_by_host, self.seen)

    def elapsed_time(self, other: Event) -> float:
        return max(1e-4, (other.at_s - self.at_s) * 1e3)

    def wait(self, stream: Stream | None = None) -> None:
        (stream or current()).wait_event(self)

    def query(self) -> bool:
        return True


class StreamContext:
    """What `torch.cuda.stream` returns."""

    def __init__(self, stream: Stream | None = None) -> None:
        self.stream = stream

    def __enter__(self) -> Stream | None:
        if self.stream is not None:
            self.stream.__enter__()
        return self.stream

    def __exit__(self, *_: Any) -> None:
        if self.stream is not None:
            self.stream.__exit__()


def synchronize(device: Any = None) -> None:
    """Let the host wait for all streams."""
    waits.note("synchronize")


def made(storage: torch.UntypedStorage) -> None:
    """Note that a storage was written on a side stream."""
    stream = current()
    if stream is not DEFAULT:
        stream.num_made += 1
        storage.__dict__["made"] = (stream.stream_id, stream.num_made)


def check(storage: torch.UntypedStorage) -> None:
    """Refuse to use a storage that another stream makes, for which the current one has not waited."""
    found = storage.__dict__.get("made")
    if found is not None and not current().finds(*found):
        raise RuntimeError("simulated device: what another stream makes is used on a stream that has not waited for it")
