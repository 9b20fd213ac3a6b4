"""Whole updates on real weights (twin of `strategies/whole_update.py`): gradients go to owners, updated rows come back.

A rank lends its rows of each weight and of its gradient; the owner of a weight has a whole copy of both. Two buffers of
equal windows, one for each rank of the axis, carry them.

```
send      │ my rows of rank 0's weights │ my rows of rank 1's weights │
receive   │ rank 0's rows of my weights │ rank 1's rows of my weights │
```
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from samestep.program.owners import Owned, Owners
from samestep.runtime.ledger import owned
from samestep.runtime.processes.mesh import Mesh
from samestep.strategies.whole_update import GRADIENTS, WEIGHTS


@dataclass(slots=True)
class Lent:
    """This rank's rows of a weight, and of its gradient."""

    value: Tensor
    gradient: Callable[[], Tensor]


@dataclass(slots=True)
class OwnedWeights:
    """The weights of one axis that are updated whole: rows that this rank lends, and weights that it owns."""

    owners: Owners
    mesh: Mesh
    dtype: torch.dtype
    lent: dict[str, Lent] = field(default_factory=dict)
    values: dict[str, Tensor] = field(default_factory=dict)
    """Whole copies of the weights that this rank owns, which the optimizer updates."""
    gradients: dict[str, Tensor] = field(default_factory=dict)
    """Their whole gradients."""

    def is_mine(self, name: str) -> bool:
        """Return whether this rank owns a weight."""
        index = self.mesh.index(self.owners.axis)
        return any(member.name == name and member.owner == index for member in self.owners.members)

    def gather(self) -> None:
        """Bring every gradient to the owner of its weight.

        Collective over the axis: if a rank does not call it, the others wait until the time limit.
        """
        send = self._buffer()
        for member in self.owners.members:
            part = self.lent[member.name].gradient()
            self._window(send, member.owner, member)[: part.numel()] = part.flatten()
        received = self._exchange(send, GRADIENTS)
        for member in self._mine():
            whole = self.gradients[member.name].view(-1)
            for rank, (start, stop) in enumerate(self._parts(member)):
                whole[start:stop] = self._window(received, rank, member)[: stop - start]

    @torch.no_grad()
    def scatter(self) -> None:
        """Send the rows of every updated weight to the ranks that hold them.

        Collective over the axis: if a rank does not call it, the others wait until the time limit.
        """
        send = self._buffer()
        for member in self._mine():
            whole = self.values[member.name].detach().reshape(-1)
            for rank, (start, stop) in enumerate(self._parts(member)):
                # The copies are on the host under offload; the next update waits for the device before it writes them.
                self._window(send, rank, member)[: stop - start].copy_(whole[start:stop], non_blocking=True)
        received = self._exchange(send, WEIGHTS)
        for member in self.owners.members:
            part = self.lent[member.name].value
            part.copy_(self._window(received, member.owner, member)[: part.numel()].view_as(part))

    def _mine(self) -> list[Owned]:
        index = self.mesh.index(self.owners.axis)
        return [member for member in self.owners.members if member.owner == index]

    def _parts(self, member: Owned) -> list[tuple[int, int]]:
        """Return the elements of the flattened weight that each rank holds."""
        ends = [min(rank * member.part_numel, member.numel) for rank in range(self.owners.ranks + 1)]
        return list(itertools.pairwise(ends))

    def _window(self, buffer: Tensor, rank: int, member: Owned) -> Tensor:
        start = rank * self.owners.window_numel + member.offset
        return buffer[start : start + member.part_numel]

    def _buffer(self) -> Tensor:
        size = self.owners.ranks * self.owners.window_numel
        return torch.zeros(size, dtype=self.dtype, device=self.mesh.device)

    def _exchange(self, send: Tensor, name: str) -> Tensor:
        received = torch.empty_like(send)
        with owned(f"{name} {self.owners.axis}"):
            dist.all_to_all_single(received, send, group=self.mesh.groups[self.owners.axis])
        return received
