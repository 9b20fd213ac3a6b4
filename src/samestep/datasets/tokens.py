"""A stream of tokens cut into samples: encoded from text, or a file of token ids mapped into memory.

Sample i of a stream with sequence length T is made of its tokens iT .. iT + T: the first T are `input_ids`, the last T are
`labels`, so that labels[t] is the token after input_ids[t]. Neighbouring samples share one token, and no token is predicted
twice. A file of tokens holds plain numbers of `data.dtype` in this machine's byte order, as nanoGPT writes them, or is a
one-dimensional `.npy` file, which names its own dtype. A folder of such files is one stream, in the order of their names.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from samestep.datasets.columns import Shards
from samestep.datasets.files import existing, files_at
from samestep.datasets.split import Split, named, part_of
from samestep.errors import DataError
from samestep.job_tables import Convention, DataTable


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
        DataError: a file is missing, empty, or not whole numbers in one dimension.
    """
    source = f"tokens:{path}" if path else "tokens:"
    place = existing(path, source)
    if place.is_dir():
        return Shards([_read_file(file, data.dtype) for file in files_at(place, source)])
    return _read_file(place, data.dtype)


def _read_file(place: Path, dtype: str) -> npt.NDArray[Any]:
    if place.suffix == ".npy":
        return _read_npy(str(place))
    size_bytes = place.stat().st_size
    if not size_bytes:
        raise DataError(f"tokens:{place} is empty")
    if size_bytes % np.dtype(dtype).itemsize:
        raise DataError(
            f"tokens:{place} has {size_bytes} bytes, which is no whole number of {dtype} tokens; "
            "data.dtype must be what the file was written with"
        )
    return np.memmap(place, dtype=np.dtype(dtype), mode="r")


def _read_npy(path: str) -> npt.NDArray[Any]:
    try:
        tokens = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError, OSError) as error:
        raise DataError(f"tokens:{path} is not a .npy array: {error}") from None
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        raise DataError(f"tokens:{path} is {tokens.dtype} {list(tokens.shape)}; whole numbers in one dimension work")
    return tokens
