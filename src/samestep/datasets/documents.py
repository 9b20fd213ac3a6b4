"""Documents packed one after another into samples of equal length, with attention only within a document.

`jsonl:PATH` is a file, or a folder of `*.jsonl` files, with one JSON object a line; `parquet:PATH` a file, or a folder of
`*.parquet` files; `hf:PATH` is a folder that Hugging Face's `Dataset.save_to_disk` wrote (of a `DatasetDict` its split
`train`). A line or row is either of

    {"text": "..."}                                                       `data.text_field` names the key
    {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}     see `chat.py`

The documents d become one stream, which is cut every T tokens into samples; an incomplete last sample is dropped:

    input_ids      d0 d0 d0 d0 | d0 d1 d1 d2        a document may continue in the next sample, without its beginning
    position_ids    0  1  2  3 |  0  0  1  0        positions restart with every document and every sample
    labels         d0 d0 d0 d0 |  e d1  e d2        the next token of the same document; at its last token the end id e,
                                                    or -100 (not counted) if the tokenizer has no end id

Given position_ids but neither attention_mask nor cache, transformers (from version 5) restricts attention to a document: it
starts a new one wherever positions do not rise by one (`masking_utils.find_packed_sequence_indices`). Its mask is not made:
each document is attended by itself (`building/packed_positions.py`). Recurrent and convolutional layers are not
restricted. The end id itself is never an input.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from samestep.datasets.chat import Counted, chat_tokens
from samestep.datasets.columns import Origin, Piece, columns, stamps
from samestep.datasets.files import existing, files_at
from samestep.datasets.split import Split, named, part_of
from samestep.datasets.tokenizers import Tokenizer, token_dtype
from samestep.errors import DataError, did_you_mean
from samestep.job_tables import Convention, DataTable

ROWS_AT_ONCE = 256
"""Rows of a Parquet file that are in memory together."""
NOT_COUNTED = -100
"""The label of a token that the loss does not count."""

Row = tuple[str, Any, int]
"""The file and line of a document, for errors, the object itself, and about how many bytes it took."""


@dataclass(frozen=True, slots=True)
class DocumentRows:
    """The documents of a source, read one by one, as often as they are asked for."""

    origin: Origin
    read: Callable[[], Iterator[Row]]


@dataclass(frozen=True, eq=False)
class PackedDocuments:
    """A dataset of packed documents, with samples of `sequence_length` tokens."""

    label_convention: ClassVar[Convention] = "next"

    tokens: npt.NDArray[Any]
    """The tokens of all documents, one after another."""
    labels: npt.NDArray[Any]
    """The label of each token: the next token of its document, or -100."""
    starts: npt.NDArray[np.int64]
    """Where each document begins, counted from `first`."""
    sequence_length: int
    first: int = 0
    """What `starts` counts for the first token."""

    def __len__(self) -> int:
        return len(self.tokens) // self.sequence_length

    def __getitem__(self, index: int, /) -> dict[str, Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        return {name: tensor[0] for name, tensor in self.read(np.array([index])).items()}

    def read(self, indices: npt.NDArray[np.int64]) -> dict[str, Tensor]:
        """Return `input_ids`, `labels` and `position_ids`, each int64 [len(indices), sequence_length]."""
        firsts = indices[:, None] * self.sequence_length
        places = firsts + np.arange(self.sequence_length)
        starts = self.starts[np.searchsorted(self.starts, places + self.first, side="right") - 1] - self.first
        return {
            "input_ids": torch.from_numpy(self.tokens[places].astype(np.int64)),
            "labels": torch.from_numpy(self.labels[places].astype(np.int64)),
            "position_ids": torch.from_numpy(places - np.maximum(starts, firsts)),
        }


def packed_part(
    rows: DocumentRows, tokenizer: Tokenizer, tokenizer_key: tuple[str, ...], data: DataTable, split: Split
) -> PackedDocuments:
    """Return the packed documents of one part of the data; the parts are split between documents.

    Raises:
        DataError: a document cannot be read, or all of them together are too short for one sample.
    """
    origin = replace(rows.origin, key=("packed", data.text_field, *rows.origin.key, *tokenizer_key))
    dtypes = {"tokens": token_dtype(tokenizer), "labels": np.int32, "starts": np.int64}
    whole = columns(origin, dtypes, lambda: _pieces(rows.read(), tokenizer, data.text_field))
    starts = whole["starts"]
    part = part_of(len(starts), data.held_out, split)
    first, last = (int(starts[at]) if at < len(starts) else len(whole["tokens"]) for at in (part.start, part.stop))
    packed = PackedDocuments(
        tokens=whole["tokens"][first:last],
        labels=whole["labels"][first:last],
        starts=starts[part.start : part.stop],
        sequence_length=data.sequence_length,
        first=first,
    )
    if len(packed):
        return packed
    length = len(packed.tokens)
    works = f"data.sequence_length = {length} works" if length else "more data is needed"
    raise DataError(
        f"{named(split, data.source)} has {length} tokens in {len(part)} of {len(starts)} documents; "
        f"data.sequence_length = {data.sequence_length} needs as many; {works}"
    )


def jsonl_rows(path: str) -> DocumentRows:
    """Return the lines of a file, or of a folder's `*.jsonl` files in the order of their names, without blank lines.

    Raises:
        DataError: nothing is there; reading a line that is not JSON.
    """
    source = f"jsonl:{path}" if path else "jsonl:"
    files = files_at(existing(path, source), source, "*.jsonl")

    def read() -> Iterator[Row]:
        for file in files:
            with file.open("rb") as lines:
                for number, line in enumerate(lines, start=1):
                    if line.strip():
                        where = f"{file}:{number}"
                        yield where, _parsed(line, where), len(line)

    return DocumentRows(_origin(source, files), read)


def parquet_rows(path: str) -> DocumentRows:
    """Return the rows of a Parquet file, or of a folder's `*.parquet` files in the order of their names.

    Raises:
        DataError: nothing is there, the library is missing, or a file is no Parquet file.
    """
    source = f"parquet:{path}" if path else "parquet:"
    files = files_at(existing(path, source), source, "*.parquet")
    try:
        from pyarrow import ArrowException, parquet  # noqa: PLC0415 - an extra
    except ModuleNotFoundError:
        raise DataError(f"{source} needs the library pyarrow: pip install 'samestep[hf-data]'") from None

    def read() -> Iterator[Row]:
        for file in files:
            try:
                opened = parquet.ParquetFile(file)
                each = file.stat().st_size // max(1, opened.metadata.num_rows)
                number = 0
                for group in opened.iter_batches(ROWS_AT_ONCE):
                    for row in group.to_pylist():
                        yield f"{file} row {number}", row, each
                        number += 1
            except ArrowException as error:
                raise DataError(f"{file} is not a Parquet file: {str(error).strip().splitlines()[0]}") from None

    return DocumentRows(_origin(source, files), read)


def hf_rows(path: str) -> DocumentRows:
    """Return the rows of a folder that `Dataset.save_to_disk` wrote.

    Raises:
        DataError: the library is missing, or the folder holds no such dataset.
    """
    source = f"hf:{path}" if path else "hf:"
    place = existing(path, source)
    try:
        from datasets import load_from_disk  # noqa: PLC0415 - an extra, and slow to import
    except ModuleNotFoundError:
        raise DataError(f"{source} needs the library datasets: pip install 'samestep[hf-data]'") from None
    try:
        dataset = load_from_disk(str(place))
    except (OSError, ValueError, KeyError) as error:
        raise DataError(
            f"hf:{path} is not a dataset written by save_to_disk ({str(error).strip().splitlines()[0]}); "
            "load_dataset(NAME).save_to_disk(FOLDER) makes one"
        ) from None
    if isinstance(dataset, dict):
        if "train" not in dataset:
            raise DataError(
                f"hf:{path} has no split 'train' but {', '.join(dataset)}; hf:{place / next(iter(dataset))} works"
            )
        dataset = dataset["train"]
    size_bytes = int(dataset.data.nbytes)

    def read() -> Iterator[Row]:
        for index in range(len(dataset)):
            yield f"hf:{path} row {index}", dataset[index], size_bytes // len(dataset)

    return DocumentRows(Origin(source, size_bytes, ("hf", dataset._fingerprint, str(len(dataset)))), read)


def _origin(source: str, files: Sequence[Path]) -> Origin:
    return Origin(source, sum(file.stat().st_size for file in files), stamps(files))


def _parsed(line: bytes, where: str) -> Any:
    try:
        return json.loads(line)
    except json.JSONDecodeError as error:
        raise DataError(f"{where}: not JSON: {error.msg} at column {error.colno}") from None
    except UnicodeDecodeError as error:
        raise DataError(f"{where}: not UTF-8 text (byte {error.start} of the line)") from None


def _pieces(rows: Iterable[Row], tokenizer: Tokenizer, text_field: str) -> Iterator[tuple[int, Piece]]:
    """Yield the tokens and labels of each document, and where it begins; an empty one begins where the next does."""
    start = 0
    for where, row, size_bytes in rows:
        try:
            runs = _runs(row, tokenizer, text_field)
        except DataError as error:
            raise DataError(f"{where}: {error}") from None
        tokens, labels = _labelled(runs, tokenizer)
        yield size_bytes, {"tokens": tokens, "labels": labels, "starts": np.array([start])}
        start += len(tokens)


def _runs(row: Any, tokenizer: Tokenizer, text_field: str) -> Counted:
    """Return the tokens of one document as runs that are counted or not."""
    if not isinstance(row, Mapping):
        raise DataError(f'a line must be an object such as {{"{text_field}": "..."}}, not {type(row).__name__}')
    if isinstance(row.get(text_field), str):
        end = [] if tokenizer.end_id is None else [tokenizer.end_id]
        return [(tokenizer.encode(row[text_field]), True), (end, True)]
    if text_field not in row and "messages" in row:
        return chat_tokens(row["messages"], tokenizer)
    if text_field in row:
        raise DataError(f"{text_field!r} is {type(row[text_field]).__name__}, not text")
    keys = ", ".join(map(repr, row)) or "no keys"
    hint = did_you_mean(text_field, row)
    raise DataError(f"neither {text_field!r} nor 'messages'{hint}; it has {keys}; data.text_field names the text's key")


def _labelled(runs: Counted, tokenizer: Tokenizer) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return a document's input tokens, and the label of each."""
    begin, end = tokenizer.begin_id, tokenizer.end_id
    ids = [token for run, _ in runs for token in run]
    counted = [token if kept else NOT_COUNTED for run, kept in runs for token in run]
    if begin is not None and ids[:1] != [begin]:  # a chat template may have written it already
        ids, counted = [begin, *ids], [NOT_COUNTED, *counted]
    closed = end is not None and ids[-1:] == [end]
    tokens = ids[:-1] if closed else ids
    labels = counted[1:] if closed else [*counted[1:], NOT_COUNTED]
    return np.array(tokens, dtype=np.int64), np.array(labels[: len(tokens)], dtype=np.int64)
