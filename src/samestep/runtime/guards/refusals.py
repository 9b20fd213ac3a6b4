"""Refusals that one rank finds in the middle of a step, raised on every rank at the end of its backward.

A rank that raised by itself would leave the others waiting in the step's next collective. So a rank keeps the reason,
and raises the flag `refuses` of the step's one all_reduce (`step_scalars.py`); where the sum shows that some rank has a reason,
all ranks exchange their reasons and raise the first.
"""

from __future__ import annotations

from collections.abc import Callable

from samestep.errors import UnprovenError
from samestep.job_tables import RunTable, Waiver
from samestep.runtime.ledger import outside_step
from samestep.runtime.processes.messages import gather_values


class Refusals:
    """The reasons for which this rank refuses the step, and the remarks of the run on what it does not refuse."""

    def __init__(self, settings: RunTable) -> None:
        self.remarks: list[str] = []
        """What was waived, or noticed without being refused, each once."""
        self._settings = settings
        self._num_reported = 0
        self._pending: tuple[str, Waiver] | None = None
        self._evaluated = self._agreed = frozenset[str]()
        self.gave_up_at = ""
        """The path of the module at which this rank has given the step up, which it asks for once more; empty if it has not."""
        self.asks_again = False
        """Whether this rank asks for the step once more, since its forward drew what only a mode sees."""
        self.tried_by_parts: Callable[[], bool] | None = None
        """Whether the loss of this step passes another trial, which all ranks run together; None before the first step."""
        self._may_pass = False

    def add(self, waiver: Waiver, reason: str, *, may_pass: bool = False) -> None:
        """Keep a reason to refuse the step, or only remark on it where `run.allow` waives it; with `may_pass`, until a trial by parts."""
        if waiver in self._settings.allow:
            self.remark(self._settings.waived(waiver, reason))
        elif self._pending is None:
            self._pending, self._may_pass = (reason, waiver), may_pass

    def compare(self, evaluated: frozenset[str]) -> None:
        """Note the modules that this rank's loop has put into evaluation mode, which must be those of all ranks."""
        self._evaluated = evaluated

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
        """Whether this rank has a reason, gave the step up, or has other modules in evaluation mode than were compared last."""
        return self._pending is not None or bool(self.gave_up_at) or self.asks_again or self._evaluated != self._agreed

    def raise_own(self) -> None:
        """Raise this rank's reason, if it has one, where no collective of the step follows.

        Raises:
            UnprovenError: this rank refuses the step.
        """
        if self._pending is not None:
            raise UnprovenError(*self._pending)

    def raise_agreed(self, world_size: int) -> bool:
        """Raise the first rank's reason, if any has one; return whether some rank asks for the step once more.

        Collective over the world: every rank calls it where the sum of the flag `refuses` shows that some rank has a reason.

        Raises:
            UnprovenError: some rank refuses the step.
        """
        with outside_step():
            mine = (self._pending, sorted(self._evaluated), self.gave_up_at, self._may_pass, self.asks_again)
            everyone = gather_values(mine, world_size)
        self._agreed, self.gave_up_at, self.asks_again = self._evaluated, "", False
        found = [reason for reason, *_ in everyone if reason is not None]
        if found and not self._pass(world_size, all(may for reason, _, _, may, _ in everyone if reason is not None)):
            raise UnprovenError(*found[0])
        if other := frozenset[str]().union(*(set(one) ^ set(everyone[0][1]) for _, one, *_ in everyone)):
            raise UnprovenError(
                f"{min(other)} is in evaluation mode on some ranks and in training mode on others: a loop that calls eval() and "
                "train() of run.model on all ranks alike works",
                "state",
            )
        given_up = [(rank, path) for rank, (_, _, path, *_) in enumerate(everyone) if path]
        for rank, path in given_up:
            self.remark(
                f"{path} runs once more in a forward, or in another order than when the model was traced: rank {rank} keeps its "
                "weights gathered from each forward to the end of its backward from now on"
            )
        return bool(given_up) or any(again for *_, again in everyone)

    def _pass(self, world_size: int, may: bool) -> bool:
        """Return whether the trial by parts passes on all ranks, and forget this rank's reason then."""
        if not may or self.tried_by_parts is None:
            return False
        passed = self.tried_by_parts()
        with outside_step():
            passes = all(gather_values(passed, world_size))
        self._pending = None if passes else self._pending
        return passes
