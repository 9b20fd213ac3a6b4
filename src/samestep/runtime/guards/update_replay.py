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
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from samestep.building.optimizer import member_over
from samestep.datasets.generators import GENERATORS
from samestep.runtime.optimizers.optimizer_step import Updater
from samestep.runtime.optimizers.skeletons import alone
from samestep.runtime.optimizers.update_rule import has_hooks
from samestep.runtime.weights.pieces import Piece, sparse_of_rows
from samestep.state.snapshot import preserve_generators
from samestep.trees import tree_leaves, tree_map

_ROUNDINGS = 8
"""Roundings by which two updates may differ, in units of the largest weight: kernels for many tensors and for one."""
_LARGEST_PIECE = 2**22
"""Elements of the largest piece that is copied."""
_PLAIN = (bool, int, float, complex, str, bytes, type(None), *GENERATORS)
_Part = Callable[[Tensor], Tensor]
"""Returns the part of a piece that the twin holds."""


class UpdateReplay:
    """A copy of (half of) one piece before its update, and the twin that will update the copy."""

    def __init__(self, updater: Updater, piece: Piece, twin: Optimizer, value: Tensor, part: _Part) -> None:
        self.piece = piece
        self._updater, self._twin, self._value, self._part = updater, twin, value, part
        self.optimizer = type(twin).__name__
        self._largest = float(piece.master().abs().max())
        self._gradient = part(piece.gradient().view(piece.value.shape)).detach().clone()

    @classmethod
    def before(cls, updater: Updater, turn: int) -> UpdateReplay | None:
        """Copy a piece before the update, the next one in turn; None where there can be no twin."""
        small = [piece for piece in updater.pieces if 0 < piece.value.numel() <= _LARGEST_PIECE]
        if not small or updater.optimizer is None:
            return None
        piece = small[turn % len(small)]
        shape = piece.value.shape
        dim = next((dim for dim, size in enumerate(shape) if size > 1), None)
        is_divided = dim is not None and shape != updater.whole.weights.shapes.get(piece.name, shape)

        def part(tensor: Tensor) -> Tensor:
            return tensor.narrow(dim, 0, shape[dim] // 2) if is_divided and dim is not None else tensor

        value = part(piece.master()).clone().requires_grad_(True)
        vars(value).update(vars(piece.value))  # tags that the rule may read
        twin = _twin_of(updater, piece, value, part)
        return None if twin is None else cls(updater, piece, twin, value, part)

    def deviation(self) -> float:
        """Update the copy too; return the ratio of the difference to the largest weight, or 0 within rounding."""
        if self.piece.name not in self._updater.unused:
            gradient = (self._gradient * self._updater.factor).to(self._value.device).view_as(self._value)
            self._value.grad = sparse_of_rows(gradient) if self.piece.name in self._updater.whole.by_rows else gradient
        options = [vars(self._twin), *self._twin.param_groups]
        with preserve_generators(value for values in options for value in values.values()), alone(self.optimizer):
            self._twin.step()
        expected = self._part(self.piece.master())
        largest = max(self._largest, float(expected.abs().max()), torch.finfo(expected.dtype).tiny)
        deviation = float((self._value.detach() - expected).abs().max()) / largest
        return 0.0 if deviation <= _ROUNDINGS * torch.finfo(expected.dtype).eps else deviation


def _twin_of(updater: Updater, piece: Piece, weight: Tensor, part: _Part) -> Optimizer | None:
    """Return an optimizer with the class, options and state of the run's, over the copy of (half of) one of its weights.

    None where its `step` is not the class's own, has hooks, or keeps objects that a copy would share with it.
    """
    assert updater.optimizer is not None
    optimizer = member_over(updater.optimizer, piece.value)
    group = next((g for g in optimizer.param_groups if any(param is piece.value for param in g["params"])), {})
    hooks = {name: type(of_torch)() for name, of_torch in vars(optimizer).items() if name.endswith("_hooks")}
    attributes = {n: v for n, v in vars(optimizer).items() if n not in ("state", "param_groups", "defaults", *hooks)}
    options = {name: option for name, option in group.items() if name not in ("params", "param_names")}
    state = {
        name: part(entry) if isinstance(entry, Tensor) and entry.shape == piece.value.shape else entry
        for name, entry in updater.state_of(piece).items()
    }
    leaves = tree_leaves([attributes, options, state])
    are_plain = all(not leaf.requires_grad if isinstance(leaf, Tensor) else isinstance(leaf, _PLAIN) for leaf in leaves)
    if not group or not are_plain or "step" in attributes or has_hooks(optimizer) or has_hooks(updater.optimizer):
        return None
    twin = object.__new__(type(optimizer))
    vars(twin).update(tree_map(_copied, attributes) | hooks)
    twin.defaults, twin.param_groups = dict(optimizer.defaults), [tree_map(_copied, options) | {"params": [weight]}]
    twin.state = defaultdict(dict, {weight: tree_map(_copied, state)} if state else {})
    return twin


def _copied(value: Any) -> Any:
    """Return a copy; a generator is shared, so that numbers that are drawn differ from those that were drawn."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    return value if isinstance(value, GENERATORS) else copy.copy(value)
