"""Parts of blocks that context parallelism computes on the whole sequence, since they mix tokens in another way than attention.

Recurrences, convolutions over tokens, scores that code computes by itself, and what counts or looks at tokens are right on all tokens
alone. If the proof of slices (`token_slices.py`) fails in a child of a block, that child becomes such a part:

    block's own code, other children    a rank's tokens
    part                                its arguments gathered from all ranks; each rank computes all tokens
    what it returns                     a rank's tokens

The gradient of what was gathered is summed over ranks, each of which has the part of it that its own tokens' results take. So the
gradients of a part's weights are sums over ranks as those of all others are. A part's compute is not divided, and the price says so.

Where the proof fails in a block's own code, the whole block is a part; a model all of whose blocks would be parts is refused.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from samestep.models.layer_parts import GatheredPart, GatheredTensor, TokenMove
from samestep.models.layer_spec import LayerSpec
from samestep.models.spec import is_below
from samestep.tracing.checkpointed import Point, TracedPlaces


def wider_parts(
    module: nn.Module, blocks: Sequence[str], parts: Collection[str], failed: str, called: Collection[str]
) -> frozenset[str] | None:
    """Return the parts with one more in which the proof has failed, in all blocks alike; None if that is in no block, or in a part.

    `called` are the modules that the forward has called.
    """
    block = next((path for path in blocks if is_below(failed, path)), None)
    if block is None or block in parts:
        return None
    inside = failed[len(block) + 1 :].split(".") if failed != block else []
    names = (".".join([block, *inside[:count]]) for count in range(1, len(inside) + 1))
    child = next((name for name in names if name in called), block)
    if child in parts:
        child = block
    kinds = type(module.get_submodule(block)), type(module.get_submodule(child))
    relative = child[len(block) :]
    alike = [
        f"{path}{relative}"
        for path in blocks
        if type(module.get_submodule(path)) is kinds[0] and _type_at(module, f"{path}{relative}") is kinds[1]
    ]
    return frozenset(alike) | {part for part in parts if not any(is_below(part, wider) for wider in alike)}


def _type_at(module: nn.Module, path: str) -> type | None:
    try:
        return type(module.get_submodule(path))
    except AttributeError:
        return None


@dataclass
class PartCalls:
    """The calls of parts in one forward, by the block that makes them, with the attentions around and within them."""

    places: TracedPlaces
    """The points of the forward."""
    calls: list[tuple[str, int, GatheredPart, Point]] = field(default_factory=list)
    """Path of the block, number of its call, the part, and the point at which it is entered, with the nodes of what it returns."""
    moved: list[tuple[str, int, TokenMove, Point]] = field(default_factory=list)
    """Path of the block, number of its call, a call that needs tokens of neighbours, and the point at which they are sent."""
    within: set[tuple[str, int, int]] = field(default_factory=set)
    """Attentions within parts: path of the block, number of its call, number of the attention."""
    _blocks: dict[str, int] = field(default_factory=dict)
    _block: str = ""
    _attentions: int = 0

    def enter_block(self, path: str) -> None:
        """Record the call of a block."""
        self._blocks[path] = self._blocks.get(path, -1) + 1
        self._block, self._attentions = path, 0

    def attended(self, *, is_within: bool) -> None:
        """Record an attention."""
        if is_within:
            self.within.add((self._block, self._blocks.get(self._block, 0), self._attentions))
        self._attentions += 1

    def enter(self, part: GatheredPart) -> None:
        """Record the call of a part with its arguments."""
        self.calls.append((self._block, self._number, replace(part, before=self._attended), self.places.point()))

    def move(self, move: TokenMove, point: Point) -> None:
        """Record a call that needs tokens of neighbours, which are sent at a point of the forward."""
        block, number = self._block, self._number
        parts = sum((block, number) == call[:2] for call in self.calls)
        self.moved.append((block, number, replace(move, before=self._attended, parts_before=parts), point))

    @property
    def _number(self) -> int:
        return self._blocks.get(self._block, 0)

    @property
    def _attended(self) -> int:
        """Number of attentions of the block so far that are given slices."""
        return sum((self._block, self._number, attention) not in self.within for attention in range(self._attentions))

    def leave(self, returned: Iterable[tuple[str, int]], output: Any) -> None:
        """Record what the last part returns, and the places of it that a rank keeps a part of."""
        block, number, part, entered = self.calls[-1]
        point = entered._replace(nodes=self.places.point(output).nodes)
        self.calls[-1] = block, number, replace(part, returned=tuple(returned)), point

    @property
    def moves(self) -> list[tuple[str, int, TokenMove]]:
        """The calls that need tokens of neighbours, which those of a slice and of the whole sequence must have alike."""
        return [(block, number, move) for block, number, move, _ in self.moved]

    @property
    def shapes(
        self,
    ) -> list[tuple[str, int, str, tuple[tuple[str, int, bool, bool], ...], tuple[tuple[str, int], ...]]]:
        """The calls in the terms in which those of a slice and of the whole sequence must be equal."""
        return [
            (block, number, part.owner,
             tuple((tensor.place, tensor.dim, tensor.is_known, tensor.takes_gradient) for tensor in part.given),
             part.returned)
            for block, number, part, _ in self.calls
        ]  # fmt: skip

    def added_to(
        self, layers: tuple[LayerSpec, ...], scale: tuple[int, int], reasons: Mapping[str, str]
    ) -> tuple[LayerSpec, ...]:
        """Return the layers with their parts and the reason of each; elements are those of `scale[1]` tokens, and become those of `scale[0]`."""
        calls: dict[str, int] = {}
        new_layers = []
        for layer in layers:
            first = layer.repeats or layer.name
            number = calls[first] = calls.get(first, -1) + 1
            names = layer.modules if layer.modules and not layer.repeats else layer.again
            parts = [
                (replace(part, place=self.places.place(point, layer.called)), self.places.is_reached(point))
                for block, call, part, point in self.calls
                if block in names and call == number
            ]
            within = {attention for block, call, attention in self.within if block in names and call == number}
            exchanges = tuple(
                replace(exchange, is_within=at // 4 in within) for at, exchange in enumerate(layer.exchanges)
            )
            sized = [
                replace(
                    part,
                    given=tuple(_scaled(tensor, scale, is_reached) for tensor in part.given),
                    reason=reasons.get(part.owner, ""),
                )
                for part, is_reached in parts
            ]
            moves = tuple(
                self._placed(move, point, layer)
                for block, call, move, point in self.moved
                if block in names and call == number
            )
            new_layers.append(replace(layer, gathered_parts=tuple(sized), token_moves=moves, exchanges=exchanges))
        return tuple(new_layers)

    def _placed(self, move: TokenMove, point: Point, layer: LayerSpec) -> TokenMove:
        """Return a call with its place, and whether the backward comes to it; ranks keep something of a state that they send on."""
        takes_gradient = move.takes_gradient and self.places.is_reached(point)
        place = self.places.place(point, layer.called, is_kept=move.kind == "state" and move.takes_gradient)
        return replace(move, takes_gradient=takes_gradient, place=place)


def _scaled(tensor: GatheredTensor, scale: tuple[int, int], is_reached: bool) -> GatheredTensor:
    """Return an argument of `scale[1]` tokens as one of `scale[0]`, which takes a gradient if the backward reaches its part."""
    elements = tensor.elements * scale[0] // scale[1]
    return replace(tensor, elements=elements, takes_gradient=tensor.takes_gradient and is_reached)
