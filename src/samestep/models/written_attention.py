"""Attentions that blocks write out, as data: where they begin, and what their masks hide."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class MadeMask:
    """The rule of a mask that a block makes for the tokens that it sees: whether later keys are hidden, and how far a query sees."""

    causal: bool = False
    window: int | None = None
    by_key: bool = False
    """Whether it has a number for each key instead, which goes where the key goes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenAttention:
    """An attention that a block writes out, of which a rank of `cp` computes its part (`building/attention/written_out.py`)."""

    number: int
    """Number of its first product among the products of two activations of the block."""
    tokens: tuple[int, int]
    """The dimensions of tokens of the factors of this product, counted from the end."""
    masks: tuple[MadeMask | None, ...] = ()
    """The rule of each mask, in their order; None of one that is given whole."""
