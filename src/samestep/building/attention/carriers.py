"""The one attention, carried out by the first carrier of a table that computes its form; and the calls of torch's functions that ask for it.

    carrier           computes                                                 where
    across            anything, with keys on other ranks                       a rank of cp, `exchange=ring`
    small             dropout, causality, by operations of torch               CPUs, few tokens
    variable length   documents                                                GPUs, half precision, torch 2.12 or later
    by documents      documents                                                CPUs, GPUs of other dtypes where lengths are known
    torch             masks or causality                                       every device: torch chooses its kernel
    dropped flash     dropout, causality, documents, masks                     GPUs with Triton, by our kernels; not in float64
    formula           everything: dropout, documents                           every device

Each is the formula of `attention_spec.py`. A kernel of torch is given `is_causal` in place of a mask, and drops nothing.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from samestep.building.attention import fused
from samestep.building.attention.attention_spec import AttentionSpec, DroppedWeights
from samestep.building.attention.formula import attend_by_formula, attend_small, is_small
from samestep.building.attention.fused import attend_dropped, fits_dropped_flash, fits_flash, has_variable_length


class Across(Protocol):
    """An attention of this rank's queries to keys of which other ranks hold parts."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec) -> Tensor:
        """Return the output of this rank's queries; masks and documents are those of all tokens."""
        ...


class Asked(NamedTuple):
    """An attention that is asked for."""

    query: Tensor
    key: Tensor
    value: Tensor
    spec: AttentionSpec
    across: Across | None = None


class Carrier(NamedTuple):
    """A way to compute attentions of some forms."""

    name: str
    fits: Callable[[Asked], bool]
    run: Callable[[Asked], Tensor]


def output_of(query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec, across: Across | None = None) -> Tensor:
    """Return the output of an attention [B, A, L, E]: queries are [B, A, L, D], keys [B, K, S, D] and values [B, K, S, E], where K divides A."""
    asked = Asked(query, key, value, spec, across)
    return carrier_of(asked).run(asked)


def carrier_of(asked: Asked) -> Carrier:
    """Return the first carrier that computes an attention.

    Raises:
        AssertionError: none does, though the formula computes every form.
    """
    for carrier in CARRIERS:
        if carrier.fits(asked):
            return carrier
    raise AssertionError("the formula computes every form")


def _has_documents_alone(asked: Asked) -> bool:
    spec = asked.spec
    return spec.documents is not None and spec.has_only("documents") and spec.mask is None


def _fits_variable_length(asked: Asked) -> bool:
    query = asked.query
    if not query.is_cuda:
        return False
    is_half = query.dtype in (torch.bfloat16, torch.float16)
    known = asked.spec.lengths is not None and query.shape[2] == asked.key.shape[2]
    return is_half and known and _has_documents_alone(asked) and fits_heads(asked) and has_variable_length()


def fits_heads(asked: Asked) -> bool:
    """Return whether the heads of an attention have a width that the flash kernel takes."""
    return fits_flash(asked.query, asked.value, AttentionSpec())


def _fits_documents(asked: Asked) -> bool:
    is_known = asked.spec.lengths is not None or asked.query.device.type == "cpu"
    return is_known and _has_documents_alone(asked)


def _fits_torch(asked: Asked) -> bool:
    spec = asked.spec
    return not (spec.causal and spec.mask is not None) and (spec.has_only() or _has_documents_alone(asked))


def _fits_small(asked: Asked) -> bool:
    is_dropped = asked.spec.dropout is not None and asked.query.device.type == "cpu"
    return is_dropped and is_small(*asked[:4])


def _by_torch(asked: Asked) -> Tensor:
    query, key, value, spec = asked[:4]
    mask, is_causal = spec.mask, spec.causal
    if spec.documents is not None:  # which the host does not know
        mask, is_causal = fused.dense_mask(spec.documents), False
    shared = query.dim() > 2 and query.shape[-3] != key.shape[-3]
    return F.scaled_dot_product_attention(query, key, value, mask, 0.0, is_causal, scale=spec.scale, enable_gqa=shared)


def _across(asked: Asked) -> Tensor:
    assert asked.across is not None
    return asked.across.attend(*asked[:4])


CARRIERS = (
    Carrier("across", lambda asked: asked.across is not None, _across),
    Carrier("small", _fits_small, lambda asked: attend_small(*asked[:4])),
    Carrier("variable length", _fits_variable_length, lambda asked: fused.attend_by_length(*asked[:4])),
    Carrier("by documents", _fits_documents, lambda asked: fused.attend_each(*asked[:4])),
    Carrier("torch", _fits_torch, _by_torch),
    Carrier("dropped flash", lambda asked: fits_dropped_flash(*asked[:4]), lambda asked: attend_dropped(*asked[:4])),
    Carrier("formula", lambda asked: True, lambda asked: attend_by_formula(*asked[:4])),
)
"""The carriers, the first that fits before those after it."""


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
        lead, key, value = self.query.shape[:-2], self.key.shape, self.value.shape
        shapes = [key[:-3] + lead[-1:], value[:-3] + lead[-1:]] if self.enable_gqa else [key[:-2], value[:-2]]
        shapes += [] if self.attn_mask is None else [self.attn_mask.shape[:-2]]
        return tuple(lead) if shapes.count(lead) == len(shapes) else tuple(torch.broadcast_shapes(lead, *shapes))

    def attend(self, dropout: DroppedWeights | None = None, across: Across | None = None) -> Tensor:
        """Return the output of the attention, with the weights dropped that dropout drops."""
        query, key, value = self[:3]
        if key.dim() == value.dim() == 4 and key.shape[0] == value.shape[0] == query.shape[0] and (
            self.enable_gqa or query.shape[1] == key.shape[1] == value.shape[1]
        ) and (self.attn_mask is None or self.attn_mask.dim() <= 4):  # fmt: skip
            return output_of(*self[:3], self.spec(dropout), across)
        heads = self.heads
        query, key, value = (_in_heads(tensor, heads) for tensor in self[:3])
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
            shape = torch.broadcast_shapes(heads, of_keys)
            if self.attn_mask is not None:
                torch.broadcast_shapes(self.attn_mask.shape, (*shape, query[-2], key[-2]))
        except RuntimeError:
            mask = "" if self.attn_mask is None else f" and a mask {tuple(self.attn_mask.shape)}"
            text = f"attention of queries {query} with keys {key}{mask}: their heads or masks do not fit"
            raise RuntimeError(text) from None


def _in_heads(tensor: Tensor, heads: tuple[int, ...]) -> Tensor:
    """Return queries, keys or values [..., T, D] as [B, A, T, D], where samples and heads have these sizes."""
    own_heads = heads[-1:] if tensor.dim() < 3 or tensor.shape[-3] == 1 else tensor.shape[-3:-2]
    expanded = tensor.expand(*heads[:-1], *own_heads, *tensor.shape[-2:])
    return expanded.flatten(0, -4) if expanded.dim() > 4 else expanded[(None,) * (4 - expanded.dim())]


def multi_head_attention(mode: AbstractContextManager[Any], *args: Any, **kwargs: Any) -> Any:
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
