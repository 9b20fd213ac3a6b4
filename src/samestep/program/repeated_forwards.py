"""The collectives that checkpoints in the model's code repeat, each placed where a backward asks for it. No torch.

```
    forward    checkpoint 1 [ a  b (kept)  c ]  d            c is sent behind all that is kept, so nobody repeats it
    backward   d'  c'  a b  b'  a'                           what stands behind the last kept tensor, the repeated part, the rest
```
A checkpoint is repeated before the first backward of something in front of its last kept tensor, at the latest before that of what
stands in front of the checkpoint; and after the repeat of the one around it, which has its input.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from samestep.models.layer_parts import NOWHERE
from samestep.program.ops import Op

_LAYER = 0
"""What stands for a layer, whose whole forward the layout repeats, among the numbers of its checkpoints."""


class SentBackward(NamedTuple):
    """The collectives of a layer's backward, in three parts."""

    ahead: list[Op]
    """In front of the repeat of the whole layer's forward, if that is repeated."""
    repeated: list[Op]
    """In that repeat."""
    rest: list[Op]


def with_repeats(forward: Sequence[Op], backward: Sequence[Op], *, repeats_layer: bool) -> SentBackward:
    """Return what a layer sends in its backward, with what its checkpoints repeat of its forward.

    What is sent over one axis is in order; how messages of several axes alternate is not known.
    """
    found = SentBackward([], [], [])
    for axis in dict.fromkeys(op.axis for op in (*forward, *backward)):
        repeats = _Repeats([op for op in forward if op.axis == axis], found if repeats_layer else None)
        for op in backward:
            if op.axis == axis:
                found.rest.extend(repeats.before(op))
                (found.rest if repeats.has_layer else found.ahead).append(op.but(place=NOWHERE))
        found.rest.extend(repeats.rest())
    return found


class _Repeats:
    """The repeats of one layer's checkpoints in its backward, of what it sends over one axis."""

    def __init__(self, forward: Sequence[Op], layer: SentBackward | None) -> None:
        self._forward, self._layer = forward, layer
        self._made: set[int] = set() if layer is not None else {_LAYER}
        self._around = {one: op.place.inside[:index] for op in forward for index, one in enumerate(op.place.inside)}
        """The checkpoints around each one."""

    @property
    def has_layer(self) -> bool:
        """Whether the repeat of the whole layer is over, or there is none."""
        return _LAYER in self._made

    def before(self, op: Op) -> Iterator[Op]:
        """Yield what is repeated before an op of the backward."""
        behind = sorted((one for one in self._around if one > op.place.at), reverse=True)
        return self._repeated((*behind, *op.place.again))

    def rest(self) -> Iterator[Op]:
        """Yield what is repeated after the last op of the backward."""
        return self._repeated((*sorted(self._around, reverse=True), _LAYER))

    def _repeated(self, checkpoints: Iterable[int]) -> Iterator[Op]:
        for one in checkpoints:
            if one in self._made:
                continue
            self._made.add(one)
            if one != _LAYER:
                yield from self._repeated((_LAYER, *self._around.get(one, ())))
            again = [op.but(place=NOWHERE) for op in self._forward if one in op.place.again]
            if one == _LAYER and self._layer is not None:
                self._layer.repeated.extend(again)
            else:
                yield from again
