"""Optimizers of several classes as one: Muon over matrices, AdamW over the rest.

The members share the groups and the states of the whole, so that whoever sets a learning rate, saves a state, or lets the
optimizer hold some of its weights for a while, need not know that there are several.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


class CombinedOptimizer(Optimizer):
    """An optimizer whose groups are those of its members, and whose step is one step of each."""

    def __init__(self, members: Sequence[Optimizer]) -> None:
        self.members = tuple(members)
        super().__init__([group for member in members for group in member.param_groups], {})
        for member in members:
            self.state.update(member.state)  # Adagrad has one from the start
        self._share()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._share()

    def _share(self) -> None:
        """Let each member hold its own groups of the whole, and the states of the whole."""
        first = 0
        for member in self.members:
            last = first + len(member.param_groups)
            member.param_groups = self.param_groups[first:last]
            member.state = self.state
            first = last

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Let each member update its weights."""
        for member in self.members:
            member.step()


def members_of(optimizer: Optimizer) -> tuple[Optimizer, ...]:
    """Return the optimizers of one class that an optimizer consists of: itself, unless it is a combined one."""
    return optimizer.members if isinstance(optimizer, CombinedOptimizer) else (optimizer,)


def member_over(optimizer: Optimizer, weight: Tensor) -> Optimizer:
    """Return the one of its members that updates a weight; the optimizer itself if none does."""
    held = (
        member
        for member in members_of(optimizer)
        if any(param is weight for group in member.param_groups for param in group["params"])
    )
    return next(held, optimizer)


def class_names(optimizer: Optimizer) -> str:
    """Return the name of an optimizer's class, or those of its members."""
    return " and ".join(type(member).__name__ for member in members_of(optimizer))
