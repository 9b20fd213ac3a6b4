"""Checkpoints: files from which a run resumes, in coordinates of the whole model, so that any layout can read them.

```
checkpoints/step-000500/
    manifest.json             written last: step, loss scale, the job, shapes, and which elements lie in which file
    rank-0000.safetensors     runs of elements: value/NAME/START, state/NAME/START/KEY, and lost/NAME/START/KEY, which codes
                              have lost of gradients; buffers, and tensors that are kept besides
    pretrained/               with checkpoint.save_pretrained: a folder that transformers loads (`runtime/pretrained_folder.py`)
```
A rank writes the pieces it updates (only the first of several replicas does), and reads the runs that overlap the
pieces of its own layout. For a weight that is sharded over tp or ep a file holds runs of a part, NAME@0of2; the
manifest says which intervals of the whole weight each part is, so that any other layout can read it. The folder is
written under another name and renamed when every file is on disk, so a run that dies while saving leaves the previous
checkpoint untouched. An incomplete folder under the final name has been damaged: it is refused, never skipped. Values
are in master precision, so resuming is exact.
"""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch.distributed as dist
import xxhash
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from samestep.errors import CheckpointError
from samestep.job import Job
from samestep.models.spec import ParamSpec
from samestep.models.weight_files import digest_of
from samestep.runtime import checkpoint_state, pretrained_folder
from samestep.runtime.checkpoint_files import OpenCheckpoint, PlainValue, sync
from samestep.runtime.optimizer_step import Updater
from samestep.runtime.packed_states import SCALE
from samestep.runtime.pieces import Piece
from samestep.runtime.placement import Runs, WeightSlice, part_index, part_of, whole
from samestep.runtime.processes.mesh import gather_objects
from samestep.runtime.run import Run

FORMAT_VERSION = 2
_RESULT_KEYS = ("model", "data", "optimizer", "schedule", "numerics")
_OF_PARTS = ("file", "tensors", "plain", "cuts", "digest")
_MAY_CHANGE = ("numerics.on_nonfinite",)
"""Keys that may differ on resuming: a run that stopped on a non-finite step is told to change them."""


def save(run: Run, folder: Path, keep: int) -> Path:
    """Write a checkpoint below `folder` and remove all but the newest `keep`; return its folder.

    Collective over the world: every rank calls it; if one does not, the others wait until the time limit.

    Raises:
        CheckpointError: the optimizer keeps state that no file can hold.
    """
    rank = run.place.rank
    final = folder / f"step-{run.steps_taken:06d}"
    draft = folder / f".{final.name}.draft"
    if rank == 0:
        for left_over in folder.glob(".step-*"):  # of a run that died while saving or removing
            shutil.rmtree(left_over)
        draft.mkdir(parents=True)
    _barrier(run)
    file = f"rank-{rank:04d}.safetensors"
    record, tensors = checkpoint_state.kept_values(run)
    frozen = checkpoint_state.changed_frozen(run)
    more, plain = _contents_of(run, frozen)
    tensors |= more
    if tensors:
        save_file(tensors, draft / file)
        sync(draft / file)
    digest = _digest(draft / file) if tensors else ""
    part = {"file": file, "tensors": sorted(tensors), "plain": plain, "cuts": _parts(run, frozen), "digest": digest}
    part |= {"record": record, "frozen": sorted({piece.name for piece in frozen})}
    parts = gather_objects(part, run.layout.world_size)
    if rank == 0:
        _write_manifest(run, draft / "manifest.json", parts)
    if (form := run.assembly.model.form) is not None:
        _barrier(run)  # every rank reads what all of them have written
        share = (rank, run.place.world_size)
        pretrained_folder.write(form, draft, read_manifest(draft), draft / pretrained_folder.NAME, share=share)
        _barrier(run)
    if rank == 0:
        _remove(final)
        draft.rename(final)
        sync(folder)
        for old in list_checkpoints(folder)[:-keep]:
            _remove(old)
    _barrier(run)
    return final


def load(run: Run, folder: Path) -> None:
    """Read the checkpoint in `folder` into a prepared run of any layout.

    Collective over the world: every rank calls it; if one does not, the others wait until the time limit.

    Raises:
        CheckpointError: it is damaged, lacks a tensor, or belongs to a job with another result.
    """
    manifest = read_manifest(folder)
    check_job(manifest, run.job, folder)
    check_shapes(manifest, _shapes(run), folder)
    checkpoint_state.refuse_unsaved(run, manifest, folder)
    _check_files(manifest, run, folder)
    with ExitStack() as stack:
        stored = OpenCheckpoint.open(folder, manifest, stack)
        updater = run.updater
        for piece in updater.pieces:
            mine = _part(run, piece).runs(piece.start, piece.stop)
            piece.set_master(stored.read("value", piece.name, mine))
            _load_state(updater, stored, piece, mine)
        for lost in run.assembly.weights.store.given_back():
            mine = _slice_of(run, lost.name).runs(lost.start, lost.start + lost.values.numel())
            lost.values.copy_(stored.read_lost(lost.key, lost.name, mine))
        updater.publish()  # else what was read looks like what somebody has written into the weights
        for piece in run.assembly.weights.store.frozen:
            if piece.name in stored.values:
                mine = _part(run, piece).runs(piece.start, piece.stop)
                piece.value.data.copy_(stored.read("value", piece.name, mine).view_as(piece.value))
        buffers = dict(run.model.named_buffers())
        for name, file in stored.buffers.items():
            buffers[name].copy_(file.get_tensor(f"buffer/{name}"))
        checkpoint_state.give_back(run, manifest, lambda name: stored.kept[name].get_tensor(name))
    if manifest.get("nominal_count"):  # the power of two under a loss scale: fp16 rounds and overflows by it
        objective = dataclasses.replace(run.assembly.objective, nominal_count=manifest["nominal_count"])
        run.adopt(dataclasses.replace(run.assembly, objective=objective))
    if run.updater.loss_scale.is_dynamic and manifest["loss_scale"]:
        run.updater.loss_scale.scale, run.updater.loss_scale.steps_since = manifest["loss_scale"]
    run.assembly.weights.store.publish()
    run.steps_taken = manifest["step"]


def list_checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoints below `folder`, oldest first."""
    found = [path for path in folder.glob("step-*") if re.fullmatch(r"step-\d+", path.name)]
    return sorted(found, key=lambda path: int(path.name[5:]))


def newest(folder: Path) -> Path | None:
    """Return the newest checkpoint below `folder`, whole or damaged; None where there is none."""
    found = list_checkpoints(folder)
    return found[-1] if found else None


def read_manifest(folder: Path) -> dict[str, Any]:
    """Return the manifest of a checkpoint.

    Raises:
        CheckpointError: there is none, or another version wrote it.
    """
    path = folder / "manifest.json"
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        version = manifest["format_version"]
    except (OSError, ValueError, TypeError, KeyError):
        raise CheckpointError(_damaged(path)) from None
    if version != FORMAT_VERSION:
        raise CheckpointError(f"{folder} has format {version}; this version reads {FORMAT_VERSION}")
    return dict(manifest)


def check_job(manifest: Mapping[str, Any], job: Job, folder: Path) -> None:
    """Refuse the checkpoint of a job that computes something else.

    Raises:
        CheckpointError: it names the keys that differ.
    """
    now, defaults = job.model_dump(mode="json"), Job().model_dump(mode="json")
    # A key that is younger than the checkpoint had its default.
    saved = {table: {**defaults[table], **keys} for table, keys in manifest["job"].items()}
    differs = [
        f"{table}.{key}"
        for table in _RESULT_KEYS
        for key in sorted(saved.get(table, {}).keys() | now[table].keys())
        if saved.get(table, {}).get(key) != now[table].get(key) and f"{table}.{key}" not in _MAY_CHANGE
    ]
    differs += [f"train.{k}" for k in ("seed", "global_batch", "loss") if saved["train"].get(k) != now["train"][k]]
    if differs:
        raise CheckpointError(
            f"{folder} was written by a job with another {', '.join(differs)}: resume with the job in its run folder"
        )
    if (source := job.model.folder) and digest_of(source) != manifest.get("folder"):
        raise CheckpointError(
            f"the configuration or the tensors in {source}, from which the run started, are others since {folder} was "
            "written: resume with what stood there"
        )


# -- writing ---------------------------------------------------------------------------------------


def _stored_name(run: Run, piece: Piece) -> str:
    """Return the name of a weight in the files; a part of a weight sharded over tp or ep has a name of its own."""
    return piece.name if piece.is_uncut else _name_of_part(run, piece.name)


def _name_of_part(run: Run, name: str) -> str:
    """Return the name in the files of the part of a weight that tp and ep leave this rank."""
    holding = run.program.step.holding(_spec(run, name))
    if not holding.sharded_over:
        return name
    return f"{name}@{part_index(holding, run.assembly.parallel.mesh)}of{holding.num_parts}"


def _spec(run: Run, name: str) -> ParamSpec:
    """Return the spec of a weight as the program leaves it to this rank."""
    return next(param for param in run.program.step.model.params if param.name == name)


def _part(run: Run, piece: Piece) -> WeightSlice:
    """Return the slice of a whole weight in which a piece lies."""
    uncut = next(param for param in run.assembly.model.spec.params if param.name == piece.name)
    return whole(uncut.shape) if piece.is_uncut else _slice_of(run, piece.name)


def _slice_of(run: Run, name: str) -> WeightSlice:
    """Return the slice of a whole weight that tp and ep leave this rank."""
    uncut = next(param for param in run.assembly.model.spec.params if param.name == name)
    cut = _spec(run, name)
    return part_of(uncut, cut, run.program.step.holding(cut), run.assembly.parallel.mesh)


def _parts(run: Run, frozen: Sequence[Piece]) -> dict[str, list[Any]]:
    """Return dimension and intervals of each sharded weight's part that this rank writes, by name in the files."""
    pieces = (*run.updater.pieces, *frozen)
    names = {name: piece for piece in pieces if (name := _stored_name(run, piece)) != piece.name}
    parts = {name: _part(run, names[name]) for name in sorted(names)}
    parts |= {
        part: _slice_of(run, lost.name)
        for lost in run.assembly.weights.store.given_back()
        if (part := _name_of_part(run, lost.name)) != lost.name
    }
    return {name: [part.dim, [list(ends) for ends in part.intervals]] for name, part in parts.items()}


def _held_elsewhere(run: Run) -> set[str]:
    """Return the names of weights that another rank writes: the first of all ranks that hold the same part does."""
    step, mesh = run.program.step, run.assembly.parallel.mesh
    return {param.name for param in step.model.params if any(map(mesh.index, step.holding(param).copied_over))}


def _encodes_first(run: Run, name: str) -> bool:
    """Return whether this rank is the first of those that encode the same contribution to a weight's gradient."""
    holding, made = run.program.step.holding(_spec(run, name)), run.program.step.contributions
    within = (*holding.replicated_over, *holding.tied_over, *(made.inside if made is not None else ()))
    return not any(map(run.assembly.parallel.mesh.index, within))


def _contents_of(run: Run, frozen: Sequence[Piece]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return everything this rank writes, by name: tensors, and plain values of the optimizer's state.

    Runs of elements are flat; state of another shape is kept whole, with two leading dimensions of size 1.

    Raises:
        CheckpointError: the optimizer keeps state that no file can hold.
    """
    tensors: dict[str, Tensor] = {}
    plain: dict[str, Any] = {}
    optimizer = run.updater.optimizer
    elsewhere = _held_elsewhere(run)
    for piece in run.updater.pieces:
        if piece.name in elsewhere:
            continue
        stored = _stored_name(run, piece)
        tensors[f"value/{stored}/{piece.start}"] = _copied(piece.master().flatten(), is_new=piece.split is not None)
        state = optimizer.state.get(piece.value, {}) if optimizer else {}
        for key, value in state.items():
            name = f"state/{stored}/{piece.start}/{key}"
            if isinstance(value, Tensor):
                is_flat = value.shape == piece.value.shape or key.endswith(SCALE)
                tensors[name] = _copied(value.flatten() if is_flat else value[None, None])
            elif isinstance(value, bool | int | float | str | None):
                plain[name] = value
            else:
                raise CheckpointError(
                    f"{type(optimizer).__name__} keeps a {type(value).__name__} as {key!r} of {piece.name}; "
                    "a checkpoint holds tensors, numbers and text"
                )
    tensors |= {
        f"lost/{_name_of_part(run, lost.name)}/{lost.start}/{lost.key}": _copied(lost.values)
        for lost in run.assembly.weights.store.given_back()
        if _encodes_first(run, lost.name)
    }
    for piece in frozen:
        if piece.name not in elsewhere:
            tensors[f"value/{_stored_name(run, piece)}/{piece.start}"] = _copied(piece.value.flatten())
    buffers = checkpoint_state.kept_buffers(run)
    return tensors | {f"buffer/{name}": _copied(buffer) for name, buffer in buffers.items()}, plain


def _copied(tensor: Tensor, *, is_new: bool = False) -> Tensor:
    """Return a copy on the host, unless nobody else holds a tensor that is there already."""
    found = tensor.detach().cpu()
    return (found if is_new else found.clone()).contiguous()


def _write_manifest(run: Run, path: Path, parts: list[Any]) -> None:
    scale = run.updater.loss_scale
    whole = {param.name: param.shape for param in run.assembly.model.spec.params}
    manifest = {
        "format_version": FORMAT_VERSION,
        "step": run.steps_taken,
        "layout": str(run.layout),
        "loss_scale": [scale.scale, scale.steps_since] if scale.is_dynamic else None,
        "job": run.job.model_dump(mode="json"),
        "folder": digest_of(folder) if (folder := run.job.model.folder) else "",
        "nominal_count": run.assembly.objective.nominal_count if scale.is_dynamic else None,
        "shapes": _shapes(run),
        "frozen": {name: list(shape) for name, shape in whole.items() if any(name in part["frozen"] for part in parts)},
        "parts": [{key: part[key] for key in _OF_PARTS} for part in parts if part["tensors"]],
        "ranks": [part["record"] for part in parts],
    }
    path.write_text(json.dumps(manifest, indent=1), encoding="utf-8")
    sync(path)


def _shapes(run: Run) -> dict[str, list[int]]:
    """Return the shapes of the whole weights that are trained; the others are functions of the seed."""
    return {param.name: list(param.shape) for param in run.assembly.model.spec.params if param.trainable}


def _remove(checkpoint: Path) -> None:
    """Remove a checkpoint; a process that dies meanwhile leaves no folder that looks complete."""
    if checkpoint.exists():
        going = checkpoint.with_name(f".{checkpoint.name}.removed")
        checkpoint.rename(going)
        shutil.rmtree(going)


# -- reading ---------------------------------------------------------------------------------------


def _load_state(updater: Updater, stored: OpenCheckpoint, piece: Piece, mine: Runs) -> None:
    """Set the optimizer's state of one piece: runs of elements, and values that are kept whole (counts)."""
    optimizer = updater.optimizer
    assert optimizer is not None
    state: dict[str, Any] = {}
    for key, runs in stored.states.get(piece.name, {}).items():
        name, file = runs[0].name, runs[0].file
        if isinstance(file, PlainValue):
            state[key] = file.value
        elif key.endswith(SCALE):
            assert updater.packing is not None
            block = updater.packing.blocks[piece.name]
            state[key] = stored.read(key, piece.name, mine, block).to(piece.value.device, copy=True)
        elif len(file.get_slice(name).get_shape()) == 1:
            state[key] = stored.read(key, piece.name, mine).view_as(piece.value).to(piece.value.device, copy=True)
        else:
            # torch's own rule: fused and capturable optimizers keep the count on the device, others on the host.
            group = next(g for g in optimizer.param_groups if any(p is piece.value for p in g["params"]))
            on_device = key != "step" or group.get("fused") or group.get("capturable")
            state[key] = file.get_tensor(name)[0, 0].to(piece.value.device if on_device else "cpu", copy=True)
    if state:
        optimizer.state[piece.value] = state


def check_shapes(manifest: Mapping[str, Any], now: Mapping[str, list[int]], folder: Path) -> None:
    """Refuse the weights of another model than one with these shapes: the user's own code may have changed.

    Raises:
        CheckpointError: it names the first weight that differs.
    """
    saved = manifest["shapes"]
    differs = [
        f"{name} {saved.get(name, 'missing')}, here {now.get(name, 'missing')}"
        for name in sorted(saved.keys() | now.keys())
        if saved.get(name) != now.get(name)
    ]
    if differs:
        more = f", and {len(differs) - 1} more" if len(differs) > 1 else ""
        raise CheckpointError(f"{folder} holds another model's weights: {differs[0]}{more}")


def _check_files(manifest: Mapping[str, Any], run: Run, folder: Path) -> None:
    """Refuse damaged files. Each rank reads some of them, and all ranks raise the same error."""
    bad = [_damaged(path) for path in _broken(manifest["parts"][run.place.rank :: run.place.world_size], folder)]
    if found := [text for texts in gather_objects(bad, run.layout.world_size) for text in texts]:
        raise CheckpointError(found[0])


def check_digests(manifest: Mapping[str, Any], folder: Path) -> None:
    """Refuse a checkpoint of which a file is damaged.

    Raises:
        CheckpointError: it names the file.
    """
    if broken := _broken(manifest["parts"], folder):
        raise CheckpointError(_damaged(broken[0]))


def _broken(parts: Sequence[Mapping[str, Any]], folder: Path) -> list[Path]:
    """Return the files of a checkpoint that are missing or damaged."""
    found = []
    for part in parts:
        path = folder / part["file"]
        try:
            is_whole = _digest(path) == part["digest"]
            with safe_open(path, "pt"):
                pass
        except (OSError, SafetensorError):
            is_whole = False
        if not is_whole:
            found.append(path)
    return found


def _damaged(path: Path) -> str:
    """Return a message that names the damaged file and says from where the run can go on."""
    step = path.parent
    known = list_checkpoints(step.parent)
    older = known[: known.index(step)] if step in known else []
    works = f"once {step} is removed, --resume goes on from {older[-1].name}" if older else "there is no older one"
    return f"{path} is missing or damaged; {works}"


def _digest(path: Path) -> str:
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while chunk := file.read(1 << 24):
            digest.update(chunk)
    return digest.hexdigest()


def _barrier(run: Run) -> None:
    if run.layout.world_size > 1:
        dist.barrier()
