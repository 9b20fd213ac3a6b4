"""State that a forward computes from weights and itself alone, in a step of several micro-batches: each starts from the step's value.

One device runs the forward once a step. With u the state and w the weights, it computes u' = f(u, w) on the way: the vectors of a spectral
norm by power iteration (Miyato et al. 2018), a number of calls by which something is annealed. Several micro-batches with the weights of one
step compute the same u' if each of them starts from the same u, so u is put back in front of each forward but the first, and u' stays
behind the last one. State that depends on samples is refused (`forward_state.py`).
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from samestep.models.analysis import StateSpec
from samestep.program.program import Program
from samestep.runtime.axes.step_part import PartOfStep, ShapesOf
from samestep.runtime.step_batch import StepBatch
from samestep.state.kept_slots import KeptSlots


class RepeatedState(PartOfStep):
    """The state of this rank's modules that each micro-batch of a step computes alike."""

    def __init__(self, slots: Sequence[tuple[nn.Module, str]]) -> None:
        self._slots, self._kept, self._is_first = slots, KeptSlots([]), True

    @classmethod
    def parts_of(cls, states: Sequence[StateSpec], model: nn.Module, program: Program) -> list[PartOfStep]:
        """Return it in a list, or nothing where a step has one micro-batch or the forward keeps no such state."""
        if program.step.num_microbatches < 2:
            return []
        modules = dict(model.named_modules())
        slots = [(modules[state.owner], state.name) for state in states if state.is_restorable]
        return [cls(slots)] if slots else []

    def begin_step(self, batch: StepBatch, shapes_of: ShapesOf) -> None:
        """Note the values at the beginning."""
        self._kept, self._is_first = KeptSlots(self._slots), True

    def begin_forward(self) -> None:
        """Put them back, but for the first micro-batch."""
        if not self._is_first:
            self._kept.restore()
        self._is_first = False
