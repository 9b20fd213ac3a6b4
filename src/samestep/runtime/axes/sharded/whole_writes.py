"""Writes of whole tensors into sharded weights by a user's own loop: every rank writes the rows that it has.

    with torch.no_grad():
        for mine, other in zip(run.model.parameters(), weights): mine.copy_(other)          # whole tensors, alike on all ranks
    run.model.load_state_dict(torch.load("weights.pt"))

DTensor takes whole tensors beside its own for a mistake; here they are what a loop on one device has. A weight that is written
into a whole tensor is gathered.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from samestep.runtime.axes.sharded.param_slots import ParamSlots

_aten = torch.ops.aten
_WRITES = (
    _aten.copy_.default, _aten.add_.Tensor, _aten.sub_.Tensor, _aten.mul_.Tensor, _aten.div_.Tensor,
    _aten.lerp_.Scalar, _aten.lerp_.Tensor, _aten.addcmul_.default, _aten.addcdiv_.default,
)  # fmt: skip
"""Operations that write, element by element, into their first argument."""


def allow() -> None:
    """Let these operations meet sharded weights and whole tensors in this process."""
    handlers: dict[Any, Any] = DTensor._op_dispatcher._custom_op_handlers
    handlers.update(dict.fromkeys(_WRITES, _write))


def take_single_numbers(slots: dict[str, ParamSlots], names: set[str]) -> None:
    """Let `load_state_dict` put single numbers into weights that are held as one row."""
    for name in names:
        for module, leaf in slots[name]:
            module.register_load_state_dict_pre_hook(_with_row(leaf))


def _with_row(leaf: str) -> Any:
    def give_row(_: nn.Module, state: dict[str, Any], prefix: str, *__: Any) -> None:
        value = state.get(prefix + leaf)
        if isinstance(value, Tensor) and not value.dim():
            state[prefix + leaf] = value.view(1)

    return give_row


def _write(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operation on the rows of this rank; or on whole tensors, if it writes into one.

    Collective over the ranks that share a weight where that is gathered: if one does not call it, the others wait until the
    time limit.
    """
    target, *others = args
    if not isinstance(target, DTensor):
        whole = [one.full_tensor() if isinstance(one, DTensor) else one for one in others]
        return op(
            target,
            *(one.view(target.shape) if one is not other else one for one, other in zip(whole, others, strict=True)),
            **kwargs,
        )
    op(target._local_tensor, *(_rows_of(one, target) for one in others), **kwargs)
    return target


def _rows_of(value: Any, target: DTensor) -> Any:
    """Return the rows of a whole tensor that a rank has of a weight; numbers as they are."""
    if not isinstance(value, Tensor) or (not value.dim() and target.numel() != 1):
        return value
    if isinstance(value, DTensor):
        return value.redistribute(target.device_mesh, target.placements)._local_tensor
    rows = value.expand(target.shape)
    for axis, placement in enumerate(target.placements):
        if placement.is_shard():
            each = -(-len(rows) // target.device_mesh.size(axis))
            rows = rows[target.device_mesh.get_local_rank(axis) * each :][:each]
    return rows
