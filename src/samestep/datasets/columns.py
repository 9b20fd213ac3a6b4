"""Data sources as columns of numbers: small ones in memory, large ones in files that are written once and mapped by all.

A source of text is read document by document. Each document gives a piece of every column (its tokens, their labels, where
it begins), and the pieces of a column, one after another, are one array:

    up to 32 MiB of text    arrays in memory, made by each process
    more                    files in ~/.cache/samestep/tokens/DIGEST, mapped into memory: no process holds more than the
                            document it is reading, and all ranks of a machine share the pages that are in use

The first process that needs the files writes them, under a lock, while the others wait. They are written to a draft and
renamed when they are complete, so an interrupted run leaves no half of them. DIGEST names the source's files (name, size,
time of change, first and last 64 KiB), the tokenizer's in the same way, and the settings that decide the tokens.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
import xxhash
from filelock import FileLock, Timeout
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from samestep.errors import DataError

FORMAT = 3
"""The version of the columns' form; it is raised when the same text would give other columns."""
MOST_IN_MEMORY_BYTES = 32 * 2**20
"""Bytes of text up to which columns are kept in memory."""
_ENDS_BYTES = 2**16
_WAIT_S = 2.0

Array = npt.NDArray[Any]
Piece = Mapping[str, Array]
"""A document's part of each column."""


@dataclass(frozen=True, slots=True)
class Origin:
    """The origin of columns: a source's name, the size of its files, and a key of all that decides the columns."""

    name: str
    """The source, for messages."""
    size_bytes: int
    """Bytes of its files."""
    key: tuple[str, ...] = ()
    """Everything that decides the columns, besides the dtypes."""


Pieces = Callable[[], Iterator[tuple[int, Piece]]]
"""Reads a source: yields the bytes read for a document, and its part of each column."""


def columns(origin: Origin, dtypes: Mapping[str, Any], pieces: Pieces) -> dict[str, Array]:
    """Return the columns of a source, from memory or from the files that hold them.

    Raises:
        DataError: a document cannot be read, or the files cannot be written.
    """
    if origin.size_bytes <= MOST_IN_MEMORY_BYTES:
        return _in_memory(dtypes, pieces())
    layout = {name: np.dtype(dtype).str for name, dtype in dtypes.items()}
    digest = xxhash.xxh3_128_hexdigest(json.dumps([FORMAT, origin.key, layout]).encode())
    try:
        home = Path.home() / ".cache" / "samestep" / "tokens"
        home.mkdir(parents=True, exist_ok=True)
        with _hold_lock(home / f"{digest}.lock", origin):
            if not (home / digest).is_dir():
                _write(home, digest, origin, dtypes, pieces)
    except (OSError, RuntimeError) as error:  # there is no home, or it cannot be written to
        raise DataError(
            "data-memory",
            f"{origin.name}: its tokens do not fit into memory, and cannot be kept in ~/.cache/samestep: {error}",
        ) from None
    return {name: _map_file(home / digest / name, np.dtype(dtype)) for name, dtype in dtypes.items()}


def stamps(files: Iterable[Path]) -> tuple[str, ...]:
    """Return a text for each file that changes when the file does: its name, size, time of change, beginning and end."""
    texts = []
    for file in files:
        stat = file.stat()
        with file.open("rb") as opened:
            digest = xxhash.xxh3_64(opened.read(_ENDS_BYTES))
            opened.seek(max(0, stat.st_size - _ENDS_BYTES))
            digest.update(opened.read(_ENDS_BYTES))
        texts.append(f"{file.name} {stat.st_size} {stat.st_mtime_ns} {digest.hexdigest()}")
    return tuple(texts)


def _in_memory(dtypes: Mapping[str, Any], pieces: Iterator[tuple[int, Piece]]) -> dict[str, Array]:
    arrays: dict[str, list[Array]] = {name: [np.empty(0, dtype)] for name, dtype in dtypes.items()}
    for _, piece in pieces:
        for name, part in piece.items():
            arrays[name].append(part.astype(dtypes[name], copy=False))
    return {name: np.concatenate(parts) for name, parts in arrays.items()}


@contextmanager
def _hold_lock(path: Path, origin: Origin) -> Iterator[None]:
    """Hold the lock of a source's files; print a message while another process is writing them."""
    lock = FileLock(path)
    try:
        lock.acquire(timeout=_WAIT_S)
    except Timeout:
        print(f"{origin.name}: another process is turning it into tokens; waiting", file=sys.stderr, flush=True)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _write(home: Path, digest: str, origin: Origin, dtypes: Mapping[str, Any], pieces: Pieces) -> None:
    """Write the columns' files, replacing the draft of an earlier process that was interrupted."""
    draft = home / f"{digest}.draft"
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir()
    console = Console(file=sys.stderr, highlight=False)
    console.print(
        f"{origin.name}: turning {origin.size_bytes / 2**20:,.0f} MiB into tokens, once; kept in {home / digest}"
    )
    shown = (TextColumn("tokens"), BarColumn(40), TextColumn("{task.percentage:.0f} %"), TimeRemainingColumn())
    try:
        with ExitStack() as stack:
            files: dict[str, BinaryIO] = {
                name: stack.enter_context((draft / name).open("wb", buffering=2**20)) for name in dtypes
            }
            bar = stack.enter_context(
                Progress(*shown, console=console, transient=True, disable=not console.is_terminal)
            )
            task = bar.add_task("", total=origin.size_bytes)
            for size_bytes, piece in pieces():
                for name, part in piece.items():
                    files[name].write(np.ascontiguousarray(part, dtypes[name]).tobytes())
                bar.advance(task, size_bytes)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise
    draft.rename(home / digest)


def _map_file(path: Path, dtype: np.dtype[Any]) -> Array:
    return np.memmap(path, dtype, "r") if path.stat().st_size else np.empty(0, dtype)


class Shards:
    """Several arrays of one dimension as one, without a copy."""

    def __init__(self, arrays: Sequence[Array]) -> None:
        self.arrays = tuple(arrays)
        self._ends = np.cumsum([len(array) for array in self.arrays])

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def found(self, index: int) -> tuple[Array, int]:
        """Return the array in which an element is, and its index there."""
        which = int(np.searchsorted(self._ends, index, side="right"))
        return self.arrays[which], index - int(self._ends[which]) + len(self.arrays[which])

    def __getitem__(self, index: slice | npt.NDArray[np.int64]) -> Any:
        """Return a contiguous range, as shards, or the elements at an array of indices, as an array of its shape."""
        if isinstance(index, slice):
            first, last, _ = index.indices(len(self))
            begins = self._ends - [len(array) for array in self.arrays]
            inside = [
                array[max(0, first - begin) : max(0, last - begin)]
                for array, begin in zip(self.arrays, begins.tolist(), strict=True)
            ]
            return Shards([array for array in inside if len(array)])
        which = np.searchsorted(self._ends, index, side="right")
        tensor = np.empty(index.shape, np.result_type(*self.arrays))
        for shard in np.unique(which):
            here = which == shard
            tensor[here] = self.arrays[shard][index[here] - (self._ends[shard] - len(self.arrays[shard]))]
        return tensor
