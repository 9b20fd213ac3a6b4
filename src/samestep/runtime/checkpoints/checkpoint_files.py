"""The files of a checkpoint, opened and indexed by their contents: any elements of any weight, from whatever rank; and written again as a
folder that transformers' from_pretrained loads as it is.

```
pretrained/
    config.json, generation_config.json       and the files of the tokenizer, where there is one
    model.safetensors                         or several files of at most 5 GB with model.safetensors.index.json
```
Several ranks write different files of this folder. Each holds one file in memory at a time, and reads only the elements that the file needs.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from samestep.building.initial_values import Blueprint
from samestep.building.pretrained_form import PretrainedForm, SavedGroup
from samestep.errors import CheckpointError
from samestep.models.weight_files import INDEX
from samestep.output import durable_files
from samestep.runtime.checkpoints.manifests import weight_of
from samestep.runtime.weights.placement import Runs, WeightSlice, copy_shared, whole


@dataclass(frozen=True, slots=True)
class _ElementRun:
    """A run of elements of a weight or of its part, in a file; or a plain value."""

    part: str
    """Name in the files: the weight's own, or that of a part of it."""
    start: int
    name: str
    file: Any


@dataclass(slots=True)
class OpenCheckpoint:
    """The open files of a checkpoint, indexed by their contents."""

    folder: Path
    shapes: Mapping[str, list[int]]
    trained: frozenset[str]
    """The weights that the run trained, of each of which the files hold all elements."""
    cuts: dict[str, WeightSlice] = field(default_factory=dict)
    """Slice of the weight that each name with an @ stands for."""
    values: dict[str, list[_ElementRun]] = field(default_factory=dict)
    """Runs of each parameter's values, in order."""
    averages: dict[str, list[_ElementRun]] = field(default_factory=dict)
    """Runs of the moving average of each parameter's values."""
    states: dict[str, dict[str, list[_ElementRun]]] = field(default_factory=dict)
    """Runs of each parameter's optimizer state, by parameter and key."""
    lost: dict[str, dict[str, list[_ElementRun]]] = field(default_factory=dict)
    """Runs of what codes have lost of each parameter's gradient, by parameter and contribution."""
    directions: dict[str, Any] = field(default_factory=dict)
    """Files of the directions along which each parameter's gradient is projected."""
    buffers: dict[str, Any] = field(default_factory=dict)
    kept: dict[str, Any] = field(default_factory=dict)
    """Files of the tensors in values that are kept besides, by their names."""

    @classmethod
    def open(
        cls, folder: Path, manifest: Mapping[str, Any], stack: ExitStack, *, averaged: bool = False
    ) -> OpenCheckpoint:
        """Open every file of the checkpoint once; `averaged` takes the averages of trained weights for their values.

        Raises:
            CheckpointError: a file holds other tensors than the manifest says, or there are no averages.
        """
        stored = cls(folder, {**manifest["shapes"], **manifest.get("frozen", {})}, frozenset(manifest["shapes"]))
        for part in manifest["parts"]:
            file = stack.enter_context(safe_open(folder / part["file"], "pt"))
            if sorted(file.keys()) != sorted(part["tensors"]):
                raise CheckpointError(
                    "checkpoint-damaged",
                    f"{folder / part['file']} holds other tensors than the manifest beside it lists",
                )
            for name in part["tensors"]:
                stored._add(name, file)
            for name, value in part["plain"].items():
                stored._add(name, PlainValue(value))
            for name, (dim, intervals) in part["cuts"].items():
                shape = tuple(stored.shapes[name.rpartition("@")[0]])
                stored.cuts[name] = WeightSlice(shape, dim, tuple((start, stop) for start, stop in intervals))
        keyed = [runs for of in (stored.states, stored.lost) for keys in of.values() for runs in keys.values()]
        for runs in (*stored.values.values(), *stored.averages.values(), *keyed):
            runs.sort(key=lambda run: (run.part, run.start))
        if averaged and not stored.averages:
            raise CheckpointError(
                "no-averages", f"{folder} holds no averages of weights, which train.ema = 0.999 makes. Leave out --ema"
            )
        stored.values |= stored.averages if averaged else {}
        return stored

    def _add(self, name: str, file: Any) -> None:
        kind, _, rest = name.partition("/")
        if kind == "buffer":
            self.buffers[rest] = file
        elif kind == "directions":
            self.directions[rest] = file
        elif kind == "kept":
            self.kept[name] = file
        elif kind in ("value", "average"):
            part, start = rest.rsplit("/", 1)
            of_kind = self.values if kind == "value" else self.averages
            of_kind.setdefault(weight_of(part), []).append(_ElementRun(part, int(start), name, file))
        else:
            part, start, key = rest.rsplit("/", 2)
            of = self.lost if kind == "lost" else self.states
            runs = of.setdefault(weight_of(part), {}).setdefault(key, [])
            runs.append(_ElementRun(part, int(start), name, file))

    def read(self, what: str, weight: str, runs: Runs, block: int = 1) -> Tensor:
        """Assemble some elements of a weight's `value`, `average` or state from the stored runs that overlap them.

        Of scales there is one for each `block` of elements.

        Raises:
            CheckpointError: the files lack some of the elements.
        """
        known = {"value": self.values, "average": self.averages}.get(what)
        stored = self.states[weight][what] if known is None else known.get(weight, [])
        return self._assemble(stored, what, weight, runs, block)

    def read_lost(self, key: str, weight: str, runs: Runs) -> Tensor:
        """Assemble the losses of a contribution's codes for some elements of a weight's gradient.

        Raises:
            CheckpointError: the files lack some of the elements.
        """
        return self._assemble(self.lost.get(weight, {}).get(key, []), f"lost by contribution {key}", weight, runs, 1)

    def read_directions(self, weight: str) -> Tensor:
        """Read the directions along which the next gradient of a weight is projected.

        Raises:
            CheckpointError: the files lack them.
        """
        if weight not in self.directions:
            raise CheckpointError(
                "checkpoint-damaged",
                f"{self.folder} lacks the directions along which the gradient of {weight} is projected",
            )
        tensor: Tensor = self.directions[weight].get_tensor(f"directions/{weight}")
        return tensor

    def _assemble(self, stored: list[_ElementRun], what: str, weight: str, runs: Runs, block: int) -> Tensor:
        runs = runs.in_blocks(block)
        numel = int(runs.lengths.sum())
        tensor: Tensor | None = None
        covered = 0
        for run in stored:
            window = run.file.get_slice(run.name)
            part = self.cuts.get(run.part) or whole(self.shapes[weight])
            theirs = part.runs(run.start, run.start + window.get_shape()[0] * block).in_blocks(block)
            _, there = runs.shared(theirs)
            if not len(there.starts):
                continue
            first, last = int(there.starts[0]), int(there.starts[-1] + there.lengths[-1])
            values = window[first:last]
            if tensor is None:
                tensor = torch.empty(numel, dtype=values.dtype)
            covered += copy_shared(tensor, runs, values, theirs.part(first, last))
        if tensor is None and not numel and stored:  # of a weight that has no row for this rank
            tensor = stored[0].file.get_slice(stored[0].name)[:0]
        if covered < numel or tensor is None:
            raise CheckpointError(
                "checkpoint-damaged", f"{self.folder} lacks {numel - covered} of {numel} elements of {weight} ({what})"
            )
        return tensor


@dataclass(frozen=True, slots=True)
class PlainValue:
    """A value that is stored in the manifest itself."""

    value: Any


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
                name: cast_to(tensor, cast)
                for group in files[number]
                for name, tensor in group.make([value(source) for source in group.sources]).items()
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
        if files[-1] and sum(file.numel for file in files[-1]) + group.numel > most:
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
        raise CheckpointError("checkpoint-damaged", f"{stored.folder} lacks all elements of {min(lacking)} (value)")
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


def cast_to(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a copy of a tensor in separate memory, in `dtype` if it has floating numbers."""
    kind = dtype if tensor.is_floating_point() else tensor.dtype
    return tensor.detach().to(kind, copy=True, memory_format=torch.contiguous_format)


def _write_index(
    files: Sequence[Sequence[SavedGroup]], names: Sequence[str], out: Path, dtype: torch.dtype, form: PretrainedForm
) -> None:
    tensors = form.module.state_dict()
    weight_map, size_bytes = {}, 0
    for groups, name in zip(files, names, strict=True):
        for group in groups:
            for written, tensor in group.make([tensors[source] for source in group.sources]).items():
                weight_map[written] = name
                size_bytes += tensor.numel() * (dtype if tensor.is_floating_point() else tensor.dtype).itemsize
    index = {"metadata": {"total_size": size_bytes}, "weight_map": dict(sorted(weight_map.items()))}
    (out / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
