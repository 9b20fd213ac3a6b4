"""Files that are written for a user: refused before the work where they cannot be, and whole where others wait for them."""

from __future__ import annotations

import os
from pathlib import Path

from samestep.errors import InputError


def check_writable(path: Path) -> None:
    """Refuse, before any work, a file that could not be written after it.

    Raises:
        InputError: the folder is not there, the path is a folder, or the system does not let us.
    """
    if not path.parent.is_dir():
        raise InputError(f"{path} cannot be written: there is no folder {path.parent}")
    if path.is_dir():
        raise InputError(f"{path} cannot be written: it is a folder")
    existed = path.exists()
    if existed and not path.is_file():
        return  # a pipe would be at its end once it is closed
    try:
        path.open("a").close()
        if not existed:
            path.unlink()
    except OSError as error:
        raise InputError(f"{path} cannot be written: {error.strerror}") from None


def write(path: Path, text: str) -> None:
    """Write a file or into a pipe.

    Raises:
        InputError: the system does not let us.
    """
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InputError(f"{path} cannot be written: {error.strerror}") from None


def write_whole(path: Path, text: str) -> None:
    """Write a file that is whole or not there, whenever the process dies."""
    draft = path.with_name(f".{path.name}.draft")
    with draft.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)
