"""Documents packed one after another into samples of equal length, with attention only within a document.

`jsonl:PATH` is a file, or a folder of `*.jsonl` files, with one JSON object a line, or one array of objects; `parquet:PATH` a file,
or a folder of `*.parquet` files; `hf:PATH` is a folder that Hugging Face's `Dataset.save_to_disk` wrote (of a `DatasetDict` its
split `train`). `rows.py` reads them, `conversations.py` says what a row may hold: a text, or a conversation, which `chat.py` writes.

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

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from samestep.datasets.batch import FileSamples
from samestep.datasets.columns import Piece, columns
from samestep.datasets.files import Split, name_of_part, part_of
from samestep.datasets.tokenizers import Tokenizer, token_dtype
from samestep.errors import DataError
from samestep.job_tables import Convention, DataTable
from samestep.wings.readers.chat import Counted, chat_documents, unwritten
from samestep.wings.readers.conversations import Conversation, Document, document_of, value_at
from samestep.wings.readers.rows import DocumentRows

NOT_COUNTED = -100
"""The label of a token that the loss does not count."""
_LOOKED_AT = 8
"""For each name, the number of rows in which the chat template is tested for leaving it out."""


@dataclass(frozen=True, eq=False)
class PackedDocuments(FileSamples):
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
    """The number in `starts` that stands for the first token."""
    remarks: tuple[str, ...] = ()
    """Remarks for the user about the source of the documents."""

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
    origin = replace(rows.origin, key=("packed", data.text_field, data.turns, *rows.origin.key, *tokenizer_key))
    dtypes = {"tokens": token_dtype(tokenizer), "labels": np.int32, "starts": np.int64, "remarks": np.uint8}
    corpus = columns(origin, dtypes, lambda: _pieces(rows, tokenizer, data))
    starts = corpus["starts"]
    part = part_of(len(starts), data.held_out, split)
    first, last = (int(starts[at]) if at < len(starts) else len(corpus["tokens"]) for at in (part.start, part.stop))
    packed = PackedDocuments(
        tokens=corpus["tokens"][first:last],
        labels=corpus["labels"][first:last],
        starts=starts[part.start : part.stop],
        sequence_length=data.sequence_length,
        first=first,
        remarks=tuple(bytes(corpus["remarks"]).decode().split("\n")[:-1]),
    )
    if len(packed):
        return packed
    length = len(packed.tokens)
    works = f"Set data.sequence_length = {length}" if length else "Use more data"
    raise DataError(
        "data-too-short",
        f"{name_of_part(split, data.source)} has {length} tokens in {len(part)} of {len(starts)} documents; "
        f"data.sequence_length = {data.sequence_length} needs as many. {works}",
    )


def _pieces(rows: DocumentRows, tokenizer: Tokenizer, data: DataTable) -> Iterator[tuple[int, Piece]]:
    """Yield the tokens and labels of each document, and where it begins; an empty one begins where the next does.

    Once for each name, a remark is yielded on content of the first rows that the chat template leaves out, and one on a
    `text_field` of the user's that no row has.
    """
    start, looked_at, noted = 0, Counter[str](), set[str]()
    is_read = data.text_field == DataTable().text_field
    for where, row, size_bytes in rows.read():
        try:
            document = document_of(row, data.text_field, may_lack_nulls=rows.may_lack_nulls)
            encoded = _encode_document(document, tokenizer, data)
            names = {name for name in _said(document) - noted if looked_at[name] < _LOOKED_AT}
            lost = unwritten(document, tokenizer, names) if isinstance(document, Conversation) else []
        except DataError as error:
            raise DataError(error.code, f"{where}: {error}") from None
        except RecursionError:
            raise DataError("data-damaged", f"{where}: lists and objects are nested too deeply") from None
        is_read = is_read or value_at(row, data.text_field) is not None
        looked_at.update(names)
        noted.update(lost)
        for name in lost:
            yield _remark(f"{where}: the tokenizer's chat template does not use {name}: what is learned lacks them")
        for runs in encoded:
            tokens, labels = _label_tokens(runs, tokenizer)
            yield size_bytes // len(encoded), {"tokens": tokens, "labels": labels, "starts": np.array([start])}
            start += len(tokens)
    if not is_read:
        yield _remark(f"data.text_field = {data.text_field!r} is in no row: only conversations are read")


def _remark(text: str) -> tuple[int, Piece]:
    return 0, {"remarks": np.frombuffer(f"{text}\n".encode("utf-8", "replace"), np.uint8)}


def _said(document: Document) -> set[str]:
    return document.said if isinstance(document, Conversation) else set()


def _encode_document(document: Document, tokenizer: Tokenizer, data: DataTable) -> list[Counted]:
    """Return the documents that a row's document becomes, each as runs of tokens that count in the loss or not."""
    if isinstance(document, Conversation):
        return chat_documents(document, tokenizer, data.turns)
    begin, end = list(tokenizer.begin_ids), [] if tokenizer.end_id is None else [tokenizer.end_id]
    if isinstance(document, str):
        return [[(begin, False), (tokenizer.encode(document), True), (end, True)]]
    prompt, completion = tokenizer.encode_pieces([document.prompt, document.completion])
    return [[(begin, False), (prompt, False), (completion, True), (end, True)]]


def _label_tokens(runs: Counted, tokenizer: Tokenizer) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return a document's input tokens, and the label of each."""
    ids = [token for run, _ in runs for token in run]
    counted = [token if is_counted else NOT_COUNTED for run, is_counted in runs for token in run]
    closed = tokenizer.end_id is not None and ids[-1:] == [tokenizer.end_id]
    tokens = ids[:-1] if closed else ids
    labels = counted[1:] if closed else [*counted[1:], NOT_COUNTED]
    return np.array(tokens, dtype=np.int64), np.array(labels[: len(tokens)], dtype=np.int64)
