"""Files in which Linux counts for a process or a thread, kept open: reading one again takes two microseconds, opening it twenty.

    wall time of a thread = had a processor + queued for one + asleep, by its own wish: in a sleep, a read or a wait

A rank that is late because other programs run is queued; one that is late by what it does itself is not.
Source: Documentation/scheduler/sched-stats.rst (`schedstat`: nanoseconds on a processor, nanoseconds queued) and
Documentation/filesystems/proc.rst (`statm`: pages) of Linux.
"""

from __future__ import annotations

import os
import threading
import time


class SystemFile:
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
        self._counts = SystemFile("/proc/thread-self/schedstat")

    def read(self) -> tuple[int, int | None]:
        """Return the nanoseconds for which this thread had a processor, and for which it was queued; None where the system does not say."""
        counts = self._counts.text().split()
        return time.thread_time_ns(), int(counts[1]) if len(counts) > 1 else None


def queued_threads() -> dict[str, int]:
    """Return the nanoseconds for which each thread of this process has wanted a processor and had none; empty where the system does not say."""
    found: dict[str, int] = {}
    try:
        threads = os.listdir("/proc/self/task")
    except OSError:
        return found
    for thread in threads:
        try:
            file = os.open(f"/proc/self/task/{thread}/schedstat", os.O_RDONLY)
        except OSError:
            continue  # it has ended
        try:
            found[thread] = int(os.read(file, 256).split()[1])
        except (OSError, IndexError):
            continue
        finally:
            os.close(file)
    return found
