"""`attend`: the one attention, carried out by the first carrier of a table that computes its form.

    carrier           computes                                                 where
    across            anything, with keys on other ranks                       a rank of cp, `exchange=ring`
    small             dropout, causality, by operations of torch               CPUs, few tokens
    variable length   documents, windows                                       GPUs, half precision, torch 2.12 or later
    by documents      documents                                                CPUs, GPUs of other dtypes where lengths are known
    torch             masks or causality, no log-sum-exp                       every device: torch chooses its kernel
    flash             causality, the log-sum-exp                               CPUs; GPUs in half precision
    dropped flash     dropout, causality, windows, documents, masks            GPUs with Triton, by our kernels; not in float64
    formula           everything: windows, dropout, documents                  every device

Each is the formula of `attention_spec.py`. A kernel of torch is given `is_causal` in place of a mask, and drops nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from samestep.building.attention import by_document
from samestep.building.attention.attention_spec import AttentionSpec
from samestep.building.attention.dropped_flash import attend_dropped, fits_dropped_flash
from samestep.building.attention.formula import attend_by_formula, attend_small, is_small
from samestep.building.attention.fused import attend_by_flash, fits_flash, has_variable_length

_Found = tuple[Tensor, Tensor | None]


class Across(Protocol):
    """An attention of this rank's queries to keys of which other ranks hold parts."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec) -> tuple[Tensor, Tensor]:
        """Return output and log-sum-exps of this rank's queries; masks and documents are those of all tokens."""
        ...


class Asked(NamedTuple):
    """An attention that is asked for."""

    query: Tensor
    key: Tensor
    value: Tensor
    spec: AttentionSpec
    needs_lse: bool = True
    across: Across | None = None


class Carrier(NamedTuple):
    """A way to compute attentions of some forms."""

    name: str
    fits: Callable[[Asked], bool]
    run: Callable[[Asked], _Found]


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    spec: AttentionSpec,
    *,
    across: Across | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the output of an attention [B, A, L, D], and the log-sum-exp of each query's scores [B, A, L], which takes no gradient.

    Queries are [B, A, L, D], keys [B, K, S, D] and values [B, K, S, E], where K divides A.
    """
    asked = Asked(query, key, value, spec, True, across)
    output, log_sum_exp = carrier_of(asked).run(asked)
    assert log_sum_exp is not None, "this carrier was asked for it"
    return output, log_sum_exp


def output_of(query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec, across: Across | None = None) -> Tensor:
    """Return the output that `attend` returns, where nobody needs the log-sum-exps."""
    asked = Asked(query, key, value, spec, False, across)
    return carrier_of(asked).run(asked)[0]


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
    return spec.documents is not None and spec.has_only("documents", "window") and spec.mask is None


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
    return is_known and not asked.needs_lse and asked.spec.window is None and _has_documents_alone(asked)


def _fits_torch(asked: Asked) -> bool:
    spec = asked.spec
    if asked.needs_lse or (spec.causal and spec.mask is not None):
        return False
    return spec.has_only() or (_has_documents_alone(asked) and spec.window is None)


def _fits_flash(asked: Asked) -> bool:
    is_square = not asked.spec.causal or asked.query.shape[2] == asked.key.shape[2]
    return is_square and fits_flash(asked.query, asked.value, asked.spec)


def _fits_small(asked: Asked) -> bool:
    is_dropped = asked.spec.dropout is not None and not asked.needs_lse and asked.query.device.type == "cpu"
    return is_dropped and is_small(*asked[:4])


def _by_torch(asked: Asked) -> _Found:
    query, key, value, spec = asked[:4]
    mask, is_causal = spec.mask, spec.causal
    if spec.documents is not None:  # which the host does not know
        mask, is_causal = by_document.dense_mask(spec.documents, causal=spec.causal), False
    shared = query.dim() > 2 and query.shape[-3] != key.shape[-3]
    return F.scaled_dot_product_attention(
        query, key, value, mask, 0.0, is_causal, scale=spec.scale, enable_gqa=shared
    ), None


def _across(asked: Asked) -> _Found:
    assert asked.across is not None
    return asked.across.attend(*asked[:4])


CARRIERS = (
    Carrier("across", lambda asked: asked.across is not None, _across),
    Carrier("small", _fits_small, lambda asked: (attend_small(*asked[:4]), None)),
    Carrier("variable length", _fits_variable_length, lambda asked: by_document.attend_by_length(*asked[:4])),
    Carrier("by documents", _fits_documents, lambda asked: (by_document.attend_each(*asked[:4]), None)),
    Carrier("torch", _fits_torch, _by_torch),
    Carrier("flash", _fits_flash, lambda asked: attend_by_flash(*asked[:4])),
    Carrier("dropped flash", lambda asked: fits_dropped_flash(*asked[:4]), lambda asked: attend_dropped(*asked[:4])),
    Carrier("formula", lambda asked: True, lambda asked: attend_by_formula(*asked[:4], needs_lse=asked.needs_lse)),
)
"""The carriers, the first that fits before those after it."""
