"""The interface of the stores that hold a rank's weights and gradients: `Replicated`, `Sharded`, and `Owning` over one of them.

```
begin_step ─► running(task) of every forward, backward and weight-gradient task ─► finish_gradients
           ─► norm_squared ─► (the optimizer updates `pieces`) ─► publish
```
A store has all of it; what only some layouts need does nothing in the base class. `store.codes` has what compressed gradients keep from one
step to the next.

The nouns are defined in [Note: what a rank holds of a weight], the head of `runtime/weights/__init__.py`. All ranks call a
collective method alike, since they agree on skipping a step first, see [Note: collective calls].
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Set
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import Tensor, nn

from samestep.program.ops import Task
from samestep.runtime.weights.gradient_codes import GradientCodes
from samestep.runtime.weights.parameter_hooks import GradientHooks
from samestep.runtime.weights.pieces import NO_ROW, Piece, dense_of_rows


def gradient_or_zero(param: nn.Parameter) -> Tensor:
    """Return the gradient of a weight; zeros where it has none."""
    gradient = param.grad
    if gradient is None:
        param.grad = gradient = torch.full_like(param, NO_ROW)
    elif gradient.is_sparse:  # the norm, and most optimizers, take dense ones, which give the same step
        param.grad = gradient = dense_of_rows(gradient)
    return gradient


Materialize = Callable[[str, torch.dtype], Tensor]
"""Returns the part of a parameter that `tp` and `ep` leave this rank, newly allocated on the device."""


class WeightStore(Protocol):
    """The weights and gradients of one rank, stored as its layout says; what is written here is done where a layout asks for no more."""

    pieces: list[Piece]
    """The pieces that this rank updates, in the order of the model's parameters."""
    frozen: list[Piece]
    """The pieces of weights that are not trained, which only the user's code may change."""
    codes: GradientCodes
    """What compressed gradients keep from one step to the next, and the sum of the moves of models that are trained apart."""
    gave_up: str = ""
    """The path of the module at which this rank has given the step up, in whose other tasks it only takes part in what others wait
    for; empty if it has not."""

    @property
    def reduced(self) -> list[Piece]:
        """The pieces whose gradients this rank has once they are reduced: `pieces`, unless other ranks update them whole."""
        return self.pieces

    @abstractmethod
    def hook_gradients(self, hooks: GradientHooks) -> None:
        """Let the user's hooks change gradients before they are added up. Called once, by every rank; sends nothing."""
        ...

    @abstractmethod
    def begin_step(self, *, waits: bool = False) -> None:
        """Discard the gradients of the previous step. Called first in a step, by every rank; sends nothing.

        With `waits`, which needs `can_wait`, nothing is reduced before a later call of `finish_gradients`.
        """
        ...

    @abstractmethod
    def without_gradient(self) -> Mapping[str, bool]:
        """Return the trained weights to which no counted micro-batch of this rank gave a gradient in the step, each with
        whether the loop has frozen it. Called after `finish_gradients`; sends nothing.
        """
        ...

    @abstractmethod
    def running(
        self, task: Task, *, counts: bool = True, left_out: Set[int] = frozenset()
    ) -> AbstractContextManager[None]:
        """Return the context in which one forward, backward or weight-gradient task runs.

        Gradients are zeros, and no use of a weight, where a micro-batch does not count, since it is empty or its loss is a
        constant. Nor is a gradient of a tensor whose id is among `left_out` a use.

        Called for each such task, by every rank of the task's pipeline stage. Inside, weights are gathered and buckets reduced
        as the program says. Collective over `dp_shard` and `dp_replicate`, see [Note: collective calls].
        """
        ...

    @abstractmethod
    def finish_gradients(self, *, delivers: bool = True, names: Set[str] | None = None) -> None:
        """Wait for all reductions of the step, and issue those that follow its last backward; then `deliver` them, if it `delivers`.

        Where the reductions have waited, only those that some weights of `names` need are issued. Called once a step, after its
        last task, by every rank. Collective over the data axes, over `tp` for weights
        used on a part of the sequence, and over the stages that share a tied weight: see [Note: collective calls] in
        runtime/processes/mesh.py.
        """
        ...

    def deliver(self) -> None:
        """Send finished gradients to the ranks that update whole weights, where some do.

        Called before an update, by every rank. Collective over the axes of such weights, see [Note: collective calls].
        """
        return

    @abstractmethod
    def norm_squared(self, names: Set[str] | None = None) -> Tensor:
        """Return this rank's share of the squared gradient norm of all weights, or of those with these names: the shares of all
        ranks, or of all ranks of its model where several are trained apart, add up to the whole. While the reduction
        of gradients waits, it is the squared norm of this rank's own ones, which shows whether they are finite.

        Called after `finish_gradients`, by every rank; sends nothing.
        """
        ...

    def publish(self, *, waits: bool = True) -> None:
        """Make the updated weights visible to the next forward, and to all other code unless `waits` is False.

        Called after every update, by every rank; not after a skipped step. Under zero=1 each rank gathers what the others
        have updated; otherwise it sends nothing. Collective over `dp_shard` with zero=1: see [Note: collective calls] in
        runtime/processes/mesh.py.
        """
        return

    def settle(self) -> None:
        """Wait for the weights that a `publish` without waiting still gathers; any rank may call it, and it sends nothing."""
        return

    # -- gathered weights --------------------------------------------------------------------------

    def before_exchange(self, path: str) -> None:
        """Reduce what the program lists before the exchange of a module, whose backward starts.

        Collective over the data axes, see [Note: collective calls].
        """
        return

    def give_up_forward(self) -> None:
        """Take part in what others wait for in a forward that a `CalledAgainError` has ended on this rank alone.

        Collective over the axes of the units, see [Note: collective calls].
        """
        return

    def end_forward_only(self) -> None:
        """Free the weights that forwards without a backward left gathered; every rank calls it, and sends nothing."""
        return

    def compare_values(self, compares: bool) -> None:
        """Compare values too, from the next step on, in `lost_writes`: `.data` lets code change them without a trace."""
        return

    def lost_writes(self) -> list[str]:
        """Return the weights that a forward of this step has written where that is lost; none are whole weights."""
        return []

    def take_back(self) -> None:
        """Copy weights that a user has given another storage, by `param.data = ...`, back to the one in use."""
        return

    # -- gradients between a backward and an update ------------------------------------------------

    @property
    def can_wait(self) -> bool:
        """Whether the gradients of several backwards can be added up on a rank before they are reduced."""
        return False

    def unreduced(self) -> dict[str, Tensor]:
        """Return the gradient of each whole weight on this rank after a backward whose reduction waits, zeros where it gave none: what
        is written there is reduced. Sends nothing.
        """
        return {}

    @abstractmethod
    def finished(self) -> dict[str, Tensor]:
        """Return the finished gradient of each trained weight of which this rank has a part, with that part's shape: what is changed
        in it is changed in `reduced`.

        Called by every rank. Collective over `dp_shard` with zero=1, see [Note: collective calls].
        """
        ...
