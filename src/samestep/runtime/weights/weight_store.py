"""The interface of the stores that hold a rank's weights and gradients: `Replicated`, `Sharded`, and `Owning` over one of them.

```
begin_step ─► running(task) of every forward, backward and weight-gradient task ─► finish_gradients
           ─► norm_squared ─► (the optimizer updates `pieces`) ─► publish
```
What only some runs need is in five parts of a store, which have nothing to do elsewhere:

    store.exchange    moves of weights between replicas that are trained independently     `wings/slow_links` calls it
    store.codes       residuals and directions of compressed gradients                      checkpoints save them
    store.watch       writes into weights that would be lost                                guards ask for them
    store.calls       weights that are gathered for each call of a module                   the interpreter, and guards
    store.local       gradients between a backward and an update                            `own_steps/`

The nouns are defined in [Note: what a rank holds of a weight], the head of `runtime/weights/__init__.py`. All ranks call a
collective method alike, since they agree on skipping a step first, see [Note: collective calls].

The exchange of replicas that are trained independently sums the moves of their weights, which are written into the gradients.
"""

from __future__ import annotations

import itertools
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from samestep.program.ops import Op, OpKind, Task
from samestep.program.program import Program
from samestep.runtime.ledger import owned
from samestep.runtime.processes.mesh import Mesh
from samestep.runtime.weights.flat_buffers import FlatBuffer, squared_norm
from samestep.runtime.weights.gradient_codes import BucketCodes, GradientCodes, UnitCodes
from samestep.runtime.weights.parameter_hooks import GradientHooks
from samestep.runtime.weights.pieces import NO_ROW, Piece, dense_of_rows


class ReplicaExchange:
    """The sum of what the weights of replicas have moved by; none where all ranks train one model."""

    def sum(self, fill: Callable[[int], None]) -> None:
        """Set the gradients of the store's pieces to the sums, over all replicas, of what `fill(index)` writes into them.

        `fill` is called for each replica of this rank. Collective over the axis of the program's contributions: see [Note: collective
        calls] in runtime/processes/mesh.py.
        """


def _sends_of(program: Program) -> Iterator[Op]:
    """Yield the collectives of an exchange before its outer step."""
    return itertools.takewhile(lambda op: op.kind is not OpKind.OUTER, program.exchange)


@dataclass(frozen=True, slots=True)
class BucketExchange(ReplicaExchange):
    """The `ReplicaExchange` of buckets."""

    program: Program
    codes: BucketCodes
    gradients: Sequence[Tensor]
    """For each bucket, the gradients of the weights that this rank updates: the whole bucket, or its chunk under zero=1."""

    def sum(self, fill: Callable[[int], None]) -> None:
        """Set the gradients to the sums of what `fill` writes; collective as `ReplicaExchange.sum` says."""
        names = [bucket.name for bucket in self.program.buckets]
        moved = {
            name: (self.codes.exchanges[name], gradients) for name, gradients in zip(names, self.gradients, strict=True)
        }
        for exchange, _ in moved.values():
            exchange.begin_step()
        last = self.program.step.replicas_each - 1
        for index in range(last + 1):
            fill(index)
            for exchange, gradients in moved.values() if index < last else ():
                exchange.add([gradients])
        works: dict[str, dist.Work] = {}
        for op in _sends_of(self.program):
            exchange, gradients = moved[op.owner]
            if op.owner in works:
                works[op.owner].wait()
            with owned(op.owner) as issue:
                works[op.owner] = issue.sent(exchange.send([gradients]))
        for name, (exchange, gradients) in moved.items():
            if name in works:
                works[name].wait()
            exchange.finish([gradients])


@dataclass(frozen=True, slots=True)
class UnitExchange(ReplicaExchange):
    """The `ReplicaExchange` of units, whose codes are those of the gradients too; a rank trains one replica."""

    program: Program
    codes: UnitCodes

    def sum(self, fill: Callable[[int], None]) -> None:
        """Set the gradients to the sums of what `fill` writes; collective as `ReplicaExchange.sum` says."""
        self.codes.begin_sums()
        fill(0)
        for op in _sends_of(self.program):
            self.codes.send(op)
        self.codes.take_sums()


class LocalGradients(Protocol):
    """The gradients of this rank between a backward and an update."""

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
        in it is changed in `WeightStore.reduced`.

        Called by every rank. Collective over `dp_shard` with zero=1, see [Note: collective calls].
        """
        ...


class BucketGradients(LocalGradients):
    """Those in the buckets of a `Replicated` store."""

    def __init__(
        self, program: Program, mesh: Mesh, flats: Sequence[FlatBuffer], params: Mapping[str, nn.Parameter]
    ) -> None:
        self._program, self._mesh, self._flats, self._params = program, mesh, flats, params

    @property
    def can_wait(self) -> bool:
        """Whether something may be sent for gradients, which are whole on each rank until then; the same on all stages of a pipeline,
        of which some have weights that others hold too."""
        return self._program.step.layout.pp > 1 or any(flat.starts or flat.finishes for flat in self._flats)

    def unreduced(self) -> dict[str, Tensor]:
        """Return the gradient of each weight before ranks are summed, zeros where the backward gave none."""
        for flat in self._flats:
            flat.zero_untouched()
        return self._whole()

    def norm_squared(self, names: Set[str] | None) -> Tensor:
        """Return the squared norm of the unreduced gradients, or of some (float64 []), which shows whether they are finite."""
        gradients = [gradient for name, gradient in self.unreduced().items() if names is None or name in names]
        return squared_norm(gradients, self._mesh.device)

    def finished(self) -> dict[str, Tensor]:
        """Return the gradient of each weight; under zero=1 the ranks gather it.

        Collective over `dp_shard` with zero=1, see [Note: collective calls].
        """
        for flat in self._flats:
            for op in flat.gathers:
                assert op.axis is not None
                flat.work = flat.send(op, flat.gradients, self._mesh.groups[op.axis])
                flat.wait()
        return self._whole()

    def _whole(self) -> dict[str, Tensor]:
        return {
            member.name: flat.gradients[member.span].view(self._params[member.name].shape)
            for flat in self._flats
            for member in flat.bucket.members
        }


class GradientsInPlace(BucketGradients):
    """Those of an `Unsummed` store, which are where autograd has put them."""

    def _whole(self) -> dict[str, Tensor]:
        return {name: gradient_or_zero(param) for name, param in self._params.items()}


class ShardedGradients(LocalGradients):
    """Those of a `Sharded` store: DTensors, of which each rank has its rows."""

    def __init__(self, trained: Mapping[str, Any], gradient_of: Callable[[Any], Tensor]) -> None:
        self._trained, self._gradient_of = trained, gradient_of

    def finished(self) -> dict[str, Tensor]:
        """Return the gradient of each weight, a DTensor of which this rank has its rows."""
        return {
            name: param.grad
            for name, param in self._trained.items()
            if self._gradient_of(param) is not None and param.grad is not None
        }


def gradient_or_zero(param: nn.Parameter) -> Tensor:
    """Return the gradient of a weight; zeros where it has none."""
    gradient = param.grad
    if gradient is None:
        param.grad = gradient = torch.full_like(param, NO_ROW)
    elif gradient.is_sparse:  # the norm, and most optimizers, take dense ones, which give the same step
        param.grad = gradient = dense_of_rows(gradient)
    return gradient


class ModuleCalls:
    """The calls of modules whose weights are whole on each rank."""

    gave_up = ""
    """The path of the module at which this rank has given the step up, in whose other tasks it only takes part in what others wait
    for; empty if it has not."""

    def before_exchange(self, path: str) -> None:
        """Reduce what the program lists before the exchange of a module, whose backward starts.

        Collective over the data axes, see [Note: collective calls].
        """

    def give_up_forward(self) -> None:
        """Take part in what others wait for in a forward that a `CalledAgainError` has ended on this rank alone.

        Collective over the axes of the units, see [Note: collective calls].
        """

    def end_forward_only(self) -> None:
        """Free the weights that forwards without a backward left gathered; every rank calls it, and sends nothing."""


Materialize = Callable[[str, torch.dtype], Tensor]
"""Returns the part of a parameter that `tp` and `ep` leave this rank, newly allocated on the device."""


class WeightWatch:
    """The writes into a store's weights that would be lost, of which guards ask: none, as all that code writes into whole weights is kept."""

    def compare_values(self, compares: bool) -> None:
        """Compare values too, from the next step on, in `written`: `.data` lets code change them without a trace."""

    def written(self) -> list[str]:
        """Return the weights that a forward of this step has written where that is lost."""
        return []

    def take_back(self) -> None:
        """Copy weights that a user has given another storage, by `param.data = ...`, back to the one in use."""


class WeightStore(Protocol):
    """The weights and gradients of one rank, stored as its layout says; what is written here is done where a layout asks for no more."""

    pieces: list[Piece]
    """The pieces that this rank updates, in the order of the model's parameters."""
    frozen: list[Piece]
    """The pieces of weights that are not trained, which only the user's code may change."""
    exchange: ReplicaExchange
    """The exchange of weights between replicas."""
    codes: GradientCodes
    """The state of the codec that compresses gradients."""
    watch: WeightWatch
    """The watch for writes into weights that would be lost."""
    calls: ModuleCalls
    """The calls of modules for which weights are gathered."""
    local: LocalGradients
    """The gradients between a backward and an update that the loop calls by itself."""

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

        With `waits`, which needs `local.can_wait`, nothing is reduced before a later call of `finish_gradients`.
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
        ranks, or of all ranks of its replica where replicas are trained independently, add up to the whole. While the reduction
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
