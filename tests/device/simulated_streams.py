"""Streams and events of a simulated device: everything is done at once, and using a result without waiting is refused.

What is written while a stream is current may be used on another stream only once that one has waited for the first, or for an
event that was recorded there later. So it is with what a collective writes, on the stream of its group (`simulated_nccl.py`).
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tests.device import waits

DEVICE = torch.device("cuda", 0)
_numbers = itertools.count()
Seen = dict[int, int]
"""How many results of each stream are there, by the stream's number."""
_MOST_WRITTEN = 32
"""Ranges of a storage that are told apart."""


class Written(NamedTuple):
    """Bytes of a storage, and which result of which stream wrote them."""

    stream: int
    number: int
    start: int
    stop: int


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
        """Results that were written on it."""
        self._seen: Seen = {}
        _streams.append(self)

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


_streams: list[Stream] = []
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
    for stream in _streams:
        _join(_seen_by_host, stream.seen())


def host_has_waited() -> None:
    """Note that the host has read a result of the current stream, and so waited for it."""
    _join(_seen_by_host, current().seen())


def wait_for(seen: Seen) -> None:
    """Let the current stream wait for results of others."""
    _join(current()._seen, seen)


def leaves(host: Tensor, values: Tensor) -> Callable[[], None]:
    """Note that the current stream copies values to pinned host memory; return what lets them arrive there."""
    stream, held = current(), host.untyped_storage().__dict__
    stream.num_made += 1
    held["leaving"] = stream.stream_id, stream.num_made, values

    def arrive() -> None:
        host.copy_(values)
        if held.get("leaving", (0, 0, None))[2] is values:
            del held["leaving"]

    return arrive


def on_its_way(host: Tensor) -> Tensor:
    """Return what the current stream finds in pinned host memory, to which another may be copying."""
    stream, number, values = host.untyped_storage().__dict__.get("leaving", (0, 0, None))
    if values is None or values.shape != host.shape:
        return host
    if not current().finds(stream, number):
        raise RuntimeError(
            "simulated device: what another stream copies to the host is read by one that has not waited for it"
        )
    found: Tensor = values
    return found


def range_of(tensor: Tensor) -> tuple[int, int]:
    """Return the first byte of a storage that a tensor has, and the one behind its last."""
    if not tensor.numel():
        return 0, 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    start = tensor.storage_offset() * tensor.itemsize
    return start, start + (last + 1) * tensor.itemsize


def made(tensor: Tensor, without: Tensor | None = None) -> None:
    """Note that a tensor was written on the current stream, but for the part of it that `without` is."""
    stream = current()
    stream.num_made += 1
    held = tensor.untyped_storage().__dict__
    start, stop = range_of(tensor)
    ranges = [(start, stop)]
    if without is not None and without.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr():
        first, last = range_of(without)
        ranges = [(start, first), (last, stop)]
    for start, stop in ranges:
        kept = [one for one in held.get("made", ()) if not (start <= one.start and one.stop <= stop)]
        if len(kept) >= _MOST_WRITTEN:  # of one stream the last result is there after all others
            kept = [one for one in kept if one.stream != stream.stream_id]
            start, stop = 0, tensor.untyped_storage().nbytes()
        held["made"] = [*kept, Written(stream.stream_id, stream.num_made, start, stop)]


def check(tensor: Tensor) -> None:
    """Refuse to use what another stream writes, for which the current one has not waited."""
    found = tensor.untyped_storage().__dict__.get("made")
    if not found:
        return
    here = current()
    missing = [one for one in found if not here.finds(one.stream, one.number)]
    if missing:
        start, stop = range_of(tensor)
        if any(one.start < stop and start < one.stop for one in missing):
            raise RuntimeError(
                "simulated device: what another stream makes is used on a stream that has not waited for it"
            )
