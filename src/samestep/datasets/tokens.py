"""A stream of tokens cut into samples: encoded from text, or files of token ids mapped into memory (`token_files.py`).

Sample i of a stream with sequence length T is made of its tokens iT .. iT + T: the first T are `input_ids`, the last T are
`labels`, so that labels[t] is the token after input_ids[t]. Neighbouring samples share one token, and no token is predicted
twice.

    tokens:FILE       one file; a file with an index beside it, or the prefix that both have, is one of Megatron's
    tokens:FOLDER     its files *.bin and *.npy as one stream, in the order of their names; where some are named as training data,
                      those that are named as validation or test data are left out
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from samestep.datasets.columns import Shards
from samestep.datasets.files import existing, files_at
from samestep.datasets.split import HELD_OUT_WORDS, TRAINED_WORDS, Split, named, part_of
from samestep.datasets.token_files import index_at, read_indexed, read_token_file
from samestep.errors import DataError
from samestep.job_tables import Convention, DataTable

_SUFFIXES = {".bin", ".npy"}


@dataclass(frozen=True, eq=False)
class TokenStream:
    """A dataset of consecutive samples of a stream of tokens; `tokens` may be a file mapped into memory."""

    label_convention: ClassVar[Convention] = "next"

    tokens: npt.NDArray[Any] | Shards
    sequence_length: int

    def __len__(self) -> int:
        return max(0, len(self.tokens) - 1) // self.sequence_length

    def __getitem__(self, index: int, /) -> dict[str, Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        return {name: tensor[0] for name, tensor in self.read(np.array([index])).items()}

    def read(self, indices: npt.NDArray[np.int64]) -> dict[str, Tensor]:
        """Return `input_ids` and `labels`, both int64 [len(indices), sequence_length]."""
        places = indices[:, None] * self.sequence_length + np.arange(self.sequence_length + 1)
        windows = torch.from_numpy(self.tokens[places].astype(np.int64))
        return {"input_ids": windows[:, :-1].contiguous(), "labels": windows[:, 1:].contiguous()}


def stream_part(tokens: npt.NDArray[Any] | Shards, data: DataTable, split: Split) -> TokenStream:
    """Return the dataset of one part of a stream of tokens.

    Raises:
        DataError: the part is too short for one sample.
    """
    part = part_of(len(tokens), data.held_out, split)
    stream = TokenStream(tokens[part.start : part.stop], data.sequence_length)
    if len(stream):
        return stream
    works = f"data.sequence_length = {len(part) - 1} works" if len(part) > 1 else "more data is needed"
    raise DataError(
        f"{named(split, data.source)} has {len(part)} of {len(tokens)} tokens; data.sequence_length = "
        f"{data.sequence_length} needs {data.sequence_length + 1}; {works}"
    )


def read_tokens(path: str, data: DataTable) -> npt.NDArray[Any] | Shards:
    """Return a file of token ids, or a folder of them as one stream, mapped into memory.

    Raises:
        DataError: a file is missing, empty, damaged, or not whole numbers in one dimension.
    """
    source = f"tokens:{path}" if path else "tokens:"
    if (index := index_at(path)) is not None:
        return read_indexed(index)
    place = existing(path, source)
    if not place.is_dir():
        return read_token_file(place, data.dtype)
    arrays: list[npt.NDArray[Any]] = []
    for file in _files_of_stream(place, source):
        indexed = index_at(str(file))
        read = read_indexed(indexed) if indexed is not None else read_token_file(file, data.dtype)
        arrays += read.arrays if isinstance(read, Shards) else [read]
    return Shards(arrays)


def _files_of_stream(folder: Path, source: str) -> list[Path]:
    """Return the files of tokens below a folder, without those of validation and tests where others are for training.

    Raises:
        DataError: there are none, or an index has no file of tokens.
    """
    below = files_at(folder, source)
    found = [file for file in below if file.suffix.lower() in _SUFFIXES]
    if lost := next((file for file in below if file.suffix == ".idx" and file.with_suffix(".bin") not in found), None):
        raise DataError(f"tokens:{lost} is an index, and there is no {lost.stem}.bin beside it")
    if not found:
        raise DataError(
            f"{source}: the folder holds no .bin and no .npy file; a file of another name works by its own path"
        )
    words = {file: _words_of(file.relative_to(folder)) for file in found}
    if any(TRAINED_WORDS & one for one in words.values()):
        found = [file for file in found if TRAINED_WORDS & words[file] or not HELD_OUT_WORDS & words[file]]
    return found


def _words_of(path: Path) -> set[str]:
    return set(re.split(r"[^a-z]+", path.with_suffix("").as_posix().lower()))
