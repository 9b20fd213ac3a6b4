"""Buckets: which gradients are reduced as one buffer under zero=0 and zero=1, and how it is padded."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from samestep.models.spec import ParamSpec
from samestep.program.holding import Holding
from samestep.program.ops import BYTES_OF, Kind, Op, Ops
from samestep.program.step import StepSpec


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


def padded(numel: int, multiple: int) -> int:
    """Round `numel` up to a multiple."""
    return -(-numel // multiple) * multiple


BUCKET_BYTES = 25 * 2**20
"""A bucket is closed once its gradients reach this: small enough to overlap, large enough to use the link."""


def make_buckets(step: StepSpec, chunks: tuple[range, ...] = ()) -> tuple[Bucket, ...]:
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


def _kind(step: StepSpec, param: ParamSpec) -> tuple[object, ...]:
    return step.working_dtype(param), step.holding(param)


def _bucket(step: StepSpec, index: int, params: list[ParamSpec]) -> Bucket:
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


def start_reductions(ops: Ops, step: StepSpec, buckets: tuple[Bucket, ...], reduction: Reduction) -> Ops:
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
