"""The files a data source names: found in one fixed order, read as text, missed with the nearest name."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from samestep.errors import DataError, did_you_mean


def existing(path: str, source: str) -> Path:
    """Return the path if something is there.

    Raises:
        DataError: nothing is there; names what is near.
    """
    place = Path(path).expanduser()
    if path and place.exists():
        return place
    if not path:
        raise DataError(f"{source}: no path; write {source}PATH")
    parent = place.parent
    if not parent.is_dir():
        raise DataError(f"{source}: there is no folder {parent}")
    there = sorted(entry.name for entry in parent.iterdir())
    hint = did_you_mean(place.name, there) or (f"; there are {', '.join(there[:8])}" if there else "; it is empty")
    raise DataError(f"{source}: there is no {place.name} in {parent.resolve()}{hint}")


def files_at(place: Path, source: str, pattern: str = "*") -> list[Path]:
    """Return the file, or the folder's files below it in the order of their names; hidden ones are left out.

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
    """Return the files below a folder in the order of their relative names, which is the same on every machine."""
    return sorted(
        (file for file in folder.rglob(pattern) if file.is_file()), key=lambda file: file.relative_to(folder).parts
    )


def read_texts(paths: Iterable[Path]) -> Iterator[str]:
    """Yield each file's text.

    Raises:
        DataError: a file is not UTF-8.
    """
    for path in paths:
        try:
            yield path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise DataError(
                f"{path} is not UTF-8 text (byte {error.start}); to train on its raw bytes, "
                f"source = 'tokens:{path}' with data.dtype = 'uint8' works"
            ) from None
