"""Files that are written for the user: checked before the work starts, and replaced as a whole."""

from __future__ import annotations

from pathlib import Path

from samestep.errors import InputError
from samestep.output import durable_files


def check_writable(path: Path) -> None:
    """Check that a file can be written, before the work whose result it will hold.

    Raises:
        InputError: its folder does not exist, the path is a folder, or the system does not allow it.
    """
    if not path.parent.is_dir():
        raise InputError(f"{path} cannot be written: there is no folder {path.parent}")
    if path.is_dir():
        raise InputError(f"{path} cannot be written: it is a folder")
    existed = path.exists()
    if existed and not path.is_file():
        return  # opening and closing a pipe would end it for its reader
    try:
        path.open("a").close()
        if not existed:
            path.unlink()
    except OSError as error:
        raise InputError(f"{path} cannot be written: {error.strerror}") from None


def write(path: Path, text: str) -> None:
    """Write text to a file or a pipe.

    Raises:
        InputError: the system does not allow it.
    """
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InputError(f"{path} cannot be written: {error.strerror}") from None


def write_whole(path: Path, text: str) -> None:
    """Write a file that is either complete or unchanged, even if the process dies meanwhile; links are not followed."""
    draft = path.with_name(f".{path.name}.draft")
    draft.unlink(missing_ok=True)
    durable_files.write_new(draft, [text.encode()])
    draft.replace(path)
