"""The rows of sources of documents, read one by one: JSON lines, Parquet files, and datasets that `save_to_disk` wrote.

Only the columns that documents are read from are decoded. What cannot be read is refused with its file and its line or row.
Escapes of JSON that are half of a pair of surrogates, which no encoding of text can hold, become U+FFFD.
"""

from __future__ import annotations

import decimal
import io
import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from samestep.datasets.columns import Origin, stamps
from samestep.datasets.files import (
    PACKED_ENDS,
    encoding_of,
    existing,
    files_at,
    head_of,
    lines_as,
    open_unpacked,
    read_lines,
    without_held_out,
)
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
    head = head_of(file, content)
    encoding = encoding_of(head)
    if encoding == "utf-8" and head[:2] != b"\0{" and head[1:2] == b"\0":
        encoding = "utf-16-le"
    elif head[:1] == b"\0":
        encoding = "utf-16-be"
    with lines_as(encoding, content) as text:
        if head.decode(encoding, "ignore").lstrip("\ufeff \t\r\n").startswith("["):
            yield from _elements(file, _whole(file, content, text))
            return
        for number, line in read_lines(file, text or content):
            where = f"{file}:{number}"
            line_text = line if isinstance(line, str) else _utf8(line, where, is_first=number == 1)
            if line_text.strip():
                yield where, parse_json(line_text.rstrip(), where), len(line)


def _utf8(line: bytes, where: str, *, is_first: bool = False) -> str:
    try:
        return line.decode("utf-8-sig" if is_first else "utf-8")
    except UnicodeDecodeError as error:
        raise DataError("data-damaged", f"{where}: not UTF-8 text (byte {error.start} of the line)") from None


def _whole(file: Path, content: BinaryIO, text: io.TextIOWrapper | None) -> str:
    lines = []
    for number, line in read_lines(file, text or content):
        lines.append(line if isinstance(line, str) else _utf8(line, f"{file}:{number}", is_first=number == 1))
    return "".join(lines)


def _elements(file: Path, text: str) -> Iterator[Row]:
    """Yield the elements of a file that is one JSON array, each with the line where it begins."""
    at, line = text.index("[") + 1, 1 + text.count("\n", 0, text.index("["))
    behind = ""
    while True:
        start = _SPACE.match(text, at).end()  # type: ignore[union-attr]
        line += text.count("\n", at, start)
        where, mark = f"{file}:{line}", text[start : start + 1]
        if mark == "]" and behind != ",":
            break
        if behind == "value" and mark != ",":
            raise DataError(
                "data-damaged",
                f"{where}: not JSON: the array is cut off, or an element is followed by neither ',' nor ']'",
            )
        if behind == "value":
            at, behind = start + 1, ","
            continue
        value, at = _decode_value(text, start, where)
        yield where, value, at - start
        line += text.count("\n", start, at)
        behind = "value"
    if text[start + 1 :].strip():
        raise DataError(
            "data-damaged",
            f"{where}: not JSON lines: text follows an array. Use one object a line, or one array of objects",
        )


def parse_json(text: str, where: str) -> Any:
    """Return the value of a JSON text.

    Raises:
        DataError: it is none, or is nested deeper than Python reads.
    """
    value, end = _decode_value(text, _SPACE.match(text).end(), where)  # type: ignore[union-attr]
    if rest := text[end:].strip():
        raise DataError(
            "data-damaged", f"{where}: not JSON: more follows the value at column {text.index(rest, end) + 1}"
        )
    return value


def _decode_value(text: str, start: int, where: str) -> tuple[Any, int]:
    """Return the JSON value that begins at a place of a text, and the place where it ends."""
    try:
        try:
            value, end = _DECODER.raw_decode(text, start)
        except json.JSONDecodeError:
            raise
        except ValueError:  # a number of more digits than Python turns into an integer
            value, end = _OF_LONG_NUMBERS.raw_decode(text, start)
        return (_without_halves(value) if _HALF_A_PAIR.search(text, start, end) else value), end
    except json.JSONDecodeError as error:
        line = f"line {error.lineno}, " if error.lineno > 1 else ""  # of an array, whose elements may have several
        raise DataError("data-damaged", f"{where}: not JSON: {error.msg} at {line}column {error.colno}") from None
    except RecursionError:
        raise DataError(
            "data-damaged", f"{where}: lists and objects are nested deeper than Python reads JSON"
        ) from None


def _integer(digits: str) -> int | decimal.Decimal:
    try:
        return int(digits)
    except ValueError:
        return decimal.Decimal(digits)


_DECODER, _OF_LONG_NUMBERS = json.JSONDecoder(), json.JSONDecoder(parse_int=_integer)
_SPACE = re.compile(r"[ \t\r\n]*")


def _without_halves(value: Any) -> Any:
    """Return a JSON value with U+FFFD in place of each half of a pair of surrogates that stands alone."""
    if isinstance(value, str):
        return value.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    if isinstance(value, dict):
        return {_without_halves(key): _without_halves(item) for key, item in value.items()}
    return [_without_halves(item) for item in value] if isinstance(value, list) else value


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
                with open_unpacked(file) as content:
                    head_of(file, content)  # names the file's form, where that is known
                raise DataError("data-damaged", f"{file} is not a Parquet file: {first_line(error)}") from None
            if twice := next((name for name in wanted_columns(names, text_field) if names.count(name) > 1), None):
                raise DataError(
                    "text-field-missing", f"{file} row 0: the file has two columns {twice!r}. Use one of each name"
                )
            columns = [_leaf(table.schema_arrow, name) for name in wanted_columns(names, text_field)]
            if length and not columns:
                raise no_document(names, text_field, f"{file} row 0: ")
            with table:
                each = file.stat().st_size // max(1, length)
                yield from _table_rows(file, table.iter_batches(ROWS_AT_ONCE, columns=columns), each)

    return DocumentRows(_origin(source, files), read, may_lack_nulls=True)


def _leaf(schema: Any, name: str) -> str:
    """Return the name by which a column is read: its path within another column where there is one, else the column."""
    top, *keys = name.split(".")
    if name in schema.names or not keys:
        return name
    kind = schema.field(top).type
    for key in keys:
        names = [field.name for field in kind.fields] if hasattr(kind, "get_field_index") else []
        if key not in names:
            return top
        kind = kind.field(key).type
    return name


def _table_rows(file: Path | str, batches: Iterator[Any], each: int) -> Iterator[Row]:
    """Yield the rows of batches of a table; each row is about `each` bytes."""
    number = 0
    while True:
        try:
            batch = next(batches, None)
        except Exception as error:  # such as a damaged page, which each codec reports differently
            raise DataError(
                "data-damaged", f"{file} row {number}, or one soon after it, is damaged: {first_line(error)}"
            ) from None
        if batch is None:
            return
        for row in _objects(file, batch, number):
            yield f"{file} row {number}", row, each
            number += 1


def _objects(file: Path | str, batch: Any, first: int) -> list[Any]:
    """Return the rows of a batch as objects; `first` is the number of its first row."""
    try:
        return _validate_rows(batch)
    except Exception:  # as text that is not UTF-8: the row is found one by one
        objects = []
        for index in range(batch.num_rows):
            try:
                objects += _validate_rows(batch.slice(index, 1))
            except Exception as error:
                raise DataError("data-damaged", f"{file} row {first + index} is damaged: {first_line(error)}") from None
        return objects


def _validate_rows(batch: Any) -> list[Any]:
    batch.validate(full=True)  # of a damaged file, offsets may lead anywhere in memory
    rows: list[Any] = batch.to_pylist()
    return rows


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
    # A column of a path within another is read whole.
    columns = [name if name in names else name.partition(".")[0] for name in wanted_columns(names, text_field)]
    if len(dataset) and not columns:
        raise no_document(names, text_field, f"hf:{path} row 0: ")
    chosen = dataset.with_format("arrow").select_columns(columns)

    def read() -> Iterator[Row]:
        yield from _table_rows(f"hf:{path}", chosen.iter(ROWS_AT_ONCE), size_bytes // max(1, len(chosen)))

    return DocumentRows(Origin(source, size_bytes, ("hf", fingerprint, str(len(dataset)))), read, may_lack_nulls=True)


def _origin(source: str, files: Sequence[Path]) -> Origin:
    sizes = [file.stat().st_size * (_UNPACKED if file.suffix in PACKED_ENDS else 1) for file in files]
    return Origin(source, sum(sizes), stamps(files))
