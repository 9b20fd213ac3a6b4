"""The assembly that one rank holds: its model in the layout, or each of its independently trained replicas in turn."""

from __future__ import annotations

from typing import Any

from samestep.errors import LayoutError
from samestep.examination.examine import Source
from samestep.job import Job
from samestep.layout import Layout
from samestep.runtime.assembly import Assembly, assemble
from samestep.runtime.axes import recompute
from samestep.runtime.local_replicas import LocalReplicas, Replicas
from samestep.runtime.processes.join import RankInfo
from samestep.runtime.weights.moving_averages import ModelAverages


class HeldAssembly:
    """The assembly of one rank once it is built; with several replicas that of the first one, except inside `Replicas.each`."""

    def __init__(self, source: Source, layout: Layout, job: Job, place: RankInfo, averages: ModelAverages) -> None:
        self.source, self.layout, self.job, self.place, self.averages = source, layout, job, place, averages
        self._replicas: Replicas | None = None

    @property
    def is_prepared(self) -> bool:
        """Whether the model is built."""
        return self._replicas is not None

    @property
    def replicas(self) -> Replicas:
        """The models that this rank trains: a list of one, unless the job trains replicas independently.

        Raises:
            LayoutError: the run is not prepared yet.
        """
        if self._replicas is None:
            raise LayoutError("the run is not prepared yet: call run.prepare(batch.samples([0])), or take a step")
        return self._replicas

    @property
    def current(self) -> Assembly:
        """The assembly.

        Raises:
            LayoutError: the run is not prepared yet.
        """
        replicas = self._replicas
        return (self.replicas if replicas is None else replicas).current

    def assemble(self, example: Any) -> tuple[str, ...]:
        """Build the model in its layout, from a batch; return what the user should know of it, as text.

        Collective over the world, see [Note: collective calls].
        """
        given = self.source, self.layout, self.job, self.place, example
        if self.job.numerics.exchange_every == 1:
            self._replicas = Replicas(assemblies=[assemble(*given)])
        else:
            self._replicas = LocalReplicas.assemble_replicas(*given)
        where = self.current.parallel.program.step.layout
        is_other = where != self.layout
        self.layout = where
        return *self.current.model.remarks, *((recompute.TAKEN,) if is_other else ())
