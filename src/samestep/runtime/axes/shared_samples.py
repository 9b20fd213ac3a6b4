"""What forwards ask of the samples that other ranks and micro-batches have: nothing, unless a model takes statistics or sums of them."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import ClassVar

from samestep.building.over_samples import Keeping, NextValues
from samestep.runtime.axes.step_part import PartOfStep
from samestep.tracing.checkpointed import Contexts

_NOTHING = nullcontext()


class SharedSamples(PartOfStep):
    """The samples of a model in which no sample sees another one; `BatchNorms` are those of other models."""

    are_used: ClassVar[bool] = False
    """Whether a step has to do with them."""

    def __init__(self) -> None:
        self.of_losses = NextValues()
        """The values that the losses of a step give buffers, which the update writes."""
        self._keeping = Keeping(self.of_losses)

    @property
    def takes_statistics(self) -> bool:
        """Whether the model has a batch norm that takes statistics of samples in training."""
        return False

    @property
    def sends(self) -> bool:
        """Whether a training forward waits for other ranks."""
        return False

    def of(self, microbatch: int) -> AbstractContextManager[None]:
        """Return the context of a training forward of a micro-batch.

        Collective over `dp` where it runs a batch norm: every data rank runs the same micro-batch; if one does not, the
        others wait until the time limit.
        """
        return _NOTHING

    def of_loss(self, microbatch: int) -> AbstractContextManager[None]:
        """Return the context of the loss of a micro-batch; collective over `dp` where it asks for values of all samples."""
        return self._keeping

    def of_evaluation(self, num_samples: int) -> AbstractContextManager[None]:
        """Return the context of a forward of held-out samples, which ranks share as one micro-batch; collective as `of` is."""
        return _NOTHING

    def num_evaluated_at_once(self, most: int) -> int:
        """Return how many held-out samples run at once, at most so many unless a group is larger."""
        return most

    def recompute_contexts(self) -> Contexts:
        """Return the contexts of a checkpointed forward, which records statistics, and of its repetition, which takes them."""
        return nullcontext(), nullcontext()
