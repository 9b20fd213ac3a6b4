"""The folder that all hosts are to see: whether each can write there, sees what the others wrote, and sees their locks."""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from samestep.output import process_limits

_LOOK_S, _EVERY_S = 2.0, 0.1
"""Folders of a network show new files of others after a while: NFS after up to 3 s, and at once to who opens by name."""


@dataclass(frozen=True)
class Folder:
    """A folder, seen from one host."""

    path: str
    kind: str
    """The file system, and whence it is mounted."""
    free_bytes: int
    error: str
    """Why nothing can be written there; empty where it can."""


@dataclass(frozen=True)
class Sight:
    """The files of other hosts that one host sees, and does not see."""

    missing: tuple[int, ...] = ()
    """The hosts whose files it does not see, by number."""
    sees_lock: bool = True
    """Whether it sees that the first host has locked its file."""
    error: str = ""


def find_folder(path: Path) -> Folder:
    """Return a folder as this host sees it; one that is not there yet is looked at through the folder above it."""
    real = path.absolute()
    above = next((parent for parent in (real, *real.parents) if parent.is_dir()), Path("/"))
    free = psutil.disk_usage(str(above)).free
    probe = above / f".samestep-doctor-{os.getpid()}-{time.time_ns()}"
    error = "it is a file" if real.is_file() else _written(probe, "probe")
    with contextlib.suppress(OSError):
        probe.unlink()
    return Folder(str(real), _mount_of(above), free, error)


def _written(path: Path, text: str) -> str:
    """Write a new file, and return why it cannot be written."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        words = {
            errno.EROFS: "it is mounted read-only",
            errno.EACCES: "this user may not write there",
            errno.ENOSPC: "it is full",
        }
        return words.get(error.errno or 0, error.strerror or str(error))
    return ""


def _mount_of(path: Path) -> str:
    mount = ("", "")
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/mounts").read_text().splitlines():
            device, at, kind, *_ = line.split(" ")
            at = at.encode().decode("unicode_escape")
            if path.is_relative_to(at) and len(at) >= len(mount[0]):
                mount = (at, f"{kind} of {device}")
    return mount[1]


class SharedFiles:
    """The file of this host in the shared folder, and its look at those of the others."""

    def __init__(self, folder: Path, name: str) -> None:
        self._folder, self._name = (
            next(parent for parent in (folder, *folder.absolute().parents) if parent.is_dir()),
            name,
        )
        self._descriptor: int | None = None
        self._mine: Path | None = None

    def write(self, number: int, nonce: str) -> str:
        """Write this host's file and lock it; return why that cannot be done."""
        path = self._path(number)
        if why := _written(path, nonce):
            return why
        self._mine = path
        try:
            self._descriptor = os.open(path, os.O_RDWR | process_limits.O_CLOEXEC)
            process_limits.lock(self._descriptor, waits=False)
        except OSError as error:
            return f"no lock: {error.strerror}"
        return ""

    def look(self, nonces: Mapping[int, str]) -> Sight:
        """Return which of the files with these words are not seen here, and whether the lock of the first one is."""
        end_s, missing = time.monotonic() + _LOOK_S, [*nonces]
        while True:
            missing = [number for number in missing if self._read(number) != nonces[number]]
            if not missing or time.monotonic() > end_s:
                break
            time.sleep(_EVERY_S)
        first = min(nonces, default=0)
        return Sight(tuple(missing), first in missing or self._is_locked(first))

    def close(self) -> None:
        """Remove this host's file."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
        if self._mine is not None:
            with contextlib.suppress(OSError):
                self._mine.unlink()

    def _path(self, number: int) -> Path:
        return self._folder / f".samestep-doctor-{self._name}-{number}"

    def _read(self, number: int) -> str:
        try:
            return self._path(number).read_text()
        except (OSError, ValueError):
            return ""

    def _is_locked(self, number: int) -> bool:
        if self._mine == self._path(number):
            return True
        try:
            descriptor = os.open(self._path(number), os.O_RDWR)
        except OSError:
            return True
        try:
            process_limits.lock(descriptor, waits=False)
        except BlockingIOError:
            return True
        except OSError:
            return False
        finally:
            os.close(descriptor)
        return False
