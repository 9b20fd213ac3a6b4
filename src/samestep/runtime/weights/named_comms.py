"""The all_gather and reduce_scatter of an FSDP2 unit, issued under the unit's name, by which a recorder knows them."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter

from samestep.runtime.ledger import owned


class NamedAllGather(DefaultAllGather):
    """The all_gather of FSDP2, under a name."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        """Issue it as FSDP2 does; collective over the unit's axis."""
        with owned(self._name, "all_gather") as issue:
            work: dist.Work | None = issue.sent(super().__call__(output_tensor, input_tensor, group, async_op))
        return work


class NamedReduceScatter(DefaultReduceScatter):
    """The reduce_scatter of FSDP2, under a name."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> Any:
        """Issue it as FSDP2 does; collective over the unit's axis."""
        with owned(self._name, "reduce_scatter") as issue:
            return issue.sent(super().__call__(output_tensor, input_tensor, group, op, async_op))
