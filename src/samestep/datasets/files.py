"""Files of a data source: listed in one fixed order, read as text, and refused with the nearest name if missing; and the part of the data
that is trained on or held out, by the words of `data.split`.

A file that gzip, Zstandard, bzip2 or xz has packed, as its first bytes show, is unpacked while it is read. Text is UTF-8, or UTF-16 or
UTF-32 where a byte-order mark says so.
"""

from __future__ import annotations

import codecs
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
_HEAD_BYTES = 4096
_PACKINGS = (
    (re.compile(rb"\x1f\x8b\x08"), "gzip"),
    (re.compile(rb"\x28\xb5\x2f\xfd"), "zstd"),
    (re.compile(rb"BZh[1-9]1AY&SY"), "bz2"),
    (re.compile(rb"\xfd7zXZ\x00"), "lzma"),
    (re.compile(rb"PK\x03\x04"), "a zip archive"),
    (re.compile(rb"7z\xbc\xaf\x27\x1c"), "a 7z archive"),
)
"""The first bytes of packed files, and the name of the packing."""
_NO_TEXTS = (
    (re.compile(rb"version https://git-lfs"), "a pointer of Git LFS: `git lfs pull` fetches the file itself"),
    (re.compile(rb".{257}ustar", re.DOTALL), "a tar archive of files. Use a folder with the unpacked files"),
    (re.compile(rb"\x1f\x8b\x08|\x28\xb5\x2f\xfd|BZh[1-9]1AY&SY|\xfd7zXZ\x00"), "packed twice. Unpack it once"),
)
"""The first bytes of unpacked files that are no texts, and the name of each form."""
_FEWEST_OF_UTF16 = 4
"""The number of first bytes of which every second one is 0 in UTF-16 without a mark."""
_MARKS = (
    (codecs.BOM_UTF32_LE, "utf-32"),  # which begins as the one of UTF-16
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)


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
    return sorted((file for file in folder.rglob(pattern) if file.is_file()), key=_by_parts)


def _by_parts(file: Path) -> tuple[str, ...]:
    return file.parts


@contextmanager
def open_unpacked(path: Path) -> Iterator[BinaryIO]:
    """Open a file for reading, and unpack it meanwhile where it is packed.

    Raises:
        DataError: it cannot be opened, it is an archive of several files, or a library that unpacks it is missing.
    """
    try:
        with path.open("rb") as file:
            head = file.peek(_HEAD_BYTES)
            packing = next((name for magic, name in _PACKINGS if magic.match(head)), "")
            match packing:
                case "":
                    yield file
                case "gzip" | "bz2" | "lzma":
                    yield io.BufferedReader(importlib.import_module(packing).open(file))
                case "zstd":
                    yield _unzstd(path, file)
                case _:
                    raise DataError(
                        "data-missing", f"{path} is {packing} of files. Use a folder with the unpacked files"
                    )
    except OSError as error:
        raise DataError("data-unreadable", f"{path} cannot be read: {error.strerror or first_line(error)}") from None


def _unzstd(path: Path, file: BinaryIO) -> BinaryIO:
    """Return the content of a file that Zstandard has packed."""
    for name in ("compression.zstd", "zstandard", "pyarrow"):
        try:
            library: Any = importlib.import_module(name)
        except ModuleNotFoundError:
            continue
        match name:
            case "compression.zstd":
                return io.BufferedReader(library.open(file))
            case "zstandard":
                return io.BufferedReader(library.ZstdDecompressor().stream_reader(file, read_across_frames=True))
            case _:
                return io.BufferedReader(library.CompressedInputStream(file, "zstd"))
    raise DataError(
        "package-missing",
        f"{path} is packed by Zstandard, which needs the library zstandard or pyarrow: pip install zstandard",
    )


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


def head_of(path: Path, file: BinaryIO) -> bytes:
    """Return the next bytes of a file without consuming them; none at its end.

    Raises:
        DataError: it cannot be read, as in a damaged packed file, or it is no text but a form that the error names.
    """
    _, head = next(read_lines(path, (file.peek(_HEAD_BYTES) for _ in range(1))))  # type: ignore[attr-defined]
    head = bytes(head)
    if form := next((form for mark, form in _NO_TEXTS if mark.match(head)), ""):
        raise DataError("data-not-text", f"{path} is {form}")
    return head


def encoding_of(head: bytes) -> str:
    """Return the encoding of a file by its byte-order mark, or as UTF-16 where every second byte is 0; else UTF-8."""
    if marked := next((name for mark, name in _MARKS if head.startswith(mark)), ""):
        return marked
    pairs = head[: min(len(head), 64) // 2 * 2]
    if len(pairs) >= _FEWEST_OF_UTF16:
        for zeros, others, name in ((pairs[1::2], pairs[::2], "utf-16-le"), (pairs[::2], pairs[1::2], "utf-16-be")):
            if not any(zeros) and all(others):
                return name
    return "utf-8"


@contextmanager
def lines_as(encoding: str, file: BinaryIO) -> Iterator[io.TextIOWrapper | None]:
    """Open an opened file as text of an encoding, with U+FFFD for invalid bytes; yield None for UTF-8."""
    if encoding == "utf-8":
        yield None
        return
    with io.TextIOWrapper(file, encoding, "replace", newline="\n") as text:
        yield text


def texts_of(path: Path) -> Iterator[str]:
    """Yield the text of a file in parts of whole lines, so that a large file is never in memory as a whole.

    Raises:
        DataError: the file is not text in its encoding, or it is damaged.
    """
    with open_unpacked(path) as file, lines_as(encoding_of(head_of(path, file)), file) as read:
        line, offset, is_first = 1, 0, True
        for _, part in read_lines(path, _parts(file) if read is None else _text_parts(read)):
            text = part if isinstance(part, str) else _decode_utf8(part, path, line, offset)
            text = text.removeprefix("\ufeff") if is_first else text
            line, offset = line + text.count("\n"), offset + len(part)
            if text or is_first:
                yield text.replace("\r\n", "\n").replace("\r", "\n")
            is_first = False


def _parts(file: BinaryIO) -> Iterator[bytes]:
    """Yield a file in parts that end with a line."""
    while True:
        part = file.read(PART_BYTES)
        is_last = len(part) < PART_BYTES
        yield part + file.readline()
        if is_last:
            return


def _text_parts(file: io.TextIOWrapper) -> Iterator[str]:
    while part := file.read(PART_BYTES):
        yield part + file.readline()


def _decode_utf8(part: bytes, path: Path, line: int, offset: int) -> str:
    """Return a part of a file as text; it begins at a line and a byte of the file."""
    try:
        return part.decode()
    except UnicodeDecodeError as error:
        line += part.count(b"\n", 0, error.start)
        raise DataError(
            "data-not-text",
            f"{path}:{line} is not UTF-8 text (byte {offset + error.start}). To train on its raw bytes, "
            f"set source = 'tokens:{path}' and data.dtype = 'uint8'",
        ) from None


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
