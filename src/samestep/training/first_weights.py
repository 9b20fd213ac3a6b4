"""`train --init-from`: a new run starts from weights of another run, of a folder of transformers, or of a torch
checkpoint.

The job is a new one: data, optimizer, layout, numerics and frozen weights may be others; the model must have the same
weights, by name and shape. Adapters (`model.lora`) of the new job are added to them and begin as new. Checkpoints of
such a run hold all that it started from, so it resumes without the other run.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from samestep.building.initial_values import Blueprint
from samestep.building.model import blueprint_of, without_adaptation
from samestep.building.model_changes import format_of, name_without_adapters
from samestep.building.stored_weights import find_stored_weights
from samestep.errors import CheckpointError, JobError, ModelError
from samestep.job import Job
from samestep.models import weight_files
from samestep.runtime.checkpoints import checkpoint, checkpoint_files, manifests, torch_checkpoint
from samestep.runtime.checkpoints.checkpoint_files import OpenCheckpoint
from samestep.runtime.run import Run
from samestep.runtime.weights.placement import whole
from samestep.training import foreign_code
from samestep.training.trained import StoredRun

_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class FirstWeights:
    """The weights that a run starts from; a spawned worker looks for them again."""

    path: Path
    job: Job
    origin: str
    """Their origin, as text."""
    names: Mapping[str, str]
    """The name of each weight and persistent buffer of the model in the files."""
    opened: Callable[[ExitStack], Callable[[str], Tensor]]
    """Opens the files, and returns a function from a name in the files to the tensor's value."""
    allow_code: bool = False
    """Whether functions that only a checkpoint names are run."""

    @classmethod
    def of(cls, path: str | Path, job: Job, allow_code: bool = False) -> FirstWeights:
        """Find the weights for the model of a job: in a run folder, a checkpoint, a folder with a config.json, or a
        checkpoint of torch.distributed.checkpoint.

        Raises:
            CheckpointError: there are none, they are damaged, or they are those of another model; it names the first that differs.
        """
        path = Path(os.path.expanduser(path))
        if (path / weight_files.CONFIG).is_file():
            return cls._of_folder(path, job)
        if (path / torch_checkpoint.NAME).is_file():
            return cls._of_torch(path, job)
        stored, new = StoredRun.of(path, allow_code=True), blueprint_of(job)  # nothing of the old job is built
        origin = f"{stored.checkpoint} (step {stored.manifest['step']})"
        if tensors := _tensors_held_for(new, stored):
            manifests.check_digests(stored.manifest, stored.checkpoint)
            weights = {name: tensors[name] for name in stored.shapes}
            names = _match_names(new, tensors, weights, stored.checkpoint)
            return cls(path, job, origin, names, functools.partial(_stored_reader, stored, new), allow_code)
        if not allow_code:
            foreign_code.refuse(stored.job, stored.checkpoint, job)
        old = blueprint_of(stored.job)
        stored.check(old.module)

        def opened(stack: ExitStack) -> Callable[[str], Tensor]:
            return checkpoint_files.values(old, OpenCheckpoint.open(stored.checkpoint, stored.manifest, stack))

        names = _match_names(new, old.module.state_dict(), dict(old.module.named_parameters()), stored.checkpoint)
        return cls(path, job, origin, names, opened, allow_code)

    @classmethod
    def _of_folder(cls, path: Path, job: Job) -> FirstWeights:
        bare = blueprint_of(without_adaptation(job))
        try:
            files = find_stored_weights(bare.module, bare.canonical, weight_files.tensors(path))
        except (ModelError, AttributeError) as error:  # a model that is none of transformers lacks its attributes
            reason = (
                str(error).removeprefix("model.source: ")
                if isinstance(error, ModelError)
                else "it is not a model of transformers"
            )
            raise CheckpointError(
                "checkpoint-other-model", f"--init-from {path} does not fit {job.model.source}: {reason}"
            ) from None
        if strange := [*files.missing, *files.unread]:
            whose = "lacks" if files.missing else "has besides"
            raise CheckpointError(
                "checkpoint-other-model", f"--init-from {path} holds another model's weights: it {whose} {strange[0]}"
            )
        tensors = bare.module.state_dict()
        names = _match_names(blueprint_of(job), tensors, dict(bare.module.named_parameters()), path)
        return cls(path, job, str(path), names, lambda _: lambda name: files.read(name, tensors[name].dtype))

    @classmethod
    def _of_torch(cls, path: Path, job: Job) -> FirstWeights:
        bare = blueprint_of(without_adaptation(job)).module
        tensors, params = bare.state_dict(), dict(bare.named_parameters())
        torch_entries = torch_checkpoint.entries(path, params)
        stored = {
            name: torch.empty(entry.shape, dtype=entry.dtype, device="meta") for name, entry in torch_entries.items()
        }
        weights = {name: tensor for name, tensor in stored.items() if name in params or name not in tensors}
        names = _match_names(blueprint_of(job), stored, weights, path)
        return cls(
            path, job, str(path), names, lambda _: lambda name: torch_entries[name].read().to(tensors[name].dtype)
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return FirstWeights.of, (self.path, self.job, self.allow_code)

    def load(self, run: Run) -> None:
        """Set the weights of a prepared run that has taken no step; every rank must call it."""
        with ExitStack() as stack:
            value, packed = (
                self.opened(stack),
                {piece.name: piece.held_as for piece in run.assembly.weights.store.frozen if piece.held_as},
            )

            def first(name: str) -> Tensor | None:
                if name not in self.names:
                    return None
                weight = value(self.names[name])
                return format_of(packed[name]).round_weight(weight) if name in packed else weight

            checkpoint.set_weights(run, first)


def _tensors_held_for(new: Blueprint, stored: StoredRun) -> dict[str, Tensor]:
    """Return the tensors of a checkpoint by their names in a new model, where its files hold all that the model has; else nothing.

    They lack weights that were frozen and have not changed: those are first values of the old job, which must be built for them.
    """
    tensors = {name: torch.empty(shape, device="meta") for name, shape in stored.shapes.items()}
    with ExitStack() as stack:
        files = OpenCheckpoint.open(stored.checkpoint, stored.manifest, stack)
        for name, file in files.buffers.items():
            tensors[name] = torch.empty(file.get_slice(f"buffer/{name}").get_shape(), device="meta")
    aliases = {name: first for name, first in new.canonical.items() if name not in tensors and first in tensors}
    tensors |= {name: tensors[first] for name, first in aliases.items()}
    wanted = {base for name in new.module.state_dict() if (base := name_without_adapters(name)) is not None}
    return tensors if wanted <= tensors.keys() else {}


def _stored_reader(stored: StoredRun, new: Blueprint, stack: ExitStack) -> Callable[[str], Tensor]:
    files = OpenCheckpoint.open(stored.checkpoint, stored.manifest, stack)

    def value(name: str) -> Tensor:
        if name in files.buffers:
            buffer: Tensor = files.buffers[name].get_tensor(f"buffer/{name}")
            return buffer
        first = name if name in stored.shapes else new.canonical[name]
        shape = stored.shapes[first]
        return files.read("value", first, whole(shape).runs(0, math.prod(shape))).view(shape)

    return value


def _match_names(
    new: Blueprint, tensors: Mapping[str, Tensor], weights: Mapping[str, Tensor], where: Path
) -> dict[str, str]:
    """Return the names of the tensors there, by those of the new model's weights and persistent buffers.

    `tensors` are all tensors there by all their names, and `weights` those that are weights, once each.

    Raises:
        CheckpointError: a weight is missing, is left over, or has another shape.
    """
    state = new.module.state_dict()
    names = {name: base for name in state if (base := name_without_adapters(name)) is not None}
    params = dict(new.module.named_parameters())
    differs = [
        f"{base} {list(tensors[base].shape) if base in tensors else 'missing'}, here {list(params[name].shape)}"
        for name, base in names.items()
        if name in params and (base not in tensors or tensors[base].shape != params[name].shape)
    ]
    differs += [
        f"{name} {list(param.shape)}, here missing" for name, param in weights.items() if name not in names.values()
    ]
    if differs:
        more = f", and {len(differs) - 1} more" if len(differs) > 1 else ""
        adapted = any(name_without_adapters(name) is None for name in weights)
        works = ". Use a folder that samestep export --merge has made" if adapted else ""
        raise CheckpointError(
            "checkpoint-other-model", f"--init-from {where} holds another model's weights: {differs[0]}{more}{works}"
        )
    return {name: base for name, base in names.items() if base in tensors and tensors[base].shape == state[name].shape}


def refuse_resumed(init_from: str | Path | None, resume: bool) -> None:
    """Refuse to start from other weights and to resume at once.

    Raises:
        JobError: both are asked for.
    """
    if init_from is not None and resume:
        raise JobError(
            "init-from",
            "--init-from starts a new run, and --resume continues a run, with its own weights. Use one of them",
        )
