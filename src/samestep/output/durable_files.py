"""Files on disk: written as a whole or not at all, opened once and read up to a bound, and checked before the work starts. No torch.

What `write_new`, `copy`, `rename` and `make_folder` have written is on disk when they return (fsync), and what failed left no trace. A
folder is written under a draft name, and renamed when all in it is on disk. So a folder under its final name is always complete. This
is the one module through which checkpoints touch the disk, so that a test can fail any of its calls.

Anybody may have written a file of a checkpoint or of a model's folder. Its name may be a link to a device, which never ends, or a pipe
without a writer, and its real size may differ from the size that its folder lists. So `open_regular` refuses everything but regular files.
"""

from __future__ import annotations

import errno
import json
import os
import re
import stat
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, BinaryIO, TextIO

import xxhash

from samestep.errors import InputError

_PIECE_BYTES = 1 << 24


def refuse_remote(folder: Path) -> None:
    """Refuse the address of an object store where a folder belongs.

    Raises:
        InputError: it is one.
    """
    if address := re.match(r"([a-zA-Z][a-zA-Z0-9+.-]+):/(.*)", str(folder)):
        raise InputError(
            "address-not-folder",
            f"{address[1]}://{address[2]} is an address of {address[1]}, and samestep reads and writes folders. Use "
            "a local one, or a mounted store",
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
        children = [*entries]
    for entry in children:
        if entry.is_dir(follow_symlinks=False):
            remove_folder(Path(entry.path))
        else:
            os.unlink(entry.path)
    os.rmdir(folder)


def digest_of(path: Path) -> str:
    """Return the digest of a file, as `write_new` returned it."""
    digest = xxhash.xxh3_128()
    with open_regular(path) as file:
        while piece := file.read(_PIECE_BYTES):
            digest.update(piece)
    return digest.hexdigest()


def check_writable(path: Path) -> None:
    """Check that a file can be written, before the work whose result it will hold.

    Raises:
        InputError: its folder does not exist, the path is a folder, or the system does not allow it.
    """
    if not path.parent.is_dir():
        raise InputError("output-unwritable", f"{path} cannot be written: there is no folder {path.parent}")
    if path.is_dir():
        raise InputError("output-unwritable", f"{path} cannot be written: it is a folder")
    existed = path.exists()
    if existed and not path.is_file():
        return  # opening and closing a pipe would end it for its reader
    try:
        path.open("a").close()
        if not existed:
            path.unlink()
    except OSError as error:
        raise InputError("output-unwritable", f"{path} cannot be written: {error.strerror}") from None


def write(path: Path, text: str) -> None:
    """Write text to a file or a pipe.

    Raises:
        InputError: the system does not allow it.
    """
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InputError("output-unwritable", f"{path} cannot be written: {error.strerror}") from None


def write_whole(path: Path, text: str) -> None:
    """Write a file that is either complete or unchanged, even if the process dies meanwhile; links are not followed."""
    draft = path.with_name(f".{path.name}.draft")
    draft.unlink(missing_ok=True)
    write_new(draft, [text.encode()])
    draft.replace(path)


class LastingStream:
    """A text stream for a log, whose writes never fail: once one has, its file is exchanged for one that keeps nothing."""

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream or Path(os.devnull).open("w")  # noqa: SIM115 - as long as the process

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write a text, or lose it: the reader of a pipe has gone, or a disk is full."""
        self._lasting(self._stream.write, text)
        return len(text)

    def flush(self) -> None:
        """Write what waits, or lose it."""
        self._lasting(self._stream.flush)

    def _lasting(self, act: Callable[..., object], *arguments: str) -> None:
        try:
            act(*arguments)
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file for reading; links to one are followed.

    Raises:
        OSError: it is missing, cannot be read, or is a device, a pipe or a folder.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return os.fdopen(descriptor, "rb")


def read(path: Path, most_bytes: int) -> bytes:
    """Return the contents of a regular file.

    Raises:
        OSError: it cannot be read, or is no regular file.
        ValueError: it holds more than `most_bytes`.
    """
    with open_regular(path) as file:
        if os.fstat(file.fileno()).st_size <= most_bytes:
            content = file.read(most_bytes + 1)
            if len(content) <= most_bytes:
                return content
    raise ValueError(f"it holds more than {most_bytes:,} bytes")


def read_json(path: Path, most_bytes: int, object_hook: Callable[[dict[str, Any]], Any] | None = None) -> Any:
    """Return the value in a JSON file.

    Raises:
        OSError: it cannot be read, or is no regular file.
        ValueError: it holds more than `most_bytes`, or no JSON.
    """
    return parse_json(read(path, most_bytes), object_hook)


def parse_json(text: bytes, object_hook: Callable[[dict[str, Any]], Any] | None = None) -> Any:
    """Return the value of a JSON text in UTF-8.

    Raises:
        ValueError: it is none, or one that is nested too deeply to be read.
    """
    try:
        return json.loads(text.decode(), object_hook=object_hook)
    except RecursionError:
        raise ValueError("its JSON is nested too deeply") from None
