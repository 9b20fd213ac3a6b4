"""Attention by the formula of `attention_spec.py`, for some queries and keys at a time: every form, with its gradients.

    dV = (P * D)' dO      dP = (dO V') * D      dS = P (dP - sum over features of dO O)      dsink = - sum of exp(sink - L) dO O
    dS = dS (1 - tanh^2)  where scores are capped
    dQ = scale dS K       dK = scale dS' Q

A block of queries needs the rows of P and D that are its own, so [B, A, queries of a block, S] is all that exists at a time, as in
the tiles of FlashAttention (Dao et al. 2022, arXiv:2205.14135), and the backward computes it again. In a causal attention a block
computes the keys that its last query sees. A small attention keeps its weights.

Sums are in float32 at least. Scale and 1 / (1 - p) are factors of the products, so they cost nothing.

Legend: as in `attention_spec.py`; b: a block's part.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from samestep.building.attention.attention_spec import AttentionSpec
from samestep.building.attention.head_products import WIDE, by_features, by_keys, by_queries, nothing, wide, widen
from samestep.building.torch_seams import disable_current_modes, num_dispatch_modes

BLOCK_ELEMENTS = 2**24
"""Elements of the weights of a block, of all samples and heads."""
LEAST_QUERIES = 16
"""The least number of queries in a block: fewer give products that are too narrow."""
KEPT_ELEMENTS = 2**16
"""Elements of the weights of a whole call that are kept for the backward with their mask: so few take longer to compute again than
their memory is worth."""

Runs = tuple[range, ...]
"""Tokens in increasing order."""


class Pairs(NamedTuple):
    """The tokens whose queries and whose keys are here."""

    queries: Runs
    keys: Runs

    @classmethod
    def of_all(cls, num_queries: int, num_keys: int) -> Pairs:
        """Return all pairs of so many tokens."""
        return cls((range(num_queries),), (range(num_keys),))


class AttentionTile(NamedTuple):
    """The positions of the queries and keys of a block among those that are here."""

    rows: slice
    keys: slice

    @property
    def num_rows(self) -> int:
        """Number of queries."""
        return int(self.rows.stop - self.rows.start)

    @property
    def num_keys(self) -> int:
        """Number of keys."""
        return int(self.keys.stop - self.keys.start)


def blocks(spec: AttentionSpec, pairs: Pairs, rows: slice, each_row: int) -> Iterator[AttentionTile]:
    """Yield the blocks of some queries, each with the keys that its queries may see, or one that they do not see.

    `each_row` elements are computed for a query.
    """
    size = max(BLOCK_ELEMENTS // max(each_row, 1), LEAST_QUERIES)
    for start in range(rows.start, rows.stop, size):
        some = slice(start, min(start + size, rows.stop))
        high = cut(pairs.queries, some)[-1].stop if spec.causal else pairs.keys[-1].stop
        last = sum(min(max(high - run.start, 0), len(run)) for run in pairs.keys)
        yield AttentionTile(some, slice(0, max(last, 1)))


# -- the formula of one block ----------------------------------------------------------------------


def scores_of(
    spec: AttentionSpec, scale: float, pairs: Pairs, block: AttentionTile, query: Tensor, key: Tensor
) -> Tensor:
    """Return the scores of a block [B, A, b, b], -inf for pairs that do not see each other."""
    scores = by_features(query[:, :, block.rows].to(key.dtype), key[:, :, block.keys], scale)
    if spec.bounds_keys:
        hidden = _hidden(spec, pairs, block, query.device)
        scores = scores if hidden is None else scores.masked_fill_(hidden, -math.inf)
    if spec.mask is not None:
        part = mask_part(spec.mask, pairs, block)
        scores = scores.masked_fill_(~part, -math.inf) if part.dtype is torch.bool else scores.add_(part)
    return scores


def weights_of(spec: AttentionSpec, scores: Tensor, *, needs_lse: bool) -> tuple[Tensor, Tensor | None]:
    """Return the weights of keys and, where it is needed, the log-sum-exp of each query [B, A, b].

    A query that sees nothing has zeros, forward and backward, as in torch.
    """
    weights = scores.softmax(-1)
    if not needs_lse and spec.mask is None and spec.documents is None:
        return weights, None
    top = scores.amax(-1)
    is_blind = top == -math.inf
    weights = weights.masked_fill_(is_blind.unsqueeze(-1), 0.0)
    log_sum_exp = (top - weights.amax(-1).log()).masked_fill_(is_blind, -math.inf)
    return weights, log_sum_exp


def weights_given(scores: Tensor, log_sum_exp: Tensor) -> Tensor:
    """Return the weights of some keys, of the log-sum-exp over all keys [B, A, b]."""
    finite = log_sum_exp.masked_fill(log_sum_exp == -math.inf, 0.0)
    return scores.sub_(finite.unsqueeze(-1)).exp_()


def dropped_of(spec: AttentionSpec, pairs: Pairs, block: AttentionTile) -> Tensor | None:
    """Return which weights of a block are dropped; None where none are."""
    if spec.dropout is None:
        return None
    (tokens,) = cut(pairs.keys, block.keys)  # models that drop have contiguous slices
    drop = spec.dropout.part(block.rows.start, block.rows.stop, tokens.stop)
    return drop[..., tokens.start :] if tokens.start else drop


def output_of(spec: AttentionSpec, weights: Tensor, drop: Tensor | None, value: Tensor) -> Tensor:
    """Return the output of a block [B, A, b, D], of its weights and the values of its keys."""
    if drop is None or spec.dropout is None:
        return by_keys(weights, value)
    return by_keys(weights.masked_fill(drop, 0.0), value, spec.dropout.scale)


class Gradients:
    """The gradients of an attention in the dtype of its sums, to which blocks add theirs."""

    def __init__(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> None:
        """Begin sums for tensors like these; the mask is None where it takes no gradient."""
        self.of_queries = Sum(query)
        self.of_keys, self.of_values = Sum(key), Sum(value)
        self.of_mask = None if mask is None else torch.zeros_like(mask)


def add_gradients(
    spec: AttentionSpec,
    scale: float,
    pairs: Pairs,
    block: AttentionTile,
    given: tuple[Tensor, Tensor, Tensor],
    computed: tuple[Tensor, Tensor | None],
    gradient: Tensor,
    sums: Tensor | None,
    into: Gradients,
) -> None:
    """Add the gradients that a block gives to its queries, keys, values and mask.

    `given` are the tensors of all queries, keys and values that are here, `computed` the block's weights and dropped
    weights, `gradient` that of its output, and `sums` of its products with the output [B, A, b, 1]; None where the keys of the
    block are all that its queries see.
    """
    query, key, value = given
    weights, drop = computed
    times = 1.0 if spec.dropout is None else spec.dropout.scale
    undropped = weights if drop is None else weights.masked_fill(drop, 0.0)
    into.of_values.add(block.keys, by_queries(undropped, gradient, value, times))
    of_scores = by_features(gradient, value[:, :, block.keys], times)
    if drop is not None:
        of_scores = of_scores.masked_fill_(drop, 0.0)
    if sums is None:
        of_scores = torch.ops.aten._softmax_backward_data(of_scores, weights, -1, weights.dtype)
    else:
        of_scores = of_scores.sub_(sums).mul_(weights)
    if into.of_mask is not None:
        _add_to_mask(pairs, block, into.of_mask, of_scores)
    into.of_queries.add(block.rows, by_keys(of_scores, key[:, :, block.keys], scale))
    into.of_keys.add(block.keys, by_queries(of_scores, query[:, :, block.rows].to(of_scores.dtype), key, scale))


# -- all keys on one device ------------------------------------------------------------------------


class _How(NamedTuple):
    """The form of an attention, without the tensors that take gradients."""

    spec: AttentionSpec
    scale: float


def attend_by_formula(query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec) -> Tensor:
    """Return the output of an attention [B, A, L, D]."""
    how = _How(spec.but(mask=None), scale_of(spec, query))
    output: Tensor = _Formula.apply(query, key, value, spec.mask, how)
    return output


def scale_of(spec: AttentionSpec, query: Tensor) -> float:
    """Return the number by which products of queries and keys are multiplied."""
    return float(query.shape[-1] ** -0.5) if spec.scale is None else spec.scale


def is_small(query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec) -> bool:
    """Return whether the weights of an attention with dropout are few enough to be kept, and operations of torch are all it needs."""
    few = query.shape[0] * query.shape[1] * query.shape[2] * key.shape[2] <= KEPT_ELEMENTS
    return (
        few
        and query.dtype == key.dtype == value.dtype
        and spec.mask is None
        and spec.has_only("dropout")
        and key.shape[:2] == query.shape[:2]
    )


def attend_small(query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec) -> Tensor:
    """Return the output of a small attention by operations of torch and their gradients, which keep its weights."""
    drop = spec.dropout
    assert drop is not None, "it is for dropout"
    num_queries, num_keys = query.shape[2], key.shape[2]
    queries, keys, values = _wide_rows(query, key, value)
    hidden = _future_scores(num_queries, num_keys, queries) if spec.causal else nothing(queries)
    scale = scale_of(spec, query)
    scores = torch.baddbmm(hidden, queries, keys.transpose(1, 2), beta=int(spec.causal), alpha=scale)
    dropped = drop.part(0, num_queries, num_keys).flatten(0, 1)
    weights = scores.softmax(-1).masked_fill(dropped, 0.0)
    output = torch.baddbmm(nothing(queries), weights, values, beta=0, alpha=drop.scale)
    return output.view(*query.shape[:3], value.shape[-1]).to(query.dtype)


def _wide_rows(*tensors: Tensor) -> Sequence[Tensor]:
    """Return queries, keys and values in the dtype of their sums, as [B A, T, D]: in half precision by one cast where they are alike."""
    first, *others = tensors
    if first.dtype in WIDE:
        return [tensor.flatten(0, 1) for tensor in tensors]
    if any(tensor.shape != first.shape for tensor in others):
        return [tensor.to(wide(first)).flatten(0, 1) for tensor in tensors]
    return torch.stack(tensors).to(wide(first)).flatten(1, 2).unbind()


class _Formula(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, how: _How) -> Tensor:
        ctx.how = how
        saved: tuple[Tensor | None, ...] = ()
        spec, pairs = how.spec if mask is None else how.spec.but(mask=mask), Pairs.of_all(query.shape[2], key.shape[2])
        with disable_current_modes():  # selective recompute would keep the products of all blocks
            keys, values = widen(key), widen(value)
            outputs = Sum(query, value.shape[-1])
            for block in blocks(spec, pairs, slice(0, query.shape[2]), query.shape[0] * query.shape[1] * key.shape[2]):
                scores = scores_of(spec, how.scale, pairs, block, query, keys)
                weights, _ = weights_of(spec, scores, needs_lse=False)
                drop = dropped_of(spec, pairs, block)
                outputs.add(block.rows, output_of(spec, weights, drop, values[:, :, block.keys]))
                if weights.numel() <= KEPT_ELEMENTS and block.num_rows == query.shape[2]:
                    saved = weights, drop
            output = outputs.value.to(query.dtype)
        ctx.save_for_backward(query, key, value, mask, *saved)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        query, key, value, mask, *saved = ctx.saved_tensors
        how: _How = ctx.how
        spec, pairs = how.spec if mask is None else how.spec.but(mask=mask), Pairs.of_all(query.shape[2], key.shape[2])
        keys, values = widen(key), widen(value)
        into = Gradients(query, keys, values, mask if ctx.needs_input_grad[3] else None)
        for block in blocks(spec, pairs, slice(0, query.shape[2]), query.shape[0] * query.shape[1] * key.shape[2]):
            if saved:
                weights, drop = saved
            else:
                scores = scores_of(spec, how.scale, pairs, block, query, keys)
                weights, _ = weights_of(spec, scores, needs_lse=False)
                drop = dropped_of(spec, pairs, block)
            of_output = widen(gradients[0][:, :, block.rows])
            add_gradients(spec, how.scale, pairs, block, (query, keys, values), (weights, drop), of_output, None, into)
        of_three = (into.of_queries.like(query), into.of_keys.like(key), into.of_values.like(value))
        return *of_three, into.of_mask, None


class Sum:
    """The sum of what blocks give to some rows of a tensor [B, A, T, D]."""

    def __init__(self, like: Tensor, width: int | None = None) -> None:
        """Begin with zeros of this shape, with so many features."""
        self._like = like
        self._shape = like.shape if width is None else (*like.shape[:-1], width)
        self._sum: Tensor | None = None

    def add(self, rows: slice, part: Tensor) -> None:
        """Add a part to some rows."""
        if self._sum is None and part.shape == self._shape:
            self._sum = part
            return
        if self._sum is None:
            self._sum = part.new_zeros(self._shape)
        self._sum[:, :, rows].add_(part)

    @property
    def is_empty(self) -> bool:
        """Whether nothing was added."""
        return self._sum is None

    @property
    def value(self) -> Tensor:
        """The sum, in the dtype of its parts."""
        return self._like.new_zeros(self._shape) if self._sum is None else self._sum

    def like(self, tensor: Tensor) -> Tensor:
        """Return the sum in the dtype of a tensor."""
        return self.value.to(tensor.dtype)


# -- which pairs see each other --------------------------------------------------------------------


def cut(runs: Runs, some: slice) -> Runs:
    """Return the tokens at some positions of what is here."""
    ranges, start = [], 0
    for run in runs:
        low, high = max(some.start - start, 0), min(some.stop - start, len(run))
        if low < high:
            ranges.append(run[low:high])
        start += len(run)
    return tuple(ranges)


def taken(tensor: Tensor, dim: int, runs: Runs) -> Tensor:
    """Return the elements of a tensor for some tokens."""
    if len(runs) == 1 and len(runs[0]) == tensor.shape[dim]:
        return tensor
    parts = [tensor.narrow(dim, run.start, len(run)) for run in runs]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def _hidden(spec: AttentionSpec, pairs: Pairs, block: AttentionTile, device: torch.device) -> Tensor | None:
    """Return which keys of a block causality and documents hide from a query, bool [..., b, b]; None where they hide none."""
    queries, keys = cut(pairs.queries, block.rows), cut(pairs.keys, block.keys)
    hidden: Tensor | None = None
    if spec.causal and keys[-1].stop - 1 > queries[0].start:
        hidden = _future(queries, keys, device)
    if spec.documents is not None:
        of_queries, of_keys = taken(spec.documents, 1, queries), taken(spec.documents, 1, keys)
        others = of_queries[:, None, :, None] != of_keys[:, None, None, :]
        hidden = others if hidden is None else hidden | others
    return hidden


def hides_all(spec: AttentionSpec, pairs: Pairs, block: AttentionTile) -> bool:
    """Return whether masks or documents on the host hide all keys of a block from all its queries."""
    if spec.mask is not None and spec.mask.dtype is torch.bool and spec.mask.device.type == "cpu":
        return not mask_part(spec.mask, pairs, block).any()
    if spec.documents is not None and spec.documents.device.type == "cpu":
        of_queries, of_keys = (taken(spec.documents, 1, cut(*ends)) for ends in zip(pairs, block, strict=True))
        return not (of_queries[:, :, None] == of_keys[:, None]).any()
    return False


def _positions(runs: Runs, device: torch.device) -> Tensor:
    parts = [torch.arange(run.start, run.stop, device=device) for run in runs]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _future(queries: Runs, keys: Runs, device: torch.device) -> Tensor:
    """Return which keys come after each query, bool [b, b]."""
    key = (queries, keys, device)
    if (
        not num_dispatch_modes() and key in _FUTURES
    ):  # a compiler that traces makes its own, and its sizes may be symbols
        return _FUTURES[key]
    future = _positions(queries, device)[:, None] < _positions(keys, device)
    is_kept = future.numel() <= KEPT_ELEMENTS and device.type != "meta" and not num_dispatch_modes()
    if is_kept and len(_FUTURES) < _MOST_MASKS:
        _FUTURES[key] = future
    return future


_FUTURES: dict[tuple[Runs, Runs, torch.device], Tensor] = {}
"""Small causal masks that were made before."""


def _future_scores(num_queries: int, num_keys: int, like: Tensor) -> Tensor:
    """Return scores of which those of later keys are -inf and the others 0, in the dtype of a tensor."""
    key = (num_queries, num_keys, like.dtype, like.device)
    if not num_dispatch_modes() and key in _FUTURE_SCORES:
        return _FUTURE_SCORES[key]
    hidden = torch.full((num_queries, num_keys), -math.inf, dtype=like.dtype, device=like.device).triu(1)
    if not num_dispatch_modes():
        if len(_FUTURE_SCORES) >= _MOST_MASKS:
            _FUTURE_SCORES.clear()
        _FUTURE_SCORES[key] = hidden
    return hidden


_FUTURE_SCORES: dict[tuple[int, int, torch.dtype, torch.device], Tensor] = {}
"""The same that are added to scores."""
_MOST_MASKS = 256


def mask_part(mask: Tensor, pairs: Pairs, block: AttentionTile) -> Tensor:
    """Return the part of a whole mask [..., T or 1, T or 1] for a block."""
    if mask.dim() > 1 and mask.shape[-2] > 1:
        mask = taken(mask, -2, cut(pairs.queries, block.rows))
    return taken(mask, -1, cut(pairs.keys, block.keys)) if mask.shape[-1] > 1 else mask


def _add_to_mask(pairs: Pairs, block: AttentionTile, of_mask: Tensor, of_scores: Tensor) -> None:
    """Add the gradient of scores to that of the mask that was added to them."""
    query_parts, key_parts = cut(pairs.queries, block.rows), cut(pairs.keys, block.keys)
    by_query, by_key = of_mask.dim() > 1 and of_mask.shape[-2] > 1, of_mask.shape[-1] > 1
    for queries, part in zip(query_parts, of_scores.split([len(p) for p in query_parts], -2), strict=True):
        for keys, each in zip(key_parts, part.split([len(p) for p in key_parts], -1), strict=True):
            window = of_mask.narrow(-2, queries.start, len(queries)) if by_query else of_mask
            window = window.narrow(-1, keys.start, len(keys)) if by_key else window
            window.add_(_fit(each, window.shape))


def _fit(x: Tensor, shape: Sequence[int]) -> Tensor:
    """Return a tensor summed over the dimensions along which one of this shape was broadcast."""
    return x if x.shape == shape else x.sum_to_size(shape)
