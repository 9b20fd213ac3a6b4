"""Exchanges between replicas that are trained independently: the moves of their weights, summed (`wings/slow_links/local_replicas.py`).

The gradients of a bucket are the buffer in which moves are written. Where steps go on while an exchange is under way they
need it themselves, so the moves are copied to a second buffer, which exists from the start of the exchange to its end.

```
moves of a part's weights ─► gradients ─► (second buffer) ─► exchange ─► ... steps ... ─► gradients
```
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor

from samestep.program.buckets import Bucket
from samestep.program.exchange_times import Phase
from samestep.program.program import Program
from samestep.runtime.codecs.exchange import Exchange
from samestep.runtime.ledger import owned
from samestep.runtime.weights.gradient_codes import BucketCodes, UnitCodes
from samestep.runtime.weights.pieces import Piece


class ReplicaExchange:
    """The sums of what the weights of replicas have moved by, part by part; none where all ranks train one model.

    `start`, `sum` and `end` of a part are called in this order, by every rank after the same steps.
    """

    def start(self, part: int, fill: Callable[[int], None]) -> None:
        """Start to sum, over all replicas, what `fill(index)` writes into the gradients of the store's pieces of a part.

        `fill` is called for each replica of this rank; unless the exchange ends after the same step, the gradients are
        restored. Collective over the axis of the program's contributions: see [Note: collective calls] in
        runtime/processes/mesh.py.
        """

    def sum(self, part: int) -> None:
        """Wait for what a started exchange sends, and issue the collectives that follow; collective as `start` is."""

    def end(self, part: int) -> None:
        """Wait for an exchange, and set the gradients of the store's pieces of the part to its sums; it sends nothing."""


@dataclass(slots=True)
class _BucketMoves:
    """The moves of one bucket's weights."""

    bucket: Bucket
    exchange: Exchange
    gradients: Tensor
    """Gradients of the weights that this rank updates: the whole bucket, or its chunk under zero=1."""
    moves: Tensor | None = None
    """The buffer that is exchanged, between the start and the end of the exchange."""
    work: dist.Work | None = None

    def wait(self) -> None:
        """Wait for the collective that was issued last."""
        if self.work is not None:
            self.work.wait()
            self.work = None


class BucketExchange(ReplicaExchange):
    """The `ReplicaExchange` of buckets."""

    def __init__(self, program: Program, codes: BucketCodes, gradients: Sequence[Tensor]) -> None:
        """Exchange the moves of the program's buckets; `gradients` are, for each bucket, those that this rank updates."""
        self._program = program
        self._moved = [
            _BucketMoves(bucket, codes.exchanges[bucket.name], one)
            for bucket, one in zip(program.buckets, gradients, strict=True)
            if bucket.name in codes.exchanges
        ]

    def _of(self, part: int) -> list[_BucketMoves]:
        return [moved for moved in self._moved if moved.bucket.part == part]

    def start(self, part: int, fill: Callable[[int], None]) -> None:
        """Start to sum what `fill` writes into the gradients; collective as `ReplicaExchange.start` says."""
        mine, step = self._of(part), self._program.step
        is_hidden = step.sharing.delay > 0
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
        self._send(part, Phase.START)

    def sum(self, part: int) -> None:
        """Issue the collectives that follow an exchange's first; collective as `ReplicaExchange.start` says."""
        self._send(part, Phase.SUM)

    def _send(self, part: int, phase: Phase) -> None:
        mine = {moved.bucket.name: moved for moved in self._of(part)}
        for op in self._program.exchanges[part][phase] if self._program.exchanges else ():
            if op.axis is None:
                continue
            moved = mine[op.owner]
            assert moved.moves is not None, "an exchange that has not started"
            moved.wait()
            with owned(op.owner) as issue:
                moved.work = issue.sent(moved.exchange.send([moved.moves]))

    def end(self, part: int) -> None:
        """Wait for an exchange, and set the gradients to its sums."""
        for moved in self._of(part):
            assert moved.moves is not None, "an exchange that has not started"
            moved.wait()
            moved.exchange.finish([moved.moves])
            if moved.moves is not moved.gradients:
                moved.gradients.copy_(moved.moves)
            moved.moves = None


@dataclass(frozen=True, slots=True)
class UnitExchange(ReplicaExchange):
    """The `ReplicaExchange` of units, whose codes are those of the gradients too; a rank trains one replica."""

    program: Program
    pieces: Sequence[Piece]
    codes: UnitCodes

    def start(self, part: int, fill: Callable[[int], None]) -> None:
        """Start to sum what `fill` writes into the gradients; collective as `ReplicaExchange.start` says."""
        step = self.program.step
        mine = [piece.gradient() for piece in self.pieces if step.sharing.part_of(piece.name) == part]
        kept = [gradient.clone() for gradient in mine] if step.sharing.delay else []
        self.codes.begin_part(part)
        fill(0)
        self._send(part, Phase.START)
        for gradient, before in zip(mine, kept, strict=False):
            gradient.copy_(before)

    def sum(self, part: int) -> None:
        """Issue the collectives that follow an exchange's first; collective as `ReplicaExchange.start` says."""
        self._send(part, Phase.SUM)

    def _send(self, part: int, phase: Phase) -> None:
        for op in self.program.exchanges[part][phase]:
            if op.axis is not None:
                self.codes.send(op, part)

    def end(self, part: int) -> None:
        """Wait for an exchange, and set the gradients to its sums."""
        self.codes.finish_part(part)
