"""The flat buffer of a bucket of gradients on one rank, and the place of each weight in it.

A hook runs on the host for each weight and micro-batch, and a copy for each would be another call of torch. So gradients stay where
autograd has put them until all of their bucket have arrived, and are taken in by one call; at the end of a task the rest of them is:

```
untouched ─► arrived ─► in its place    a weight's gradient in a step, by its slot
    └─ zeroed ────────► in its place    where the step gives the weight none
untouched       its name is in `flat.untouched`: its window holds what an earlier step has left
arrived         `slot.found`, of one micro-batch: it is copied into the window of an untouched one, or added to what is there
in its place    `slot.gradient`, its window of the buffer: in master precision autograd adds what comes next to it
```

The squared norm of the gradients of all weights is a sum over ranks, in which each element counts once: what several ranks hold alike is
divided by their number (`sum_of_shares`).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from samestep.program.buckets import Bucket
from samestep.program.holding import REPLICAS
from samestep.program.ops import UPDATE_BODY, Op, OpKind
from samestep.program.program import Program
from samestep.program.step import StepSpec
from samestep.runtime.axes.precision import DTYPES
from samestep.runtime.processes.mesh import Mesh, all_gather, reduce_scatter
from samestep.runtime.weights.pieces import NO_ROW, Piece, dense_of_rows, gradients_of


@dataclass(slots=True)
class FlatBuffer:
    """The buffers of one bucket on this rank."""

    bucket: Bucket
    gradients: Tensor
    starts: list[Op]
    """The collective issued when a backward has filled the bucket; at most one."""
    finishes: list[Op]
    """Collectives issued after the step's last backward."""
    gathers: list[Op]
    names: frozenset[str]
    mine: slice
    """The elements that this rank updates: all, or its chunk under zero=1."""
    weights: Tensor | None = None
    """Under zero=1 the weights themselves, in the order of their gradients."""
    missing: set[str] = field(default_factory=set)
    untouched: set[str] = field(default_factory=set)
    arrived: list[tuple[GradientSlot, Tensor]] = field(default_factory=list)
    """Gradients that are still where autograd has put them, with their weights: at most those of one micro-batch."""
    work: dist.Work | None = None
    chunk: Tensor | None = None
    """This rank's chunk of the bucket, between its reduce_scatter and its all_gather."""

    @classmethod
    def of(cls, bucket: Bucket, program: Program, mesh: Mesh) -> FlatBuffer:
        """Allocate the buffers of a bucket, and find the collectives that the program lists for it."""
        step, bodies = program.step, program.bodies
        last = [op for key, ops in bodies.items() if step.ends_gradients(key) for op in ops]
        final = [op for op in bodies[UPDATE_BODY] if op.owner == bucket.name]
        size = bucket.padded_numel // bucket.holding.num_shards
        first = size * mesh.index(bucket.holding.data_axis) if bucket.holding.num_shards > 1 else 0

        def buffer(dtype: str) -> Tensor:
            return torch.zeros(bucket.padded_numel, dtype=DTYPES[dtype], device=mesh.device)

        return cls(
            bucket=bucket,
            gradients=buffer(step.master_dtype),
            starts=[op for op in last if op.owner == bucket.name],
            finishes=[op for op in final if not op.after[0].startswith(OpKind.UPDATE)],
            gathers=[op for op in final if op.after[0].startswith(OpKind.UPDATE)],
            names=frozenset(member.name for member in bucket.members),
            mine=slice(first, first + size),
            weights=buffer(bucket.dtype) if step.zero == 1 else None,
        )

    @property
    def remaining(self) -> Tensor:
        """The gradients that this rank still has to reduce: its chunk, or all."""
        return self.gradients if self.chunk is None else self.chunk

    def take_in(self) -> None:
        """Copy the gradients that have arrived to their places, or add them to those of earlier micro-batches, all at once."""
        if not self.arrived:
            return
        for is_first, write in ((True, torch._foreach_copy_), (False, torch._foreach_add_)):
            slots = [slot for slot, _ in self.arrived if (slot.name in self.untouched) is is_first]
            if slots:
                with torch.no_grad():
                    write([slot.gradient for slot in slots], [slot.found for slot in slots if slot.found is not None])
        for slot, param in self.arrived:
            slot.found = None
            # In master precision autograd keeps adding in place; otherwise each micro-batch's gradient is cast first.
            param.grad = None if slot.is_cast else slot.gradient
        self.untouched.difference_update([slot.name for slot, _ in self.arrived])
        self.arrived.clear()

    def begin_step(self) -> None:
        """Wait for the gradients of all weights, and drop those of a backward that failed."""
        for slot, _ in self.arrived:
            slot.found = None
        self.arrived.clear()
        self.missing, self.untouched = set(self.names), set(self.names)
        self.work = self.chunk = None

    def added_up(self, slot: GradientSlot, gradient: Tensor) -> Tensor:
        """Return a gradient that is sparse, or follows one that has arrived, as one that can take that one's place."""
        if slot.found is not None and slot.is_cast:  # in master precision autograd has added the two
            self.take_in()
        return dense_of_rows(gradient) if gradient.is_sparse else gradient

    def zero_untouched(self) -> None:
        """Set the gradients of weights that no sample used to zeros."""
        self.take_in()
        for member in self.bucket.members:
            if member.name in self.untouched:
                self.gradients[member.span].fill_(NO_ROW)
        self.untouched = set()

    def wait(self) -> None:
        """Wait for the collective that was issued last."""
        if self.work is not None:
            self.work.wait()
            self.work = None

    def windows(self, names: Set[str] | None) -> Iterator[Tensor]:
        """Yield the gradients that this rank updates, or those of some weights."""
        if names is None:
            yield self.gradients[self.mine]
            return
        for member in self.bucket.members:
            start, stop = max(member.offset, self.mine.start), min(member.offset + member.numel, self.mine.stop)
            if member.name in names and start < stop:
                yield self.gradients[start:stop]

    def holds(self, names: Set[str]) -> bool:
        """Return whether the bucket has the gradient of one of some weights."""
        return any(member.name in names for member in self.bucket.members)


@dataclass(slots=True)
class GradientSlot:
    """One parameter's place in a bucket's gradients."""

    flat: FlatBuffer
    name: str
    gradient: Tensor
    is_postponed: bool
    """Whether a W task adds to it, so that it is not whole before."""
    is_cast: bool
    """Whether the weight's gradients have another dtype."""
    found: Tensor | None = None
    """A gradient that has arrived and is not in its place."""


def own_part(flat: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return this rank's part of a flat buffer that the ranks of a group divide evenly: a view."""
    return flat.chunk(dist.get_world_size(group))[dist.get_rank(group)]


def start_collective(kind: OpKind, flat: Tensor, group: dist.ProcessGroup) -> dist.Work:
    """Start one collective on a flat buffer, in place.

    An all_gather sends this rank's part of it; reduce and broadcast have the group's first rank as their root. Collective
    over `group`, see [Note: collective calls].
    """
    if kind is OpKind.ALL_REDUCE:
        work = dist.all_reduce(flat, group=group, async_op=True)
    elif kind is OpKind.REDUCE:
        work = dist.reduce(flat, group_dst=0, group=group, async_op=True)
    elif kind is OpKind.BROADCAST:
        work = dist.broadcast(flat, group_src=0, group=group, async_op=True)
    elif kind is OpKind.REDUCE_SCATTER:
        work = reduce_scatter(own_part(flat, group), flat, group=group, async_op=True)
    else:
        assert kind is OpKind.ALL_GATHER, f"a flat buffer has no use for {kind}"
        work = all_gather(flat, own_part(flat, group), group=group, async_op=True)
    assert work is not None
    return work


_ROW = 4096


def squared_norm(tensors: list[Tensor], device: torch.device) -> Tensor:
    """Return the sum of squares over all elements of `tensors`, in float64.

    On a CPU torch adds up a norm one element after the other: in float32 the norm of a bucket is off by 1e-4, by an
    amount that depends on the layout. So rows of a few thousand elements are summed first.
    """
    if not tensors:
        return torch.zeros((), dtype=torch.float64, device=device)
    if device.type != "cpu":
        return torch.stack(torch._foreach_norm(tensors)).double().square().sum()
    if max(map(Tensor.numel, tensors)) < _ROW:
        return torch.stack(torch._foreach_norm(tensors)).double().square().sum()
    norms: list[Tensor] = []
    rest: list[Tensor] = []
    for tensor in tensors:
        if tensor.numel() < _ROW:
            rest.append(tensor)
            continue
        if left := tensor.numel() % _ROW:
            flat = tensor.reshape(-1)
            tensor = flat[:-left]
            rest.append(flat[-left:])
        norms.append(torch.linalg.vector_norm(tensor.reshape(-1, _ROW), dim=1))
    if rest:
        norms.append(torch.stack(torch._foreach_norm(rest)))
    return torch.cat(norms).double().square().sum()


def norm_of_pieces(
    pieces: Sequence[Piece], step: StepSpec, device: torch.device, names: Set[str] | None = None
) -> Tensor:
    """Return the squared norm (float64 []) of the gradients of pieces, or of those of some weights; each is divided by the number of
    ranks that hold it alike, so that their shares add up to one.
    """
    copies, numbers = step.copies
    alike: list[tuple[int, list[Tensor]]] = []
    for number in numbers:
        some = pieces if len(numbers) == 1 else [piece for piece in pieces if copies[piece.name] == number]
        alike.append(
            (number, gradients_of(some if names is None else [piece for piece in some if piece.name in names]))
        )
    return sum_of_shares(alike, device)


def sum_of_shares(alike: Iterable[tuple[int, list[Tensor]]], device: torch.device) -> Tensor:
    """Return the sum of squares (float64 []) of gradients, each divided by the number of ranks that add it up too.

    Most often all have one number: each call of torch costs the host as much as that of a model.
    """
    shares = [
        norm if number == 1 else norm / number for number, norm in ((n, squared_norm(t, device)) for n, t in alike)
    ]
    return functools.reduce(torch.add, shares) if shares else torch.zeros((), dtype=torch.float64, device=device)


def num_alike(flat: FlatBuffer, step: StepSpec, mesh: Mesh) -> int:
    """Return the number of ranks that add up the same gradients of a bucket."""
    holding = flat.bucket.holding
    whole = ("cp",) if step.sharing.trains_apart else holding.data_axes
    axes = summed_replicas(step) if holding.num_shards > 1 else whole
    return math.prod(map(mesh.size, axes)) * holding.num_copies


def summed_replicas(step: StepSpec) -> tuple[str, ...]:
    """Return the data axis over whose ranks a step sums shards of gradients; nothing where replicas are trained independently."""
    return () if step.sharing.trains_apart else (REPLICAS,)
