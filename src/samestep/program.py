"""One optimizer step as plain data: what every rank of every pipeline stage computes, sends and waits for.

[Note: one step, four readers]  `plan` prices a program, `simulate` plays it on a clock, `train` carries it out,
`verify` proves it. Because there is one program, a prediction can be checked: the collectives that torch really sent
must equal those listed here (the ledger).

A `Program` is the list of tasks of one pipeline stage; a task (the forward of micro-batch 3, say) points at a body, a
list of ops written once and shared by all tasks that do the same. Ops are *driven* (issued by our interpreter) or
*implied* (issued by FSDP2 inside a driven op). Buckets and units are decided here, without torch; the runtime obeys.

```
stage 0:  F.first ─ B.first ─ F.last ─ B.last ─ U             tasks
                                        │
          B.last = backward:layers.1, reduce:bucket.0, ...     a body: ops in the order in which they are issued
```
Ops of one stream run in order: compute is one stream, each axis another. An op also waits for the latest earlier
ops of the names in `after`, and compute for all that was issued before it over an axis of `EXPOSED_AXES`: these exchanges
stand within a layer, whose compute is one op. All else runs beside compute: gathers ahead of need, reductions behind the
backward, messages between stages.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property
from typing import Any, Literal, NamedTuple

from samestep.holding import WHOLE, Holding
from samestep.job import Job, Precision
from samestep.layout import Layout
from samestep.model import ModelSpec, ParamSpec
from samestep.ranks import Ranks, data_ranks_per_node
from samestep.schedules import SCHEDULES, Action, TaskKind

TF32 = "tfloat32"
"""What a GPU multiplies float32 in where it may: 8 bits of exponent and 10 of mantissa, in the four bytes of a float32."""
BYTES_OF = {"float64": 8, "float32": 4, TF32: 4, "bfloat16": 2, "float16": 2}

COMPUTE_DTYPE: dict[Precision, str] = {
    "float64": "float64",
    "float32": "float32",
    "bf16": "bfloat16",
    "fp16": "float16",
}

STEP_SCALARS = ("loss", "count", "norm_squared", "stop")
"""What one all_reduce at the end of a step agrees on, as float64."""

SHARD_AXES = ("dp_shard", "dp_expert")
"""Data axes over which ZeRO shards: of what is expert-sharded it is what `ep` leaves of `dp_shard`."""
EXPOSED_AXES = ("tp", "cp", "ep")
"""Axes whose collectives the next compute needs: sums of a tensor cut, heads of an attention, rows of experts."""


class Kind(StrEnum):
    """What an op does."""

    FORWARD = "forward"
    BACKWARD = "backward"
    WEIGHT = "weight"
    """Gradients of weights, where the schedule takes them out of the backward."""
    RECOMPUTE = "recompute"
    UPDATE = "update"
    ALL_REDUCE = "all_reduce"
    ALL_GATHER = "all_gather"
    ALL_TO_ALL = "all_to_all"
    REDUCE_SCATTER = "reduce_scatter"
    REDUCE = "reduce"
    BROADCAST = "broadcast"
    SEND = "send"
    RECV = "recv"


REDUCING = (Kind.ALL_REDUCE, Kind.REDUCE_SCATTER, Kind.REDUCE)
"""Collectives that add up."""


@dataclass(frozen=True, kw_only=True)
class Op:
    """One operation of a body. Collectives have an axis; compute has none.

    Without slots, so that `but` can copy all fields at once: strategies rewrite a hundred thousand ops for one plan.
    """

    kind: Kind
    owner: str
    """The layer, unit or bucket it belongs to."""
    layer: int | None = None
    axis: str | None = None
    dtype: str = "float32"
    flops: int = 0
    size_bytes: int = 0
    """Collectives: the whole unsharded buffer with padding; wire bytes follow from it; of an all_to_all what this rank
    sends, if all experts are chosen alike. Update: bytes touched."""
    after: tuple[str, ...] = ()
    implied: bool = False
    """Issued by FSDP2 inside a driven op, not by our interpreter."""
    name: str = field(init=False, compare=False, repr=False)
    """`kind:owner`, unique within a body for one axis."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", f"{self.kind}:{self.owner}")

    def sized(self, numel: int) -> Op:
        """Return this op over `numel` elements of its dtype."""
        return self.but(size_bytes=numel * BYTES_OF[self.dtype])

    def but(self, **changes: Any) -> Op:
        """Return this op with other fields, as `dataclasses.replace` does, in a sixth of its time."""
        assert changes.keys() <= self.__dict__.keys(), (
            f"an op has no {', '.join(changes.keys() - self.__dict__.keys())}"
        )
        found = object.__new__(Op)
        found.__dict__.update(self.__dict__, **changes)
        if "kind" in changes or "owner" in changes:
            found.__post_init__()
        return found

    @property
    def stream(self) -> str:
        """Where it queues: compute, or the axis it is sent over."""
        return self.axis or "compute"


Ops = tuple[Op, ...]


Position = Literal["only", "first", "middle", "last"]
"""Where a micro-batch stands in its step."""


class BodyKey(NamedTuple):
    """The name of a body in its program; `str` writes it as `F.first`, `B.0.of3.last` or `U`."""

    kind: TaskKind
    chunk: int | None = None
    """Index of the virtual stage on its rank; None where one rank runs all layers, and in the update."""
    size: int | None = None
    """Samples of the micro-batch where it is smaller than the step's largest; None for the largest."""
    position: Position | None = None
    """None before the program has tasks, and in the update."""

    def __str__(self) -> str:
        size = None if self.size is None else f"of{self.size}"
        return ".".join(str(part) for part in (self.kind, self.chunk, size, self.position) if part is not None)


UPDATE_BODY = BodyKey(TaskKind.UPDATE)
"""The body of the optimizer's update, and of what is sent just before and behind it."""


class Task(NamedTuple):
    """One entry of a program: a body, and the micro-batch for which it runs."""

    body: BodyKey
    microbatch: int

    @property
    def kind(self) -> TaskKind:
        """What it is."""
        return self.body.kind

    @property
    def chunk(self) -> int:
        """Index of the virtual stage on its rank."""
        return self.body.chunk or 0

    @property
    def action(self) -> Action:
        """The entry of the stage's schedule that it carries out."""
        return Action(self.kind, self.microbatch, self.chunk)


class LedgerRow(NamedTuple):
    """One collective, as predicted or as sent."""

    kind: str
    dtype: str
    size_bytes: int
    owner: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """Where one parameter lies in the flat buffer of a bucket."""

    name: str
    offset: int
    numel: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """Parameters whose gradients are reduced together (zero=0 or 1), in the order in which backward finishes them."""

    name: str
    members: tuple[Member, ...]
    dtype: str
    """Dtype of the weights as the forward uses them; gradients are added up in master precision."""
    reduce_dtype: str
    """Dtype in which its gradients are sent."""
    padded_numel: int
    holding: Holding
    """What a rank holds of each of its weights."""

    @property
    def numel(self) -> int:
        """Elements without padding."""
        return sum(member.numel for member in self.members)


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """Parameters that are gathered together (zero=2 or 3): those of one layer, or one shared weight."""

    name: str
    modules: tuple[str, ...]
    params: tuple[str, ...]
    first_layer: int
    last_layer: int
    dtype: str
    """Dtype in which the weights are gathered."""
    reduce_dtype: str
    """Dtype in which the gradients are sent."""
    padded_numel: int
    """Elements of the unsharded buffer: each parameter's first dimension padded to a multiple of the ranks that share it."""
    padded_grad_numel: int
    """The same for the gradients: without frozen weights."""
    keep_after_forward: bool
    """Not resharded between forward and backward."""
    gather_in_backward: bool
    """Gathered again before its backward."""
    called: tuple[int, int] = (0, 0)
    """When the forward first enters one of its modules, and last leaves one: a count of such events."""
    spans_calls: bool = False
    """Its modules are called several times in a forward: held from the first call to the end of the task, and reduced
    once, after the last of their backwards."""
    ends_early: bool = True
    """A gradient flows back into what its first module is given, and shows that its backward is over; of other units it
    is over at the end of the task."""
    ahead: str | None = None
    """Name of the unit that is gathered ahead of need when this one's backward starts."""
    shard_axis: str
    """The data axis over which its weights are sharded."""
    num_shards: int
    """Ranks among which they are divided: 1 where a rank has them to itself, and nothing is gathered or scattered."""


@dataclass(frozen=True, kw_only=True)
class Step:
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
    ) -> Step:
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
    def reduce_dtype(self) -> str:
        """Dtype in which gradients are sent over the data axes; buckets, units and their ops take it from here."""
        return self.master_dtype

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

    def hold(self, part: Callable[[ParamSpec, Holding], Holding]) -> Step:
        """Return the step with a strategy's part added to what a rank holds of each weight of the model."""
        held = {param.name: part(param, self.holding(param)) for param in self.model.params}
        return replace(self, holdings={**self.holdings, **held})

    def cut_like(self, other: Step) -> Step:
        """Return this step with the local model of another one, and what a rank holds of it."""
        return replace(self, model=other.model, holdings=other.holdings)

    def working_dtype(self, param: ParamSpec) -> str:
        """Dtype in which `param` stands in the module: a shared weight stays in master precision and is cast at
        each use, so that its gradients meet in master precision."""
        return self.master_dtype if param.shared else self.compute_dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """One step on one pipeline stage: its tasks, the bodies they point at, and the geometry the runtime obeys."""

    step: Step
    bodies: Mapping[BodyKey, Ops]
    tasks: tuple[Task, ...] = ()
    """In the order in which they run; the last one is the update."""
    buckets: tuple[Bucket, ...] = ()
    units: tuple[Unit, ...] = ()
    chunks: tuple[range, ...] = ()
    """Layers of each virtual stage of this rank; empty where one rank runs all layers."""
    axes: Mapping[str, int] = field(default_factory=dict)
    """Ranks in a group of each axis that the program sends over."""

    def with_bodies(self, rewrite: Callable[[BodyKey, Ops], Ops], **changes: Any) -> Program:
        """Return the program with each body rewritten, and other fields changed."""
        bodies = {key: rewrite(key, ops) for key, ops in self.bodies.items()}
        return replace(self, bodies=bodies, **changes)

    def ops(self) -> Iterator[tuple[Task, Op]]:
        """Yield every op of the step with its task, in the order of issue."""
        for task in self.tasks:
            for op in self.bodies[task.body]:
                yield task, op

    def ledger(self, group_of: Callable[[str], str] = str) -> dict[str, list[LedgerRow]]:
        """List what each group sends, in order of issue, and what it receives; how these lists interleave is timing.

        `group_of` names the group that serves an axis: two axes over the same ranks share one.
        """
        rows: dict[str, list[LedgerRow]] = {}
        for _, op in self.ops():
            if op.axis is not None:
                row = LedgerRow(str(op.kind), op.dtype, op.size_bytes, op.owner)
                rows.setdefault(ledger_key(group_of(op.axis), row), []).append(row)
        return rows


def ledger_key(group: str, row: LedgerRow) -> str:
    """Name the list of a ledger that a row belongs to: that of its group, or of what it is received from.

    What is received is awaited ahead of need, as soon as there is a place for it.
    """
    return f"{group} recv {row.owner}" if row.kind == Kind.RECV else group


def _even_part(count: int, parts: int, index: int) -> int:
    """Size of one of several parts that differ by at most one, the larger ones first."""
    return count // parts + (index < count % parts)


def position(microbatch: int, num_microbatches: int) -> Position:
    """Return where a micro-batch stands in its step."""
    if num_microbatches == 1:
        return "only"
    if microbatch == 0:
        return "first"
    return "last" if microbatch == num_microbatches - 1 else "middle"


def starts_step(body: BodyKey) -> bool:
    """Whether the body belongs to the first micro-batch of a step."""
    return body.position in ("only", "first")


def ends_step(body: BodyKey) -> bool:
    """Whether the body belongs to the last micro-batch of a step."""
    return body.position in ("only", "last")


def ends_gradients(body: BodyKey, step: Step) -> bool:
    """Whether the body leaves the last gradients of a step."""
    kind = TaskKind.WEIGHT if step.splits_backward else TaskKind.BACKWARD
    return ends_step(body) and body.kind is kind


def is_backward(body: BodyKey) -> bool:
    """Whether the body is one of a backward task."""
    return body.kind is TaskKind.BACKWARD


def is_forward(body: BodyKey) -> bool:
    """Whether the body is one of a forward task."""
    return body.kind is TaskKind.FORWARD


def padded(numel: int, multiple: int) -> int:
    """Round `numel` up to a multiple."""
    return -(-numel // multiple) * multiple


BUCKET_BYTES = 25 * 2**20
"""A bucket is closed once its gradients reach this: small enough to overlap, large enough to use the link."""


def make_buckets(step: Step, chunks: tuple[range, ...] = ()) -> tuple[Bucket, ...]:
    """Lay the trainable parameters into flat buckets in the order in which backward finishes them.

    Weights of different working dtype never share a bucket, since a bucket's weights may be gathered as one; nor do
    those of different virtual stages, whose backwards end at different times.
    """

    def chunk_of(param: ParamSpec) -> int:
        return next((index for index, layers in enumerate(chunks) if param.layer in layers), 0)

    # Weights of other holdings have buckets of their own: the norm counts copies once, and gradients are summed over
    # other ranks.
    order = sorted(
        (param for param in step.model.params if param.trainable),
        # stable: the module's own order within a layer
        key=lambda param: (-chunk_of(param), step.holding(param).sort_key, -param.layer),
    )
    limit = BUCKET_BYTES // BYTES_OF[step.master_dtype]
    runs: list[list[ParamSpec]] = []
    size = 0
    for param in order:
        kind = (*_kind(step, param), chunk_of(param))
        fresh = not runs or size >= limit or (*_kind(step, runs[-1][0]), chunk_of(runs[-1][0])) != kind
        if fresh:
            runs.append([])
            size = 0
        runs[-1].append(param)
        size += param.numel
    runs.sort(key=lambda run: (-chunk_of(run[0]), -min(param.layer for param in run)))  # as backward finishes them
    return tuple(_bucket(step, index, run) for index, run in enumerate(runs))


def partial_sizes(step: Step, unit: Unit, axis: str) -> dict[str, int]:
    """Return the elements, row padding included, of a rank's shards of a unit's gradients that are partial over `axis`."""
    mine = {*unit.params}
    return {
        param.name: padded(param.shape[0], unit.num_shards) // unit.num_shards * (param.numel // param.shape[0])
        for param in step.model.params
        if param.name in mine and param.trainable and param.numel and axis in step.holding(param).partial_over
    }


def _kind(step: Step, param: ParamSpec) -> tuple[object, ...]:
    return step.working_dtype(param), step.holding(param)


def _bucket(step: Step, index: int, params: list[ParamSpec]) -> Bucket:
    members = []
    offset = 0
    for param in params:
        members.append(Member(name=param.name, offset=offset, numel=param.numel))
        offset += param.numel
    holding = step.holding(params[0])
    return Bucket(
        name=f"bucket.{index}",
        members=tuple(members),
        dtype=step.working_dtype(params[0]),
        reduce_dtype=step.reduce_dtype,
        padded_numel=padded(offset, math.prod(map(step.ranks.size, holding.data_axes))),
        holding=holding,
    )


Reduction = Callable[[Bucket], tuple[Op, ...]]
"""The collectives that reduce a bucket, in order."""


def start_reductions(ops: Ops, step: Step, buckets: tuple[Bucket, ...], reduction: Reduction) -> Ops:
    """Put the first collective of each bucket behind the backward that finishes it, never before an earlier bucket's.

    What a layer's experts exchange is part of its backward.
    """
    layer_of = {param.name: param.layer for param in step.model.params}
    kind = Kind.WEIGHT if step.splits_backward else Kind.BACKWARD
    reached = {op.layer for op in ops if op.kind is kind}  # of several virtual stages a body has one's layers
    waiting = [bucket for bucket in buckets if layer_of[bucket.members[0].name] in reached]
    written: list[Op] = []
    done: Op | None = None
    for op, following in itertools.zip_longest(ops, ops[1:]):
        written.append(op)
        done = op if op.kind is kind else done
        if done is None or (following is not None and following.kind is Kind.ALL_TO_ALL):
            continue
        while waiting and _finished(waiting[0], layer_of, done):
            first = reduction(waiting.pop(0))[:1]
            written.extend(part.but(after=(*part.after, done.name)) for part in first)
    assert not waiting, f"no backward finishes {[bucket.name for bucket in waiting]}"
    return tuple(written)


def finish_reductions(buckets: tuple[Bucket, ...], reduction: Reduction) -> Iterator[Op]:
    """Yield the other collectives of each bucket, which follow the step's last backward.

    Issued any earlier, compute would have to wait for the first ones.
    """
    for bucket in buckets:
        parts = reduction(bucket)
        for before, part in itertools.pairwise(parts):
            yield part.but(after=(*part.after, before.name))


def _finished(bucket: Bucket, layer_of: Mapping[str, int], op: Op) -> bool:
    return op.layer is not None and min(layer_of[member.name] for member in bucket.members) >= op.layer
