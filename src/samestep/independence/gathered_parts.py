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

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from torch import nn

from samestep.models.layer_parts import GatheredPart, GatheredTensor, TokenMove
from samestep.models.layer_spec import LayerSpec
from samestep.models.spec import is_below
from samestep.tracing.arranged_layers import layers_of_regions
from samestep.tracing.checkpointed import Point
from samestep.tracing.module_inputs import ForwardCalls


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


class _Placed(NamedTuple):
    """Something that a block does, and where in the forward."""

    region: str
    """The call of the block."""
    what: GatheredPart | TokenMove
    point: Point
    """That at which a part is entered, with the nodes of what it returns, or at which tokens of neighbours are sent."""


@dataclass
class PartCalls:
    """The calls of parts in one forward, and those that need tokens of neighbours, by the call of the block that makes them."""

    calls: ForwardCalls
    """All calls of the forward."""
    placed: list[_Placed] = field(default_factory=list)
    within: set[tuple[str, int]] = field(default_factory=set)
    """Attentions within parts: call of the block, number of the attention."""
    _blocks: Counter[str] = field(default_factory=Counter)
    _region: str = ""
    _attentions: int = 0

    def enter_block(self, path: str) -> None:
        """Record the call of a block, which makes a region."""
        self._blocks[path] += 1
        self._region = path if self._blocks[path] == 1 else f"{path}#{self._blocks[path]}"
        self._attentions = 0

    def attended(self, *, is_within: bool) -> None:
        """Record an attention."""
        if is_within:
            self.within.add((self._region, self._attentions))
        self._attentions += 1

    def enter(self, part: GatheredPart) -> None:
        """Record the call of a part with its arguments."""
        self.placed.append(_Placed(self._region, replace(part, before=self._attended), self.calls.places.point()))

    def move(self, move: TokenMove, point: Point) -> None:
        """Record a call that needs tokens of neighbours, which are sent at a point of the forward."""
        parts = sum(placed.region == self._region and isinstance(placed.what, GatheredPart) for placed in self.placed)
        self.placed.append(_Placed(self._region, replace(move, before=self._attended, parts_before=parts), point))

    @property
    def _attended(self) -> int:
        """Number of attentions of the block so far that are given slices."""
        return sum((self._region, attention) not in self.within for attention in range(self._attentions))

    def leave(self, returned: Iterable[tuple[str, int]], output: Any) -> None:
        """Record what the last part returns, and the places of it that a rank keeps a part of."""
        *_, part, point = last = self.placed[-1]
        assert isinstance(part, GatheredPart)
        point = point._replace(nodes=self.calls.places.point(output).nodes)
        self.placed[-1] = last._replace(what=replace(part, returned=tuple(returned)), point=point)

    @property
    def shapes(self) -> list[tuple[Any, ...]]:
        """All that is recorded but for the points, which a slice and the whole sequence must have alike."""
        return [placed[:2] for placed in self.placed]

    def added_to(
        self, layers: tuple[LayerSpec, ...], scale: tuple[int, int], reasons: Mapping[str, str]
    ) -> tuple[LayerSpec, ...]:
        """Return the layers with their parts and the reason of each; elements are those of `scale[1]` tokens, and become those of `scale[0]`."""
        layer_of, places, new_layers = layers_of_regions(layers, self.calls), self.calls.places, []
        for index, layer in enumerate(layers):
            parts, moves = list[GatheredPart](), list[TokenMove]()
            for region, what, point in self.placed:
                if layer_of.get(region) != index:
                    continue
                is_reached = places.is_reached(point)
                if isinstance(what, TokenMove):  # ranks keep something of a state that they send on
                    is_kept = what.kind == "state" and what.takes_gradient
                    place = places.place(point, layer.called, is_kept=is_kept)
                    moves.append(replace(what, takes_gradient=what.takes_gradient and is_reached, place=place))
                else:
                    tensors = tuple(_scaled(tensor, scale, is_reached) for tensor in what.given)
                    place, reason = places.place(point, layer.called), reasons.get(what.owner, "")
                    parts.append(replace(what, given=tensors, place=place, reason=reason))
            within = {attention for region, attention in self.within if layer_of.get(region) == index}
            exchanges = tuple(
                replace(exchange, is_within=at // 4 in within) for at, exchange in enumerate(layer.exchanges)
            )
            new_layers.append(
                replace(layer, gathered_parts=tuple(parts), token_moves=tuple(moves), exchanges=exchanges)
            )
        return tuple(new_layers)


def _scaled(tensor: GatheredTensor, scale: tuple[int, int], is_reached: bool) -> GatheredTensor:
    """Return an argument of `scale[1]` tokens as one of `scale[0]`, which takes a gradient if the backward reaches its part."""
    elements = tensor.elements * scale[0] // scale[1]
    return replace(tensor, elements=elements, takes_gradient=tensor.takes_gradient and is_reached)
