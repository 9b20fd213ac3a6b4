"""Torch's fused kernels of attention that return the log-sum-exp: flash for queries and keys of equal number, and of variable length.

Given the output and the log-sum-exp of all keys, the backward of a part of the keys gives the gradients that this part has in them.

Legend: as in `attention_spec.py`.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from samestep.building.attention.attention_spec import AttentionSpec
from samestep.building.attention.formula import scale_of
from samestep.building.attention.head_products import wide, widen
from samestep.building.torch_seams import disable_current_modes, flash_attention, flash_attention_backward

_MODULE = "torch.nn.attention.varlen"
_varlen: Any = importlib.import_module(_MODULE) if importlib.util.find_spec(_MODULE) else None
WIDEST_FLASH = 256
"""The largest head of torch's flash kernel on GPUs; the width of a head is a multiple of 8 there."""


def fits_flash(query: Tensor, value: Tensor, spec: AttentionSpec) -> bool:
    """Return whether the flash kernel computes an attention."""
    if not spec.has_only() or spec.mask is not None or query.shape[-1] != value.shape[-1]:
        return False
    if not torch.backends.cuda.flash_sdp_enabled():  # torch's switch, of CPUs too
        return False
    if query.device.type == "cpu":
        return True
    width = query.shape[-1]
    return query.dtype in (torch.bfloat16, torch.float16) and width % 8 == 0 and width <= WIDEST_FLASH


def flash_forward(query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """Return output and log-sum-exp of queries [B, A, L, D] that share heads of keys [B, K, S, D]."""
    key, value = _with_heads_of(query, key), _with_heads_of(query, value)
    return flash_attention(query, key, value, is_causal=is_causal, scale=scale)


def flash_backward(
    given: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    log_sum_exp: Tensor,
    *,
    is_causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of queries, keys and values in the dtype of their sums."""
    keys, values = _with_heads_of(query, key), _with_heads_of(query, value)
    found = flash_attention_backward(
        given, query, keys, values, output, log_sum_exp.contiguous(), is_causal=is_causal, scale=scale
    )
    return widen(found[0]), _summed_heads(found[1], key), _summed_heads(found[2], value)


def attend_by_flash(query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec) -> tuple[Tensor, Tensor]:
    """Return the output of an attention [B, A, L, D], and the log-sum-exp of each query [B, A, L]."""
    found: tuple[Tensor, Tensor] = _Flash.apply(query, key, value, _How(spec.causal, scale_of(spec, query)))
    return found


class _How(NamedTuple):
    is_causal: bool
    scale: float


class _Flash(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, how: _How) -> tuple[Tensor, Tensor]:
        ctx.how = how
        ctx.set_materialize_grads(False)
        with disable_current_modes():
            output, log_sum_exp = flash_forward(query, key, value, is_causal=how.is_causal, scale=how.scale)
        ctx.save_for_backward(query, key, value, output, log_sum_exp)
        ctx.mark_non_differentiable(log_sum_exp)
        return output, log_sum_exp

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        query, key, value, output, log_sum_exp = ctx.saved_tensors
        given = gradients[0] if gradients[0].stride(-1) == 1 else gradients[0].contiguous()
        found = flash_backward(given, query, key, value, output, log_sum_exp, **ctx.how._asdict())
        return *(one.to(like.dtype) for one, like in zip(found, (query, key, value), strict=True)), None


@functools.cache
def has_variable_length() -> bool:
    """Return whether this torch has a kernel of variable length that takes windows."""
    return (
        _varlen is not None
        and {"window_size", "enable_gqa"} <= inspect.signature(_varlen.varlen_attn).parameters.keys()
    )


def variable_length(
    query: Tensor, key: Tensor, value: Tensor, offsets: Tensor, longest: int, scale: float, window: tuple[int, int]
) -> tuple[Tensor, Tensor]:
    """Return outputs [T, A, D] and log-sum-exps [A, T] of sequences that begin at some offsets, int32 [N + 1]."""
    assert _varlen is not None
    found: Any = _varlen.varlen_attn(
        query, key, value, offsets, offsets, longest, longest, return_aux=_varlen.AuxRequest(lse=True), scale=scale,
        window_size=window, enable_gqa=query.shape[1] != key.shape[1],
    )  # fmt: skip
    output, log_sum_exp = found
    return output, log_sum_exp


def _with_heads_of(query: Tensor, tensor: Tensor) -> Tensor:
    """Return keys or values with a head for each of the queries."""
    times = query.shape[1] // tensor.shape[1]
    return tensor.repeat_interleave(times, 1) if times > 1 else tensor


def _summed_heads(gradient: Tensor, like: Tensor) -> Tensor:
    """Return the gradient of keys or values from that of their repeated heads, summed in float32 at least."""
    times = gradient.shape[1] // like.shape[1]
    return gradient.unflatten(1, (-1, times)).sum(2, dtype=wide(gradient)) if times > 1 else widen(gradient)
