"""PowerSGD decodes what PyTorch's own hook decodes, from the same gradients and the same first directions."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as powersgd

from samestep.program.codecs import CodedPart, Matrix
from samestep.wings.slow_links.powersgd import FactoredExchange
from tests.pool import pool

ROWS, COLUMNS, RANK, PLAIN, STEPS = 24, 18, 3, 5, 6


class Bucket:
    """What the hook asks of a bucket of DistributedDataParallel."""

    def __init__(self, buffer: Tensor) -> None:
        self._buffer = buffer

    def buffer(self) -> Tensor:
        return self._buffer

    def gradients(self) -> Sequence[Tensor]:
        matrix, plain = self._buffer.split([ROWS * COLUMNS, PLAIN])
        return [matrix.view(ROWS, COLUMNS), plain]

    def index(self) -> int:
        return 0

    def is_last(self) -> bool:
        return True


def decoded(rank: int, world: int) -> tuple[list[Tensor], list[Tensor]]:
    """Take steps of the hook and of an exchange on this rank's gradients; return the sums that each decodes."""
    state = powersgd.PowerSGDState(
        None, matrix_approximation_rank=RANK, start_powerSGD_iter=2, min_compression_rate=1, random_seed=7
    )
    state.iter = 2
    part = CodedPart(ROWS * COLUMNS + PLAIN, 1, (Matrix("weight", 0, ROWS, COLUMNS, RANK),))
    like = torch.empty(0, dtype=torch.float64)
    exchange = FactoredExchange(part, dist.group.WORLD, like, gathers=True)
    (directions,) = exchange.directions()
    generator = torch.Generator().manual_seed(int(np.random.RandomState(7).randint(1_000_000_000)))  # as the hook draws
    directions.values.copy_(torch.randn(COLUMNS, RANK, generator=generator, dtype=torch.float64).T)
    theirs, ours = [], []
    draw = torch.Generator().manual_seed(rank)
    for _ in range(STEPS):
        gradient = torch.randn(part.numel, generator=draw, dtype=torch.float64)
        theirs.append(world * powersgd.powerSGD_hook(state, Bucket(gradient.clone())).wait().clone())
        for _ in range(2):
            exchange.send([gradient]).wait()
        exchange.finish([gradient])
        ours.append(gradient)
    return theirs, ours


def test_torch_s_hook_decodes_the_same() -> None:
    for theirs, ours in pool(2).run(decoded):
        assert len(ours) == STEPS
        for hook, exchange in zip(theirs, ours, strict=True):
            assert torch.allclose(hook, exchange, rtol=0, atol=1e-10)
