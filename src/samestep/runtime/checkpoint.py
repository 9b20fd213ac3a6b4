"""Checkpoints: files to go on from, in coordinates of the whole model, so that any layout can read them.

```
checkpoints/step-000500/
    manifest.json             written last: step, loss scale, the job, and which elements of what lie in which file
    rank-0000.safetensors     runs of elements: value/NAME/START, state/NAME/START/KEY; buffers
```
A rank writes the pieces it updates (the first replica's alone), and reads whatever runs overlap the pieces it has in
its own layout. The folder is written under another name and renamed when every file is on disk, so a run that dies
while saving leaves the checkpoint before it untouched. Values are in master precision, so resuming is exact.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from samestep.errors import CheckpointError
from samestep.job import Job
from samestep.runtime.run import Run
from samestep.runtime.update import Piece

FORMAT_VERSION = 1
_RESULT_KEYS = ("model", "data", "optimizer", "schedule", "numerics")


def save(run: Run, folder: Path, keep: int) -> Path:
    """Write a checkpoint below `folder` and remove all but the newest `keep`. Collective over the world."""
    rank = run.place.rank
    final = folder / f"step-{run.steps_taken:06d}"
    draft = folder / f".{final.name}.draft"
    if rank == 0:
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(parents=True)
    _barrier(run)
    file = f"rank-{rank:04d}.safetensors"
    tensors = _tensors_of(run) if _writes(run) else {}
    if tensors:
        save_file(tensors, draft / file)
        _sync(draft / file)
    mine = {"file": file, "tensors": sorted(tensors), "digest": _digest(draft / file) if tensors else ""}
    parts: list[Any] = [mine]
    if run.layout.world_size > 1:
        parts = [None] * run.layout.world_size
        dist.all_gather_object(parts, mine)
    if rank == 0:
        _write_manifest(run, draft / "manifest.json", [part for part in parts if part["tensors"]])
        shutil.rmtree(final, ignore_errors=True)
        draft.rename(final)
        _sync(folder)
        for old in list_checkpoints(folder)[:-keep]:
            shutil.rmtree(old)
    _barrier(run)
    return final


def load(run: Run, folder: Path) -> None:
    """Read the checkpoint in `folder` into a prepared run of any layout. Collective over the world.

    Raises:
        CheckpointError: it is damaged, lacks a tensor, or belongs to a job with another result.
    """
    manifest = read_manifest(folder)
    _check_job(manifest["job"], run.job, folder)
    where: dict[str, str] = {name: part["file"] for part in manifest["parts"] for name in part["tensors"]}
    for part in manifest["parts"]:
        path = folder / part["file"]
        if not path.exists() or _digest(path) != part["digest"]:
            raise CheckpointError(f"{path} is missing or damaged; an older checkpoint in {folder.parent} may be whole")
    runs = _index(where)
    for piece in run.updater.pieces:
        with torch.no_grad():
            piece.value.copy_(_read(folder, runs, f"value/{piece.name}", piece).view_as(piece.value))
        _load_state(run, folder, runs, piece)
    buffers = dict(run.model.named_buffers())
    for name, file in where.items():
        if name.startswith("buffer/"):
            with safe_open(folder / file, "pt") as stored:
                buffers[name.removeprefix("buffer/")].copy_(stored.get_tensor(name))
    if run.updater.loss_scale is not None and manifest["loss_scale"]:
        run.updater.loss_scale.scale, run.updater.loss_scale.steps_since = manifest["loss_scale"]
    run.updater.publish()
    run.made.holder.publish()
    run.steps_taken = manifest["step"]


def list_checkpoints(folder: Path) -> list[Path]:
    """Return the complete checkpoints below `folder`, oldest first."""
    found = [path for path in folder.glob("step-*") if re.fullmatch(r"step-\d+", path.name)]
    return sorted((p for p in found if (p / "manifest.json").exists()), key=lambda p: int(p.name[5:]))


def read_manifest(folder: Path) -> dict[str, Any]:
    """Read what a checkpoint says of itself.

    Raises:
        CheckpointError: there is none, or another version wrote it.
    """
    try:
        manifest = json.loads((folder / "manifest.json").read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{folder} holds no readable checkpoint: {error}") from None
    if manifest.get("format_version") != FORMAT_VERSION:
        raise CheckpointError(
            f"{folder} has format {manifest.get('format_version')}; this version reads {FORMAT_VERSION}"
        )
    return dict(manifest)


def _writes(run: Run) -> bool:
    """Whether this rank holds pieces that no rank before it holds."""
    step = run.program.step
    return run.place.rank == 0 if step.zero == 0 else run.place.rank < step.layout.dp_shard


def _tensors_of(run: Run) -> dict[str, Tensor]:
    """Name everything this rank writes. Runs of elements are flat; state of another shape is kept whole."""
    tensors: dict[str, Tensor] = {}
    optimizer = run.updater.optimizer
    for piece in run.updater.pieces:
        tensors[f"value/{piece.name}/{piece.start}"] = piece.value.detach().flatten()
        state = optimizer.state.get(piece.value, {}) if optimizer else {}
        for key, value in state.items():
            if isinstance(value, Tensor):
                is_run = value.shape == piece.value.shape
                tensors[f"state/{piece.name}/{piece.start}/{key}"] = value.flatten() if is_run else value
    if run.place.rank == 0:
        persistent = set(run.model.state_dict())
        tensors |= {f"buffer/{name}": b for name, b in run.model.named_buffers() if name in persistent}
    return {name: tensor.detach().cpu().clone().contiguous() for name, tensor in tensors.items()}


def _write_manifest(run: Run, path: Path, parts: list[Any]) -> None:
    scale = run.updater.loss_scale
    manifest = {
        "format_version": FORMAT_VERSION,
        "step": run.steps_taken,
        "layout": str(run.layout),
        "loss_scale": [scale.scale, scale.steps_since] if scale else None,
        "job": run.job.model_dump(mode="json"),
        "parts": parts,
    }
    path.write_text(json.dumps(manifest, indent=1))
    _sync(path)


_Runs = Mapping[str, list[tuple[int, str, str]]]
"""For `value/NAME` or `state/NAME/KEY`: where runs start, under which name, in which file; in order."""


def _index(where: Mapping[str, str]) -> _Runs:
    runs: dict[str, list[tuple[int, str, str]]] = {}
    for name, file in where.items():
        if not name.startswith("buffer/"):
            kind, param, start, *key = name.split("/")
            runs.setdefault("/".join([kind, param, *key]), []).append((int(start), name, file))
    return {name: sorted(found) for name, found in runs.items()}


def _read(folder: Path, runs: _Runs, name: str, piece: Piece) -> Tensor:
    """Put the elements [start, stop) of a piece together from the runs that overlap it."""
    found = []
    at = piece.start
    for start, stored_name, file in runs.get(name, ()):
        with safe_open(folder / file, "pt") as stored:
            window = stored.get_slice(stored_name)
            stop = start + window.get_shape()[0]
            if start <= at < min(stop, piece.stop):
                found.append(window[at - start : min(stop, piece.stop) - start])
                at = min(stop, piece.stop)
    if at < piece.stop:
        raise CheckpointError(f"{folder} lacks elements {at} to {piece.stop} of {name}")
    return torch.cat(found) if found else torch.empty(0)


def _load_state(run: Run, folder: Path, runs: _Runs, piece: Piece) -> None:
    """Give the optimizer its state of one piece: runs of elements, and what is kept whole (counts)."""
    optimizer = run.updater.optimizer
    assert optimizer is not None
    state: dict[str, Any] = {}
    for name, found in runs.items():
        kind, param, *key = name.split("/")
        if kind != "state" or param != piece.name:
            continue
        _, stored_name, file = found[0]
        with safe_open(folder / file, "pt") as stored:
            shape = stored.get_slice(stored_name).get_shape()
            if len(shape) == 1:
                whole = _read(folder, runs, name, piece).view_as(piece.value)
                state[key[0]] = whole.to(piece.value.device, copy=True)
            else:
                state[key[0]] = stored.get_tensor(stored_name)
    if state:
        optimizer.state[piece.value] = state


def _check_job(saved: Mapping[str, Any], job: Job, folder: Path) -> None:
    now = job.model_dump(mode="json")
    differs = [
        f"{table}.{key}"
        for table in _RESULT_KEYS
        for key in sorted(saved.get(table, {}).keys() | now[table].keys())
        if saved.get(table, {}).get(key) != now[table].get(key)
    ]
    differs += [f"train.{k}" for k in ("seed", "global_batch", "loss") if saved["train"].get(k) != now["train"][k]]
    if differs:
        raise CheckpointError(
            f"{folder} was written by a job with another {', '.join(differs)}: resume with the job in its run folder"
        )


def _digest(path: Path) -> str:
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while chunk := file.read(1 << 24):
            digest.update(chunk)
    return digest.hexdigest()


def _sync(path: Path) -> None:
    """Wait until a file or folder is on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _barrier(run: Run) -> None:
    if run.layout.world_size > 1:
        dist.barrier()
