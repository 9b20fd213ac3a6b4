"""The assembly that one rank holds: its model in the layout, which is built from the first batch."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from samestep.errors import LayoutError
from samestep.examination.examine import Source
from samestep.job import Job
from samestep.layout import Layout
from samestep.program.program import Program
from samestep.runtime.assembly import Assembly, assemble
from samestep.runtime.axes import recompute
from samestep.runtime.optimizers.optimizer_step import Updater
from samestep.runtime.processes.join import RankInfo
from samestep.runtime.weights.moving_averages import ModelAverages
from samestep.runtime.weights.pieces import Piece
from samestep.state.step_code import states_by_key
from samestep.wings import required

WEIGHT = "weight"
"""The key of the weight of a model that is trained apart, among its states."""


class StoredStates(Protocol):
    """The states that a checkpoint holds, by key."""

    def read(self, key: str, piece: Piece) -> Tensor:
        """Read one of a piece."""
        ...

    def load(self, updater: Updater, piece: Piece, prefix: str = "") -> None:
        """Set the optimizer's states of a piece to those whose keys begin with `prefix`."""
        ...


class HeldAssembly:
    """The model that this rank trains, together with all ranks.

    `LocalReplica` is one of several, which are trained independently.
    """

    is_apart: ClassVar[bool] = False
    """Whether it is one of several that have weights and optimizer states of their own: a `LocalReplica`."""
    index = 0
    """Its index among all that are trained independently."""
    is_fresh = True
    """Whether it has the outer weights."""
    has_exchanged = False
    """Whether an outer step was taken after the last step; the gradients are then the averaged moves."""

    def __init__(self, source: Source, layout: Layout, job: Job, place: RankInfo, averages: ModelAverages) -> None:
        self.source, self.layout, self.job, self.place, self.averages = source, layout, job, place, averages
        self._assembly: Assembly | None = None

    @property
    def is_prepared(self) -> bool:
        """Whether the model is built."""
        return self._assembly is not None

    def prepared(self) -> HeldAssembly:
        """Return this, once the model is built.

        Raises:
            LayoutError: the run is not prepared yet.
        """
        if self._assembly is None:
            raise LayoutError(
                "run-call-time",
                "the run is not prepared yet. Use run.prepare(batch), with a batch as run.step takes it, or a step",
            )
        return self

    @property
    def current(self) -> Assembly:
        """The model in the layout.

        Raises:
            LayoutError: the run is not prepared yet.
        """
        return self._assembly or self.prepared().current

    def assemble(self, example: Any) -> tuple[str, ...]:
        """Build the model in its layout, from a batch; return what the user should know of it, as text.

        Collective over the world, see [Note: collective calls].
        """
        try:
            self.build(example)
        except BaseException:
            if self.source.owner is not None:
                self.source.owner.give_back()
            raise
        where = self.current.parallel.program.step.layout
        is_other = where != self.layout
        self.layout = where
        return *self.current.model.remarks, *((recompute.TAKEN,) if is_other else ())

    def build(self, example: Any) -> None:
        """Build, cut and fill the model; collective over the world, as `assemble` says."""
        self._assembly = assemble(self.source, self.layout, self.job, self.place, example)

    @property
    def pieces(self) -> list[Piece]:
        """The pieces of weights that this rank updates."""
        return self.current.weights.updater.pieces

    def change(self, change: Callable[[Assembly], Assembly]) -> None:
        """Go on with an assembly that is derived from this."""
        self._assembly = change(self.current)

    def to_sum(self, scalars: Tensor) -> Tensor:
        """Return the scalars of a step as all ranks sum them: those of this rank's replica, with zeros for the others."""
        return scalars

    def value_of(self, index: int) -> Tensor:
        """Return the values of a piece that a checkpoint holds: the outer ones, if there are."""
        return self.pieces[index].master()

    def program_behind(self, step: int) -> Program:
        """Return the program of a step, counted from 1, followed by the exchanges that are sent after it."""
        return self.current.parallel.program

    def states(
        self, updater: Updater, elsewhere: Collection[str], writes: Callable[[str], bool]
    ) -> Iterator[tuple[Piece, Mapping[str, Any]]]:
        """Yield the pieces whose states a checkpoint of this rank holds, and these by key.

        Weights in `elsewhere` are written by others; of those that several ranks hold, this one `writes` some.
        """
        optimizer = updater.with_states
        for piece in updater.pieces:
            if piece.name not in elsewhere:
                yield piece, states_by_key(optimizer, piece.value)

    def load_states(self, updater: Updater, stored: StoredStates) -> None:
        """Set the states of all pieces to stored ones."""
        for piece in updater.pieces:
            stored.load(updater, piece)

    def exchange(self, step: int) -> None:
        """Do what is due after a step."""

    def catch_up(self, step: int) -> None:
        """Do what was due after a step up to which a run leaves steps out, as it goes back to earlier weights."""

    def outer(self) -> AbstractContextManager[None]:
        """Let the model have the outer weights inside."""
        return nullcontext()

    def restart(self, start: Sequence[Tensor]) -> None:
        """Begin again from these weights, one tensor for each piece.

        Collective over `dp_shard` with zero=1, as `WeightStore.publish` says.
        """
        set_weights(self.current, start)


def held_assembly_of(job: Job) -> type[HeldAssembly]:
    """Return the class of what a rank holds: the model of all ranks, or with `numerics.exchange_every` one of several.

    Raises:
        InputError: it is one of the wing `slow_links`, which is not installed.
    """
    if job.numerics.exchange_every == 1:
        return HeldAssembly
    apart: type[HeldAssembly] = required("slow_links", "local_replicas").LocalReplica
    return apart


@torch.no_grad()
def set_weights(assembly: Assembly, values: Sequence[Tensor]) -> None:
    """Set the master weights of an assembly, one tensor for each piece, and publish them.

    Collective over `dp_shard` with zero=1, as `WeightStore.publish` says.
    """
    updater = assembly.weights.updater
    for piece, value in zip(updater.pieces, values, strict=True):
        piece.set_master(value)
    updater.live.publish()
    assembly.weights.store.publish()
