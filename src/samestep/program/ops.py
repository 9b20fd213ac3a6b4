"""Operations, tasks and dtypes: the words that a program is written in."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal, NamedTuple

from samestep.job import Precision
from samestep.program.bodies import BodyKey
from samestep.schedules import Action, TaskKind

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


class Buffer(NamedTuple):
    """Memory beyond what a rank holds at rest: an op allocates it, and a later one frees it."""

    name: str
    """Allocated again under the same name, it is the same buffer."""
    part: Literal["gradients", "buffers"]
    """What it counts as in a `MemoryUse`."""
    size_bytes: int


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
    frees_before: tuple[str, ...] = ()
    """Names of the buffers that are gone when it starts."""
    allocates: tuple[Buffer, ...] = ()
    """Buffers that it makes: an all_gather's are there while it runs, those of others once it has ended."""
    frees: tuple[str, ...] = ()
    """Names of the buffers that are gone when it has ended."""
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


def ledger_key(group: str, row: LedgerRow) -> str:
    """Name the list of a ledger that a row belongs to: that of its group, or of what it is received from.

    What is received is awaited ahead of need, as soon as there is a place for it.
    """
    return f"{group} recv {row.owner}" if row.kind == Kind.RECV else group
