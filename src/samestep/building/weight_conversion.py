"""Transformers' own knowledge of the files of a model: which tensors it renames, and which it fuses, splits or permutes."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor, nn

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
    renamings = [one for one in transforms if isinstance(one, kinds.WeightRenaming)]
    return renamings, [one for one in transforms if isinstance(one, kinds.WeightConverter)]


def converted(
    conversion: Any, target: str, sources: Sources, tensors: Sequence[Tensor], model: nn.Module
) -> dict[str, Tensor]:
    """Return by name what a conversion makes of tensors; without a conversion the first one itself, as `target`."""
    if conversion is None:
        return {target: tensors[0]}
    conversion = copy.deepcopy(conversion)  # it collects what it is given
    for (name, pattern), tensor in zip(sources, tensors, strict=True):
        conversion.add_tensor(target, name, pattern, tensor)
    made = conversion.convert(target, model=model, config=model.config)
    return {name: one[0] if isinstance(one, list) else one for name, one in made.items()}
