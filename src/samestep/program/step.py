"""The `StepSpec`: the frozen facts of one step that every strategy reads, and what follows from them.

Given are the model, the layout, and from the job the precision and the global batch; micro-batch sizes, dtypes and the
order of ranks follow. While the strategies are applied, `model` becomes the local model of one rank, and `holdings`
collects the part of each weight that the rank holds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, NamedTuple

from samestep.job import Job
from samestep.job_tables import Precision, Waiver
from samestep.layout import Layout
from samestep.models.param_spec import ParamSpec
from samestep.models.spec import ModelSpec, cache_by_model
from samestep.program.contributions import SUMMED, Contributions, Sharing
from samestep.program.holding import SHARDS, WHOLE, Holding
from samestep.program.ops import BYTES_OF, COMPUTE_DTYPE, FLAG_SLOTS, MODEL_SCALARS, TF32, BodyKey, ends_step
from samestep.program.ranks import Ranks
from samestep.program.update_rules import HeldStates, with_whole_updates
from samestep.records import changed
from samestep.schedules import SCHEDULES, TaskKind
from samestep.shares import Shares

MOST_MICROBATCHES = 2**15
"""The largest number of micro-batches of a step on one rank: each is a task of the program."""


@dataclass(frozen=True, kw_only=True)
class StepSpec:
    """One step as the strategies see it: the model, the layout, the parts of the job that shape a step, the stage."""

    model: ModelSpec
    layout: Layout
    precision: Precision
    global_batch: int
    """Samples of one step over all ranks."""
    batch_norm_group: int
    """Samples of a group whose statistics batch norm takes."""
    ranks_per_node: int
    stage: int = 0
    """Coordinate on `pp`; every stage has its program."""
    replica: int = 0
    """Coordinate on `dp`: the first of the ranks that read different samples may have one sample more."""
    samples: int | None = None
    """Samples of the micro-batch that the ops are written for; None for the largest of the step."""
    cuts_loss: bool = True
    """Whether the loss works on logits that are cut by vocabulary; if not, they are gathered for it."""
    loss_over_batch: bool = False
    """Whether the loss sees the outputs of all samples of the step."""
    compile: Literal["none", "blocks"] = "none"
    """The part of a model that runs as a graph of `torch.compile`."""
    fuses: Literal["none", "blocks"] = "none"
    """The part of a model of which the compiler joins operations into kernels, as inductor does."""
    attention: Literal["auto", "flash", "cudnn", "math", "efficient"] = "auto"
    """The kernel of attention that the job chooses; `auto` leaves it to the hardware profile."""
    tf32: bool = False
    """Whether float32 matrix products may run in `TF32`."""
    deterministic: bool = False
    """Whether only kernels run that give the same bits each time; torch then also fills each new tensor."""
    updates_in_chunks: bool = False
    """Whether the optimizer may update some weights before others, as those of torch may."""
    states: HeldStates = field(default_factory=HeldStates)
    """How the optimizer's states are held."""
    averages_weights: bool = False
    """Whether an average of each trained weight is kept with its master."""
    sharing: Sharing = SUMMED
    """How gradients are encoded, or replicas trained independently; `SUMMED` where gradients are summed as they are."""
    unsure: tuple[str, ...] = ()
    """The trained weights of the whole model that a step may give no gradient: ranks agree on each with the step's scalars."""
    offload: tuple[str, ...] = ()
    """Names of the modules whose frozen weights are in the host's memory between their uses."""
    allow: tuple[Waiver, ...] = ()
    """Refusals that the job waives."""
    holdings: Mapping[str, Holding] = field(default_factory=dict, hash=False)
    """The holding of each weight that a strategy has changed, by the weight's full name."""

    @classmethod
    def of(
        cls,
        model: ModelSpec,
        job: Job,
        layout: Layout,
        ranks_per_node: int | None = None,
        cuts_loss: bool | None = None,
        updates_in_chunks: bool | None = None,
    ) -> StepSpec:
        """Return the step of a job in a layout, on the first stage and data rank; the job says what is None."""
        return cls(
            model=model,
            layout=layout,
            precision=job.numerics.precision,
            global_batch=job.train.global_batch,
            batch_norm_group=job.numerics.batch_norm_group or job.train.global_batch,
            ranks_per_node=layout.world_size,
            loss_over_batch=job.train.loss_over == "batch" or model.loss_reads is not None,
            compile=job.run.compile,
            fuses=job.run.compile if job.run.compile_backend == "inductor" else "none",
            attention=job.run.attention,
            tf32=job.numerics.tf32,
            deterministic=job.numerics.deterministic,
            updates_in_chunks=":" not in job.optimizer.name if updates_in_chunks is None else updates_in_chunks,
            states=HeldStates.of(model, job, BYTES_OF[_master_dtype(job.numerics.precision)]),
            averages_weights=job.train.ema is not None,
            sharing=Sharing.of(model, job),
            unsure=_unsure_weights(model),
            offload=job.model.offload,
            allow=job.run.waivers,
        ).in_layout(model, job, layout, ranks_per_node, cuts_loss)

    def in_layout(
        self,
        model: ModelSpec,
        job: Job,
        layout: Layout,
        ranks_per_node: int | None = None,
        cuts_loss: bool | None = None,
    ) -> StepSpec:
        """Return the same job's step in another layout; the job says what is None."""
        per_node = ranks_per_node or job.run.ranks_per_node or layout.world_size
        return self.but(
            model=with_whole_updates(model, job, layout),
            layout=layout,
            ranks_per_node=min(per_node, layout.world_size),
            cuts_loss=(job.train.loss == "cross_entropy" if cuts_loss is None else cuts_loss)
            or bool(layout.loss_chunk is not None and layout.cp == 1 and model.chunk_reduces),
        )

    def but(self, **changes: Any) -> StepSpec:
        """Return this step with some fields changed."""
        return changed(self, **changes)

    @cached_property
    def ranks(self) -> Ranks:
        """The order of the layout's ranks."""
        return Ranks.of(self.layout, self.ranks_per_node)

    @cached_property
    def rank_samples(self) -> int:
        """Samples of one step on the rank with most of them."""
        return -(-self.global_batch // self.layout.dp)

    @cached_property
    def num_microbatches(self) -> int:
        """Number of micro-batches of one step, the same on every rank; by default one."""
        return -(-self.rank_samples // (self.layout.microbatch or self.rank_samples))

    @cached_property
    def microbatch_samples(self) -> int:
        """Samples of the micro-batch that the ops are written for."""
        return self.samples or -(-self.rank_samples // self.num_microbatches)

    @property
    def microbatch_sizes(self) -> tuple[int, ...]:
        """Samples in each micro-batch of this rank; an empty one runs one sample that the loss does not count."""
        shares = Shares(self.global_batch, self.layout.dp, self.num_microbatches)
        return tuple(max(1, shares.size(self.replica, index)) for index in range(self.num_microbatches))

    @cached_property
    def sample_groups(self) -> SampleGroups | None:
        """The groups of samples whose statistics batch norm takes; None in a model without one."""
        if not self.model.takes_batch_statistics:
            return None
        return SampleGroups.of(self.global_batch, self.batch_norm_group, self.layout.dp, self.num_microbatches)

    @cached_property
    def compute_dtype(self) -> str:
        """Dtype of the weights and activations in the forward."""
        return COMPUTE_DTYPE[self.precision]

    @property
    def product_dtype(self) -> str:
        """Dtype of the factors of matrix products."""
        return TF32 if self.tf32 and self.compute_dtype == "float32" else self.compute_dtype

    @property
    def master_dtype(self) -> str:
        """Dtype of master weights, accumulated gradients and optimizer state."""
        return _master_dtype(self.precision)

    @cached_property
    def contributions(self) -> Contributions | None:
        """The contributions that are encoded and summed: to a gradient, or to the weights' change where replicas train
        independently; None where gradients are summed as they are."""
        return self.sharing.contributions(self.layout, self.zero)

    def summed_over(self, axes: tuple[str, ...]) -> tuple[str, ...]:
        """Return the data axes over which a step sums gradients: these; or those within one model, if several are trained independently."""
        return self.contributions.inside if self.contributions is not None and self.sharing.trains_apart else axes

    @property
    def scatters_codes(self) -> bool:
        """Whether ranks scatter the gradients of units encoded: those of zero=2 and 3 over all data ranks."""
        contributions = self.contributions
        return contributions is not None and self.zero >= 2 and contributions.axis == SHARDS

    @property
    def num_reported(self) -> int:
        """The number of sums and counts of the loss's named terms and values, which the step's report gives."""
        return self.model.loss_names.num_numbers

    @property
    def num_scalars(self) -> int:
        """The number of scalars that all ranks sum at the end of a step; each model that is trained independently has its own."""
        return self.sharing.num_apart * (len(MODEL_SCALARS) + len(self.unsure) + self.num_reported) + FLAG_SLOTS

    @property
    def is_mixed(self) -> bool:
        """Whether weights and activations have another dtype than master weights."""
        return self.compute_dtype != self.master_dtype

    @property
    def zero(self) -> int:
        """The ZeRO stage that takes effect: 0 where the shard group has a single rank."""
        return self.layout.zero if self.layout.num_shards > 1 else 0

    @property
    def splits_masters(self) -> bool:
        """Whether a master is held in two halves, of which the bfloat16 weight is the upper one.

        Under offload the host holds masters, and under zero=2 and 3 a rank's shard of the weights is its master.
        """
        return self.precision == "bf16" and self.zero < 2 and self.updates_in_chunks and not self.layout.offload

    @property
    def splits_backward(self) -> bool:
        """Whether the schedule computes weight gradients in separate tasks."""
        return self.layout.pp > 1 and SCHEDULES[self.layout.schedule].splits_backward

    def ends_gradients(self, body: BodyKey) -> bool:
        """Return whether the body leaves the last gradients of the step."""
        kind = TaskKind.WEIGHT if self.splits_backward else TaskKind.BACKWARD
        return ends_step(body) and body.kind is kind

    def holding(self, param: ParamSpec) -> Holding:
        """Return the holding of `param` after the strategies applied so far."""
        return self.holdings.get(param.name, WHOLE)

    @cached_property
    def copies(self) -> tuple[Mapping[str, int], Sequence[int]]:
        """The number of ranks that hold each weight alike, and these numbers in order."""
        each = {param.name: self.holding(param).num_copies for param in self.model.params}
        return each, sorted(set(each.values()))

    @cached_property
    def updated_numel(self) -> tuple[int, int]:
        """The elements of weights that the ranks of a shard group update, and those of them that have a copy in another dtype."""
        numel = copied = 0
        for param in self.model.params:
            if param.trainable:
                elements = param.numel * (self.layout.num_shards // self.holding(param).num_shards)
                numel += elements
                copied += elements * (self.zero < 2 and self.working_dtype(param) != self.master_dtype)
        return numel, copied

    def hold(self, part: Callable[[ParamSpec, Holding], Holding]) -> StepSpec:
        """Return the step with `part` applied to every weight of the model and its holding."""
        holdings = {param.name: part(param, self.holding(param)) for param in self.model.params}
        return self.but(holdings={**self.holdings, **holdings})

    def cut_like(self, other: StepSpec) -> StepSpec:
        """Return this step with the local model and the holdings of another one."""
        return self.but(model=other.model, holdings=other.holdings)

    def working_dtype(self, param: ParamSpec) -> str:
        """Return the dtype of `param` within the module.

        A shared weight stays in master precision and is cast at each use, so that its gradients are summed in master
        precision.
        """
        return self.master_dtype if param.shared else self.compute_dtype

    def weight_bytes(self, param: ParamSpec, numel: int | None = None) -> int:
        """Return the bytes of a weight within the module, or of `numel` elements of it."""
        return param.bytes_of(param.numel if numel is None else numel, BYTES_OF[self.working_dtype(param)])


def _master_dtype(precision: Precision) -> str:
    return "float64" if precision == "float64" else "float32"


@cache_by_model
def _unsure_weights(model: ModelSpec) -> tuple[str, ...]:
    """Return the names of the trained weights that a step may give no gradient."""
    return tuple(p.name for p in model.params if p.trainable and p.may_be_unused and p.numel)


def one_graph(step: StepSpec) -> str:
    """Return the part that runs as one graph, in words of a refusal; empty where nothing is compiled."""
    return "run.compile = 'blocks' makes one graph of a block" if step.compile == "blocks" else ""


def repeats_in_graphs(step: StepSpec) -> bool:
    """Return whether blocks that are recomputed are repeated by a graph that contains their forward and backward."""
    return step.compile == "blocks" and step.layout.recompute in ("selective", "alternate")


class GroupPart(NamedTuple):
    """Samples side by side that belong to one group."""

    group: int
    """Index of the group in its micro-batch."""
    num_samples: int


@dataclass(frozen=True)
class SampleGroups:
    """The groups of `size` samples in a batch, and the shares of its ranks and micro-batches.

    Group g holds the positions [gK, (g + 1)K) of the global batch, so it is the same one in every layout. A rank reads runs of
    them, and the statistics that ranks compute of their runs are put together in slots:

        K=8, 4 ranks of 6 samples      rank 0: 6 of group 0      rank 1: 2 of group 0, 4 of group 1      rank 2: 4 of group 1, ...
    """

    shares: Shares
    size: int

    @classmethod
    def of(cls, global_batch: int, size: int, num_ranks: int, num_microbatches: int) -> SampleGroups:
        """Return the groups of a batch in which all ranks together read a micro-batch side by side."""
        return cls(Shares(global_batch, num_ranks, num_microbatches, by_microbatch=True), size)

    @cached_property
    def totals(self) -> tuple[int, ...]:
        """The different numbers of samples of a micro-batch, over all ranks."""
        shares = self.shares
        least = shares.global_batch // shares.num_ranks
        # The sizes of a rank's micro-batches change once, where its remainder ends.
        ends = {0, least % shares.num_microbatches, (least + 1) % shares.num_microbatches}
        return tuple(sorted({shares.total(index) for index in ends}))

    @property
    def fit(self) -> bool:
        """Whether every micro-batch of all ranks consists of whole groups."""
        return self.shares.num_microbatches == 1 or all(total % self.size == 0 for total in self.totals)

    @cached_property
    def num_groups(self) -> int:
        """The largest number of groups in a micro-batch."""
        return -(-self.totals[-1] // self.size)

    @property
    def is_one_forward(self) -> bool:
        """Whether every forward of a rank computes one whole group, whose statistics nobody else needs."""
        return self.shares.num_ranks == 1 and self.totals == (self.size,)

    @cached_property
    def spans_ranks(self) -> bool:
        """Whether the samples of a group may be spread over several ranks."""
        return self.shares.num_ranks > 1 and not (self._each and self._each % self.size == 0)

    @cached_property
    def num_slots(self) -> int:
        """The number of runs for which a rank has a place, the same on every rank: at least those that it reads."""
        largest = self._each or self.shares.size(0, 0)
        step = (
            math.gcd(self._each, self.size) if self._each else 1
        )  # every run begins at a multiple of it within a group
        return min(self.num_groups, -(-(self.size - step + largest) // self.size))

    @cached_property
    def _each(self) -> int:
        """The samples of every rank in every micro-batch, if all have as many; else 0."""
        each, rest = divmod(self.shares.global_batch, self.shares.num_ranks * self.shares.num_microbatches)
        return 0 if rest else each

    def runs(self, rank: int, microbatch: int) -> tuple[GroupPart, ...]:
        """Return the runs that a rank reads in a micro-batch; none where its place is empty."""
        first, positions = self.shares.first(microbatch), self.shares.positions(rank, microbatch)
        parts = []
        start = positions.start - first
        while start < positions.stop - first:
            group = start // self.size
            stop = min(positions.stop - first, (group + 1) * self.size)
            parts.append(GroupPart(group, stop - start))
            start = stop
        return tuple(parts)

    def slots(self, microbatch: int) -> tuple[range, ...]:
        """Return for each group of a micro-batch its slots, counted over all ranks in their order."""
        spans: dict[int, tuple[int, int]] = {}
        for rank in range(self.shares.num_ranks):
            for index, run in enumerate(self.runs(rank, microbatch), rank * self.num_slots):
                spans[run.group] = spans.get(run.group, (index, 0))[0], index + 1
        return tuple(range(*spans[group]) for group in sorted(spans))
