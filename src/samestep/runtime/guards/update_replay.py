"""The second computation of one weight's update, from the same value, gradient and optimizer state, by a twin optimizer.

The twin has the class, the options and the state of the run's optimizer, and holds that weight alone. Where the rule
treats every weight by itself, both make the same update. They do not if the optimizer draws random numbers, keeps
something of one weight for another, or if something else wrote the weight during the update.

Of a weight that the layout divides, which a rule may update in parts only if it treats every element by itself, the twin
holds one half. So a rule that comes to look at whole weights, in a step that no trial reached, makes another update.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from samestep.building.optimizer import member_over
from samestep.datasets.generators import GENERATORS
from samestep.runtime.optimizers.optimizer_step import Updater
from samestep.runtime.optimizers.skeletons import alone
from samestep.runtime.optimizers.update_rule import has_hooks
from samestep.runtime.weights.pieces import Piece
from samestep.state.snapshot import preserve_generators
from samestep.trees import tree_leaves, tree_map

ROUNDINGS = 8
"""Roundings by which two updates may differ, in units of the largest weight: kernels for many tensors and for one."""
LARGEST_PIECE = 2**22
"""Elements of the largest piece that is copied."""
_PLAIN = (bool, int, float, complex, str, bytes, type(None))


class UpdateReplay:
    """A copy of one piece before its update, and the twin that will update the copy."""

    def __init__(self, updater: Updater, piece: Piece, twin: Optimizer, copied: Tensor, half: _FirstHalf) -> None:
        self.piece = piece
        self._updater, self._twin, self._copy, self._half = updater, twin, copied, half
        self.optimizer = type(twin).__name__
        self._largest = float(piece.master().abs().max())
        self._gradient = half.of(piece.gradient().view(piece.value.shape)).detach().clone()

    @classmethod
    def before(cls, updater: Updater, turn: int) -> UpdateReplay | None:
        """Copy a piece before the update, the next one in turn; None where there can be no twin."""
        small = [piece for piece in updater.pieces if 0 < piece.value.numel() <= LARGEST_PIECE]
        if not small or updater.optimizer is None:
            return None
        piece = small[turn % len(small)]
        is_divided = piece.value.shape != updater.whole.weights.shapes.get(piece.name, piece.value.shape)
        half = _FirstHalf.of_shape(piece.value.shape) if is_divided else _FirstHalf()
        copied = half.of(piece.master()).clone().requires_grad_(True)
        vars(copied).update(vars(piece.value))  # tags that the rule may read
        twin = _twin_of(updater, piece, copied, half)
        return None if twin is None else cls(updater, piece, twin, copied, half)

    def deviation(self) -> float:
        """Update the copy too; return the ratio of the difference to the largest weight, or 0 within rounding."""
        if self.piece.name not in self._updater.unused:
            self._copy.grad = (self._gradient * self._updater.factor).to(self._copy.device).view_as(self._copy)
        held = [vars(self._twin), *self._twin.param_groups]
        with preserve_generators(value for values in held for value in values.values()), alone(self.optimizer):
            self._twin.step()
        ours, theirs = self._copy.detach(), self._half.of(self.piece.master())
        largest = max(self._largest, float(theirs.abs().max()), torch.finfo(theirs.dtype).tiny)
        found = float((ours - theirs).abs().max()) / largest
        return 0.0 if found <= ROUNDINGS * torch.finfo(theirs.dtype).eps else found


@dataclass(frozen=True, slots=True)
class _FirstHalf:
    """The first half of a tensor along one dimension; the whole of it where there is none to halve."""

    dim: int = 0
    length: int | None = None

    @classmethod
    def of_shape(cls, shape: Sequence[int]) -> _FirstHalf:
        """Return the half along the first dimension that has two elements."""
        dim = next((dim for dim, size in enumerate(shape) if size > 1), None)
        return cls() if dim is None else cls(dim, shape[dim] // 2)

    def of(self, tensor: Tensor) -> Tensor:
        """Return the half of a tensor."""
        return tensor if self.length is None else tensor.narrow(self.dim, 0, self.length)


def _twin_of(updater: Updater, piece: Piece, copied: Tensor, half: _FirstHalf) -> Optimizer | None:
    """Return an optimizer with the class, options and state of the run's, over the copy of (half of) one of its weights.

    None where its `step` is not the class's own, has hooks, or keeps objects that a copy would share with it.
    """
    value = piece.value
    assert updater.optimizer is not None
    optimizer = member_over(updater.optimizer, value)
    group = next((g for g in optimizer.param_groups if any(param is value for param in g["params"])), {})
    hooks = {name: type(of_torch)() for name, of_torch in vars(optimizer).items() if name.endswith("_hooks")}
    own = {n: v for n, v in vars(optimizer).items() if n not in ("state", "param_groups", "defaults", *hooks)}
    options = {name: option for name, option in group.items() if name not in ("params", "param_names")}
    state = {
        name: half.of(entry) if isinstance(entry, Tensor) and entry.shape == value.shape else entry
        for name, entry in updater.state_of(piece).items()
    }
    has_own_code = "step" in own or has_hooks(optimizer) or has_hooks(updater.optimizer)
    if not group or has_own_code or not all(map(_is_plain, (own, options, state))):
        return None
    twin = object.__new__(type(optimizer))
    vars(twin).update(_copy_state(own) | hooks)
    twin.defaults, twin.param_groups = dict(optimizer.defaults), [_copy_state(options) | {"params": [copied]}]
    twin.state = defaultdict(dict, {copied: _copy_state(state)} if state else {})
    return twin


def _is_plain(value: Any) -> bool:
    """Return whether a value can be copied without copying what else the optimizer holds."""

    def leaf(one: Any) -> bool:
        return not one.requires_grad if isinstance(one, Tensor) else isinstance(one, (*_PLAIN, *GENERATORS))

    return all(map(leaf, tree_leaves(value)))


def _copy_state(value: Any) -> Any:
    """Return a copy; a generator is shared, so that numbers that are drawn differ from those that were drawn."""

    def leaf(one: Any) -> Any:
        if isinstance(one, Tensor):
            return one.detach().clone()
        return one if isinstance(one, GENERATORS) else copy.copy(one)

    return tree_map(leaf, value)
