"""Checkpoints: files from which a run resumes, in coordinates of the whole model, so that any layout can read them.

```
checkpoints/step-000500/
    manifest.json             written last: step, loss scale, the job, shapes, which elements lie in which file; digests
    rank-0000.safetensors     runs of elements: value/NAME/START, average/NAME/START, state/NAME/START/KEY, and
                              lost/NAME/START/KEY, which codes have lost of gradients; directions/NAME, along which those of
                              matrices are projected; buffers, and tensors that are kept besides
    pretrained/               with checkpoint.save_pretrained: a folder that transformers loads (`runtime/checkpoints/checkpoint_files.py`)
```
A rank writes the pieces it updates (only the first of several replicas does), and reads the runs that overlap the
pieces of its own layout. For a weight that is sharded over tp or ep a file holds runs of a part, NAME@0of2; the
manifest says which intervals of the whole weight each part is, so that any other layout can read it. The folder is
written under another name and renamed when every file is on disk (`runtime/checkpoints/writer.py`), so a run that dies
while saving leaves the previous checkpoint untouched. An incomplete folder under the final name has been damaged: it is
refused, never skipped. Values are in master precision, so resuming is exact.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from samestep.building.pretrained_form import PretrainedForm
from samestep.errors import CheckpointError, SaveError, failures_of
from samestep.job import Job
from samestep.job_files import model_folder
from samestep.models.weight_files import digest_of
from samestep.output import durable_files
from samestep.runtime.assembly import Assembly
from samestep.runtime.checkpoints import checkpoint_files, manifests, other_state, writer
from samestep.runtime.checkpoints.checkpoint_files import OpenCheckpoint, PlainValue
from samestep.runtime.checkpoints.manifests import (
    FORMAT_VERSION,
    broken_files,
    check_job,
    check_shapes,
    describe_damage,
    latest,
    read_manifest,
)
from samestep.runtime.checkpoints.writer import Retention, Share, Writing
from samestep.runtime.held_assembly import WEIGHT
from samestep.runtime.optimizers.optimizer_step import Updater
from samestep.runtime.optimizers.packed_states import SCALE
from samestep.runtime.prepared_run import PreparedRun
from samestep.runtime.processes.messages import gather_values
from samestep.runtime.weights.pieces import Piece
from samestep.runtime.weights.placement import Runs
from samestep.state.step_code import set_state


def save(run: PreparedRun, folder: Path, keep: int = 2) -> Path:
    """Write a checkpoint below `folder`, remove all but the newest `keep`, and return its folder.

    Collective over the world, see [Note: collective calls].

    Raises:
        CheckpointError: the optimizer keeps state that no file can hold.
        SaveError: the file system does not allow it; what was saved before is untouched, and the draft is removed.
    """
    return finish(run, begin(run, folder, Retention(keep)))


def save_pretrained(run: PreparedRun, form: PretrainedForm, folder: Path) -> None:
    """Write the model as a new folder for transformers, by way of a temporary checkpoint next to it.

    Collective over the world, see [Note: collective calls].

    Raises:
        SaveError: the folder exists, or the file system does not allow it.
    """
    is_first = run.place.rank == 0
    _agree(run, folder, "it exists. Use a new folder" if is_first and folder.exists() else "")
    beside = folder.with_name(f".{folder.name}.checkpoint")
    written = finish(run, begin(run, beside, Retention(1), form))
    reason = ""
    if is_first:
        try:
            durable_files.rename(written / checkpoint_files.NAME, folder)
            durable_files.remove_folder(beside)
        except OSError as error:
            reason = writer.reason_of(error, folder)
    _agree(run, folder, reason)


def begin(run: PreparedRun, folder: Path, retention: Retention, form: PretrainedForm | None = None) -> Writing:
    """Copy what a checkpoint holds, and begin to write it below `folder` in a thread; the run may go on meanwhile.

    With a form it has a folder for transformers, as every checkpoint has of a job that says so.

    Collective over the world, see [Note: collective calls]; every rank calls `finish` before its next call.

    Raises:
        CheckpointError: the optimizer keeps state that no file can hold.
        SaveError: the folder cannot be made.
    """
    durable_files.refuse_remote(folder)
    final = folder / f"step-{run.steps_taken:06d}"
    draft = folder / f".{final.name}.draft"
    is_first = run.place.rank == 0
    number = _agree(run, final, _make_draft(draft) if is_first else "", next(writer.numbers) if is_first else 0)
    record, tensors = other_state.kept_values(run)
    frozen = other_state.changed_frozen_weights(run)
    more, plain = _contents_of(run, frozen)
    tensors |= more
    part = {"tensors": sorted(tensors), "plain": plain, "cuts": writer.slices_of(run, frozen), "record": record}
    part["frozen"] = sorted({piece.name for piece in frozen})
    who = (run.place.rank, run.layout.world_size)
    share = Share(draft, final, *who, tensors, part, _head(run), retention, number, run.job.run.timeout_s)
    return Writing.begin(share, form or run.assembly.model.form)


def finish(run: PreparedRun, writing: Writing) -> Path:
    """Wait until a checkpoint is on disk, and return its folder.

    Collective over the world, see [Note: collective calls].

    Raises:
        SaveError: the file system did not allow it; what was saved before is untouched, and the draft is removed.
    """
    final = writing.share.final
    _agree(run, final, writing.wait())
    return final


def copy_checkpoint(run: PreparedRun, source: Path, folder: Path) -> Path:
    """Copy a checkpoint to a folder of checkpoints, unless it is one of them, and return its folder there.

    Collective over the world, see [Note: collective calls].

    Raises:
        SaveError: the file system does not allow it.
    """
    durable_files.refuse_remote(folder)
    final, reason = folder / f"step-{run.steps_taken:06d}", ""
    if run.place.rank == 0 and not final.exists():
        draft = folder / f".{final.name}.draft"
        reason = _make_draft(draft)
        try:
            for file in sorted(source.iterdir()) if not reason else ():
                if file.is_file():
                    durable_files.copy(file, draft / file.name)
            if not reason:
                durable_files.rename(draft, final)
        except OSError as error:
            reason = writer.reason_of(error, draft)
    _agree(run, final, reason)
    return final


def _make_draft(draft: Path) -> str:
    """Create the folder of a draft, without the files of a run that died while saving; return why it cannot be
    created."""
    try:
        durable_files.make_folder(draft.parent)
        writer.remove_left_overs(draft.parent)
        durable_files.make_folder(draft)
    except OSError as error:
        return writer.reason_of(error, draft)
    return ""


def _agree(run: PreparedRun, final: Path, reason: str, number: int = 0) -> int:
    """If any rank has a reason not to save, raise the lowest rank's on all of them; otherwise return rank 0's `number`.

    Raises:
        SaveError: there is one.
    """
    told = gather_values([reason, number], run.layout.world_size)
    reasons = [(rank, text) for rank, (text, _) in enumerate(told) if text]
    if reasons:
        rank, text = reasons[0]
        if not re.fullmatch(r"step-\d+", final.name):
            raise SaveError("checkpoint-unwritable", f"{final} cannot be written: rank {rank}: {text}")
        newest = latest(final.parent)
        left = f"the newest whole checkpoint is {newest}" if newest else "there is no older checkpoint"
        raise SaveError(
            "checkpoint-unwritable",
            f"the checkpoint of step {int(final.name[5:])} cannot be written: rank {rank}: {text}; {left}",
        )
    return int(told[0][1])


def load(run: PreparedRun, folder: Path, *, averaged: bool = False, may_change: Collection[str] = ()) -> None:
    """Read the checkpoint in `folder` into a prepared run of any layout; with `averaged` its averages are the weights. The keys of the job
    that `may_change` may differ.

    Collective over the world, see [Note: collective calls].

    Raises:
        CheckpointError: it is damaged, lacks a tensor or averages, or belongs to a job with another result.
    """
    manifest = read_manifest(folder)
    changes = [*manifest.get("changes", ()), *check_job(manifest, run.job, folder, may_change=may_change)]
    if manifest["layout"] != str(run.layout):
        changes.append(
            f"after step {manifest['step']}: the layout is {str(run.layout)!r}, which was {manifest['layout']!r}"
        )
    check_shapes(manifest, _shapes(run), folder)
    other_state.check_optimizer(run, manifest, folder)
    other_state.refuse_unsaved(run, manifest, folder)
    _check_files(manifest, run, folder)
    with ExitStack() as stack, failures_of(f"reading {folder}", CheckpointError):
        stored = OpenCheckpoint.open(folder, manifest, stack, averaged=averaged)
        updater = run.updater
        run.assembly.weights.updater.forget_states()
        for piece in updater.pieces:
            runs = run.assembly.weights.placements.slice_of(piece).runs(piece.start, piece.stop)
            piece.set_master(stored.read("value", piece.name, runs))
        run.held.load_states(updater, _StoredStates(run, stored))
        for lost in run.assembly.weights.store.codes.residuals():
            runs = run.assembly.weights.placements.part(lost.name).runs(lost.start, lost.start + lost.values.numel())
            lost.values.copy_(stored.read_lost(lost.key, lost.name, runs))
        for name, directions in run.assembly.weights.store.codes.directions():
            directions.copy_(stored.read_directions(name))
        updater.live.publish()  # otherwise the values that were read look like a write into the weights by other code
        _load_untrained(run, run.assembly, stored)
        other_state.give_back(run, manifest, lambda name: stored.kept[name].get_tensor(name).clone())
    if manifest.get("nominal_count"):  # the power of two under a loss scale: fp16 rounds and overflows by it
        count = manifest["nominal_count"]
        run.adopt(
            lambda assembly: dataclasses.replace(
                assembly, objective=dataclasses.replace(assembly.objective, nominal_count=count)
            )
        )
    scale = run.assembly.weights.updater.loss_scale
    if scale.is_dynamic and manifest["loss_scale"]:
        scale.scale, scale.steps_since = manifest["loss_scale"]
    run.assembly.weights.store.publish()
    run.spikes.restore(manifest.get("losses", ()), manifest.get("spikes", 0))
    changes += run.data.resumes_from(folder, manifest["step"], manifest.get("data", []))
    run.steps_taken, run.changes = manifest["step"], tuple(changes)


@torch.no_grad()
def set_weights(run: PreparedRun, value: Callable[[str], Tensor | None]) -> None:
    """Set the weights and buffers of a prepared run that has taken no step, whose parts of them this rank holds.

    `value` returns a whole tensor by its name in the model, or None for one that stays as it is.
    """

    def mine(piece: Piece) -> Tensor | None:
        if (full := value(piece.name)) is None:
            return None
        runs, flat = run.assembly.weights.placements.slice_of(piece).runs(piece.start, piece.stop), full.flatten()
        parts = [flat[start : start + length] for start, length in zip(runs.starts, runs.lengths, strict=True)]
        return torch.cat(parts) if parts else flat[:0]

    assembly = run.assembly
    updater, store = assembly.weights.updater, assembly.weights.store
    for piece in updater.pieces:
        if (values := mine(piece)) is not None:
            piece.set_master(values)
    updater.live.publish()
    for piece in store.frozen:
        if (values := mine(piece)) is not None:
            piece.set_master(values)
    for name, buffer in assembly.model.module.named_buffers():
        if (full := value(name)) is not None:
            buffer.copy_(full)
    store.publish()
    if run.held.is_apart:
        run.held.restart([piece.master().clone() for piece in run.held.pieces])


def find_checkpoint(folder: Path) -> Path:
    """Return a folder if it is a checkpoint, or else the newest checkpoint in it.

    Raises:
        CheckpointError: there is none.
    """
    path = folder if (folder / manifests.NAME).exists() else latest(folder)
    if path is None:
        raise CheckpointError(
            "checkpoint-missing", f"{folder} holds no checkpoint. Use a folder that run.save was given, or one in it"
        )
    return path


def of_records(folder: Path, use: Callable[..., Any]) -> Any:
    """Return what `use` makes of the manifest of a checkpoint and of a function that reads the tensors which it names.

    Raises:
        CheckpointError: it cannot be read.
    """
    manifest = read_manifest(folder)
    with ExitStack() as stack, failures_of(f"reading {folder}", CheckpointError):
        stored = OpenCheckpoint.open(folder, manifest, stack)
        return use(manifest, lambda name: stored.kept[name].get_tensor(name).clone())


def step_of(folder: Path, job: Job) -> int:
    """Return the number of steps after which a checkpoint was saved.

    Raises:
        CheckpointError: it has no manifest, or belongs to a job with another result.
    """
    manifest = read_manifest(folder)
    check_job(manifest, job, folder)
    return int(manifest["step"])


# -- writing ---------------------------------------------------------------------------------------


def _contents_of(run: PreparedRun, frozen: Sequence[Piece]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return all values that this rank writes, by name: tensors, and plain values of the optimizer's state.

    Runs of elements are flat; state of another shape is kept whole, with two leading dimensions of size 1.

    Raises:
        CheckpointError: the optimizer keeps state that no file can hold.
    """
    tensors: dict[str, Tensor] = {}
    plain: dict[str, Any] = {}
    elsewhere = writer.weights_held_elsewhere(run)
    for index, piece in enumerate(run.updater.pieces):
        if piece.name in elsewhere:
            continue
        stored = writer.name_of(run, piece)
        value, is_new = run.held.value_of(index), piece.split is not None and not run.held.is_apart
        tensors[f"value/{stored}/{piece.start}"] = writer.copy_to_host(value.flatten(), is_new=is_new)
        if (averages := run.updater.averages) is not None and (average := averages.of(piece)) is not None:
            tensors[f"average/{stored}/{piece.start}"] = writer.copy_to_host(average.flatten())
    for piece, states in run.held.states(run.updater, elsewhere, lambda name: writer.encodes_first(run, name)):
        stored = writer.name_of(run, piece)
        for key, value in states.items():
            name = f"state/{stored}/{piece.start}/{key}"
            if isinstance(value, Tensor):
                is_flat = value.shape == piece.value.shape or key.endswith(SCALE)
                tensors[name] = writer.copy_to_host(value.flatten() if is_flat else value[None, None])
            elif isinstance(value, bool | int | float | str | None):
                plain[name] = value
            elif not isinstance(value, list | tuple | dict):  # which `other_state` keeps
                raise CheckpointError(
                    "checkpoint-state",
                    f"{type(run.updater.optimizer).__name__} keeps a {type(value).__name__} as {key!r} of {piece.name}; "
                    "a checkpoint holds tensors, numbers and text",
                )
    tensors |= {
        f"lost/{writer.name_of_part(run, lost.name)}/{lost.start}/{lost.key}": writer.copy_to_host(lost.values)
        for lost in run.assembly.weights.store.codes.residuals()
        if writer.encodes_first(run, lost.name)
    }
    tensors |= {
        f"directions/{name}": writer.copy_to_host(directions)
        for name, directions in run.assembly.weights.store.codes.directions()
        if writer.encodes_first(run, name) and not writer.index_of_contributions(run)
    }
    for piece in frozen:
        if piece.name not in elsewhere:
            tensors[f"value/{writer.name_of(run, piece)}/{piece.start}"] = writer.copy_to_host(
                piece.master().flatten(), is_new=bool(piece.held_as)
            )
    buffers = other_state.kept_buffers(run)
    return tensors | {f"buffer/{name}": writer.copy_to_host(buffer) for name, buffer in buffers.items()}, plain


def _head(run: PreparedRun) -> dict[str, Any]:
    """Return the entries of the manifest other than the parts of the ranks."""
    scale = run.updater.loss_scale
    return {
        "format_version": FORMAT_VERSION,
        "step": run.steps_taken,
        "layout": str(run.layout),
        "changes": list(run.changes),
        "losses": [*run.spikes.losses],
        "data": run.data.stamp() if run.place.rank == 0 else [],
        "spikes": run.spikes.count,
        "loss_scale": [scale.scale, scale.steps_since] if scale.is_dynamic else None,
        "job": run.job.model_dump(mode="json"),
        "folder": digest_of(folder) if (folder := model_folder(run.job)) else "",
        "nominal_count": run.assembly.objective.nominal_count if scale.is_dynamic else None,
        "shapes": _shapes(run),
        "frozen": {param.name: list(param.shape) for param in run.assembly.model.spec.params},
    }


def _shapes(run: PreparedRun) -> dict[str, list[int]]:
    """Return the shapes of the whole weights that are trained; the others are functions of the seed."""
    return {param.name: list(param.shape) for param in run.assembly.model.spec.params if param.trainable}


# -- reading ---------------------------------------------------------------------------------------


def _load_untrained(run: PreparedRun, assembly: Assembly, stored: OpenCheckpoint) -> None:
    """Set the frozen weights and the buffers of an assembly that are in a checkpoint."""
    for piece in assembly.weights.store.frozen:
        if piece.name in stored.values:
            runs = run.assembly.weights.placements.slice_of(piece).runs(piece.start, piece.stop)
            piece.set_master(stored.read("value", piece.name, runs))
    buffers = dict(assembly.model.module.named_buffers())
    for name, file in stored.buffers.items():
        buffers[name].copy_(file.get_tensor(f"buffer/{name}"))


@dataclasses.dataclass(frozen=True, slots=True)
class _StoredStates:
    """The states of weights in an open checkpoint, as this rank reads them."""

    run: PreparedRun
    stored: OpenCheckpoint

    def read(self, key: str, piece: Piece) -> Tensor:
        """Read a state of a piece."""
        return self.stored.read(key, piece.name, self._runs(piece))

    def _runs(self, piece: Piece) -> Runs:
        return self.run.assembly.weights.placements.slice_of(piece).runs(piece.start, piece.stop)

    def load(self, updater: Updater, piece: Piece, prefix: str = "") -> None:
        """Set the optimizer's state of one piece, runs of elements and values that are kept whole (counts), and its average.

        Their keys begin with `prefix`.
        """
        stored, elements, optimizer = self.stored, self._runs(piece), updater.optimizer
        assert optimizer is not None
        if updater.averages is not None:
            average = stored.read("average", piece.name, elements) if piece.name in stored.averages else None
            updater.averages.set(piece, average)
        state: dict[str, Any] = {}
        for stored_key, runs in stored.states.get(piece.name, {}).items():
            key = stored_key.removeprefix(prefix)
            if not stored_key.startswith(prefix) or key == WEIGHT:
                continue
            name, file = runs[0].name, runs[0].file
            if isinstance(file, PlainValue):
                state[key] = file.value
            elif key.endswith(SCALE):
                assert updater.packing is not None
                block = updater.packing.blocks[piece.name]
                state[key] = stored.read(stored_key, piece.name, elements, block).to(piece.value.device, copy=True)
            elif len(file.get_slice(name).get_shape()) == 1:
                state[key] = (
                    stored.read(stored_key, piece.name, elements).view_as(piece.value).to(piece.value.device, copy=True)
                )
            else:
                # The rule of torch: fused and capturable optimizers keep the count on the device, others on the host.
                group = next(g for g in optimizer.param_groups if any(p is piece.value for p in g["params"]))
                on_device = key != "step" or group.get("fused") or group.get("capturable")
                state[key] = file.get_tensor(name)[0, 0].to(piece.value.device if on_device else "cpu", copy=True)
        for key, value in state.items():
            set_state(updater.with_states, piece.value, key, value)


def _check_files(manifest: Mapping[str, Any], run: PreparedRun, folder: Path) -> None:
    """Refuse damaged files. Each rank reads some of them, and all ranks raise the same error."""
    parts = manifest["parts"][run.place.rank :: run.place.world_size]
    bad = [describe_damage(path) for path in broken_files(parts, folder)]
    if damages := [text for texts in gather_values(bad, run.layout.world_size) for text in texts]:
        raise CheckpointError("checkpoint-damaged", damages[0])
