"""Processor time of the session: what `make test` costs, whatever else the machine does meanwhile.

It is what the pytest process and every process below it have used: the children that were waited for, by `getrusage`,
and those that still run, such as the ranks of a pool, by /proc. What outlives its parent is not seen.
"""

from __future__ import annotations

import contextlib
import resource

import psutil


def used_s() -> float:
    """Return the seconds of processor time, user and system, that this process and all below it have used so far."""
    own = [resource.getrusage(which) for which in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    total_s = sum(usage.ru_utime + usage.ru_stime for usage in own)
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # it was waited for meanwhile
            total_s += sum(process.cpu_times()[:4])  # its own, and that of the children that it waited for
    return total_s
