"""What the weights of replicas that are trained apart have moved by, in buckets, summed between them (`local_replicas.py`).

The gradients of a bucket are the buffer in which moves are written down. Where steps go on while an exchange is under way they
need it themselves, so that the moves are copied to one of their own, which lives from the start of the exchange to its end.

```
moves of a part's weights ─► gradients ─► (a buffer of its own) ─► exchange ─► ... steps ... ─► gradients
```
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor

from samestep.program.buckets import Bucket
from samestep.program.exchange_times import Phase
from samestep.program.program import Program
from samestep.runtime.codecs.exchange import Exchange
from samestep.runtime.ledger import owned


@dataclass(slots=True)
class _BucketMoves:
    """The moves of one bucket's weights."""

    bucket: Bucket
    exchange: Exchange
    gradients: Tensor
    """Those of the weights that this rank updates: all, or its chunk of them under zero=1."""
    moves: Tensor | None = None
    """What is exchanged, between the start and the end of it."""
    work: dist.Work | None = None

    def wait(self) -> None:
        """Wait for what was sent last."""
        if self.work is not None:
            self.work.wait()
            self.work = None


class ExchangedMoves:
    """The exchanges of all buckets of a rank, by parts of the weights."""

    def __init__(self, program: Program, buckets: Iterable[tuple[Bucket, Exchange, Tensor]]) -> None:
        """Exchange the gradients of buckets, of each those that this rank updates."""
        self._program = program
        self._moved = [_BucketMoves(*bucket) for bucket in buckets]

    def _of(self, part: int) -> list[_BucketMoves]:
        return [moved for moved in self._moved if moved.bucket.part == part]

    def start(self, part: int, fill: Callable[[int], None]) -> None:
        """Start to sum what `fill` writes into the gradients; collective as `WeightStore.start_exchange` says."""
        mine, step = self._of(part), self._program.step
        is_hidden = step.exchange_delay > 0
        kept = [moved.gradients.clone() for moved in mine] if is_hidden else []
        for moved in mine:
            moved.exchange.begin_step()
        for index in range(step.replicas_each):
            fill(index)
            for moved in mine if index < step.replicas_each - 1 else ():
                moved.exchange.add([moved.gradients])
        for moved in mine:
            moved.moves = moved.gradients.clone() if is_hidden else moved.gradients
        for moved, before in zip(mine, kept, strict=is_hidden):
            moved.gradients.copy_(before)
        self.send(part, Phase.START)

    def send(self, part: int, phase: Phase) -> None:
        """Issue the collectives of one phase; collective as `WeightStore.start_exchange` says."""
        mine = {moved.bucket.name: moved for moved in self._of(part)}
        for op in self._program.exchanges[part][phase] if self._program.exchanges else ():
            if op.axis is None:
                continue
            moved = mine[op.owner]
            assert moved.moves is not None, "an exchange that has not started"
            moved.wait()
            with owned(op.owner):
                moved.work = moved.exchange.send([moved.moves])

    def end(self, part: int) -> None:
        """Wait for an exchange, and set the gradients to its sums."""
        for moved in self._of(part):
            assert moved.moves is not None, "an exchange that has not started"
            moved.wait()
            moved.exchange.finish([moved.moves])
            if moved.moves is not moved.gradients:
                moved.gradients.copy_(moved.moves)
            moved.moves = None
