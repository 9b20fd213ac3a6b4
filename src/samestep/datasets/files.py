"""Files of a data source: listed in one fixed order, read as text, and refused with the nearest name if missing; and the part of the data
that is trained on or held out, by the words of `data.split`.

A file that gzip, Zstandard, bzip2 or xz has packed, as its first bytes show, is unpacked while it is read. Text is UTF-8.
"""

from __future__ import annotations

import importlib
import io
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Literal

from samestep.errors import DataError, did_you_mean, first_line, short_repr

PART_BYTES = 2**20
"""Bytes of a text file that are read, and turned into tokens, at a time."""
PACKED_ENDS = (".gz", ".zst", ".bz2", ".xz")
"""Suffixes of packed files, which a folder may hold among others."""
_LIBRARIES = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "pyarrow", b"BZh": "bz2", b"\xfd7zXZ": "lzma"}
"""The library that unpacks a file, by the file's first bytes."""


def existing(path: str, source: str) -> Path:
    """Return the path of an existing file or folder.

    Raises:
        DataError: there is none; the text names the nearest names in that folder.
    """
    place = Path(os.path.expanduser(path))
    if path and place.exists():
        return place
    if not path:
        raise DataError("data-source-unknown", f"{source} has no path; write {source}PATH")
    parent = place.parent
    if not parent.is_dir():
        raise DataError("data-missing", f"{source}: there is no folder {parent}")
    if place.is_symlink():
        raise DataError("data-missing", f"{source}: {place.name} is a broken link")
    if "*" in place.name:
        raise DataError("data-missing", f"{source}: patterns of files are not supported. Use the folder {parent}")
    there = sorted(entry.name for entry in parent.iterdir())
    hint = did_you_mean(place.name, there) or (f"; there are {', '.join(there[:8])}" if there else "; it is empty")
    raise DataError("data-missing", f"{source}: there is no {place.name} in {parent.resolve()}{hint}")


def files_at(place: Path, source: str, *endings: str) -> list[Path]:
    """Return the file itself, or the visible files below a folder with these suffixes, packed ones too, in order.

    Without suffixes all files are returned.

    Raises:
        DataError: the folder holds no such file.
    """
    if place.is_file():
        return [place]
    below = [
        file
        for file in sorted_files(place, "*")
        if not any(part.startswith(".") for part in file.relative_to(place).parts)
    ]
    files = [file for file in below if not endings or _unpacked_name(file).endswith(endings)]
    if files:
        return files
    what = f"{' or '.join(endings)} file" if endings else "file"
    there = f"; it has {', '.join(short_repr(file.name) for file in below[:4])}, and a file of another name can be given by its own path"
    raise DataError("data-missing", f"{source}: the folder holds no {what}{there * bool(below)}")


def _unpacked_name(file: Path) -> str:
    """Return the name of a file in small letters, without the suffix of its packing."""
    name = file.name.lower()
    return next((name.removesuffix(end) for end in PACKED_ENDS if name.endswith(end)), name)


def without_held_out(files: Sequence[Path], folder: Path) -> list[Path]:
    """Return the files of a folder, without those that are named as validation or test data where others are named for training."""
    if list(files) == [folder]:
        return [folder]
    words = {file: words_of(file.relative_to(folder)) for file in files}
    if not any(TRAINED_WORDS & word for word in words.values()):
        return list(files)
    return [file for file in files if TRAINED_WORDS & words[file] or not HELD_OUT_WORDS & words[file]]


def sorted_files(folder: Path, pattern: str) -> list[Path]:
    """Return the files below a folder that match a pattern, in the order of their relative names on every machine."""
    return sorted((file for file in folder.rglob(pattern) if file.is_file()), key=lambda file: file.parts)


@contextmanager
def open_unpacked(path: Path) -> Iterator[BinaryIO]:
    """Open a file for reading, and unpack it meanwhile if it is packed.

    Raises:
        DataError: it cannot be opened, or a library that unpacks it is missing.
    """
    try:
        with path.open("rb") as file:
            head = file.peek(8)
            name = next((library for mark, library in _LIBRARIES.items() if head.startswith(mark)), None)
            yield file if name is None else _unpacked(path, file, name)
    except OSError as error:
        raise DataError("data-unreadable", f"{path} cannot be read: {error.strerror or first_line(error)}") from None


def _unpacked(path: Path, file: BinaryIO, name: str) -> BinaryIO:
    try:
        library: Any = importlib.import_module(name)
    except ModuleNotFoundError:
        raise DataError(
            "package-missing",
            f"{path} needs the library {name}. Use pip install 'samestep[hf-data]', or unpack the file",
        ) from None
    return io.BufferedReader(library.CompressedInputStream(file, "zstd") if name == "pyarrow" else library.open(file))


def read_lines(path: Path, lines: Iterable[Any]) -> Iterator[tuple[int, Any]]:
    """Yield the lines of a file, each with its number from 1.

    Raises:
        DataError: a line cannot be read, as in a packed file that is damaged.
    """
    number, left = 0, iter(lines)
    while True:
        try:
            line = next(left, None)
        except Exception as error:  # each library that unpacks has different exceptions
            raise DataError("data-damaged", f"{path}:{number + 1}: damaged, or cut off: {first_line(error)}") from None
        if line is None:
            return
        number += 1
        yield number, line


def texts_of(path: Path) -> Iterator[str]:
    """Yield the text of a file in parts of whole lines, so that a large file is never in memory as a whole.

    Raises:
        DataError: the file is not UTF-8 text, or it is damaged.
    """
    with open_unpacked(path) as file:
        line, offset = 1, 0
        for number, part in read_lines(path, _parts(file)):
            text = _decode_utf8(part, path, line, offset)
            line, offset = line + text.count("\n"), offset + len(part)
            if text or number == 1:
                yield (text.removeprefix("\ufeff") if number == 1 else text).replace("\r\n", "\n").replace("\r", "\n")


def _parts(file: BinaryIO) -> Iterator[bytes]:
    """Yield a file in parts that end with a line."""
    while True:
        part = file.read(PART_BYTES)
        is_last = len(part) < PART_BYTES
        yield part + file.readline()
        if is_last:
            return


def _decode_utf8(part: bytes, path: Path, line: int, offset: int) -> str:
    """Return a part of a file as text; it begins at a line and a byte of the file."""
    try:
        text = part.decode()
        bad_at = part.find(0)  # as in UTF-16, and in archives
    except UnicodeDecodeError as error:
        bad_at = error.start
    if bad_at < 0:
        return text
    line += part.count(b"\n", 0, bad_at)
    raise DataError(
        "data-not-text",
        f"{path}:{line} is not UTF-8 text (byte {offset + bad_at}). To train on its raw bytes, "
        f"set source = 'tokens:{path}' and data.dtype = 'uint8'",
    )


Split = Literal["train", "held_out"]
TRAINED_WORDS = {"train", "training"}
HELD_OUT_WORDS = {"val", "valid", "validation", "test", "testing", "dev", "eval", "evaluation", "heldout", "holdout"}
"""Words in the names of files and folders that, by convention, hold a part of a data set."""
_PART_OF_WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+")
SPLITS: tuple[Split, ...] = ("train", "held_out")


def part_of(length: int, held_out: float, split: Split) -> range:
    """Return the positions of one part among `length` tokens, documents or samples; the two parts never overlap.

    Raises:
        DataError: there is no such part, or nothing is held out.
    """
    if split not in SPLITS:
        raise DataError("argument-type", f"no split {split!r}{did_you_mean(split, SPLITS)}; use {' or '.join(SPLITS)}")
    cut = length - round(length * held_out)
    if split == "train":
        return range(cut)
    if not held_out:
        raise DataError("held-out-missing", "data.held_out = 0 leaves no samples to evaluate. Use 0.1")
    return range(cut, length)


def words_of(path: Path) -> set[str]:
    """Return the words in the names of a path: those that humps, digits and signs divide."""
    return {word.lower() for word in _PART_OF_WORD.findall(path.with_suffix("").as_posix())}


def name_of_part(split: Split, source: str) -> str:
    """Return the name of a part of the data for the text of an error."""
    return f"the {split.replace('_', '-')} part of {source}"
