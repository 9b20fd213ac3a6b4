"""The parts of a layout that hold something from the beginning of a step to its end.

    begin_step ─► forwards, backwards ─► end_backwards ─► update ─► end_update

Messages under way, the samples that a batch norm shares, the next values of buffers: a plain layout has no such part.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable

from samestep.runtime.step_observer import StepBatch

ShapesOf = Callable[[int], Hashable]
"""Returns, for a micro-batch, the shapes of its samples, which determine the shapes of activations."""


class PartOfStep:
    """A part of a layout that holds something during a step. Every method of this base class does nothing."""

    def begin_step(self, batch: StepBatch, shapes_of: ShapesOf) -> None:
        """Begin a step, or another backward of it, on a batch; `shapes_of` gives the shapes of each micro-batch's samples."""

    def begin_forward(self) -> None:
        """Begin the forward of a micro-batch through the layers of a chunk."""

    def end_backwards(self) -> None:
        """Complete what all micro-batches have begun, once they have run."""

    def end_update(self) -> None:
        """Do what follows the update of the weights."""
