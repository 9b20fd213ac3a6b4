"""Calls of torch's attention functions, as traces and function modes intercept them."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any, NamedTuple

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


def multi_head_attention(mode: TorchFunctionMode, *args: Any, **kwargs: Any) -> Any:
    """Run `torch.nn.functional.multi_head_attention_forward` with a function mode that sees the calls in it."""
    with mode:
        return _MULTI_HEAD_ATTENTION(*args, **kwargs)


def _seen_through(func: Callable[..., Any]) -> Callable[..., Any]:
    """Return a copy of a torch function that a mode does not intercept, so that it sees the calls inside."""
    assert isinstance(func, types.FunctionType)
    names = {**func.__globals__, "has_torch_function": lambda tensors: False}
    inner = types.FunctionType(func.__code__, names, func.__name__, func.__defaults__, func.__closure__)
    inner.__kwdefaults__ = func.__kwdefaults__
    return inner


_MULTI_HEAD_ATTENTION = _seen_through(F.multi_head_attention_forward)
