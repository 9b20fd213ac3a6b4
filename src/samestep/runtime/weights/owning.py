"""Whole updates on real weights (twin of `strategies/whole_update.py`): owners gather parts, and scatter the updated ones.

A rank sends its piece of each weight and of its gradient to the weight's owner, which has a whole copy of both. Two buffers of
equal windows, one for each rank of the axis, carry them. Values are sent with every gradient, so that the owner's copy has
what a user has written into a weight between two steps.

```
send      │ my parts of rank 0's weights │ my parts of rank 1's weights │
receive   │ rank 0's parts of my weights │ rank 1's parts of my weights │
```
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from samestep.models.param_spec import ParamSpec
from samestep.models.spec import ModelSpec
from samestep.program.holding import Owned, Owners
from samestep.program.program import Program
from samestep.runtime.axes.precision import DTYPES
from samestep.runtime.axes.rank_crossings import GroupLine
from samestep.runtime.processes.mesh import Mesh
from samestep.runtime.weights.pieces import LiveWeights, Piece
from samestep.runtime.weights.placement import WeightSlice, part_at, rows_of_shard
from samestep.runtime.weights.weight_store import WeightStore
from samestep.strategies.whole_update import GRADIENTS, WEIGHTS


def owning(store: WeightStore, program: Program, mesh: Mesh, model: ModelSpec) -> WeightStore:
    """Return a store whose pieces are whole weights where the optimizer needs them whole; `model` is the uncut model."""
    levels = []
    pieces = list(store.pieces)
    for owners in program.owners:
        level = _Level.over(pieces, owners, program, mesh, model)
        lent = {member.name for member in owners.members}
        pieces = [piece for piece in pieces if piece.name not in lent] + level.mine
        levels.append(level)
    if not levels:
        return store
    order = {param.name: index for index, param in enumerate(program.step.model.params)}
    return Owning(store, levels, sorted(pieces, key=lambda piece: order[piece.name]))


class Owning:
    """A `WeightStore` over another one, whose divided weights are sent to owners before the update and back after it."""

    def __init__(self, store: WeightStore, levels: Sequence[_Level], pieces: list[Piece]) -> None:
        self._store, self._levels = store, levels
        self.pieces = pieces
        taken = {id(piece) for piece in pieces}
        self._lent = LiveWeights([piece for piece in store.pieces if id(piece) not in taken])

    def __getattr__(self, name: str) -> Any:
        """Return everything else from the other store."""
        return getattr(self._store, name)

    def finish_gradients(self, *, delivers: bool = True, names: Set[str] | None = None) -> None:
        """Finish the store's reductions, and gather weights and gradients at their owners unless that comes later.

        Collective over the store's axes, and those over which weights have owners: see [Note: collective calls] in
        runtime/processes/mesh.py.
        """
        self._store.finish_gradients(names=names)
        if delivers:
            self.deliver()

    def deliver(self) -> None:
        """Gather weights and gradients at their owners; collective over the axes on which weights have owners."""
        self._store.take_back()
        self._lent.reread()
        for level in self._levels:
            level.gather()

    def publish(self, *, waits: bool = True) -> None:
        """Scatter the updated weights to the ranks that hold parts of them, and let the store publish the others.

        Collective over the store's axes, and those over which weights have owners: see [Note: collective calls] in
        runtime/processes/mesh.py.
        """
        for level in reversed(self._levels):
            level.scatter()
        self._lent.publish()
        self._store.publish(waits=waits)


@dataclass(slots=True)
class _Level:
    """The weights that ranks of one axis update whole: parts that this rank lends, and weights that it owns."""

    owners: Owners
    mesh: Mesh
    dtype: torch.dtype
    members: tuple[Owned, ...]
    """The weights of which this rank holds a part, unless it holds less than a row."""
    parts: dict[str, list[WeightSlice]]
    """The slice of each weight that each rank of the axis holds."""
    lent: dict[str, Piece]
    mine: list[Piece] = field(default_factory=list)
    """Whole copies of the weights that this rank owns, with their gradients."""

    @classmethod
    def over(cls, pieces: Sequence[Piece], owners: Owners, program: Program, mesh: Mesh, model: ModelSpec) -> _Level:
        """Allocate whole copies of the weights that this rank owns, and fill them from the pieces of all ranks."""
        step = program.step
        cut = {param.name: param for param in step.model.params}
        uncut = {param.name: param for param in model.params}
        index = mesh.index(owners.data_axis) if any(member.lender is not None for member in owners.members) else 0
        members = owners.of_rank(index)
        wholes = {member.name: (uncut if owners.is_cut else cut)[member.name] for member in members}
        parts = {
            name: [part_at(whole, cut[name], owners.ranks, rank) for rank in range(owners.ranks)]
            if owners.is_cut
            else [_slice_of(whole, rows_of_shard(whole, owners.ranks, rank)) for rank in range(owners.ranks)]
            for name, whole in wholes.items()
        }
        level = cls(owners, mesh, DTYPES[step.master_dtype], members, parts, {piece.name: piece for piece in pieces})
        for member in level._owned_members():
            level.mine.append(level._whole_piece(wholes[member.name], offload=step.layout.offload))
        level.gather()
        return level

    def _whole_piece(self, spec: ParamSpec, *, offload: bool) -> Piece:
        value = torch.zeros(spec.shape, dtype=self.dtype, device="cpu" if offload else self.mesh.device)
        gradient = torch.zeros(spec.shape, dtype=self.dtype, device=self.mesh.device)
        return Piece(spec.name, 0, spec.numel, value, lambda: gradient, is_uncut=self.owners.is_cut)

    @torch.no_grad()
    def gather(self) -> None:
        """Send every weight and its gradient to the owner.

        Collective over the axis, see [Note: collective calls].
        """
        send = self._buffer(2)
        for member in self.members:
            piece = self.lent.get(member.name)
            if piece is not None:
                values, gradients = self._windows(send, member.owner, member, 2)
                values[: piece.value.numel()] = piece.value.detach().flatten()
                gradients[: piece.value.numel()] = piece.gradient().flatten()
        received = self._exchange(send, GRADIENTS)
        for member, piece_of_owner in zip(self._owned_members(), self.mine, strict=True):
            for rank, part in enumerate(self.parts[member.name]):
                for window, tensor in zip(
                    self._windows(received, rank, member, 2),
                    (piece_of_owner.value.detach(), piece_of_owner.gradient()),
                    strict=True,
                ):
                    part.copy_into(tensor, window[: part.numel])

    @torch.no_grad()
    def scatter(self) -> None:
        """Send the parts of every updated weight to the ranks that hold them.

        Collective over the axis, see [Note: collective calls].
        """
        send = self._buffer(1)
        for member, piece_of_owner in zip(self._owned_members(), self.mine, strict=True):
            for rank, part in enumerate(self.parts[member.name]):
                # The copies are on the host under offload; the next update waits for the device before it writes them.
                window = self._windows(send, rank, member, 1)[0][: part.numel]
                window.copy_(part.of(piece_of_owner.value.detach()).flatten(), non_blocking=True)
        received = self._exchange(send, WEIGHTS)
        for member in self.members:
            piece = self.lent.get(member.name)
            if piece is not None:
                window = self._windows(received, member.owner, member, 1)[0]
                piece.value.copy_(window[: piece.value.numel()].view_as(piece.value))

    def _owned_members(self) -> list[Owned]:
        index = self.mesh.index(self.owners.axis)
        return [member for member in self.members if member.owner == index]

    def _windows(self, buffer: Tensor, rank: int, member: Owned, number: int) -> list[Tensor]:
        """Return a member's views in the windows of a rank: of its value, and of its gradient if `number` is 2."""
        return [
            part[member.offset : member.offset + member.part_numel]
            for part in buffer.view(-1, number, self.owners.window_numel)[rank]
        ]

    def _buffer(self, number: int) -> Tensor:
        size = self.owners.ranks * number * self.owners.window_numel
        return torch.zeros(size, dtype=self.dtype, device=self.mesh.device)

    def _exchange(self, send: Tensor, name: str) -> Tensor:
        return GroupLine(self.mesh.groups[self.owners.axis], f"{name} {self.owners.axis}").all_to_all(send)


def _slice_of(spec: ParamSpec, rows: slice) -> WeightSlice:
    return WeightSlice(spec.shape, 0, ((rows.start, rows.stop),) if rows.start < rows.stop else ())
