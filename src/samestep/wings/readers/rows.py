"""The rows of sources of documents, read one by one: JSON lines, Parquet files, and datasets that `save_to_disk` wrote.

Only the columns that documents are read from are decoded. A row that cannot be read is refused with its file and its line or row.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from samestep.datasets.columns import Origin, stamps
from samestep.datasets.files import PACKED_ENDS, existing, files_at, open_unpacked, read_lines, without_held_out
from samestep.errors import DataError, first_line
from samestep.wings.readers.conversations import no_document, wanted_columns

ROWS_AT_ONCE = 256
"""Rows of a Parquet file that are in memory together."""
_LINES = (".jsonl", ".ndjson")
_UNPACKED = 4
"""The approximate number of unpacked bytes for each packed byte."""
_HALF_A_PAIR = re.compile(r"\\u[dD][89a-fA-F]")

Row = tuple[str, Any, int]
"""The file and line of a document, for errors, the object itself, and about how many bytes it took."""


@dataclass(frozen=True, slots=True)
class DocumentRows:
    """The documents of a source, read one by one, as often as they are asked for."""

    origin: Origin
    read: Callable[[], Iterator[Row]]
    may_lack_nulls: bool = False
    """Whether a key without a value counts as absent, as in a table."""


# -- JSON ------------------------------------------------------------------------------------------


def rows_of(form: str, path: str, text_field: str) -> DocumentRows:
    """Return the rows of files of one form: jsonl, parquet or hf.

    Raises:
        DataError: nothing is there, the library is missing, or reading a file that is damaged.
    """
    match form:
        case "jsonl":
            return jsonl_rows(path)
        case "parquet":
            return parquet_rows(path, text_field)
        case _:
            return hf_rows(path, text_field)


def jsonl_rows(path: str) -> DocumentRows:
    """Return the lines of a file, or of a folder's `*.jsonl` files, without blank lines; where there are none, of its `*.json` files.

    A file that is one JSON array gives its elements.

    Raises:
        DataError: nothing is there; reading a line that is not JSON.
    """
    source = f"jsonl:{path}" if path else "jsonl:"
    place = existing(path, source)
    try:
        files = files_at(place, source, *_LINES)
    except DataError:
        files = files_at(place, source, *_LINES, ".json")
    files = without_held_out(files, place)

    def read() -> Iterator[Row]:
        for file in files:
            with open_unpacked(file) as content:
                yield from _json_rows(file, content)

    return DocumentRows(_origin(source, files), read)


def _json_rows(file: Path, content: BinaryIO) -> Iterator[Row]:
    for number, line in read_lines(file, content):
        where = f"{file}:{number}"
        if number == 1 and line.lstrip(b"\xef\xbb\xbf \t\r\n").startswith(
            b"["
        ):  # one JSON array, whatever the file's name is
            rest = b"".join(line for _, line in read_lines(file, content))
            elements = _parsed(line + rest, str(file))
            yield from (
                (f"{file} element {at}", element, len(rest) // len(elements)) for at, element in enumerate(elements)
            )
            return
        if line.strip():
            yield where, _parsed(line, where), len(line)


def _parsed(text: bytes, where: str) -> Any:
    """Return the value of a JSON text.

    Raises:
        DataError: it is none, is not UTF-8, or is nested deeper than Python reads.
    """
    try:
        decoded = text.decode("utf-8-sig")
        value = json.loads(decoded)
        if _HALF_A_PAIR.search(decoded):  # no encoding of text can hold half of a pair of surrogates
            words = json.dumps(value, ensure_ascii=False).encode("utf-16", "surrogatepass").decode("utf-16", "replace")
            value = json.loads(words)
        return value
    except UnicodeDecodeError as error:
        raise DataError("data-damaged", f"{where}: not UTF-8 text (byte {error.start} of the line)") from None
    except (ValueError, RecursionError) as error:
        raise DataError("data-damaged", f"{where}: not JSON: {first_line(error)}") from None


# -- tables ----------------------------------------------------------------------------------------


def parquet_rows(path: str, text_field: str) -> DocumentRows:
    """Return the rows of a Parquet file, or of a folder's `*.parquet` files in the order of their names, without those held out.

    Raises:
        DataError: nothing is there, the library is missing, or reading a file that is no Parquet file or damaged.
    """
    source = f"parquet:{path}" if path else "parquet:"
    place = existing(path, source)
    files = without_held_out(files_at(place, source, ".parquet", ".pq"), place)
    try:
        from pyarrow import parquet  # noqa: PLC0415 - an extra
    except ModuleNotFoundError:
        raise DataError(
            "package-missing", f"{source} needs the library pyarrow: pip install 'samestep[hf-data]'"
        ) from None

    def read() -> Iterator[Row]:
        for file in files:
            try:
                table = parquet.ParquetFile(file, page_checksum_verification=True)
                length, names = table.metadata.num_rows, table.schema_arrow.names
            except Exception as error:  # the library raises errors of all its parts
                raise DataError("data-damaged", f"{file} is not a Parquet file: {first_line(error)}") from None
            if twice := next((name for name in wanted_columns(names, text_field) if names.count(name) > 1), None):
                raise DataError(
                    "text-field-missing", f"{file} row 0: the file has two columns {twice!r}. Use one of each name"
                )
            columns = _read_columns(names, text_field)
            if length and not columns:
                raise no_document(names, text_field, f"{file} row 0: ")
            with table:
                each = file.stat().st_size // max(1, length)
                yield from _table_rows(file, table.iter_batches(ROWS_AT_ONCE, columns=columns), each)

    return DocumentRows(_origin(source, files), read, may_lack_nulls=True)


def _read_columns(names: Sequence[str], text_field: str) -> list[str]:
    """Return the columns of a table that are read: of a path within a column the whole column."""
    wanted = wanted_columns(names, text_field)
    return [name if name in names else name.partition(".")[0] for name in wanted]


def _table_rows(file: Path | str, batches: Iterator[Any], each: int) -> Iterator[Row]:
    """Yield the rows of batches of a table; each row is about `each` bytes."""
    number = 0
    try:
        for batch in batches:
            batch.validate(full=True)  # of a damaged file, offsets may lead anywhere in memory
            for row in batch.to_pylist():
                yield f"{file} row {number}", row, each
                number += 1
    except Exception as error:  # such as a damaged page, which each codec reports differently
        raise DataError(
            "data-damaged", f"{file} row {number}, or one soon after it, is damaged: {first_line(error)}"
        ) from None


def hf_rows(path: str, text_field: str) -> DocumentRows:
    """Return the rows of a folder that `Dataset.save_to_disk` wrote.

    Raises:
        DataError: the library is missing, or the folder holds no such dataset.
    """
    source = f"hf:{path}" if path else "hf:"
    place = existing(path, source)
    try:
        from datasets import load_from_disk  # noqa: PLC0415 - an extra, and slow to import
    except ModuleNotFoundError:
        raise DataError(
            "package-missing", f"{source} needs the library datasets: pip install 'samestep[hf-data]'"
        ) from None
    try:
        dataset = load_from_disk(str(place))
    except Exception as error:  # the library raises errors of all its parts
        raise DataError(
            "data-missing",
            f"hf:{path} is not a dataset written by save_to_disk ({first_line(error)}); "
            "load_dataset(NAME).save_to_disk(FOLDER) makes one",
        ) from None
    if isinstance(dataset, dict):
        if "train" not in dataset:
            raise DataError(
                "data-missing",
                f"hf:{path} has no split 'train' but {', '.join(dataset)}. Use hf:{place / next(iter(dataset))}",
            )
        dataset = dataset["train"]
    size_bytes, fingerprint, names = int(dataset.data.nbytes), dataset._fingerprint, dataset.column_names
    columns = _read_columns(names, text_field)
    if len(dataset) and not columns:
        raise no_document(names, text_field, f"hf:{path} row 0: ")
    chosen = dataset.with_format("arrow").select_columns(columns)

    def read() -> Iterator[Row]:
        yield from _table_rows(f"hf:{path}", chosen.iter(ROWS_AT_ONCE), size_bytes // max(1, len(chosen)))

    return DocumentRows(Origin(source, size_bytes, ("hf", fingerprint, str(len(dataset)))), read, may_lack_nulls=True)


def _origin(source: str, files: Sequence[Path]) -> Origin:
    sizes = [file.stat().st_size * (_UNPACKED if file.suffix in PACKED_ENDS else 1) for file in files]
    return Origin(source, sum(sizes), stamps(files))
