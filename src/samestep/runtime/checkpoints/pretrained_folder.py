"""A folder that transformers' from_pretrained loads as it is, written from the files of a checkpoint.

```
pretrained/
    config.json, generation_config.json       and the files of the tokenizer, where there is one
    model.safetensors                         or several files of at most 5 GB with model.safetensors.index.json
```
Several ranks write different files of it; each holds one file in memory at a time, and reads only what belongs into it.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from samestep.building.initial_values import Blueprint
from samestep.building.pretrained_form import PretrainedForm, SavedGroup
from samestep.errors import CheckpointError
from samestep.models.weight_files import INDEX
from samestep.output import durable_files
from samestep.runtime.checkpoints.checkpoint_files import OpenCheckpoint
from samestep.runtime.weights.placement import whole

NAME = "pretrained"
"""The name of the folder in a checkpoint."""
LARGEST_FILE_BYTES = 5 * 10**9


def write(
    form: PretrainedForm,
    checkpoint: Path,
    manifest: Mapping[str, Any],
    out: Path,
    dtype: torch.dtype | None = None,
    share: tuple[int, int] = (0, 1),
    *,
    averaged: bool = False,
) -> None:
    """Write the weights of a checkpoint as a folder for transformers; without a dtype in that of the master weights.

    With `averaged` the moving averages of the weights are written in their place. `share` is this writer's number and the number of writers. Each of them calls it once; the folder is whole when all
    have returned.
    """
    writer, num_writers = share
    cast = dtype or (torch.float64 if manifest["job"]["numerics"]["precision"] == "float64" else torch.float32)
    out.mkdir(exist_ok=True)
    most = LARGEST_FILE_BYTES // cast.itemsize if form.is_divisible else sum(group.numel for group in form.groups)
    files = _files(form.groups, most)
    names = [f"model-{number + 1:05d}-of-{len(files):05d}.safetensors" for number in range(len(files))]
    names = names if len(files) > 1 else [form.one_file]
    with ExitStack() as stack:
        stored = OpenCheckpoint.open(checkpoint, manifest, stack, averaged=averaged)
        value = form.values(values(form.stored_plan, stored))
        for number in range(writer, len(files), num_writers):
            tensors = {
                name: cast_to(one, cast) for group in files[number] for name, one in _make_tensors(group, value).items()
            }
            save_file(tensors, out / names[number], {"format": "pt"})
            durable_files.sync(out / names[number])
    if writer:
        return
    if len(files) > 1:
        _write_index(files, names, out, cast, form)
    form.write_configuration(out, cast)
    for path in form.beside:
        shutil.copyfile(path, out / path.name)
    durable_files.sync(out)


def _files(groups: Sequence[SavedGroup], most: int) -> list[list[SavedGroup]]:
    """Return the groups of each file; a file has at most `most` elements, unless one group has more."""
    files: list[list[SavedGroup]] = [[]]
    for group in groups:
        if files[-1] and sum(one.numel for one in files[-1]) + group.numel > most:
            files.append([])
        files[-1].append(group)
    return files


def values(plan: Blueprint, stored: OpenCheckpoint) -> Callable[[str], Tensor]:
    """Return a function from a tensor's name to its value: the checkpoint's, or the first value of what a run does not train and has
    not changed.

    Raises:
        CheckpointError: the files lack a trained weight.
    """
    lacking = [name for name in stored.trained - stored.values.keys() if math.prod(stored.shapes[name])]
    if lacking:
        raise CheckpointError(f"{stored.folder} lacks all elements of {min(lacking)} (value)")
    canonical = plan.canonical
    names_of: dict[str, list[str]] = {}
    for name, first in canonical.items():
        names_of.setdefault(first, []).append(name)

    def value(name: str) -> Tensor:
        first = canonical[name]
        if first in stored.values and (numel := math.prod(stored.shapes[first])):
            shape = stored.shapes[first]
            return stored.read("value", first, whole(shape).runs(0, numel)).view(shape)
        for alias in names_of[first]:
            if alias in stored.buffers:
                buffer: Tensor = stored.buffers[alias].get_tensor(f"buffer/{alias}")
                return buffer
        return plan.materialize(name, torch.device("cpu"))

    return value


def _make_tensors(group: SavedGroup, value: Callable[[str], Tensor]) -> Mapping[str, Tensor]:
    return group.make([value(name) for name in group.sources])


def cast_to(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a copy of a tensor in separate memory, in `dtype` if it has floating numbers."""
    kind = dtype if tensor.is_floating_point() else tensor.dtype
    return tensor.detach().to(kind, copy=True, memory_format=torch.contiguous_format)


def _write_index(
    files: Sequence[Sequence[SavedGroup]], names: Sequence[str], out: Path, dtype: torch.dtype, form: PretrainedForm
) -> None:
    held = form.module.state_dict()
    weight_map, size_bytes = {}, 0
    for groups, name in zip(files, names, strict=True):
        for group in groups:
            for made, tensor in group.make([held[source] for source in group.sources]).items():
                weight_map[made] = name
                size_bytes += tensor.numel() * (dtype if tensor.is_floating_point() else tensor.dtype).itemsize
    index = {"metadata": {"total_size": size_bytes}, "weight_map": dict(sorted(weight_map.items()))}
    (out / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
