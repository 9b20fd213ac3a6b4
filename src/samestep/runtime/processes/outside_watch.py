"""The hang watch of ranks that torchrun or srun started: without a parent of ours, they tell each other how far they have come.

Every rank writes its whereabouts into the store where the ranks met, each second, as JSON. Rank 0 reads them all; the last
rank does so too, and speaks where rank 0 does not answer. Who watches names a rank that stands still, and after `run.hang_s`
ends its own process with that text, upon which the launcher ends, or restarts, all others. Where the store itself does not
answer (its process stands still, or its host is gone), each rank that does not move ends itself after `run.hang_s`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import json
import os
import sys
import threading
import time
from collections.abc import Iterator

from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from samestep.errors import WorkerError
from samestep.runtime.processes.hang_watch import HangWatch
from samestep.runtime.processes.join import RankInfo
from samestep.runtime.processes.launchers import launch_info_from
from samestep.runtime.processes.whereabouts import Whereabouts, whereabouts_of

_EVERY_S = 1.0
_SILENT_S = 4.0  # seconds without news of rank 0 after which the last rank speaks


@contextlib.contextmanager
def watching(place: RankInfo, hang_s: float, name: str) -> Iterator[None]:
    """Watch the ranks of a run while it is carried out.

    Every rank calls it, with one `name` that no other start of the run has.
    """
    info = launch_info_from(os.environ)
    if place.world_size == 1 or not info.host:
        yield
        return
    watch = _Watch(place, hang_s, f"{info.host}:{info.port}")
    # A connection of its own: a call of the process group may hold the other one for long.
    limit = datetime.timedelta(seconds=hang_s)
    store = PrefixStore(f"watch/{name}", TCPStore(info.host, info.port, is_master=False, timeout=limit))
    telling = threading.Thread(target=watch.tell, args=(store,), daemon=True)
    guarding = threading.Thread(target=watch.guard, daemon=True)
    for thread in (telling, guarding):
        thread.start()
    try:
        yield
    finally:
        watch.is_over.set()
        telling.join(2 * _EVERY_S)


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
        """Write how far this rank has come, and where it watches read how far the others have, until the run is over."""
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
        watch = HangWatch(
            2, self._hang_s
        )  # of this rank and of the store, which answers by a thread of its own in a save too
        while not self.is_over.wait(_EVERY_S):
            now, at = time.monotonic(), whereabouts_of(self._main_thread)
            watch.hear(0, at, now)
            if now - self._store_s < _SILENT_S:
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
        speaks = self._place.rank == 0 or now - self._rank_0_s > _SILENT_S
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
