"""Writes of whole tensors into sharded weights by a user's loop: every rank writes the rows that it has.

    with torch.no_grad():
        for mine, other in zip(run.model.parameters(), weights): mine.copy_(other)          # whole tensors, alike on all ranks
    run.model.load_state_dict(torch.load("weights.pt"))

    nn.init.normal_(run.model.head.weight); p.add_(torch.randn_like(p))        # the numbers that one device draws
    float(run.model.head.weight.norm())                                         # the number of the whole weight

DTensor refuses to mix whole tensors with sharded ones; here they are what a loop on one device has. A weight that is written
into a whole tensor is gathered.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from samestep.errors import LayoutError
from samestep.runtime.weights.fsdp_units import ParamSlots

_aten = torch.ops.aten
_WRITES = (
    _aten.copy_.default, _aten.add_.Tensor, _aten.sub_.Tensor, _aten.mul_.Tensor, _aten.div_.Tensor,
    _aten.lerp_.Scalar, _aten.lerp_.Tensor, _aten.addcmul_.default, _aten.addcdiv_.default,
    _aten.zero_.default, _aten.fill_.Scalar, _aten.clamp_.default,
)  # fmt: skip
"""Operations that write, element by element, into their first argument."""
_WHOLE_WRITES = (
    _aten.fill_.Tensor, _aten.masked_fill_.Scalar, _aten.masked_fill_.Tensor, _aten.index_fill_.int_Scalar, _aten.index_copy_.default,
    _aten.index_add_.default, _aten.scatter_.value, _aten.scatter_.src, _aten.renorm_.default, _aten.cumsum_.default,
    _aten.tril_.default, _aten.triu_.default, _aten.normal_.default, _aten.uniform_.default, _aten.exponential_.default,
    _aten.log_normal_.default, _aten.cauchy_.default, _aten.geometric_.default, _aten.bernoulli_.float, _aten.eye.m_out,
)  # fmt: skip
"""Operations that write into their first argument as a whole, or into `out`, of which DTensor has no rule for rows; drawn numbers are those
of one device."""
_DRAWN_LIKE = (_aten.randn_like.default, _aten.rand_like.default)
"""Operations that draw a tensor of the shape of their first argument."""


def allow() -> None:
    """Let these operations take sharded weights and whole tensors in this process."""
    handlers: dict[Any, Any] = DTensor._op_dispatcher._custom_op_handlers
    handlers.update(dict.fromkeys(_WRITES, _write) | dict.fromkeys(_WHOLE_WRITES, _write_whole))
    handlers.update(dict.fromkeys(_DRAWN_LIKE, _drawn_like))
    handlers[_aten._local_scalar_dense.default] = _number


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

    Collective over the ranks that share a weight that is gathered, see [Note: collective calls].
    """
    target, *others = args
    if not isinstance(target, DTensor):
        whole = [_whole(one) for one in others]
        return op(
            target,
            *(
                one.view(target.shape) if one is not other and one.numel() == target.numel() else one
                for one, other in zip(whole, others, strict=True)
            ),
            **kwargs,
        )
    _refuse_lost(target)
    op(target._local_tensor, *(_rows_of(one, target) for one in others), **kwargs)
    return target


def _write_whole(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operation on a whole weight, and write the rows of this rank.

    Collective over the ranks that share the weight, see [Note: collective calls].
    """
    target = kwargs.get("out", args[0])
    if isinstance(target, DTensor):
        _refuse_lost(target)
    result = op(*map(_whole, args), **{key: _whole(value) for key, value in kwargs.items()})
    if isinstance(target, DTensor):
        target._local_tensor.copy_(_rows_of(result, target))
        return target
    return result


def _whole(value: Any) -> Any:
    """Return a cut weight as a whole tensor without a graph, which torch 2.11 gathers alone; other values unchanged.

    Collective over the ranks that share the weight, see [Note: collective calls].
    """
    detached = value.detach() if isinstance(value, DTensor) else value
    return detached.full_tensor() if isinstance(detached, DTensor) else value


def _refuse_lost(target: DTensor) -> None:
    """Refuse a write into a part of a weight, such as `weight[0]`, that was gathered and no longer shares the weight's memory.

    Raises:
        LayoutError: `target` is such a part.
    """
    whole = target._base if target._is_view() else None
    if not isinstance(whole, DTensor):
        return
    rows, part = whole._local_tensor.untyped_storage(), target._local_tensor.untyped_storage()
    if rows.data_ptr() != part.data_ptr():
        raise LayoutError(
            "write-into-part",
            f"a write into a part {list(target.shape)} of a weight {list(whole.shape)}, which ranks share by rows under zero=2|3, "
            "would be lost. Use whole = weight.full_tensor(), write into it, then weight.copy_(whole) within torch.no_grad()",
        )


def _drawn_like(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Draw a whole tensor of the shape of a sharded one, and return the rows of this rank as a sharded tensor."""
    like = args[0]
    whole = op(torch.empty(like.shape, dtype=like.dtype, device=like._local_tensor.device), **kwargs)
    local = _rows_of(whole, like).contiguous()
    return DTensor.from_local(
        local, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def _number(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return a scalar tensor as a number.

    Collective over the ranks that share it where they hold summands, see [Note: collective calls].
    """
    return op(args[0].full_tensor())


def _rows_of(value: Any, target: DTensor) -> Any:
    """Return this rank's rows of a whole tensor, cut as the weight `target`; numbers unchanged."""
    if not isinstance(value, Tensor):
        return value
    if not value.dim() and target.numel() != 1:
        return value.full_tensor() if isinstance(value, DTensor) else value
    if isinstance(value, DTensor) and value.shape == target.shape:
        return value.redistribute(target.device_mesh, target.placements)._local_tensor
    if isinstance(value, DTensor):  # as a norm of the weight
        value = value.full_tensor()
    rows = value.expand(target.shape)
    for axis, placement in enumerate(target.placements):
        if isinstance(placement, Shard):
            each = -(-rows.shape[placement.dim] // target.device_mesh.size(axis))
            first = min(target.device_mesh.get_local_rank(axis) * each, rows.shape[placement.dim])
            rows = rows.narrow(placement.dim, first, min(each, rows.shape[placement.dim] - first))
    return rows
