"""Whether the kernel killed a process because memory ran out: a SIGKILL alone does not say who sent it.

The kernel names the process in its log, which not every user may read, and counts such kills for each control group and
for the machine. Source: Documentation/admin-guide/cgroup-v2.rst (memory.events) and cgroup-v1/memory.rst of Linux.
"""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path

OUT_OF_MEMORY = "(out of memory:"
"""How the evidence begins, at the end of the sentence that says how a process ended."""
_LONGEST_RECORD_BYTES = 8192


def count() -> int:
    """Return how many processes the kernel has killed for lack of memory, in this control group, or else on this machine."""
    for path in (*_group_files(), Path("/proc/vmstat")):
        with contextlib.suppress(OSError):
            if found := re.search(r"^oom_kill (\d+)$", path.read_text(), re.MULTILINE):
                return int(found[1])
    return 0


def evidence(pid: int, before: int) -> str:
    """Return the evidence that a killed process was killed for lack of memory; empty without any.

    Args:
        pid: the process.
        before: `count` when it was started.
    """
    if re.search(rf"[Oo]ut of memory.*: Killed process {pid}\b", _kernel_log()):
        return f" {OUT_OF_MEMORY} the kernel's log names the process)"
    if count() > before:
        return f" {OUT_OF_MEMORY} the kernel has counted such a kill since the start)"
    return ""


def _group_files() -> list[Path]:
    """Return the files in which the control group of this process counts kills, from its own group up."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        _, kinds, path = line.split(":", 2)
        if not kinds:
            found.append(Path("/sys/fs/cgroup") / path.lstrip("/") / "memory.events")
        elif "memory" in kinds.split(","):
            found.append(Path("/sys/fs/cgroup/memory") / path.lstrip("/") / "memory.oom_control")
    return found


def _kernel_log() -> str:
    """Return the kernel's log; empty where this user may not read it."""
    records = []
    try:
        descriptor = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return ""
    try:
        while True:
            try:
                records.append(os.read(descriptor, _LONGEST_RECORD_BYTES))
            except BrokenPipeError:  # a record was overwritten while the log was read
                continue
            except OSError:
                break
    finally:
        os.close(descriptor)
    return b"".join(records).decode(errors="replace")
