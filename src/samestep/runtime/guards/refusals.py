"""Refusals that one rank finds in the middle of a step, raised on every rank at the end of its backward.

A rank that raised by itself would leave the others waiting in the step's next collective. So a rank keeps the reason,
and raises the flag `refuses` of the step's one all_reduce (`step_observer.py`); where the sum shows that some rank has a reason,
all ranks exchange their reasons and raise the first. A rank whose loss has done what was not tried yet raises the flag too: then all ranks
try it together (`loss_trials.py`), before the update. So does one whose forward has built another graph than before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NoReturn

from samestep.errors import RepeatError, UnprovenError
from samestep.job_tables import RunTable, Waiver
from samestep.runtime.ledger import outside_step
from samestep.runtime.loss_watch import LossWatch
from samestep.runtime.processes.messages import gather_values

_Reason = tuple[str, str, Waiver, bool]
"""The code of a refusal, its text and its waiver; and whether it is an event in a run that was proven before."""


class Refusals:
    """The reasons for which this rank refuses the step, and the remarks of the run on what it does not refuse."""

    def __init__(self, settings: RunTable) -> None:
        self.remarks: list[str] = []
        """What was waived, or noticed without being refused, each once."""
        self._settings = settings
        self._num_reported = 0
        self._pending: _Reason | None = None
        self.evaluated = self._agreed = frozenset[str]()
        """The modules that this rank's loop has put into evaluation mode, which must be those of all ranks, and those that were compared last."""
        self.gave_up_at = ""
        """The path of the module at which this rank has given the step up, which it asks for once more; empty if it has not."""
        self.asks_again = False
        """Whether this rank asks for the step once more, since its forward drew what only a mode sees."""
        self.asks = 0
        """Number of trials of the loss of this step for which this rank asks, which all ranks run together."""
        self.new_forward: tuple[int, int] | None = None
        """This rank's share of the data, and the micro-batch of this step in which its forward has built a graph of another size than before:
        all ranks try it together."""
        self.try_step: Callable[[int, Sequence[tuple[int, int]]], None] | None = None
        """Runs so many trials of the loss, and one of new forwards, and adds the reason that they find; None before the first step."""
        self.watch = LossWatch()
        """The watch over the loss of this step, whose least counts all ranks must know."""

    def is_waived(self, waiver: Waiver) -> bool:
        """Return whether `run.allow` skips this kind of check."""
        return waiver in self._settings.allow

    def add(self, waiver: Waiver, code: str, reason: str, *, is_event: bool = False) -> None:
        """Keep a reason to refuse the step, or only remark on it where `run.allow` waives it."""
        if self.is_waived(waiver):
            self.remark(self._settings.waived(waiver, code, reason))
        elif self._pending is None:
            self._pending = code, reason, waiver, is_event

    def remark(self, text: str) -> None:
        """Keep a remark, once."""
        if text not in self.remarks:
            self.remarks.append(text)

    def news(self) -> tuple[str, ...]:
        """Return the remarks that have not been returned before."""
        new = tuple(self.remarks[self._num_reported :])
        self._num_reported = len(self.remarks)
        return new

    @property
    def is_pending(self) -> bool:
        """Whether this rank has a reason, gave the step up, asks for a trial, or has other modules in evaluation mode, or least counts, than were
        compared last.
        """
        asks = bool(self.gave_up_at) or self.asks_again or self.new_forward is not None
        asks |= self.watch.least != self.watch.agreed or self.asks > 0
        return self._pending is not None or asks or self.evaluated != self._agreed

    def raise_own(self) -> None:
        """Raise this rank's reason, if it has one, where no collective of the step follows.

        Raises:
            UnprovenError: this rank refuses the step.
        """
        if self._pending is not None:
            _refuse(*self._pending)

    def raise_found(self, world_size: int) -> None:
        """Raise the first rank's reason, if any has one.

        Collective over the world, see [Note: collective calls].

        Raises:
            UnprovenError: some rank refuses the step.
            RepeatError: it does for an event in a run that was proven before.
        """
        with outside_step():
            reasons = gather_values(self._pending, world_size)
        if reason := next(filter(None, reasons), None):
            _refuse(*reason)

    def raise_agreed(self, world_size: int) -> bool:
        """Raise the first rank's reason, if any has one; return whether some rank asks for the step once more.

        Collective over the world: every rank calls it where the sum of the flag `refuses` shows that some rank has a reason.

        Raises:
            UnprovenError: some rank refuses the step.
        """
        with outside_step():
            values = (
                self._pending,
                sorted(self.evaluated),
                self.gave_up_at,
                self.asks,
                self.watch.least,
                self.asks_again,
                self.new_forward,
            )
            everyone = gather_values(values, world_size)
        reasons, evaluated, paths, asks, least, again, new = zip(*everyone, strict=True)
        self.watch.agree(least)
        self.new_forward = None
        self._agreed, self.gave_up_at, self.asks_again = self.evaluated, "", False
        is_again, new_forwards = any(paths) or any(again), [*filter(None, new)]
        if (max(asks) or new_forwards) and self.try_step is not None and not is_again and not any(reasons):
            self.try_step(max(asks), new_forwards)
            self.raise_found(world_size)
        if reason := next(filter(None, reasons), None):
            _refuse(*reason)
        if other := frozenset[str]().union(*(set(modules) ^ set(evaluated[0]) for modules in evaluated)):
            raise UnprovenError(
                "forward-state",
                f"{min(other)} is in evaluation mode on some ranks and in training mode on others. Use a loop that calls eval() and "
                "train() of run.model on all ranks alike",
                "state",
            )
        for rank, path in enumerate(paths):
            if path:
                self.remark(
                    f"{path} runs once more in a forward, or in another order than when the model was traced. From now on, rank {rank} keeps "
                    "its weights gathered from each forward to the end of its backward"
                )
        return is_again


def _refuse(code: str, reason: str, waiver: Waiver, is_event: bool) -> NoReturn:
    """Raise that a repetition has differed (an event), or that code is not proven; `run.allow` may waive either."""
    if is_event:
        raise RepeatError(code, f'{reason}; run.allow = ["{waiver}"] lets it run unproven')
    raise UnprovenError(code, reason, waiver)
