"""Folders for what a process and its workers need while they run, below the system's folder for temporary files. No torch.

A process that is killed leaves its folder behind, and the next one that makes a folder removes it: the lock of a folder is
held by the process that made it and by those that it has forked, and the system opens it when all of them are gone.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import tempfile
from pathlib import Path

from samestep.output import process_limits

_PREFIX, _LOCK = "samestep-", ".lock"
_locks: dict[Path, int] = {}
"""The descriptors of the locks that this process holds."""


def make() -> Path:
    """Make a folder that only this user can read, and remove those that killed processes have left."""
    if hasattr(os, "geteuid"):  # else no lock says whose process is gone
        _remove_left_behind()
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX))
    lock = folder / _LOCK
    new = lock.with_suffix(".new")
    _locks[folder] = os.open(new, os.O_RDWR | os.O_CREAT | os.O_EXCL | process_limits.O_CLOEXEC, 0o600)
    process_limits.lock(_locks[folder])
    new.rename(lock)  # so that nobody sees a lock that is not held yet
    return folder


def compiler_cache() -> dict[str, str]:
    """Return the variable that names the folder of torch's compiler, inside this user's cache; empty without a home.

    By default torch takes one with a known name in the system's folder for temporary files, where another user may make it first.
    """
    try:
        return {"TORCHINDUCTOR_CACHE_DIR": str(Path.home() / ".cache" / "samestep" / "inductor")}
    except RuntimeError:  # of a user without a home
        return {}


def remove(folder: Path) -> None:
    """Remove a folder that this process has created, with its contents."""
    shutil.rmtree(folder, ignore_errors=True)
    if (lock := _locks.pop(folder, None)) is not None:
        os.close(lock)


def _remove_left_behind() -> None:
    for lock in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*/{_LOCK}"):
        with contextlib.suppress(OSError):
            status = lock.parent.lstat()
            if stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and not _is_held(lock):
                shutil.rmtree(lock.parent, ignore_errors=True)


def _is_held(lock: Path) -> bool:
    descriptor = os.open(lock, os.O_RDWR | process_limits.O_CLOEXEC | process_limits.O_NOFOLLOW)
    try:
        process_limits.lock(descriptor, shared=True, waits=False)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False
