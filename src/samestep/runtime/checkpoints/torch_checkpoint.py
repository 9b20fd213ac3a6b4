"""A checkpoint of `torch.distributed.checkpoint`: read without running any code in it, and written tensor by tensor.

    .metadata        a pickle: the chunks of each tensor, and where each of them lies in the files
    __0_0.distcp     chunks, one after another, each as torch.save writes a tensor

Whoever may write a pickle may name any function in it. So the metadata is read by an unpickler that makes plain records of
torch's classes of metadata, known by name, and refuses every other name; a chunk is read with `weights_only`. Chunks must lie
in files of the folder, and cover each tensor exactly once.

A pickle may also be small and make a value that is huge to print or to hash, such as a tuple that holds itself twice, fifty
times over. So keys of dicts must be of the kinds that metadata has, and types are looked at before a text is made.
"""

from __future__ import annotations

import io
import math
import os
import pickle
import warnings
import zipfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save

from samestep.errors import CheckpointError
from samestep.output import durable_files

NAME = ".metadata"
_LARGEST_BYTES = 1 << 30
_PREFIXES = ("module.", "_orig_mod.")
"""The prefixes of DistributedDataParallel and torch.compile in the names of a model's tensors."""


@dataclass(frozen=True, slots=True)
class TorchChunk:
    """A part of a tensor, in a file."""

    path: Path
    start_bytes: int
    size_bytes: int
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TorchEntry:
    """A tensor in a checkpoint of torch's, and its chunks."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: tuple[TorchChunk, ...]

    def read(self) -> Tensor:
        """Return the whole tensor.

        Raises:
            CheckpointError: a file is damaged, or holds something else.
        """
        tensor = torch.empty(self.shape, dtype=self.dtype)
        for chunk in self.chunks:
            window = tuple(slice(start, start + size) for start, size in zip(chunk.offsets, chunk.sizes, strict=True))
            tensor[window] = self._read_chunk(chunk)
        return tensor

    def _read_chunk(self, chunk: TorchChunk) -> Tensor:
        try:
            with durable_files.open_regular(chunk.path) as file:
                file.seek(chunk.start_bytes)
                stored = torch.load(
                    _open_uncompressed(file.read(chunk.size_bytes)), map_location="cpu", weights_only=True
                )
        except Exception as error:  # of bytes that anybody has written
            raise CheckpointError(
                "checkpoint-damaged", f"{chunk.path} is damaged where {self.name} begins: {_line(error)}"
            ) from None
        if not isinstance(stored, Tensor) or tuple(stored.shape) != chunk.sizes or stored.dtype != self.dtype:
            raise CheckpointError(
                "checkpoint-other-model", f"{chunk.path} has no part of {self.name} with shape {chunk.sizes}"
            )
        return stored


def entries(folder: Path, wanted: Iterable[str]) -> dict[str, TorchEntry]:
    """Return the tensors of the state dict, among those in a checkpoint, that holds all of the `wanted` names.

    Raises:
        CheckpointError: none of them does, it holds something that is no tensor, or the checkpoint is damaged.
    """
    metadata = _metadata(folder)
    try:
        kinds, paths = metadata.state_dict_metadata, getattr(metadata, "planner_data", None) or {}
        places = {(_text(key.fqn), _offsets(key)): place for key, place in metadata.storage_data.items()}
        groups: dict[tuple[Any, ...], dict[str, str]] = {}
        for name in kinds:
            *above, last = map(_step, paths.get(name, (_text(name),)))
            groups.setdefault(tuple(above), {})[_bare(str(last))] = name
        fits = [above for above, names in groups.items() if names.keys() >= set(wanted)]
        if not fits:
            best = max(groups.values(), key=lambda names: len(names.keys() & set(wanted)), default={})
            first = next(name for name in wanted if name not in best)
            raise CheckpointError("checkpoint-other-model", f"{folder} holds another model's weights: it lacks {first}")
        chosen = ("model",) if ("model",) in fits else fits[0]
        if len(fits) > 1 and chosen != ("model",):
            told = " and ".join(".".join(map(str, above)) or "its top" for above in fits)
            raise CheckpointError(
                "checkpoint-other-model",
                f"{folder} holds the weights of this model in {told}. Use one of them, or {{'model': ...}}",
            )
        return {name: _entry(folder, stored, kinds[stored], places) for name, stored in groups[chosen].items()}
    except (AttributeError, KeyError, TypeError, ValueError, IndexError, OSError) as error:
        raise CheckpointError("checkpoint-damaged", f"{folder / NAME} is damaged: {_line(error)}") from None


def _entry(folder: Path, name: str, kind: Any, places: Mapping[tuple[str, tuple[int, ...]], Any]) -> TorchEntry:
    if not isinstance(kind, _Tensors):
        raise CheckpointError(
            "checkpoint-other-model", f"{folder} holds {name}, which is not a tensor. Use a state dict of tensors alone"
        )
    shape = _sizes(kind.size)
    chunks = []
    for chunk in kind.chunks:
        place = places[name, _sizes(chunk.offsets)]
        path = folder / _text(place.relative_path)
        if path.name != place.relative_path or path.is_symlink():
            raise CheckpointError(
                "checkpoint-damaged",
                f"{folder / NAME} names {place.relative_path:.80}, which is not a file in its folder",
            )
        if getattr(place, "transform_descriptors", None):
            raise CheckpointError(
                "checkpoint-other-model",
                f"{folder} has {name} in a transformed form. Use a checkpoint that is saved without transforms",
            )
        start, size = _sizes((place.offset, place.length))
        if start + size > path.stat().st_size:
            raise CheckpointError("checkpoint-damaged", f"{path} ends before {name} does")
        chunks.append(TorchChunk(path, start, size, _sizes(chunk.offsets), _sizes(chunk.sizes)))
    if not isinstance(kind.properties.dtype, torch.dtype):
        raise TypeError(f"{name} has no dtype")
    if not _cover(chunks, shape):
        raise CheckpointError("checkpoint-damaged", f"{folder / NAME} gives {name} chunks that do not cover it once")
    return TorchEntry(name, shape, kind.properties.dtype, tuple(chunks))


def _cover(chunks: list[TorchChunk], shape: tuple[int, ...]) -> bool:
    """Return whether chunks are within a shape, do not overlap, and leave nothing out.

    They are swept along the dimension in which most of them begin at different places: a chunk is compared with those that have
    not ended where it begins. For chunks of a grid that is less than the number of chunks to the power 1.5.
    """
    if sum(math.prod(chunk.sizes) for chunk in chunks) != math.prod(shape):
        return False
    boxes = [[(start, start + size) for start, size in zip(c.offsets, c.sizes, strict=True)] for c in chunks]
    if not all(len(box) == len(shape) and all(b <= n for (_, b), n in zip(box, shape, strict=True)) for box in boxes):
        return False
    boxes = [box for box in boxes if all(a < b for a, b in box)]
    if not shape:
        return len(boxes) <= 1
    along = max(range(len(shape)), key=lambda dim: len({box[dim][0] for box in boxes}))
    going_on: list[list[tuple[int, int]]] = []
    for box in sorted(boxes, key=lambda box: box[along][0]):
        going_on = [other for other in going_on if other[along][1] > box[along][0]]
        if any(all(max(a, c) < min(b, d) for (a, b), (c, d) in zip(box, other, strict=True)) for other in going_on):
            return False
        going_on.append(box)
    return True


def _open_uncompressed(data: bytes) -> io.BytesIO:
    """Return the bytes of a tensor to read; torch.save compresses nothing, and a compressed one could be of any size.

    Raises:
        ValueError: they are compressed.
    """
    file = io.BytesIO(data)
    if zipfile.is_zipfile(file):
        with zipfile.ZipFile(file) as opened:
            if sum(entry.file_size for entry in opened.infolist()) > len(data):
                raise ValueError("it is compressed")
    file.seek(0)
    return file


def _text(value: Any) -> str:
    if type(value) is not str:
        raise TypeError(f"a {type(value).__name__} in the place of a name")
    return value


def _step(value: Any) -> str | int:
    """Return a step of the path to a tensor: the key of a dict, or the place in a list."""
    return value if type(value) is int else _text(value)


def _offsets(key: Any) -> tuple[int, ...]:
    offset = getattr(key, "offset", None)
    return () if offset is None else _sizes(offset)


def _sizes(values: Any) -> tuple[int, ...]:
    if type(values) not in (tuple, list) or not all(type(value) is int and 0 <= value < 1 << 62 for value in values):
        raise ValueError("sizes that are not a list of numbers")
    return tuple(values)


def _bare(name: str) -> str:
    """Return a name without the prefixes of wrappers."""
    for prefix in _PREFIXES:
        name = name.removeprefix(prefix)
    return name


def _line(error: Exception) -> str:
    return f"{type(error).__name__} {error}".partition("\n")[0][:200]


# -- the metadata ----------------------------------------------------------------------------------


class _TorchObject:
    """An object of torch's metadata: its attributes and nothing else."""

    def __init__(self, *args: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            vars(self).update(state)
        elif isinstance(state, tuple) and state:  # of TensorProperties, the dtype first
            self.dtype = state[0]


class _Tensors(_TorchObject):
    """The metadata of an entry that is a tensor."""

    size: Any
    chunks: Any
    properties: Any


_METADATA = "torch.distributed.checkpoint.metadata"
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
        torch.uint8, torch.bool, torch.float8_e4m3fn, torch.float8_e5m2,
    )
}  # fmt: skip
_KNOWN: dict[tuple[str, str], Any] = {
    **{
        (_METADATA, name): _TorchObject
        for name in ("Metadata", "TensorProperties", "ChunkStorageMetadata", "MetadataIndex")
    },
    **{(_METADATA, name): _TorchObject for name in ("BytesStorageMetadata", "StorageMeta")},
    (_METADATA, "TensorStorageMetadata"): _Tensors,
    (_METADATA, "_MEM_FORMAT_ENCODING"): lambda value: value,
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): _TorchObject,
    ("torch", "Size"): lambda sizes=(): tuple(sizes),
    ("torch.serialization", "_get_layout"): lambda name: name,
    **{("torch", name): dtype for name, dtype in _DTYPES.items()},
    **{("pathlib", kind): lambda *parts: "/".join(parts) for kind in ("PosixPath", "WindowsPath", "Path")},
    **{("pathlib._local", kind): lambda *parts: "/".join(parts) for kind in ("PosixPath", "WindowsPath", "Path")},
}
"""The names that metadata may contain, each with its counterpart here."""


_InPython: Any = (
    pickle._Unpickler
)  # the variant in Python, in which the keys of a dict can be checked (Python 3.11 to 3.13)


class _Unpickler(_InPython):  # type: ignore[misc]
    """Makes records of torch's metadata, and nothing else."""

    dispatch = {  # noqa: RUF012
        code: read
        for code, read in _InPython.dispatch.items()
        if code not in (pickle.EMPTY_SET[0], pickle.ADDITEMS[0], pickle.FROZENSET[0])
    }

    def find_class(self, module: str, name: str) -> Any:
        """Return the counterpart of a name.

        Raises:
            UnpicklingError: it is none of torch's metadata.
        """
        if (module, name) not in _KNOWN:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which is not a class of metadata")
        return _KNOWN[module, name]

    def load_setitem(self) -> None:
        _check_key(self.stack[-2])
        super().load_setitem()

    def load_setitems(self) -> None:
        for key in self.stack[::2]:
            _check_key(key)
        super().load_setitems()

    def load_dict(self) -> None:
        for key in self.stack[::2]:
            _check_key(key)
        super().load_dict()

    dispatch[pickle.SETITEM[0]] = load_setitem
    dispatch[pickle.SETITEMS[0]] = load_setitems
    dispatch[pickle.DICT[0]] = load_dict


def _check_key(key: Any) -> None:
    """Refuse a key of a dict that is none of metadata; others may take very long to hash."""
    if type(key) not in (str, int, _TorchObject):
        raise pickle.UnpicklingError(f"it has a {type(key).__name__} for a key")


def _metadata(folder: Path) -> Any:
    path = folder / NAME
    try:
        with durable_files.open_regular(path) as file:
            if os.fstat(file.fileno()).st_size > _LARGEST_BYTES:
                raise ValueError("it is larger than any metadata")
            return _Unpickler(file).load()
    except Exception as error:  # of bytes that anybody has written
        raise CheckpointError(
            "checkpoint-damaged", f"{path} is not metadata of torch.distributed.checkpoint: {_line(error)}"
        ) from None


class _OneByOne(DefaultSavePlanner):
    """Creates each tensor when it is written; planning uses tensors without storage."""

    def __init__(self, kinds: Mapping[str, Tensor], value: Callable[[str], Tensor]) -> None:
        super().__init__()
        self._kinds, self._value = kinds, value

    def lookup_object(self, index: Any) -> Any:
        """Return the tensor of an entry."""
        name = index.fqn.removeprefix("model.")
        return self._value(name).detach().to(self._kinds[name].dtype).contiguous()


def write(model: nn.Module, value: Callable[[str], Tensor], out: Path, dtype: torch.dtype) -> None:
    """Write a model's tensors below `model` into a new folder; those with floating numbers in `dtype`.

    `torch.distributed.checkpoint.load({"model": model.state_dict()}, checkpoint_id=out)` reads them.

    Raises:
        OSError: the folder cannot be written.
    """
    kinds = {
        name: torch.empty_like(tensor, dtype=dtype if tensor.is_floating_point() else tensor.dtype, device="meta")
        for name, tensor in model.state_dict().items()
    }
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*assuming.*single process")
        planner = _OneByOne(kinds, value)
        save({"model": kinds}, storage_writer=FileSystemWriter(out), planner=planner, no_dist=True)
