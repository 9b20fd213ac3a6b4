"""The assembly that one rank holds: its model in the layout, which is built from the first batch."""

from __future__ import annotations

from typing import Any

from samestep.errors import LayoutError
from samestep.examination.examine import Source
from samestep.job import Job
from samestep.layout import Layout
from samestep.runtime.assembly import Assembly, assemble
from samestep.runtime.axes import recompute
from samestep.runtime.one_replica import OneReplica
from samestep.runtime.processes.join import RankInfo
from samestep.runtime.weights.moving_averages import ModelAverages


class HeldAssembly(OneReplica):
    """The model that this rank trains, together with all ranks. `LocalReplicas` are several, which are trained independently."""

    def __init__(self, source: Source, layout: Layout, job: Job, place: RankInfo, averages: ModelAverages) -> None:
        self.source, self.layout, self.job, self.place, self.averages = source, layout, job, place, averages
        self.assemblies: list[Assembly] = []
        """The model in the layout; empty until it is built."""
        self.turn = 0
        """The index of the current one among those of this rank."""

    @property
    def is_prepared(self) -> bool:
        """Whether the model is built."""
        return bool(self.assemblies)

    def prepared(self) -> HeldAssembly:
        """Return this, once the model is built.

        Raises:
            LayoutError: the run is not prepared yet.
        """
        if not self.assemblies:
            raise LayoutError(
                "the run is not prepared yet: run.prepare(batch) works, with a batch as run.step takes it, and so does a step"
            )
        return self

    @property
    def current(self) -> Assembly:
        """The assembly; with several replicas that of the first one, or within `each` of the one whose turn it is.

        Raises:
            LayoutError: the run is not prepared yet.
        """
        return self.assemblies[self.turn] if self.assemblies else self.prepared().current

    def assemble(self, example: Any) -> tuple[str, ...]:
        """Build the model in its layout, from a batch; return what the user should know of it, as text.

        Collective over the world, see [Note: collective calls].
        """
        self.build(example)
        where = self.current.parallel.program.step.layout
        is_other = where != self.layout
        self.layout = where
        return *self.current.model.remarks, *((recompute.TAKEN,) if is_other else ())

    def build(self, example: Any) -> None:
        """Build, cut and fill the model; collective over the world, as `assemble` says."""
        self.assemblies = [assemble(self.source, self.layout, self.job, self.place, example)]
