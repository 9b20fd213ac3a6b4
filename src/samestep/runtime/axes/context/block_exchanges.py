"""What the attentions of a block exchange with the other ranks of `cp`, with or without a compiler.

In a graph of `torch.compile` the exchanges are operations of it (`rank_crossings.py`), and what happens between them, such as repeated
heads and the attention of a rank's heads, is traced code. A ring is one operation, and its backward another one: both run the code of
`ring_attention.py`, which compilers do not look into, since messages are under way while blocks are computed. The graph is shared by
equal blocks, so these operations are given the number of the block's ring (`rank_crossings.GraphPlace`).

Legend: B samples, A heads, T tokens, N ranks that exchange heads, D features of a head, E those of a value; L queries and S keys of a
rank in a ring; K heads of keys.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from samestep.building.attention import AttentionSpec, DocumentMask, DroppedWeights
from samestep.building.attention.head_products import wide
from samestep.randomness.graph_draws import drop_weights
from samestep.runtime.axes.context.ring_attention import Ring, RingForm, ring_backward, ring_forward
from samestep.runtime.axes.rank_crossings import GraphPlace, RankCrossing, define, sending
from samestep.strategies.context import GIVEN, KEYS_VALUES, AttentionRanks, num_sent_heads


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
        key, value = (x.repeat_interleave(heads // x.shape[1], 1) for x in (key, value))
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
        result = torch.ops.samestep.ring_attention(query, key, value, mask, drop, place, *how)
        output: Tensor = result[0]
        ctx.save_for_backward(query, key, value, mask, drop, place, *result)
        ctx.how = how
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        query, key, value, mask, drop, place, *result = ctx.saved_tensors
        needs = ctx.needs_input_grad[1] or ctx.needs_input_grad[2], ctx.needs_input_grad[3]
        operands = gradients[0], query, key, value, mask, drop, *result
        results = torch.ops.samestep.ring_attention_backward(*operands, place, *ctx.how, *needs)
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
    form, operands = _form(place, query, drop, *how), (query, key, value, mask)
    if form is None:
        return tuple(gradient.zero_() for gradient in _alike(operands, needs_keys, needs_mask))
    gradients = ring_backward(form, gradient, operands, (output, log_sum_exp), (needs_keys, needs_mask))
    # A graph knows their strides, and none of them may share memory with another.
    return tuple(query.new_empty(0) if g is None else g.clone(memory_format=torch.contiguous_format) for g in gradients)


def _alike(operands: Sequence[Any], needs_keys: bool, needs_mask: bool) -> tuple[Tensor, ...]:
    """Return tensors without values for the gradients of queries, keys, values and mask, which have no elements where none is needed."""
    are_needed = (True, needs_keys, needs_keys, needs_mask)
    return tuple(
        operand.new_empty(operand.shape) if is_needed else operands[0].new_empty(0)
        for operand, is_needed in zip(operands, are_needed, strict=True)
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
    lambda *arguments: _alike(arguments[1:5], *arguments[-2:]),
)


class BlockExchanges:
    """The exchanges of heads for tokens, and the ring, of the attentions of one block.

    Each is collective over its group in the forward and in the backward, see [Note: collective calls].
    """

    def __init__(
        self,
        block: str,
        ranks: AttentionRanks,
        of_heads: dist.ProcessGroup,
        of_ring: dist.ProcessGroup,
        index: int,
        ring_of: Callable[[int, str], Ring],
    ) -> None:
        # Compilers make numbers that differ from run to run symbols, and lengths of tuples constants.
        self._of_heads, self._of_ring = tuple(range(ranks.heads)), tuple(range(ranks.ring))
        self._mine = index % ranks.heads
        gathered, output, passed = f"{block}.{GIVEN}", f"{block}.output", f"{block}.{KEYS_VALUES}"
        self._given = RankCrossing(gathered, of_heads, "swap", "swap")
        self.output = RankCrossing(output, of_heads, "to_tokens", "to_heads")
        """Exchanges heads for tokens, [B, A/N, T, D] -> [B, A, T/N, D]."""
        self.ring: Callable[[int], Ring] = lambda tokens: ring_of(tokens, passed)
        """Returns the ring of ranks that have so many tokens."""
        self._ring_place = RingPlace(passed, of_ring, self.ring)

    def by_heads(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Return what an attention is given for this rank's heads and all tokens."""
        heads, degree = query.shape[1], len(self._of_heads)
        parts = [query, _repeat_heads(key, heads, degree), _repeat_heads(value, heads, degree)]
        query, key, value = _all_to_heads(parts, degree, self._given)
        if mask is not None and mask.dim() == 3:  # for each head
            mask = mask.unsqueeze(0)
        if mask is not None and mask.dim() == 4 and mask.shape[1] > 1:
            mask = mask.chunk(degree, dim=1)[self._mine]
        return query, key, value, mask

    def attend_in_graph(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor | None:
        """Return `scaled_dot_product_attention` of this rank's tokens to all, as a compiler traces it; None of one that it cannot."""
        if not _is_traced((query, key, value), attn_mask, is_causal, enable_gqa):
            return None
        if len(self._of_heads) > 1:
            query, key, value, attn_mask = self.by_heads(query, key, value, attn_mask)
        if len(self._of_ring) > 1:
            drop = drop_weights(query, dropout_p, num_keys=len(self._of_ring) * query.shape[2]) if dropout_p else None
            scale = query.shape[-1] ** -0.5 if scale is None else scale
            how = self._ring_place.place, is_causal, scale, dropout_p
            output = attend_around(query, key, value, attn_mask, drop, *how)
        else:
            shared = enable_gqa and query.shape[1] != key.shape[1]
            output = F.scaled_dot_product_attention(
                query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=shared
            )
        return output if len(self._of_heads) == 1 else self.output(output)


def _is_traced(inputs: tuple[Tensor, Tensor, Tensor], mask: Tensor | None, is_causal: bool, shares_heads: bool) -> bool:
    """Return whether a compiler traces an attention of queries, keys and values: not within packed documents."""
    if isinstance(mask, DocumentMask) or {x.dim() for x in inputs} != {4}:
        return False
    if mask is not None and (mask.dim() > 4 or is_causal):
        return False
    samples, heads = ([x.shape[dim] for x in inputs] for dim in (0, 1))
    return samples[0] == samples[1] == samples[2] and (shares_heads or heads[0] == heads[1] == heads[2])


def _repeat_heads(part: Tensor, query_heads: int, degree: int) -> Tensor:
    """Return keys or values with as many heads as are sent."""
    heads = part.shape[1]
    times = num_sent_heads(heads, query_heads, degree) // heads
    return part.repeat_interleave(times, dim=1) if times > 1 else part


def _all_to_heads(parts: list[Tensor], degree: int, swap: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """Exchange tokens for heads in one message of several tensors: each [B, A, T/N, D] -> [B, A/N, T, D]."""
    sizes = [(part.shape[1] // degree, part.shape[3]) for part in parts]
    # [N, B, T/N, A/N D] of each, one behind the other in the last dimension
    sent = torch.cat([torch.unflatten(part, 1, (degree, -1)).permute(1, 0, 3, 2, 4).flatten(3) for part in parts], -1)
    swapped = torch.split(swap(sent), [heads * width for heads, width in sizes], -1)
    return [
        torch.unflatten(part, -1, size).permute(1, 3, 0, 2, 4).flatten(2, 3)
        for part, size in zip(swapped, sizes, strict=True)
    ]
