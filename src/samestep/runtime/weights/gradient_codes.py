"""Encoded sums of gradients: the exchanges of a rank's buckets (zero=0 and 1), shards and units (zero=2 and 3).

A store of weights sends gradients as they are, unless its codes say that a collective of the program is theirs.

```
bucket    gradients, or this rank's chunk of them within a contribution ─► exchange between contributions
shard     FSDP2's reduce_scatter over dp_shard ─► this rank's rows, in buffers by block ─► exchange over dp_replicate
unit      [ rank 0's rows of each weight | rank 1's rows | ... ] ─ encode ─► all_to_all ─► decode, sum ─► this rank's rows
```
Shards are for hybrid sharding: FSDP2 reduces within a replica, and the exchange sums between replicas. Where all data ranks
shard a unit, FSDP2 calls its scatter in place of a reduce_scatter, with the unit's whole gradient ordered by rank; each rank
keeps the residuals of its whole contribution, and of the sum of its rows.

The same exchanges carry the moves of weights where replicas are trained independently (`sum_moves`): these are written into the gradients.
The steps of a replica then send nothing encoded.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from samestep.models.param_spec import ParamSpec
from samestep.program.codecs import PLAIN, CodedPart, coded_bytes
from samestep.program.ops import UPDATE_BODY, Op, OpKind
from samestep.program.program import Program
from samestep.program.units import Unit, coded_parts, padded_rows
from samestep.runtime.axes.precision import DTYPES
from samestep.runtime.codecs.codec import Directions, Residual, residuals_of_weights
from samestep.runtime.codecs.exchange import CodedExchange, Exchange, exchange_of
from samestep.runtime.ledger import owned
from samestep.runtime.processes.mesh import Mesh
from samestep.runtime.weights.flat_buffers import FlatBuffer
from samestep.runtime.weights.pieces import Piece


class GradientCodes:
    """The state of the gradient codec that is kept from one step to the next; none where gradients are sent as they are.

    Its methods send nothing.
    """

    def residuals(self) -> Iterator[Residual]:
        """Yield what codes have lost of this rank's contributions, to be added to the next ones.

        Ranks on axes within a contribution, which encode the same sums, yield the same.
        """
        return iter(())

    def directions(self) -> Iterator[Directions]:
        """Yield the directions along which the next gradients of matrices are projected: equal on all ranks with equal weights."""
        return iter(())

    def scale(self, factor: float) -> None:
        """Multiply all residuals, where gradients are scaled by another number from now on; every rank calls it alike.

        With 0 everything that is kept becomes as it was before the first step.
        """

    def sum_moves(self) -> None:
        """Replace the gradients of the store's pieces, which are the moves of this rank's weights, by their sums over all replicas.

        Nothing is summed where all ranks train one model. Collective over the axis of the program's contributions: see
        [Note: collective calls] in runtime/processes/mesh.py.
        """


def _sends_of(program: Program) -> Iterator[Op]:
    """Yield the collectives of an exchange before its outer step."""
    return itertools.takewhile(lambda op: op.kind is not OpKind.OUTER, program.exchange)


class BucketCodes(GradientCodes):
    """The exchanges of a rank's buckets, through all steps of a run."""

    def __init__(self, program: Program, mesh: Mesh, flats: Sequence[FlatBuffer]) -> None:
        """Make the exchange of each bucket."""
        self._program, self._mesh, self._flats = program, mesh, flats
        self.exchanges: dict[str, Exchange] = {}
        """Exchange of each bucket, by its name."""
        step, contributions = program.step, program.step.contributions
        self._of_steps = {} if step.sharing.trains_apart else self.exchanges
        assert contributions is not None, "a step without contributions"
        self._made = contributions
        like = torch.empty(0, dtype=DTYPES[step.master_dtype], device=mesh.device)
        group = mesh.groups[contributions.axis]
        for bucket in program.buckets:
            parts, gathers = [bucket.coded(contributions)], bucket.gathers_codes(contributions)
            self.exchanges[bucket.name] = exchange_of(
                bucket.codec, parts, group, like, gathers=gathers, backend=step.sharing.backend
            )

    def begin_step(self) -> None:
        """Discard the contribution of the previous step."""
        for exchange in self._of_steps.values():
            exchange.begin_step()

    def sends(self, op: Op) -> bool:
        """Return whether a collective of the program carries codes."""
        return op.codec not in (None, PLAIN)

    def send(self, op: Op, gradients: Tensor) -> dist.Work:
        """Encode the contribution and issue a collective.

        Collective over `op.axis`, see [Note: collective calls].
        """
        with owned(op.owner) as issue:
            work: dist.Work = issue.sent(self.exchanges[op.owner].send([gradients]))
        return work

    def finish(self, bucket: str, gradients: Tensor) -> None:
        """Set a bucket's gradients to the sum of all contributions, which has arrived."""
        if (exchange := self._of_steps.get(bucket)) is not None:
            exchange.finish([gradients])

    def sum_moves(self) -> None:
        """Replace the gradients by their sums; collective as `GradientCodes.sum_moves` says."""
        # Of each bucket all gradients, or the chunk that this rank updates under zero=1.
        moved = {
            flat.bucket.name: (self.exchanges[flat.bucket.name], [flat.gradients[flat.mine]]) for flat in self._flats
        }
        for exchange, _ in moved.values():
            exchange.begin_step()
        works: dict[str, dist.Work] = {}
        for op in _sends_of(self._program):
            if op.owner in works:
                works[op.owner].wait()
            works[op.owner] = self.send(op, moved[op.owner][1][0])
        for name, (exchange, gradients) in moved.items():
            if name in works:
                works[name].wait()
            exchange.finish(gradients)

    def residuals(self) -> Iterator[Residual]:
        """Yield the residuals of each weight."""
        for bucket in self._program.buckets:
            coded = bucket.coded(self._made).numel
            first = self._mesh.index(bucket.holding.data_axis) * coded if coded < bucket.padded_numel else 0
            places = [(member.name, member.offset - first, member.numel) for member in bucket.members]
            for residual in self.exchanges[bucket.name].residuals(0):
                yield from residuals_of_weights(residual, places)

    def directions(self) -> Iterator[Directions]:
        """Yield the directions along which the next gradients are projected."""
        for exchange in self.exchanges.values():
            yield from exchange.directions()

    def scale(self, factor: float) -> None:
        """Multiply all residuals."""
        for exchange in self.exchanges.values():
            exchange.scale(factor)


@dataclass(slots=True)
class _Shard:
    """The buffers of one unit."""

    exchange: Exchange
    pieces: list[list[Piece]]
    """The rows of weights that each buffer holds, one after the other."""
    buffers: list[Tensor] = field(default_factory=list)
    work: dist.Work | None = None


class UnitCodes(GradientCodes):
    """The exchanges of a rank's shards and the scatters of its units, through all steps of a run."""

    def __init__(
        self, program: Program, mesh: Mesh, pieces: Sequence[Piece], laid_out: Sequence[tuple[Unit, Sequence[str]]]
    ) -> None:
        """Make the exchange or the scatter of each unit, given with the names of its weights in FSDP2's order."""
        self._program, self._trains_apart = program, program.step.sharing.trains_apart
        self.scatters = _scatters_of(program, mesh, laid_out)
        """Scatter of each unit, by the unit's name."""
        self._shards: dict[str, _Shard] = {}
        """Shard of each unit, by the unit's name."""
        contributions, step = program.step.contributions, program.step
        if contributions is None or step.scatters_codes:
            return
        of_name = {piece.name: piece for piece in pieces}
        like = torch.empty(0, dtype=DTYPES[step.master_dtype], device=mesh.device)
        group = mesh.groups[contributions.axis]
        for unit in program.units:
            if not (parts := coded_parts(step, contributions, unit)):
                continue
            exchange = exchange_of(unit.codec, [*parts], group, like, gathers=True, backend=step.sharing.backend)
            pieces_of = [[of_name[name] for name in names if name in of_name] for names in parts.values()]
            self._shards[unit.name] = _Shard(exchange, pieces_of, [like.new_zeros(part.numel) for part in parts])

    def begin_step(self) -> None:
        """Discard the contribution of the previous step."""
        for exchange in () if self._trains_apart else self._exchanges():
            exchange.begin_step()

    def _exchanges(self) -> list[Exchange]:
        return [shard.exchange for shard in self._shards.values()] + [s.exchange for s in self.scatters.values()]

    def sends(self, op: Op) -> bool:
        """Return whether a collective of the program is one of an exchange."""
        return op.codec is not None

    @torch.no_grad()
    def send(self, op: Op) -> None:
        """Issue one collective of a unit's exchange.

        Collective over `op.axis`, see [Note: collective calls].
        """
        shard = self._shards[op.owner]
        _wait(shard)
        if op.kind is not OpKind.ALL_GATHER:
            for gradients, windows in _pairs(shard):
                torch._foreach_copy_(windows, gradients)
        with owned(op.owner) as issue:
            shard.work = issue.sent(shard.exchange.send(shard.buffers))

    def finish(self) -> None:
        """Wait for the exchanges of a step, and set the gradients to the sums."""
        if not self._trains_apart:
            self._take_sums()

    def sum_moves(self) -> None:
        """Replace the gradients by their sums; collective as `GradientCodes.sum_moves` says."""
        for shard in self._shards.values():
            shard.exchange.begin_step()
        for op in _sends_of(self._program):
            self.send(op)
        self._take_sums()

    @torch.no_grad()
    def _take_sums(self) -> None:
        for shard in self._shards.values():
            _wait(shard)
            shard.exchange.finish(shard.buffers)
            for gradients, windows in _pairs(shard):
                torch._foreach_copy_(gradients, windows)

    def residuals(self) -> Iterator[Residual]:
        """Yield the residuals of each weight."""
        for shard in self._shards.values():
            for number, pieces in enumerate(shard.pieces):
                places = [(piece.name, first, numel) for piece, first, numel in _place_pieces(pieces)]
                starts = {piece.name: piece.start for piece in pieces}
                for residual in shard.exchange.residuals(number):
                    for weight_residual in residuals_of_weights(residual, places):
                        yield weight_residual._replace(start=starts[weight_residual.name] + weight_residual.start)
        for scatter in self.scatters.values():
            yield from scatter.residuals()

    def directions(self) -> Iterator[Directions]:
        """Yield the directions along which the next gradients are projected."""
        for shard in self._shards.values():
            yield from shard.exchange.directions()

    def scale(self, factor: float) -> None:
        """Multiply all residuals."""
        for exchange in self._exchanges():
            exchange.scale(factor)


def _place_pieces(pieces: Sequence[Piece]) -> Iterator[tuple[Piece, int, int]]:
    """Yield pieces with their first element in a buffer, and their number of elements."""
    first = 0
    for piece in pieces:
        yield piece, first, piece.stop - piece.start
        first += piece.stop - piece.start


def _pairs(shard: _Shard) -> Iterator[tuple[list[Tensor], list[Tensor]]]:
    """Yield, for each buffer, the gradients of its weights and the windows in the buffer that hold them."""
    for pieces, buffer in zip(shard.pieces, shard.buffers, strict=True):
        gradients = [piece.gradient() for piece in pieces]
        windows = [buffer[first : first + numel] for _, first, numel in _place_pieces(pieces)]
        if gradients:
            yield gradients, [window.view_as(gradient) for window, gradient in zip(windows, gradients, strict=True)]


def _wait(shard: _Shard) -> None:
    if shard.work is not None:
        shard.work.wait()
        shard.work = None


def _scatters_of(
    program: Program, mesh: Mesh, laid_out: Sequence[tuple[Unit, Sequence[str]]]
) -> dict[str, EncodedScatter]:
    """Return the scatter of each unit that sends codes, by its name; units are given with the names of their weights in FSDP2's order."""
    step, contributions = program.step, program.step.contributions
    if contributions is None or not step.scatters_codes:
        return {}
    trained = {param.name: param for param in step.model.params if param.trainable}
    units = [unit for unit, _ in laid_out if unit.padded_grad_numel]
    sizes = [coded_bytes(unit.codec, [*coded_parts(step, contributions, unit)]) for unit in units]
    largest = max((contributions.code_bytes(size, gathers=False) for size in sizes), default=0)
    scratch = torch.zeros(largest, dtype=torch.uint8, device=mesh.device)
    return {
        unit.name: EncodedScatter(unit, params, program, mesh, scratch)
        for unit, names in laid_out
        if (params := [trained[name] for name in names if name in trained])
    }


class EncodedScatter:
    """The scatter of one unit's gradients, through all steps of a run."""

    def __init__(self, unit: Unit, params: Sequence[ParamSpec], program: Program, mesh: Mesh, scratch: Tensor) -> None:
        """Scatter the gradients of the unit's trained weights, in the order in which FSDP2 lays them out."""
        step, contributions = program.step, program.step.contributions
        assert contributions is not None
        self._num_shards = unit.num_shards
        self._runs = [
            [(param, padded_rows(param, unit.num_shards) // unit.num_shards) for param in run]
            for _, run in itertools.groupby(params, key=step.sharing.block_of)
        ]
        """Runs of consecutive weights with blocks of one size, each weight with its elements on a rank, padding included."""
        widths = [sum(numel for _, numel in run) for run in self._runs]
        ends = [0, *itertools.accumulate(widths)]
        self._windows = [slice(first, last) for first, last in itertools.pairwise(ends)]
        parts = [
            CodedPart(width * unit.num_shards, step.sharing.block_of(run[0][0]))
            for width, run in zip(widths, self._runs, strict=True)
        ]
        assert sum(part.numel for part in parts) == unit.padded_grad_numel, f"weights of {unit.name} are missing"
        like = torch.empty(0, dtype=DTYPES[step.master_dtype], device=mesh.device)
        group, backend = mesh.groups[contributions.axis], step.sharing.backend
        self.exchange = CodedExchange(unit.codec, parts, group, like, gathers=False, backend=backend, scratch=scratch)
        self._index = mesh.index(contributions.axis)

    @torch.no_grad()
    def scatter(self, rows_of_sum: Tensor, whole: Tensor) -> None:
        """Write this rank's rows of the sum of all contributions to `rows_of_sum`; `whole`, this rank's contribution, is overwritten.

        Collective over the axis of the contributions, see [Note: collective calls].
        """
        rows = whole.view(self._num_shards, -1)
        values = [rows[:, window] for window in self._windows]
        self.exchange.send(values).wait()
        self.exchange.finish(values)
        rows_of_sum.copy_(rows[self._index])

    def residuals(self) -> Iterator[Residual]:
        """Yield the residuals of each weight."""
        for number, run in enumerate(self._runs):
            for residual in self.exchange.residuals(number):
                for name, first, numel, start in self._places(run):
                    for weight_residual in residuals_of_weights(residual, [(name, first, numel)]):
                        yield weight_residual._replace(start=start + weight_residual.start)

    def _places(self, run: Sequence[tuple[ParamSpec, int]]) -> Iterator[tuple[str, int, int, int]]:
        """Yield each rank's rows of each weight: name, first element in the buffer, number of elements, first element in the weight."""
        width = sum(numel for _, numel in run)
        for rank in range(self._num_shards):
            first = rank * width
            for param, numel in run:
                start = min(rank * numel, param.numel)
                stop = min(start + numel, param.numel)
                if start < stop:
                    yield param.name, first, stop - start, start
                first += numel


def may_give_up(program: Program) -> bool:
    """Return whether ranks of other samples wait for nothing in a step but gathers and reductions of units, and a code keeps
    nothing of its gradients. What ranks of `tp` exchange is of the same samples.
    """
    others = (op.axis for key, ops in program.bodies.items() if key != UPDATE_BODY for op in ops if not op.implied)
    return {*others} <= {None, "tp"} and program.step.contributions is None
