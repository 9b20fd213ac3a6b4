"""Hooks on gradients, followed by their operations: whether the sum of what a hook makes of parts is what it makes of their sum.

A trial on drawn gradients sees no threshold beyond their sizes, so what a hook computes is followed as a forward is: a result is linear
in the gradients, known without them, or neither. A comparison, a norm or a clamp of a gradient is neither, and so is what reads it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from samestep.building.named_tensors import address
from samestep.building.torch_seams import disable_current_modes
from samestep.independence.dimension_maps import FILLS
from samestep.state.snapshot import preserve_function
from samestep.tracing.custom_functions import follow_hook
from samestep.tracing.meta_tensors import mutated_operands
from samestep.trees import operands

_SUMS = frozenset((
    "add", "sub", "rsub", "neg", "clone", "_to_copy", "copy", "cat", "stack", "sum", "mean", "flip", "roll", "cumsum", "tril", "triu",
    "index", "index_select", "gather", "repeat", "constant_pad_nd", "where", "masked_fill", "index_put", "scatter", "scatter_add",
    "index_add", "index_copy", "slice_scatter", "select_scatter", "diag_embed", "nan_to_num", "trace", "_unsafe_view", "lift_fresh_copy",
))  # fmt: skip
"""Operations that add up, move or leave out elements of what they are given."""
_PRODUCTS = frozenset((
    "mul", "addcmul", "mm", "bmm", "mv", "dot", "vdot", "addmm", "addmv", "baddbmm", "convolution", "div", "linalg_vecdot",
))  # fmt: skip
"""Operations that are linear in one factor; a quotient in what is divided."""


def is_linear(hook: Callable[..., Any], gradients: Sequence[Tensor]) -> bool:
    """Return whether a hook on such gradients is linear, as its operations show."""
    on_meta = [torch.empty_like(gradient, device="meta") for gradient in gradients]
    # Tensors are kept alive, so that no address is given to another one.
    alive, is_linear_at = [*on_meta], {address(gradient): True for gradient in on_meta}

    def ran(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], outcome: Any) -> None:
        read = [
            tensor for tensor in operands(*args, *kwargs.values()) if tensor.is_meta and address(tensor) in is_linear_at
        ]
        results = operands(outcome) or mutated_operands(func, args, kwargs)
        alive.extend(results)
        writes = func._schema.is_mutable
        if (
            not read
            or _is_known(func, args)
            or (not writes and all(address(tensor) in is_linear_at for tensor in results))
        ):
            return
        keeps = all(is_linear_at[address(tensor)] for tensor in read) and _keeps(func, args, kwargs, read)
        keeps &= all(tensor.is_floating_point() or tensor.is_complex() for tensor in results)
        is_linear_at.update((address(tensor), keeps) for tensor in results)

    outcome = follow_hook(hook, on_meta, ran)
    stays = outcome is not None and all(is_linear_at.get(address(result), True) for result in outcome)
    return stays and _adds_none(hook, gradients)


def _adds_none(hook: Callable[..., Any], gradients: Sequence[Tensor]) -> bool:
    """Return whether a hook makes zeros of zeros: its operations may add a constant."""
    zeros = [
        torch.zeros_like(gradient, device="cpu" if gradient.is_meta else None, requires_grad=False)
        for gradient in gradients
    ]
    try:
        with disable_current_modes(), torch.no_grad(), preserve_function(hook):
            return not any(bool(result.any()) for result in operands(hook(*zeros)))
    except Exception:  # of the user's own code, which reads what a trace has on the meta device
        return True


def _is_known(func: Any, args: tuple[Any, ...]) -> bool:
    """Return whether the result of an operation follows from shapes, or says which elements of a gradient are finite."""
    packet = func.overloadpacket
    if packet in (torch.ops.aten.eq, torch.ops.aten.ne):
        other = args[1]
        return other is args[0] or (isinstance(other, float) and math.isinf(other))
    return packet in (torch.ops.aten.isnan, torch.ops.aten.isinf) or (packet in FILLS and not func._schema.is_mutable)


def _keeps(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], read: Sequence[Tensor]) -> bool:
    """Return whether an operation is linear in the tensors of its operands that are `read`."""
    name = func.overloadpacket.__name__.rstrip("_")
    if func.overloadpacket in FILLS or name in _SUMS:
        return True
    is_divisor = name == "div" and (args[0] is not read[0] or kwargs.get("rounding_mode") is not None)
    return name in _PRODUCTS and len(read) == 1 and not is_divisor
