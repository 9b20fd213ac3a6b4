"""The largest numbers of a layout, and the refusal of larger ones."""

from __future__ import annotations

from samestep.errors import LayoutError

MOST_RANKS = 2**20
"""The largest number of ranks: no machine has more, and the divisors of larger numbers take long to find."""
MOST_TOKENS = 2**30
"""The largest number of tokens of a chunk, more than any micro-batch has."""
MOST_SAMPLES = 2**24
"""The largest number of samples of a batch: their indices are an array on every rank."""


def check_degree(name: str, value: int) -> None:
    """Refuse a number of ranks, devices or stages that no layout can have.

    Raises:
        LayoutError: it is below 1 or above `MOST_RANKS`.
    """
    if not 1 <= value <= MOST_RANKS:
        bound = "at least 1" if value < 1 else f"at most {MOST_RANKS}"
        raise LayoutError(f"{name}={value}: a degree is {bound}")


def check_tokens(name: str, tokens: int | None, what: str) -> None:
    """Refuse a number of tokens that no chunk can have; None is none.

    Raises:
        LayoutError: it is below 1 or above `MOST_TOKENS`.
    """
    if tokens is not None and not 1 <= tokens <= MOST_TOKENS:
        bound = "at least 1 token" if tokens < 1 else f"at most {MOST_TOKENS} tokens"
        raise LayoutError(f"{name}={tokens}: {what} holds {bound}")


def check_microbatch(samples: int | None) -> None:
    """Refuse a number of samples that no micro-batch can have; None is none.

    Raises:
        LayoutError: it is below 1 or above `MOST_SAMPLES`.
    """
    if samples is not None and not 1 <= samples <= MOST_SAMPLES:
        bound = "at least 1 sample" if samples < 1 else f"at most {MOST_SAMPLES} samples"
        raise LayoutError(f"microbatch={samples}: a micro-batch holds {bound}")
