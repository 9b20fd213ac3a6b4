"""Attention with dropout by our kernels (`kernels/flash_dropout.py`), which draw the mask from its hashes as they need it, forward and backward.

Torch's fused kernels draw masks of their own. Ours take what dropout comes with: causality, a window, documents, and a mask that
takes no gradient, such as one of padding. The formula of `formula.py` has the rest, and float64.

Legend: as in `attention_spec.py`.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from samestep.building.attention.attention_spec import AttentionSpec, DroppedWeights, WeightHashes
from samestep.building.attention.formula import attend_by_formula, scale_of
from samestep.building.torch_seams import disable_current_modes
from samestep.kernels import flash_launches
from samestep.kernels.dropped_elements import HashedMask, mask_of
from samestep.kernels.flash_launches import FlashForm
from samestep.kernels.kernel_choice import runs_kernels

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_FAR = 4e-2
"""The largest difference between kernels and formula, of the largest element or of 1."""
_INTERPRETED = (torch.float32, torch.float16)
"""Triton's interpreter multiplies the bits of bfloat16 as integers."""


def fits_dropped_flash(query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec) -> bool:
    """Return whether the kernels compute an attention."""
    drop = spec.dropout
    if drop is None or drop.hashes is None or drop.p >= 1.0 or not runs_kernels(query):
        return False
    width = max(query.shape[3], value.shape[3])
    return (
        query.dtype in (_DTYPES if query.is_cuda else _INTERPRETED)
        and query.dtype == key.dtype == value.dtype
        and width <= flash_launches.WIDEST
        and key.shape[:3] == value.shape[:3]
        and 0 not in (*query.shape, *key.shape, *value.shape)
        and spec.has_only("window", "documents", "dropout")
        and (spec.mask is None or (spec.mask.dim() <= 4 and not spec.mask.requires_grad))
        and (not query.is_cuda or agrees(query.device, query.dtype, (query.shape[3], value.shape[3]), spec.causal))
    )


@functools.cache
def agrees(device: torch.device, dtype: torch.dtype, widths: tuple[int, int], causal: bool) -> bool:
    """Return whether the kernels equal the formula on a device, in a short attention of heads of these widths, forward and backward.

    They are compiled there, by what is installed. One that reads the wrong elements, or drops other weights, is off by far more than
    the roundings of any dtype.
    """
    draw = torch.Generator().manual_seed(0)
    shapes = ((2, 4, 40, widths[0]), (2, 2, 40, widths[0]), (2, 2, 40, widths[1]), (2, 4, 40, widths[1]))
    numbers = [torch.randn(shape, generator=draw).to(device, dtype) for shape in shapes]
    halves, columns = (
        torch.randint(-(2**31), 2**31, shape, generator=draw).to(device, torch.int32)
        for shape in ((2, 4, 40, 2), (40,))
    )
    try:
        with disable_current_modes(), torch.inference_mode(False), torch.enable_grad():
            mask = mask_of(HashedMask(halves.view(-1, 2), columns, -(2**30))).view(2, 4, 40, 40)
            dropped = DroppedWeights(
                0.25,
                lambda start, stop, num_keys: mask[..., start:stop, :num_keys],
                lambda: WeightHashes(halves, columns, -(2**30)),
            )
            spec, found = AttentionSpec(causal=causal, dropout=dropped), list[list[Tensor]]()
            for is_formula in (False, True):
                leaves = [number.clone().requires_grad_() for number in numbers[:3]]
                query, key, value = leaves
                by_formula = attend_by_formula(query, key, value, spec, needs_lse=False) if is_formula else None
                output, _ = by_formula or attend_dropped(query, key, value, spec)
                found.append([output.detach(), *torch.autograd.grad(output, leaves, numbers[3])])
    except Exception:  # whatever the compilers of a machine raise
        return False
    return all(
        bool((ours.float() - theirs.float()).abs().max() < _FAR * theirs.float().abs().max().clamp_min(1.0))
        for ours, theirs in zip(*found, strict=True)
    )


def flash_form(spec: AttentionSpec, scale: float, queries: range, keys: range, rows: slice) -> FlashForm:
    """Return the form of an attention of some queries to some keys, by their tokens.

    `rows` are the positions of the queries among those for which the rank has masks; `spec.mask` is of these pairs alone.
    """
    drop = spec.dropout
    assert drop is not None, "it has been seen that it fits"
    assert drop.hashes is not None, "it has been seen that it fits"
    hashes = drop.hashes()
    return FlashForm(
        halves=hashes.halves[..., rows, :],
        columns=hashes.columns[keys.start : keys.stop],
        threshold=hashes.threshold,
        p=drop.p,
        scale=scale,
        causal=spec.causal,
        window=spec.window,
        mask=spec.mask,
        documents=spec.documents,
        query_start=queries.start,
        key_start=keys.start,
    )


def attend_dropped(query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec) -> tuple[Tensor, Tensor]:
    """Return the output of an attention [B, A, L, D], and the log-sum-exp of each query [B, A, L]."""
    how = _How(spec.but(mask=None), scale_of(spec, query))
    found: tuple[Tensor, Tensor] = _DroppedFlash.apply(query, key, value, spec.mask, how)
    return found


class _How(NamedTuple):
    spec: AttentionSpec
    scale: float

    def form(self, query: Tensor, key: Tensor, mask: Tensor | None) -> FlashForm:
        num_queries, num_keys = query.shape[2], key.shape[2]
        spec = self.spec.but(mask=mask)
        return flash_form(spec, self.scale, range(num_queries), range(num_keys), slice(0, num_queries))


class _DroppedFlash(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, how: _How
    ) -> tuple[Tensor, Tensor]:
        ctx.how = how
        ctx.set_materialize_grads(False)
        with disable_current_modes():
            output, log_sum_exp = flash_launches.forward(query, key, value, how.form(query, key, mask))
        ctx.save_for_backward(query, key, value, mask, output, log_sum_exp)
        ctx.mark_non_differentiable(log_sum_exp)
        return output, log_sum_exp

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        query, key, value, mask, output, log_sum_exp = ctx.saved_tensors
        products = flash_launches.products_of(gradients[0], output)
        form = ctx.how.form(query, key, mask)
        return *flash_launches.backward(gradients[0], (query, key, value), log_sum_exp, products, form), None, None
