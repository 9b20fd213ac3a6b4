"""Parts of blocks that every rank of `cp` computes on the whole sequence (`independence/gathered_parts.py` finds them).

    given       [B, T/N, D]   all_gather ──►  [B, T, D]   the part, as on one device
    returned    [B, T/N, D]   ◄── a rank's tokens         [B, T, D]

In the backward the gradient of what is returned is zero for the tokens of other ranks, and that of what was gathered is summed:
a reduce_scatter. An argument of the block that the part is given as it is, such as angles or a mask, is on every rank whole.

Legend: B samples, T tokens, N ranks of `cp`, D features.
"""

from __future__ import annotations

import functools
from typing import Any, Protocol

import torch.distributed as dist
from torch import Tensor, nn

from samestep.errors import LayoutError
from samestep.models.layer_parts import GatheredPart
from samestep.models.spec import ModelSpec
from samestep.program.ring_visits import SlicePlacement
from samestep.runtime.axes.context.own_rows import rows_of
from samestep.runtime.axes.differentiable import apply_move
from samestep.runtime.ledger import owned
from samestep.runtime.processes.mesh import all_gather, reduce_scatter
from samestep.trees import keystr, tree_flatten_with_path, tree_unflatten


class _Slices(Protocol):
    """What the calls of a part need of the slice of every sequence that a rank runs."""

    length: int
    group: dist.ProcessGroup

    def placement(self, length: int) -> SlicePlacement: ...

    def rows_along(self, whole: Tensor, dim: int) -> Tensor: ...

    def suspend(self) -> tuple[int, str, int]: ...

    def resume(self, before: tuple[int, str, int]) -> None: ...


def install(model: nn.Module, spec: ModelSpec, slicing: _Slices) -> None:
    """Give each part all tokens, and the code after it those of this rank.

    Collective over `cp` in each forward and backward, see [Note: collective calls].
    """
    parts: dict[str, GatheredPart] = {}
    for part in (part for layer in spec.layers for part in layer.gathered_parts):
        parts.setdefault(part.owner, part)
    for path, part in parts.items():
        calls = _GatheredCalls(part, slicing)
        module = model.get_submodule(path)
        module.register_forward_pre_hook(calls.enter, with_kwargs=True)
        module.register_forward_hook(calls.leave)


class _GatheredCalls:
    """The calls of one part, which do not contain each other."""

    def __init__(self, part: GatheredPart, slicing: _Slices) -> None:
        self._part, self._slicing = part, slicing
        self._given = {one.place: one for one in part.given}
        self._returned = dict(part.returned)
        self._before: tuple[int, str, int] | None = None

    def enter(self, _: nn.Module, args: Any, kwargs: Any) -> Any:
        """Return the arguments of a call with all tokens."""
        slicing = self._slicing
        self._before = None
        if not slicing.length:
            return None
        leaves, tree = tree_flatten_with_path((args, kwargs))
        found = [self._whole(keystr(place), leaf) for place, leaf in leaves]
        self._before = slicing.suspend()
        return tree_unflatten(found, tree)

    def _whole(self, place: str, leaf: Any) -> Any:
        one = self._given.get(place)
        if one is None or not isinstance(leaf, Tensor):
            return leaf
        if one.is_known and isinstance(whole := getattr(leaf, "whole", None), Tensor):
            return whole
        placement = self._slicing.placement(self._slicing.length)
        if leaf.dim() <= one.dim or leaf.shape[one.dim] != placement.size:
            raise LayoutError(
                f"{self._part.owner} is given {place} of shape {list(leaf.shape)}, and in the traced forward a row for each of a "
                f"rank's {placement.size} tokens along dimension {one.dim}: cp=1 works"
            )
        there = functools.partial(gather_tokens, placement=placement, dim=one.dim)
        back = functools.partial(_summed, placement=placement, dim=one.dim)
        return apply_move(leaf, self._slicing.group, self._part.owner, there, back)

    def leave(self, _: nn.Module, args: Any, output: Any) -> Any:
        """Return this rank's tokens of what a call has returned."""
        if self._before is None:
            return None
        self._slicing.resume(self._before)
        self._before = None
        leaves, tree = tree_flatten_with_path(output)
        return tree_unflatten([self._own(keystr(place), leaf) for place, leaf in leaves], tree)

    def _own(self, place: str, leaf: Any) -> Any:
        dim = self._returned.get(place)
        if dim is None or not isinstance(leaf, Tensor):
            return leaf
        if leaf.dim() <= dim or leaf.shape[dim] != self._slicing.length:
            raise LayoutError(
                f"{self._part.owner} returns a tensor of shape {list(leaf.shape)}, and in the traced forward one with a row for each "
                f"token along dimension {dim}: cp=1 works"
            )
        part = self._slicing.rows_along(leaf, dim)
        return part if leaf.requires_grad else with_whole(part, leaf)


def with_whole(part: Tensor, whole: Tensor) -> Tensor:
    """Return a rank's tokens of a tensor without a gradient, with the tensor itself for parts that compute all tokens."""
    part.whole = whole  # type: ignore[attr-defined]
    return part


def gather_tokens(part: Tensor, group: dist.ProcessGroup, owner: str, *, placement: SlicePlacement, dim: int) -> Tensor:
    """Return all tokens in their order along a dimension, from those of each rank.

    Collective over `cp`, see [Note: collective calls].
    """
    mine = part.movedim(dim, 0).contiguous()
    found = mine.new_empty((placement.degree * len(mine), *mine.shape[1:]))
    with owned(owner):
        all_gather(found, mine, group=group)
    if placement.is_head_tail:
        found = rows_of(found, _places(placement), 0)
    return found.movedim(0, dim).contiguous()  # as code may view it


def _summed(gradient: Tensor, group: dist.ProcessGroup, owner: str, *, placement: SlicePlacement, dim: int) -> Tensor:
    """Return the sum over ranks of this rank's tokens of a gradient."""
    sent = rows_of(gradient.movedim(dim, 0), _in_order_of_ranks(placement), 0).contiguous()
    mine = sent.new_empty((placement.size, *sent.shape[1:]))
    with owned(owner):
        reduce_scatter(mine, sent, group=group)
    return mine.movedim(0, dim).contiguous()


def _in_order_of_ranks(placement: SlicePlacement) -> list[range]:
    return [run for rank in range(placement.degree) for run in placement.runs(rank)]


def _places(placement: SlicePlacement) -> list[range]:
    """Return where the runs of tokens are that ranks hold one after another, in the order of the sequence."""
    found, start = dict[int, range](), 0
    for run in _in_order_of_ranks(placement):
        found[run.start] = range(start, start + len(run))
        start += len(run)
    return [found[first] for first in sorted(found)]
