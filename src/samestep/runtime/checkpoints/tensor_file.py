"""Writing a file of tensors in the format of safetensors, piece by piece and hashed on the way.

    8 bytes: length of the head | head: JSON, padded with blanks to 8 bytes | the tensors' bytes, one after another
    head: {NAME: {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}, ...}

safetensors' own writer gives no digest, so a second pass would have to read the file again. Its readers read these files.
Source: https://huggingface.co/docs/safetensors, "Format".
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from samestep.errors import CheckpointError
from samestep.output import durable_files

_WORDS = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.complex64: "C64",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint64: "U64", torch.uint32: "U32", torch.uint16: "U16", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip


def write(path: Path, tensors: Mapping[str, Tensor]) -> str:
    """Write tensors on the host to a new file, wait until it is on disk, and return its digest.

    Raises:
        CheckpointError: the format has no such dtype.
        OSError: the file cannot be written.
    """
    # Wide elements first, so that each tensor's bytes are aligned for its own dtype.
    names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    head: dict[str, object] = {}
    at = 0
    for name in names:
        tensor = tensors[name]
        if tensor.dtype not in _WORDS:
            raise CheckpointError(f"{name} has dtype {tensor.dtype}, which no file of safetensors holds")
        head[name] = {
            "dtype": _WORDS[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [at, at + tensor.nbytes],
        }
        at += tensor.nbytes
    text = json.dumps(head, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)

    def pieces() -> Iterator[bytes | memoryview]:
        yield len(text).to_bytes(8, "little")
        yield text
        for name in names:
            if tensors[name].numel():
                yield tensors[name].contiguous().flatten().view(torch.uint8).numpy().data

    return durable_files.write_new(path, pieces())
