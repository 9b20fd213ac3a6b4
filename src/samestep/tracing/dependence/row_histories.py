"""What a traced forward computes for each row (sample, or token), where it computes some rows by themselves.

Rows that are computed alone are fine as long as all of them are computed alike, in chunks or one after the other:

    torch.cat([mlp(part) for part in x.chunk(4, 1)], 1)     every token: mlp
    torch.cat([2 * x[:, :1], x[:, 1:]], 1)                  token 0: mul 2, the others: nothing
    x[:, 0] = 0                                             token 0: fill 0, the others: nothing

Otherwise a row's result depends on its place among the rows, which is another one in a part of them. So each storage that
was computed, or written, for some rows alone has a history: one number for each row, made of the operations that it met.
A storage without one has met the same for all rows.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable

import numpy as np
import numpy.typing as npt

from samestep.tracing.dependence.independence import Along

_Numbers = npt.NDArray[np.uint64]
_MANY = np.uint64(0x9E3779B97F4A7C15)


class RowHistories:
    """The histories of the storages of one forward, by their keys."""

    def __init__(self, num_rows: int) -> None:
        self._num_rows = num_rows
        self._of: dict[int, tuple[_Numbers, str]] = {}

    def ran(
        self,
        found: Along,
        num_positions: int,
        key: int,
        given: Iterable[int],
        what: Hashable,
        text: str,
        *,
        writes: bool,
    ) -> None:
        """Follow an operation to its result, which has `num_positions` along the dimension of rows.

        `what` tells operations on some rows apart, None for one that computes nothing; `writes` if the result's storage
        keeps the rows that are not written.
        """
        histories = [self._of[one] for one in dict.fromkeys(given) if one in self._of]
        count = max(1, num_positions // found.inner) if found.dim >= 0 else 1
        is_part = count < self._num_rows
        if not isinstance(found.start, int):  # values have picked them
            return
        if not (histories or (is_part and what is not None)):
            return
        rows = np.arange(found.start, found.start + min(count, self._num_rows)) % self._num_rows
        numbers = np.zeros(self._num_rows, dtype=np.uint64)
        for history, _ in histories:
            numbers += history
        if what is not None:
            met = np.uint64(hash(what) & 0xFFFFFFFF)
            numbers = numbers * _MANY + (met if is_part else np.uint64(0))
        text = histories[0][1] if histories else text
        if is_part:
            before = self._of.get(key)
            kept = np.zeros_like(numbers) if before is None or not writes else before[0].copy()
            kept[rows] = numbers[rows]
            numbers, text = kept, text if before is None else before[1]
        self._of[key] = numbers, text

    def difference(self, key: int) -> str:
        """Return an operation that some rows of a storage alone have met, as text; empty if all have met the same."""
        numbers, text = self._of.get(key, (None, ""))
        return text if numbers is not None and bool((numbers != numbers[0]).any()) else ""
