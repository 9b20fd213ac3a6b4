"""The flat buffer of a bucket of gradients on one rank, and the place of each weight in it.

A hook runs on the host for each weight and micro-batch, and a copy for each would be another call of torch. So gradients stay where
autograd has put them until all of their bucket have arrived, and are taken in by one call; at the end of a task the rest of them is.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from samestep.program.buckets import Bucket
from samestep.program.ops import Op


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
    weights: Tensor | None = None
    missing: set[str] = field(default_factory=set)
    untouched: set[str] = field(default_factory=set)
    arrived: list[tuple[GradientSlot, Tensor]] = field(default_factory=list)
    """Gradients that are still where autograd has put them, with their weights: at most those of one micro-batch."""
    work: dist.Work | None = None
    chunk: Tensor | None = None
    """This rank's chunk of the bucket, between its reduce_scatter and its all_gather."""

    @property
    def remaining(self) -> Tensor:
        """The gradients that this rank still has to reduce: its chunk, or all."""
        return self.gradients if self.chunk is None else self.chunk

    @torch.no_grad()
    def take_in(self) -> None:
        """Copy the gradients that have arrived to their places, or add them to those of earlier micro-batches, all at once."""
        if not self.arrived:
            return
        for is_first, write in ((True, torch._foreach_copy_), (False, torch._foreach_add_)):
            slots = [slot for slot, _ in self.arrived if (slot.name in self.untouched) is is_first]
            if slots:
                write([slot.gradient for slot in slots], [slot.found for slot in slots if slot.found is not None])
        for slot, param in self.arrived:
            slot.found = None
            # In master precision autograd keeps adding in place; otherwise each micro-batch's gradient is cast first.
            param.grad = slot.gradient if param.dtype == slot.gradient.dtype else None
        self.untouched.difference_update([slot.name for slot, _ in self.arrived])
        self.arrived.clear()

    def forget_arrived(self) -> None:
        """Drop gradients of a backward that failed."""
        for slot, _ in self.arrived:
            slot.found = None
        self.arrived.clear()

    def zero_untouched(self) -> None:
        """Set the gradients of weights that no sample used to zeros."""
        self.take_in()
        for member in self.bucket.members:
            if member.name in self.untouched:
                self.gradients[member.offset : member.offset + member.numel].zero_()
        self.untouched = set()

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
    found: Tensor | None = None
    """A gradient that has arrived and is not in its place."""
