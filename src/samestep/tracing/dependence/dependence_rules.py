"""How operations map dimensions: the rules by which dependences on rows (`independence.py`) go from operands to results.

A rule says of one call, for each result, which dimension of an operand becomes which dimension of the result:

    elementwise            aligned from the right, as broadcasting does
    sum, softmax, norms    dimensions that are kept become themselves, those along which is reduced are SUMMED
    x W                    rows of x become rows of the result, columns of W its columns, and the inner ones are SUMMED
    cat, roll, pad         positions along the dimension shift by a known number
    x[chosen]              a dimension becomes that of the picks; written back by the same picks it becomes itself again

A result with an operand whose rows lie along a SUMMED dimension is mixed. An operation without a rule is assumed to keep
a dimension of rows whose size and place its result has too, where that may be tried on real values later; else nothing is
known of its result.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch

from samestep.tracing.dependence import arranging_rules, picking_rules
from samestep.tracing.dependence.calls import SUMMED, Call, Operand, Rule, along, broadcast, mapped, nothing_known
from samestep.tracing.dependence.independence import NO_DIM, Along, Dependence, Mixed

_aten = torch.ops.aten


def elementwise(call: Call) -> Iterator[Dependence]:
    """Rule of operations on aligned elements."""
    for result in call.results:
        yield mapped(call, [broadcast(tensor, result) for tensor in call.tensors() if tensor.dim() <= result.dim()])


def _copy(call: Call) -> Iterator[Dependence]:
    """Rule of copy_(self, source): what self was is overwritten."""
    yield mapped(call, [broadcast(call.args[1], call.results[0])])


def _product(call: Call) -> Iterator[Dependence]:
    """Rule of matrix products [.., M, K] x [.., K, N], plus a tensor in addmm and baddbmm."""
    (result,) = call.results
    adds = call.func.overloadpacket in (_aten.addmm, _aten.baddbmm, _aten.addmv)
    left, right = call.args[1:3] if adds else call.args[:2]
    batch = range(left.dim() - 2) if left.dim() > 1 else range(0)
    rows = [*batch, len(batch), SUMMED] if left.dim() > 1 else [SUMMED]
    columns = [*batch, SUMMED, *([result.dim() - 1] if right.dim() > 1 else [])]
    yield mapped(call, [(left, rows), (right, columns), *([broadcast(call.args[0], result)] if adds else [])])


def _convolution(call: Call) -> Iterator[Dependence]:
    """Rule of convolutions [N, C, ...]: channels of a group are summed, positions too unless the kernel has one."""
    (result,) = call.results
    named = call.named()
    x, weight, bias = named["input"], named["weight"], named["bias"]
    is_pointwise = all(size == 1 for size in weight.shape[2:]) and all(step == 1 for step in named["stride"])
    is_pointwise = is_pointwise and not any(named["padding"])
    space = [dim if is_pointwise else SUMMED for dim in range(2, x.dim())]
    found, groups = call.known.of(x), named["groups"]
    each, gives = x.shape[1] // groups, result.shape[1] // groups
    if (
        isinstance(found, Along)
        and found.dim == 1
        and found.inner % each == 0
        and found.start == 0
        and not any(isinstance(call.known.of(one), Mixed) for one in (weight, *([] if bias is None else [bias])))
    ):  # a group of channels for each row
        inner = found.inner // each * gives
        yield mapped(call, [(weight, [1, *[SUMMED] * (weight.dim() - 1)])], Along(1, inner, 0))
        return
    given: list[Operand] = [(x, [0, SUMMED, *space]), (weight, [1, *[SUMMED] * (weight.dim() - 1)])]
    yield mapped(call, [*given, *([] if bias is None else [(bias, [1])])])


def _embedding(call: Call) -> Iterator[Dependence]:
    table, indices = call.args[:2]
    yield mapped(call, [(indices, range(indices.dim())), (table, [SUMMED, indices.dim()])])


def _by_channel(call: Call) -> Iterator[Dependence]:
    """Rule of batch norm: in training the statistics of a channel are those of all other dimensions."""
    named = call.named()
    x = named["input"]
    uses_batch = bool(named.get("training", named.get("train", True)))
    own = [1 if dim == 1 else SUMMED if uses_batch else dim for dim in range(x.dim())]
    others = [tensor for tensor in call.tensors() if tensor is not x]
    for result in call.results:
        if result.dim() == x.dim():
            yield mapped(call, [(x, own), *((other, [1]) for other in others)])
        else:
            yield mapped(call, [(x, [0 if to == 1 else SUMMED for to in own]), *((other, [0]) for other in others)])


def _by_group(call: Call) -> Iterator[Dependence]:
    """Rule of group norm: the statistics of a group of channels are those of one sample."""
    x = call.args[0]
    others = [tensor for tensor in call.tensors() if tensor is not x]
    for result in call.results:
        own = [0, *[SUMMED] * (x.dim() - 1)]
        yield mapped(call, [(x, own), *((other, [min(1, result.dim() - 1)]) for other in others)])


def _within(call: Call, last: int) -> Iterator[Dependence]:
    """Rule of operations that mix the last dimensions and keep those before: pooling, resizing, decompositions."""
    for result in call.results:
        given = []
        for tensor in call.tensors():
            kept = tensor.dim() - last
            given.append(
                (tensor, [dim if dim < kept and dim < result.dim() else SUMMED for dim in range(tensor.dim())])
            )
        yield mapped(call, given)


def attention(call: Call) -> Iterator[Dependence]:
    """Rule of fused attention [.., T, D]: what is summed are keys and features."""
    query, key, value, *rest = call.tensors()
    batch = [*range(query.dim() - 2)]
    for result in call.results:
        given: list[Operand] = [(query, [*batch, len(batch), SUMMED])]
        given += [(one, [*batch, SUMMED, SUMMED]) for one in (key, value)]
        for mask in rest:
            lead = range(result.dim() - mask.dim(), result.dim())
            given.append((mask, [*lead[:-1], SUMMED]))
        yield mapped(call, given)


def assumed(call: Call) -> Iterator[Dependence]:
    """Rule of an operation that is to be tried: a dimension of rows stays where it is, if the result has it too."""
    rows = [(tensor, found) for tensor in call.tensors() if isinstance(found := call.known.of(tensor), Along)]
    alike = {found for _, found in rows}
    for result, unknown in zip(call.results, nothing_known(call), strict=True):
        one = next(iter(alike)) if len(alike) == 1 else None
        fits = (
            one is not None
            and one.dim != NO_DIM
            and all(one.dim < result.dim() and result.shape[one.dim] == tensor.shape[one.dim] for tensor, _ in rows)
        )
        mixed = any(isinstance(call.known.of(tensor), Mixed) for tensor in call.tensors())
        yield one if fits and not mixed else unknown


def along_dimension(dim: int) -> Rule:
    """Return the rule of an operation that works on each position along `dim` of all its tensors by itself."""

    def rule(call: Call) -> Iterator[Dependence]:
        for result in call.results:
            at = dim % max(result.dim(), 1)
            given = []
            for tensor in call.tensors():
                own = dim % max(tensor.dim(), 1)
                is_one = tensor.dim() and tensor.shape[own] == result.shape[at]
                given.append((tensor, [at if one == own and is_one else SUMMED for one in range(tensor.dim())]))
            yield mapped(call, given)

    return rule


FILLS = {
    _aten.zeros, _aten.ones, _aten.full, _aten.empty, _aten.zeros_like, _aten.ones_like, _aten.full_like,
    _aten.empty_like, _aten.new_zeros, _aten.new_ones, _aten.new_full, _aten.new_empty, _aten.empty_strided,
    _aten.new_empty_strided, _aten.scalar_tensor, _aten.zero_, _aten.fill_,
}  # fmt: skip
"""Operations that make a tensor of equal elements, or of uninitialised ones."""
COPIES = {
    _aten.clone, _aten._to_copy, _aten.lift_fresh_copy, _aten.dropout, _aten.native_dropout, _aten.masked_fill,
    _aten.masked_fill_, _aten.tril, _aten.triu, _aten.contiguous, _aten.bucketize, _aten.lerp, _aten.lerp_,
    _aten.isin, _aten._prelu_kernel, _aten.log_sigmoid_forward, _aten.addcmul, _aten.addcdiv, _aten._conj_physical,
    _aten.bernoulli,
}  # fmt: skip
"""Elementwise operations that torch does not tag as such."""
RULES: dict[Any, Rule] = {
    **dict.fromkeys(COPIES, elementwise),
    _aten.copy_: _copy,
    _aten.copy: _copy,
    **dict.fromkeys(
        (
            _aten.mean, _aten.sum, _aten.amax, _aten.amin, _aten.aminmax, _aten.var, _aten.std, _aten.var_mean,
            _aten.std_mean, _aten.any, _aten.all, _aten.argmax, _aten.argmin, _aten.max, _aten.min, _aten.logsumexp,
            _aten.linalg_vector_norm, _aten.norm, _aten._softmax, _aten._log_softmax, _aten.native_layer_norm,
            _aten._fused_rms_norm, _aten.topk, _aten.kthvalue, _aten.median, _aten.nanmedian, _aten.mode,
            _aten.cumsum, _aten.cumsum_, _aten.cumprod, _aten.logcumsumexp, _aten.cummax, _aten.cummin, _aten.prod,
            _aten.nansum, _aten._fft_r2c, _aten._fft_c2r, _aten._fft_c2c, _aten.count_nonzero,
        ),
        along,
    ),
    **dict.fromkeys((_aten.sort, _aten.argsort), picking_rules.sort),
    **dict.fromkeys((_aten.mm, _aten.addmm, _aten.bmm, _aten.baddbmm, _aten.mv, _aten.addmv, _aten.dot), _product),
    _aten.convolution: _convolution,
    _aten.embedding: _embedding,
    **dict.fromkeys(
        (
            _aten.native_batch_norm, _aten._native_batch_norm_legit, _aten._native_batch_norm_legit_functional,
            _aten.cudnn_batch_norm, _aten._batch_norm_with_update, _aten._batch_norm_no_update,
            _aten.miopen_batch_norm, _aten.batch_norm_stats,
        ),
        _by_channel,
    ),
    _aten.native_group_norm: _by_group,
    **dict.fromkeys(
        (
            _aten.gather, _aten.scatter, _aten.scatter_, _aten.scatter_add, _aten.scatter_add_, _aten.scatter_reduce,
            _aten.scatter_reduce_,
        ),
        picking_rules.gather,
    ),
    _aten.cat: arranging_rules.cat,
    _aten.stack: arranging_rules.stack,
    _aten.constant_pad_nd: arranging_rules.pad,
    _aten.roll: arranging_rules.roll,
    _aten.flip: arranging_rules.flip,
    _aten.repeat: arranging_rules.repeat,
    _aten.index: picking_rules.index,
    _aten._unsafe_index: picking_rules.index,
    _aten.masked_select: lambda call: picking_rules.index(
        Call(call.func, (call.args[0], [call.args[1]]), {}, call.results, call.known, call.where, call.on_constant, call.value_of)
    ),
    **dict.fromkeys(
        (_aten.index_put, _aten.index_put_, _aten._unsafe_index_put, _aten.index_add, _aten.index_add_, _aten.index_copy,
         _aten.index_copy_),
        picking_rules.write_back,
    ),
    _aten.index_select: picking_rules.index_select,
    **dict.fromkeys((_aten.nonzero, _aten.bincount, _aten.histc), picking_rules.places),
    **dict.fromkeys(
        (
            _aten.linalg_inv_ex, _aten.linalg_cholesky_ex, _aten.linalg_solve_triangular, _aten._linalg_svd,
            _aten._linalg_eigh, _aten.linalg_qr, _aten.linalg_lu_factor_ex, _aten._linalg_det, _aten.triangular_solve,
            _aten.cholesky_inverse, _aten._linalg_slogdet, _aten.pixel_shuffle, _aten.pixel_unshuffle,
        ),
        functools.partial(_within, last=2),
    ),
}  # fmt: skip
"""The rule of each operation that has one."""

_SPATIAL = ("pool", "upsample", "reflection_pad", "replication_pad", "im2col", "col2im", "grid_sampler")


def rule_of(func: Any) -> Rule | None:
    """Return the rule of an operation: its own, that of its kind, or none."""
    packet = func.overloadpacket
    if packet in RULES:
        return RULES[packet]
    if packet in DECLARED:
        return DECLARED[packet]
    if torch.Tag.pointwise in func.tags:
        return elementwise
    name: str = packet.__name__
    if any(word in name for word in _SPATIAL):
        return functools.partial(_within, last=next((n for n in (1, 2, 3) if f"{n}d" in name), 2))
    return None


DECLARED: dict[Any, Rule] = {}
"""Rules that libraries have stated by `independent`."""


def independent(op: Any, *, along: int) -> None:
    """State that an operation works on each position along one dimension of its tensors by itself.

    The statement is used where samples are split over ranks or micro-batches, and is tried on the first batch of a run.

    Args:
        op: an operation of `torch.ops`, such as `torch.ops.mylib.scan`, with or without the name of an overload.
        along: the dimension, the same for every tensor that the operation takes and returns.
    """
    DECLARED[getattr(op, "overloadpacket", op)] = along_dimension(along)
