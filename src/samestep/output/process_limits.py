"""Locks of files that end with the process that holds them, and its peak memory, on systems with and without POSIX calls. No torch."""

from __future__ import annotations

import contextlib
import os
import sys
from types import ModuleType

import psutil

with contextlib.suppress(ModuleNotFoundError):  # of Windows
    import fcntl
with contextlib.suppress(ModuleNotFoundError):
    import resource

_fcntl: ModuleType | None = sys.modules.get("fcntl")
_resource: ModuleType | None = sys.modules.get("resource")
O_CLOEXEC, O_NOFOLLOW = getattr(os, "O_CLOEXEC", 0), getattr(os, "O_NOFOLLOW", 0)


def lock(descriptor: int, *, shared: bool = False, waits: bool = True) -> None:
    """Lock an open file for this process and those that it forks.

    Without POSIX calls it does nothing: such a system forks no workers, whose files it would guard.

    Raises:
        BlockingIOError: another process holds it, and `waits` is false.
    """
    if _fcntl is not None:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if waits else fcntl.LOCK_NB))


def peak_resident_bytes() -> int:
    """Return the largest resident memory that this process has had so far."""
    if _resource is None:
        info = psutil.Process().memory_info()
        return int(getattr(info, "peak_wset", info.rss))
    unit = 1 if sys.platform == "darwin" else 1024
    return int(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss) * unit


def address_space_bytes() -> int | None:
    """Return the most memory that the system lets this process have; None without a limit."""
    if _resource is None:
        return None
    allowed = resource.getrlimit(resource.RLIMIT_AS)[0]
    return None if allowed == resource.RLIM_INFINITY else int(allowed)
