"""The scope of `samestep.batch_sum` and its like in a traced forward: the traced samples are all, and each call is reported."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

Report = Callable[[Literal["sum", "cat"], Tensor, Tensor], None]
"""Is told of a call: its kind, what it is given, and its result."""


@dataclass(frozen=True, slots=True)
class TracedValues:
    """Computes with the samples at hand, and reports each call."""

    report: Report

    def sum(self, x: Tensor) -> Tensor:
        """Return the sum of the rows."""
        result = x.sum(0)
        self.report("sum", x, result)
        return result

    def cat(self, x: Tensor) -> Tensor:
        """Return a copy of the rows: what is known of the result is known of all samples."""
        result = x.clone()
        self.report("cat", x, result)
        return result

    def num_rows(self, x: Tensor) -> int:
        """Return the number of rows."""
        return len(x)
