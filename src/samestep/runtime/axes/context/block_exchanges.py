"""What the attentions of a block exchange with the other ranks of `cp`, with or without a compiler.

In a graph of `torch.compile` the exchanges are operations of it (`rank_crossings.py`, `ring_operation.py`), and what happens between
them, such as repeated heads and the attention of a rank's heads, is traced code.

Legend: B samples, A heads, T tokens, N ranks that exchange heads, D features of a head.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from samestep.building.attention import DocumentMask
from samestep.randomness.graph_draws import drop_weights
from samestep.runtime.axes.context.ring_attention import Ring
from samestep.runtime.axes.context.ring_operation import RingPlace, attend_around
from samestep.runtime.axes.differentiable import apply_move
from samestep.runtime.axes.rank_crossings import RankCrossing, swap, to_heads, to_tokens
from samestep.strategies.context import GIVEN, KEYS_VALUES, AttentionRanks, num_sent_heads


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
        given, output, passed = f"{block}.{GIVEN}", f"{block}.output", f"{block}.{KEYS_VALUES}"
        parts = functools.partial(apply_move, group=of_heads, owner=given, there=swap, back=swap)
        self._given = RankCrossing(given, of_heads, "swap", "swap", parts)
        home = functools.partial(apply_move, group=of_heads, owner=output, there=_to_tokens, back=_to_heads)
        self.output = RankCrossing(output, of_heads, "to_tokens", "to_heads", home)
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


def _is_traced(given: tuple[Tensor, Tensor, Tensor], mask: Tensor | None, is_causal: bool, shares_heads: bool) -> bool:
    """Return whether a compiler traces an attention of queries, keys and values: not within packed documents."""
    if isinstance(mask, DocumentMask) or {one.dim() for one in given} != {4}:
        return False
    if mask is not None and (mask.dim() > 4 or is_causal):
        return False
    samples, heads = ([one.shape[dim] for one in given] for dim in (0, 1))
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
    sent = torch.cat([torch.unflatten(one, 1, (degree, -1)).permute(1, 0, 3, 2, 4).flatten(3) for one in parts], -1)
    found = torch.split(swap(sent), [heads * width for heads, width in sizes], -1)
    return [
        torch.unflatten(one, -1, size).permute(1, 3, 0, 2, 4).flatten(2, 3)
        for one, size in zip(found, sizes, strict=True)
    ]


def _to_heads(part: Tensor, group: dist.ProcessGroup, owner: str) -> Tensor:
    return to_heads(part, dist.get_world_size(group), lambda sent: swap(sent, group, owner))


def _to_tokens(part: Tensor, group: dist.ProcessGroup, owner: str) -> Tensor:
    return to_tokens(part, dist.get_world_size(group), lambda sent: swap(sent, group, owner))
