"""The process groups of this process: the only file that creates them, once for all runs.

A plain `dp=2` needs none but the world, which torch has made. On NCCL all groups of an axis are created by one split of the
world, in which every rank takes part; gloo creates each by itself.
"""

from __future__ import annotations

import datetime
from collections.abc import Sequence

import torch.distributed as dist

_made: dict[tuple[str, float, tuple[tuple[int, ...], ...]], dist.ProcessGroup | None] = {}
"""Process groups of this process by name, time limit and ranks, the world among them."""
_WORLD = ("world", 0.0, ())


def group_among(
    parts: Sequence[tuple[int, ...]], name: str, timeout_s: float, description: str | None = None
) -> dist.ProcessGroup | None:
    """Return the process group of that part which has this rank; None where none has.

    No rank is in two parts. The groups are made once for all runs of a process, since each has threads or device memory.

    Collective over the world: every rank asks for the same parts in one order; if one does not, the others wait until
    the time limit.
    """
    world = dist.group.WORLD
    assert world is not None
    if _made.get(_WORLD) is not world:  # groups of a world that its user has destroyed
        forget_groups()
        _made[_WORLD] = world
    if not name and [*parts] == [tuple(range(world.size()))]:
        return world
    described, limit = description or name or None, datetime.timedelta(seconds=timeout_s)
    whole = (name, timeout_s, tuple(parts))
    if _can_be_split(world):
        if whole not in _made:
            _made[whole] = dist.split_group(
                split_ranks=[list(ranks) for ranks in parts], timeout=limit, group_desc=described
            )
        return _made[whole]
    mine = None
    for ranks in parts:
        one = (name, timeout_s, (ranks,))
        if one not in _made:
            _made[one] = dist.new_group(list(ranks), timeout=limit, group_desc=described)
        mine = _made[one] if world.rank() in ranks else mine
    return mine


def _can_be_split(world: dist.ProcessGroup) -> bool:
    """Return whether groups are created by splitting, as NCCL's of a known device can be; a user's may have none."""
    return dist.get_backend(world) == "nccl" and world.bound_device_id is not None


_num_forgotten = 0


def forget_groups() -> None:
    """Forget all groups, so that the next run creates new ones: after the world was destroyed, or a step failed
    among messages."""
    global _num_forgotten
    _made.clear()
    _num_forgotten += 1


def num_forgotten() -> int:
    """Return how often this process has forgotten its groups."""
    return _num_forgotten


def forget_as_often(most: int) -> None:
    """Forget all groups if another rank did so more often: a group is created by all of its ranks or by none."""
    global _num_forgotten
    if _num_forgotten < most:
        _made.clear()
        _num_forgotten = most
