"""Exchange times: behind which steps replicas that are trained apart exchange which part of their weights. No torch.

The weights are P parts (`numerics.exchange_parts`), each exchanged once in H steps (`numerics.exchange_every`) at a time of its
own, and the sum of an exchange is used D steps behind its start (`numerics.exchange_delay`), which hide it:

    H = 6, P = 2, D = 2     behind step   1   2   3   4   5   6   7   8   9   10  ...
    part 0                                        start   .   end             start     start = 3 mod 6
    part 1                                                    start   .   end           start = 6 mod 6

What is sent by two collectives, the second of which needs the sum of the first, goes on D // 2 steps behind the start, so
that steps hide both. An exchange ends before the next part's begins, so one buffer is under way at a time. Behind the last step
of the job the exchange under way ends, and then every part is exchanged at once.

A part holds every P-th of the model's layers that have trained weights, in the order of the forward: what parts hold is spread
over the depth of the model (Douillard et al. 2025, arXiv:2501.18512, section 2.2, who found strides no worse than runs).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from samestep.job_tables import NumericsTable
from samestep.models.spec import ModelSpec


class Phase(StrEnum):
    """A phase of an exchange, which is carried out behind a step."""

    START = "start"
    """Replicas write down what their weights have moved by, and the first collective is issued."""
    SUM = "sum"
    """The first collective is waited for, and the second one issued, if there are two."""
    END = "end"
    """The outer step is taken, and replicas go on with its weights."""


class ExchangeEvent(NamedTuple):
    """One phase of the exchange of a part."""

    phase: Phase
    part: int


@dataclass(frozen=True, slots=True)
class ExchangeTimes:
    """When the parts of a job's weights are exchanged."""

    every: int
    parts: int
    delay: int
    last: int
    """Steps of the job."""

    @classmethod
    def of(cls, numerics: NumericsTable, steps: int) -> ExchangeTimes:
        """Return the times of a job of so many steps."""
        return cls(numerics.exchange_every, numerics.exchange_parts, numerics.exchange_delay, steps)

    def behind(self, step: int) -> tuple[ExchangeEvent, ...]:
        """Return what is done behind a step, counted from 1, in order."""
        before = [part for part in range(self.parts) if self._last_start(part, step - 1) + self.delay >= step]
        if step == self.last:
            ended = [event for part in before for event in self._events(part, step, rest=True)]
            return (*ended, *at_once(range(self.parts)))
        found = [event for part in before for event in self._events(part, step)]
        starting = [part for part in range(self.parts) if self._last_start(part, step) == step]
        started = [ExchangeEvent(Phase.START, part) for part in starting]
        return (*found, *started) if self.delay else at_once(starting)

    def _events(self, part: int, step: int, rest: bool = False) -> Iterable[ExchangeEvent]:
        """Yield the phases behind a step of an exchange that is under way, or all that are left of it."""
        age = step - self._last_start(part, step - 1)
        is_last = rest or age == self.delay
        if age == max(1, self.delay // 2) or (rest and age < max(1, self.delay // 2)):
            yield ExchangeEvent(Phase.SUM, part)
        if is_last:
            yield ExchangeEvent(Phase.END, part)

    def _last_start(self, part: int, step: int) -> int:
        """Return the last step up to a given one behind which a part's exchange starts; far below 0 if none does."""
        offset = (part + 1) * self.every // self.parts
        start = step - (step - offset) % self.every
        return start if start > 0 else -self.every - self.delay


def at_once(parts: Iterable[int]) -> tuple[ExchangeEvent, ...]:
    """Return all phases of the exchange of some parts, behind one step."""
    found = [*parts]
    return tuple(ExchangeEvent(phase, part) for phase in Phase for part in found)


def parts_of(model: ModelSpec, number: int) -> dict[str, int]:
    """Return the part of each trained weight of a whole model, where there are several."""
    if number == 1:
        return {}
    layers = sorted({param.layer for param in model.params if param.trainable})
    place = {layer: index % number for index, layer in enumerate(layers)}
    return {param.name: place[param.layer] for param in model.params if param.trainable}
