"""The ops of a program, and the tasks that run them: their kinds, their dtypes, and the axes that they are sent over.

An op is one computation of a layer, the optimizer's update, or one collective. It is *driven* (issued by our
interpreter) or *implied* (issued by FSDP2 inside a driven op). Compute has no axis; a collective has one, and its
`size_bytes` is the size of the whole unsharded buffer, padding included, from which the bytes on the wire follow:

```
Op(kind=FORWARD, owner="layers.1", layer=1, flops=..., dtype="bfloat16")
Op(kind=ALL_REDUCE, owner="bucket.0", axis="dp_replicate", size_bytes=..., after=("backward:layers.1",))
```
A task is one entry of a stage's schedule: a forward, a backward, a weight gradient or the update, for one micro-batch.
Its body is the list of ops that it runs. Tasks that do the same point at one body, which is written and priced once:

```
task    F micro-batch 0   B micro-batch 0   F 1        B 1        F 2       B 2       U
body    F.first           B.first           F.middle   B.middle   F.last    B.last    U
```
First and last micro-batches have bodies of their own, because weights are gathered before the first one and gradients
are reduced after the last one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from typing import Any, Literal, NamedTuple

from samestep.job_tables import Precision
from samestep.models.layer_parts import NOWHERE, ForwardPlace, Product
from samestep.records import changed
from samestep.schedules import Action, TaskKind

TF32 = "tfloat32"
"""The format in which GPUs may multiply float32 factors: 8 bits of exponent and 10 of mantissa, in four bytes."""
BYTES_OF = {
    "float64": 8,
    "float32": 4,
    TF32: 4,
    "bfloat16": 2,
    "float16": 2,
    "int64": 8,
    "int32": 4,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}
"""Bytes of one element of each dtype."""

COMPUTE_DTYPE: dict[Precision, str] = {
    "float64": "float64",
    "float32": "float32",
    "bf16": "bfloat16",
    "fp16": "float16",
}
"""Dtype of the forward's weights and activations, by the job's `numerics.precision`."""

MODEL_SCALARS = ("loss", "count", "norm_squared")
"""Scalars of each model that one all_reduce over the world sums at the end of a step, as float64; after them, for each weight
that a step may give no gradient, the number of ranks that gave it one, and the sum and the count of each term and value of the
loss that has a name."""


class StepFlag(IntEnum):
    """The flags of a step, each the number of ranks that raise it: the first `FLAG_SLOTS` in their order at the end of that all_reduce."""

    STOP = 0
    """Asked to stop the run."""
    SAVE = 1
    """Asked to save a checkpoint and go on."""
    WROTE_UNSEEN = 2
    """The step wrote weights through `.data`, which no version counter shows."""
    REFUSES = 3
    """Has a reason to refuse the step."""
    UNUSED_CHANGED = 4
    """Has other weights without a gradient than before, among those without a number in the scalars."""
    RECORD = 5
    """Asked to record where the time of the next steps goes; it shares the slot of SAVE."""


FLAG_SLOTS = 5
"""Numbers that the flags of a step take."""
FLAG_PLACES: Mapping[StepFlag, tuple[int, float]] = {
    **{flag: (int(flag), 1.0) for flag in StepFlag if flag < FLAG_SLOTS},
    StepFlag.RECORD: (int(StepFlag.SAVE), 2.0**26),
}
"""Slot of each flag, and the number that a rank adds there: float64 keeps two counts of fewer than 2^26 ranks in one sum."""


SHARD_AXES = ("dp_shard", "dp_expert")
"""Data axes over which ZeRO shards: `dp_shard`, or for expert-sharded weights its ranks with the same experts."""


class OpKind(StrEnum):
    """The computation or collective that an op carries out."""

    FORWARD = "forward"
    BACKWARD = "backward"
    WEIGHT = "weight"
    """Weight gradients, where the schedule computes them separately from input gradients."""
    RECOMPUTE = "recompute"
    UPDATE = "update"
    OUTER = "outer"
    """Compute of an exchange between independently trained replicas, once a collective of it has ended; its passes are
    priced with the collectives of the codec."""
    COPY = "copy"
    """Copy of weights from the host's memory to the device, for which compute waits."""
    OFFLOAD = "offload"
    """Copy of a block's input to the host's memory, while the block computes."""
    FETCH = "fetch"
    """Copy of it back to the device, while the block after it computes its backward."""
    ALL_REDUCE = "all_reduce"
    ALL_GATHER = "all_gather"
    ALL_TO_ALL = "all_to_all"
    REDUCE_SCATTER = "reduce_scatter"
    REDUCE = "reduce"
    BROADCAST = "broadcast"
    SHIFT = "shift"
    """Each rank of a group sends a buffer to the next one, the last to the first, and receives one from the one before."""
    SEND = "send"
    RECV = "recv"


REDUCING = (OpKind.ALL_REDUCE, OpKind.REDUCE_SCATTER, OpKind.REDUCE)
"""Collectives that sum."""


COPIES = (OpKind.COPY, OpKind.OFFLOAD, OpKind.FETCH)
"""Copies between the device and the host's memory."""
COPY_STREAMS = {OpKind.OFFLOAD: "to host", OpKind.FETCH: "from host"}
"""Streams of the copies that run while the device computes: a link has two directions."""


class Buffer(NamedTuple):
    """Memory beyond what a rank holds at rest: an op allocates it, and a later one frees it."""

    name: str
    """Allocated again under the same name, it is the same buffer."""
    part: Literal["gradients", "buffers", "activations"]
    """The field of `MemoryUse` in which its bytes are counted."""
    size_bytes: int


@dataclass(frozen=True, kw_only=True)
class Op:
    """One computation or one collective of a body. Collectives have an axis; compute has none.

    It has no slots, so that `but` can copy all fields at once: strategies rewrite a hundred thousand ops for one plan.
    """

    kind: OpKind
    owner: str
    """Name of the layer, module, unit, bucket or weight it belongs to."""
    layer: int | None = None
    """Index of the layer that it computes; None for the update and for most collectives."""
    axis: str | None = None
    """Axis over whose groups it communicates; None for compute."""
    dtype: str = "float32"
    """Dtype of the elements sent, or of the factors of matrix products."""
    flops: int = 0
    size_bytes: int = 0
    """Bytes of a collective's whole unsharded buffer, padding included; for an all_to_all the bytes that this rank
    holds before it, assuming that all experts are chosen equally often; of a copy its bytes. 0 for compute."""
    after: tuple[str, ...] = ()
    """Names of ops whose latest earlier occurrence must have ended before this op starts."""
    frees_before: tuple[str, ...] = ()
    """Names of the buffers that are free when it starts."""
    allocates: tuple[Buffer, ...] = ()
    """Buffers that it allocates: an all_gather's exist while it runs, those of other ops from its end."""
    frees: tuple[str, ...] = ()
    """Names of the buffers that are free when it has ended."""
    implied: bool = False
    """Issued by FSDP2 inside a driven op, not by our interpreter."""
    is_exposed: bool = False
    """A collective that stands within a layer, whose compute is one op, so that the next compute waits for it."""
    beside: tuple[Product, ...] = ()
    """Products, part of the compute op before it, that are computed while such a collective runs: those whose weights' gradients
    are, unless the schedule computes them separately from the backward; of a shift, an attention."""
    codec: str | None = None
    """Name of the gradient codec (`CODECS`) as which a collective of a bucket or unit sends gradients; None of other ops."""
    place: ForwardPlace = field(default=NOWHERE, repr=False)
    """The place in the forward of what it sends, or of that whose gradient it sends, until the forwards are repeated."""
    name: str = field(init=False, compare=False, repr=False)
    """`kind:owner`."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", f"{self.kind}:{self.owner}")

    def sized(self, numel: int) -> Op:
        """Return this op with `size_bytes` set to `numel` elements of its dtype."""
        return self.but(size_bytes=numel * BYTES_OF[self.dtype])

    def but(self, **changes: Any) -> Op:
        """Return this op with some fields changed."""
        op = changed(self, **changes)
        if "kind" in changes or "owner" in changes:
            op.__post_init__()
        return op

    @property
    def stream(self) -> str:
        """Name of the stream on which the op runs in order with others: `compute`, the axis it is sent over, or a direction of the link
        to the host."""
        return self.axis or COPY_STREAMS.get(self.kind, "compute")


Ops = tuple[Op, ...]

Position = Literal["only", "first", "middle", "last"]
"""Position of a micro-batch in its step."""


class BodyKey(NamedTuple):
    """The key of a body in its program; `str` writes it as `F.first`, `B.0.of3.last` or `U`."""

    kind: TaskKind
    chunk: int | None = None
    """Index of the virtual stage (chunk) on its rank; None where one rank runs all layers, and in the update; where several
    steps are played one after the other, the index of an update's step."""
    size: int | None = None
    """Samples of the micro-batch if it is smaller than the step's largest; None for the largest."""
    position: Position | None = None
    """Position of the micro-batch in the step; None before the program has tasks, and in the update."""

    def __str__(self) -> str:
        size = None if self.size is None else f"of{self.size}"
        return ".".join(str(part) for part in (self.kind, self.chunk, size, self.position) if part is not None)


UPDATE_BODY = BodyKey(TaskKind.UPDATE)
"""Key of the body with the optimizer's update and the collectives just before and after it."""


class Task(NamedTuple):
    """One entry of a program: a body, and the micro-batch for which it runs."""

    body: BodyKey
    microbatch: int

    @property
    def kind(self) -> TaskKind:
        """The kind of task: forward, backward, weight gradient, update, or a forward for its outputs alone."""
        return self.body.kind

    @property
    def chunk(self) -> int:
        """Index of the virtual stage (chunk) on its rank; 0 where a rank has one."""
        return self.body.chunk or 0

    @property
    def action(self) -> Action:
        """The entry of the stage's schedule that it carries out."""
        return Action(self.kind, self.microbatch, self.chunk)


def position(microbatch: int, num_microbatches: int) -> Position:
    """Return the position of a micro-batch in its step."""
    if num_microbatches == 1:
        return "only"
    if microbatch == 0:
        return "first"
    return "last" if microbatch == num_microbatches - 1 else "middle"


def starts_step(body: BodyKey) -> bool:
    """Return whether the body belongs to the first micro-batch of a step."""
    return body.position in ("only", "first")


def ends_step(body: BodyKey) -> bool:
    """Return whether the body belongs to the last micro-batch of a step."""
    return body.position in ("only", "last")


def is_backward(body: BodyKey) -> bool:
    """Return whether the body is that of a backward task."""
    return body.kind is TaskKind.BACKWARD


def is_forward(body: BodyKey) -> bool:
    """Return whether the body is that of a forward task, whether a backward follows it or not."""
    return body.kind in (TaskKind.FORWARD, TaskKind.OUTPUTS)
