"""Stragglers: a rank whose work, without waits, takes longer than that of the other ranks of its stage, found during a run.

A wait says who is late, and not why: other load on a machine makes every rank late at times. So ranks are judged by what they compute
themselves, on a CPU the processor time of their main thread, on a GPU the seconds of their tasks on the device. Of the steps of a window

    straggler   own time > 1.25 x the median of its peers, and by more than 0.05 of a step, in more than 0.7 of the steps

Every `WINDOW` steps each rank writes its times to the store through which the ranks have met, and rank 0 reads those of all ranks: no
collective, and nobody waits.
"""

from __future__ import annotations

import json
import socket
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from samestep.runtime.recording.sums import StepSums

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
    for rank, mine in own_s.items():
        peers = [other for other in own_s if other != rank and stages[other] == stages[rank]]
        if not peers or not mine:
            continue
        usual = [statistics.median(own_s[peer][index] for peer in peers) for index in range(len(mine))]
        more = [own - other for own, other in zip(mine, usual, strict=True)]
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
        found = straggler_among(
            {rank: own for rank, (_, own) in enumerate(read)}, dict(enumerate(self._stages)), step_s
        )
        if found is None or found[0] in self._named:
            return {}
        rank, more_s = found
        self._named.add(rank)
        return {
            "rank": rank,
            "host": read[rank][0],
            "step": self._last,
            "more_s": round(more_s, 6),
            "of_step": round(more_s / step_s, 4),
        }


def describe(found: Mapping[str, Any]) -> str:
    """Return the line about a straggler that a person reads."""
    return (
        f"rank {found['rank']} on {found['host']} is slow: up to step {found['step']} its own work took {1e3 * found['more_s']:.1f} ms "
        f"longer than that of the other ranks ({found['of_step']:.0%} of a step), and they wait for it; samestep doctor and samestep explain say more"
    )


def _key(rank: int) -> str:
    return f"samestep/own-work/{rank}"
