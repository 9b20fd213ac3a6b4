"""Calls of torch's attention functions, as traces and function modes intercept them."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode


class AttentionCall(NamedTuple):
    """The arguments of `torch.nn.functional.scaled_dot_product_attention`; query, key and value are [..., T, D]."""

    query: Tensor
    key: Tensor
    value: Tensor
    attn_mask: Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False

    def run(self, func: Callable[..., Tensor]) -> Tensor:
        """Call `func`, an attention of this signature, with the arguments."""
        return func(*self[:6], scale=self.scale, enable_gqa=self.enable_gqa)

    def check(self) -> None:
        """Raise an error, as the kernels do, where the shapes of queries, keys, values and mask do not fit.

        Raises:
            RuntimeError: they do not fit.
        """
        query, key, value = (tuple(tensor.shape) for tensor in self[:3])
        if query[-1] != key[-1] or key[-2] != value[-2]:
            raise RuntimeError(f"attention of queries {query}, keys {key} and values {value}: their sizes do not fit")
        heads, of_keys = query[:-2], key[:-2]
        if self.enable_gqa and heads and query[-3] % key[-3] == 0:
            of_keys = (*of_keys[:-1], query[-3])
        try:
            whole = torch.broadcast_shapes(heads, of_keys)
            if self.attn_mask is not None:
                torch.broadcast_shapes(self.attn_mask.shape, (*whole, query[-2], key[-2]))
        except RuntimeError:
            mask = "" if self.attn_mask is None else f" and a mask {tuple(self.attn_mask.shape)}"
            text = f"attention of queries {query} with keys {key}{mask}: their heads or masks do not fit"
            raise RuntimeError(text) from None


def multi_head_attention(mode: TorchFunctionMode, *args: Any, **kwargs: Any) -> Any:
    """Run `torch.nn.functional.multi_head_attention_forward` with a function mode that sees the calls in it."""
    with mode:
        return _MULTI_HEAD_ATTENTION(*args, **kwargs)


def _hide_from_modes(func: Callable[..., Any]) -> Callable[..., Any]:
    """Return a copy of a torch function that a mode does not intercept, so that it sees the calls inside."""
    assert isinstance(func, types.FunctionType)
    names = {**func.__globals__, "has_torch_function": lambda tensors: False}
    inner = types.FunctionType(func.__code__, names, func.__name__, func.__defaults__, func.__closure__)
    inner.__kwdefaults__ = func.__kwdefaults__
    return inner


_MULTI_HEAD_ATTENTION = _hide_from_modes(F.multi_head_attention_forward)
