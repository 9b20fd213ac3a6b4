"""Whole weights whose gradients, or moves between replicas, are summed encoded: `Replicated` with exchanges for its buckets."""

from __future__ import annotations

from collections.abc import Set

import torch.distributed as dist
from torch import Tensor, nn

from samestep.program.ops import Op, Task
from samestep.program.program import Program
from samestep.runtime.processes.mesh import Mesh
from samestep.runtime.weights.flat_buffers import FlatBuffer
from samestep.runtime.weights.gradient_codes import BucketCodes
from samestep.runtime.weights.replica_exchange import BucketExchange
from samestep.runtime.weights.replicated import Replicated
from samestep.runtime.weights.weight_store import Materialize


class EncodedBuckets(Replicated):
    """A `WeightStore` of whole weights, in a step of `Contributions`."""

    codes: BucketCodes

    def __init__(self, model: nn.Module, program: Program, mesh: Mesh, materialize: Materialize) -> None:
        super().__init__(model, program, mesh, materialize)
        self.codes = BucketCodes(program, mesh)
        self.exchange = BucketExchange(program, self.codes, [flat.gradients[flat.mine] for flat in self._flats])

    def begin_step(self, *, waits: bool = False) -> None:
        """Discard the gradients and the contributions of the previous step."""
        super().begin_step(waits=waits)
        self.codes.begin_step()

    def end_task(self, task: Task, *, completes: bool) -> None:
        """Take in the gradients of a task, and encode those of a contribution that it ends.

        Collective over the axes of the program's buckets, see [Note: collective calls].
        """
        super().end_task(task, completes=completes)
        if self.codes.take_contribution(task, self._flats):
            self._drop_gradients()

    def finish_gradients(self, *, delivers: bool = True, names: Set[str] | None = None) -> None:
        """Finish the reductions, and set the gradients to the sums of all contributions.

        Collective over the axes of the program's buckets, see [Note: collective calls].
        """
        super().finish_gradients(delivers=delivers, names=names)
        for flat in self._flats:
            self.codes.finish(flat.bucket.name, flat.remaining)

    def _send(self, flat: FlatBuffer, op: Op, whole: Tensor) -> dist.Work:
        return self.codes.send(op, flat.remaining) if self.codes.sends(op) else super()._send(flat, op, whole)
