"""Rows of a stack of weights, drawn without the others in memory: the experts of a layer are more than a rank can hold.

A parameter of three dimensions or more, as a stack of experts is, is drawn some rows at a time from one generator. A rank
that holds some of its rows draws those before them too, and lets them go. On a CPU the numbers are those that one call over
the whole stack draws; on a GPU, where they would not be, every layout draws the same rows at a time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from samestep.building.tape import Tape, drawing
from samestep.building.tape_entries import Ref, Slice

_aten = torch.ops.aten
_BY_ELEMENT = frozenset(
    {
        _aten.normal_.default,
        _aten.uniform_.default,
        _aten.zero_.default,
        _aten.fill_.Scalar,
        _aten.mul_.Scalar,
        _aten.mul_.Tensor,
        _aten.add_.Scalar,
        _aten.add_.Tensor,
        _aten.sub_.Tensor,
        _aten.div_.Tensor,
        _aten.clamp_.default,
        _aten.erfinv_.default,
        nn.init._no_grad_trunc_normal_,
    }
)
"""Operations in place that compute every element by itself, with Python's numbers."""
_DRAWN_TOGETHER = 16
"""Elements that a CPU draws together: a row of a multiple of them takes the same numbers as it does within the whole."""
LARGEST_DRAW = 2**22
"""Elements of the rows that are drawn together, unless one row has more: the same in every layout."""


def are_drawn(tape: Tape, part: Slice, ref: Ref) -> bool:
    """Return whether a tensor is a stack whose rows can be drawn one after the other."""
    if len(ref.size) < 3 or 0 in ref.size or math.prod(ref.size[1:]) % _DRAWN_TOGETHER or not part.entries:
        return False
    memory = tape.memories[ref.memory]
    if memory.constant is not None or not _is_whole(ref, memory.meta.nbytes()):
        return False
    for number in part.entries:
        entry = tape.entries[number]
        first, *others = entry.args or (None,)
        if entry.func not in _BY_ELEMENT or entry.writes != {ref.memory} or not entry.reads <= {ref.memory}:
            return False
        if not isinstance(first, Ref) or not _is_whole(first, memory.meta.nbytes()) or first.dtype != ref.dtype:
            return False
        if not all(isinstance(one, (int, float, type(None))) for one in (*others, *entry.kwargs.values())):
            return False
    return True


def _is_whole(ref: Ref, size_bytes: int) -> bool:
    """Return whether a tensor is all of its memory, in the order of its elements."""
    stride = 1
    for size, own in zip(reversed(ref.size), reversed(ref.stride), strict=True):
        if size > 1 and own != stride:
            return False
        stride *= size
    return ref.offset == 0 and not ref.conj and not ref.neg and stride * ref.dtype.itemsize == size_bytes


@torch.no_grad()
def draw(
    tape: Tape, part: Slice, ref: Ref, device: torch.device, keys: dict[int, int], rows: Sequence[tuple[int, int]]
) -> Tensor:
    """Return the rows of some intervals, in the order of the intervals; no rows are in two of them."""
    place = {row: at for at, row in enumerate(row for start, stop in rows for row in range(start, stop))}
    made = torch.zeros(len(place), *ref.size[1:], dtype=ref.dtype, device=device)
    together = max(1, LARGEST_DRAW // math.prod(ref.size[1:]))
    states: dict[int, Tensor] = {}
    with torch.autocast(device.type, enabled=False):
        for first in range(0, max(place, default=-1) + 1, together):
            group = range(first, min(first + together, ref.size[0]))
            drawn = torch.zeros(len(group), *ref.size[1:], dtype=ref.dtype, device=device)
            for number in part.entries:
                entry = tape.entries[number]
                if not entry.random:
                    entry.func(drawn, *entry.args[1:], **entry.kwargs)
                    continue
                with drawing(device, keys[number]) as generator:
                    if number in states:
                        generator.set_state(states[number])
                    entry.func(drawn, *entry.args[1:], **entry.kwargs)
                    states[number] = generator.get_state()
            for row in place.keys() & group:
                made[place[row]] = drawn[row - first]
    return made
