"""Whether the training forwards of a model draw dropout masks, as its steps show."""

from __future__ import annotations

import dataclasses
import enum
import itertools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from samestep.randomness.masks import MaskSlice, rates_of
from samestep.randomness.mode import Draw, DropoutMode, active_mode, expect_draws, track_modules, untrack_modules
from samestep.randomness.row_hashes import RunningForward

MakeMode = Callable[[nn.Module, Draw, MaskSlice | None], DropoutMode]
"""A factory of the dropout mode of one forward, with the arguments of `DropoutMode` itself."""
_NOTHING: AbstractContextManager[None] = nullcontext()


class Dropout(enum.Enum):
    """Whether the training forwards of a model draw dropout masks.

    UNKNOWN ─► ACTIVE   a forward has drawn a mask
    UNKNOWN ─► ABSENT   a whole step has drawn none
    ABSENT  ─► UNKNOWN  a probability that was 0 has been raised
    """

    UNKNOWN = "unknown"
    """Neither the model nor a step has shown dropout so far: forwards run under a `DropoutMode`, which counts masks."""
    ACTIVE = "active"
    """Every training forward runs under a `DropoutMode`."""
    ABSENT = "absent"
    """Forwards run without a mode, and modules without its hooks."""


@dataclass(slots=True)
class DropoutState:
    """The dropout of a model as steps have shown it so far: the part of an assembly that changes."""

    dropout: Dropout
    model: nn.Module
    part: MaskSlice | None = None
    """The slice of each dropout mask that this rank draws; None where no axis cuts a mask."""
    may_go_by_name: bool = False
    """Whether draws of a training forward may be seen by the names of functions, since every rank runs the model's own code."""
    allows_random: bool = False
    """Whether code may draw random numbers that layouts do not share."""
    rates: list[tuple[dict[str, Any], str]] = field(default_factory=list)
    """Where modules keep the probabilities that were 0 when the hooks were removed: attributes and names."""

    def __post_init__(self) -> None:
        if self.dropout is Dropout.ACTIVE:
            expect_draws(self.model)

    def begin_step(self) -> None:
        """Test whether a probability has been raised since the model was found to have no dropout."""
        if self.dropout is Dropout.ABSENT and any(itertools.starmap(dict.get, self.rates)):
            self.dropout = Dropout.UNKNOWN
            expect_draws(self.model)
            track_modules(self.model)

    def mode(self, draw: Draw, make: MakeMode | None = None) -> DropoutMode:
        """Return the mode of a forward that draws its masks and random numbers; `make` makes it where something else sees it too."""
        return (make or DropoutMode)(self.model, draw, self.part)

    @contextmanager
    def drawing(
        self, draw: Draw, make: MakeMode | None = None, within: AbstractContextManager[Any] = _NOTHING
    ) -> Iterator[None]:
        """Let a training forward draw inside, in another context too, and learn from what it has drawn."""
        with within:
            mode = self.mode(draw, make)
            if make is None and self.may_go_by_name:
                mode.may_go_by_name()
            with mode:
                mode.allows_random = self.allows_random
                yield
            self.end_forward(mode.num_draws)
            mode.end_forward()

    def end_forward(self, num_draws: int) -> None:
        """Record the number of masks that a training forward has drawn."""
        if num_draws > 0 and self.dropout is Dropout.UNKNOWN:
            self.dropout = Dropout.ACTIVE
            expect_draws(self.model)

    def end_step(self) -> None:
        """Record the end of a whole step: a model that has drawn no mask has no dropout, and loses its hooks."""
        if self.dropout is Dropout.UNKNOWN:
            self.dropout = Dropout.ABSENT
            self.rates = rates_of(self.model)
            untrack_modules(self.model)


class _Recompute:
    """A context that restores the counts that a mode had when this object was created."""

    def __init__(self, mode: DropoutMode) -> None:
        self._mode = mode
        self._then = _copies(mode._frames, mode._entries)
        self._now: list[tuple[list[RunningForward], dict[str, int]]] = []

    def __enter__(self) -> None:
        mode = self._mode
        self._now.append((mode._frames, mode._entries))
        mode._frames, mode._entries = _copies(*self._then)  # with retain_graph a block is recomputed several times
        mode.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._mode.__exit__(*error)
        self._mode._frames, self._mode._entries = self._now.pop()


def _copies(frames: list[RunningForward], entries: dict[str, int]) -> tuple[list[RunningForward], dict[str, int]]:
    return [dataclasses.replace(frame) for frame in frames], dict(entries)


def recompute_contexts(model: nn.Module) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Return the contexts of a checkpointed forward and of its recomputation, which then draws the same masks.

    They are for `context_fn` of `torch.utils.checkpoint.checkpoint(..., use_reentrant=False)`, which calls it in the
    forward. The recomputation activates the mode of that forward by itself, on whatever thread the backward runs.
    """
    mode = active_mode(model)
    return nullcontext(), nullcontext() if mode is None else _Recompute(mode)
