"""Calls of torch's attention functions, as traces and function modes intercept them, and the forms of attention that they ask for."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from samestep.building.attention.attention_spec import AttentionSpec, DroppedWeights
from samestep.building.attention.carriers import Across, output_of


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

    def spec(self, dropout: DroppedWeights | None = None) -> AttentionSpec:
        """Return the form of the attention, with the weights that dropout drops."""
        mask, causal, documents = self.attn_mask, self.is_causal, getattr(self.attn_mask, "documents", None)
        lengths = getattr(mask, "lengths", None)
        if documents is not None:
            mask, causal = None, True
        return AttentionSpec(
            causal=causal, documents=documents, scale=self.scale, dropout=dropout, mask=mask, lengths=lengths
        )

    @property
    def heads(self) -> tuple[int, ...]:
        """Sizes of the dimensions of samples and heads, to which queries, keys, values and mask are broadcast."""
        found, key, value = self.query.shape[:-2], self.key.shape, self.value.shape
        shapes = [key[:-3] + found[-1:], value[:-3] + found[-1:]] if self.enable_gqa else [key[:-2], value[:-2]]
        shapes += [] if self.attn_mask is None else [self.attn_mask.shape[:-2]]
        return tuple(found) if shapes.count(found) == len(shapes) else tuple(torch.broadcast_shapes(found, *shapes))

    def attend(self, dropout: DroppedWeights | None = None, across: Across | None = None) -> Tensor:
        """Return the output of the attention, with the weights dropped that dropout drops."""
        query, key, value = self[:3]
        if key.dim() == value.dim() == 4 and key.shape[0] == value.shape[0] == query.shape[0] and (
            self.enable_gqa or query.shape[1] == key.shape[1] == value.shape[1]
        ) and (self.attn_mask is None or self.attn_mask.dim() <= 4):  # fmt: skip
            return output_of(*self[:3], self.spec(dropout), across)
        heads = self.heads
        query, key, value = (_in_heads(one, heads) for one in self[:3])
        mask = self.attn_mask
        if mask is not None and mask.dim() > 4:
            mask = mask.expand(*heads, *mask.shape[-2:]).flatten(0, -4)
        if dropout is not None and len(heads) > 2:
            part = dropout.part
            dropout = dropout._replace(part=lambda *some: part(*some).flatten(0, -4))
        call = self._replace(query=query, key=key, value=value, attn_mask=mask)
        output = output_of(query, key, value, call.spec(dropout), across)
        return output.reshape(*heads, query.shape[-2], value.shape[-1])

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


def _in_heads(tensor: Tensor, heads: tuple[int, ...]) -> Tensor:
    """Return queries, keys or values [..., T, D] as [B, A, T, D], where samples and heads have these sizes."""
    mine = heads[-1:] if tensor.dim() < 3 or tensor.shape[-3] == 1 else tensor.shape[-3:-2]
    whole = tensor.expand(*heads[:-1], *mine, *tensor.shape[-2:])
    return whole.flatten(0, -4) if whole.dim() > 4 else whole[(None,) * (4 - whole.dim())]


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
