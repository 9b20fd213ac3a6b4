"""Pieces of weights, which a rank updates, and the norm of their gradients.

However a layout cuts the weights, a rank updates a list of `Piece`s: runs of one parameter's elements as plain tensors
in master precision: see [Note: what a rank holds of a weight], the head of `runtime/weights/__init__.py`.

The forward reads the masters, or targets in another dtype or on another device: these are published from masters, and compared with what
was published (`LiveWeights`). What a user or a forward writes into a target between two updates is taken over by its master.

[Note: split masters]

Float32 master values may be in two halves: a weight in bfloat16, which the forward reads, and a remainder of 16 bits. The bits of a float32 are
those of its bfloat16 neighbour, 16 places to the left, plus a remainder. The neighbour is the master rounded to the nearest, ties to even, as
the plain cast rounds, so the remainder is a signed number:

    master's bits = weight's bits * 2^16 + remainder        -2^15 <= remainder <= 2^15

An int16 holds all of these but 2^15, the remainder of a master that is halfway between two weights and is rounded down.
One float32 in 2^17 is such a master. Its remainder is held as 2^15 - 1, and its position in a separate list. So both
halves give the master back to the bit, and take 4 bytes together. What is no number stays none.

On a GPU the list has a fixed length, since the host must not wait for a count: room for 32 times as many as there are
among random numbers, and for 4096 more. Were there more than that, their masters would be one last place of float32 lower.

The masters are joined in one buffer for an update, and split again after it: on GPUs a kernel finds remainders and halfway masters in one
pass (`kernels/remainder_bits.py`). Code that writes into a weight leaves its remainder as it is; `LiveWeights.take_over` says how the
master is then set.

[Note: sparse gradients]

The gradient of `nn.Embedding(sparse=True)` has the rows that a step reads, and SparseAdam updates no others. Gradients are added up as dense tensors,
and these have the number -0.0 in the rows that a sparse one does not have. A sum of floats is -0.0 only if all summands are; so after the
sums over micro-batches and ranks a row is -0.0 if no micro-batch of any rank has read it. The optimizer is given a sparse tensor of all other rows.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from samestep.building.model_changes import format_of
from samestep.kernels.kernel_choice import runs_kernels
from samestep.kernels.master_remainders import split_remainders
from samestep.program.buckets import round_up
from samestep.runtime import host_copies
from samestep.runtime.host_copies import Reading
from samestep.state.writes import Marks, marks_of

_ALIGNED = 8
"""Elements to which the place of a weight in the buffers is rounded up, as vectorised kernels like it."""
_ROW = 256
"""Elements among which a halfway master is looked for at once."""
_TOP = 2**15


class SplitMasters:
    """The remainders of some weights, whose masters are joined and split together."""

    @torch.no_grad()
    def __init__(self, weights: Sequence[Tensor], masters: Sequence[Tensor]) -> None:
        """Split masters of which the weights, in bfloat16, are the rounded copies."""
        self._weights: list[Tensor | None] = list(weights)
        ends = [0, *itertools.accumulate(round_up(weight.numel(), _ALIGNED) for weight in weights)]
        self._starts, self._numels = ends[:-1], [weight.numel() for weight in weights]
        # One element more than the weights need: where the unused places of the list point.
        size = round_up(ends[-1] + 1, _ROW)
        self._remainders = torch.zeros(size, dtype=torch.int16, device=weights[0].device)
        self._halfway = torch.empty(0, dtype=torch.int64, device=weights[0].device)
        """Positions whose remainder is one more than is held."""
        self._buffer = torch.empty(0, dtype=torch.float32, device=weights[0].device)
        """The joined masters, whose memory is taken for an update alone."""
        self._windows: list[Tensor] = []
        """Its parts, made once, in the first update: until here the masters to split are in memory, too."""
        self._pairs: tuple[list[Tensor], list[Tensor]] | None = None
        """The parts with a weight that holds their upper halves, and these weights."""
        nothing = torch.tensor(math.nan, dtype=torch.float32, device=weights[0].device)
        self.absent = [nothing.expand(weight.shape) for weight in weights]
        """Stand-ins for masters between two updates: what reads one gets no numbers, and nothing can write one that has dimensions."""
        for index, master in enumerate(masters):
            self.set(index, master)

    @property
    def tensors(self) -> tuple[Tensor, Tensor]:
        """The tensors that are held besides the weights: remainders (int16), and the positions of halfway masters (int64)."""
        return self._remainders, self._halfway

    @contextmanager
    def joined(self) -> Iterator[list[Tensor]]:
        """Yield the masters, windows of one float32 buffer in the weights' shapes; when the context ends their new values are split."""
        self._take_memory()
        bits = self._buffer.view(torch.int32)
        if self._pairs is None:
            pairs = [(a, b) for a, b in zip(self._windows, self._weights, strict=True) if b is not None]
            self._pairs = [window for window, _ in pairs], [weight for _, weight in pairs]
        windows, weights = self._pairs
        with torch.no_grad():
            if windows:
                torch._foreach_copy_(windows, weights)
            bits.add_(self._remainders)
            bits[self._halfway] += 1
        try:
            yield self._windows
        finally:
            with torch.no_grad():
                if windows:
                    torch._foreach_copy_(weights, windows)
                self._halfway = self._split(bits)
            self._buffer.untyped_storage().resize_(0)

    def _take_memory(self) -> None:
        """Let the buffer have memory, which is not initialized."""
        if self._windows:
            self._buffer.untyped_storage().resize_(self._buffer.nbytes)
            return
        self._buffer = torch.empty(self._remainders.numel(), dtype=torch.float32, device=self._remainders.device)
        places = zip(self._starts, self._numels, self.absent, strict=True)
        self._windows = [self._buffer[start : start + numel].view(absent.shape) for start, numel, absent in places]

    def _split(self, bits: Tensor) -> Tensor:
        """Hold the lower halves of masters; return the positions of those that are halfway and rounded down, of which the largest int16
        is held."""
        if runs_kernels(bits):
            return self._positions(split_remainders(bits, self._remainders))
        self._remainders.copy_(bits)
        if bits.device.type == "cpu":
            rows = self._remainders.view(-1, _ROW)
            places = (rows.amin(dim=1) == -_TOP).nonzero().flatten()
            at = (rows[places] == -_TOP).nonzero()
            positions = places[at[:, 0]] * _ROW + at[:, 1]
            positions = positions[(bits[positions] & 2 * _TOP) == 0]
            self._remainders[positions] = _TOP - 1
            return positions
        is_halfway = _is_halfway(bits)
        self._remainders.masked_fill_(is_halfway, _TOP - 1)
        return self._positions(is_halfway)

    def _positions(self, is_halfway: Tensor) -> Tensor:
        """Return the positions of halfway masters in a list of a fixed length, for which the host does not wait."""
        size = is_halfway.numel()
        length = min(size, size // 4096 + 4096)
        return torch.nonzero_static(is_halfway, size=length, fill_value=size - 1).flatten()

    @torch.no_grad()
    def of(self, index: int) -> Tensor:
        """Return the master of one weight, float32 [numel], newly allocated; the host waits for the device."""
        weight = self._weights[index]
        assert weight is not None, "the master of this weight is held elsewhere"
        start, stop = self._starts[index], self._starts[index] + self._numels[index]
        master = weight.detach().to(torch.float32, copy=True).flatten()
        bits = master.view(torch.int32)
        bits.add_(self._remainders[start:stop])
        bits[self._halfway[(self._halfway >= start) & (self._halfway < stop)] - start] += 1
        return master

    @torch.no_grad()
    def set(self, index: int, values: Tensor) -> None:
        """Set the master of one weight, and the weight with it; the host waits for the device."""
        weight = self._weights[index]
        assert weight is not None, "the master of this weight is held elsewhere"
        start, stop = self._starts[index], self._starts[index] + self._numels[index]
        master = values.detach().to(device=weight.device, dtype=torch.float32).flatten()
        weight.copy_(master.view_as(weight))
        bits = master.view(torch.int32)
        window = self._remainders[start:stop]
        window.copy_(bits)
        is_halfway = _is_halfway(bits)
        window.masked_fill_(is_halfway, _TOP - 1)
        others = self._halfway[(self._halfway < start) | (self._halfway >= stop)]
        self._halfway = torch.cat([others, is_halfway.nonzero().flatten() + start])

    def release(self, index: int) -> Tensor:
        """Return the master of one weight, which from now on is held elsewhere."""
        master = self.of(index)
        self._weights[index] = self._pairs = None
        return master


def _is_halfway(bits: Tensor) -> Tensor:
    """Return whether each master, given by its bits, is halfway between two weights and is rounded down."""
    return (bits & (4 * _TOP - 1)) == _TOP


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
    holder: Tensor | None = None
    """The weight in whose `grad` the gradient is, where it is no window of a buffer."""
    window: Tensor | None = None
    """The window of a buffer that holds the gradient in every step, where it is one."""
    target: Tensor | None = None
    """Tensor that receives the updated values, in another dtype or on the device; None where `value` itself is in use."""
    is_uncut: bool = False
    """Whether it is a run of the whole weight, though `tp` or `ep` leaves this rank a part of it."""
    held_as: str = ""
    """The format in which `value` holds rows of a frozen weight; empty for the dtype of the others."""
    split: tuple[SplitMasters, int] | None = None
    """The holder of a master of which `target` is the upper half, and the master's index in it; `value` then exists in updates only."""

    def master(self) -> Tensor:
        """Return the master values, of the shape of `value`; newly allocated where they are held in two halves or in 4 bits."""
        if self.held_as:
            values: Tensor = format_of(self.held_as).unpack_values(self.value.detach())
            return values
        if self.split is None:
            return self.value.detach()
        masters, index = self.split
        return masters.of(index).view(self.value.shape)

    @torch.no_grad()
    def set_master(self, values: Tensor) -> None:
        """Set the master values; those that are not split are published later."""
        if self.held_as:
            self.value.detach().copy_(format_of(self.held_as).pack_values(values.view(len(self.value), -1)))
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


def gradients_of(pieces: Sequence[Piece]) -> list[Tensor]:
    """Return the gradient of each piece; a window of a buffer or the `grad` of a weight is found without a call."""
    gradients = [piece.window if piece.holder is None else piece.holder.grad for piece in pieces]
    if not any(map(_is_none, gradients, itertools.repeat(None))) and {*map(_layout_of, gradients)} <= {torch.strided}:
        return gradients  # type: ignore[return-value]
    return [
        piece.gradient() if gradient is None or gradient.is_sparse else gradient
        for piece, gradient in zip(pieces, gradients, strict=True)
    ]


NO_ROW = -0.0
"""The elements of the rows that a sparse gradient does not have, in a dense one: see [Note: sparse gradients]."""


def without_no_row(change: Callable[[Tensor], Tensor], gradient: Tensor) -> Tensor:
    """Return what hooks change a sparse gradient into, with no value that is `NO_ROW`."""
    changed = change(gradient)
    if not changed.is_sparse:
        return changed
    return torch.sparse_coo_tensor(changed._indices(), changed._values() + 0.0, changed.shape, check_invariants=False)


def dense_of_rows(gradient: Tensor) -> Tensor:
    """Return a sparse gradient as a dense one, with `NO_ROW` in all rows that it does not have."""
    return torch.full(gradient.shape, NO_ROW, dtype=gradient.dtype, device=gradient.device).add_(gradient)


def sparse_of_rows(gradient: Tensor) -> Tensor:
    """Return the sparse gradient with all rows of a dense one that are not `NO_ROW`."""
    rows = ((gradient != 0) | ~gradient.signbit()).flatten(1).any(1).nonzero()[:, 0]
    return torch.sparse_coo_tensor(
        rows[None], gradient[rows], gradient.shape, check_invariants=False, is_coalesced=True
    )


_is_none = operator.is_
_layout_of = cast("Any", Tensor.layout).__get__


class LiveWeights:
    """The weights that the forward reads of some pieces: the targets of those that have one.

    Where all pieces are updated in place, nothing is copied, and what is written there is kept.
    """

    def __init__(self, pieces: Sequence[Piece]) -> None:
        copied = [(piece, piece.target) for piece in pieces if piece.target is not None]
        copied.sort(key=lambda pair: not _is_small(pair[1]))
        self.are_copied = bool(copied)
        """Whether the forward reads copies of the masters."""
        self._pieces, self._targets = [piece for piece, _ in copied], [target for _, target in copied]
        self._small = [target.view(-1) for target in self._targets if _is_small(target)]
        """The first targets, whose squares are summed in one pass."""
        self._numels = torch.tensor([target.numel() for target in self._small])
        self._early: Tensor | None = None
        self._early_there: Reading | None = None
        self._published = self._state()

    def publish(self) -> None:
        """Copy updated values to the tensors that the forward reads; those of split masters are there."""
        if not self.are_copied:
            return
        pairs = zip(self._pieces, self._targets, strict=True)
        with torch.no_grad():
            host_copies.publish([(piece.value, target) for piece, target in pairs if piece.split is None])
            self._published = self._state()

    def reread(self) -> None:
        """Set the masters to what a user or a forward has written into the targets since `publish`.

        Elements that nobody wrote keep their master values. For a split master it is unknown which ones these are: an
        element keeps its remainder, so a written one is off by up to half a last place of its bfloat16, and a written zero
        is exact. From then on the master of that weight is held whole, and later writes are exact.
        """
        if self.are_copied and self.was_written(self._targets[0].device).item():
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
        if not self.are_copied:
            return
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
