"""Whether the training forwards of a model draw dropout masks, as its steps show."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from samestep.models.spec import ModelSpec
from samestep.randomness.masks import rates_of
from samestep.randomness.mode import track_modules, untrack_modules


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
    rates: list[tuple[dict[str, Any], str]] = field(default_factory=list)
    """Where modules keep the probabilities that were 0 when the hooks were removed: attributes and names."""

    @classmethod
    def of(cls, has_dropout: bool, spec: ModelSpec) -> DropoutState:
        """Return the state before the first step: active if the trace drew masks or a probability is above 0."""
        return cls(Dropout.ACTIVE if spec.masks or has_dropout else Dropout.UNKNOWN)

    def begin_step(self, model: nn.Module) -> None:
        """Test whether a probability has been raised since the model was found to have no dropout."""
        if self.dropout is Dropout.ABSENT and any(fields.get(name) for fields, name in self.rates):
            self.dropout = Dropout.UNKNOWN
            track_modules(model)

    def end_forward(self, num_draws: int) -> None:
        """Record the number of masks that a training forward has drawn."""
        if num_draws > 0 and self.dropout is Dropout.UNKNOWN:
            self.dropout = Dropout.ACTIVE

    def end_step(self, model: nn.Module) -> None:
        """Record the end of a whole step: a model that has drawn no mask has no dropout, and loses its hooks."""
        if self.dropout is Dropout.UNKNOWN:
            self.dropout = Dropout.ABSENT
            self.rates = rates_of(model)
            untrack_modules(model)
