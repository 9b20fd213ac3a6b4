"""Shards of gradients that replicas sum encoded, under zero=2 and zero=3: FSDP2 reduces within a replica, we between them.

```
unit      reduce_scatter over dp_shard, by FSDP2 ─► this rank's rows of each weight ─► buffers by block ─► exchange over dp_replicate
```
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from samestep.program.ops import Op, OpKind
from samestep.program.program import Program
from samestep.program.units import coded_parts, exchanged_parts
from samestep.runtime.axes.precision import DTYPES
from samestep.runtime.codecs.exchange import Exchange, exchange_of
from samestep.runtime.codecs.rests import Directions, GivenBack, of_weights
from samestep.runtime.ledger import owned
from samestep.runtime.optimizers.pieces import Piece
from samestep.runtime.processes.mesh import Mesh


@dataclass(slots=True)
class _Shard:
    """The buffers of one unit."""

    exchange: Exchange
    pieces: list[list[Piece]]
    """Of each buffer the rows of weights that it holds, one behind the other."""
    buffers: list[Tensor] = field(default_factory=list)
    work: dist.Work | None = None


class EncodedShards:
    """The encoded sums of all units of a rank, through all steps of a run."""

    def __init__(self, program: Program, mesh: Mesh, pieces: Sequence[Piece]) -> None:
        self._shards: dict[tuple[int, str], _Shard] = {}
        """By the part of the weights that is exchanged, 0 where all are, and the unit's name."""
        made, step = program.step.contributions, program.step
        if made is None or step.scatters_codes:
            return
        of_name = {piece.name: piece for piece in pieces}
        like = torch.empty(0, dtype=DTYPES[step.master_dtype], device=mesh.device)
        group = mesh.groups[made.sent_over]
        for unit in program.units:
            for exchanged in exchanged_parts(step, unit):
                parts = coded_parts(step, made, unit, exchanged)
                exchange = exchange_of(
                    unit.codec, [*parts], made, group, like, gathers=True, backend=step.codec_backend
                )
                held = [[of_name[name] for name in names if name in of_name] for names in parts.values()]
                buffers = [like.new_zeros(part.numel) for part in parts]
                self._shards[exchanged, unit.name] = _Shard(exchange, held, buffers)

    def begin_step(self, part: int) -> None:
        """Forget the contributions of the previous step, or of the previous exchange of a part of the weights."""
        for shard in self._of(part):
            shard.exchange.begin_step()

    def _of(self, part: int) -> list[_Shard]:
        return [shard for (mine, _), shard in self._shards.items() if mine == part]

    @torch.no_grad()
    def send(self, op: Op, part: int = 0) -> None:
        """Issue one collective of a unit's exchange. Collective over `op.axis`: if a rank does not call it, the others wait."""
        shard = self._shards[part, op.owner]
        _wait(shard)
        if op.kind is not OpKind.ALL_GATHER:
            for gradients, windows in _pairs(shard):
                torch._foreach_copy_(windows, gradients)
        with owned(op.owner):
            shard.work = shard.exchange.send(shard.buffers)

    @torch.no_grad()
    def finish(self, part: int) -> None:
        """Wait for the exchanges of a part of the weights, and set the gradients to the sums."""
        for shard in self._of(part):
            _wait(shard)
            shard.exchange.finish(shard.buffers)
            for gradients, windows in _pairs(shard):
                torch._foreach_copy_(gradients, windows)

    def given_back(self) -> Iterator[GivenBack]:
        """Yield what codes have lost of each weight."""
        for shard in self._shards.values():
            for number, pieces in enumerate(shard.pieces):
                places = [(piece.name, first, numel) for piece, first, numel in _placed(pieces)]
                starts = {piece.name: piece.start for piece in pieces}
                for rest in shard.exchange.rests(number):
                    for one in of_weights(rest, places):
                        yield one._replace(start=starts[one.name] + one.start)

    def directions(self) -> Iterator[Directions]:
        """Yield the directions along which the next gradients are projected."""
        for shard in self._shards.values():
            yield from shard.exchange.directions()

    def scale_given_back(self, factor: float) -> None:
        """Multiply what codes have lost."""
        for shard in self._shards.values():
            shard.exchange.scale(factor)


def _placed(pieces: Sequence[Piece]) -> Iterator[tuple[Piece, int, int]]:
    """Yield pieces with their first element in a buffer, and their number of elements."""
    first = 0
    for piece in pieces:
        yield piece, first, piece.stop - piece.start
        first += piece.stop - piece.start


def _pairs(shard: _Shard) -> Iterator[tuple[list[Tensor], list[Tensor]]]:
    """Yield of each buffer the gradients of its weights, and the windows in it that hold them."""
    for pieces, buffer in zip(shard.pieces, shard.buffers, strict=True):
        gradients = [piece.gradient() for piece in pieces]
        windows = [buffer[first : first + numel] for _, first, numel in _placed(pieces)]
        if gradients:
            yield gradients, [window.view_as(one) for window, one in zip(windows, gradients, strict=True)]


def _wait(shard: _Shard) -> None:
    if shard.work is not None:
        shard.work.wait()
        shard.work = None
