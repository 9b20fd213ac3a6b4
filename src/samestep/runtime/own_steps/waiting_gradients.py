"""Gradients that wait for an update, from the backwards that a loop calls itself: they add up as means.

A backward leaves the gradients of its sum in the store; the factor that makes them those of a mean is known once the ranks have
added up its count. The next backward needs the store, so what waits there moves to copies first. Where each rank has whole gradients
(`LocalGradients.can_wait`) they are this rank's own until the first `gradients` or `update`, when their sum is reduced once:

```
backward 1 ─► store: g1, factor 1/c1
backward 2 ─► copies: g1/c1         store: g2, factor 1/c2
reduce     ─► store: g1/c1 + g2/c2, factor 1, summed over the ranks
gradients  ─► the same, with what was reduced before and waits still
update     ─► what it has updated waits no more; the rest does
```
So one backward in front of each update, the usual case, makes no copy.
"""

from __future__ import annotations

from collections.abc import Set

import torch
from torch import Tensor

from samestep.runtime.weights.weight_store import WeightStore


class WaitingGradients:
    """The gradients of one rank that no update has used yet, by weight."""

    def __init__(self, store: WeightStore) -> None:
        self._store = store
        self.names: frozenset[str] = frozenset()
        """The weights of the whole model to which a backward gave a gradient that waits."""
        self.factor = 1.0
        """What the gradients in the store are multiplied by, to be those of a mean."""
        self._fresh: frozenset[str] = frozenset()
        """Those of the weights whose gradients of the last backward wait in the store."""
        self._own: dict[str, Tensor] = {}
        """This rank's own gradients of earlier backwards, which are not reduced, by weight."""
        self._owned: frozenset[str] = frozenset()
        """The weights of the whole model whose gradients of earlier backwards are not reduced: the same on all ranks, of which those
        of one stage may add theirs to those of another."""
        self._kept: dict[int, Tensor] = {}
        """Copies of what waits reduced from earlier backwards, by the index of the store's piece."""
        self._is_reduced = True
        """Whether what waits in the store is reduced."""
        self._is_as_left = False
        """Whether the store has what the last backward has left, for all weights that it was for."""

    @torch.no_grad()
    def make_room(self) -> None:
        """Copy what waits in the store, which the next backward needs."""
        if self._is_reduced:
            for index, piece in enumerate(self._store.reduced):
                if piece.name in self._fresh:
                    self._kept[index] = self._sum(self._kept.get(index), piece.gradient())
        else:
            self._owned |= self._fresh
            for name, gradient in self._store.local.unreduced().items():
                if name in self._fresh:
                    self._own[name] = self._sum(self._own.get(name), gradient)
        self._fresh, self.factor, self._is_as_left, self._is_reduced = frozenset(), 1.0, False, True

    def _sum(self, before: Tensor | None, gradient: Tensor) -> Tensor:
        return gradient * self.factor if before is None else before.add_(gradient, alpha=self.factor)

    def add(self, names: Set[str], factor: float, *, is_reduced: bool) -> None:
        """Let the gradients of these weights wait, which a backward has left in the store, reduced or not."""
        self._fresh, self.factor, self._is_as_left, self._is_reduced = frozenset(names), factor, True, is_reduced
        self.names |= names

    def are_one_backward(self, names: Set[str]) -> bool:
        """Return whether what waits of these weights is what one backward has left, which was for no others."""
        return self._is_as_left and not self._kept and not self._owned and self._fresh == names

    @torch.no_grad()
    def reduce(self) -> None:
        """Reduce what backwards have left and is not reduced yet, if there is any.

        Collective over the data axes, see [Note: collective calls].
        """
        if self._owned:
            for name, gradient in self._store.local.unreduced().items():
                if name in self._fresh:
                    gradient.mul_(self.factor)
                else:
                    gradient.zero_()
                if name in self._own:
                    gradient.add_(self._own[name])
            self._fresh, self.factor, self._is_as_left = self._fresh | self._owned, 1.0, False
            self._own, self._owned, self._is_reduced = {}, frozenset(), False
        if not self._is_reduced and self._fresh:
            self._store.finish_gradients(delivers=False, names=self._fresh)
        self._is_reduced = True

    @torch.no_grad()
    def add_up(self) -> None:
        """Let the store have all that waits, reduced, as gradients of means.

        Collective over the data axes, see [Note: collective calls].
        """
        self.reduce()
        for index, piece in enumerate(self._store.reduced):
            gradient = piece.gradient()
            if piece.name in self._fresh:
                gradient.mul_(self.factor)
            else:
                gradient.zero_()
            if index in self._kept:
                gradient.add_(self._kept.pop(index))
        self._fresh, self.factor, self._is_as_left = self.names, 1.0, False

    def drop(self, names: Set[str]) -> None:
        """Let the gradients of these weights wait no more."""
        self._is_as_left &= not self._fresh & names
        self.names -= names
        self._fresh -= names
        self._owned -= names
        self._own = {name: one for name, one in self._own.items() if name not in names}
        for index, piece in enumerate(self._store.reduced):
            if piece.name in names:
                self._kept.pop(index, None)
