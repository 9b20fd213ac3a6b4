"""Shards of gradients that replicas sum encoded, under zero=2 and zero=3: FSDP2 reduces within a replica, we between them.

```
unit      reduce_scatter over dp_shard, by FSDP2 ─► this rank's rows of each weight ─► buffers by block ─► exchange over dp_replicate
```

Gradients of units that all data ranks shard and scatter encoded, under zero=2 and zero=3: what takes the place of a reduce_scatter.

FSDP2 lays a unit's whole gradient out by rank and hands it over behind the unit's backward; each rank keeps what codes lose of
its whole contribution, and of the sum of its own rows.

```
unit      [ rank 0's rows of each weight | rank 1's rows | ... ]  ─ encode ─► all_to_all ─► decode, sum, encode, decode ─► own rows
```
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from samestep.models.param_spec import ParamSpec
from samestep.program.codecs import CodedPart, coded_bytes
from samestep.program.ops import Op, OpKind
from samestep.program.program import Program
from samestep.program.units import Unit, coded_parts, exchanged_parts, padded_rows
from samestep.runtime.axes.precision import DTYPES
from samestep.runtime.codecs.exchange import CodedExchange, Exchange, exchange_of
from samestep.runtime.codecs.rests import Directions, GivenBack, of_weights
from samestep.runtime.ledger import owned
from samestep.runtime.processes.mesh import Mesh
from samestep.runtime.weights.pieces import Piece


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
                places = [(piece.name, first, numel) for piece, first, numel in _place_pieces(pieces)]
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


def _place_pieces(pieces: Sequence[Piece]) -> Iterator[tuple[Piece, int, int]]:
    """Yield pieces with their first element in a buffer, and their number of elements."""
    first = 0
    for piece in pieces:
        yield piece, first, piece.stop - piece.start
        first += piece.stop - piece.start


def _pairs(shard: _Shard) -> Iterator[tuple[list[Tensor], list[Tensor]]]:
    """Yield of each buffer the gradients of its weights, and the windows in it that hold them."""
    for pieces, buffer in zip(shard.pieces, shard.buffers, strict=True):
        gradients = [piece.gradient() for piece in pieces]
        windows = [buffer[first : first + numel] for _, first, numel in _place_pieces(pieces)]
        if gradients:
            yield gradients, [window.view_as(one) for window, one in zip(windows, gradients, strict=True)]


def _wait(shard: _Shard) -> None:
    if shard.work is not None:
        shard.work.wait()
        shard.work = None


class EncodedScatters:
    """The scatters of all units of a rank, through all steps of a run."""

    def __init__(self, program: Program, mesh: Mesh, laid_out: Sequence[tuple[Unit, Sequence[str]]]) -> None:
        """Make the scatter of each unit, whose weights FSDP2 lays out in the order of the names beside it."""
        self.of_unit: dict[str, EncodedScatter] = {}
        step, made = program.step, program.step.contributions
        if made is None or not step.scatters_codes:
            return
        trained = {param.name: param for param in step.model.params if param.trainable}
        units = [unit for unit, _ in laid_out if unit.padded_grad_numel]
        sizes = [coded_bytes(unit.codec, [*coded_parts(step, made, unit)]) for unit in units]
        largest = max((made.code_bytes(size, gathers=False) for size in sizes), default=0)
        scratch = torch.zeros(largest, dtype=torch.uint8, device=mesh.device)
        for unit, names in laid_out:
            params = [trained[name] for name in names if name in trained]
            if params:
                self.of_unit[unit.name] = EncodedScatter(unit, params, program, mesh, scratch)

    def begin_step(self) -> None:
        """Forget the contributions of the previous step."""
        for scatter in self.of_unit.values():
            scatter.exchange.begin_step()

    def given_back(self) -> Iterator[GivenBack]:
        """Yield what codes have lost of each weight."""
        for scatter in self.of_unit.values():
            yield from scatter.given_back()

    def scale_given_back(self, factor: float) -> None:
        """Multiply what codes have lost."""
        for scatter in self.of_unit.values():
            scatter.exchange.scale(factor)


class EncodedScatter:
    """The scatter of one unit's gradients, through all steps of a run."""

    def __init__(self, unit: Unit, params: Sequence[ParamSpec], program: Program, mesh: Mesh, scratch: Tensor) -> None:
        """Scatter the gradients of the unit's trained weights, in the order in which FSDP2 lays them out."""
        step, made = program.step, program.step.contributions
        assert made is not None
        self._num_shards = unit.num_shards
        self._runs = [
            [(param, padded_rows(param, unit.num_shards) // unit.num_shards) for param in run]
            for _, run in itertools.groupby(params, key=step.gradient_block)
        ]
        """Weights next to each other with blocks of one size, with their elements on each rank, padding included."""
        widths = [sum(numel for _, numel in run) for run in self._runs]
        ends = [0, *itertools.accumulate(widths)]
        self._windows = [slice(first, last) for first, last in itertools.pairwise(ends)]
        parts = [
            CodedPart(width * unit.num_shards, step.gradient_block(run[0][0]))
            for width, run in zip(widths, self._runs, strict=True)
        ]
        assert sum(part.numel for part in parts) == unit.padded_grad_numel, f"weights of {unit.name} are missing"
        like = torch.empty(0, dtype=DTYPES[step.master_dtype], device=mesh.device)
        group, backend = mesh.groups[made.sent_over], step.codec_backend
        self.exchange = CodedExchange(
            unit.codec, parts, made, group, like, gathers=False, backend=backend, scratch=scratch
        )
        self._index = mesh.index(made.axis)

    @torch.no_grad()
    def scatter(self, own: Tensor, whole: Tensor) -> None:
        """Write the sum of this rank's rows of all contributions to `own`; `whole`, this rank's contribution, is written over.

        Collective over the axis of the contributions: if a rank does not call it, the others wait for it.
        """
        rows = whole.view(self._num_shards, -1)
        values = [rows[:, window] for window in self._windows]
        self.exchange.send(values).wait()
        self.exchange.finish(values)
        own.copy_(rows[self._index])

    def given_back(self) -> Iterator[GivenBack]:
        """Yield what codes have lost of each weight."""
        for number, run in enumerate(self._runs):
            for rest in self.exchange.rests(number):
                for name, first, numel, start in self._places(run):
                    for one in of_weights(rest, [(name, first, numel)]):
                        yield one._replace(start=start + one.start)

    def _places(self, run: Sequence[tuple[ParamSpec, int]]) -> Iterator[tuple[str, int, int, int]]:
        """Yield each rank's rows of each weight: first element in the buffer, their elements, first element in the weight."""
        width = sum(numel for _, numel in run)
        for rank in range(self._num_shards):
            first = rank * width
            for param, numel in run:
                start = min(rank * numel, param.numel)
                stop = min(start + numel, param.numel)
                if start < stop:
                    yield param.name, first, stop - start, start
                first += numel
