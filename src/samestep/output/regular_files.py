"""Files that anybody may have written: opened once, refused unless they are regular, and read up to a bound on their size. No torch.

A name in a checkpoint or a model's folder may be a link to a device, which never ends, or a pipe, which nobody writes to; and
the size that a folder lists for it need not be the size of what is opened.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file for reading; links to one are followed.

    Raises:
        OSError: it is missing, cannot be read, or is a device, a pipe or a folder.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is no regular file", str(path))
    return os.fdopen(descriptor, "rb")


def read(path: Path, most_bytes: int) -> bytes:
    """Return the contents of a regular file.

    Raises:
        OSError: it cannot be read, or is no regular file.
        ValueError: it holds more than `most_bytes`.
    """
    with open_regular(path) as file:
        if os.fstat(file.fileno()).st_size <= most_bytes:
            found = file.read(most_bytes + 1)
            if len(found) <= most_bytes:
                return found
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
