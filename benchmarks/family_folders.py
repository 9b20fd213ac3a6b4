"""A folder of a family that a run reads, trains on without moving a weight, and writes: the same to the bit, or what differs.

A model with batch norm takes no step, which would count its running statistics on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from samestep.building.families import auto_class, quiet
from samestep.building.loss import cross_entropy
from samestep.building.model import model_source
from samestep.building.optimizer import optimizer_of
from samestep.datasets import batches
from samestep.examination.examine import Source, examine
from samestep.job import Job
from samestep.job_tables import Task
from samestep.layout import Layout
from samestep.runtime.checkpoints import checkpoint, checkpoint_files
from samestep.runtime.processes.join import RankInfo
from samestep.runtime.run import Run


class NotStoredError(Exception):
    """Transformers itself does not load what it has saved."""


def difference(build: Callable[[], nn.Module], data: Any, folder: Path, task: Task = "causal") -> str:
    """Save a model as transformers does, take one step from it at a learning rate of 0, and save it as a run does.

    Returns what the two folders, or the models that transformers loads from them, do not have in common; nothing if all is equal
    to the bit.

    Raises:
        NotStoredError: transformers does not load its own folder.
    """
    first = folder / "first"
    try:
        with quiet():
            build().float().save_pretrained(first)  # type: ignore[operator]
        before = _loaded(first, task)
    except Exception as error:
        raise NotStoredError(f"{type(error).__name__}: {' '.join(str(error).split())[:200]}") from None
    written = _written(first, data, folder / "run", task)
    stored = (_stored(first), _stored(written))
    return _unequal("the files", *stored) or _unequal("the loaded model", before, _loaded(written, task))


def _written(first: Path, data: Any, out: Path, task: Task) -> Path:
    """Return the folder that a run writes, which has read another one."""
    job = Job(
        model={"source": f"hf:{first}", "task": task},
        train={"global_batch": 4, "steps": 1, "watch_every": 0},
        optimizer={"name": "sgd", "lr": 0.0},
        checkpoint={"save_pretrained": True},
        run={"device": "cpu"},
    )
    source = Source(model_source(job), cross_entropy, optimizer_of(job), first.name)
    example = next(batches(data, job)).samples([0])
    source = replace(source, prepared=examine(source, job, example))
    run = Run(source, Layout(), job, RankInfo(0, 0, 1, 1, torch.device("cpu")))
    run.prepare(example)
    if not any(name.endswith("num_batches_tracked") for name, _ in run.model.named_buffers()):  # which a step counts
        for batch in batches(data, job):
            run.step(batch)
    return checkpoint.save(run, out, 1) / checkpoint_files.NAME


def _stored(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for path in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(path).items()}


def _loaded(folder: Path, task: Task) -> dict[str, Tensor]:
    with quiet():
        return dict(auto_class(task).from_pretrained(folder, dtype=torch.float32).state_dict())


def _unequal(what: str, before: dict[str, Tensor], after: dict[str, Tensor]) -> str:
    """Return the first tensor that is not the same in both, as text."""
    if lone := sorted(before.keys() ^ after.keys()):
        return f"{what}: {lone[0]} is in one of them alone, and {len(lone) - 1} others are"
    for name, tensor in before.items():
        if tensor.dtype != after[name].dtype or not torch.equal(tensor, after[name]):
            return f"{what}: {name} differs"
    return ""
