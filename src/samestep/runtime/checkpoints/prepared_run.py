"""The part of a run that checkpoints read, and set again: weights, optimizer, data, and the number of steps taken."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from torch import nn

from samestep.datasets.stamps import Stamp
from samestep.job import Job
from samestep.layout import Layout
from samestep.program.program import Program
from samestep.runtime.assembly import Assembly
from samestep.runtime.axes.lanes import CarriedLanes
from samestep.runtime.guards.loss_spikes import SpikeWatch
from samestep.runtime.held_assembly import HeldAssembly
from samestep.runtime.optimizers.optimizer_step import Updater
from samestep.runtime.processes.join import RankInfo


class NotedData(Protocol):
    """The data that a run is trained on: a `trained_data.TrainedData`."""

    def stamp(self) -> Stamp:
        """Return its stamp on rank 0."""

    def stream_state(self, steps_taken: int) -> Any:
        """Return the state of the stream that is trained on, on rank 0."""

    def resumes_from(self, folder: Path, step: int, stamp: Stamp) -> tuple[str, ...]:
        """Hold it against the stamp in a checkpoint."""


class PreparedRun(Protocol):
    """A run whose model stands in its layout: a `run.Run` that is prepared."""

    job: Job
    place: RankInfo
    steps_taken: int
    changes: tuple[str, ...]
    """What resumes have changed of the job and its layout, and after which steps."""

    @property
    def layout(self) -> Layout:
        """The layout of the program."""

    @property
    def data(self) -> NotedData:
        """The data that the run is trained on."""

    @property
    def lanes(self) -> CarriedLanes:
        """The state that samples hand to those of the next step."""

    @property
    def spikes(self) -> SpikeWatch:
        """The losses of the last steps."""

    @property
    def replicas(self) -> HeldAssembly:
        """The models that this rank trains: a list of one, unless the job trains replicas independently."""

    @property
    def assembly(self) -> Assembly:
        """All parts of the run; its weights are whole."""

    @property
    def program(self) -> Program:
        """The program of this rank's pipeline stage."""

    @property
    def model(self) -> nn.Module:
        """This rank's module, after the layout has cut its weights."""

    @property
    def updater(self) -> Updater:
        """The optimizer over the weights that this rank updates."""

    def adopt(self, change: Callable[[Assembly], Assembly]) -> None:
        """Continue with an assembly that was derived from the run's."""
