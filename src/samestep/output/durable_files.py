"""The calls to the file system by which a checkpoint is written: what has returned is on disk, what failed left no trace.

A file is new, written in pieces and hashed on the way, and waited for (fsync). A folder is written under a draft name, and
renamed when all in it is on disk; so whatever happens, a folder under its final name is whole. This is the one module
through which checkpoints touch the disk, so that a test can fail any of its calls. No torch.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path

import xxhash

from samestep.errors import InputError
from samestep.output import regular_files

_PIECE_BYTES = 1 << 24


def refuse_remote(folder: Path) -> None:
    """Refuse the address of an object store where a folder belongs.

    Raises:
        InputError: it is one.
    """
    if found := re.match(r"([a-zA-Z][a-zA-Z0-9+.-]+):/(.*)", str(folder)):
        raise InputError(
            f"{found[1]}://{found[2]} is an address of {found[1]}, and samestep reads and writes folders: "
            "a local one works, or one in which the store is mounted"
        )


def make_folder(folder: Path) -> None:
    """Create a folder and those above it, unless they exist."""
    if not folder.is_dir():
        make_folder(folder.parent)
        os.mkdir(folder)


def write_new(path: Path, pieces: Iterable[bytes | memoryview]) -> str:
    """Write a file that does not exist yet, wait until it is on disk, and return its digest."""
    digest = xxhash.xxh3_128()
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        for piece in pieces:
            left = memoryview(piece)
            digest.update(left)
            while left:  # a call may write a part
                left = left[os.write(descriptor, left[:_PIECE_BYTES]) :]
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return digest.hexdigest()


def copy(path: Path, new: Path) -> None:
    """Copy a file to one that does not exist yet, and wait until it is on disk."""
    with path.open("rb") as file:
        write_new(new, iter(lambda: file.read(_PIECE_BYTES), b""))


def sync(path: Path) -> None:
    """Wait until a file or folder is on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def rename(path: Path, new: Path) -> None:
    """Rename a file or folder, and wait until the new name is on disk."""
    os.rename(path, new)
    sync(new.parent)


def remove_folder(folder: Path) -> None:
    """Remove a folder with its contents, if it exists; of a link, only the link."""
    if folder.is_symlink():
        os.unlink(folder)
    if not folder.is_dir():
        return
    with os.scandir(folder) as entries:
        found = [*entries]
    for entry in found:
        if entry.is_dir(follow_symlinks=False):
            remove_folder(Path(entry.path))
        else:
            os.unlink(entry.path)
    os.rmdir(folder)


def digest_of(path: Path) -> str:
    """Return the digest of a file, as `write_new` returned it."""
    digest = xxhash.xxh3_128()
    with regular_files.open_regular(path) as file:
        while piece := file.read(_PIECE_BYTES):
            digest.update(piece)
    return digest.hexdigest()
