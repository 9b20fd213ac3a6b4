"""The interface of the stores that hold a rank's weights and gradients: `data.Replicated` and `shard.Sharded`.

```
begin_step ─► running(task) of every forward, backward and weight-gradient task ─► finish_gradients
           ─► norm_squared ─► (the optimizer updates `pieces`) ─► publish
```
All ranks call a collective method alike, since they agree on skipping a step first. If a rank leaves such a call out,
the other ranks of the group wait in theirs until `run.timeout_s` ends the run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import Tensor

from samestep.program.bodies import Task
from samestep.runtime.codecs.rests import Directions, GivenBack
from samestep.runtime.weights.parameter_hooks import GradientHooks
from samestep.runtime.weights.pieces import Piece

Materialize = Callable[[str, torch.dtype], Tensor]
"""Returns the part of a parameter that `tp` and `ep` leave this rank, newly allocated on the device."""


class WeightStore(Protocol):
    """The weights and gradients of one rank, stored as its layout says."""

    @property
    def pieces(self) -> list[Piece]:
        """Ranges of weights that this rank updates, in the order of the model's parameters."""
        ...

    @property
    def frozen(self) -> list[Piece]:
        """This rank's parts of the weights that are not trained, which only the user's own code may change."""
        ...

    def hook_gradients(self, hooks: GradientHooks) -> None:
        """Let the user's hooks change gradients before they are added up. Called once, by every rank; sends nothing."""
        ...

    def begin_step(self) -> None:
        """Discard the gradients of the previous step. Called first in a step, by every rank; sends nothing."""
        ...

    def take_back(self) -> None:
        """Copy weights that a user has given another storage back to the one in use; every rank calls it, sends nothing."""
        ...

    def compare_values(self, compares: bool) -> None:
        """Compare values too, from the next step on, in `written`: `.data` lets code change them without a trace."""
        ...

    def written(self) -> list[str]:
        """Return the weights that a forward of this step has written where that is lost; every rank calls it, sends nothing."""
        ...

    def without_gradient(self) -> Mapping[str, bool]:
        """Return the trained weights to which no counted micro-batch of this rank gave a gradient in the step, and of each
        whether the loop has frozen it. Called after `finish_gradients`; sends nothing.
        """
        ...

    def running(self, task: Task, *, counts: bool = True) -> AbstractContextManager[None]:
        """Return the context in which one forward, backward or weight-gradient task runs; the gradients of a micro-batch that
        does not count, since it is empty or its loss is constant, are zeros and no use of a weight.

        Called for each such task, by every rank of the task's pipeline stage. Collective over `dp_shard` and
        `dp_replicate`: inside, weights are gathered and buckets reduced as the program says. If a rank leaves a task
        out, the ranks with which it shares weights wait until the time limit.
        """
        ...

    def finish_gradients(self) -> None:
        """Wait for all reductions of the step, and issue those that follow its last backward.

        Called once a step, after its last task, by every rank. Collective over the data axes, over `tp` for weights
        used on a part of the sequence, and over the stages that share a tied weight. If a rank leaves it out, the ranks
        of those groups wait until the time limit, and its own gradients are not summed.
        """
        ...

    def given_back(self) -> Iterator[GivenBack]:
        """Yield what codes have lost of this rank's contributions, to be added to the next ones; it sends nothing.

        Ranks on axes within a contribution, which encode the same sums, yield the same.
        """
        ...

    def directions(self) -> Iterator[Directions]:
        """Yield the directions along which the next gradients of matrices are projected; it sends nothing.

        All ranks with the same weights yield the same.
        """
        ...

    def scale_given_back(self, factor: float) -> None:
        """Multiply what codes have lost, where gradients are scaled otherwise from now on; every rank calls it alike.

        By 0, all that the exchanges keep is as before the first step.
        """
        ...

    def start_exchange(self, part: int, fill: Callable[[int], None]) -> None:
        """Start to sum, over all replicas that are trained apart, what `fill(index)` writes into the gradients of the store's
        pieces of a part of the weights.

        `fill` is called for each replica of this rank; unless the exchange ends behind the same step, the gradients are as
        before then. This method, `sum_exchange` and `end_exchange` are called in this order, by every rank behind the same
        steps. Collective over the axis of the program's contributions: if a rank does not call it, the others wait until the
        time limit.
        """
        ...

    def sum_exchange(self, part: int) -> None:
        """Wait for what a started exchange sends, and issue the collectives that follow; collective as its start is."""
        ...

    def end_exchange(self, part: int) -> None:
        """Wait for an exchange, and set the gradients of the store's pieces of the part to its sums; it sends nothing."""
        ...

    def norm_squared(self) -> Tensor:
        """Return this rank's share of the squared gradient norm: the shares of all ranks, or of all ranks of its replica
        where replicas are trained apart, add up to the whole.

        Called once a step, after `finish_gradients`, by every rank; sends nothing.
        """
        ...

    def publish(self, *, waits: bool = True, part: int | None = None) -> None:
        """Make the updated weights visible to the next forward, and to everybody else unless `waits` is False; if a `part` is
        given, only those that replicas exchange with this part.

        Called after every update, by every rank; not after a skipped step. Collective over `dp_shard` with zero=1,
        where each rank gathers what the others have updated; otherwise it sends nothing. If a rank leaves it out, the
        others wait until the time limit.
        """
        ...

    def settle(self) -> None:
        """Wait for the weights that a `publish` without waiting still gathers; any rank may call it, and it sends nothing."""
        ...

    def end_forward_only(self) -> None:
        """Free the weights that forwards without a backward left gathered; every rank calls it, and sends nothing."""
        ...
