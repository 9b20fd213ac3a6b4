"""A stream of tokens cut into samples: encoded from text, or files of token ids mapped into memory (`token_files.py`).

Sample i of a stream with sequence length T is made of its tokens iT .. iT + T: the first T are `input_ids`, the last T are
`labels`, so that labels[t] is the token after input_ids[t]. Neighbouring samples share one token, and no token is predicted
twice.

    tokens:FILE       one file; a file with an index beside it, or the prefix that both have, is one of Megatron's
    tokens:FOLDER     its files *.bin and *.npy as one stream, in the order of their names; where some are named as training data,
                      those that are named as validation or test data are left out

The rows of an array of two dimensions follow one another, as files do; rows that are one token longer than T are the samples. A token
that is negative, or has no embedding, is refused where a sample with it is read.

Two texts come with every Python: `topics` is the language reference behind its `help()`, 0.5 MB of English and code; `stdlib` is the
source code of the standard library, about 10 MB. Both differ between versions of Python, so a result should name the version. Files
and topics are joined by a newline and are not kept separate; `documents.py` keeps documents separate.
"""

from __future__ import annotations

import importlib
import sysconfig
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from samestep.datasets.columns import Origin, Piece, Shards, columns, stamps
from samestep.datasets.files import (
    HELD_OUT_WORDS,
    TRAINED_WORDS,
    Split,
    existing,
    files_at,
    name_of_part,
    part_of,
    sorted_files,
    texts_of,
    without_held_out,
    words_of,
)
from samestep.datasets.token_files import index_at, read_indexed, read_token_file
from samestep.datasets.tokenizers import Tokenizer, encode_array, token_dtype
from samestep.errors import DataError
from samestep.job_tables import Convention, DataTable

_SUFFIXES = {".bin", ".npy"}
EXCLUDED_FOLDERS = frozenset({"site-packages", "dist-packages", "test", "tests", "idlelib", "__pycache__"})


@dataclass(frozen=True, eq=False)
class TokenStream:
    """A dataset of consecutive samples of a stream of tokens; `tokens` may be a file mapped into memory."""

    label_convention: ClassVar[Convention] = "next"

    tokens: npt.NDArray[Any] | Shards
    sequence_length: int
    stride: int = 0
    """The number of tokens from one sample to the next; 0 stands for the sequence length."""
    words: int | None = None
    """The number of tokens for which the model has embeddings, if it is known."""

    def __len__(self) -> int:
        return max(0, len(self.tokens) - 1 - self.sequence_length + self._stride) // self._stride

    @property
    def _stride(self) -> int:
        return self.stride or self.sequence_length

    def __getitem__(self, index: int, /) -> dict[str, Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        return {name: tensor[0] for name, tensor in self.read(np.array([index])).items()}

    def read(self, indices: npt.NDArray[np.int64]) -> dict[str, Tensor]:
        """Return `input_ids` and `labels`, both int64 [len(indices), sequence_length].

        Raises:
            DataError: a token has no embedding.
        """
        places = indices[:, None] * self._stride + np.arange(self.sequence_length + 1)
        ids = self.tokens[places].astype(np.int64)
        if ids.size and (ids.min() < 0 or (self.words is not None and ids.max() >= self.words)):
            raise self._refusal(places, ids)
        windows = torch.from_numpy(ids)
        return {"input_ids": windows[:, :-1].contiguous(), "labels": windows[:, 1:].contiguous()}

    def _refusal(self, places: npt.NDArray[np.int64], ids: npt.NDArray[np.int64]) -> DataError:
        """Return the error for the first of some tokens without an embedding."""
        are_bad, most = ids < 0, ""
        if self.words is not None:
            are_bad |= ids >= self.words
            most = f" to {self.words - 1}, the ids with an embedding,"
        return DataError(
            "token-ids",
            f"{_named_place(self.tokens, int(places[are_bad].min()))}. Use ids from 0{most}, or another data.dtype if it is wrong",
        )


def _named_place(tokens: npt.NDArray[Any] | Shards, index: int) -> str:
    """Return the file and the place of a token, and its id, as text."""
    array, at = tokens.found(index) if isinstance(tokens, Shards) else (tokens, index)
    base = array
    while isinstance(base.base, np.ndarray):
        base = base.base
    if (file := getattr(base, "filename", None)) is None:
        return f"token {index} of the data is {array[at]}"
    place = (array.ctypes.data - base.ctypes.data) // array.itemsize + at
    return f"{file} has the token id {array[at]} at token {place}"


def stream_part(
    tokens: npt.NDArray[Any] | Shards, data: DataTable, split: Split, *, are_samples: bool = False
) -> TokenStream:
    """Return the dataset of one part of a stream of tokens; with `are_samples` its samples have no token in common.

    Raises:
        DataError: the part is too short for one sample.
    """
    each = data.sequence_length + 1 if are_samples else 1
    part = part_of(len(tokens) // each, data.held_out, split)
    stream = TokenStream(
        tokens[part.start * each : part.stop * each], data.sequence_length, stride=each if are_samples else 0
    )
    if len(stream):
        return stream
    works = f"Set data.sequence_length = {len(part) - 1}" if len(part) > 1 else "Use more data"
    raise DataError(
        "data-too-short",
        f"{name_of_part(split, data.source)} has {len(part) * each} of {len(tokens)} tokens; data.sequence_length = "
        f"{data.sequence_length} needs {data.sequence_length + 1}. {works}",
    )


def tokens_part(path: str, data: DataTable, split: Split) -> TokenStream:
    """Return one part of a file of token ids, or of a folder of them as one stream, mapped into memory.

    Raises:
        DataError: a file is missing, empty, damaged, or not whole numbers; or the part is too short for one sample.
    """
    arrays = _arrays(path, data)
    are_samples = all(array.shape[1:] == (data.sequence_length + 1,) for array in arrays)
    flat = [array.reshape(-1) for array in arrays]
    return stream_part(flat[0] if len(flat) == 1 else Shards(flat), data, split, are_samples=are_samples)


def _arrays(path: str, data: DataTable) -> list[npt.NDArray[Any]]:
    """Return the arrays of a file or of a folder's files, in order."""
    source = f"tokens:{path}" if path else "tokens:"
    if (index := index_at(path)) is not None:
        return _of_index(index)
    place = existing(path, source)
    if not place.is_dir():
        return [read_token_file(place, data.dtype)]
    arrays: list[npt.NDArray[Any]] = []
    for file in _files_of_stream(place, source):
        indexed = index_at(str(file))
        arrays += _of_index(indexed) if indexed is not None else [read_token_file(file, data.dtype)]
    return arrays


def _of_index(index: Path) -> list[npt.NDArray[Any]]:
    read = read_indexed(index)
    return list(read.arrays) if isinstance(read, Shards) else [read]


def _files_of_stream(folder: Path, source: str) -> list[Path]:
    """Return the files of tokens below a folder, without those of validation and tests where others are for training.

    Raises:
        DataError: there are none, or an index has no file of tokens.
    """
    below = files_at(folder, source)
    files = [file for file in below if file.suffix.lower() in _SUFFIXES]
    if lost := next((file for file in below if file.suffix == ".idx" and file.with_suffix(".bin") not in files), None):
        raise DataError("data-missing", f"tokens:{lost} is an index, and there is no {lost.stem}.bin beside it")
    if not files:
        raise DataError(
            "data-missing",
            f"{source}: the folder holds no .bin and no .npy file. Use a file of another name by its own path",
        )
    return without_held_out(files, folder)


def topics() -> Iterator[str]:
    """Yield the topics of Python's help in the order of their names, or the standard library if this Python has none."""
    try:
        module = importlib.import_module("pydoc_data.topics")
    except ModuleNotFoundError:
        warnings.warn("this Python has no pydoc_data.topics; source = 'stdlib' is used instead", stacklevel=2)
        return stdlib()
    return (text for _, text in sorted(module.topics.items()))


def stdlib() -> Iterator[str]:
    """Yield the source files of the standard library in the order of their names, without its tests."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted_files(folder, "*.py"):
        of_build = path.name.startswith("_sysconfigdata")  # written when Python was built; holds this machine's paths
        if not of_build and EXCLUDED_FOLDERS.isdisjoint(path.relative_to(folder).parts):
            yield path.read_text(encoding="utf-8", errors="replace")


def text_tokens(path: str, tokenizer: Tokenizer, tokenizer_key: tuple[str, ...]) -> npt.NDArray[Any]:
    """Return the tokens of a text file, or of all files below a folder in the order of their names.

    Where every name says a part of a data set, those of validation and test data are left out.

    Raises:
        DataError: nothing is there, or a file is not UTF-8.
    """
    source = f"text:{path}" if path else "text:"
    place = existing(path, source)
    files = files_at(place, source)
    if all(words_of(file.relative_to(place)) & (TRAINED_WORDS | HELD_OUT_WORDS) for file in files if file != place):
        files = without_held_out(files, place)
    origin = Origin(source, sum(file.stat().st_size for file in files), ("text", *stamps(files), *tokenizer_key))
    return tokens_of((texts_of(file) for file in files), tokenizer, origin)


def tokens_of(documents: Iterable[Iterable[str]], tokenizer: Tokenizer, origin: Origin) -> npt.NDArray[Any]:
    """Return the tokens of documents joined by newlines; each part of a document is encoded separately."""

    def pieces() -> Iterator[tuple[int, Piece]]:
        newline = encode_array(tokenizer, "\n")
        for number, parts in enumerate(documents):
            if number:
                yield 1, {"tokens": newline}
            for text in parts:
                yield len(text), {"tokens": encode_array(tokenizer, text)}

    return columns(origin, {"tokens": token_dtype(tokenizer)}, pieces)["tokens"]
