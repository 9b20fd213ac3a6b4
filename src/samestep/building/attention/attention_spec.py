"""The form of an attention, without its tensors of queries, keys and values: which pairs of tokens see each other, and how they are weighted.

    S = scale Q K'                     scores
    S = S + mask                       -inf for pairs that do not see each other
    P = exp(S - L)                     L = log(sum over keys of exp S)
    O = (P * D) V                      D = 0 where dropped, else 1 / (1 - p)

Legend: B samples, A heads, K heads of keys, L queries, S keys, D features of a head.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

DropPart = Callable[[int, int, int], Tensor]
"""Returns which weights are dropped, bool [..., queries, keys], of the queries from the first to before the second number, and
of as many of the first keys as the third."""


class WeightHashes(NamedTuple):
    """The inputs of the hashed bits of weights (`randomness/masks.py`), of which those are dropped whose bits are below a threshold."""

    halves: Tensor
    """The halves of the hashed rows, int32 [..., queries, 2]."""
    columns: Tensor
    """The hashed columns, int32 [keys]."""
    threshold: int


class DroppedWeights(NamedTuple):
    """The dropout of an attention: its probability, and the key of its mask as functions that may be called at any time."""

    p: float
    part: DropPart
    """Makes parts of the mask."""
    hashes: Callable[[], WeightHashes] | None = None
    """Makes what a kernel draws the mask from; None where there are no kernels, or samples are not in front of the keys."""

    @property
    def scale(self) -> float:
        """The number by which weights that are kept are multiplied."""
        return 1.0 / (1.0 - self.p) if self.p < 1.0 else 0.0


@dataclass(frozen=True, slots=True, eq=False)
class AttentionSpec:
    """The form of an attention; queries are tokens 0 to L - 1, and keys tokens 0 to S - 1."""

    causal: bool = False
    """Whether a query sees no later keys."""
    documents: Tensor | None = None
    """The document of each token, int64 [B, T], whose tokens see each other alone; documents are runs of tokens, in causal attentions."""
    scale: float | None = None
    """Products of queries and keys are multiplied by this; by one over the root of the features of a head where it is None."""
    dropout: DroppedWeights | None = None
    """The weights that are dropped."""
    mask: Tensor | None = None
    """A mask [..., L or 1, S or 1] of any other form: true where a query sees a key, or a number that is added to the scores."""
    lengths: list[list[int]] | None = None
    """The number of tokens of each document, by sample, where the host knows it."""

    def but(self, **fields: object) -> AttentionSpec:
        """Return this form with some fields replaced."""
        return dataclasses.replace(self, **fields)  # type: ignore[arg-type]

    @property
    def bounds_keys(self) -> bool:
        """Whether causality or documents hide keys."""
        return self.causal or self.documents is not None

    def has_only(self, *names: str) -> bool:
        """Return whether, mask and causality aside, nothing is asked for but these fields: torch's fused kernels compute the rest."""
        return not [name for name in _BEYOND_TORCH if getattr(self, name) is not None and name not in names]


_BEYOND_TORCH = ("documents", "dropout")
"""Fields that `scaled_dot_product_attention` does not know, or computes with masks of its own."""
