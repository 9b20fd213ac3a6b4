"""What one rank holds of a weight, and over which ranks the weight's gradient is summed: decided once. No torch.

A weight starts whole on every rank, and its gradient is summed over all data ranks. Each strategy adds its part while it
writes the program (`Step.hold`), in the order of the stack:

```
strategy   adds
tensor     sharded over tp, or replicated over it; partial where a whole weight works on what tp divides
sequence   partial over tp: a weight between the tensor cuts sees the tokens of one rank
expert     sharded over ep, which borrows data ranks: its gradient is summed over those that hold the same experts
pipeline   tied: the first stage and the last hold it
shard      gradient and optimizer state (zero=1, 2) or the weight too (zero=3) in shards over the innermost data axis
```
Buckets, units, the norm, memory, checkpoints and the drift check read it; none of them asks which strategy it was. Weights
with equal holdings may share a bucket.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

REPLICAS = "dp_replicate"
"""The data axis of what nothing shards."""
SHARDS = "dp_shard"
"""The data axis over which ZeRO shards what is not expert-sharded."""
TIE = "tie"
"""First and last pipeline stage, where they share a weight."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Holding:
    """What one rank holds of a weight; its local shape stands in the model that the strategies leave a rank."""

    sharded_over: tuple[str, ...] = ()
    """Axes whose ranks hold different parts of it."""
    replicated_over: tuple[str, ...] = ()
    """Model axes whose ranks hold the same of it, and compute with it again what the others do."""
    partial_over: tuple[str, ...] = ()
    """Model axes over whose ranks its gradient is summed once a step: each has that of a part of the tokens or heads."""
    tied_over: tuple[str, ...] = ()
    """Axes whose ranks, of two pipeline stages, hold it under two names, and sum its gradient."""
    data_axes: tuple[str, ...] = (REPLICAS,)
    """Data axes over which its gradient is summed, the innermost first."""
    num_parts: int = 1
    """Parts into which the axes of `sharded_over` divide it."""
    num_copies: int = 1
    """Ranks of the axes of `replicated_over` and `tied_over` that hold the same gradient: the norm counts it once."""
    num_shards: int = 1
    """Ranks of the innermost data axis among which ZeRO divides its gradient and its update; 1 where it does not."""

    @property
    def data_axis(self) -> str:
        """The innermost data axis over which its gradient is summed, and over which ZeRO shards it."""
        return self.data_axes[0]

    @property
    def is_expert_sharded(self) -> bool:
        """Whether a rank holds only some of the experts of the weight."""
        return "ep" in self.sharded_over

    @property
    def copied_over(self) -> tuple[str, ...]:
        """Axes whose ranks update the same of it: the first of them alone has to save it."""
        return *self.replicated_over, *self.tied_over, *self.data_axes[self.num_shards > 1 :]

    @property
    def sort_key(self) -> tuple[tuple[str, ...], ...]:
        """The order of buckets: first what is summed over the data ranks alone."""
        return self.replicated_over, self.partial_over, self.tied_over, self.sharded_over

    def sharded(self, axis: str, size: int) -> Holding:
        """Return what is left to a rank when the `size` ranks of an axis divide the weight."""
        return replace(self, sharded_over=(*self.sharded_over, axis), num_parts=self.num_parts * size)

    def replicated(self, axis: str, size: int) -> Holding:
        """Return the holding of a weight that the `size` ranks of an axis hold alike."""
        return replace(self, replicated_over=(*self.replicated_over, axis), num_copies=self.num_copies * size)

    def partial(self, axis: str) -> Holding:
        """Return the holding of a weight of whose gradient each rank of an axis has a part."""
        return replace(self, partial_over=(*self.partial_over, axis))

    def tied(self) -> Holding:
        """Return the holding of a weight that the first stage and the last share."""
        return replace(self, tied_over=(*self.tied_over, TIE), num_copies=2 * self.num_copies)

    def summed_over(self, *data_axes: str) -> Holding:
        """Return the holding of a weight whose gradient is summed over these data axes, the innermost first."""
        return replace(self, data_axes=data_axes)

    def zero_sharded(self, axis: str, size: int) -> Holding:
        """Return the holding of a weight that ZeRO divides among the `size` ranks of an axis, and replicates beyond it."""
        return replace(self, data_axes=(axis, REPLICAS), num_shards=size)


WHOLE = Holding()
"""What a rank holds of a weight to which no strategy has added anything."""
