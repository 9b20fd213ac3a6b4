"""Independently trained replicas: each takes H steps alone, then all continue from one outer step (local SGD, DiLoCo).

`numerics.replicas = R` divides the global batch into R equal runs of samples, and `numerics.exchange_every = H` says how
many steps each replica takes on its run with weights and optimizer states of its own. Of the outer weights w, from which
all replicas started, and the weights w_r of each after H steps:

    g = 1/R sum_r (w - w_r)      the averaged move, which compression may round, with what it lost before
    m = mu m + g
    w = w - eta (g + mu m)       Nesterov's momentum, as torch.optim.SGD writes it
    w_r = w                      on which each replica goes on, with its own optimizer states as they are

eta = 1 and mu = 0 average weights: local SGD (Stich 2019, arXiv:1805.09767). eta = 0.7 and mu = 0.9 with AdamW inside are
DiLoCo (Douillard et al. 2023, arXiv:2311.08105). The job fixes R and H, so a layout only says where replicas are trained:

    R = 4    dp=4                        dp_replicate=4 dp_shard=2
    rank 0   replica 0                   half of replica 0
    rank 1   replica 1                   half of replica 0

A rank trains one replica, as any other run. The last exchange follows the last step of the job, whether or not H divides it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor

from samestep.errors import ModelError
from samestep.examination.examine import Source
from samestep.job import Job
from samestep.layout import Layout
from samestep.program.program import Program, with_exchange
from samestep.runtime.held_assembly import WEIGHT, HeldAssembly, StoredStates, set_weights
from samestep.runtime.optimizers.optimizer_step import Updater
from samestep.runtime.optimizers.update_rule import is_torchs_own
from samestep.runtime.processes.join import RankInfo
from samestep.runtime.weights.moving_averages import ModelAverages
from samestep.runtime.weights.pieces import Piece

OF_REPLICA = ":"
"""The separator, in the keys of a checkpoint's states, between a replica and what it is of it."""
OUTER = "outer"
"""What the momentum of the outer weights is named by, where a replica is named by its number."""


class LocalReplica(HeldAssembly):
    """The replica that this rank trains, with separate weights, and its part of the outer weights."""

    is_apart: ClassVar[bool] = True

    def __init__(self, source: Source, layout: Layout, job: Job, place: RankInfo, averages: ModelAverages) -> None:
        super().__init__(source, layout, job, place, averages)
        self.weights: list[Tensor] = []
        """The outer weights, one tensor for each piece of the assembly."""
        self.momentum: list[Tensor] = []
        self.is_fresh = True
        """Whether the replica has the outer weights."""

    def build(self, example: Any) -> None:
        """Build, cut and fill the model; all replicas begin with equal weights, as the outer weights do.

        Collective over the world, as `assemble` says.

        Raises:
            InputError: the model, the optimizer or the number of processes does not fit the layout or the job.
            ModelError: the optimizer may keep more than the states of weights.
        """
        super().build(example)
        parallel, updater = self.current.parallel, self.current.weights.updater
        if updater.optimizer is not None and not is_torchs_own(updater.optimizer):
            raise ModelError(
                "diloco-unsupported",
                f"numerics.exchange_every = {self.job.numerics.exchange_every}: what {type(updater.optimizer).__name__} keeps in addition to the states of weights would differ between replicas. Use a class of torch.optim, or exchange_every = 1",
            )
        contributions = parallel.program.step.contributions
        assert contributions is not None
        self.index = parallel.mesh.index(contributions.axis)
        self.weights = [piece.master().clone() for piece in updater.pieces]
        self.momentum = [torch.zeros_like(weight) for weight in self.weights]

    def to_sum(self, scalars: Tensor) -> Tensor:
        """Return the scalars of all replicas in one tensor: those of this rank's replica, with zeros for the others."""
        sums = scalars.new_zeros(self.job.numerics.replicas, len(scalars))
        sums[self.index] = scalars
        return sums.view(-1)

    def value_of(self, index: int) -> Tensor:
        """Return the outer values of a piece."""
        return self.weights[index]

    def program_behind(self, step: int) -> Program:
        """Return the program of a step, counted from 1, followed by the exchanges that are sent after it."""
        program = self.current.parallel.program
        return with_exchange(program) if self._exchanges_after(step) else program

    def _exchanges_after(self, step: int) -> bool:
        return step % self.job.numerics.exchange_every == 0 or step == self.job.train.steps

    @torch.no_grad()
    def exchange(self, step: int) -> None:
        """Take the outer step, if it is due after a step: every replica goes on from the outer weights.

        Collective over the axis of the program's contributions, and over `dp_shard` with zero=1, see
        [Note: collective calls].
        """
        self.is_fresh = self.has_exchanged = self._exchanges_after(step)
        if not self.has_exchanged:
            return

        numerics, store = self.job.numerics, self.current.weights.store
        for piece, weight in zip(self.pieces, self.weights, strict=True):
            gradient = piece.gradient()
            gradient.copy_((weight - piece.master()).view_as(gradient))
        store.codes.sum_moves()
        for piece, weight, momentum in zip(self.pieces, self.weights, self.momentum, strict=True):
            step_of_piece = piece.gradient().div_(numerics.replicas).view_as(weight)
            momentum.mul_(numerics.outer_momentum).add_(step_of_piece)
            weight.sub_(step_of_piece + numerics.outer_momentum * momentum, alpha=numerics.outer_lr)
        store.settle()  # a gather of the step still sends what is written over here
        set_weights(self.current, self.weights)

    def catch_up(self, step: int) -> None:
        """Exchange after the last step of the job, where a run has gone back to earlier weights; collective as `exchange` is."""
        if step == self.job.train.steps:
            self.exchange(step)

    @contextmanager
    def outer(self) -> Iterator[None]:
        """Let the model have the outer weights inside.

        Collective over `dp_shard` with zero=1, as `WeightStore.publish` says.
        """
        self.current.weights.store.settle()
        if self.is_fresh:
            yield
            return
        masters = [piece.master().clone() for piece in self.pieces]
        set_weights(self.current, self.weights)
        try:
            yield
        finally:
            set_weights(self.current, masters)

    @torch.no_grad()
    def restart(self, start: Sequence[Tensor]) -> None:
        """Begin again from these weights, one tensor for each piece, without momentum."""
        for weight, momentum, value in zip(self.weights, self.momentum, start, strict=True):
            weight.copy_(value.view_as(weight))
            momentum.zero_()
        set_weights(self.current, self.weights)
        self.is_fresh = True

    def states(
        self, updater: Updater, elsewhere: Collection[str], writes: Callable[[str], bool]
    ) -> Iterator[tuple[Piece, Mapping[str, Any]]]:
        """Yield the pieces whose states a checkpoint of this rank holds, and these by key: the momentum of the outer weights, and under keys
        that begin with the number of this rank's replica its weights and its optimizer's states."""
        for piece, momentum in zip(self.pieces, self.momentum, strict=True):
            if piece.name not in elsewhere:
                yield piece, {f"{OUTER}{OF_REPLICA}momentum": momentum}
            if writes(piece.name):
                states = {WEIGHT: piece.master(), **self.current.weights.updater.state_of(piece)}
                yield piece, {f"{self.index}{OF_REPLICA}{key}": value for key, value in states.items()}

    def load_states(self, updater: Updater, stored: StoredStates) -> None:
        """Set the outer weights, which the model has been given, and their momentum, and the weights and states of this rank's replica."""
        for index, piece in enumerate(self.pieces):
            self.weights[index].copy_(piece.master().view_as(piece.value))
            self.momentum[index].copy_(stored.read(f"{OUTER}{OF_REPLICA}momentum", piece).view_as(piece.value))
            piece.set_master(stored.read(f"{self.index}{OF_REPLICA}{WEIGHT}", piece))
            stored.load(self.current.weights.updater, piece, f"{self.index}{OF_REPLICA}")
        self.is_fresh = False
