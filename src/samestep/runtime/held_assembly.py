"""What one rank holds of a run: its model in the layout, and where replicas are trained apart, each of them in turn."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from samestep.errors import LayoutError
from samestep.job import Job
from samestep.layout import Layout
from samestep.runtime.assembly import Assembly, assemble
from samestep.runtime.axes import recompute
from samestep.runtime.local_replicas import LocalReplicas
from samestep.runtime.preparation import Source
from samestep.runtime.processes.join import RankInfo


class HeldAssembly:
    """The assembly of one rank, once it is made; of a rank that trains several replicas the first one's, but in `each`."""

    def __init__(self, source: Source, layout: Layout, job: Job, place: RankInfo) -> None:
        self.source, self.layout, self.job, self.place = source, layout, job, place
        self.replicas: LocalReplicas | None = None
        self._current: Assembly | None = None

    @property
    def is_prepared(self) -> bool:
        """Whether the model is built."""
        return self._current is not None

    @property
    def current(self) -> Assembly:
        """The assembly.

        Raises:
            LayoutError: the run is not prepared yet.
        """
        if self._current is None:
            raise LayoutError("the run is not prepared yet: call run.prepare(batch.samples([0])), or take a step")
        return self._current

    def assemble(self, example: Any) -> tuple[str, ...]:
        """Build the model in its layout, from a batch; return what the user should know of it, as text.

        Collective over the world: every rank calls it; if one does not, the others wait until the time limit.
        """
        given = self.source, self.layout, self.job, self.place, example
        if self.job.numerics.exchange_every == 1:
            self._current = assemble(*given)
        else:
            self.replicas = LocalReplicas.assembled(*given)
            self._current = self.replicas.assemblies[0]
        where = self._current.parallel.program.step.layout
        is_other = where != self.layout
        self.layout = where
        return *self._current.model.remarks, *((recompute.TAKEN,) if is_other else ())

    def adopt(self, change: Callable[[Assembly], Assembly]) -> None:
        """Continue with an assembly derived from this one, and so with every replica."""
        if self.replicas is None:
            self._current = change(self.current)
            return
        self.replicas.change(change)
        self._current = self.replicas.assemblies[0]

    @contextmanager
    def outer_weights(self) -> Iterator[None]:
        """Let the model have the outer weights inside, where replicas are trained apart."""
        if self.replicas is None:
            yield
            return
        self.current.weights.store.settle()
        with self.replicas.outer():
            yield

    def each(self) -> Iterator[tuple[int, Assembly]]:
        """Yield the number and the assembly of each replica that this rank trains, which is the current one meanwhile."""
        if self.replicas is None:
            yield 0, self.current
            return
        try:
            for number, assembly in self.replicas.numbered:
                self._current = assembly
                yield number, assembly
        finally:
            self._current = self.replicas.assemblies[0]
