"""The form of an attention that code writes out: its queries and keys, and what has been done to their scores.

Legend: N samples, heads and other dimensions that queries and keys share, L queries, S keys, D features of a head; the normal order of
dimensions is [N..., L, S].
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from samestep.building.attention.attention_call import AttentionCall
from samestep.building.attention.attention_spec import DroppedWeights

LEAST_FILL = -1e4
"""A number of at most this, in the place of a score, leaves a key no weight beside one that is seen."""

DropLater = Callable[[Tensor, torch.Size], DroppedWeights]
"""Makes the mask of a draw that was counted before, for weights of this shape."""


class ScoreMask(NamedTuple):
    """Numbers that are added to scores, or the scores in whose place a number stands, in the normal order of dimensions."""

    tensor: Tensor
    fill: float | None = None
    """The number, where the tensor says which scores it replaces."""
    times: float = 1.0
    given: Tensor | None = None
    """The mask as the code has it."""

    def scaled(self, times: float) -> ScoreMask:
        """Return the mask of scores that are multiplied by a number."""
        if self.fill is None:
            return self._replace(times=self.times * times)
        return self._replace(fill=self.fill * times)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreForm:
    """The scores of an attention, and what has been done to them."""

    number: int
    """Number of the first product among those of its block."""
    query: Tensor
    key: Tensor
    """[N..., L, D] and [N..., S, D]."""
    order: tuple[int, ...]
    """The normal dimension at each place of the tensor that the code has."""
    scale: float = 1.0
    is_capped: bool = False
    cap: float = 1.0
    masks: tuple[ScoreMask, ...] = ()
    sinks: Tensor | None = None
    """[N...], broadcast."""
    has_sink_column: bool = False
    stage: str = "scores"
    """scores, exponentials or weights."""
    after: float = 1.0
    """Factor of the weights."""
    dropout_p: float = 0.0
    draw: DropLater | None = None
    drawn_shape: tuple[int, ...] = ()
    """Sizes of the shared dimensions of the tensor whose elements are dropped."""

    @property
    def shared(self) -> tuple[int, ...]:
        """Sizes of the dimensions that queries and keys share."""
        return tuple(torch.broadcast_shapes(self.query.shape[:-2], self.key.shape[:-2]))

    @property
    def normal_shape(self) -> tuple[int, ...]:
        """The shape in the normal order."""
        return (*self.shared, self.query.shape[-2], self.key.shape[-2] + self.has_sink_column)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape that the code sees."""
        return tuple(self.normal_shape[dim] for dim in self.order)

    @property
    def is_normal(self) -> bool:
        """Whether the code has the dimensions in the normal order."""
        return self.order == tuple(range(len(self.order)))

    def in_normal_order(self, tensor: Tensor) -> Tensor | None:
        """Return a tensor that is broadcast with the scores in the normal order; None where it has more dimensions."""
        rank = len(self.order)
        if tensor.dim() > rank:
            return None
        tensor = tensor[(None,) * (rank - tensor.dim())]
        return tensor if self.is_normal else tensor.permute([self.order.index(dim) for dim in range(rank)])

    def swapped(self) -> ScoreForm:
        """Return the scores with queries and keys in each other's place."""
        last = len(self.order) - 1
        order = tuple({last: last - 1, last - 1: last}.get(dim, dim) for dim in self.order)
        masks = tuple(one._replace(tensor=one.tensor.transpose(-2, -1)) for one in self.masks)
        return replace(self, query=self.key, key=self.query, order=order, masks=masks)


class WrittenCall(NamedTuple):
    """An attention that was written out, with four dimensions: samples, heads, tokens and features."""

    number: int
    call: AttentionCall
    """Without masks."""
    masks: tuple[ScoreMask, ...]
    draw: DropLater | None
    drawn_shape: tuple[int, ...]

    def masked_by(self, masks: Sequence[ScoreMask]) -> AttentionCall:
        """Return the call with some masks as one."""
        return self.call._replace(attn_mask=_joined(masks, self.call.query.dtype))

    def with_keys(self, masks: Sequence[ScoreMask]) -> WrittenCall:
        """Return the call with masks that have a number for each key as a feature of the keys, by which that number is added to scores.

        The feature of queries is one over the scale.
        """
        if not masks:
            return self
        query, key, value = self.call[:3]
        total: Tensor | None = None
        for one in masks:
            number = (
                one.tensor.to(query.dtype) * one.times
                if one.fill is None
                else _hiding(one.tensor, -_most(query.dtype), query.dtype)
            )
            total = number if total is None else total + number
        assert total is not None
        feature = total.clamp_min(-_most(query.dtype)).transpose(-2, -1).expand(*key.shape[:-1], 1)
        times = 1.0 / (query.shape[-1] ** -0.5 if self.call.scale is None else self.call.scale)
        query = torch.nn.functional.pad(query, (0, 1), value=times)
        return self._replace(call=self.call._replace(query=query, key=torch.cat([key, feature], -1), value=value))


def _most(dtype: torch.dtype) -> float:
    """Return a number from which no score makes another one, and whose products with small numbers are finite."""
    return torch.finfo(dtype).max ** 0.75


def _hiding(hidden: Tensor, number: float, dtype: torch.dtype) -> Tensor:
    """Return what is added to scores: a number where they are hidden, and 0 elsewhere."""
    return torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill(hidden, number)


def _joined(masks: Sequence[ScoreMask], dtype: torch.dtype) -> Tensor | None:
    """Return some masks as one: true where a query sees a key, or a number that is added to the scores."""
    hidden: Tensor | None = None
    total: Tensor | None = None
    for one in masks:
        if one.fill == -math.inf:
            hidden = one.tensor if hidden is None else hidden | one.tensor
            continue
        if one.fill is not None:  # so low that it takes the score's place
            found = _hiding(one.tensor, torch.finfo(dtype).min, dtype)
        else:
            found = one.tensor.to(dtype) if one.times == 1.0 else one.tensor.to(dtype) * one.times
        total = found if total is None else (total + found).clamp_min(torch.finfo(dtype).min)
    if total is None:
        return None if hidden is None else ~hidden
    return total if hidden is None else total.masked_fill(hidden, -math.inf)
