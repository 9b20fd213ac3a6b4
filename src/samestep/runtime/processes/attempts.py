"""Which attempt of a run this is, where the store outlives attempts: the addresses of dead ranks must not be found in it.

torchrun's agents keep one store over all restarts (torch 2.13), and each agent counts restarts by itself, so that on several
machines no variable names the attempt. The ranks agree on a name through the store, which may hold what dead ranks wrote:

    rank r    writes a new word of its own, under r
    rank 0    publishes the words that it finds, with a name that it has made up, until every rank has taken the name
    rank r    takes the name that is published with its own word, and says so under the name
"""

from __future__ import annotations

import json
import secrets
import time

from torch.distributed import Store  # type: ignore[attr-defined]

from samestep.errors import WorkerError

_EVERY_S = 0.05


def agreed_name(store: Store, rank: int, world_size: int, timeout_s: float) -> str:
    """Return the name of this attempt, which no other attempt has.

    Every rank calls it; if one does not, the others wait for `timeout_s`.

    Raises:
        WorkerError: a rank did not come in time.
    """
    word, name, end_s = secrets.token_hex(8), secrets.token_hex(8), time.monotonic() + timeout_s
    store.set(f"word/{rank}", word)
    taken = [f"taken/{name}/{other}" for other in range(1, world_size)]
    while True:
        if rank == 0:
            words = {other: _read(store, f"word/{other}") for other in range(1, world_size)}
            store.set("published", json.dumps({"name": name, "words": words}))
            if all(store.check([key]) for key in taken):
                return name
        elif found := _read(store, "published"):
            published = json.loads(found)
            if published["words"].get(str(rank)) == word:
                store.set(f"taken/{published['name']}/{rank}", "1")
                return str(published["name"])
        if time.monotonic() > end_s:
            absent = [key.rpartition("/")[2] for key in taken if rank == 0 and not store.check([key])]
            who = f"rank {', '.join(absent[:8])}" if absent else "rank 0"
            raise WorkerError(f"{who} did not come to the store within {timeout_s:g} s")
        time.sleep(_EVERY_S)


def _read(store: Store, key: str) -> str:
    """Return the text of a key; empty where there is none."""
    return store.get(key).decode() if store.check([key]) else ""
