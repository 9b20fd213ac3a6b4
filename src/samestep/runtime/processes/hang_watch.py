"""The detection of ranks that stand still: which rank the others wait for, and what that rank was doing.

A rank moves while it begins calls of collectives, or steps. Where no rank has moved for a while (10 s, or the time of
10 steps) the one at fault is named: a rank that does not answer, else one that has begun fewer calls than others of its
group, else one that is in no call while others are. After `run.hang_s` the run is ended. A slow rank that is healthy
moves again before.

Outside of steps, as in a save, no rank need move, and one that answers is never ended. A rank that does not even answer
there was stopped, or its host is gone: it is named too, and ended after `run.hang_s`, but not before 30 s: a healthy
rank may be silent so long in a call that holds Python's lock. In the first step and in a user's own loop such a call may be a
long one (a library is loaded, a dataset is read): ranks are ended there only where none answers, after the time limit
of a collective, or where each waits for others in a collective.

Ranks that torchrun or srun started have no parent of ours, and watch each other. Every rank writes its whereabouts into
the store where the ranks met, each second, as JSON. Rank 0 reads them all; the last rank does so too, and speaks where
rank 0 does not answer. A watching rank names a rank that stands still, and after `run.hang_s` ends its process with
that text, upon which the launcher ends, or restarts, all others. Where the store itself does not answer (its process
stands still, or its host is gone), each rank that does not move ends itself after `run.hang_s`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import json
import math
import os
import sys
import threading
import time
import warnings
from collections.abc import Iterator, Sequence

from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from samestep.errors import WorkerError
from samestep.runtime.processes import join
from samestep.runtime.processes.join import RankInfo
from samestep.runtime.processes.whereabouts import Whereabouts, lacks, whereabouts_of

_NAMED_AFTER_S = 10.0
_STEPS = 10
"""The number of median steps in which a rank may stand still."""
_SILENT_S = 4.0
"""Seconds without an answer after which a rank counts as one that does not answer; it is asked every second."""
_SILENT_APART_S = 30.0
"""Seconds for which a healthy rank may not answer outside of steps, as while it encodes the manifest of a large
model."""


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
        last, self._hang_s = self._last.get(rank), self._hang_s or at.hang_s
        still = (at.calls, at.step, at.where if not at.call else "")
        if at.may_work or last is None or (last.calls, last.step, last.where if not at.call else "") != still:
            self._moved_s[rank] = now_s
        self._last[rank], self._answered_s[rank] = at, now_s

    def check(self, working: Sequence[int], now_s: float, *, says: bool = True, hurries: bool = False) -> None:
        """Warn once where all ranks stand still, naming the one at fault, and end the run after `run.hang_s`.

        Nothing is said where another watch does (`says`). A run that was asked to stop is ended where it would be named (`hurries`).

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
        still_s = self.still_s(answering, now_s)
        steps_s = _STEPS * max(at.median_step_s for at in self._last.values())
        if still_s < max(_NAMED_AFTER_S, steps_s):
            self._is_named = False
            return
        if still_s >= max(self._hang_s, steps_s) or hurries:
            raise WorkerError("hang", f"{self.text(working, still_s, now_s)}; run.hang_s = {self._hang_s:g}")
        if not self._is_named and says:
            self._is_named = True
            warnings.warn(self.text(working, still_s, now_s), stacklevel=2)

    def _wake(self, now_s: float) -> None:
        """Let the time begin anew if this process was stopped itself, and its ranks with it."""
        if now_s - self._awake_s > _SILENT_S:
            self._moved_s, self._answered_s = (dict.fromkeys(self._last, now_s) for _ in range(2))
            self._began_s = now_s
        self._awake_s = now_s

    def _check_silent(self, working: Sequence[int], now_s: float, says: bool, *, is_all: bool) -> None:
        """Warn of ranks that do not answer outside of steps, and end the run after the limit of that.

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
            raise WorkerError("hang", f"{self.text(working, over_s, now_s)}; run.hang_s = {self._hang_s:g}")
        longest_s = max((s for s, rank in zip(quiet_s, working, strict=True) if rank in self._last), default=0.0)
        is_late = longest_s >= max(_NAMED_AFTER_S, steps_s)
        if says and is_late and not self._is_named:
            warnings.warn(self.text(working, longest_s, now_s), stacklevel=3)
        self._is_named = is_late and (says or self._is_named)

    def still_s(self, ranks: Sequence[int], now_s: float) -> float:
        """Return the seconds since one of some ranks has moved."""
        return now_s - max(self._moved_s[rank] for rank in ranks)

    def text(self, working: Sequence[int], still_s: float, now_s: float) -> str:
        """Return as text which of the working ranks the others wait for, what it does, and what the others do."""
        guilty = self._guilty(working, now_s)
        places = {rank: _place(at) for rank, at in self._last.items()}
        guilty = [rank for rank in guilty if places.get(rank) == places.get(guilty[0])]
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
            if rank not in guilty and rank in places:
                others.setdefault(places[rank], []).append(rank)
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
        return next((report for report in (silent, behind, outside) if report), list(working))


def _place(at: Whereabouts) -> str:
    """Return where a rank is, as text."""
    call = f"in {at.call}, " if at.call else ""
    call += f"module {at.module}, " if at.module else ""
    task = f"in the {at.task} of " if at.task else "in "
    step = f"step {at.step}" if at.step else at.apart or "code outside of steps"
    return f"{call}{task}{step}{at.place}"


_EVERY_S = 1.0
_LEAVE_S = 60.0
_SILENT_OUTSIDE_S = 4.0  # seconds without news of rank 0 after which the last rank speaks


@contextlib.contextmanager
def watching(place: RankInfo, hang_s: float, name: str) -> Iterator[None]:
    """Watch the ranks of a run while it is carried out.

    Every rank calls it, with one `name` that no other start of the run has.
    """
    address = join.store_address()
    if address is None:
        yield
        return
    host, port = address
    watch = _Watch(place, hang_s, f"{host}:{port}")
    # A separate connection: a call of the process group may hold the other one for long.
    limit = datetime.timedelta(seconds=hang_s)
    store = PrefixStore(f"watch/{name}", TCPStore(host, port, is_master=False, timeout=limit))
    telling = threading.Thread(target=watch.tell, args=(store,), daemon=True)
    guarding = threading.Thread(target=watch.guard, daemon=True)
    for thread in (telling, guarding):
        thread.start()
    try:
        yield
    finally:
        watch.is_over.set()
        # A thread that is in a call of the store's when Python ends is ended within C++ code, which aborts the process. The store
        # answers, however late, or its process is gone, which ends the call too; longer takes only one that stands still.
        for thread in (telling, guarding):
            thread.join(_LEAVE_S)


class _Watch:
    """The knowledge of one rank about the others and about itself."""

    def __init__(self, place: RankInfo, hang_s: float, store_at: str) -> None:
        self.is_over = threading.Event()
        self._place, self._hang_s, self._store_at = place, hang_s, store_at
        self._main_thread = threading.main_thread().ident
        self._hang_watch = HangWatch(place.world_size, hang_s)
        self._heard: dict[int, int] = {}
        """The number of the last message of each rank."""
        self._left: set[int] = set()
        self._rank_0_s = self._store_s = time.monotonic()
        """When rank 0 and the store last answered."""

    def tell(self, store: Store) -> None:
        """Write the progress of this rank, and where it watches read that of the others, until the run is over."""
        number = 0
        with contextlib.suppress(RuntimeError):  # the store has ended, and with it the run
            while not self.is_over.wait(_EVERY_S):
                at, number = whereabouts_of(self._main_thread), number + 1
                store.set(f"{self._place.rank}", json.dumps([number, dataclasses.asdict(at)]))
                self._store_s = time.monotonic()
                if self._place.rank in (0, self._place.world_size - 1):
                    self._read(store)
            store.set(f"{self._place.rank}", "")

    def guard(self) -> None:
        """End this process where it does not move and the store does not answer."""
        watch = HangWatch(2, self._hang_s)  # of this rank and of the store, whose thread answers in a save too
        while not self.is_over.wait(_EVERY_S):
            now, at = time.monotonic(), whereabouts_of(self._main_thread)
            watch.hear(0, at, now)
            if now - self._store_s < _SILENT_OUTSIDE_S:
                watch.hear(1, at, now)
                continue
            try:
                watch.check([0, 1], now, says=False)
            except WorkerError:
                silent_s = now - self._store_s
                _end(
                    f"rank {self._place.rank} of {self._place.world_size} {f'is in {at.apart}' if at.apart else 'stands still'}, and the store at {self._store_at} has "
                    f"not answered for {silent_s:.0f} s: its process stands still or is gone; run.hang_s = {self._hang_s:g}"
                )

    def _read(self, store: Store) -> None:
        now = time.monotonic()
        keys = [f"{rank}" for rank in range(self._place.world_size) if rank not in self._left]
        keys = [key for key in keys if store.check([key])]
        for key, text in zip(keys, store.multi_get(keys), strict=True):
            rank = int(key)
            if not text:
                self._left.add(rank)
                continue
            number, at = json.loads(text)
            if number != self._heard.get(rank):
                self._heard[rank] = number
                self._hang_watch.hear(rank, Whereabouts(**at), now)
                self._rank_0_s = now if rank == 0 else self._rank_0_s
        speaks = self._place.rank == 0 or now - self._rank_0_s > _SILENT_OUTSIDE_S
        working = [rank for rank in range(self._place.world_size) if rank not in self._left]
        try:
            self._hang_watch.check(working, now, says=speaks)
        except WorkerError as error:
            if speaks:
                _end(str(error))


def _end(text: str) -> None:
    """End this process, whose main thread may never come back."""
    print(f"samestep: {text}", file=sys.stderr, flush=True)
    os._exit(1)
