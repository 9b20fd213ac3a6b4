"""The whole model's weights and buffers, gathered from the ranks that hold parts of them, as a plain module loads them.

Every rank lists the parts that it would write into a checkpoint; each part is then broadcast by its rank, and put in its
place by those that want the whole. So at any time a rank holds one part besides what it keeps.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from samestep.building.initial_values import Blueprint
from samestep.job_tables import NumericsTable
from samestep.runtime.checkpoints import other_state, pretrained_folder, writer
from samestep.runtime.checkpoints.checkpoint_files import OpenCheckpoint
from samestep.runtime.checkpoints.manifests import check_shapes
from samestep.runtime.checkpoints.prepared_run import PreparedRun
from samestep.runtime.processes.messages import gather_values
from samestep.runtime.weights.placement import WeightSlice, whole


class _SentPart(NamedTuple):
    """A part of a weight, or a buffer, that one rank sends to the others; plain data."""

    name: str
    shape: list[int]
    """Shape of the whole."""
    dim: int
    intervals: list[list[int]]
    """Of a weight that the layout cuts, the intervals along `dim` in which the part lies."""
    start: int
    """The first element of the flattened intervals that it holds."""
    numel: int
    dtype: str


def state_dict(run: PreparedRun, *, on_every_rank: bool) -> dict[str, Tensor]:
    """Return weights in master precision and persistent buffers by name, on the host; on other ranks than 0 maybe nothing.

    Collective over the world, see [Note: collective calls].
    """
    mine = list(_parts(run))
    listed = gather_values([[*part] for part, _ in mine], run.layout.world_size)
    keeps = on_every_rank or run.place.rank == 0
    found: dict[str, Tensor] = {}
    for source, parts in enumerate(listed):
        for index, part in enumerate(_SentPart(*one) for one in parts):
            held = mine[index][1] if source == run.place.rank else None
            flat = _broadcast_part(run, source, part, held)
            if keeps:
                _put(found, part, flat)
    names = run.assembly.model.state_names
    return {name: found[first] for name, first in names.items() if first in found}


def stored_state_dict(
    plan: Blueprint, manifest: Mapping[str, Any], folder: Path, numerics: NumericsTable
) -> dict[str, Tensor]:
    """Return the result of `state_dict` for a run with the values of a checkpoint, whose model is not built.

    Raises:
        CheckpointError: the checkpoint is damaged, or holds another model's weights.
    """
    wide = numerics.precision == "float64"
    params = dict(plan.module.named_parameters(remove_duplicate=False))
    shapes = {name: list(param.shape) for name, param in params.items() if name in manifest["shapes"]}
    check_shapes(manifest, shapes, folder)
    found: dict[str, Tensor] = {}
    with ExitStack() as stack:
        value = pretrained_folder.values(plan, OpenCheckpoint.open(folder, manifest, stack))
        for name, held in plan.module.state_dict(keep_vars=True).items():
            if isinstance(held, Tensor):
                first = plan.canonical.get(name, name)
                tensor = found[first] if first in found else value(name).clone()
                is_cast = tensor.is_floating_point() and (wide or name in params)
                found[name] = tensor.to(torch.float64 if wide else torch.float32) if is_cast else tensor
    return found


def _parts(run: PreparedRun) -> Iterator[tuple[_SentPart, Tensor]]:
    """Yield the weights' parts and the buffers that this rank sends."""
    elsewhere = writer.weights_held_elsewhere(run)
    frozen = run.assembly.weights.store.frozen
    for piece in (*run.updater.pieces, *frozen):
        if piece.name in elsewhere:
            continue
        lies = run.assembly.weights.placements.slice_of(piece)
        value = piece.master().flatten()
        part = _describe_part(piece.name, lies, piece.start, value)
        yield part, value
    for name, buffer in other_state.kept_buffers(run).items():
        yield _describe_part(name, whole(buffer.shape), 0, buffer), buffer.flatten()


def _describe_part(name: str, lies: WeightSlice, start: int, value: Tensor) -> _SentPart:
    intervals = [list(ends) for ends in lies.intervals]
    return _SentPart(
        name, list(lies.shape), lies.dim, intervals, start, value.numel(), str(value.dtype).removeprefix("torch.")
    )


def _broadcast_part(run: PreparedRun, source: int, part: _SentPart, held: Tensor | None) -> Tensor:
    """Return on every rank the elements of a part that the rank `source` holds."""
    device = run.place.device
    flat = torch.empty(part.numel, dtype=getattr(torch, part.dtype), device=device)
    if held is not None:
        flat.copy_(held)
    if run.layout.world_size > 1 and part.numel:
        dist.broadcast(flat, src=source)
    return flat


def _put(found: dict[str, Tensor], part: _SentPart, flat: Tensor) -> None:
    """Copy a part to its place in the whole tensor, on the host."""
    if part.name not in found:
        found[part.name] = torch.empty(part.shape, dtype=flat.dtype)
    lies = WeightSlice(tuple(part.shape), part.dim, tuple((start, stop) for start, stop in part.intervals))
    runs = lies.runs(part.start, part.start + part.numel)
    found[part.name].view(-1)[runs.positions()] = flat.cpu()
