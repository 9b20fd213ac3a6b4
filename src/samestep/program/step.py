"""The frozen facts of one step that every strategy reads: model, layout, place, sizes of micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from samestep.job import Job, Precision
from samestep.layout import Layout
from samestep.models.spec import ModelSpec, ParamSpec
from samestep.program.codecs import CODECS, PLAIN
from samestep.program.holding import WHOLE, Holding
from samestep.program.ops import COMPUTE_DTYPE, TF32
from samestep.program.ranks import Ranks, data_ranks_per_node
from samestep.schedules import SCHEDULES


@dataclass(frozen=True, kw_only=True)
class StepSpec:
    """What the strategies are told: the model, the parts of the job that shape a step, the layout, the place."""

    model: ModelSpec
    layout: Layout
    precision: Precision
    global_batch: int
    ranks_per_node: int
    stage: int = 0
    """Position on `pp`: every stage has a program of its own."""
    replica: int = 0
    """Position among the ranks that read different samples: the first ones may have one more."""
    samples: int | None = None
    """Samples of the micro-batches that ops are written for; None for the largest of the step."""
    cuts_loss: bool = True
    """The loss works on logits cut by vocabulary; otherwise they are put together for it."""
    tf32: bool = False
    """Products of float32 may run in `TF32`."""
    holdings: Mapping[str, Holding] = field(default_factory=dict, hash=False)
    """What a rank holds of each weight to which a strategy has added its part, by name."""

    @classmethod
    def of(
        cls,
        model: ModelSpec,
        job: Job,
        layout: Layout,
        ranks_per_node: int | None = None,
        cuts_loss: bool | None = None,
        stage: int = 0,
        replica: int = 0,
    ) -> StepSpec:
        """Take from a job what shapes its step."""
        per_node = ranks_per_node or job.run.ranks_per_node or layout.world_size
        return cls(
            model=model,
            layout=layout,
            precision=job.numerics.precision,
            global_batch=job.train.global_batch,
            ranks_per_node=min(per_node, layout.world_size),
            stage=stage,
            replica=replica,
            cuts_loss=job.train.loss == "cross_entropy" if cuts_loss is None else cuts_loss,
            tf32=job.numerics.tf32,
        )

    @cached_property
    def ranks(self) -> Ranks:
        """The order of the layout's ranks."""
        return Ranks.of(self.layout, self.ranks_per_node)

    @property
    def dp_per_node(self) -> int:
        """Ranks of one node whose gradients of one weight are summed."""
        return data_ranks_per_node(self.layout, self.ranks_per_node)

    @cached_property
    def rank_samples(self) -> int:
        """Samples of one step on the rank that has most."""
        return -(-self.global_batch // self.layout.dp)

    @cached_property
    def num_microbatches(self) -> int:
        """Micro-batches of one step, the same number on every rank."""
        return -(-self.rank_samples // (self.layout.microbatch or self.rank_samples))

    @cached_property
    def microbatch_samples(self) -> int:
        """Samples of a micro-batch: of those at hand, or the largest."""
        return self.samples or -(-self.rank_samples // self.num_microbatches)

    @property
    def microbatch_sizes(self) -> tuple[int, ...]:
        """Samples that each micro-batch of this rank runs: an empty one, one of another rank that counts nothing."""
        mine = _even_part(self.global_batch, self.layout.dp, self.replica)
        return tuple(max(1, _even_part(mine, self.num_microbatches, index)) for index in range(self.num_microbatches))

    @property
    def compute_dtype(self) -> str:
        """Dtype of the weights and activations in the forward."""
        return COMPUTE_DTYPE[self.precision]

    @property
    def product_dtype(self) -> str:
        """What matrix products may be computed in."""
        return TF32 if self.tf32 and self.compute_dtype == "float32" else self.compute_dtype

    @property
    def master_dtype(self) -> str:
        """Dtype of master weights, accumulated gradients and optimizer state."""
        return "float64" if self.precision == "float64" else "float32"

    @property
    def codec(self) -> str:
        """Name of the codec as which gradients are sent over the data axes; buckets, units and their ops take it from here."""
        return PLAIN

    @property
    def reduce_dtype(self) -> str:
        """Dtype in which gradients are sent over the data axes, as the codec says."""
        return CODECS[self.codec].sent_dtype(self.master_dtype)

    @property
    def is_mixed(self) -> bool:
        """Whether weights and activations are of another dtype than masters."""
        return self.compute_dtype != self.master_dtype

    @property
    def zero(self) -> int:
        """The ZeRO stage that has an effect: nothing is sharded over a single rank."""
        return self.layout.zero if self.layout.num_shards > 1 else 0

    @property
    def splits_backward(self) -> bool:
        """Whether the gradients of weights are tasks of their own."""
        return self.layout.pp > 1 and SCHEDULES[self.layout.schedule].splits_backward

    def holding(self, param: ParamSpec) -> Holding:
        """Return what one rank holds of `param`, as far as the strategies up to here have said."""
        return self.holdings.get(param.name, WHOLE)

    def hold(self, part: Callable[[ParamSpec, Holding], Holding]) -> StepSpec:
        """Return the step with a strategy's part added to what a rank holds of each weight of the model."""
        held = {param.name: part(param, self.holding(param)) for param in self.model.params}
        return replace(self, holdings={**self.holdings, **held})

    def cut_like(self, other: StepSpec) -> StepSpec:
        """Return this step with the local model of another one, and what a rank holds of it."""
        return replace(self, model=other.model, holdings=other.holdings)

    def working_dtype(self, param: ParamSpec) -> str:
        """Dtype in which `param` stands in the module: a shared weight stays in master precision and is cast at
        each use, so that its gradients meet in master precision."""
        return self.master_dtype if param.shared else self.compute_dtype


def _even_part(count: int, parts: int, index: int) -> int:
    """Size of one of several parts that differ by at most one, the larger ones first."""
    return count // parts + (index < count % parts)
