"""The weights that the forward reads where they are no masters: published from these, and compared with what was published.

What a user or a forward writes into a target between two updates is taken over by its master. Where all pieces are updated in place,
the forward reads the masters, and there is nothing to do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from samestep.runtime import host_copies
from samestep.runtime.host_copies import Reading
from samestep.runtime.weights.pieces import Piece
from samestep.state.writes import Marks, marks_of


def live_weights(pieces: Sequence[Piece]) -> UpdatedInPlace:
    """Return the weights that the forward reads of some pieces."""
    copied = [piece for piece in pieces if piece.target is not None]
    return CopiedWeights(copied) if copied else UpdatedInPlace()


class UpdatedInPlace:
    """Weights that the forward reads where the optimizer updates them: nothing is copied, and what is written there is kept."""

    are_copied: ClassVar[bool] = False
    """Whether the forward reads copies of the masters."""

    def publish(self) -> None:
        """Copy updated values to the tensors that the forward reads."""

    def reread(self) -> None:
        """Set the masters to what a user or a forward has written into the targets since `publish`."""

    def take_over(self) -> None:
        """Set the elements of masters whose targets differ from what `publish` wrote."""

    def was_written(self, device: torch.device) -> Tensor:
        """Return 1 if a target was written since `publish`, else 0 (float64 []), which the host need not wait for."""
        return torch.zeros((), dtype=torch.float64, device=device)

    def begin_step(self, device: torch.device) -> None:
        """Ask the device whether a target was written since `publish`, for `was_written_early`."""

    def was_written_early(self) -> bool:
        """Return whether a target was written before the step, or in it by an operation that torch counts."""
        return False

    def was_written_unseen(self, device: torch.device) -> Tensor:
        """Return 1 if a target was written in the step and `was_written_early` does not say so, else 0 (float64 [])."""
        return torch.zeros((), dtype=torch.float64, device=device)


class CopiedWeights(UpdatedInPlace):
    """The targets of some pieces, at least one."""

    are_copied: ClassVar[bool] = True

    def __init__(self, pieces: Sequence[Piece]) -> None:
        held = [(piece, piece.target) for piece in pieces if piece.target is not None]
        held.sort(key=lambda one: not _is_small(one[1]))
        self._pieces, self._targets = [piece for piece, _ in held], [target for _, target in held]
        self._small = [target.view(-1) for target in self._targets if _is_small(target)]
        """The first targets, whose squares are summed in one pass."""
        self._numels = torch.tensor([target.numel() for target in self._small])
        self._early: Tensor | None = None
        self._early_there: Reading | None = None
        self._published = self._state()

    @torch.no_grad()
    def publish(self) -> None:
        """Copy updated values to the tensors that the forward reads; those of split masters are there."""
        whole = zip(self._pieces, self._targets, strict=True)
        host_copies.publish([(piece.value, target) for piece, target in whole if piece.split is None])
        self._published = self._state()

    @torch.no_grad()
    def reread(self) -> None:
        """Set the masters to what a user or a forward has written into the targets since `publish`.

        Elements that nobody wrote keep their master values. For a split master it is unknown which ones these are: an
        element keeps its remainder, so a written one is off by up to half a last place of its bfloat16, and a written zero
        is exact. From then on the master of that weight is held whole, and later writes are exact.
        """
        if self.was_written(self._targets[0].device).item():
            self.take_over()

    @torch.no_grad()
    def take_over(self) -> None:
        """Set the elements of masters whose targets differ from what `publish` wrote."""
        for piece, target, is_written in zip(
            self._pieces, self._targets, self._state().since(self._published), strict=True
        ):
            was_split = piece.split is not None
            if was_split and not is_written:
                continue
            piece.hold_whole()
            value = piece.value.detach().view_as(target)
            live = target.to(value.device)
            is_kept = value.to(live.dtype) == live
            is_kept &= (live != 0) | (not was_split)
            value.copy_(torch.where(is_kept, value, live.to(value.dtype)))
        self._published = self._state()

    @torch.no_grad()
    def was_written(self, device: torch.device) -> Tensor:
        """Return 1 if a target was written since `publish`, else 0 (float64 []), which the host need not wait for."""
        return self._state().any_since(self._published, device)

    def begin_step(self, device: torch.device) -> None:
        """Ask the device whether a target was written since `publish`, for `was_written_early`."""
        self._early = self.was_written(device)
        self._early_there = Reading(self._early.view(1))

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
        return marks_of(self._targets).differ(self._published)

    def _state(self) -> Marks:
        return marks_of(self._targets, norms=self._norms)

    def _norms(self, targets: Sequence[Tensor]) -> Tensor:
        """Return the norms of the targets, of small ones on a CPU their squares."""
        norms: list[Tensor] = []
        if self._small:
            squares = torch.cat(self._small).double().square_()
            norms.append(torch.segment_reduce(squares, "sum", lengths=self._numels, unsafe=True))
        if others := targets[len(self._small) :]:
            wide = others[0].dtype if others[0].itemsize >= 4 else torch.float32
            norms.append(torch.stack(torch._foreach_norm(list(others), 2.0, wide)))
        return norms[0] if len(norms) == 1 else torch.cat(norms)


_SMALL = 1024
"""Elements up to which a call of torch takes a CPU longer than the norm that it computes."""


def _is_small(target: Tensor) -> bool:
    return target.device.type == "cpu" and target.numel() <= _SMALL and target.is_contiguous()
