"""Settings of a rank for its host: cores near its GPU, host memory that is kept, the name of the attempt.

Cores: Linux lists, for each PCI device, the cores of the same NUMA node. A rank is bound to those near its GPU, so that
transfers cross no link between processors. Memory follows: a page belongs to the node of the core that writes it first.

Attempt: torchrun's agents keep one store over all restarts (torch 2.13), and each agent counts restarts by itself, so
that on several machines no variable names the attempt, and the addresses of dead ranks must not be found in the store.
The ranks agree on a name through it:

    rank r    writes a new random word under r
    rank 0    publishes the words that it finds, with a new name, until every rank has taken the name
    rank r    takes the name that is published with its word, and says so under the name

Memory: tensors on a CPU are in the heap of the C library. glibc returns free memory at the heap's end to the system
once it exceeds twice the largest tensor freed so far, and every 4 KiB page of it costs a fault when the next step
writes it again: up to 36,000 faults, 0.15 s of a step of 0.87 s. A rank therefore has glibc return nothing. Its peak
stays the same; between two steps it holds that peak. Source: mallopt(3). Other C libraries and allocators keep their
rules.
"""

from __future__ import annotations

import ctypes
import json
import os
import secrets
import time
from pathlib import Path

import torch
from torch.distributed import Store  # type: ignore[attr-defined]

from samestep.errors import WorkerError

_PCI = Path("/sys/bus/pci/devices")


def bind_near(device: torch.device, devices: Path = _PCI) -> None:
    """Bind this process to those of its cores that are near a GPU, where the system lists these."""
    if device.type != "cuda" or not hasattr(os, "sched_setaffinity"):
        return
    allowed = os.sched_getaffinity(0)
    near = cores_near(torch.cuda.get_device_properties(device), devices) & allowed
    if near and near != allowed:
        os.sched_setaffinity(0, near)


def cores_near(properties: object, devices: Path = _PCI) -> set[int]:
    """Return the cores of the node to which a GPU is connected, by its properties; empty where the system does not
    list them."""
    domain, bus, slot = (getattr(properties, f"pci_{part}_id", -1) for part in ("domain", "bus", "device"))
    path = devices / f"{domain:04x}:{bus:02x}:{slot:02x}.0" / "local_cpulist"
    try:
        return _cores(path.read_text())
    except (OSError, ValueError):  # no such file in a container, or another form
        return set()


def _cores(text: str) -> set[int]:
    """Return the numbers of a list such as 0-3,8."""
    spans = [span.partition("-") for span in text.strip().split(",") if span]
    return {core for first, _, last in spans for core in range(int(first), int(last or first) + 1)}


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
            raise WorkerError("ranks-not-met", f"{who} did not come to the store within {timeout_s:g} s")
        time.sleep(_EVERY_S)


def _read(store: Store, key: str) -> str:
    """Return the text of a key; empty where there is none."""
    return store.get(key).decode() if store.check([key]) else ""


_TRIM_THRESHOLD = -1
"""M_TRIM_THRESHOLD of malloc.h."""
_MMAP_THRESHOLD = -3
"""M_MMAP_THRESHOLD of malloc.h."""
_NEVER = -1
"""As an unsigned number of bytes, more than any heap has."""
_LARGEST_IN_HEAP_BYTES = 32 << 20
"""What glibc allows on 64 bits; greater tensors are mapped one by one."""
_OF_THE_USER = {"MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_"}


def keep_freed_memory() -> bool:
    """Let glibc keep what this process frees, unless the user has set thresholds; return whether it does so now."""
    if _OF_THE_USER & os.environ.keys() or "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", ""):
        return False
    library = ctypes.CDLL(None)
    if not hasattr(library, "gnu_get_libc_version"):
        return False
    is_set = library.mallopt(_TRIM_THRESHOLD, _NEVER) and library.mallopt(_MMAP_THRESHOLD, _LARGEST_IN_HEAP_BYTES)
    return bool(is_set)
