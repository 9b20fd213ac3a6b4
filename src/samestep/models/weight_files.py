"""A folder of a pretrained model: its configuration, the tensors in its files, and a digest of both. No torch.

    config.json                      the configuration, with the family as `model_type`
    model.safetensors                all tensors in one file, or
    model.safetensors.index.json     the file of each tensor, of several

Only names, shapes and dtypes are read here: they stand at the head of a file, as JSON behind its length in 8 bytes.
"""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from samestep.errors import ModelError
from samestep.models.presets import PRESETS
from samestep.output import durable_files

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
    _check_exists(folder)
    path = folder / CONFIG
    try:
        configuration = durable_files.read_json(path, _LARGEST_HEAD, _with_number)
    except FileNotFoundError:
        adapter = (
            " but an adapter, to be merged into its model first" if (folder / "adapter_config.json").exists() else ""
        )
        raise ModelError(
            "model-folder-missing",
            f"model.source: {folder} has no {CONFIG}{adapter}. Use a folder that transformers' save_pretrained wrote",
        ) from None
    except (OSError, ValueError) as error:
        raise ModelError("model-folder-damaged", f"model.source: {path} cannot be read: {error}") from None
    if not isinstance(configuration, dict):
        raise ModelError("model-folder-damaged", f"model.source: {path} holds no table of fields")
    return configuration


def _check_exists(folder: Path) -> None:
    if not folder.is_dir():
        near = difflib.get_close_matches(folder.name.lower(), PRESETS, n=1, cutoff=0.6)
        planned = f" To plan, use preset:{near[0]}." if near else ""
        raise ModelError(
            "model-folder-missing",
            f"model.source: there is no folder {folder}. samestep downloads nothing: use a folder that transformers' save_pretrained "
            f"wrote, or a family such as hf:llama.{planned}",
        )


def tensors(folder: Path) -> dict[str, StoredTensor]:
    """Return the tensors in the files of a folder by their names.

    Raises:
        ModelError: there are no such files, or one is missing or damaged.
    """
    _check_exists(folder)
    index = folder / INDEX
    if (folder / ONE_FILE).exists():
        return _in_file(folder / ONE_FILE)
    if not index.exists():
        raise _without_weights(folder)
    try:
        files: Mapping[str, str] = durable_files.read_json(index, _LARGEST_HEAD)["weight_map"]
        names = sorted(set(files.values()), key=Path)
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        raise ModelError(
            "model-folder-damaged", f"model.source: {index} is damaged: it has no weight_map from tensors to files"
        ) from None
    stored_tensors: dict[str, StoredTensor] = {}
    for name in names:
        if Path(name).name != name:
            raise ModelError("model-folder-damaged", f"model.source: {index} names {name}, which is outside its folder")
        stored_tensors |= _in_file(folder / name)
    if lost := next((name for name in files if name not in stored_tensors), ""):
        raise ModelError(
            "model-folder-damaged", f"model.source: {index} states that {files[lost]} holds {lost}, and it does not"
        )
    return {name: stored_tensors[name] for name in files}


def digest_of(folder: Path) -> str:
    """Return a digest of the configuration of a folder, and of the names, shapes, dtypes and places of its tensors.

    Raises:
        ModelError: the folder lacks one of them.
    """
    heads = [
        [name, str(stored.path.name), stored.shape, stored.dtype] for name, stored in sorted(tensors(folder).items())
    ]
    return xxhash.xxh3_128_hexdigest(json.dumps([configuration(folder), heads], sort_keys=True).encode())


def _in_file(path: Path) -> dict[str, StoredTensor]:
    """Return the tensors of one file.

    Raises:
        ModelError: it is missing or damaged.
    """
    try:
        with durable_files.open_regular(path) as file:
            size = int.from_bytes(file.read(8), "little")
            head: dict[str, Any] = durable_files.parse_json(file.read(min(size, _LARGEST_HEAD)))
        tables = {name: entry for name, entry in head.items() if name != "__metadata__"}
        tensors = {name: StoredTensor(path, tuple(table["shape"]), table["dtype"]) for name, table in tables.items()}
        for name, stored in tensors.items():
            begin, end = tables[name]["data_offsets"]
            bits = int("".join(filter(str.isdigit, stored.dtype.partition("_")[0])) or 8)  # 8 of BOOL
            if min(stored.shape, default=0) < 0 or math.prod(stored.shape) * bits != 8 * (end - begin):
                raise ValueError("a shape that does not fit its bytes")
        end = 8 + size + max((table["data_offsets"][1] for table in tables.values()), default=0)
    except FileNotFoundError:
        raise ModelError("model-folder-damaged", f"model.source: {path} is missing, and {INDEX} names it") from None
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        raise ModelError(
            "model-folder-damaged", f"model.source: {path} is not a file of safetensors, or a damaged one"
        ) from None
    if path.stat().st_size != end:
        raise ModelError(
            "model-folder-damaged",
            f"model.source: {path} has {path.stat().st_size} bytes and should have {end}: copy it again",
        )
    return tensors


def _without_weights(folder: Path) -> ModelError:
    """Return that a folder has no weights that can be read, and what works."""
    pickles = sorted(path.name for pattern in _PICKLES for path in folder.glob(pattern))
    if pickles:
        return ModelError(
            "model-folder-without-weights",
            f"model.source: {folder / pickles[0]} is a pickle, which can run any code when it is read, so samestep reads "
            f"none. Use {ONE_FILE}, which transformers' from_pretrained and then save_pretrained write from it",
        )
    others = sorted(path.name for path in folder.glob("*.safetensors"))
    there = f", only {', '.join(others[:3])}" if others else ""
    text = f"model.source: {folder} has no weights{there}. Use {ONE_FILE}, or {INDEX} and the files that it names"
    return ModelError("model-folder-without-weights", text)
