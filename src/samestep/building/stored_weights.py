"""The values of a model's tensors in the files of a folder, read by rows where a file stores a tensor unchanged.

Transformers' mapping says which tensors of the files make up a tensor of the model: it renames them, and fuses, splits
or permutes some. The mapping is followed once with shapes alone; a value is read and converted when it is asked for.

    as it is     only the rows that are asked for are read
    stacked      experts that are stored one by one: only those that are asked for are read
    converted    the tensors of the files are read whole, and transformers' conversion makes the tensor
"""

from __future__ import annotations

import copy
import functools
import importlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from samestep.building.families import BASE_PREFIX, VOCABULARY_FIELD, setting
from samestep.building.module_copies import deep_copy
from samestep.errors import ModelError
from samestep.models.weight_files import StoredTensor
from samestep.output.text import listed

Sources = Sequence[tuple[str, str]]
"""Names of tensors, each with the pattern of the conversion that it matches."""


def loading() -> Any:
    """Return the module of transformers that loads weights."""
    return importlib.import_module("transformers.core_model_loading")


def transforms_of(module: nn.Module, **options: Any) -> list[Any]:
    """Return the transforms by which transformers loads this class of model."""
    mapping: Any = importlib.import_module("transformers.conversion_mapping")
    return list(mapping.get_model_conversion_mapping(module, **options))


def by_kind(transforms: Iterable[Any]) -> tuple[list[Any], list[Any]]:
    """Return the transforms that rename tensors, and those that convert them."""
    transforms, kinds = list(transforms), loading()
    renamings = [transform for transform in transforms if isinstance(transform, kinds.WeightRenaming)]
    return renamings, [transform for transform in transforms if isinstance(transform, kinds.WeightConverter)]


def convert_tensors(
    conversion: Any, target: str, sources: Sources, tensors: Sequence[Tensor], model: nn.Module
) -> dict[str, Tensor]:
    """Return the converted tensors by name; without a conversion the first tensor itself, as `target`."""
    if conversion is None:
        return {target: tensors[0]}
    conversion = copy.deepcopy(conversion)  # it accumulates the tensors that it is given
    for (name, pattern), tensor in zip(sources, tensors, strict=True):
        conversion.add_tensor(target, name, pattern, tensor)
    tensors_by_name = conversion.convert(target, model=model, config=model.config)
    return {name: value[0] if isinstance(value, list) else value for name, value in tensors_by_name.items()}


Intervals = Sequence[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class _TensorOrigin:
    """The tensors in the files from which one or several tensors of a model are converted."""

    sources: tuple[tuple[str, str], ...]
    """Names in the files, and the pattern of the conversion that each one matches."""
    target: str
    """The name under which the mapping collects them."""
    conversion: Any = None
    """The conversion; None where a tensor is stored as it is."""
    is_stack: bool = False
    """Whether row i of the result is made of tensor i of each pattern."""

    def convert(self, tensors: Sequence[Tensor], model: nn.Module) -> dict[str, Tensor]:
        """Return the model's tensors by name, converted from these tensors of the files."""
        return convert_tensors(self.conversion, self.target, self.sources, tensors, model)

    def of_rows(self, rows: Sequence[int]) -> _TensorOrigin:
        """Return the part of a stack that makes some of its rows, in this order."""
        by_pattern: dict[str, list[tuple[str, str]]] = {}
        for source in self.sources:
            by_pattern.setdefault(source[1], []).append(source)
        chosen = tuple(sources[row] for sources in by_pattern.values() for row in rows)
        return _TensorOrigin(chosen, self.target, self.conversion, is_stack=True)


@dataclass(frozen=True, slots=True, eq=False)
class StoredWeights:
    """The places of the values of a model's tensors in the files of a folder, and which tensors have none there."""

    module: nn.Module
    """The model that conversions ask for shapes; no run cuts it."""
    files: Mapping[str, StoredTensor]
    canonical: Mapping[str, str]
    missing: tuple[str, ...]
    """The model's tensors that the folder lacks, by their first names."""
    unread: tuple[str, ...]
    """Tensors of the folder that the model does not have."""
    _origins: Mapping[str, tuple[_TensorOrigin, str]] = field(repr=False)
    """By first name: the origin, and the name that it has for the tensor."""
    _resized: Mapping[str, tuple[int, int]] = field(default_factory=dict, repr=False)
    """By first name, of tensors with an entry for each token: the dimension of the tokens, and how many of them are read."""

    def holds(self, name: str) -> bool:
        """Return whether the folder has the value of a tensor of the model."""
        return self.canonical.get(name) in self._origins

    def reads_parts(self, name: str) -> bool:
        """Return whether rows of a tensor are read without the others."""
        if self.resized(name) is not None:
            return False
        origin, _ = self._origins.get(self.canonical[name], (None, ""))
        return origin is not None and (origin.conversion is None or origin.is_stack)

    def resized(self, name: str) -> tuple[int, int] | None:
        """Return the dimension along which a tensor has another size than in the folder, and how much of it is read from there."""
        return self._resized.get(self.canonical.get(name, ""))

    def remarks(self) -> tuple[str, ...]:
        """Return remarks for the user: resized tensors, tensors that the folder lacks, and those that the model does
        not have."""
        texts = []
        if self._resized:
            name, (dim, _) = next(iter(self._resized.items()))
            stored = self.files[self._origins[name][0].sources[0][0]].shape[dim]
            texts.append(
                f"{listed([*self._resized], 4)} and the weights tied to it: {stored} tokens in the folder, "
                f"{self.module.state_dict()[name].shape[dim]} in the model, the new ones made as in a new model"
            )
        if self.missing:
            texts.append(f"the folder lacks {listed(self.missing, 4)}, made as in a new model")
        if self.unread:
            texts.append(f"the model has no {listed(self.unread, 4)}, which the folder holds")
        return tuple(texts)

    @torch.no_grad()
    def read(self, name: str, dtype: torch.dtype, intervals: Intervals | None = None, dim: int = 0) -> Tensor:
        """Return a tensor of the model on the host, or intervals of it along a dimension, in newly allocated memory.

        Of a tensor that is resized it is the part that the folder has.

        Raises:
            ModelError: a file has been damaged meanwhile.
        """
        origin, known_as = self._origins[self.canonical[name]]
        if (resized := self.resized(name)) is not None:
            dim, intervals = resized[0], [(0, resized[1])]
        if origin.conversion is None:
            return self._values(origin.sources[0][0], intervals, dim).to(dtype, copy=True)
        if origin.is_stack and intervals is not None and dim == 0:
            origin, intervals = origin.of_rows([row for ends in intervals for row in range(*ends)]), None
            if not origin.sources:
                return torch.empty(0, *self.module.get_parameter(name).shape[1:], dtype=dtype)
        # Transformers casts before it converts.
        tensors = [self._values(source).to(dtype, copy=True) for source, _ in origin.sources]
        tensor = origin.convert(tensors, self.module)[known_as]
        return parts_of(tensor, intervals, dim).to(dtype, copy=True, memory_format=torch.contiguous_format)

    def _values(self, name: str, intervals: Intervals | None = None, dim: int = 0) -> Tensor:
        """Return a tensor of a file, or intervals of it; a whole one may share the file's memory."""
        path = self.files[name].path
        try:
            file = _open_cached(path)
            if intervals is None:
                tensor: Tensor = file.get_tensor(name)
                return tensor
            window = file.get_slice(name)
            parts = [window[(slice(None),) * dim + (slice(*ends),)] for ends in intervals]
            return torch.cat(parts, dim) if parts else parts_of(file.get_tensor(name), intervals, dim)
        except (OSError, SafetensorError) as error:
            raise ModelError("model-folder-damaged", f"model.source: {path} cannot be read: {error}") from None


def parts_of(tensor: Tensor, intervals: Intervals | None, dim: int = 0) -> Tensor:
    """Return intervals of a tensor along a dimension, joined; without intervals the tensor itself."""
    if intervals is None:
        return tensor
    parts = [tensor.narrow(dim, start, stop - start) for start, stop in intervals]
    return torch.cat(parts, dim) if parts else tensor.narrow(dim, 0, 0)


def _open_cached(path: Path) -> Any:
    """Return an open file, cached as long as the file on disk stays the same."""
    state = path.stat()
    return _open(path, state.st_ino, state.st_mtime_ns)


@functools.lru_cache(maxsize=64)
def _open(path: Path, *_: int) -> Any:
    return safe_open(path, "pt")


def find_stored_weights(
    module: nn.Module,
    canonical: Mapping[str, str],
    files: Mapping[str, StoredTensor],
    tokens: tuple[int, int] | None = None,
) -> StoredWeights:
    """Find the values of a model of transformers in the files of a folder; the model is on the meta device.

    `canonical` maps every name of a tensor to its first one. `tokens` are the sizes of the vocabulary in the folder and in the model,
    where they may differ.

    Raises:
        ModelError: a tensor has another shape, tied tensors have two values, or nothing fits.
    """
    tensors = module.state_dict()
    all_origins, unread = _origins(module, tensors, files)
    origins: dict[str, tuple[_TensorOrigin, str]] = {}
    resized: dict[str, tuple[int, int]] = {}
    for origin in all_origins:
        shapes = [torch.empty(files[name].shape, device="meta", dtype=torch.float32) for name, _ in origin.sources]
        try:
            converted = origin.convert(shapes, module)
        except Exception as error:  # transformers' conversions raise any error of torch
            raise ModelError(
                "model-folder-other-weights",
                f"model.source: {origin.sources[0][0]} does not become {origin.target}: {error}",
            ) from None
        for name, tensor in converted.items():
            if name not in tensors:
                unread.append(name)
                continue
            first = canonical[name]
            if tensor.shape != tensors[name].shape:
                dim = _dim_of_tokens(tensor.shape, tensors[name].shape, tokens)
                if dim is None or origin.conversion is not None:
                    source = f"{origin.sources[0][0]} in {files[origin.sources[0][0]].path.name}"
                    raise _other_shape(module, source, name, tensor.shape, tensors[name].shape)
                resized[first] = (dim, min(tensor.shape[dim], tensors[name].shape[dim]))
            if first in origins and not _alike(origins[first][0], origin, files):
                raise ModelError(
                    "model-folder-other-weights",
                    f"model.source: {name} and {origins[first][1]} are tied, and the folder has two values for them. Set "
                    "model.config.tie_word_embeddings = false where these are embedding and head",
                )
            origins.setdefault(first, (origin, name))
    if not origins:
        raise ModelError(
            "model-folder-other-weights",
            f"model.source: none of the {len(files)} tensors of the folder, such as {next(iter(files), 'none')}, belongs to "
            f"{type(module).__name__}",
        )
    missing = dict.fromkeys(canonical[name] for name in tensors if canonical[name] not in origins)
    ignored = [re.compile(pattern) for pattern in getattr(module, "_keys_to_ignore_on_load_unexpected", None) or ()]
    unread = [name for name in unread if not any(pattern.search(name) for pattern in ignored)]
    if any(origin.conversion is not None for origin in all_origins):
        module = deep_copy(module, {})
    return StoredWeights(module, files, canonical, tuple(missing), tuple(sorted(unread)), origins, resized)


def _dim_of_tokens(stored: torch.Size, built: torch.Size, tokens: tuple[int, int] | None) -> int | None:
    """Return the one dimension in which two shapes differ, if it is that of the tokens; else None."""
    if tokens is None or len(stored) != len(built):
        return None
    differs = [dim for dim, sizes in enumerate(zip(stored, built, strict=True)) if sizes[0] != sizes[1]]
    return differs[0] if len(differs) == 1 and (stored[differs[0]], built[differs[0]]) == tokens else None


def _other_shape(module: nn.Module, source: str, name: str, stored: torch.Size, built: torch.Size) -> ModelError:
    """Return the error for a tensor of the folder whose shape differs from the model's, with what would work."""
    words, works = setting(module, VOCABULARY_FIELD), "Use the folder's own configuration"
    if _dim_of_tokens(stored, built, (stored[0], words)) == 0:
        works += f"; model.resize_embeddings = {words} adds entries for new tokens"
    text = f"model.source: {source} makes {name} {list(stored)}, and model.config makes {list(built)}. {works}"
    return ModelError("model-folder-other-weights", text)


def _alike(tensor_origin: _TensorOrigin, other: _TensorOrigin, files: Mapping[str, StoredTensor]) -> bool:
    """Return whether two tensors of the files are equal, both stored as they are."""
    if tensor_origin.conversion is not None or other.conversion is not None:
        return False
    first, second = (
        _open_cached(files[each.sources[0][0]].path).get_tensor(each.sources[0][0]) for each in (tensor_origin, other)
    )
    return torch.equal(first, second)


def _origins(
    module: nn.Module, tensors: Mapping[str, Tensor], files: Mapping[str, StoredTensor]
) -> tuple[list[_TensorOrigin], list[str]]:
    """Return the origins of the model's tensors, and the names in the files that belong to none."""
    transforms, rename = transforms_of(module), loading().rename_source_key
    renamings, converters = by_kind(transforms)
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    collected: dict[str, list[tuple[str, str]]] = {}
    unread: list[str] = []
    for name in sorted(files, key=loading().dot_natural_key):
        prefix = getattr(module, BASE_PREFIX)
        target, pattern = rename(name, renamings, converters, prefix, tensors)
        if target not in tensors and name in tensors:  # it has its name already
            target, pattern = rename(name, [], [], prefix, tensors)
        if target in tensors:
            collected.setdefault(target, []).append((name, pattern or ""))
        else:
            unread.append(name)
    # Saving in the folder's form needs this attribute, which is named as in transformers.
    module._weight_conversions = [transform for transform in transforms if transform.was_used()]  # type: ignore[assignment]
    origins = []
    for target, sources in collected.items():
        conversion = by_pattern.get(sources[0][1])
        is_stack = conversion is not None and _stacks(conversion, sources, tensors[target].shape)
        origins.append(_TensorOrigin(tuple(sources), target, conversion, is_stack))
    return origins, unread


def _stacks(conversion: Any, sources: Sequence[tuple[str, str]], shape: torch.Size) -> bool:
    """Return whether a conversion stacks the tensors of each pattern, and then only joins the stacks along other dimensions."""
    first, *others = conversion.operations
    counts = {pattern: sum(operation == pattern for _, operation in sources) for _, pattern in sources}
    return (
        type(first) is loading().MergeModulelist
        and first.dim == 0
        and all(type(operation) is loading().Concatenate and operation.dim > 0 for operation in others)
        and len(conversion.target_patterns) == 1
        and set(counts.values()) == {shape[0]}
    )
