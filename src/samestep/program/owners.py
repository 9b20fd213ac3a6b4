"""Owners: which rank updates each weight that its optimizer needs whole, where ZeRO shards the weights themselves.

```
rank 0 holds     rows 0:2 of a    rows 0:3 of b          rank 0 owns a, and is sent all its gradient
rank 1 holds     rows 2:4 of a    rows 3:6 of b          rank 1 owns b
```
A rank sends each owner one window, with its part of every weight of that owner; all windows are of equal size.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Owners:
    """The weights that the ranks of one axis update whole."""

    axis: str
    ranks: int
    members: tuple[Owned, ...]
    window_numel: int
    """Elements that a rank sends each other rank."""

    def elements_of(self, index: int) -> int:
        """Return how many elements the rank at a position updates."""
        return sum(member.numel for member in self.members if member.owner == index)
