"""The memory of a run: what it is predicted to need, compared with that of its devices and hosts before anything is allocated; and the bytes
that a rank keeps between two steps, counted from its tensors.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import psutil
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from samestep import hardware
from samestep.job import Job
from samestep.layout import Layout
from samestep.memory.memory_use import MemoryUse, at_rest, memory_of, parts_text
from samestep.models.spec import ModelSpec
from samestep.output import process_limits
from samestep.output.text import readable
from samestep.program.program import Program
from samestep.program.update_rules import states_per_param
from samestep.runtime.optimizers.optimizer_step import Updater
from samestep.strategies import programs_of

_FAR_BEYOND = 1.5
"""A run that is predicted to need this many times the memory is not started; one that exceeds it a little may fit nevertheless."""


def predicted_peak(spec: ModelSpec, job: Job, layout: Layout, ranks_per_node: int | None) -> MemoryUse:
    """Return the memory of the rank that is predicted to need most of its device, at its peak."""
    programs = programs_of(spec, job, layout, ranks_per_node)
    uses = memory_of(programs, hardware.resolve_hardware(None), states_per_param(job))
    return max(uses, key=lambda use: use.total)


def limit_bytes(device: torch.device) -> int:
    """Return the bytes that one process can have: the GPU's memory, or the host's within the limit of the process."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    total = int(psutil.virtual_memory().total)
    return min(total, process_limits.address_space_bytes() or total)


def room_bytes(layout: Layout, device: torch.device, ranks_per_node: int | None) -> int:
    """Return the bytes of a rank's device, or its part of the host's memory."""
    sharers = 1 if device.type == "cuda" else min(layout.world_size, ranks_per_node or layout.world_size)
    return limit_bytes(device) // sharers


def refuse_too_large(
    peak: MemoryUse,
    job: Job,
    layout: Layout,
    device: torch.device,
    ranks_per_node: int | None,
    margin: float = _FAR_BEYOND,
) -> None:
    """Refuse a run that is predicted to need more memory than there is, times a margin; asking for the memory of a GPU starts CUDA.

    Raises:
        UnprovenError: it is, and `run.allow` does not waive that.
    """
    for needs, place, of in ((peak.total, device, ""), (peak.host, torch.device("cpu"), "the host's memory, ")):
        if needs > margin * (room := room_bytes(layout, place, ranks_per_node)):
            job.run.waived(
                "memory",
                "memory-predicted",
                f'layout "{layout}" is predicted to need {readable(needs)} a rank at {peak.peak_at} ({of}'
                f"{parts_text(peak.parts())}), and there are {readable(room)}. Use a layout of `samestep plan`, or a smaller "
                "model",
            )


def refuse_weights_too_large(program: Program, job: Job, device: torch.device, ranks_per_node: int | None) -> None:
    """Refuse a run whose weights and gradients alone, which any optimizer and any batch need, take more memory than there is.

    Raises:
        UnprovenError: they do, and `run.allow` does not waive that.
    """
    least = replace(at_rest(program, 0), peak_at="the first gradients")
    refuse_too_large(least, job, program.step.layout, device, ranks_per_node, 1.0)


def held_bytes(model: nn.Module, program: Program, updater: Updater) -> dict[str, int]:
    """Return the bytes that are kept between steps, by kind: weights, gradients, optimizer."""
    params = [_local(param) for param in model.parameters()]
    grads = [_local(param.grad) for param in model.parameters() if param.grad is not None]
    if program.buckets:  # gradients are summed in the buckets; without buckets, asking for them could allocate
        grads += [piece.gradient() for piece in updater.pieces]
    optimizer = updater.optimizer
    states = [
        value
        for piece in updater.pieces
        for value in (
            *(optimizer.state.get(piece.value, {}) if optimizer else {}).values(),
            *(piece.split[0].tensors if piece.split else [piece.value] * (piece.target is not None)),
        )
        if isinstance(value, Tensor)
    ]
    return {"weights": _storages(params), "gradients": _storages(grads), "optimizer": _storages(states)}


def _local(tensor: Tensor) -> Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def _storages(tensors: Iterable[Tensor]) -> int:
    storages = (tensor.untyped_storage() for tensor in tensors if not tensor.is_meta)
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
