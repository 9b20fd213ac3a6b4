"""Weights of a rank whose gradients are summed with those of no other: they stay where autograd puts them, in no bucket."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Set
from contextlib import AbstractContextManager

import torch.distributed as dist
from torch import Tensor, nn

from samestep.program.ops import Op, Task, is_forward
from samestep.program.program import Program
from samestep.runtime.contexts import AtEnd
from samestep.runtime.processes.mesh import Mesh
from samestep.runtime.weights.flat_buffers import FlatBuffer, norm_of_pieces
from samestep.runtime.weights.gradient_codes import BucketCodes
from samestep.runtime.weights.pieces import Piece
from samestep.runtime.weights.replicated import Place, Replicated
from samestep.runtime.weights.weight_store import Materialize, WeightStore, gradient_or_zero


class Unsummed(Replicated):
    """A `WeightStore` without buckets, which sends nothing."""

    def _pieces_of(self, name: str, place: Place | None, param: nn.Parameter, value: Tensor) -> Iterator[Piece]:
        assert place is None, "a bucket where nothing is summed"
        piece = self._piece(name, 0, param.numel(), param, value, functools.partial(gradient_or_zero, param))
        piece.holder = param
        yield piece

    def running(
        self, task: Task, *, counts: bool = True, left_out: Set[int] = frozenset()
    ) -> AbstractContextManager[None]:
        """Note, after a backward, which weights have a gradient; a micro-batch that does not count adds only zeros."""
        self._counts = counts
        return AtEnd(functools.partial(self.end_task, task, completes=False), always=False)

    def end_task(self, task: Task, *, completes: bool) -> None:
        """Note which weights have a gradient after a backward."""
        if is_forward(task.body):
            return
        without = [param.grad is None for param in self._held]
        unused = self._unused.intersection(itertools.compress(self.params, without)) if any(without) else set[str]()
        if self._counts:
            self._unused = unused
            return
        for name in self._unused - unused:
            self.params[name].grad = None

    def norm_squared(self, names: Set[str] | None = None) -> Tensor:
        """Return the squared norm of all gradients, or of those of some weights."""
        return norm_of_pieces(self.pieces, self.program.step, self.mesh.device, names)

    def _whole_gradients(self) -> dict[str, Tensor]:
        return {name: gradient_or_zero(param) for name, param in self.params.items()}


def whole_weights(model: nn.Module, program: Program, mesh: Mesh, materialize: Materialize) -> WeightStore:
    """Return the store of weights that each rank holds whole."""
    step = program.step
    if step.contributions is None or not program.buckets:
        return (Replicated if program.buckets else Unsummed)(model, program, mesh, materialize)
    return (MovedBuckets if step.sharing.trains_apart else EncodedBuckets)(model, program, mesh, materialize)


class MovedBuckets(Replicated):
    """Whole weights of models that are trained independently: after some steps their moves are summed, in the buckets of the gradients."""

    codes: BucketCodes

    def __init__(self, model: nn.Module, program: Program, mesh: Mesh, materialize: Materialize) -> None:
        super().__init__(model, program, mesh, materialize)
        self.codes = BucketCodes(program, mesh, self._flats)


class EncodedBuckets(MovedBuckets):
    """Whole weights in a step of `Contributions`: their gradients are summed encoded."""

    def begin_step(self, *, waits: bool = False) -> None:
        """Discard the gradients and the contribution of the previous step."""
        super().begin_step(waits=waits)
        self.codes.begin_step()

    def finish_gradients(self, *, delivers: bool = True, names: Set[str] | None = None) -> None:
        """Finish the reductions, and set the gradients to the sums of all contributions.

        Collective over the axes of the program's buckets, see [Note: collective calls].
        """
        super().finish_gradients(delivers=delivers, names=names)
        for flat in self._flats:
            self.codes.finish(flat.bucket.name, flat.remaining)

    def _send(self, flat: FlatBuffer, op: Op, whole: Tensor) -> dist.Work:
        return self.codes.send(op, flat.remaining) if self.codes.sends(op) else super()._send(flat, op, whole)
