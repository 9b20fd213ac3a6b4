"""Finding out that the ranks of a run stand still, which of them the others wait for, and what it was doing.

A rank moves while it begins calls of collectives, or steps. Where no rank has moved for a while (10 s, or the time of 10
steps) the one at fault is named: a rank that does not answer, else one that has made fewer calls than others of its group,
else one that is in no call while others are. After `run.hang_s` the run is ended. A slow rank that is healthy moves again before.
Apart from steps, as in a save, nobody need move, and who answers is never ended. A rank that does not even answer there was
stopped, or its host is gone: it is named too, and ended after `run.hang_s`, but not before 30 s: a healthy rank may be silent so
long in a call that holds Python's lock. Before the end of the first step such a call may be a long one (a library is
loaded, a data set is read): ranks are ended there only where none answers, after the time limit of a collective.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence

from samestep.errors import WorkerError
from samestep.runtime.processes.whereabouts import Whereabouts, lacks

_NAMED_AFTER_S = 10.0
_STEPS = 10
"""The number of median steps in which a rank may stand still."""
_SILENT_S = 4.0
"""Seconds without an answer after which a rank counts as one that does not answer; it is asked every second."""
_SILENT_APART_S = 30.0
"""Seconds for which a healthy rank may not answer apart from steps, as while it encodes the manifest of a large model."""


class HangWatch:
    """The last answers of the ranks of a run, and since when each has been the same."""

    def __init__(self, ranks: int, hang_s: float, start_s: float = math.inf) -> None:
        self._ranks, self._hang_s, self._start_s = ranks, hang_s, start_s
        self._last: dict[int, Whereabouts] = {}
        self._moved_s: dict[int, float] = {}
        self._answered_s: dict[int, float] = {}
        self._is_named = False
        self._began_s: float | None = None
        """When the ranks were first asked."""
        self._awake_s = math.inf
        """When this process last heard or checked something."""

    def hear(self, rank: int, at: Whereabouts, now_s: float) -> None:
        """Note an answer."""
        self._wake(now_s)
        before = self._last.get(rank)
        if before is None or (before.calls, before.step) != (at.calls, at.step):
            self._moved_s[rank] = now_s
        self._last[rank], self._answered_s[rank] = at, now_s

    def check(self, working: Sequence[int], now_s: float, *, says: bool = True) -> None:
        """Warn once where all ranks stand still, naming the one at fault, and end the run after `run.hang_s`.

        Nothing is said where another watch does (`says`).

        Raises:
            WorkerError: no rank has moved for that long.
        """
        self._wake(now_s)
        self._began_s = now_s if self._began_s is None else self._began_s
        # A rank that was stopped before it ever answered, or in a phase of its own, says nothing; the others do.
        answering = [rank for rank in working if rank in self._last and not self._is_silent(rank, now_s)]
        if not self._hang_s:
            return
        if not answering or not all(self._last[rank].step for rank in answering):
            self._check_silent(working, now_s, says and bool(answering), is_all=not answering)
            return
        still_s = now_s - max(self._moved_s[rank] for rank in answering)
        steps_s = _STEPS * max(at.median_step_s for at in self._last.values())
        if still_s < max(_NAMED_AFTER_S, steps_s):
            self._is_named = False
            return
        if still_s >= max(self._hang_s, steps_s):
            raise WorkerError(f"{self._text(working, still_s, now_s)}; run.hang_s = {self._hang_s:g}")
        if not self._is_named and says:
            self._is_named = True
            warnings.warn(self._text(working, still_s, now_s), stacklevel=2)

    def _wake(self, now_s: float) -> None:
        """Let the time begin anew if this process was stopped itself, and its ranks with it."""
        if now_s - self._awake_s > _SILENT_S:
            self._moved_s, self._answered_s = (dict.fromkeys(self._last, now_s) for _ in range(2))
            self._began_s = now_s
        self._awake_s = now_s

    def _check_silent(self, working: Sequence[int], now_s: float, says: bool, *, is_all: bool) -> None:
        """Warn of ranks that do not answer while others are apart from steps, and end the run after a limit of its own.

        Before every rank has taken a step, the run is ended only where none answers (`is_all`).

        Raises:
            WorkerError: one, or before the first step each, has not answered for too long.
        """
        quiet_s = [now_s - self._answered_s.get(rank, self._began_s or 0.0) for rank in working]
        last = [self._last[rank] for rank in working if rank in self._last]
        steps_s = _STEPS * max((at.median_step_s for at in self._last.values()), default=0.0)
        if len(last) == len(working) and all(at.step or at.apart for at in last):
            over_s, limit_s = max(quiet_s, default=0.0), max(steps_s, _SILENT_APART_S * any(at.apart for at in last))
        else:
            over_s, limit_s = min(quiet_s, default=0.0), self._start_s if is_all else math.inf
        if over_s >= max(self._hang_s, limit_s):
            raise WorkerError(f"{self._text(working, over_s, now_s)}; run.hang_s = {self._hang_s:g}")
        longest_s = max((s for s, rank in zip(quiet_s, working, strict=True) if rank in self._last), default=0.0)
        is_late = longest_s >= max(_NAMED_AFTER_S, steps_s)
        if says and is_late and not self._is_named:
            warnings.warn(self._text(working, longest_s, now_s), stacklevel=3)
        self._is_named = is_late and (says or self._is_named)

    def _text(self, working: Sequence[int], still_s: float, now_s: float) -> str:
        guilty = self._guilty(working, now_s)
        named = f"rank{'s' * (len(guilty) > 1)} {', '.join(map(str, guilty))} of {self._ranks}"
        first = self._last.get(guilty[0])
        silent = self._is_silent(guilty[0], now_s)
        does, has = ("do", "have") if len(guilty) > 1 else ("does", "has")
        what = (
            f"{does} not answer, and {'were' if len(guilty) > 1 else 'was'} last seen" if silent else f"{has} not moved"
        )
        text = f"{named} {what} {_place(first)}, for {still_s:.0f} s" if first else f"{named} {does} not answer"
        others: dict[str, list[int]] = {}
        for rank in working:
            if rank not in guilty and rank in self._last:
                others.setdefault(_place(self._last[rank]), []).append(rank)
        for place, ranks in others.items():
            text += f"; rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))} {place}"
        return text

    def _is_silent(self, rank: int, now_s: float) -> bool:
        """Return whether a rank has not answered for a while, or never."""
        return now_s - self._answered_s.get(rank, self._began_s or 0.0) >= _SILENT_S

    def _guilty(self, working: Sequence[int], now_s: float) -> list[int]:
        """Return the ranks that the others wait for."""
        silent = [rank for rank in working if self._is_silent(rank, now_s)]
        last = {rank: self._last[rank] for rank in working if rank in self._last}
        outside = [rank for rank, at in last.items() if not at.call]
        behind = [rank for rank, at in last.items() if any(lacks(at.calls, other.calls) for other in last.values())]
        return next((found for found in (silent, behind, outside) if found), list(working))


def _place(at: Whereabouts) -> str:
    """Return where a rank is, as text."""
    call = f"in {at.call}, " if at.call else ""
    task = f"in the {at.task} of " if at.task else "in "
    step = f"step {at.step}" if at.step else at.apart or "the first step or what comes before it"
    return f"{call}{task}{step}{f' ({at.where})' if at.where else ''}"
