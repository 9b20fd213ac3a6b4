"""One file of token ids, mapped into memory: plain numbers, or numbers after a header that describes them.

    *.npy              numpy's own: the head names dtype, byte order and shape, of one dimension or of rows
    *.bin with *.idx   Megatron's: the index names the dtype, and the place and length of each sequence
    a head of 1 KiB    llm.c's, which modded-nanogpt has too: 256 int32, the first three a number of the format, its version, and how
                       many tokens follow
    anything else      plain numbers of `data.dtype` in this machine's byte order, as nanoGPT writes them

Plain numbers do not name their type. If the parts of wider numbers are read as numbers of `data.dtype`, most are 0 in turn: ids are small,
so of two 32-bit ids that are read as four 16-bit ones every second is 0. Such a file is refused, and so is text.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from samestep.datasets.columns import Shards
from samestep.errors import DataError, first_line
from samestep.output import durable_files

Array = npt.NDArray[Any]

_NPY = b"\x93NUMPY"
_INDEX = b"MMIDIDX\x00\x00"
_INDEX_HEAD_BYTES = 34
_INDEX_DTYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2", 9: "<u4", 10: "<u8"}
"""The dtypes of whole numbers by their code."""
_HEAD_BYTES = 1024
_HEADS = {(20240520, 1): "<u2", (20240801, 7): "<u4"}
"""The dtypes of tokens after a header of llm.c, by the number of its format and its version."""
_OTHER_FORMATS = (
    b"\x1f\x8b",
    b"\x28\xb5\x2f\xfd",
    b"PK\x03\x04",
    b"PAR1",
    b"\x89HDF",
    b"ARROW1",
    b"\x80\x04\x95",
    b"GGUF",
    _INDEX,
)
"""The first bytes of packed files, archives, tables and other files that hold no plain numbers."""
_FEWEST_BYTES_OF_TEXT = 64
_WIDTHS = {2: "uint16", 4: "uint32", 8: "int64"}
_LOOKED_AT_BYTES = 2**18
_BLOCK_BYTES, _NUM_BLOCKS = 2**16, 256
"""The size and number of the blocks of a file that are looked at besides its beginning."""
_FEWEST, _MOSTLY = 16, 0.5
"""The number of tokens from which zeros between them are no chance, and the fraction of them that are not 0 themselves."""
_MOST_HIGH = 15
"""The upper half of a 32-bit id in the largest vocabularies, of 2^20 tokens."""


def index_at(path: str) -> Path | None:
    """Return Megatron's index of a path: an index, or of a .bin file or the prefix of both; None without one."""
    place = Path(os.path.expanduser(path))
    if place.suffix == ".idx" and place.is_file():
        return place
    if place.suffix == ".bin" and place.is_file():
        place = place.with_suffix("")
    elif place.exists() or not path:
        return None
    index = place.with_name(f"{place.name}.idx")
    return index if index.is_file() else None


def read_token_file(place: Path, dtype: str) -> Array:
    """Return the tokens of a file that has no index; plain numbers are of this dtype.

    Raises:
        DataError: the file is empty, damaged, of another format, or looks like numbers of another dtype.
    """
    try:
        with durable_files.open_regular(place) as file:
            head = file.read(_HEAD_BYTES)
        size_bytes = place.stat().st_size
    except OSError as error:
        raise DataError("data-unreadable", f"tokens:{place} cannot be read: {error.strerror}") from None
    if not size_bytes:
        raise DataError(
            "data-empty", f"tokens:{place} is empty. Use a file with tokens, or a folder without the empty one"
        )
    if place.suffix == ".npy" or head.startswith(_NPY):
        return _read_npy(place)
    if _is_headed(head):
        return _read_behind_head(place, size_bytes, head)
    if head.startswith(_OTHER_FORMATS):
        raise DataError(
            "token-file-form",
            f"tokens:{place} is packed, or of another format ({head[:6]!r}). Use a file of plain numbers, or a .npy file",
        )
    width = np.dtype(dtype).itemsize
    if size_bytes % width:
        raise DataError(
            "token-file-damaged",
            f"tokens:{place} has {size_bytes} bytes, which is not a whole number of {dtype} tokens; "
            "data.dtype must be the type that the file was written with",
        )
    if width > 1 and _is_text(head):
        raise DataError(
            "token-file-form",
            f"tokens:{place} is text: data.source = 'text:{place}' encodes it, and data.dtype = 'uint8' reads its bytes as tokens",
        )
    tokens = np.memmap(place, dtype=np.dtype(dtype), mode="r")
    _refuse_other_width(place, tokens)
    return tokens


def _is_headed(head: bytes) -> bool:
    return len(head) >= 8 and any(np.frombuffer(head[:4], "<i4")[0] == number for number, _ in _HEADS)


def _is_text(head: bytes) -> bool:
    """Return whether a file begins like text in UTF-8: without the control characters that numbers have among them."""
    lines = head[: max(head.rfind(b" "), head.rfind(b"\n"))]
    try:
        return len(lines) >= _FEWEST_BYTES_OF_TEXT and not any(
            ord(character) < 32 and character not in "\t\n\f\r" for character in lines.decode()
        )
    except UnicodeDecodeError:
        return False


def _read_npy(place: Path) -> Array:
    """Return a file's array, of one dimension or of two; of two it is the rows of an array in C's order."""
    try:
        tokens = np.lib.format.open_memmap(place, mode="r")
    except Exception as error:  # a damaged header is a Python literal, for which numpy raises any error of its parser
        raise DataError(
            "token-file-form",
            f"tokens:{place} is not a .npy array that can be mapped: {first_line(error)[:120]}. Use plain numbers of data.dtype in a file NAME.bin",
        ) from None
    if tokens.ndim not in (1, 2) or tokens.dtype.kind not in "iu":
        raise DataError(
            "token-file-form",
            f"tokens:{place} is {tokens.dtype} {list(tokens.shape)}. Use whole numbers in one dimension, or in rows: "
            "numpy.save(file, tokens.astype('int64').reshape(-1))",
        )
    if not tokens.size:
        raise DataError(
            "data-empty", f"tokens:{place} is empty. Use a file with tokens, or a folder without the empty one"
        )
    return np.ascontiguousarray(tokens) if tokens.ndim == 2 and not tokens.flags.c_contiguous else tokens


def _read_behind_head(place: Path, size_bytes: int, head: bytes) -> Array:
    number, version, count = (*np.frombuffer(head[: len(head) // 4 * 4], "<i4")[:3].tolist(), 0)[:3]
    dtype = np.dtype(_HEADS.get((number, version), "<u2"))
    if (number, version) not in _HEADS or count < 1 or size_bytes != _HEAD_BYTES + count * dtype.itemsize:
        raise DataError(
            "token-file-damaged",
            f"tokens:{place} has {size_bytes:,} bytes, and its head of llm.c's format {number} in version {version} states {count:,} tokens. "
            f"Copy it again, or remove the head by `tail -c +{_HEAD_BYTES + 1}` to use plain numbers",
        )
    return np.memmap(place, dtype=dtype, mode="r", offset=_HEAD_BYTES)


# -- Megatron's index ------------------------------------------------------------------------------


def read_indexed(index: Path) -> Array | Shards:
    """Return the tokens of all sequences of an index, in their order.

    Raises:
        DataError: the index or its .bin file is missing, damaged, or not of whole numbers.
    """
    place = index.with_suffix(".bin")
    if not place.is_file():
        raise DataError("data-missing", f"tokens:{index} is an index, and there is no {place.name} beside it")
    try:
        dtype, lengths, pointers = _sequences(index)
        durable_files.open_regular(place).close()
    except OSError as error:
        raise DataError(
            "data-unreadable", f"tokens:{error.filename or index} cannot be read: {error.strerror}"
        ) from None
    size_bytes, ends = place.stat().st_size, pointers + lengths * dtype.itemsize
    if not lengths.sum():
        raise DataError("data-empty", f"tokens:{index} has no tokens")
    if lengths.min() < 0 or pointers.min() < 0 or (pointers % dtype.itemsize).any():
        raise DataError(
            "token-file-damaged",
            f"tokens:{index} is damaged: it has a sequence of {lengths.min()} tokens, or one at byte {pointers.min()}",
        )
    if max(ends.max(), pointers.max()) > size_bytes:
        raise DataError(
            "token-file-damaged",
            f"tokens:{place} has {size_bytes:,} bytes, and its index {index.name} states that a sequence ends at byte "
            f"{max(ends.max(), pointers.max()):,}: copy both again",
        )
    tokens = np.memmap(place, dtype=dtype, mode="r", shape=(size_bytes // dtype.itemsize,))
    breaks = np.flatnonzero(pointers[1:] != ends[:-1]) + 1
    starts = pointers[np.concatenate([[0], breaks])] // dtype.itemsize
    stops = ends[np.concatenate([breaks - 1, [-1]])] // dtype.itemsize
    runs = [tokens[start:stop] for start, stop in zip(starts.tolist(), stops.tolist(), strict=True)]
    return runs[0] if len(runs) == 1 else Shards([run for run in runs if len(run)])


def _sequences(index: Path) -> tuple[np.dtype[Any], Array, Array]:
    """Return the dtype of the tokens, and the number of tokens and the first byte of each sequence."""
    size_bytes = index.stat().st_size
    with index.open("rb") as file:
        head = file.read(_INDEX_HEAD_BYTES).ljust(_INDEX_HEAD_BYTES, b"\0")
    version, code = int.from_bytes(head[9:17], "little"), head[17]
    if not head.startswith(_INDEX) or version != 1 or code not in _INDEX_DTYPES:
        raise DataError(
            "token-file-form",
            f"tokens:{index} is not an index of Megatron in version 1 with whole numbers, which begins with MMIDIDX; without it "
            f"{index.stem}.bin is read as plain numbers",
        )
    sequences, documents = (int.from_bytes(head[at : at + 8], "little") for at in (18, 26))
    expected = _INDEX_HEAD_BYTES + 12 * sequences + 8 * documents
    if size_bytes not in (expected, expected + sequences):  # the modes of sequences stand last, where there are any
        raise DataError(
            "token-file-damaged",
            f"tokens:{index} states {sequences:,} sequences and {documents:,} documents, which are {expected:,} bytes, and it "
            f"has {size_bytes:,}: copy it again",
        )
    lengths = np.fromfile(index, "<i4", sequences, offset=_INDEX_HEAD_BYTES).astype(np.int64)
    pointers = np.fromfile(index, "<i8", sequences, offset=_INDEX_HEAD_BYTES + 4 * sequences)
    return np.dtype(_INDEX_DTYPES[code]), lengths, pointers


# -- plain numbers ---------------------------------------------------------------------------------


def looked_at(tokens: Array, first: int, block: int) -> Iterator[tuple[int, Array]]:
    """Yield `first` tokens of the beginning, the end, and blocks at places that a seed draws, each with its place.

    A file that is not much larger is yielded whole.
    """
    first, block = max(1, first), max(1, block)
    yield 0, tokens[:first]
    last = len(tokens) - block
    if last <= first:
        behind = min(first, len(tokens) - len(tokens) // 4)  # the end of a small file is looked at by itself
        if behind < len(tokens):
            yield behind, tokens[behind:]
        return
    drawn = np.random.default_rng(len(tokens)).integers(first, last, _NUM_BLOCKS)
    for place in sorted({last, *drawn.tolist()}):
        yield place, tokens[place : place + block]


def _refuse_other_width(place: Path, tokens: Array) -> None:
    """Refuse numbers that look like parts of wider ones, or like those of the other byte order.

    Raises:
        DataError: they look so.
    """
    width = tokens.dtype.itemsize
    for first, block in looked_at(tokens, _LOOKED_AT_BYTES // width, _BLOCK_BYTES // width):
        seen = block.view(f"u{width}")
        wider = next(
            (
                w
                for w in (8, 4, 2)
                if w > width and any(_are_parts(seen[shift:], w // width) for shift in range(w // width))
            ),
            0,
        )
        if wider or (width > 1 and len(seen) >= _FEWEST and not (seen % 256).any() and (seen != 0).mean() > _MOSTLY):
            works = f"Set data.dtype = {_WIDTHS[wider]!r}" if wider else "Use a .npy file, which names its byte order"
            raise DataError(
                "token-file-form",
                f"tokens:{place} looks like {_WIDTHS.get(wider, 'the other byte order')} from token {first:,} on: of the {tokens.dtype} there too many are 0 or "
                f"multiples of 256. {works}. If they are right, use a .npy file",
            )


def _are_parts(seen: Array, several: int) -> bool:
    """Return whether of each `several` unsigned numbers one alone is large: the first one, or in the other byte order the last."""
    if len(seen) < several * _FEWEST:
        return False
    parts = seen[: len(seen) // several * several].reshape(-1, several)
    for ids, others in ((parts[:, 0], parts[:, 1:]), (parts[:, -1], parts[:, :-1])):
        is_wide = (ids != 0).mean() > _MOSTLY and not others[:, 1:].any()
        if is_wide and (not others.any() or (others.max() <= _MOST_HIGH and ids.max() >= 4096)):
            return True
    return False
