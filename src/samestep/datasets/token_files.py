"""One file of token ids, mapped into memory: plain numbers, or numbers after a header that describes them.

    *.npy              numpy's own: the head names dtype, byte order and shape, of one dimension or of rows
    *.bin with *.idx   Megatron's or fairseq's: the index names the dtype, and the place and length of each sequence
    a head of 1 KiB    llm.c's, which modded-nanogpt has too: 256 int32, the first three a number of the format, its version, and how
                       many tokens follow
    anything else      plain numbers of `data.dtype` in this machine's byte order, as nanoGPT writes them

Plain numbers say nothing of themselves. Where they look like those of another width or byte order, or like floating-point numbers, they
are refused: ids are small, so of two 32-bit ids that are read as four 16-bit ones every second is 0. Of a large file the beginning, the
end and blocks between them are looked at, at places that a seed draws.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from samestep.datasets.columns import Shards
from samestep.errors import DataError
from samestep.output import durable_files

Array = npt.NDArray[Any]

_NPY = b"\x93NUMPY"
_INDEX, _OLD_INDEX = b"MMIDIDX\x00\x00", b"TNTIDX\x00\x00"
_INDEX_HEAD_BYTES = 34
_INDEX_DTYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 6: "<f8", 7: "<f4", 8: "<u2", 9: "<u4", 10: "<u8"}
"""The dtypes by their code; Megatron's end with 8."""
_SHORT_INDEX_HEAD_BYTES = 26
"""The head of fairseq's index, which has the sequences alone and no documents."""
_HEAD_BYTES = 1024
_HEADS = {(20240520, 1): "<u2", (20240801, 7): "<u4"}
"""The dtypes of tokens after a header of llm.c, by the number of its format and its version."""
_MOST_VERSIONS = 1024
_FEWEST_BYTES_OF_TEXT = 64
_OTHER_FORMATS = tuple((re.compile(mark, re.DOTALL), form) for mark, form in (
    (rb"\x1f\x8b\x08", "compressed with gzip"), (rb"\x28\xb5\x2f\xfd", "compressed with zstd"), (rb"PK\x03\x04", "a zip archive"),
    (rb"PAR1", "a Parquet file"), (rb"\x89HDF\r\n", "an HDF5 file"), (rb"ARROW1", "an Arrow file"), (rb".{257}ustar", "a tar archive"),
    (rb"\x80[\x02\x03][\]}(c]", "a pickle"), (rb"\x80[\x04\x05]\x95", "a pickle"), (rb"GGUF", "a GGUF file"),
    (rb".{4}\0{4}\{\"", "a safetensors file"), (rb"LITPKDS", "a chunk of litgpt's packed data"),
    (rb"version https://git-lfs", "a pointer of Git LFS: `git lfs pull` fetches the file itself"),
    (rb"MMIDIDX\0\0", "an index of Megatron, a file NAME.idx"), (rb"TNTIDX\0\0", "an index of an older form"),
))  # fmt: skip
_WIDTHS = {1: "uint8", 2: "uint16", 4: "uint32", 8: "int64"}
_LOOKED_AT_BYTES = 2**18
_BLOCK_BYTES, _NUM_BLOCKS = 2**16, 256
"""The size and number of the blocks of a file that are looked at besides its beginning."""
_FEWEST, _MOSTLY = 16, 0.5
"""The number of tokens from which zeros between them are no chance, and the fraction of them that are not 0 themselves."""
_MOST_HIGH, _LARGE = 15, 4096
"""The upper half of a 32-bit id in the largest vocabularies, of 2^20 tokens, and a number that lower halves reach."""


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
    if (form := _other_format(head, size_bytes)) != "":
        raise DataError("token-file-form", f"tokens:{place} is {form}. Use a file of plain numbers, or a .npy file")
    if _is_headed(head):
        return _read_behind_head(place, size_bytes, head)
    if (width := _unknown_head(head, size_bytes)) != "":
        raise DataError(
            "token-file-form",
            f"tokens:{place} has a head of {_HEAD_BYTES} bytes in no known form. Remove it by `tail -c +{_HEAD_BYTES + 1}`, "
            f"and set data.dtype = {width!r}",
        )
    if _is_headed(head, ">"):
        raise DataError(
            "token-file-form",
            f"tokens:{place} has a head of llm.c's in the other byte order. Use a .npy file, which names its byte order",
        )
    if size_bytes % np.dtype(dtype).itemsize:
        raise DataError(
            "token-file-damaged",
            f"tokens:{place} has {size_bytes} bytes, which is not a whole number of {dtype} tokens; "
            "data.dtype must be the type that the file was written with",
        )
    if np.dtype(dtype).itemsize > 1 and _is_text(head):
        raise DataError(
            "token-file-form",
            f"tokens:{place} is text: data.source = 'text:{place}' encodes it, and data.dtype = 'uint8' reads its bytes as tokens",
        )
    tokens = np.memmap(place, dtype=np.dtype(dtype), mode="r")
    _refuse_other_width(place, tokens)
    return tokens


def _is_headed(head: bytes, order: str = "<") -> bool:
    number, version = np.frombuffer(head[:8], f"{order}i4").tolist() if len(head) >= 8 else (0, 0)
    return 0 <= version < _MOST_VERSIONS and any(number == known for known, _ in _HEADS)


def _unknown_head(head: bytes, size_bytes: int) -> str:
    """Return the dtype of tokens after a header of llm.c's form with an unknown number; empty where there is no such
    header."""
    numbers = np.frombuffer(head, "<i4") if len(head) == _HEAD_BYTES else np.zeros(4, "<i4")
    number, version, count = numbers[:3].tolist()
    if number <= 0 or not 0 <= version < _MOST_VERSIONS or count < 1 or numbers[3:].any():
        return ""
    rest = size_bytes - _HEAD_BYTES
    return next((dtype for width, dtype in ((2, "uint16"), (4, "uint32")) if rest == count * width), "")


def _other_format(head: bytes, size_bytes: int) -> str:
    """Return the name of another format that a file's first bytes belong to; empty for numbers."""
    if form := next((form for mark, form in _OTHER_FORMATS if mark.match(head)), ""):
        return form
    # A chunk of litdata names the number of its items, and where each begins and the last one ends.
    items = int.from_bytes(head[:4], "little")
    first, last = (int.from_bytes(head[at : at + 4], "little") for at in (4, 4 * items + 4))
    return "a chunk of litdata" if 0 < items < 200 and first == 4 * items + 8 and last == size_bytes else ""


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
        reason = " ".join(str(error).split())[:120] or type(error).__name__
        works = ". Use plain numbers of data.dtype in a file NAME.bin" * ("magic string" in reason)
        raise DataError(
            "token-file-form", f"tokens:{place} is not a .npy array that can be mapped: {reason}{works}"
        ) from None
    if tokens.ndim not in (1, 2) or tokens.dtype.kind not in "iu":
        works = {"f": "; numpy.save(file, tokens.astype('int64')) makes whole ones"}.get(tokens.dtype.kind, "")
        works += "; numpy.save(file, tokens.reshape(-1)) makes one dimension" * (tokens.ndim != 1)
        raise DataError(
            "token-file-form",
            f"tokens:{place} is {tokens.dtype} {list(tokens.shape)}. Use whole numbers in one dimension, or in rows{works}",
        )
    if not tokens.size:
        raise DataError(
            "data-empty", f"tokens:{place} is empty. Use a file with tokens, or a folder without the empty one"
        )
    if (end := int(tokens.offset) + tokens.nbytes) != place.stat().st_size:
        raise DataError(
            "token-file-damaged",
            f"tokens:{place} has {place.stat().st_size:,} bytes, and its array ends at {end:,}. Use one array in a file",
        )
    return np.ascontiguousarray(tokens) if tokens.ndim == 2 and not tokens.flags.c_contiguous else tokens


def _read_behind_head(place: Path, size_bytes: int, head: bytes) -> Array:
    if len(head) < _HEAD_BYTES:
        raise DataError(
            "token-file-damaged",
            f"tokens:{place} ends within its head: it has {size_bytes} of {_HEAD_BYTES} bytes, so copy it again",
        )
    number, version, count = np.frombuffer(head[:12], "<i4").tolist()
    if (number, version) not in _HEADS:
        raise DataError(
            "token-file-form",
            f"tokens:{place} has a head of llm.c's format {number} in version {version}, which is not known. Remove the head by "
            f"`tail -c +{_HEAD_BYTES + 1}` to use plain numbers",
        )
    dtype = np.dtype(_HEADS[number, version])
    if count < 1 or size_bytes != _HEAD_BYTES + count * dtype.itemsize:
        raise DataError(
            "token-file-damaged",
            f"tokens:{place} states in its head {count:,} tokens, which are {_HEAD_BYTES + count * dtype.itemsize:,} bytes, "
            f"and it has {size_bytes:,}: copy it again",
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
        head = file.read(_INDEX_HEAD_BYTES)
    if head.startswith(_OLD_INDEX):
        raise DataError(
            "token-file-form",
            f"tokens:{index} is an index of an older form: Megatron's tools write one that begins with MMIDIDX",
        )
    if not head.startswith(_INDEX):
        raise DataError(
            "token-file-form",
            f"tokens:{index} is not an index of Megatron, which begins with MMIDIDX; without it {index.stem}.bin is read as plain numbers",
        )
    if len(head) < _INDEX_HEAD_BYTES:
        raise DataError("token-file-damaged", f"tokens:{index} ends within its head: copy it again")
    version, code = int.from_bytes(head[9:17], "little"), head[17]
    sequences, documents = (int.from_bytes(head[at : at + 8], "little") for at in (18, 26))
    if version != 1 or np.dtype(_INDEX_DTYPES.get(code, "f4")).kind not in "iu":
        raise DataError(
            "token-file-form",
            f"tokens:{index} is of version {version} with numbers of kind {code}. Use version 1 with whole numbers",
        )
    first = _INDEX_HEAD_BYTES
    if size_bytes == _SHORT_INDEX_HEAD_BYTES + 12 * sequences:
        first, documents = _SHORT_INDEX_HEAD_BYTES, 0
    expected = first + 12 * sequences + 8 * documents
    if size_bytes not in (expected, expected + sequences):  # the modes of sequences stand last, where there are any
        raise DataError(
            "token-file-damaged",
            f"tokens:{index} states {sequences:,} sequences and {documents:,} documents, which are {expected:,} bytes, and it "
            f"has {size_bytes:,}: copy it again",
        )
    lengths = np.fromfile(index, "<i4", sequences, offset=first).astype(np.int64)
    pointers = np.fromfile(index, "<i8", sequences, offset=first + 4 * sequences)
    begins = np.fromfile(index, "<i8", documents, offset=first + 12 * sequences)
    if documents and (begins[0] != 0 or begins[-1] != sequences or (np.diff(begins) < 0).any()):
        raise DataError(
            "token-file-damaged",
            f"tokens:{index} is damaged: its documents do not divide its {sequences:,} sequences; copy it again",
        )
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
    """Refuse numbers that look like wider ones, like those of the other byte order, or like floating-point numbers.

    Raises:
        DataError: they look so.
    """
    width = tokens.dtype.itemsize
    if width == 1 and tokens[:2].tobytes() in (b"\xff\xfe", b"\xfe\xff"):
        return  # text in UTF-16, of which every second byte is 0
    for first, block in looked_at(tokens, _LOOKED_AT_BYTES // width, _BLOCK_BYTES // width):
        if not _may_be_other(block.view(f"u{width}")):
            continue
        for shift in range(min(8 // width, len(block))):  # files of several widths may have been joined at any place
            if (other_form := _other_form(block[shift:].view(f"u{width}"))) != "":
                behind = f" from token {first:,} on" * (first > 0)
                raise DataError(
                    "token-file-form",
                    f"tokens:{place} looks like {other_form.format(given=tokens.dtype, at=behind)}. If they are {tokens.dtype}, "
                    "use a .npy file, which names its dtype",
                )


def _may_be_other(seen: Array) -> bool:
    """Return whether a block needs a closer test: half of it is small, or its first numbers occur only in another
    form."""
    head = seen[: 8 * _FEWEST]
    is_other = any(_float_dtype(head[shift:]) != "" for shift in range(4)) or (
        seen.dtype.itemsize > 1 and not (head % 256).any()
    )
    return bool(len(seen)) and (is_other or bool((np.minimum(seen, seen.byteswap()) <= _MOST_HIGH).mean() > 0.4))


def _other_form(seen: Array) -> str:
    """Return the other form that unsigned numbers seem to have and what would work, with fields for their dtype and
    place; else empty."""
    width = seen.dtype.itemsize
    if (number := _float_dtype(seen)) != "":
        return f"{number}{{at}}, and ids are whole numbers: numpy.fromfile(file, {number!r}).astype('uint32').tofile(file) makes them, which data.dtype = 'uint32' reads"
    for wider in (8, 4, 2):
        if _are_parts(seen, wider):
            return (
                f"{_WIDTHS[wider]}{{at}}: of every {wider // width} numbers of {{given}} only the first is large. Set "
                f"data.dtype = {_WIDTHS[wider]!r}"
            )
        if _are_parts(seen[: len(seen) * width // wider * wider // width][::-1].byteswap(), wider) or (
            wider == width > 1 and _are_swapped(seen)
        ):
            return (
                f"numbers of {8 * wider} bits in the other byte order{{at}}: read as {{given}} they are 0 or multiples of 256. "
                "Use a .npy file, which names its byte order"
            )
    return ""


def _float_dtype(seen: Array) -> str:
    """Return the floating-point dtype in which nearly all bytes of numbers are small whole ones; empty where there is none."""
    width = seen.dtype.itemsize
    for dtype in ("float64", "float32"):
        several = max(1, np.dtype(dtype).itemsize // width)
        if width == 1 or len(seen) < several * _FEWEST:
            continue
        numbers = seen[: len(seen) // several * several].view(dtype)
        with np.errstate(invalid="ignore"):
            are_whole = (numbers == np.floor(numbers)) & (numbers >= 0) & (numbers < 2**31)
        if are_whole.all() and (numbers >= 1).mean() > _MOSTLY and numbers.max() > 1:
            return dtype
    return ""


def _are_parts(seen: Array, wider: int) -> bool:
    """Return whether unsigned numbers look like parts of ids of `wider` bytes, the least part first: of each the others are 0, or
    where the least ones are large at most `_MOST_HIGH`."""
    several = wider // seen.dtype.itemsize
    if several < 2 or len(seen) < several * _FEWEST:
        return False
    parts = seen[: len(seen) // several * several].reshape(-1, several)
    high = int(parts[:, 1].max())
    are_zero = not parts[:, 2:].any() and (parts[:, 0] != 0).mean() > _MOSTLY
    is_large = len(parts) >= 4 * _FEWEST and seen.dtype.itemsize > 1 and parts[:, 0].max() >= _LARGE
    return bool(are_zero and (high == 0 or (high <= _MOST_HIGH and is_large)))


def _are_swapped(seen: Array) -> bool:
    """Return whether unsigned numbers look like small ids in the other byte order."""
    return bool(len(seen) >= _FEWEST and not (seen % 256).any() and (seen != 0).mean() > _MOSTLY)


def other_readings(place: Path, words: int) -> list[str]:
    """Return the ways to read a file of plain numbers in which all ids are below `words`, for an error; none for
    other files."""
    with place.open("rb") as file:
        head = file.read(_HEAD_BYTES)
    other_readings: list[str] = []
    if index_at(str(place)) is not None or head.startswith(_NPY) or _is_headed(head):
        return other_readings
    for dtype in map(np.dtype, ("uint16", "uint32", "int64")):
        if place.stat().st_size % dtype.itemsize:
            continue
        seen = np.fromfile(place, dtype, _LOOKED_AT_BYTES)
        if len(seen) and 0 <= seen.min() <= seen.max() < words:
            other_readings.append(f"data.dtype = {dtype.name!r} if the file holds that")
        elif len(seen) and 0 <= (swapped := seen.byteswap()).min() <= swapped.max() < words:
            other_readings.append(f"a .npy file if it holds {dtype.name} in the other byte order")
    return other_readings
