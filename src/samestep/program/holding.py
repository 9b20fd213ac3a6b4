"""The `Holding` of a weight: which part of it one rank holds, and over which ranks its gradient is summed. No torch.

A weight starts whole on every rank, and its gradient is summed over all data ranks. Each strategy adds its part while
it writes the program (`StepSpec.hold`), in the order of the stack:

```
strategy   adds
tensor     sharded over tp, or replicated over it; partial if a replicated weight works on activations that tp divides
sequence   partial over tp: a weight between the tensor-cut parts sees the tokens of one rank
expert     sharded over ep, which borrows data ranks: the gradient is summed over those that hold the same experts
pipeline   tied: several stages use the weight, and each of them holds it
shard      gradient and optimizer state (zero=1, 2), or the weight too (zero=3), sharded over the innermost data axis
```
Buckets, units, the gradient norm, memory, checkpoints and the drift check read the holding; none of them asks which
strategy made it. Weights with equal holdings may share a bucket.

A weight that its optimizer needs whole has an owner, the rank that updates it, where a layout leaves every rank a part of it:

```
rank 0 holds     rows 0:2 of a    rows 0:3 of b          rank 0 owns a, and is sent all its gradient
rank 1 holds     rows 2:4 of a    rows 3:6 of b          rank 1 owns b
```
A rank sends each owner one window, with its part of every weight of that owner; all windows are of equal size. A weight
that both ZeRO and a tensor or expert cut divide has two owners: a data rank gathers what a cut leaves of it, and is one of
the ranks that lend that to the owner of the whole.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

REPLICATE = "dp_replicate"
"""Data axis over whose ranks nothing is sharded."""
SHARDS = "dp_shard"
"""Data axis over which ZeRO shards the weights that are not expert-sharded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Holding:
    """The part of one weight that a rank holds; the part's shape is in `StepSpec.model`, the rank's local model."""

    sharded_over: tuple[str, ...] = ()
    """Axes whose ranks hold different parts of the weight."""
    replicated_over: tuple[str, ...] = ()
    """Model axes whose ranks hold equal copies of the weight and update them alike."""
    partial_over: tuple[str, ...] = ()
    """Model axes over which its gradient is summed once a step, because each rank saw some of the tokens or heads."""
    tied_over: tuple[str, ...] = ()
    """Axes whose ranks, on several pipeline stages, hold equal copies of the weight and sum its gradient."""
    data_axes: tuple[str, ...] = (REPLICATE,)
    """Data axes over which its gradient is summed, the innermost first."""
    num_parts: int = 1
    """Number of parts into which the axes of `sharded_over` divide the weight."""
    num_copies: int = 1
    """Number of ranks of `replicated_over` and `tied_over` with equal gradients, which the norm counts once."""
    num_shards: int = 1
    """Number of ranks of the innermost data axis among which ZeRO divides its gradient and update; 1 without ZeRO."""

    @property
    def data_axis(self) -> str:
        """Innermost data axis over which its gradient is summed, and over which ZeRO shards it."""
        return self.data_axes[0]

    @property
    def is_expert_sharded(self) -> bool:
        """Whether a rank holds only some of the weight's experts."""
        return "ep" in self.sharded_over

    @property
    def copied_over(self) -> tuple[str, ...]:
        """Axes whose ranks update equal copies, of which only the first rank's has to be saved."""
        return *self.replicated_over, *self.tied_over, *self.data_axes[self.num_shards > 1 :]

    @property
    def sort_key(self) -> tuple[tuple[str, ...], ...]:
        """Key that sorts weights into buckets: first those whose gradients are summed only over data axes."""
        return self.replicated_over, self.partial_over, self.tied_over, self.sharded_over

    def sharded(self, axis: str, size: int) -> Holding:
        """Return the holding of a weight that the `size` ranks of an axis divide."""
        return _like(self, sharded_over=(*self.sharded_over, axis), num_parts=self.num_parts * size)

    def replicated(self, axis: str, size: int) -> Holding:
        """Return the holding of a weight of which each of the `size` ranks of an axis has an equal copy."""
        return _like(self, replicated_over=(*self.replicated_over, axis), num_copies=self.num_copies * size)

    def partial(self, axis: str) -> Holding:
        """Return the holding of a weight whose gradient is still to be summed over the ranks of an axis."""
        return _like(self, partial_over=(*self.partial_over, axis))

    def tied(self, axis: str, size: int) -> Holding:
        """Return the holding of a weight that the `size` pipeline stages of an axis share."""
        return _like(self, tied_over=(*self.tied_over, axis), num_copies=size * self.num_copies)

    def summed_over(self, *data_axes: str) -> Holding:
        """Return the holding of a weight whose gradient is summed over the given data axes, the innermost first."""
        return _like(self, data_axes=data_axes)

    def zero_sharded(self, axis: str, size: int) -> Holding:
        """Return the holding of a weight that ZeRO shards over the `size` ranks of an axis and replicates elsewhere."""
        return _like(self, data_axes=(axis, REPLICATE), num_shards=size)


@functools.lru_cache(maxsize=1024)
def _like(holding: Holding, **changes: Any) -> Holding:
    """Return a holding with some fields changed: a search asks for the same few of thousands of weights again and again."""
    return replace(holding, **changes)


WHOLE = Holding()
"""The holding of a weight to which no strategy has added anything: whole on every rank."""


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
