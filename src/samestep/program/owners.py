"""Owners: which rank updates each weight that its optimizer needs whole, where a layout leaves every rank a part of it.

```
rank 0 holds     rows 0:2 of a    rows 0:3 of b          rank 0 owns a, and is sent all its gradient
rank 1 holds     rows 2:4 of a    rows 3:6 of b          rank 1 owns b
```
A rank sends each owner one window, with its part of every weight of that owner; all windows are of equal size. A weight
that both ZeRO and a tensor or expert cut divide has two owners: a data rank gathers what a cut leaves of it, and is one of
the ranks that lend that to the owner of the whole.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Owned:
    """One weight that one rank updates whole."""

    name: str
    owner: int
    """Position of the owner on the axis."""
    offset: int
    """First element, in a window, of a rank's part of it."""
    part_numel: int
    """Elements of the largest part of it."""
    numel: int
    lender: int | None = None
    """Position on the data axis of the ranks that lend it; None where the ranks of every position do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Owners:
    """The weights that the ranks of one axis update whole."""

    axis: str
    ranks: int
    members: tuple[Owned, ...]
    window_numel: int
    """Elements of weights in a window."""
    data_axis: str
    """Axis on which `Owned.lender` is a position."""
    is_cut: bool
    """Whether the axis cuts the weights along one of their dimensions, while ZeRO shards by rows."""

    @property
    def gathered_numel(self) -> int:
        """Elements that a rank sends to all ranks before the update: its parts of the weights and of their gradients."""
        return 2 * self.ranks * self.window_numel

    @property
    def scattered_numel(self) -> int:
        """Elements that a rank sends to all ranks after the update: their parts of the weights that it owns."""
        return self.ranks * self.window_numel

    def of_rank(self, data_index: int) -> tuple[Owned, ...]:
        """Return the weights of which the ranks at a position on the data axis hold parts."""
        return tuple(member for member in self.members if member.lender in (None, data_index))
