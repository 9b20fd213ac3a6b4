"""The interface of the batch of a step: all ranks know which rank reads which samples, and each reads its part."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

Indices = np.ndarray[Any, np.dtype[np.int64]]
"""Global indices of samples."""


class StepBatch(Protocol):
    """The global batch of one step, as `datasets.Batch` implements it: every rank reads only its part."""

    @property
    def step(self) -> int:
        """Number of the step, from 0."""
        ...

    @property
    def num_samples(self) -> int:
        """The number of samples of all ranks."""
        ...

    def shares(self, rank: int, num_ranks: int, num_microbatches: int) -> list[Indices]:
        """Return the sample indices of each micro-batch of a rank; a micro-batch may be empty."""
        ...

    def samples(self, indices: Sequence[int] | Indices) -> Any:
        """Read samples into tensors with the batch dimension first."""
        ...

    def read_ahead(self, rank: int, num_ranks: int, num_microbatches: int, *, pin: bool = False) -> None:
        """Begin to read a rank's micro-batches before they are asked for; `pin` puts them where a GPU copies from."""
        ...

    def before_next(self, function: Callable[[], None]) -> None:
        """Call a function before the next batch of the stream."""
        ...

    def end_stream(self) -> None:
        """End the stream of batches after this one, since the ranks agreed to stop."""
        ...
