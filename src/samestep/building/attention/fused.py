"""Kernels of attention that never hold its weights: torch's flash and variable length, one document at a time, and ours with dropout.

Torch's flash kernel returns the log-sum-exp. Given the output and the log-sum-exp of all keys, the backward of a part of the keys gives the
gradients that this part has in them, as a ring needs it. Documents are attended one by one, or by one kernel of variable length (`torch.nn.attention.varlen`) for
all of them, on GPUs; its offsets come from lengths that the host knows:

    tokens          d0 d0 d0 d0 d1 d1 d2 d2 d2
    attention       ■
                    ■ ■              each document is attended alone, by the kernel of causal attention: no pair of
                    ■ ■ ■            tokens of different documents is computed, and no mask is read or kept
                    ■ ■ ■ ■
                            ■
                            ■ ■
                                ■ ...

Torch's kernels draw dropout masks of their own. Ours (`kernels/flash_dropout.py`) draw the mask from its hashes as they need it, forward and
backward, and take what dropout comes with: causality, documents, and a mask that takes no gradient, such as one of padding. The
formula of `formula.py` has the rest, and float64.

Legend: as in `attention_spec.py`; N documents of all samples, whose tokens stand one after another in q_tad [B T, A, D].
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
import itertools
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from samestep.building.attention.attention_spec import AttentionSpec, DroppedWeights, WeightHashes
from samestep.building.attention.formula import attend_by_formula, scale_of
from samestep.building.attention.head_products import wide, widen
from samestep.building.torch_seams import disable_current_modes, flash_attention, flash_attention_backward
from samestep.kernels import flash_launches
from samestep.kernels.dropped_elements import HashedMask, mask_of
from samestep.kernels.flash_launches import FlashForm
from samestep.kernels.kernel_choice import runs_kernels

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
    results = flash_attention_backward(
        given, query, keys, values, output, log_sum_exp.contiguous(), is_causal=is_causal, scale=scale
    )
    return widen(results[0]), _summed_heads(results[1], key), _summed_heads(results[2], value)


@functools.cache
def _varlen_attn() -> Any:
    """Return torch's kernel of variable length; None if there is none, or one without windows, the only way to say that it is causal.

    It is imported at the first use: its module imports the compiler, which takes seconds.
    """
    name = "torch.nn.attention.varlen"
    if not importlib.util.find_spec(name):
        return None
    kernel = importlib.import_module(name).varlen_attn
    return kernel if {"window_size", "enable_gqa"} <= inspect.signature(kernel).parameters.keys() else None


def has_variable_length() -> bool:
    """Return whether this torch has a kernel of variable length that takes windows."""
    return _varlen_attn() is not None


def variable_length(query: Tensor, key: Tensor, value: Tensor, offsets: Tensor, longest: int, scale: float) -> Tensor:
    """Return the outputs [T, A, D] of causal attentions within sequences that begin at some offsets, int32 [N + 1]."""
    output: Tensor = _varlen_attn()(
        query, key, value, offsets, offsets, longest, longest, scale=scale, window_size=(-1, 0),
        enable_gqa=query.shape[1] != key.shape[1],
    )  # fmt: skip
    return output


def _with_heads_of(query: Tensor, tensor: Tensor) -> Tensor:
    """Return keys or values with a head for each of the queries."""
    times = query.shape[1] // tensor.shape[1]
    return tensor.repeat_interleave(times, 1) if times > 1 else tensor


def _summed_heads(gradient: Tensor, like: Tensor) -> Tensor:
    """Return the gradient of keys or values from that of their repeated heads, summed in float32 at least."""
    times = gradient.shape[1] // like.shape[1]
    return gradient.unflatten(1, (-1, times)).sum(2, dtype=wide(gradient)) if times > 1 else widen(gradient)


def dense_mask(documents: Tensor) -> Tensor:
    """Return which earlier tokens of its document a token sees, bool [B, 1, T, T]."""
    tokens = torch.arange(documents.shape[1], device=documents.device)
    return (documents[:, None, :, None] == documents[:, None, None, :]) & (tokens[:, None] >= tokens)


def lengths_of(documents: Tensor) -> list[list[int]]:
    """Return the number of tokens of each document, by sample; the host waits for `documents`, int64 [B, T]."""
    return [row.unique_consecutive(return_counts=True)[1].tolist() for row in documents.cpu()]


def attend_each(query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec) -> Tensor:
    """Return the outputs of attentions within each document, the heads of a token adjacent in memory."""
    assert spec.documents is not None
    lengths_of_all = lengths_of(spec.documents) if spec.lengths is None else spec.lengths
    shared = query.shape[1] != key.shape[1]
    outputs = []
    for *sample, lengths in zip(query.split(1), key.split(1), value.split(1), lengths_of_all, strict=True):
        for q, k, v in zip(*(tensor.split(lengths, 2) for tensor in sample), strict=True):
            output = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=spec.scale, enable_gqa=shared)
            outputs.append(output.squeeze(0).transpose(0, 1))
    joined = torch.cat(outputs).unflatten(0, (query.shape[0], -1))
    return joined.transpose(1, 2)


def attend_by_length(query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec) -> Tensor:
    """Return the output of attentions within each document, by one kernel for all of them."""
    assert spec.lengths is not None
    lengths = [*itertools.chain.from_iterable(spec.lengths)]
    ends = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
    offsets = (ends.pin_memory() if query.is_cuda else ends).to(query.device, non_blocking=True)
    q_tad, k_tad, v_tad = (tensor.transpose(1, 2).flatten(0, 1) for tensor in (query, key, value))
    output = variable_length(q_tad, k_tad, v_tad, offsets, max(lengths), scale_of(spec, query))
    return output.unflatten(0, (query.shape[0], query.shape[2])).transpose(1, 2)


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
        and spec.has_only("documents", "dropout")
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
            spec, runs = AttentionSpec(causal=causal, dropout=dropped), list[list[Tensor]]()
            for is_formula in (False, True):
                leaves = [number.clone().requires_grad_() for number in numbers[:3]]
                query, key, value = leaves
                output = (attend_by_formula if is_formula else attend_dropped)(query, key, value, spec)
                runs.append([output.detach(), *torch.autograd.grad(output, leaves, numbers[3])])
    except Exception:  # whatever the compilers of a machine raise
        return False
    return all(
        bool((ours.float() - theirs.float()).abs().max() < _FAR * theirs.float().abs().max().clamp_min(1.0))
        for ours, theirs in zip(*runs, strict=True)
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
        mask=spec.mask,
        documents=spec.documents,
        query_start=queries.start,
        key_start=keys.start,
    )


def attend_dropped(query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec) -> Tensor:
    """Return the output of an attention [B, A, L, D]."""
    how = _DroppedForm(spec.but(mask=None), scale_of(spec, query))
    output: Tensor = _DroppedFlash.apply(query, key, value, spec.mask, how)
    return output


class _DroppedForm(NamedTuple):
    spec: AttentionSpec
    scale: float

    def form(self, query: Tensor, key: Tensor, mask: Tensor | None) -> FlashForm:
        num_queries, num_keys = query.shape[2], key.shape[2]
        spec = self.spec.but(mask=mask)
        return flash_form(spec, self.scale, range(num_queries), range(num_keys), slice(0, num_queries))


class _DroppedFlash(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, how: _DroppedForm) -> Tensor:
        ctx.how = how
        with disable_current_modes():
            output, log_sum_exp = flash_launches.forward(query, key, value, how.form(query, key, mask))
        ctx.save_for_backward(query, key, value, mask, output, log_sum_exp)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        query, key, value, mask, output, log_sum_exp = ctx.saved_tensors
        products = flash_launches.products_of(gradients[0], output)
        form = ctx.how.form(query, key, mask)
        return *flash_launches.backward(gradients[0], (query, key, value), log_sum_exp, products, form), None, None
