"""The order of ranks: those of one host are neighbours, whatever order the launcher counts them in.

A launcher may count ranks in blocks, in turn over the hosts (Slurm's `cyclic`) or by address (Ray). Tensor parallelism is the
innermost axis, so its ranks are neighbours, and these should share a host. Before the process group is made, all ranks
therefore tell the store their host and their local rank, and rank 0 numbers them anew:

    launcher    0 a   1 b   2 a   3 b            host a: 0 and 2, host b: 1 and 3
    here        0 a   2 b   1 a   3 b            host a: 0 and 1, host b: 2 and 3

Hosts keep the order of their first ranks, so a launcher's order in blocks stays, and rank 0 stays rank 0. The launcher's
variables stay as they are. A host is known by its launcher's name for it, its own name and the start of its system.

In a process group that a user or Ray has made, the numbers are given. A layout is refused there if its tensor parallelism leaves
hosts within which our order would keep it.
"""

from __future__ import annotations

import json
import os
import secrets
import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]

from samestep.building.torch_seams import names_of_groups
from samestep.errors import JobError, LayoutError, WorkerError
from samestep.layout import Layout
from samestep.runtime.processes.launch_info import UNKNOWN, LaunchInfo, host_of

_CAME, _PLACE, _REFUSED = "samestep/came", "samestep/place", "samestep/refused"
_LONGEST_PAUSE_S = 0.5
_MOST_SHOWN = 8


class Seat(NamedTuple):
    """The host and the local rank of one process, in the order of the launcher's ranks."""

    host: str
    local_rank: int


@dataclass(frozen=True)
class Numbering:
    """The number of every rank, by the launcher's."""

    ranks: tuple[int, ...]
    local_ranks: tuple[int, ...]
    hosts: tuple[int, ...]
    """The host of each rank of the launcher, counted from 0."""
    ranks_per_node: int
    """The ranks of every host; 1 where they differ."""

    @classmethod
    def of(cls, seats: Sequence[Seat]) -> Numbering:
        """Number the processes so that those of one host are neighbours."""
        first: dict[str, int] = {}
        for seat in seats:
            first.setdefault(seat.host, len(first))
        hosts = tuple(first[seat.host] for seat in seats)
        order = sorted(range(len(seats)), key=lambda rank: (hosts[rank], seats[rank].local_rank, rank))
        ranks, local_ranks, counts = [0] * len(seats), [0] * len(seats), [0] * len(first)
        for number, rank in enumerate(order):
            ranks[rank], local_ranks[rank] = number, counts[hosts[rank]]
            counts[hosts[rank]] += 1
        return cls(tuple(ranks), tuple(local_ranks), hosts, counts[0] if len({*counts}) == 1 else 1)

    def to_text(self, launcher: str, names: Sequence[str]) -> str:
        """Return the ranks of every host as one line, with the launcher's numbers where they differ."""
        num_hosts = len({*self.hosts})
        by_host: list[list[int]] = [[] for _ in range(num_hosts)]
        for rank, host in enumerate(self.hosts):
            by_host[host].append(rank)
        parts, first = [], 0
        for host, theirs in enumerate(by_host[:_MOST_SHOWN]):
            last = first + len(theirs) - 1
            ours = str(first) if first == last else f"{first} to {last}"
            inner = [rank for _, rank in sorted((self.ranks[rank], rank) for rank in theirs)]
            differs = inner != [*range(first, last + 1)]
            shown = ", ".join(map(str, inner[:_MOST_SHOWN])) + (", ..." if len(inner) > _MOST_SHOWN else "")
            parts.append(f"{names[host]} {ours}" + (f" (RANK {shown})" if differs else ""))
            first = last + 1
        more = "; ..." if num_hosts > _MOST_SHOWN else ""
        on = f"on {num_hosts} hosts" if num_hosts > 1 else "on one host"
        return f"{len(self.ranks)} ranks by {launcher}, {on}: {'; '.join(parts)}{more}"


def agree(store: Store, info: LaunchInfo, timeout_s: float) -> tuple[int, int, int, str]:
    """Return this process's rank, its local rank, the ranks per node, and on rank 0 the order as a line of text.

    Collective over the world, by the store alone: every process calls it; if one does not, the others wait for `timeout_s`.

    Raises:
        JobError: a rank was given to two processes.
        WorkerError: a rank did not come in time.
    """
    end_s, (name, key) = time.monotonic() + timeout_s, host_of(info)
    seat = json.dumps([key, info.local_rank, name, os.getpid(), secrets.token_hex(4)])
    came = store.compare_set(f"{_CAME}/{info.rank}", "", seat).decode()
    if came != seat:
        _, _, other, pid, _ = json.loads(came)
        text = f"rank {info.rank} was given to two processes, {pid} on {other} and {os.getpid()} on {name}. Use a RANK of its own for each"
        store.set(_REFUSED, text)
        raise JobError("launcher-variables", f"{text} ({info.launcher})")
    text = _number_all(store, info, end_s) if info.rank == 0 else ""
    _wait_for(store, f"{_PLACE}/{info.rank}", end_s)
    rank, local_rank, per_node = json.loads(store.get(f"{_PLACE}/{info.rank}"))
    return rank, local_rank, per_node, text


def _number_all(store: Store, info: LaunchInfo, end_s: float) -> str:
    """Number all ranks that come, and tell each through the store; return the order as a line of text."""
    told = []
    for rank in range(info.world_size):
        _wait_for(store, f"{_CAME}/{rank}", end_s)
        told.append(json.loads(store.get(f"{_CAME}/{rank}")))
    numbering = Numbering.of([Seat(key, local) for key, local, *_ in told])
    for rank in range(info.world_size):
        place = [numbering.ranks[rank], numbering.local_ranks[rank], numbering.ranks_per_node]
        store.set(f"{_PLACE}/{rank}", json.dumps(place))
    names = {numbering.hosts[rank]: name for rank, (_, _, name, *_) in enumerate(told)}
    return numbering.to_text(info.launcher, [names[host] for host in range(len(names))])


def _wait_for(store: Store, key: str, end_s: float) -> None:
    """Wait until a key is there, and no longer than some process says why the ranks cannot be numbered.

    Raises:
        JobError: one says why.
        WorkerError: the key did not come in time.
    """
    pause_s = 0.005
    while not store.check([key]):
        if store.check([_REFUSED]):
            text = store.get(_REFUSED).decode()
            time.sleep(2 * _LONGEST_PAUSE_S)  # rank 0 holds the store, in which the others read it too
            raise JobError("launcher-variables", text)
        if time.monotonic() > end_s:
            raise WorkerError("ranks-not-met", "the time is over")
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


def never_came(store: Store | None, world_size: int) -> str:
    """Return the ranks that never reached the store, as text; empty where all did, or where the store is gone too."""
    absent = []
    try:
        absent = [rank for rank in range(world_size) if store is None or not store.check([f"{_CAME}/{rank}"])]
    except RuntimeError:
        return ""
    if not absent or len(absent) == world_size:
        return ""
    more = ", ..." if len(absent) > 8 else ""
    return f"rank{'s' * (len(absent) > 1)} {', '.join(map(str, absent[:8]))}{more} never came"


def of_existing_group(info: LaunchInfo, device: torch.device) -> tuple[Numbering, bool]:
    """Return the numbers that the ranks of an existing process group would have in our order, and whether a rank has more groups.

    Collective over the world, see [Note: collective calls].
    """
    _, key = host_of(info)
    where = device if "nccl" in dist.get_backend() else torch.device("cpu")
    local = info.local_rank if info.world_size == dist.get_world_size() else UNKNOWN
    seat = torch.tensor([zlib.crc32(key.encode()), local, len(names_of_groups())], device=where)
    told = [torch.empty_like(seat) for _ in range(dist.get_world_size())]
    dist.all_gather(told, seat)
    rows = [tensor.tolist() for tensor in told]
    return Numbering.of([Seat(str(host), local) for host, local, _ in rows]), any(groups > 1 for *_, groups in rows)


def check(layout: Layout, hosts: Sequence[int]) -> None:
    """Refuse a layout whose tensor parallelism leaves hosts in the order of an existing process group, and not in ours.

    Args:
        layout: the layout.
        hosts: the host of each rank of the group; empty where the ranks of each host are neighbours.

    Raises:
        LayoutError: it leaves them; the text gives the order that works.
    """
    together = layout.model_ranks
    if not hosts or together == 1 or together * (len(hosts) // together) != len(hosts):
        return
    if not _leaves(hosts, together) or _leaves(sorted(hosts), together):
        return
    order = sorted(range(len(hosts)), key=lambda rank: (hosts[rank], rank))
    shown = ", ".join(map(str, order[:16])) + (", ..." if len(order) > 16 else "")
    raise LayoutError(
        "tp-leaves-hosts",
        f"tp={layout.tp} of layout {str(layout)!r} leaves its hosts in the process group that exists: the ranks of one host are not neighbours in it. Use a group in the order {shown} of its ranks, or "
        "no group: samestep makes its own",
    )


def _leaves(hosts: Sequence[int], together: int) -> bool:
    return any(len({*hosts[first : first + together]}) > 1 for first in range(0, len(hosts), together))
