"""Float32 master values in two halves: a weight in bfloat16, which the forward reads, and a remainder of 16 bits.

The bits of a float32 are those of its bfloat16 neighbour, 16 places to the left, plus a remainder. The neighbour is the
master rounded to the nearest, ties to even, as the plain cast rounds, so the remainder is a signed number:

    master's bits = weight's bits * 2^16 + remainder        -2^15 <= remainder <= 2^15

An int16 holds all of these but 2^15, the remainder of a master that is halfway between two weights and is rounded down.
One float32 in 2^17 is such a master. Its remainder is held as 2^15 - 1, and its position in a separate list. So both
halves give the master back to the bit, and take 4 bytes together. What is no number stays none.

On a GPU the list has a fixed length, since the host must not wait for a count: room for 32 times as many as there are
among random numbers, and for 4096 more. Were there more than that, their masters would be one last place of float32 lower.

The masters are joined in one buffer for an update, and split again after it: on GPUs a kernel finds remainders and halfway masters in one
pass (`kernels/remainder_bits.py`). Code that writes into a weight leaves its
remainder as it is; `CopiedWeights.take_over` says how the master is then set.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from samestep.kernels.kernel_choice import runs_kernels
from samestep.kernels.master_remainders import split_remainders
from samestep.program.buckets import round_up

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
        self._windows = [self._buffer[start : start + numel].view(one.shape) for start, numel, one in places]

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
            found = places[at[:, 0]] * _ROW + at[:, 1]
            found = found[(bits[found] & 2 * _TOP) == 0]
            self._remainders[found] = _TOP - 1
            return found
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
