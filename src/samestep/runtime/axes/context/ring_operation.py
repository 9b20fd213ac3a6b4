"""Ring attention as one operation of a graph of `torch.compile`, and its backward as another one.

Both run the code of `ring_attention.py`, which compilers do not look into, since messages are under way while blocks are computed. The
graph is shared by equal blocks, so the operations are given the number of the block's ring (`rank_crossings.GraphPlace`).

Legend: B samples, A heads, L queries and S keys of a rank, D features of a head, E those of a value; K heads of keys.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from samestep.building.attention import AttentionSpec, DroppedWeights
from samestep.building.attention.head_products import wide
from samestep.runtime.axes.context.ring_attention import Ring, RingForm, ring_backward, ring_forward
from samestep.runtime.axes.rank_crossings import GraphPlace, define, sending


class RingPlace(GraphPlace):
    """The rings of a block's attentions, by the number of tokens that a rank of the ring has."""

    def __init__(self, owner: str, group: dist.ProcessGroup, ring_of: Callable[[int], Ring]) -> None:
        super().__init__(owner, group)
        self.ring_of = ring_of


def attend_around(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    drop: Tensor | None,
    place: Tensor,
    is_causal: bool,
    scale: float,
    p: float,
) -> Tensor:
    """Return the attention of this rank's queries [B, A, L, D] to all tokens, in a graph, which contains a call of this function as it is.

    `drop` is which weights are dropped, bool [B, A, L, all tokens], with probability p.

    Collective over the group of the ring, in the backward too, see [Note: collective calls].
    """
    if key.shape[1] != value.shape[1]:
        heads = query.shape[1]
        key, value = (one.repeat_interleave(heads // one.shape[1], 1) for one in (key, value))
    result: Tensor = _Around.apply(query, key, value, mask, drop, place, (is_causal, scale, p))
    return result


class _Around(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        drop: Tensor | None,
        place: Tensor,
        how: tuple[bool, float, float],
    ) -> Tensor:
        found = torch.ops.samestep.ring_attention(query, key, value, mask, drop, place, *how)
        output: Tensor = found[0]
        ctx.save_for_backward(query, key, value, mask, drop, place, *found)
        ctx.how = how
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        query, key, value, mask, drop, place, *found = ctx.saved_tensors
        needs = ctx.needs_input_grad[1] or ctx.needs_input_grad[2], ctx.needs_input_grad[3]
        given = gradients[0], query, key, value, mask, drop, *found
        results = torch.ops.samestep.ring_attention_backward(*given, place, *ctx.how, *needs)
        of_keys, of_values = results[1:3] if needs[0] else (None, None)
        return results[0], of_keys, of_values, results[3] if needs[1] else None, None, None, None


def _form(
    place: Tensor, query: Tensor, drop: Tensor | None, is_causal: bool, scale: float, p: float
) -> RingForm | None:
    """Return the form of an attention around the ring; None where nothing is sent."""
    ring = sending(place)
    if ring is None:
        return None
    dropout = None if drop is None else DroppedWeights(p, lambda start, stop, keys: drop[..., start:stop, :keys])
    return RingForm(ring.ring_of(query.shape[2]), AttentionSpec(causal=is_causal, dropout=dropout), scale)


def _forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    drop: Tensor | None,
    place: Tensor,
    *how: Any,
) -> tuple[Tensor, Tensor]:
    form = _form(place, query, drop, *how)
    if form is None:
        output, log_sum_exp = _shapes(query, key, value)
        return output.zero_(), log_sum_exp.zero_()
    return ring_forward(form, (query, key, value, mask))


def _shapes(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    samples, heads, tokens = query.shape[:3]
    output = query.new_empty(samples, tokens, heads, value.shape[3]).transpose(1, 2)
    return output, query.new_empty(samples, heads, tokens, dtype=wide(query))


def _backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    drop: Tensor | None,
    output: Tensor,
    log_sum_exp: Tensor,
    place: Tensor,
    *how_and_needs: Any,
) -> tuple[Tensor, ...]:
    *how, needs_keys, needs_mask = how_and_needs
    form, given = _form(place, query, drop, *how), (query, key, value, mask)
    if form is None:
        return tuple(one.zero_() for one in _alike(given, needs_keys, needs_mask))
    found = ring_backward(form, gradient, given, (output, log_sum_exp), (needs_keys, needs_mask))
    # A graph knows their strides, and none of them may share memory with another.
    return tuple(
        query.new_empty(0) if one is None else one.clone(memory_format=torch.contiguous_format) for one in found
    )


def _shapes_of_gradients(*given: Any) -> tuple[Tensor, ...]:
    return _alike(given[1:5], *given[-2:])


def _alike(given: Sequence[Any], needs_keys: bool, needs_mask: bool) -> tuple[Tensor, ...]:
    """Return tensors without values for the gradients of queries, keys, values and mask, which have no elements where none is needed."""
    are_needed = (True, needs_keys, needs_keys, needs_mask)
    return tuple(
        one.new_empty(one.shape) if is_needed else given[0].new_empty(0)
        for one, is_needed in zip(given, are_needed, strict=True)
    )


define(
    "ring_attention(Tensor query, Tensor key, Tensor value, Tensor? mask, Tensor? drop, Tensor place,"
    " bool is_causal, float scale, float p)"
    " -> (Tensor, Tensor)",
    _forward,
    _shapes,
)
define(
    "ring_attention_backward(Tensor gradient, Tensor query, Tensor key, Tensor value, Tensor? mask, Tensor? drop,"
    " Tensor output,"
    " Tensor log_sum_exp, Tensor place, bool is_causal, float scale, float p, bool needs_keys, bool needs_mask)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
    _backward,
    _shapes_of_gradients,
)
