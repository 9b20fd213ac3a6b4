"""A folder of a pretrained model: its configuration, the tensors in its files, and a digest of both. No torch.

    config.json                      the configuration, with the family as `model_type`
    model.safetensors                all tensors in one file, or
    model.safetensors.index.json     the file of each tensor, of several

Only names, shapes and dtypes are read here: they stand at the head of a file, as JSON behind its length in 8 bytes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from samestep.errors import ModelError
from samestep.output import regular_files

CONFIG = "config.json"
ONE_FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
_LARGEST_HEAD = 10**8


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in a file."""

    path: Path
    shape: tuple[int, ...]
    dtype: str
    """The dtype in the words of safetensors, such as BF16."""


def _with_number(fields: dict[str, Any]) -> Any:
    """Return the number that JSON has no word for where fields stand for one, as `{"__float__": "Infinity"}` does; else the fields."""
    is_number = fields.keys() == {"__float__"} and fields["__float__"] in ("Infinity", "-Infinity", "NaN")
    return float(fields["__float__"]) if is_number else fields


def configuration(folder: Path) -> dict[str, Any]:
    """Return the fields in the configuration of a folder.

    Raises:
        ModelError: there is no such folder or configuration.
    """
    if not folder.is_dir():
        raise ModelError(
            f"model.source: there is no folder {folder}; a folder that transformers' save_pretrained wrote works, and so "
            "does a family by its name, such as hf:llama"
        )
    path = folder / CONFIG
    try:
        found = regular_files.read_json(path, _LARGEST_HEAD, _with_number)
    except FileNotFoundError:
        adapter = (
            " but an adapter, to be merged into its model first" if (folder / "adapter_config.json").exists() else ""
        )
        raise ModelError(
            f"model.source: {folder} has no {CONFIG}{adapter}; a folder that transformers' save_pretrained wrote works"
        ) from None
    except (OSError, ValueError) as error:
        raise ModelError(f"model.source: {path} cannot be read: {error}") from None
    if not isinstance(found, dict):
        raise ModelError(f"model.source: {path} holds no table of fields")
    return found


def tensors(folder: Path) -> dict[str, StoredTensor]:
    """Return the tensors in the files of a folder by their names.

    Raises:
        ModelError: there are no such files, or one is missing or damaged.
    """
    index = folder / INDEX
    if (folder / ONE_FILE).exists():
        return _in_file(folder / ONE_FILE)
    if not index.exists():
        raise ModelError(_without_weights(folder))
    try:
        files: Mapping[str, str] = regular_files.read_json(index, _LARGEST_HEAD)["weight_map"]
        names = sorted(set(files.values()), key=Path)
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        raise ModelError(f"model.source: {index} is damaged: it has no weight_map from tensors to files") from None
    found: dict[str, StoredTensor] = {}
    for name in names:
        if Path(name).name != name:
            raise ModelError(f"model.source: {index} names {name}, which is outside its folder")
        found |= _in_file(folder / name)
    if lost := next((name for name in files if name not in found), ""):
        raise ModelError(f"model.source: {index} says that {files[lost]} holds {lost}, and it does not")
    return {name: found[name] for name in files}


def digest_of(folder: Path) -> str:
    """Return a digest of the configuration of a folder, and of the names, shapes, dtypes and places of its tensors.

    Raises:
        ModelError: the folder lacks one of them.
    """
    heads = [[name, str(one.path.name), one.shape, one.dtype] for name, one in sorted(tensors(folder).items())]
    return xxhash.xxh3_128_hexdigest(json.dumps([configuration(folder), heads], sort_keys=True).encode())


def _in_file(path: Path) -> dict[str, StoredTensor]:
    """Return the tensors of one file.

    Raises:
        ModelError: it is missing or damaged.
    """
    try:
        with regular_files.open_regular(path) as file:
            size = int.from_bytes(file.read(8), "little")
            head: dict[str, Any] = regular_files.parse_json(file.read(min(size, _LARGEST_HEAD)))
        tables = {name: one for name, one in head.items() if name != "__metadata__"}
        found = {name: StoredTensor(path, tuple(one["shape"]), one["dtype"]) for name, one in tables.items()}
        end = 8 + size + max((one["data_offsets"][1] for one in tables.values()), default=0)
    except FileNotFoundError:
        raise ModelError(f"model.source: {path} is missing, and {INDEX} names it") from None
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        raise ModelError(f"model.source: {path} is no file of safetensors, or a damaged one") from None
    if path.stat().st_size != end:
        raise ModelError(f"model.source: {path} has {path.stat().st_size} bytes and should have {end}: copy it again")
    return found


def _without_weights(folder: Path) -> str:
    """Return that a folder has no weights that can be read, and what works."""
    pickles = sorted(path.name for pattern in _PICKLES for path in folder.glob(pattern))
    if pickles:
        return (
            f"model.source: {folder / pickles[0]} is a pickle, which can run any code when it is read, so samestep reads "
            f"none; {ONE_FILE}, which transformers' from_pretrained and then save_pretrained write from it, works"
        )
    others = sorted(path.name for path in folder.glob("*.safetensors"))
    there = f", only {', '.join(others[:3])}" if others else ""
    return f"model.source: {folder} has no weights{there}; {ONE_FILE} works, or {INDEX} and the files that it names"
