"""What a host has left: space on its disks and in /dev/shm, open files, processes."""

from __future__ import annotations

import os
import sys
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

with suppress(ModuleNotFoundError):  # of Windows
    import resource

SHM = Path("/dev/shm")
NO_LIMIT = -1


@dataclass(frozen=True)
class Limits:
    """The room that is left on one host: bytes, files and processes; -1 where nothing limits it."""

    temporary: str
    """The folder for temporary files."""
    temporary_free_bytes: int
    temporary_unused: str
    """The folder that is named for temporary files, by TMPDIR or by custom, where nothing can be written to it."""
    shm_bytes: int
    """The size of /dev/shm; -1 where the system has none."""
    shm_free_bytes: int
    shm_error: str
    """Why no file can be written there."""
    open_files: int
    """The files that a process may open."""
    processes: int
    """The processes and threads that may still be started."""


def find_limits() -> Limits:
    """Return what this host has left."""
    named, temporary = Path(os.environ.get("TMPDIR") or "/tmp"), tempfile.gettempdir()
    is_unused = os.name == "posix" and named.absolute() != Path(temporary)
    size, free, error = _shm()
    return Limits(
        temporary=temporary,
        temporary_free_bytes=psutil.disk_usage(temporary).free,
        temporary_unused=str(named) if is_unused else "",
        shm_bytes=size,
        shm_free_bytes=free,
        shm_error=error,
        open_files=_limit("RLIMIT_NOFILE"),
        processes=_processes_left(),
    )


def _shm() -> tuple[int, int, str]:
    if not SHM.is_dir():
        return NO_LIMIT, NO_LIMIT, ""
    usage = psutil.disk_usage(str(SHM))
    try:
        with tempfile.NamedTemporaryFile(dir=SHM, prefix="samestep-doctor-") as file:
            file.write(b"\0" * (1 << 16))
            file.flush()
    except OSError as error:
        return usage.total, usage.free, error.strerror or str(error)
    return usage.total, usage.free, ""


def _limit(name: str) -> int:
    if "resource" not in sys.modules:
        return NO_LIMIT
    soft = resource.getrlimit(getattr(resource, name))[0]
    return NO_LIMIT if soft == resource.RLIM_INFINITY else soft


def _processes_left() -> int:
    """Return the least of what the user's limit and the control group leave; the user's threads are at most all of the system."""
    left = []
    if sys.platform == "linux":
        allowed = _limit("RLIMIT_NPROC")
        if allowed != NO_LIMIT and os.geteuid() != 0:
            left.append(allowed - _threads_of_user())
        left += [
            most - _number(group / "pids.current") for group in _groups() if (most := _number(group / "pids.max")) > 0
        ]
    return min(left, default=NO_LIMIT)


def _threads_of_user() -> int:
    mine, count = os.getuid(), 0
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.uids().real == mine:
                count += process.num_threads()
    return count


def _groups() -> list[Path]:
    """Return the control groups of this process that may limit its number of processes, itself and those around it."""
    with suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            number, names, path = line.split(":", 2)
            root = Path("/sys/fs/cgroup", *(["pids"] if "pids" in names.split(",") else []))
            if number == "0" or "pids" in names.split(","):
                inner = root / path.lstrip("/")
                return [root, *([inner, *inner.parents] if inner.is_relative_to(root) else [])]
    return []


def _number(path: Path) -> int:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return 0
