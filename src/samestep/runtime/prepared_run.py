"""The parts of a run that checkpoints read, and set again: weights, optimizer, data, and the number of steps taken."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from torch import nn

from samestep.job import Job
from samestep.layout import Layout
from samestep.program.program import Program
from samestep.runtime.assembly import Assembly
from samestep.runtime.axes.lanes import CarriedLanes
from samestep.runtime.guards.unusual_steps import SpikeWatch
from samestep.runtime.held_assembly import HeldAssembly
from samestep.runtime.open_step import Progress
from samestep.runtime.optimizers.optimizer_step import Updater
from samestep.runtime.processes.join import RankInfo
from samestep.runtime.run_batches import TrainedData
from samestep.runtime.stepper import Stepper


class PreparedRun:
    """The parts of a run that checkpoints, and the methods of a run, read and set."""

    _own: HeldAssembly
    _stepper: Stepper
    job: Job
    place: RankInfo
    changes: tuple[str, ...]
    """What resumes have changed of the job and its layout, and after which steps."""
    data: TrainedData
    """The data that the run is trained on."""
    lanes: CarriedLanes
    """The state that samples hand to those of the next step."""

    def _forget_gradients(self) -> None:
        """Forget the gradients that wait, if the loop calls backwards by itself."""

    @property
    def spikes(self) -> SpikeWatch:
        """The losses of the last steps, used to detect a spike."""
        return self._stepper.guards.spikes

    @property
    def held(self) -> HeldAssembly:
        """The model that this rank trains, with the outer weights if the job trains several independently."""
        return self._own.prepared()

    @property
    def is_prepared(self) -> bool:
        """Whether `prepare` has built the model."""
        return self._own.is_prepared

    @property
    def assembly(self) -> Assembly:
        """The prepared model, mesh, program and optimizer; its weights are whole.

        Raises:
            LayoutError: the run is not prepared yet.
        """
        return self._stepper.whole_assembly

    @property
    def program(self) -> Program:
        """The program of this rank's pipeline stage: the operations of one step."""
        return self._stepper.held.parallel.program

    @property
    def model(self) -> nn.Module:
        """The model instance of the run, or the result of its build function, with sharded weights. With `tp` and `ep` a weight may be the shard of
        this rank. A loop may change each element of it separately. Code that reads several elements, such as a norm of rows or
        pruning by rank, is rejected; use `gathered()`. If a rank has a shard of the gradient, a norm of `param.grad` is rejected too;
        use `report.grad_norm`.
        """
        if not self.is_prepared and self._own.source.owner is not None:
            instance = self._own.source.model
            assert isinstance(instance, nn.Module)
            return instance
        return self.assembly.model.module

    @property
    def updater(self) -> Updater:
        """The optimizer over the weights that this rank updates, including writes into the model."""
        if self._stepper.progress is Progress.BETWEEN:
            for reason in self.assembly.model.replaced.take_over(inside=False):
                self.job.run.waived("state", "forward-state", reason)
        self.assembly.weights.store.take_back()
        updater = self.assembly.weights.updater
        updater.live.reread()
        return replace(updater, optimizer=updater.in_loop)

    def adopt(self, change: Callable[[Assembly], Assembly]) -> None:
        """Continue with an assembly that was derived from the run's, for example one with another optimizer."""
        self.assembly.weights.store.settle()
        self.held.change(change)

    @property
    def layout(self) -> Layout:
        """The layout; once the run is prepared, with additional options that the model needs."""
        return self._own.layout

    @property
    def steps_taken(self) -> int:
        """The number of steps that were taken, in this process or before."""
        return self._stepper.steps_taken

    @steps_taken.setter
    def steps_taken(self, number: int) -> None:
        self._stepper.steps_taken = number
        self._forget_gradients()
