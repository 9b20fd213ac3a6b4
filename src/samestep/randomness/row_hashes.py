"""The hashed rows of all masks that a forward draws, computed at once: the first half of the hash of `masks.py`.

    a, b = two halves of mix64((mix64(sample) ^ key) + row * G)       for each draw, sample and row

A mask of its own takes 13 operations for this, whatever its size, and five more for its elements. A model draws the same masks in
every forward. So when a forward makes its first draw, the rows of all draws are hashed in one tensor that an earlier forward made
after the same first one; the draws then take their windows of it. A draw that is new, or has other positions, hashes its own rows.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from samestep.randomness.masks import hash_bits, mix, row_halves

OF_NO_SAMPLE = -1
"""The dimension of samples of a mask for a tensor that depends on none, such as a weight."""
LIMIT = 2**22
"""Rows, of all draws and samples, beyond which each draw hashes its own."""


@dataclass(slots=True)
class _Layout:
    """The draws of a forward in one flat tensor, and the inputs of their hash that do not change."""

    draws: dict[Hashable, Tensor]
    """The hashed rows of one sample of each draw, int64 [R]."""
    starts: dict[Hashable, int]
    """The first row of each draw."""
    rows: Tensor
    """Hashed rows, int64 [N], for each draw those of its samples one after the other."""
    places: Tensor
    """The index in the keys [draws, samples] for each of them, int64 [N]."""


@dataclass(slots=True)
class KnownDraws:
    """The draws of earlier forwards of a model, by the first draw of each forward."""

    of_first: dict[Hashable, dict[Hashable, Tensor]] = field(default_factory=dict)
    _layouts: dict[tuple[Hashable, int], _Layout] = field(default_factory=dict)

    def layout(self, first: Hashable, num_samples: int) -> _Layout | None:
        """Return the layout of a forward that begins with this draw; None if there was none, or it has too many rows."""
        draws = self.of_first.get(first)
        total = sum(rows.numel() for rows in draws.values()) * num_samples if draws else 0
        if not draws or total > LIMIT:
            return None
        found = self._layouts.get((first, num_samples))
        if (
            found is None
            or [*found.draws] != [*draws]
            or not all(map(operator.is_, found.draws.values(), draws.values()))
        ):
            found = self._layouts[first, num_samples] = _layout_of(draws, num_samples)
        return found


def _layout_of(draws: dict[Hashable, Tensor], num_samples: int) -> _Layout:
    device = next(iter(draws.values())).device
    sizes = [rows.numel() for rows in draws.values()]
    starts = [num_samples * sum(sizes[:index]) for index in range(len(sizes))]
    each = torch.tensor(sizes, device=device).repeat_interleave(num_samples)
    places = torch.arange(len(sizes) * num_samples, device=device).repeat_interleave(each)
    rows = torch.cat([rows.repeat(num_samples) for rows in draws.values()])
    return _Layout(dict(draws), dict(zip(draws, starts, strict=True)), rows, places)


class ForwardRows:
    """The hashed rows of the draws of one forward."""

    def __init__(self, known: KnownDraws, key_of: Callable[[Any], int]) -> None:
        """`known` has the draws of earlier forwards; `key_of` returns the key of a draw."""
        self._known, self._key_of = known, key_of
        self._mine: dict[Hashable, Tensor] | None = None
        """The rows of each draw so far."""
        self._layout: _Layout | None = None
        self._halves = torch.empty(0)

    def halves(self, draw: Hashable, samples: Tensor, rows: Tensor) -> Tensor:
        """Return the halves of a draw's rows, int32 [B, R, 2], for samples with these mixed indices, int64 [B].

        `rows` are hashed positions, int64 [R]: equal ones are the same tensor in every forward.
        """
        if self._mine is None:
            self._begin(draw, samples)
        assert self._mine is not None
        self._mine[draw] = rows
        if self._layout is None or self._layout.draws.get(draw) is not rows:
            return row_halves(samples ^ self._key_of(draw), rows)
        start, number = self._layout.starts[draw], samples.numel() * rows.numel()
        return self._halves[start : start + number].view(torch.int32).view(samples.numel(), rows.numel(), 2)

    def _begin(self, first: Hashable, samples: Tensor) -> None:
        """Hash the rows of all draws of an earlier forward that began with this one."""
        self._layout = layout = self._known.layout(first, samples.numel())
        self._mine = self._known.of_first[first] = {}
        if layout is not None:
            keys = torch.tensor([self._key_of(draw) for draw in layout.draws])
            if samples.is_cuda:  # the host waits for no copy from pinned memory
                keys = keys.pin_memory()
            keys = keys.to(samples.device, non_blocking=True)
            self._halves = mix((keys[:, None] ^ samples).flatten()[layout.places] + layout.rows)


@dataclass(frozen=True, slots=True)
class DrawBits:
    """The inputs of the hashed bits of a draw, or of a part of it."""

    halves: Tensor
    """The hashed rows of each sample, int32 [B, R, 2]."""
    columns: Tensor
    """The hashed columns, int32 [C]."""
    shape: tuple[int, ...]
    """Shape for all samples."""
    each: tuple[int, ...]
    """Shape for one sample."""
    dim: int
    inner: int
    """The position of the samples in a row, as in `MaskSpec.rows`."""

    def whole(self) -> Tensor:
        """Return the bits of the whole draw, int32."""
        return self._arranged(hash_bits(self.halves, self.columns), self.shape, self.each)

    def part(self, start: int, stop: int, num_columns: int) -> Tensor:
        """Return the bits from `start` to before `stop` along the last dimension but one, of so many of the first columns."""
        if self.dim >= len(self.shape) - 2:
            return self.whole()[..., start:stop, :num_columns]
        size = (stop - start, num_columns)
        halves = self.halves.view(-1, *self.each[:-1], 2)[..., start:stop, :].flatten(1, -2)
        bits = hash_bits(halves, self.columns[:num_columns])
        return self._arranged(bits, (*self.shape[:-2], *size), (*self.each[:-2], *size))

    def _arranged(self, bits: Tensor, shape: tuple[int, ...], each: tuple[int, ...]) -> Tensor:
        if self.dim == OF_NO_SAMPLE or (self.dim == 0 and self.inner in (0, each[0])):
            return bits.view(shape)
        inner = self.inner or each[self.dim]
        bits = bits.view(self.halves.size(0), *each[: self.dim], each[self.dim] // inner, inner, *each[self.dim + 1 :])
        return bits.movedim(0, self.dim + 1).reshape(shape)
