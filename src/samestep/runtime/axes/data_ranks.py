"""What the ranks that read different samples send each other within a forward or a backward, in a group that serves nothing else."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from samestep.runtime.axes.rank_crossings import GroupLine
from samestep.runtime.ledger import OwnedCollectives, owned
from samestep.runtime.processes.mesh import Mesh, all_gather

AXIS = "dp"


class DataRanks:
    """The ranks that read different samples."""

    def __init__(self, mesh: Mesh, num_ranks: int) -> None:
        self._group, self.num_ranks = mesh.groups.get(AXIS), num_ranks
        self.index = mesh.index(AXIS) if num_ranks > 1 else 0

    @property
    def send(self) -> bool:
        """Whether there are several, which exchange something."""
        return self._group is not None

    def gather(self, tensor: Tensor, owner: str) -> Tensor:
        """Return the tensors of all ranks, concatenated along the first dimension.

        Collective over `dp`, see [Note: collective calls].
        """
        if self._group is None:
            return tensor
        return GroupLine(self._group, owner).all_gather(tensor)

    def gather_into(self, everything: Tensor, tensor: Tensor, label: OwnedCollectives) -> None:
        """Write the tensors of all ranks [N] one after the other into another one, under a label that is prepared once.

        Collective over `dp`, see [Note: collective calls].
        """
        with label:
            all_gather(everything, tensor, group=self._group)

    def sum_under(self, tensor: Tensor, label: OwnedCollectives) -> None:
        """Sum a tensor over all ranks, in its place, under a label that is prepared once.

        Collective over `dp`, see [Note: collective calls].
        """
        with label:
            dist.all_reduce(tensor, group=self._group)

    def gather_rows(self, rows: Tensor, sizes: list[int], owner: str) -> Tensor:
        """Return the rows of all ranks, of which each has as many as `sizes` says.

        Collective over `dp`, see [Note: collective calls].
        """
        if self._group is None:
            return rows
        most = max(sizes)
        if len(rows) < most:
            rows = torch.cat([rows, rows.new_zeros(most - len(rows), *rows.shape[1:])])
        everything = self.gather(rows, owner)
        if min(sizes) == most:
            return everything
        return torch.cat([everything[rank * most : rank * most + size] for rank, size in enumerate(sizes)])

    def sum(self, tensor: Tensor, owner: str) -> Tensor:
        """Sum a tensor over all ranks, in its place, and return it.

        Collective over `dp`, see [Note: collective calls].
        """
        if self._group is not None:
            with owned(owner):
                dist.all_reduce(tensor, group=self._group)
        return tensor
