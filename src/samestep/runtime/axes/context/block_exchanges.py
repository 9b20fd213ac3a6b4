"""What the attentions of a block exchange with the other ranks of `cp`, with or without a compiler.

In a graph of `torch.compile` the exchanges of heads are operations of it (`rank_crossings.py`), and what happens between them, such as
repeated heads and the attention of a rank's heads, is traced code. A ring leaves the graph for its call: messages are under way while blocks
are computed.

Legend: B samples, A heads, T tokens, N ranks that exchange heads, D features of a head, E those of a value.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from samestep.building.attention import DocumentMask
from samestep.runtime.axes.context.ring_attention import Ring
from samestep.runtime.axes.rank_crossings import RankCrossing
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
        index: int,
        ring_of: Callable[[int, str], Ring],
    ) -> None:
        # Compilers make numbers that differ from run to run symbols, and lengths of tuples constants.
        self._of_heads = tuple(range(ranks.heads))
        self._has_ring, self._mine = ranks.ring > 1, index % ranks.heads
        gathered, output, passed = f"{block}.{GIVEN}", f"{block}.output", f"{block}.{KEYS_VALUES}"
        self._given = RankCrossing(gathered, of_heads, "swap", "swap")
        self.output = RankCrossing(output, of_heads, "to_tokens", "to_heads")
        """Exchanges heads for tokens, [B, A/N, T, D] -> [B, A, T/N, D]."""
        self.ring: Callable[[int], Ring] = lambda tokens: ring_of(tokens, passed)
        """Returns the ring of ranks that have so many tokens."""

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
        if self._has_ring or not _is_traced((query, key, value), attn_mask, is_causal, enable_gqa):
            return None
        query, key, value, attn_mask = self.by_heads(query, key, value, attn_mask)
        shared = enable_gqa and query.shape[1] != key.shape[1]
        return self.output(
            F.scaled_dot_product_attention(
                query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=shared
            )
        )


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
