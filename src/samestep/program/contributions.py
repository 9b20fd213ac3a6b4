"""Contributions: the R parts of a step's gradient that a codec writes down, and where a layout sums them. No torch.

`numerics.replicas = R` divides the global batch into R equal runs of samples. The gradient of each is summed in full,
encoded with what its code lost in the step before, and the R codes are added up and encoded once more:

    D = Q(s + sum_r Q(G_r + e_r))        e_r, s: what Q has lost in the step before (Tang et al. 2019, arXiv:1905.05957)

So the job alone says what is computed. A layout says where: the R contributions are those of the R ranks of its outermost data axis. A
layout with another number of them is rejected.

    R = 4    dp=4                          dp_replicate=4 dp_shard=2
    rank 0   samples of G_0                half of G_0, summed with rank 1
    rank 1             G_1                 half of G_0

With `numerics.exchange_every = H` the R parts are replicas that are trained independently: G_r is the move of replica r's weights
in H steps of its optimizer, and D moves the weights with which all replicas then continue. They exchange after every H-th step, and
after the last one of the job.

Layouts with one R differ where a sum falls between two codes and is rounded another way: by one quantisation step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from samestep.job import Job
from samestep.layout import Layout
from samestep.models.param_spec import ParamSpec
from samestep.models.spec import ModelSpec
from samestep.program.codecs import CODECS, PLAIN, is_factored
from samestep.program.holding import REPLICAS, SHARDS
from samestep.program.update_rules import block_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Contributions:
    """The contributions to a step, and the ranks over which they are summed."""

    axis: str
    """Data axis over whose ranks codes are sent."""
    ranks: int
    """Ranks of that axis; each makes one contribution, with the ranks of the other axes."""
    inside: tuple[str, ...] = ()
    """Axes within a contribution, over which whole gradients are summed in full before they are encoded."""

    def code_bytes(self, size_bytes: int, *, gathers: bool) -> int:
        """Return the bytes of codes on a rank that sends, receives and sums contributions of so many bytes each as they are sent;
        of all sums if it `gathers` them, or else of its own part."""
        return 2 * size_bytes + size_bytes // (1 if gathers else self.ranks)

    @classmethod
    def of(cls, layout: Layout, zero: int) -> Contributions:
        """Return the axis whose ranks hold the contributions of a layout of ZeRO stage `zero`: its outermost data axis."""
        if zero == 0:
            axis, ranks = ("dp", layout.dp) if layout.cp > 1 else (REPLICAS, layout.dp)
        else:
            axis, ranks = (REPLICAS, layout.dp_replicate) if layout.dp_replicate > 1 else (SHARDS, layout.num_shards)
        inside = ("cp",) if zero == 0 and layout.cp > 1 else ()
        return cls(axis=axis, ranks=ranks, inside=inside)


@dataclass(frozen=True, kw_only=True)
class Sharing:
    """The way in which ranks share gradients: as they are, encoded, or as the moves of replicas that are trained independently."""

    codec: str = PLAIN
    """Name of the codec as which contributions to a gradient are sent; buckets, units and their ops take it from here."""
    backend: str = ""
    """Backend of `torch.compile` that makes the kernels of a codec one loop; empty where they are not compiled."""
    replicas: int = 1
    """The number of contributions that are encoded, or of replicas that are trained independently."""
    every: int = 1
    """Steps after which replicas exchange what their weights have moved by; 1 where they exchange gradients in every step."""
    blocks: Mapping[str, int] = field(default_factory=dict, hash=False)
    """Elements of a block of each weight's gradient, in which the codec writes it down."""
    rank: int = 0
    """The rank of the factors as which the codec sends matrices; 0 where it sends none."""

    @classmethod
    def of(cls, model: ModelSpec, job: Job) -> Sharing:
        """Return how a job's ranks share the gradients of a whole model."""
        numerics, codec = job.numerics, CODECS.get(job.numerics.compression)
        if codec is None and numerics.exchange_every == 1:
            return SUMMED
        has_blocks = codec is not None and codec.block_bytes > 0
        return cls(
            codec=PLAIN if codec is None else codec.name,
            backend=job.run.compile_backend if job.run.compile != "none" else "",
            replicas=numerics.replicas,
            every=numerics.exchange_every,
            blocks={param.name: block_of(param.shape) or 1 for param in model.params} if has_blocks else {},
            rank=numerics.compression_rank if codec is not None and codec.factors else 0,
        )

    @property
    def trains_apart(self) -> bool:
        """Whether replicas are trained independently between two exchanges."""
        return self.every > 1

    @property
    def num_apart(self) -> int:
        """The number of models that are trained independently; 1 where all ranks train one."""
        return self.replicas if self.trains_apart else 1

    def contributions(self, layout: Layout, zero: int) -> Contributions | None:
        """Return the contributions that a layout of ZeRO stage `zero` sums encoded, or as moves; None where there are none."""
        if self.codec == PLAIN and not self.trains_apart:
            return None
        return Contributions.of(layout, zero)

    def block_of(self, param: ParamSpec) -> int:
        """Return the elements of a block of a weight's gradient; 1 where gradients are sent as they are."""
        return self.blocks.get(param.name, 1)

    def is_factored(self, param: ParamSpec) -> bool:
        """Return whether a weight's gradient is sent as two factors."""
        return self.rank > 0 and is_factored(param.shape, self.rank)


SUMMED = Sharing()
"""Gradients are summed as they are, in every step."""
