"""The properties of a run that show what it holds: its model, optimizer and program, for loops, checkpoints and proofs that look at them."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from samestep.job import Job
from samestep.program.program import Program
from samestep.runtime.assembly import Assembly
from samestep.runtime.guards.loss_spikes import SpikeWatch
from samestep.runtime.held_assembly import HeldAssembly
from samestep.runtime.open_step import Progress
from samestep.runtime.optimizers.optimizer_step import Updater
from samestep.runtime.processes.messages import gather_values
from samestep.runtime.stepper import Stepper


class HeldRun:
    """The tensors and settings that a run holds between its steps."""

    job: Job
    _own: HeldAssembly
    _stepper: Stepper

    @property
    def spikes(self) -> SpikeWatch:
        """The losses of the last steps, by which a spike is recognised."""
        return self._stepper.guards.spikes

    @property
    def replicas(self) -> HeldAssembly:
        """The models that this rank trains, whose first is the run's: a list of one, unless the job trains several replicas independently."""
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
        """This rank's module, after the layout has cut its weights. Under `tp` and `ep` a weight that is cut is this rank's part of it, of
        which a loop may change each element by itself: what looks at several at once, such as a norm of rows or pruning by rank, is
        refused, and belongs within `gathered()`. So is a norm of `param.grad` where a rank has a part of the gradient: `report.grad_norm`
        is that of all.
        """
        return self.assembly.model.module

    @property
    def updater(self) -> Updater:
        """The optimizer over the weights that this rank updates, which hold what was written into the model since."""
        if self._stepper.progress is Progress.BETWEEN:
            for reason in self.assembly.model.replaced.take_over(inside=False):
                self.job.run.waived("state", reason)
        self.assembly.weights.store.watch.take_back()
        self.assembly.weights.updater.live.reread()
        return self.assembly.weights.updater

    def adopt(self, change: Callable[[Assembly], Assembly]) -> None:
        """Continue with an assembly that was derived from the run's, for example one with another optimizer."""
        self.assembly.weights.store.settle()
        self.replicas.change(change)

    def all_waived(self) -> tuple[str, ...]:
        """Return the refusals that any rank met and `run.allow` waived; `job.run.waived` notes each."""
        everyone = gather_values(self.job.run.met, self._own.layout.world_size)
        return tuple(dict.fromkeys(text for texts in everyone for text in texts))
