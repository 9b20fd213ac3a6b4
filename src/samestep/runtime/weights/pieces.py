"""Pieces of weights, which a rank updates, and their targets, which the forward reads.

However a layout cuts the weights, a rank updates a list of `Piece`s: runs of one parameter's elements as plain tensors
in master precision: see [Note: what a rank holds of a weight], the head of `runtime/weights/__init__.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass

import torch
from torch import Tensor

from samestep.building import nf4
from samestep.program.step import StepSpec
from samestep.runtime import host_copies
from samestep.runtime.host_copies import Reading
from samestep.runtime.weights.split_masters import SplitMasters


@dataclass(slots=True)
class Piece:
    """A run of one parameter's elements that this rank updates."""

    name: str
    start: int
    stop: int
    """Elements [start, stop) of the flattened part, or of the whole weight if `is_uncut`."""
    value: Tensor
    """Master values, which the optimizer updates; on the host under offload."""
    gradient: Callable[[], Tensor]
    """Returns the summed gradient of these elements, once the step's reductions are done."""
    target: Tensor | None = None
    """Tensor that receives the updated values, in another dtype or on the device; None where `value` itself is in use."""
    is_uncut: bool = False
    """Whether it is a run of the whole weight, though `tp` or `ep` leaves this rank a part of it."""
    is_packed: bool = False
    """Whether `value` holds rows of a frozen weight in 4 bits."""
    split: tuple[SplitMasters, int] | None = None
    """The holder of a master of which `target` is the upper half, and the master's index in it; `value` then exists in updates only."""

    def master(self) -> Tensor:
        """Return the master values, of the shape of `value`; newly allocated where they are held in two halves or in 4 bits."""
        if self.is_packed:
            return nf4.unpack_values(self.value.detach())
        if self.split is None:
            return self.value.detach()
        masters, index = self.split
        return masters.of(index).view(self.value.shape)

    @torch.no_grad()
    def set_master(self, values: Tensor) -> None:
        """Set the master values; those that are not split are published later."""
        if self.is_packed:
            self.value.detach().copy_(nf4.pack_values(values.view(len(self.value), -1)))
        elif self.split is None:
            self.value.detach().copy_(values.view_as(self.value))
        else:
            masters, index = self.split
            masters.set(index, values)

    def hold_whole(self) -> None:
        """Hold the master in one tensor from now on."""
        if self.split is not None:
            masters, index = self.split
            self.value.data = masters.release(index).view(self.value.shape)
            self.split = None


class LiveWeights:
    """The targets of some pieces: published from the masters, and compared with what was published."""

    def __init__(self, pieces: list[Piece]) -> None:
        self._pieces = [piece for piece in pieces if piece.target is not None]
        self._early: Tensor | None = None
        self._early_there: Reading | None = None
        self._published = self._state()

    @torch.no_grad()
    def publish(self) -> None:
        """Copy updated values to the tensors that the forward reads."""
        whole = [(piece.value, piece.target) for piece in self._pieces if piece.split is None]
        host_copies.publish([(value, target) for value, target in whole if target is not None])
        self._published = self._state()

    @torch.no_grad()
    def reread(self) -> None:
        """Set the masters to what a user or a forward has written into the targets since `publish`.

        Elements that nobody wrote keep their master values. For a split master it is unknown which ones these are: an
        element keeps its remainder, so a written one is off by up to half a last place of its bfloat16, and a written zero
        is exact. From then on the master of that weight is held whole, and later writes are exact.
        """
        if self._published is not None and self.was_written(self._published[1].device).item():
            self.take_over()

    @torch.no_grad()
    def take_over(self) -> None:
        """Set the elements of masters whose targets differ from what `publish` wrote."""
        for piece, is_written in zip(self._pieces, self._written(), strict=True):
            assert piece.target is not None
            if piece.split is not None and not is_written:
                continue
            was_split = piece.split is not None
            piece.hold_whole()
            value = piece.value.detach().view_as(piece.target)
            live = piece.target.to(value.device)
            is_kept = value.to(live.dtype) == live
            is_kept &= (live != 0) | (not was_split)
            value.copy_(torch.where(is_kept, value, live.to(value.dtype)))
        self._published = self._state()

    def _written(self) -> list[bool]:
        """Return, for each piece, whether its target was written since `publish`; the host waits for the device."""
        before, now = self._published, self._state()
        if before is None or now is None:
            return [False] * len(self._pieces)
        norms = (before[1] != now[1]).tolist()
        return [old != new or differ for old, new, differ in zip(before[0], now[0], norms, strict=True)]

    @torch.no_grad()
    def was_written(self, device: torch.device) -> Tensor:
        """Return 1 if a target was written since `publish`, else 0 (float64 []), which the host need not wait for."""
        before, now = self._published, self._state()
        if before is None or now is None:
            return torch.zeros((), dtype=torch.float64, device=device)
        if before[0] != now[0]:
            return torch.ones((), dtype=torch.float64, device=device)
        return (before[1] != now[1]).any().double()

    def begin_step(self, device: torch.device) -> None:
        """Ask the device whether a target was written since `publish`, for `was_written_early`."""
        self._early = self.was_written(device)
        self._early_there = Reading(self._early.view(1)) if self._pieces else None

    def was_written_early(self) -> bool:
        """Return whether a target was written before the step, or in it by an operation that torch counts.

        The host waits until the device begins the step, while the rest of the step is still before the device.
        """
        if self._early_there is None:
            return False
        return self._is_counted() or self._early_there.numbers()[0] > 0.0

    def was_written_unseen(self, device: torch.device) -> Tensor:
        """Return 1 if a target was written in the step and `was_written_early` does not say so, else 0 (float64 [])."""
        if self._early is None or self._is_counted():
            return torch.zeros((), dtype=torch.float64, device=device)
        return self.was_written(device) * (1.0 - self._early)

    def _is_counted(self) -> bool:
        """Return whether torch has counted an operation that wrote a target since `publish`."""
        versions = [piece.target._version for piece in self._pieces if piece.target is not None]
        return self._published is not None and versions != self._published[0]

    def _state(self) -> tuple[list[int], Tensor] | None:
        """Return the versions and the norms of the targets; None if the optimizer updates the weights themselves.

        Writing through `.data` leaves no version, so the norms are compared too.
        """
        targets = [piece.target for piece in self._pieces if piece.target is not None]
        if not targets:
            return None
        wide = targets[0].dtype if targets[0].itemsize >= 4 else torch.float32
        return [target._version for target in targets], torch.stack(torch._foreach_norm(targets, 2.0, wide))


_ROW = 4096


def squared_norm(tensors: list[Tensor], device: torch.device) -> Tensor:
    """Return the sum of squares over all elements of `tensors`, in float64.

    On a CPU torch adds up a norm one element after the other: in float32 the norm of a bucket is off by 1e-4, by an
    amount that depends on the layout. So rows of a few thousand elements are summed first.
    """
    if not tensors:
        return torch.zeros((), dtype=torch.float64, device=device)
    if device.type != "cpu":
        return torch.stack(torch._foreach_norm(tensors)).double().square().sum()
    norms: list[Tensor] = []
    rest: list[Tensor] = []
    for tensor in tensors:
        if tensor.numel() < _ROW:
            rest.append(tensor)
            continue
        flat = tensor.reshape(-1)
        whole = flat.numel() - flat.numel() % _ROW
        norms.append(torch.linalg.vector_norm(flat[:whole].view(-1, _ROW), dim=1))
        if whole < flat.numel():
            rest.append(flat[whole:])
    if rest:
        norms.append(torch.stack(torch._foreach_norm(rest)))
    return torch.cat(norms).double().square().sum() if norms else torch.zeros((), dtype=torch.float64)


def norm_of_pieces(
    pieces: Sequence[Piece], step: StepSpec, device: torch.device, names: Set[str] | None = None
) -> Tensor:
    """Return the squared norm (float64 []) of the gradients of pieces, or of those of some weights; each is divided by the number of
    ranks that hold it alike, so that their shares add up to one.
    """
    copies, numbers = step.copies
    total = torch.zeros((), dtype=torch.float64, device=device)
    for number in numbers:
        mine = pieces if len(numbers) == 1 else [piece for piece in pieces if copies[piece.name] == number]
        alike = [piece.gradient() for piece in mine if names is None or piece.name in names]
        total += squared_norm(alike, device) / number
    return total
