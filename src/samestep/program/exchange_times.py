"""Exchange times: after which steps independently trained replicas exchange which part of their weights. No torch.

The weights are P parts (`numerics.exchange_parts`), each exchanged once in H steps (`numerics.exchange_every`), no two after the same
step, and the sum of an exchange is used D steps after its start (`numerics.exchange_delay`), which hide it:

    H = 6, P = 2, D = 2      after step   1   2   3   4   5   6   7   8   9   10  ...
    part 0                                        start   .   end             start     start = 3 mod 6
    part 1                                                    start   .   end           start = 6 mod 6

Where an exchange has two collectives, and the second needs the sum of the first, the second is issued D // 2 steps after the start,
so that steps hide both. An exchange ends before the next part's begins, so one buffer is in flight at a time. After the last step
of the job the exchange in flight ends, and then every part is exchanged at once.

A part holds every P-th of the model's layers that have trained weights, in the order of the forward: what parts hold is spread
over the depth of the model (Douillard et al. 2025, arXiv:2501.18512, section 2.2, who found strides no worse than runs).

Contributions: the R parts of a step's gradient that a codec writes down, and where a layout sums them. No torch.

`numerics.replicas = R` divides the global batch into R equal runs of samples. The gradient of each is summed in full,
encoded with what its code lost in the step before, and the R codes are added up and encoded once more:

    D = Q(s + sum_r Q(G_r + e_r))        e_r, s: what Q has lost in the step before (Tang et al. 2019, arXiv:1905.05957)

So the job alone says what is computed. A layout says where: the R contributions are those of the ranks of one data axis,
or of fewer ranks, each of which makes several, one after the other.

    R = 4    dp=4                          dp=2                            dp_replicate=4 dp_shard=2
    rank 0   samples of G_0                G_0, G_1                        half of G_0, summed with rank 1
    rank 1             G_1                 G_2, G_3                        half of G_0

With `numerics.exchange_every = H` the R parts are replicas that are trained independently: G_r is the move of replica r's weights
in H steps of its optimizer, and D moves the weights with which all replicas then continue.

Layouts with one R differ where a sum falls between two codes and is rounded another way: by one quantisation step.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from samestep.job import Job
from samestep.job_tables import NumericsTable
from samestep.layout import Layout
from samestep.models.param_spec import ParamSpec
from samestep.models.spec import ModelSpec
from samestep.program.codecs import CODECS, PLAIN, is_factored
from samestep.program.holding import REPLICAS, SHARDS
from samestep.program.ranks import BESIDE
from samestep.program.update_rules import block_of


class Phase(StrEnum):
    """A phase of an exchange, which is carried out after a step."""

    START = "start"
    """Replicas encode the moves of their weights, and the first collective is issued."""
    SUM = "sum"
    """The first collective is waited for, and the second one issued, if there are two."""
    END = "end"
    """The outer step is taken, and replicas continue with its weights."""


class ExchangeEvent(NamedTuple):
    """One phase of the exchange of a part."""

    phase: Phase
    part: int


@dataclass(frozen=True, slots=True)
class ExchangeTimes:
    """When the parts of a job's weights are exchanged."""

    every: int
    parts: int
    delay: int
    last: int
    """Steps of the job."""

    @classmethod
    def of(cls, numerics: NumericsTable, steps: int) -> ExchangeTimes:
        """Return the times of a job of so many steps."""
        return cls(numerics.exchange_every, numerics.exchange_parts, numerics.exchange_delay, steps)

    def behind(self, step: int) -> tuple[ExchangeEvent, ...]:
        """Return the events after step `step` (from 1), in order."""
        parts = [part for part in range(self.parts) if self._last_start(part, step - 1) + self.delay >= step]
        if step == self.last:
            ended = [event for part in parts for event in self._events(part, step, rest=True)]
            return (*ended, *at_once(range(self.parts)))
        events = [event for part in parts for event in self._events(part, step)]
        starting = [part for part in range(self.parts) if self._last_start(part, step) == step]
        started = [ExchangeEvent(Phase.START, part) for part in starting]
        return (*events, *started) if self.delay else at_once(starting)

    def _events(self, part: int, step: int, rest: bool = False) -> Iterable[ExchangeEvent]:
        """Yield the phases, after a step, of an exchange in flight, or all that are left of it."""
        age = step - self._last_start(part, step - 1)
        is_last = rest or age == self.delay
        if age == max(1, self.delay // 2) or (rest and age < max(1, self.delay // 2)):
            yield ExchangeEvent(Phase.SUM, part)
        if is_last:
            yield ExchangeEvent(Phase.END, part)

    def _last_start(self, part: int, step: int) -> int:
        """Return the last step, up to `step`, after which a part's exchange starts; far below 0 if there is none."""
        offset = (part + 1) * self.every // self.parts
        start = step - (step - offset) % self.every
        return start if start > 0 else -self.every - self.delay


def at_once(parts: Iterable[int]) -> tuple[ExchangeEvent, ...]:
    """Return all phases of the exchange of some parts, after a single step."""
    together = [*parts]
    return tuple(ExchangeEvent(phase, part) for phase in Phase for part in together)


def parts_of(model: ModelSpec, number: int) -> dict[str, int]:
    """Return the part of each trained weight of a whole model, where there are several."""
    if number == 1:
        return {}
    layers = sorted({param.layer for param in model.params if param.trainable})
    place = {layer: index % number for index, layer in enumerate(layers)}
    return {param.name: place[param.layer] for param in model.params if param.trainable}


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
    """Whether whole steps hide the exchange; their collectives must not wait for it."""

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
        """Return the axis whose ranks hold the contributions of a layout of ZeRO stage `zero`: its outermost data axis."""
        if zero == 0:
            axis, ranks = ("dp", layout.dp) if layout.cp > 1 else (REPLICAS, layout.dp)
        else:
            axis, ranks = (REPLICAS, layout.dp_replicate) if layout.dp_replicate > 1 else (SHARDS, layout.num_shards)
        inside = ("cp",) if zero == 0 and layout.cp > 1 else ()
        return cls(axis=axis, ranks=ranks, each=max(1, replicas // ranks), inside=inside, is_hidden=is_hidden)


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
    parts: Mapping[str, int] = field(default_factory=dict, hash=False)
    """The part of each weight, where replicas exchange parts of their weights at different times."""
    num_parts: int = 1
    delay: int = 0
    """Steps between the start of an exchange and the outer step that uses it."""
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
            parts=parts_of(model, numerics.exchange_parts),
            num_parts=numerics.exchange_parts,
            delay=numerics.exchange_delay,
            blocks={param.name: block_of(param.shape) or 1 for param in model.params} if has_blocks else {},
            rank=numerics.compression_rank if codec is not None and codec.factors else 0,
        )

    @property
    def trains_apart(self) -> bool:
        """Whether replicas are trained independently between two exchanges."""
        return self.every > 1

    def contributions(self, layout: Layout, zero: int) -> Contributions | None:
        """Return the contributions that a layout of ZeRO stage `zero` sums encoded, or as moves; None where there are none."""
        if self.codec == PLAIN and not self.trains_apart:
            return None
        return Contributions.of(layout, zero, self.replicas, is_hidden=self.delay > 0)

    def part_of(self, name: str) -> int:
        """Return the index of the part with which a weight is exchanged, where replicas are trained independently."""
        return self.parts.get(name, 0)

    def block_of(self, param: ParamSpec) -> int:
        """Return the elements of a block of a weight's gradient; 1 where gradients are sent as they are."""
        return self.blocks.get(param.name, 1)

    def is_factored(self, param: ParamSpec) -> bool:
        """Return whether a weight's gradient is sent as two factors."""
        return self.rank > 0 and is_factored(param.shape, self.rank)


SUMMED = Sharing()
"""Gradients are summed as they are, in every step."""
