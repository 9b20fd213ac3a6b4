"""The sums of a step that every run logs: seconds of each kind of task, of waits by axis, of data and of the host's other work; and the
stragglers among ranks that they show.

A straggler is a rank whose work, without waits, takes longer than the work of the other ranks of its stage. A wait says who is late, and
not why: other load on a machine makes every rank late at times. So ranks are judged by what they compute themselves, on a CPU the
processor time of their main thread, on a GPU the seconds of their tasks on the device. Of the steps of a window

    straggler   own time > 1.25 x the median of its peers, and by more than 0.05 of a step, in more than 0.7 of the steps

Every `WINDOW` steps each rank writes its times to the store through which the ranks have met, and rank 0 reads those of all ranks: no
collective, and nobody waits.
"""

from __future__ import annotations

import json
import socket
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any, Protocol

from samestep.program.recorded import RecordedStep

_TASKS = {"F": "forward_s", "B": "backward_s", "W": "backward_s", "U": "update_s"}


@dataclass(frozen=True, slots=True)
class StepSums:
    """The sums of one step on one rank, in seconds."""

    step: int = 0
    """The step, counted from 1; 0 before any is known."""
    values: Mapping[str, float] = field(default_factory=dict)

    def scalars(self) -> dict[str, float]:
        """Return the sums under their names in trackers, in milliseconds."""
        return {f"time/{name[:-2]}_ms": value * 1e3 for name, value in self.values.items() if name.endswith("_s")}

    def to_record(self) -> dict[str, float]:
        """Return the sums as plain data for JSON, with the step that they are of."""
        return {"step": self.step, **{name: round(value, 9) for name, value in self.values.items()}}


def sums_of(step: RecordedStep, axes: Mapping[str, str]) -> StepSums:
    """Return the sums of a step; `axes` are those of owners."""
    sums: dict[str, float] = {"sent": 0}
    tasks, recomputed, waits = [], [], []
    for form, name, begin, end, *more in step.events:
        if form == "task":
            tasks.append((_TASKS.get(name[:1], "host_s"), begin, end))
        elif form == "region" and name.startswith("recompute:"):
            recomputed.append(("recompute_s", begin, end))
        elif form == "region":
            waited = f"{name.partition(':')[0]}_s"
            sums[waited] = sums.get(waited, 0.0) + (end - begin) / 1e9
            waits.append((begin, end))
        elif form == "sent":
            sums["sent"] += 1
        if form == "wait" or (form == "sent" and not more[2]):
            waited = f"wait_{axes.get(name, 'other')}_s"
            sums[waited] = sums.get(waited, 0.0) + (end - begin) / 1e9
            waits.append((begin, end))
    for name, begin, end in (*tasks, *recomputed):
        sums[name] = sums.get(name, 0.0) + (end - begin) / 1e9
    for name, seconds in _waited_inside(tasks, [*waits, *(interval[1:] for interval in recomputed)]):  # own work alone
        sums[name] -= seconds
    for name, seconds in _waited_inside(recomputed, waits) if recomputed else ():
        sums[name] -= seconds
    if step.ahead_ns:
        sums["host_ahead_s"] = step.ahead_ns / 1e9
    sums["cpu_s"] = step.cpu_ns / 1e9
    return StepSums(step.step, sums)


def _waited_inside(tasks: list[tuple[str, int, int]], waits: list[tuple[int, int]]) -> Iterator[tuple[str, float]]:
    """Yield the seconds of each wait that are within a task, each instant once; tasks do not overlap, and waits may be nested."""
    tasks.sort(key=itemgetter(1))
    index = until = 0
    for begin, end in sorted(waits):
        begin, until = max(begin, until), max(until, end)
        while index < len(tasks) and tasks[index][2] <= begin:
            index += 1
        if index == len(tasks):
            return
        name, start, stop = tasks[index]
        inside = max(begin, start)
        if end > inside:
            yield name, (min(end, stop) - inside) / 1e9


STRAGGLES = 1.25
"""Own time of a straggler over the median of the other ranks of its stage."""
WORTH = 0.05
"""Part of a step from which on a difference is worth a word."""
MOST_STEPS = 0.7
"""Part of the steps in which a straggler takes longer."""
WINDOW = 20
"""Steps after which ranks are compared."""
_DEVICE_WORK = ("forward_s", "backward_s", "recompute_s", "update_s")


class _Store(Protocol):
    """What is used of torch's store."""

    def set(self, key: str, value: str) -> Any: ...
    def check(self, keys: list[str]) -> bool: ...
    def multi_get(self, keys: list[str]) -> list[bytes]: ...


def straggler_among(
    own_s: Mapping[int, Sequence[float]], stages: Mapping[int, int], step_s: float
) -> tuple[int, float] | None:
    """Return the rank whose work, without waits, takes longer than that of its peers in most steps, and by how many seconds; None if none does.

    Args:
        own_s: seconds of each rank's own work, step by step, equally many of each.
        stages: the pipeline stage of each rank, since ranks of other stages have other work.
        step_s: seconds of a step.
    """
    worst: tuple[int, float] | None = None
    for rank, seconds in own_s.items():
        peers = [other for other in own_s if other != rank and stages[other] == stages[rank]]
        if not peers or not seconds:
            continue
        usual = [statistics.median(own_s[peer][index] for peer in peers) for index in range(len(seconds))]
        more = [value - other for value, other in zip(seconds, usual, strict=True)]
        pairs = zip(more, usual, strict=True)
        far = [excess > max((STRAGGLES - 1) * other, WORTH * step_s) for excess, other in pairs]
        if sum(far) > MOST_STEPS * len(far) and (worst is None or statistics.median(more) > worst[1]):
            worst = rank, statistics.median(more)
    return worst


class StragglerWatch:
    """The watch of one rank; that of rank 0 names a straggler, each rank at most once in a run."""

    def __init__(self, rank: int, stages: Sequence[int], store: _Store, *, is_gpu: bool) -> None:
        """Watch a rank; `stages` are those of all ranks."""
        self._rank, self._stages, self._store, self._is_gpu = rank, stages, store, is_gpu
        self._own_s: list[float] = []
        self._named: set[int] = set()
        self._last = 0

    def step(self, sums: StepSums, step_s: float) -> dict[str, Any]:
        """Add a step whose sums are known; return on rank 0 the straggler that was found, if there is a new one, as JSON values."""
        if sums.step == self._last:
            return {}
        self._last = sums.step
        names = _DEVICE_WORK if self._is_gpu else ("cpu_s",)
        self._own_s.append(sum(sums.values.get(name, 0.0) for name in names))
        if len(self._own_s) < WINDOW:
            return {}
        own_s, self._own_s = self._own_s, []
        self._store.set(_key(self._rank), json.dumps([socket.gethostname(), own_s]))
        return {} if self._rank else self._compare(self._store, step_s)

    def _compare(self, store: _Store, step_s: float) -> dict[str, Any]:
        """Return the straggler among what ranks have written last, which is of this window or of the one before."""
        keys = [_key(rank) for rank in range(len(self._stages))]
        if not store.check(keys):
            return {}
        read = [json.loads(text) for text in store.multi_get(keys)]
        straggler = straggler_among(
            {rank: seconds for rank, (_, seconds) in enumerate(read)}, dict(enumerate(self._stages)), step_s
        )
        if straggler is None or straggler[0] in self._named:
            return {}
        rank, more_s = straggler
        self._named.add(rank)
        return {
            "rank": rank,
            "host": read[rank][0],
            "step": self._last,
            "more_s": round(more_s, 6),
            "of_step": round(more_s / step_s, 4),
        }


def describe_stragglers(straggler: Mapping[str, Any]) -> str:
    """Return the line about a straggler that a person reads."""
    return (
        f"rank {straggler['rank']} on {straggler['host']} is slow: up to step {straggler['step']} its own work took {1e3 * straggler['more_s']:.1f} ms "
        f"longer than the work of the other ranks ({straggler['of_step']:.0%} of a step), and they wait for it. Use samestep doctor and samestep explain"
    )


def _key(rank: int) -> str:
    return f"samestep/own-work/{rank}"
