"""The files of a checkpoint, opened and indexed by their contents: any elements of any weight, from whatever rank."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from samestep.errors import CheckpointError
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
                raise CheckpointError(f"{folder / part['file']} holds other tensors than the manifest beside it says")
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
                f"{folder} holds no averages of weights, which train.ema = 0.999 makes: without --ema it works"
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

    def read(self, what: str, weight: str, mine: Runs, block: int = 1) -> Tensor:
        """Assemble some elements of a weight's `value`, `average` or state from the stored runs that overlap them.

        Of scales there is one for each `block` of elements.

        Raises:
            CheckpointError: the files lack some of the elements.
        """
        known = {"value": self.values, "average": self.averages}.get(what)
        stored = self.states[weight][what] if known is None else known.get(weight, [])
        return self._assemble(stored, what, weight, mine, block)

    def read_lost(self, key: str, weight: str, mine: Runs, summed: int = 0) -> Tensor:
        """Assemble the losses of a contribution's codes for some elements of a weight's gradient.

        Of sums of contributions, of the `summed` ones from `key` on, it is the sum of those that begin with one of these.

        Raises:
            CheckpointError: the files lack some of the elements.
        """
        stored = self.lost.get(weight, {})
        keys = [other for other in map(str, range(int(key), int(key) + summed)) if other in stored] if summed else [key]
        if stored and not keys:
            return torch.zeros(int(mine.lengths.sum()))
        found = [
            self._assemble(stored.get(one, []), f"lost by contribution {one}", weight, mine, 1) for one in keys or [key]
        ]
        return sum(found[1:], found[0])

    def read_directions(self, weight: str) -> Tensor:
        """Read the directions along which the next gradient of a weight is projected.

        Raises:
            CheckpointError: the files lack them.
        """
        if weight not in self.directions:
            raise CheckpointError(
                f"{self.folder} lacks the directions along which the gradient of {weight} is projected"
            )
        found: Tensor = self.directions[weight].get_tensor(f"directions/{weight}")
        return found

    def _assemble(self, stored: list[_ElementRun], what: str, weight: str, mine: Runs, block: int) -> Tensor:
        mine = mine.in_blocks(block)
        numel = int(mine.lengths.sum())
        found: Tensor | None = None
        covered = 0
        for run in stored:
            window = run.file.get_slice(run.name)
            part = self.cuts.get(run.part) or whole(self.shapes[weight])
            theirs = part.runs(run.start, run.start + window.get_shape()[0] * block).in_blocks(block)
            _, there = mine.shared(theirs)
            if not len(there.starts):
                continue
            first, last = int(there.starts[0]), int(there.starts[-1] + there.lengths[-1])
            values = window[first:last]
            if found is None:
                found = torch.empty(numel, dtype=values.dtype)
            covered += copy_shared(found, mine, values, theirs.part(first, last))
        if found is None and not numel and stored:  # of a weight that has no row for this rank
            found = stored[0].file.get_slice(stored[0].name)[:0]
        if covered < numel or found is None:
            raise CheckpointError(f"{self.folder} lacks {numel - covered} of {numel} elements of {weight} ({what})")
        return found


@dataclass(frozen=True, slots=True)
class PlainValue:
    """A value that is stored in the manifest itself."""

    value: Any
