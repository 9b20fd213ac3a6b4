"""Files of a data source: listed in one fixed order, read as text, and refused with the nearest name if missing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from samestep.errors import DataError, did_you_mean

PART_BYTES = 2**20
"""Bytes of a text file that are read, and turned into tokens, at a time."""


def existing(path: str, source: str) -> Path:
    """Return the path of an existing file or folder.

    Raises:
        DataError: there is none; the text names the nearest names in that folder.
    """
    place = Path(path).expanduser()
    if path and place.exists():
        return place
    if not path:
        raise DataError(f"{source} has no path; write {source}PATH")
    parent = place.parent
    if not parent.is_dir():
        raise DataError(f"{source}: there is no folder {parent}")
    there = sorted(entry.name for entry in parent.iterdir())
    hint = did_you_mean(place.name, there) or (f"; there are {', '.join(there[:8])}" if there else "; it is empty")
    raise DataError(f"{source}: there is no {place.name} in {parent.resolve()}{hint}")


def files_at(place: Path, source: str, pattern: str = "*") -> list[Path]:
    """Return the file itself, or all files below a folder in the order of their names, without hidden ones.

    Raises:
        DataError: the folder holds no such file.
    """
    if place.is_file():
        return [place]
    found = sorted_files(place, pattern)
    found = [file for file in found if not any(part.startswith(".") for part in file.relative_to(place).parts)]
    if not found:
        what = "file" if pattern == "*" else f"{pattern} file"
        raise DataError(f"{source}: the folder holds no {what}")
    return found


def sorted_files(folder: Path, pattern: str) -> list[Path]:
    """Return the files below a folder that match a pattern, in the order of their relative names on every machine."""
    return sorted(
        (file for file in folder.rglob(pattern) if file.is_file()), key=lambda file: file.relative_to(folder).parts
    )


def texts_of(path: Path) -> Iterator[str]:
    """Yield the text of a file in parts of whole lines, so that a large file is never in memory as a whole.

    Raises:
        DataError: the file is not UTF-8.
    """
    with path.open("rb") as file:
        while True:
            offset = file.tell()
            part = file.read(PART_BYTES)
            is_last = len(part) < PART_BYTES
            part += file.readline()
            try:
                text = part.decode()
            except UnicodeDecodeError as error:
                raise DataError(
                    f"{path} is not UTF-8 text (byte {offset + error.start}); to train on its raw bytes, "
                    f"source = 'tokens:{path}' with data.dtype = 'uint8' works"
                ) from None
            if text or not offset:
                yield text.replace("\r\n", "\n").replace("\r", "\n")
            if is_last:
                return
