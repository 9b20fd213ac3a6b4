"""Attentions that blocks write out, as data: where they begin, and what their masks hide."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class MadeMask:
    """The rule of a mask that a block makes for the tokens that it sees: whether later keys are hidden, and how far a query sees."""

    causal: bool = False
    window: int | None = None
    by_key: bool = False
    """Whether it has a number for each key instead, which goes where the key goes."""

    @property
    def is_open(self) -> bool:
        """Whether a sequence of more tokens than the traced one may show that keys farther away are hidden."""
        return not self.by_key and self.window is None


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenAttention:
    """An attention that a block writes out, of which a rank of `cp` computes its part (`building/attention/written_out.py`)."""

    number: int
    """Number of its first product among the products of two activations of the block."""
    tokens: tuple[int, int]
    """The dimensions of tokens of the factors of this product, counted from the end."""
    masks: tuple[MadeMask | None, ...] = ()
    """The rule of each mask, in their order; None of one that is given whole."""


def has_open(attentions: Iterable[WrittenAttention]) -> bool:
    """Return whether a mask of some attentions may hide other keys in a sequence that is longer than the traced one."""
    return any(mask is not None and mask.is_open for one in attentions for mask in one.masks)
