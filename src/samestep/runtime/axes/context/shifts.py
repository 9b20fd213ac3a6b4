"""Messages to the next rank of a group, as an all_to_all in which each rank sends to one rank alone."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from samestep.runtime.ledger import owned


def shift(buffer: Tensor, group: dist.ProcessGroup, owner: str, by: int = 1) -> Callable[[], Tensor]:
    """Begin to send a buffer to the rank `by` places after this one; return a function that waits for that of the rank as far before.

    Collective over the group, see [Note: collective calls]: an all_to_all in which each rank sends to one rank alone.
    """
    degree, rank = dist.get_world_size(group), dist.get_rank(group)
    received = torch.empty_like(buffer)
    sends, receives = [0] * degree, [0] * degree
    sends[(rank + by) % degree] = receives[(rank - by) % degree] = buffer.numel()
    with owned(owner) as issue:
        work = issue.sent(
            dist.all_to_all_single(received.view(-1), buffer.view(-1), receives, sends, group=group, async_op=True)
        )
    assert work is not None

    def wait() -> Tensor:
        work.wait()
        return received

    return wait
