"""What a recorder reads of a device and its host: points of time, memory in use, and the time for which threads were queued.

A stamp is a point of time of the host on a CPU, or of a GPU's stream: an event, which the host launches before it goes on. Its time
follows from that of an event at the begin of the step, once the device has passed it, without any value that the host would wait for.
Memory is sampled where a layer or a task ends, and named by the op that has ended there:

    allocated   ▁▂▃▄▅▆▅▄▃▂▁        what tensors have; its most since the step began is the allocator's own count
    reserved    ▆▆▆▆▆▆▆▆▆▆▆        what the allocator has taken from the device

The host samples where it issues, in the order in which the allocator is asked. On a CPU the resident memory of the process is all
that a recorder can know: libraries are part of it, and a peak between two samples is not seen.

Linux counts for a process or a thread in files, which are kept open: reading one again takes two microseconds, opening it twenty.

    wall time of a thread = had a processor + queued for one + asleep, by its own wish: in a sleep, a read or a wait

A rank that is late because other programs run is queued; one that is late by what it does itself is not.
Source: Documentation/scheduler/sched-stats.rst (`schedstat`: nanoseconds on a processor, nanoseconds queued) and
Documentation/filesystems/proc.rst (`statm`: pages) of Linux.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

Stamp = Any
"""Nanoseconds, or an event of a GPU."""
_PAGE = 4096


Sample = Any
"""What was sampled, as the system or the allocator says it: it is read after the step."""


class HostClock:
    """The monotonic clock of the host."""

    now = staticmethod(time.perf_counter_ns)

    def is_past(self, stamp: Stamp) -> bool:
        """Return whether the time of a stamp can be read without a wait."""
        return True

    def ns(self, stamps: Sequence[Stamp], base: tuple[int, Stamp]) -> Sequence[int]:
        """Return the times of stamps in nanoseconds."""
        return stamps


class DeviceClock:
    """The clock of a GPU's current stream, in the host's nanoseconds."""

    def now(self) -> Stamp:
        """Return a new event."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def is_past(self, stamp: Stamp) -> bool:
        """Return whether the device has passed an event."""
        return bool(stamp.query())

    def ns(self, stamps: Sequence[Stamp], base: tuple[int, Stamp]) -> Sequence[int]:
        """Return the times of events, from that of the step's begin."""
        began_ns, first = base
        return [began_ns + round(first.elapsed_time(stamp) * 1e6) for stamp in stamps]


def clock_of(device: torch.device) -> HostClock | DeviceClock:
    """Return the clock by which the ops of a device are measured."""
    return DeviceClock() if device.type == "cuda" else HostClock()


class MemorySampler:
    """Samples the memory of one device."""

    def __init__(self, device: torch.device) -> None:
        self._is_counted = device.type == "cuda"
        self.sample: Callable[[], Sample] = (
            partial(_allocated, device) if self._is_counted else _SystemFile("/proc/self/statm").text
        )
        """Returns what is in use now, for `read`."""

    def read(self, samples: Sequence[Sample]) -> Sequence[tuple[int, int, int]]:
        """Return the bytes in use, those reserved, and the most in use since the step began, of each sample."""
        if self._is_counted:
            return samples
        return [(int(sample.split()[1]) * _PAGE if sample else 0, 0, 0) for sample in samples]


def _allocated(device: torch.device) -> tuple[int, int, int]:
    found = torch.cuda.memory_stats_as_nested_dict(device)
    allocated, reserved = found["allocated_bytes"]["all"], found["reserved_bytes"]["all"]
    return allocated["current"], reserved["current"], allocated["peak"]


class _SystemFile:
    """A file of numbers below /proc/self or /proc/thread-self; other threads and forked processes may read the same object."""

    def __init__(self, path: str) -> None:
        self._path, self._is_of_thread = path, "thread-self" in path
        self._owner = (0, 0)
        self._file = -1

    def read(self) -> list[bytes]:
        """Return the words of the file now; none where there is no such file."""
        return self.text().split()

    def text(self) -> bytes:
        """Return the file now; nothing where there is no such file."""
        owner = (os.getpid(), threading.get_ident() if self._is_of_thread else 0)
        if owner != self._owner:
            self.close()
            self._owner = owner
            try:
                self._file = os.open(self._path, os.O_RDONLY) if hasattr(os, "pread") else -1
            except OSError:
                return b""
        return os.pread(self._file, 256, 0) if self._file >= 0 else b""

    def close(self) -> None:
        """Close the file."""
        if self._file >= 0:
            os.close(self._file)
        self._owner, self._file = (0, 0), -1

    __del__ = close


class ProcessorTime:
    """The time of the thread that asks."""

    def __init__(self) -> None:
        self._counts = _SystemFile("/proc/thread-self/schedstat")

    def read(self) -> tuple[int, int | None]:
        """Return the nanoseconds for which this thread had a processor, and for which it was queued; None where the system does not say."""
        counts = self._counts.text().split()
        return time.thread_time_ns(), int(counts[1]) if len(counts) > 1 else None


def queued_threads() -> dict[str, int]:
    """Return the nanoseconds for which each thread of this process has wanted a processor and had none; empty where the system does not say."""
    queued_threads: dict[str, int] = {}
    try:
        threads = os.listdir("/proc/self/task")
    except OSError:
        return queued_threads
    for thread in threads:
        try:
            file = os.open(f"/proc/self/task/{thread}/schedstat", os.O_RDONLY)
        except OSError:
            continue  # it has ended
        try:
            queued_threads[thread] = int(os.read(file, 256).split()[1])
        except (OSError, IndexError):
            continue
        finally:
            os.close(file)
    return queued_threads
