"""Attention with dropout, in blocks of queries: the backward computes masks and weights again instead of keeping them.

No fused kernel takes masks that are functions of their positions, so attention is computed by the formula, in at least
float32:

    P = softmax(scale Q K' + mask)      O = (P * D) V              D = 0 where dropped, else 1 / (1 - p)
    dV = (P * D)' dO                    dP = (dO V') * D           dS = P (dP - sum of dP P over keys)
    dQ = scale dS K                     dK = scale dS' Q

A block of queries needs P and D of its rows alone, so [B, H, queries of a block, S] is all that exists at a time, as in
the tiles of FlashAttention (Dao et al. 2022, arXiv:2205.14135), and the backward keeps the arguments of the call. In a
causal attention a block computes the keys that its last query may look at. Masks come from a `MaskSource`, the
interface by which all replacements of torch's random functions get hashed bits and masks.

Legend: B batch, H heads, L queries, S keys, D head width; b: of a block.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from samestep.building.attention import AttentionCall
from samestep.building.packed_positions import DocumentMask
from samestep.building.torch_seams import disable_current_modes
from samestep.errors import ModelError

BLOCK_ELEMENTS = 2**24
"""Elements of the weights of a block, of all samples and heads."""
LEAST_QUERIES = 16
"""The least number of queries in a block: fewer give products that are too narrow."""
KEPT_ELEMENTS = 2**16
"""Elements of the weights of a whole call that are kept for the backward with their mask: so few take longer to compute again than
their memory is worth."""

DropPart = Callable[[int, int, int], Tensor]
"""Returns which weights are dropped, bool [..., queries, keys], of the queries from the first to before the second number, and
of as many of the first keys as the third."""


class _Dropped(NamedTuple):
    """The settings of a call, without its tensors."""

    drop: DropPart
    p: float
    scale: float
    is_causal: bool
    repeats: int
    """Number of heads of queries for each head of keys."""
    block: int
    """Queries of a block."""
    documents: DocumentMask | None
    """The mask of packed documents, from which each block computes its rows."""


def attend_with_dropout(call: AttentionCall, drop: DropPart) -> Tensor:
    """Return the result of `scaled_dot_product_attention` with these arguments, with the weights dropped that `drop`
    selects."""
    query, key, value, mask, p, is_causal, scale, enable_gqa = call
    repeats = query.size(-3) // key.size(-3) if enable_gqa else 1
    documents = mask if isinstance(mask, DocumentMask) else None
    of_keys = key.shape[:-2] if repeats == 1 else (*key.shape[:-3], key.size(-3) * repeats)
    each = math.prod(broadcast(query.shape[:-2], of_keys)) * key.size(-2)
    block = max(BLOCK_ELEMENTS // max(each, 1), LEAST_QUERIES)
    how = _Dropped(drop, p, query.size(-1) ** -0.5 if scale is None else scale, is_causal, repeats, block, documents)
    result: Tensor = _DroppedAttention.apply(query, key, value, None if documents is not None else mask, how)
    return result


def broadcast(first: Sequence[int], second: Sequence[int]) -> tuple[int, ...]:
    """Return the shape to which two shapes are broadcast."""
    return tuple(first) if tuple(first) == tuple(second) else tuple(torch.broadcast_shapes(first, second))


class _DroppedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, how: _Dropped) -> Tensor:
        ctx.how = how
        kept: tuple[Tensor, ...] = ()
        with disable_current_modes():  # selective recompute would keep the products of all blocks
            k_bhsd, v_bhsd = (_repeat_heads(_widen(x), how.repeats) for x in (key, value))
            parts = []
            for rows in _blocks(query, key, how):
                weights_bhls, drop_bhls = _weights(rows, query, k_bhsd, mask, how), how.drop(*rows)
                parts.append(_apply_drop(weights_bhls, drop_bhls, how.p) @ v_bhsd[..., : rows.num_keys, :])
                if weights_bhls.numel() <= KEPT_ELEMENTS and rows.stop - rows.start == query.size(-2):
                    kept = weights_bhls, drop_bhls
            ctx.save_for_backward(query, key, value, mask, *kept)
            return (parts[0] if len(parts) == 1 else torch.cat(parts, -2)).to(query.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        query, key, value, mask, *kept = ctx.saved_tensors
        how: _Dropped = ctx.how
        k_bhsd, v_bhsd = (_repeat_heads(_widen(x), how.repeats) for x in (key, value))
        of_keys, of_values = _Total(k_bhsd), _Total(v_bhsd)
        of_queries: list[Tensor] = []
        of_mask = torch.zeros_like(mask) if ctx.needs_input_grad[3] else None
        for rows in _blocks(query, key, how):
            weights_bhls, drop_bhls = kept or (_weights(rows, query, k_bhsd, mask, how), how.drop(*rows))
            given_bhld = _widen(gradients[0][..., rows.start : rows.stop, :])
            some = slice(rows.num_keys)
            of_values.add(some, _apply_drop(weights_bhls, drop_bhls, how.p).transpose(-2, -1) @ given_bhld)
            found_bhls = _fit(given_bhld @ v_bhsd[..., some, :].transpose(-2, -1), weights_bhls.shape)
            found_bhls = _apply_drop(found_bhls, drop_bhls, how.p)
            found_bhls = torch.ops.aten._softmax_backward_data(found_bhls, weights_bhls, -1, weights_bhls.dtype)
            if of_mask is not None:
                part = _of_rows(of_mask, rows)
                part.add_(_fit(found_bhls, part.shape))
            found_bhls = found_bhls * how.scale
            of_queries.append(found_bhls @ k_bhsd[..., some, :])
            q_bhld = _widen(query[..., rows.start : rows.stop, :])
            of_keys.add(some, found_bhls.transpose(-2, -1) @ q_bhld)
        found = _fit(of_queries[0] if len(of_queries) == 1 else torch.cat(of_queries, -2), query.shape).to(query.dtype)
        sums = (_sum_heads(one.value, how.repeats, x) for one, x in ((of_keys, key), (of_values, value)))
        return found, *sums, of_mask, None


class _Total:
    """The sum of the gradients that blocks of queries give to keys or values [..., S, D]."""

    def __init__(self, like: Tensor) -> None:
        self._like = like
        self._sum: Tensor | None = None

    def add(self, some: slice, part: Tensor) -> None:
        """Add the gradient of the first keys."""
        like = self._like
        if self._sum is None and some.stop == like.size(-2):
            self._sum = _fit(part, like.shape)
            return
        if self._sum is None:
            self._sum = torch.zeros_like(like)
        window = self._sum[..., some, :]
        window.add_(_fit(part, window.shape))

    @property
    def value(self) -> Tensor:
        """The sum."""
        return torch.zeros_like(self._like) if self._sum is None else self._sum


class _QueryBlock(NamedTuple):
    """A block of queries, and the number of the first keys that they may look at."""

    start: int
    stop: int
    num_keys: int


def _blocks(query: Tensor, key: Tensor, how: _Dropped) -> Iterator[_QueryBlock]:
    num_queries, num_keys = query.size(-2), key.size(-2)
    for start in range(0, num_queries, how.block):
        stop = min(start + how.block, num_queries)
        yield _QueryBlock(start, stop, min(stop, num_keys) if how.is_causal or how.documents is not None else num_keys)


def _weights(rows: _QueryBlock, query: Tensor, k_bhsd: Tensor, mask: Tensor | None, how: _Dropped) -> Tensor:
    """Return a block's weights of keys, before dropout."""
    q_bhld = _widen(query[..., rows.start : rows.stop, :]) * how.scale
    scores_bhls = q_bhld @ k_bhsd[..., : rows.num_keys, :].transpose(-2, -1)
    if how.is_causal:
        scores_bhls = scores_bhls.masked_fill(
            _future(scores_bhls.size(-2), rows.num_keys, rows.start, query.device), -math.inf
        )
    if how.documents is not None:
        apart_b1ls = ~how.documents.rows(*rows)
        return scores_bhls.masked_fill(apart_b1ls, -math.inf).softmax(-1)
    if mask is None:
        return scores_bhls.softmax(-1)
    mask = _of_rows(mask, rows)
    if mask.dtype == torch.bool:
        scores_bhls = scores_bhls.masked_fill(~mask, -math.inf)
    else:
        scores_bhls = scores_bhls + mask.to(scores_bhls.dtype)
    # A query that may look at nothing gets zeros, forward and backward, as in torch.
    blind_bhl1 = (scores_bhls == -math.inf).all(-1, keepdim=True)
    return scores_bhls.masked_fill(blind_bhl1, 0.0).softmax(-1).masked_fill(blind_bhl1, 0.0)


def _future(num_queries: int, num_keys: int, start: int, device: torch.device) -> Tensor:
    """Return which keys come after each query, bool [queries, keys]; the first query is at `start`."""
    if num_queries * num_keys > KEPT_ELEMENTS or device.type == "meta":
        return torch.ones(num_queries, num_keys, dtype=torch.bool, device=device).triu(start + 1)
    key = (num_queries, num_keys, start, device)
    if key not in _FUTURES:
        _FUTURES[key] = torch.ones(num_queries, num_keys, dtype=torch.bool, device=device).triu(start + 1)
    return _FUTURES[key]


_FUTURES: dict[tuple[int, int, int, torch.device], Tensor] = {}
"""Small causal masks that were made before."""


def _apply_drop(x: Tensor, drop: Tensor, p: float) -> Tensor:
    """Return the elements of x that are not dropped, scaled, and zeros."""
    return x.masked_fill(drop, 0.0).mul_(1.0 / (1.0 - p) if p < 1.0 else 0.0)


def _of_rows(mask: Tensor, rows: _QueryBlock) -> Tensor:
    """Return a block's part of a mask, which may be one for all queries or keys."""
    if mask.dim() > 1 and mask.size(-2) > 1:
        mask = mask[..., rows.start : rows.stop, :]
    return mask[..., : rows.num_keys] if mask.size(-1) > 1 else mask


def _fit(x: Tensor, shape: Sequence[int]) -> Tensor:
    """Return a tensor summed over the dimensions along which one of this shape was broadcast."""
    return x if x.shape == shape else x.sum_to_size(shape)


def _widen(x: Tensor) -> Tensor:
    return x if x.dtype is torch.float32 else x.to(torch.promote_types(x.dtype, torch.float32))


def _repeat_heads(x: Tensor, repeats: int) -> Tensor:
    return x if repeats == 1 else x.repeat_interleave(repeats, -3)


def _sum_heads(gradient: Tensor, repeats: int, like: Tensor) -> Tensor:
    """Return the gradient of a tensor of keys or values from that of its repeated heads."""
    if repeats > 1:
        gradient = gradient.unflatten(-3, (-1, repeats)).sum(-3)
    return gradient.sum_to_size(like.shape).to(like.dtype)


class MaskSource(TorchFunctionMode):
    """A function mode that computes the masks and random numbers of one forward; `mode.DropoutMode` implements it."""

    sees_all = False
    """Whether it must see every function of the model, those of compiled blocks too."""
    allows_random = False
    """Whether numbers that it does not compute are drawn from the process's generators instead of being refused."""

    def drop(self, x: Tensor, shape: torch.Size, p: float, what: str) -> Tensor:
        """Return a mask for x of this shape, bool, True where an element is dropped."""
        raise NotImplementedError

    def drop_part(self, x: Tensor, shape: torch.Size, p: float, what: str) -> DropPart:
        """Return a function that makes parts of such a mask, at any time."""
        raise NotImplementedError

    def hashes(
        self, like: Tensor | None, shape: Sequence[int], device: torch.device, what: str, *, is_shared: bool = False
    ) -> Tensor:
        """Return hashed bits of random numbers, int32 [shape].

        `like` is the tensor whose samples are at the same places as those of the result; without one the shape decides.
        Shared numbers are refused where there are some for each sample.
        """
        raise NotImplementedError

    def refuse(self, reason: str) -> ModelError:
        """Return the error that refuses an operation of the innermost module."""
        raise NotImplementedError
