"""The names of what a loss returns: its terms, and values that are only reported."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LossNames:
    """The names of the terms and the values that a loss returns, in their order; an unnamed term is not among them."""

    terms: tuple[str, ...] = ()
    values: tuple[str, ...] = ()

    @property
    def num_numbers(self) -> int:
        """The number of sums and counts of named terms and values."""
        return 2 * (len(self.terms) + len(self.values))

    def means(self, numbers: Sequence[float]) -> tuple[dict[str, float], dict[str, float]]:
        """Return the means of the terms and of the values, by name, from `num_numbers` summed numbers; nan where nothing counts."""
        pairs = zip(numbers[::2], numbers[1::2], strict=True)
        means = [total / count if count else float("nan") for total, count in pairs]
        split = len(self.terms)
        return dict(zip(self.terms, means[:split], strict=True)), dict(zip(self.values, means[split:], strict=True))
