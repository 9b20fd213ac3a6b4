"""The draws of a forward hashed at once, so that a mask costs a view: the hash is that of `masks.py`.

    a, b = two halves of mix64((mix64(sample) ^ key) + row * G)       for each draw, sample and row
    masks of equal positions and probability     [draws x samples x rows, columns], one hash of all their elements

A mask of its own takes 13 operations for its rows, whatever its size, and six more for its elements. A model draws the same masks in
every forward. So when a forward makes its first draw, the rows of all draws are hashed in one tensor that an earlier forward made
after the same first one, and the elements of all masks that are alike in another; the draws then take their windows of it. A draw that
is new, or has other positions, is hashed by itself, and so are the elements of masks that are too large to be held at once.

A mask that a forward has counted (`CountedDraw`) gets the form of its tensor when it is used:

    formula of torch    a mask, bool, whole or in parts         hashed with the other masks of its forward
    kernel              halves of rows and hashed columns       it hashes the elements itself, so no mask is in memory
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from samestep.building.attention.attention_spec import DroppedWeights, WeightHashes
from samestep.kernels.dropped_elements import can_drop, drop_elements
from samestep.kernels.kernel_choice import runs_kernels
from samestep.randomness.masks import (
    HashedPositions,
    drop_threshold,
    dropped_at,
    hash_bits,
    hashed_mask,
    mix,
    row_halves,
)

OF_NO_SAMPLE = -1
"""The dimension of samples of a mask for a tensor that depends on none, such as a weight."""
LIMIT = 2**22
"""Rows, of all draws and samples, beyond which each draw hashes its own."""
MOST_ELEMENTS = 2**22
"""Elements of the masks of a forward that are held at once, in a byte each."""


class Drawn(NamedTuple):
    """The positions of a draw, and the probability of a mask; 0 for random numbers, of which the bits themselves are used."""

    at: HashedPositions
    p: float


_Draws = dict[Hashable, Drawn]


@dataclass(frozen=True, slots=True)
class _Alike:
    """Masks of equal positions and probability: their rows among those of all draws."""

    start: int
    stop: int
    columns: Tensor
    p: float


@dataclass(frozen=True, slots=True)
class _Layout:
    """The draws of a forward in one flat tensor, and the inputs of their hash that do not change."""

    draws: _Draws
    names: list[bytes]
    """The draws as their keys are hashed from, in the order of the flat tensor."""
    starts: dict[Hashable, int]
    """The first row of each draw."""
    rows: Tensor
    """Hashed rows, int64 [N], for each draw those of its samples one after the other."""
    places: Tensor
    """The index in the keys [draws, samples] for each of them, int64 [N]."""
    alike: list[_Alike]
    """The masks whose elements are hashed at once."""


@dataclass(slots=True)
class KnownDraws:
    """The draws of earlier forwards of a model, by the first draw of each forward."""

    of_first: dict[Hashable, _Draws] = field(default_factory=dict)
    _layouts: dict[tuple[Hashable, int], tuple[_Draws, _Layout | None]] = field(default_factory=dict)

    def layout(self, first: Hashable, num_samples: int) -> _Layout | None:
        """Return the layout of a forward that begins with this draw; None if there was none, or it has too many rows."""
        draws = self.of_first.get(first)
        if not draws:
            return None
        key = first, num_samples
        if key not in self._layouts or self._layouts[key][0] != draws:
            total = sum(drawn.at.rows.numel() for drawn in draws.values()) * num_samples
            self._layouts[key] = draws, _layout_of(draws, num_samples) if total <= LIMIT else None
        return self._layouts[key][1]


def _layout_of(draws: _Draws, num_samples: int) -> _Layout:
    groups: dict[tuple[int, float], list[Hashable]] = {}
    for draw, drawn in draws.items():
        groups.setdefault((id(drawn.at), drawn.p), []).append(draw)
    order = [draw for group in groups.values() for draw in group]
    device = draws[order[0]].at.rows.device
    sizes = [draws[draw].at.rows.numel() for draw in order]
    starts, total = {}, 0
    for draw, size in zip(order, sizes, strict=True):
        starts[draw] = total
        total += size * num_samples
    each = torch.tensor(sizes, device=device).repeat_interleave(num_samples)
    # A kernel draws the mask where it drops elements.
    alike, left = [], 0 if runs_kernels(each) else MOST_ELEMENTS
    for group in groups.values():
        (at, p), start = draws[group[0]], starts[group[0]]
        stop = start + len(group) * at.rows.numel() * num_samples
        if p > 0.0 and (stop - start) * at.columns.numel() <= left:
            left -= (stop - start) * at.columns.numel()
            alike.append(_Alike(start, stop, at.columns, p))
    return _Layout(
        draws=draws,
        names=[_name(draw) for draw in order],
        starts=starts,
        rows=torch.cat([draws[draw].at.rows.repeat(num_samples) for draw in order]),
        places=torch.arange(len(sizes) * num_samples, device=device).repeat_interleave(each),
        alike=alike,
    )


def _name(draw: Any) -> bytes:
    return "/".join(map(str, draw)).encode()


class ForwardRows:
    """The hashed rows, and the masks, of the draws of one forward."""

    def __init__(self, known: KnownDraws, keys: hashlib.blake2b) -> None:
        """`known` has the draws of earlier forwards; the key of a draw is the digest of `keys` and its name."""
        self._known, self._keys = known, keys
        self._mine: _Draws | None = None
        """The draws so far."""
        self._layout: _Layout | None = None
        self._halves = torch.empty(0)
        self._dropped: dict[Hashable, Tensor] = {}
        """The masks that were hashed at once, bool [B * R, C]."""

    def of_draw(
        self, draw: Hashable, samples: Tensor, at: HashedPositions, p: float, *, is_shared: bool
    ) -> tuple[Tensor | None, Tensor | None]:
        """Return the halves of a draw's rows, int32 [B, R, 2], for samples with these mixed indices, int64 [B]; or instead the mask
        that is dropped with probability p, bool [B * R, C], where it is known.

        A draw that `is_shared` depends on no sample.
        """
        if is_shared:
            return self._alone(draw, samples, at), None
        if self._mine is None:
            self._begin(draw, samples)
        assert self._mine is not None
        self._mine[draw] = positions = Drawn(at, p)
        if self._layout is None or self._layout.draws.get(draw) != positions:
            return self._alone(draw, samples, at), None
        dropped = self._dropped.get(draw)
        if dropped is not None:
            return None, dropped
        start, number = self._layout.starts[draw], samples.numel() * at.rows.numel()
        return self._halves[start : start + number].view(samples.numel(), at.rows.numel(), 2), None

    def drawn(self, draw: Hashable) -> Drawn:
        """Return the positions of a draw of this forward, as those of earlier forwards have them."""
        assert self._mine is not None
        return self._mine[draw]

    def taken(self, draw: Hashable, drawn: Drawn) -> Tensor | None:
        """Return the mask of a draw at these positions, bool [B * R, C], if it is among those hashed at once; it is then drawn."""
        if self._mine is None:
            return None
        mask = self._dropped.get(draw)
        assert mask is None or self._layout is not None
        if mask is None or self._layout.draws[draw] != drawn:  # type: ignore[union-attr]
            return None
        self._mine[draw] = drawn
        return mask

    def _alone(self, draw: Hashable, samples: Tensor, at: HashedPositions) -> Tensor:
        key = int.from_bytes(self._digest(_name(draw)), "little", signed=True)
        return row_halves(samples ^ key, at.rows)

    def _digest(self, name: bytes) -> bytes:
        keys = self._keys.copy()
        keys.update(name)
        return keys.digest()

    def _begin(self, first: Hashable, samples: Tensor) -> None:
        """Hash the rows of all draws of an earlier forward that began with this one, and the masks that are alike."""
        self._layout = layout = self._known.layout(first, samples.numel())
        self._mine = self._known.of_first[first] = {}
        if layout is None:
            return
        keys = torch.frombuffer(bytearray(b"".join(map(self._digest, layout.names))), dtype=torch.int64)
        if samples.is_cuda:  # the host waits for no copy from pinned memory
            keys = keys.pin_memory()
        keys = keys.to(samples.device, non_blocking=True)
        rows = mix((keys[:, None] ^ samples).flatten()[layout.places] + layout.rows)
        self._halves = rows.view(torch.int32).view(-1, 2)
        for group in layout.alike:
            dropped = dropped_at(self._halves[group.start : group.stop], group.columns, group.p)
            self._dropped |= _windows(layout, group, dropped, samples.numel())


def _windows(layout: _Layout, group: _Alike, dropped: Tensor, num_samples: int) -> dict[Hashable, Tensor]:
    """Return the mask of each draw of a group, in whose order they are."""
    draws = [draw for draw, start in layout.starts.items() if group.start <= start < group.stop]
    each = layout.draws[draws[0]].at.rows.numel() * num_samples
    return dict(zip(draws, dropped.split(each), strict=True))


def part_of(dropped: Tensor, start: int, stop: int, num_columns: int) -> Tensor:
    """Return what is dropped from `start` to before `stop` along the last dimension but one, of so many of the first columns."""
    is_whole = (stop - start, num_columns) == tuple(dropped.shape[-2:])
    return dropped if is_whole else dropped[..., start:stop, :num_columns]


@dataclass(frozen=True, slots=True)
class DrawBits:
    """The inputs of the hashed bits of a draw, or of a part of it; or a mask."""

    halves: Tensor | None
    """The hashed rows of each sample, int32 [B, R, 2]; None where the mask is known."""
    mask: Tensor | None
    """The mask of all samples, bool [B * R, C]."""
    columns: Tensor
    """The hashed columns, int32 [C]."""
    p: float
    """The probability with which an element is dropped."""
    num_samples: int
    shape: tuple[int, ...]
    """Shape for all samples."""
    each: tuple[int, ...]
    """Shape for one sample."""
    dim: int
    inner: int
    """The position of the samples in a row, as in `MaskSpec.rows`."""

    def whole(self) -> Tensor:
        """Return the bits of the whole draw, int32."""
        assert self.halves is not None
        return self._arranged(hash_bits(self.halves, self.columns), self.shape, self.each)

    def dropped(self) -> Tensor:
        """Return which elements are dropped, bool."""
        if self.mask is not None:
            return self._arranged(self.mask, self.shape, self.each)
        assert self.halves is not None
        return self._arranged(dropped_at(self.halves, self.columns, self.p), self.shape, self.each)

    def rows_in_order(self) -> Tensor | None:
        """Return the halves of each row in the order of the tensor, int32 [rows, 2]; None where samples are along its last dimension,
        or the mask itself is known."""
        if self.halves is None or self.is_in_order:
            return None if self.halves is None else self.halves.view(-1, 2)
        if self.dim == len(self.shape) - 1:
            return None
        return self._arranged(self.halves, (*self.shape[:-1], 2), (*self.each[:-1], 2)).view(-1, 2)

    def dropped_part(self, start: int, stop: int, num_columns: int) -> Tensor:
        """Return `dropped` from `start` to before `stop` along the last dimension but one, of so many of the first columns."""
        if self.mask is None and self.dim < len(self.shape) - 2:
            assert self.halves is not None
            size = (stop - start, num_columns)
            halves = self.halves.view(-1, *self.each[:-1], 2)[..., start:stop, :].flatten(1, -2)
            dropped = dropped_at(halves, self.columns[:num_columns], self.p)
            return self._arranged(dropped, (*self.shape[:-2], *size), (*self.each[:-2], *size))
        return part_of(self.dropped(), start, stop, num_columns)

    def hashes(self, threshold: int) -> WeightHashes:
        """Return what a kernel draws the mask from, of samples that are not along the last dimension."""
        assert self.halves is not None, "masks without a probability are not hashed with others"
        halves = self._arranged(self.halves, (*self.shape[:-1], 2), (*self.each[:-1], 2))
        return WeightHashes(halves, self.columns, threshold)

    @property
    def is_in_order(self) -> bool:
        """Whether the elements are in the order of the tensor, so that a mask is a view."""
        return self.dim == OF_NO_SAMPLE or (self.dim == 0 and self.inner in (0, self.each[0]))

    def _arranged(self, values: Tensor, shape: Sequence[int], each: tuple[int, ...]) -> Tensor:
        if self.dim == OF_NO_SAMPLE or (self.dim == 0 and self.inner in (0, each[0])):
            return values.view(shape)
        inner = self.inner or each[self.dim]
        values = values.view(self.num_samples, *each[: self.dim], each[self.dim] // inner, inner, *each[self.dim + 1 :])
        return values.movedim(0, self.dim + 1).reshape(shape)


@dataclass(frozen=True, slots=True)
class CountedDraw:
    """A mask that was counted."""

    arranged: Callable[[torch.device, torch.Size, float], DrawBits]
    """Returns its bits for a tensor on a device, of this shape; with the probability of a mask, or 0 where a kernel hashes elements."""
    dim: int
    """The dimension of the samples."""
    p: float
    """The probability with which an element is dropped."""

    def bits(self, x: Tensor, shape: torch.Size) -> DrawBits:
        """Return the bits for a tensor."""
        return self.arranged(x.device, shape, self.p)

    def drop_elements(self, x: Tensor, *, inplace: bool) -> Tensor:
        """Return a tensor on which kernels run with elements dropped and scaled: by one kernel, or by torch what that does not take."""
        bits, scale = self.bits(x, x.shape), 1.0 / (1.0 - self.p)
        halves = bits.rows_in_order()
        if halves is None or not can_drop(x, bits.columns.numel(), inplace=inplace):
            dropped = bits.dropped()
            return (x.masked_fill_(dropped, 0.0) if inplace else x.masked_fill(dropped, 0.0)).mul_(scale)
        return drop_elements(x, hashed_mask(halves, bits.columns, self.p), scale, inplace=inplace)

    def weights(self, x: Tensor, shape: torch.Size) -> DroppedWeights:
        """Return the dropout of an attention with these queries, whose weights have this shape."""
        if not runs_kernels(x):
            return DroppedWeights(self.p, self.bits(x, shape).dropped_part)
        arranged, device, p = self.arranged, x.device, self.p  # the tensor itself would be kept for the backward
        bits = functools.cache(lambda: arranged(device, shape, p))
        hashes = functools.cache(lambda: arranged(device, shape, 0.0).hashes(drop_threshold(p)))
        are_in_rows = self.dim < len(shape) - 1
        return DroppedWeights(p, lambda *some: bits().dropped_part(*some), hashes if are_in_rows else None)


@dataclass(slots=True)
class RunningForward:
    """One running forward of a module."""

    name: str
    entry: int
    num_draws: int = 0
    num_numbers: int = 0
    num_choices: int = 0
    """Number of expert choices recorded in this forward (`runtime/axes/expert.py`)."""
