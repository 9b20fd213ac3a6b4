"""What is done between replicas of a model where there is one, which all ranks train together: nothing.

`LocalReplicas` overrides it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import ClassVar

import torch
from torch import Tensor

from samestep.program.program import Program
from samestep.runtime.assembly import Assembly
from samestep.runtime.weights.pieces import Piece


class OneReplica:
    """The replicas of a rank, of which there is one."""

    assemblies: list[Assembly]
    are_apart: ClassVar[bool] = False
    """Whether each replica has weights and optimizer states of its own: `LocalReplicas`."""
    first = 0
    """The number of this rank's first replica."""
    number = 1
    """The number of replicas of all ranks."""
    ended: frozenset[int] = frozenset()
    """Parts of the weights whose outer step was taken after the last step; the gradients of the first replica are their moves."""

    @property
    def numbered_assemblies(self) -> Iterator[tuple[int, Assembly]]:
        """The replicas of this rank, with their numbers among all."""
        return enumerate(self.assemblies, self.first)

    @property
    def pieces(self) -> list[Piece]:
        """The pieces of the first replica, in whose order the outer weights are."""
        return self.assemblies[0].weights.updater.pieces

    def each(self) -> Iterator[tuple[int, Assembly]]:
        """Yield the number and the assembly of each replica of this rank, which is the current one meanwhile."""
        return iter([(self.first, self.assemblies[0])])

    def change(self, change: Callable[[Assembly], Assembly]) -> None:
        """Go on with assemblies that are derived from these."""
        self.assemblies = [change(assembly) for assembly in self.assemblies]

    def sums(self, own: Sequence[Tensor]) -> Tensor:
        """Return the scalars of all replicas in one tensor."""
        return own[0]

    def value_of(self, index: int) -> Tensor:
        """Return the values of a piece that a checkpoint holds: for independently trained replicas, the outer ones."""
        return self.pieces[index].master()

    def program_behind(self, step: int) -> Program:
        """Return the program of a step, counted from 1, with what is sent of exchanges after it."""
        return self.assemblies[0].parallel.program

    def exchange(self, step: int) -> None:
        """Do what is due after a step."""

    def catch_up(self, after: int, step: int) -> None:
        """Do what was due after steps that a run leaves out, as it goes back to the weights from after step `after`."""

    def settle(self) -> None:
        """Wait for the exchanges under way."""

    def outer(self) -> AbstractContextManager[None]:
        """Let the first replica have the outer weights inside."""
        return nullcontext()

    def restart(self, start: Sequence[Tensor]) -> None:
        """Begin again from these weights, one tensor for each piece.

        Collective over `dp_shard` with zero=1, as `WeightStore.publish` says.
        """
        set_weights(self.assemblies[0], start)


@torch.no_grad()
def set_weights(assembly: Assembly, values: Sequence[Tensor]) -> None:
    """Set the master weights of an assembly, one tensor for each piece, and publish them.

    Collective over `dp_shard` with zero=1, as `WeightStore.publish` says.
    """
    updater = assembly.weights.updater
    for piece, value in zip(updater.pieces, values, strict=True):
        piece.set_master(value)
    updater.publish()
    assembly.weights.store.publish()
