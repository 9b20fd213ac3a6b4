"""The parts of a layout that hold something from the beginning of a step to its end.

    begin_step ─► forwards, backwards ─► end_backwards ─► update ─► end_update

Messages under way, the samples that a batch norm shares, the next values of buffers: a plain layout has no such part. `SharedSamples` stands for
what forwards ask of the samples of other ranks and micro-batches: nothing, unless a model takes statistics or sums of them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import ClassVar, Generic, TypeVar

from samestep.building.over_samples import Keeping, NextValues
from samestep.runtime.contexts import Anew
from samestep.runtime.step_observer import StepBatch
from samestep.tracing.checkpointed import Contexts

_Value = TypeVar("_Value")
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


class RepeatedValues(Generic[_Value]):
    """Values of the calls of checkpointed forwards: the first forward records them, and its repetition takes them, and sends nothing again."""

    def __init__(self) -> None:
        self._records: list[list[_Value]] = []
        """The values of the checkpointed forwards that run, outermost first."""
        self._left: Iterator[_Value] | None = None
        """The remaining values of the first of two forwards, while the second one takes them."""

    @property
    def is_repeating(self) -> bool:
        """Whether a repeated forward runs."""
        return self._left is not None

    @property
    def is_recording(self) -> bool:
        """Whether a forward runs that will be repeated."""
        return bool(self._records)

    def left(self) -> _Value | None:
        """Return the value of the next call in a forward that is repeated; None where none is."""
        return None if self._left is None else next(self._left, None)

    def add(self, value: _Value) -> _Value:
        """Record the value of a call, and return it."""
        for record in self._records:
            record.append(value)
        return value

    def contexts(self) -> Contexts:
        """Return the contexts of a checkpointed forward and of its repetition."""
        values: list[_Value] = []

        @contextmanager
        def first() -> Iterator[None]:
            self._records.append(values)
            try:
                yield
            finally:
                self._records.pop()

        @contextmanager
        def repeated() -> Iterator[None]:
            previous = self._left, self._records
            self._left, self._records = iter(values), []
            try:
                yield
            finally:
                self._left, self._records = previous

        return Anew(first), Anew(repeated)


def nest_pairs(*pairs: Contexts) -> Contexts:
    """Return the contexts of a checkpointed forward and of its repetition that enter those of each pair, each inside the one before."""

    def nested(contexts: Sequence[AbstractContextManager[object]]) -> Anew:
        @contextmanager
        def entered() -> Iterator[None]:
            with ExitStack() as stack:
                for context in contexts:
                    stack.enter_context(context)
                yield

        return Anew(entered)

    return nested([first for first, _ in pairs]), nested([repeated for _, repeated in pairs])


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
