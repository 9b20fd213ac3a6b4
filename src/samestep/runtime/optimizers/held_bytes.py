"""The bytes that a rank keeps between two steps, counted from its tensors: weights, gradients, states and masters of the optimizer."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from samestep.program.program import Program
from samestep.runtime.optimizers.optimizer_step import Updater


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
