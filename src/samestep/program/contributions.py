"""Contributions: the R parts of a step's gradient that a codec writes down, and where a layout sums them. No torch.

`numerics.replicas = R` divides the global batch into R equal runs of samples. The gradient of each is summed in full,
encoded with what its code lost in the step before, and the R codes are added up and encoded once more:

    D = Q(s + sum_r Q(G_r + e_r))        e_r, s: what Q has lost in the step before (Tang et al. 2019, arXiv:1905.05957)

So the job alone says what is computed. A layout says where: the R contributions are those of the ranks of one data axis,
or of fewer ranks, each of which makes several, one after the other.

    R = 4    dp=4                          dp=2                            dp_replicate=4 dp_shard=2
    rank 0   samples of G_0                G_0, G_1                        half of G_0, summed with rank 1
    rank 1             G_1                 G_2, G_3                        half of G_0

With `numerics.exchange_every = H` the R parts are replicas that are trained apart: G_r is what the weights of replica r
have moved by in H steps with an optimizer of its own, D moves the weights that all replicas then go on with.

Layouts with one R differ where a sum lies between two codes and is rounded another way: by one quantisation step.
"""

from __future__ import annotations

from dataclasses import dataclass

from samestep.layout import Layout
from samestep.program.holding import REPLICAS, SHARDS
from samestep.program.ranks import BESIDE


@dataclass(frozen=True, slots=True, kw_only=True)
class Contributions:
    """The contributions to a step: how many each rank makes, and over which ranks they are summed."""

    axis: str
    """Data axis over whose ranks codes are sent."""
    ranks: int
    each: int
    """Contributions that a rank makes one after the other."""
    inside: tuple[str, ...] = ()
    """Axes within a contribution, over which whole gradients are summed in full before they are encoded."""
    is_hidden: bool = False
    """Whether whole steps hide what is sent, whose own collectives must not wait for it."""

    @property
    def sent_over(self) -> str:
        """The axis by whose groups codes are sent: `axis`, or a second one over the same ranks."""
        return f"{self.axis}{BESIDE}" if self.is_hidden else self.axis

    def code_bytes(self, size_bytes: int, *, gathers: bool) -> int:
        """Return the bytes of codes on a rank that sends, receives and sums contributions of so many bytes each as they are sent;
        of all sums if it `gathers` them, or else of its own part."""
        sent = self.each * size_bytes
        return sent + (sent if self.ranks > 1 else 0) + size_bytes // (1 if gathers else self.ranks)

    @classmethod
    def of(cls, layout: Layout, zero: int, replicas: int, *, is_hidden: bool = False) -> Contributions:
        """Return where a layout of ZeRO stage `zero` makes its contributions: the outermost data axis that it has."""
        if zero == 0:
            axis, ranks = ("dp", layout.dp) if layout.cp > 1 else (REPLICAS, layout.dp)
        else:
            axis, ranks = (REPLICAS, layout.dp_replicate) if layout.dp_replicate > 1 else (SHARDS, layout.num_shards)
        inside = ("cp",) if zero == 0 and layout.cp > 1 else ()
        return cls(axis=axis, ranks=ranks, each=max(1, replicas // ranks), inside=inside, is_hidden=is_hidden)
