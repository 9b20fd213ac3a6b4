"""Steps that a loop takes in parts: backwards, whose gradients add up, and updates of all or some of the optimizers.

```
run.backward(batch, d_loss, into="d");  run.update("d")
run.backward(batch, g_loss, into="g");  run.update("g")
```
A step is one batch, however many parts it has: `steps_taken` and the keys of random numbers count it once, and the number of its
backwards before is part of the key of masks. A backward is `Stepper.backward`, and an update is `Stepper.update` of the gradients that
wait. Gradients are reduced by the first update, or `gradients`, where ranks have whole ones; else each backward
reduces its own, and after one for the same weights the update needs no other number. In all other cases the ranks add up a norm.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from samestep.building.optimizer import members_of
from samestep.errors import ModelError
from samestep.examination.examine import Loss
from samestep.runtime import host_copies
from samestep.runtime.assembly import Assembly
from samestep.runtime.axes.exchanging_calls import NothingToJoin
from samestep.runtime.held_assembly import HeldAssembly
from samestep.runtime.ledger import outside_step, owned
from samestep.runtime.open_step import ReadStep, StepBackward
from samestep.runtime.optimizers.optimizer_source import check_call
from samestep.runtime.optimizers.optimizer_step import Updater
from samestep.runtime.optimizers.optimizers_by_name import UpdatedPart, member_index, names_of
from samestep.runtime.optimizers.skeletons import alone
from samestep.runtime.own_steps import gradient_views
from samestep.runtime.own_steps.gradient_views import LeftGradients, WaitingGradients
from samestep.runtime.own_steps.other_losses import OtherLosses
from samestep.runtime.processes.messages import gather_values
from samestep.runtime.step_observer import StepBatch
from samestep.runtime.step_report import StepReport
from samestep.runtime.stepper import Stepper
from samestep.runtime.weights.pieces import gradients_of
from samestep.state.fingerprints import digest
from samestep.state.writes import version_of
from samestep.trees import tree_leaves


class _Taken(NamedTuple):
    """A backward whose gradients wait."""

    read: ReadStep
    names: Set[str]
    """The weights to which it gave a gradient."""
    loss: float
    """The sum of its loss and of those of the backwards that waited with it."""


class StepsInParts:
    """The backwards and updates that the loop of a run calls itself."""

    def __init__(self, stepper: Stepper, own: HeldAssembly) -> None:
        self._stepper, self._own = stepper, own
        self._waiting: WaitingGradients | None = None
        self._taken: list[_Taken] = []
        """The backwards of which something waits."""
        self._last: tuple[int, int] = (-1, 0)
        """The step of the last backward, and the number of its backwards so far."""
        self._values: tuple[list[Any], int, list[Any]] = [], -1, []
        """The tensors of the last batch that was given by values, its step, and what tells them from others."""
        self._methods: set[tuple[tuple[int, ...] | None, str]] = set()
        """The methods of optimizers that were called, and do not couple what the layout divides."""
        self._losses = OtherLosses(stepper, own)
        self._left = LeftGradients()

    # -- values as a batch -------------------------------------------------------------------------

    def step_of(self, given: Any) -> int:
        """Return the step of what a backward was given: values that were given before, of the same tensors, belong to the step of then.

        Collective over the world for values, see [Note: collective calls]: some ranks may be given none.
        """
        if hasattr(given, "shares"):
            return self._stepper.steps_taken
        is_same = None if given is None else _marks_of(tree_leaves(given)) == self._values[2]
        with outside_step():
            known = gather_values(is_same, self._own.layout.world_size)
        return self._values[1] if True in known and False not in known else self._stepper.steps_taken

    def note_values(self, given: Any, step: int) -> None:
        """Note the values of the batch of a step; a batch of `samestep.batches` knows its step."""
        if hasattr(given, "shares"):
            self._values = [], step, []
        else:
            leaves = tree_leaves(given)
            self._values = leaves, step, _marks_of(leaves)

    # -- backward ----------------------------------------------------------------------------------

    def backward(self, batch: StepBatch, loss: Loss | None, into: str | int | None) -> StepReport:
        """Run the forwards and backwards of a batch, and let the gradients wait; return the report of all that waits.

        Collective over the world, see [Note: collective calls].

        Raises:
            ModelError: the stream of the batch has ended.
        """
        self._refuse_layout("run.backward")
        held = self._stepper.held
        if self._waiting is None:
            self._waiting = WaitingGradients(held.weights.store)
        if getattr(batch, "is_over", False):
            raise ModelError(
                "run-call-time",
                f"run.backward was given the batch of step {batch.step + 1}, and its stream has ended: within the loop over the batches "
                "it works",
            )
        names = self._names_of(member_index(self._names, into, "run.backward"))
        number = self._last[1] if self._last[0] == batch.step else int(self._stepper.steps_taken == batch.step + 1)
        loss_of = self._losses.of_backward(held, loss, batch)
        # In fp16 the sum over the ranks of each backward shows whether float16 overflows.
        waits = held.weights.store.local.can_wait and not held.weights.updater.loss_scale.is_dynamic
        leaves = None if into is None else _leaves(held, names)
        only = None if into is None else names
        of = StepBackward(number, only, *loss_of, is_apart=True, waits=waits, into=leaves)
        self._last = batch.step, number + 1
        return self._stepper.take(batch, functools.partial(self._backward, batch, of), watches=number == 0)

    def _backward(self, batch: StepBatch, of: StepBackward) -> StepReport:
        waiting = self._waiting
        assert waiting is not None
        self._left.refuse_changes("run.backward")
        waiting.make_room()
        read = self._stepper.read(self._stepper.backward(batch, of))
        used = self._names_of(None) - self._stepper.used.unused(0)
        names = used if of.names is None else used & of.names
        waiting.add(names, read.numbers.scales[0] or 0.0, is_reduced=not of.waits)
        loss = read.numbers.loss + sum(one.read.numbers.loss for one in self._taken)
        self._taken.append(_Taken(read, names or self._names_of(None), loss))
        self._note_left()
        return replace(self._stepper.report(read), loss=loss, grad_norm=math.nan)

    # -- update ------------------------------------------------------------------------------------

    def update(self, name: str | int | None, options: Mapping[str, Any]) -> tuple[StepReport, StepBatch]:
        """Clip the gradients that wait for an optimizer, or for all, and let it update its weights; return the report, and the batch.

        Collective over the world, see [Note: collective calls].
        """
        part = UpdatedPart(member_index(self._names, name, "run.update"), dict(options))
        mine = self._names_of(part.members)
        waiting, names = self._waiting_for(mine, "run.update")
        self._check_options(part)
        self._check_closure(part, mine)
        last = self._taken[-1]
        batch = last.read.opened.batch
        report = self._stepper.update(self._what_waits(waiting, names, mine), part, frozenset(mine - names))
        report = replace(report, loss=last.loss)
        self._stepper.held.weights.updater.rates.count(batch.step, part)
        self._drop(mine)
        self._note_left()
        return report, batch

    def _what_waits(self, waiting: WaitingGradients, names: Set[str], mine: Set[str]) -> ReadStep:
        """Let the store have all gradients that wait for some weights, and return them as one step's.

        Collective over the world, see [Note: collective calls].
        """
        read = next((one.read for one in self._taken if one.read.note and one.names & mine), self._taken[-1].read)
        numbers, of, is_one = read.numbers, read.opened.of, waiting.are_one_backward(names)
        waiting.reduce() if is_one else waiting.add_up()
        if not is_one or of.waits:
            norm = self._norm_of(of.names if is_one else names) * waiting.factor
            numbers = replace(numbers, norm=norm if not read.note else math.inf, norms=[norm])
        note = read.note or ("" if numbers.are_finite else "the gradients that wait are not finite")
        return replace(read, numbers=replace(numbers, scales=[waiting.factor]), note=note)

    def call(self, name: str | int | None, method: str, args: tuple[Any, ...], given: Mapping[str, Any]) -> Any:
        """Let an optimizer run a method over its pieces, with the gradients that wait, not clipped; return what it returns.

        Collective over the world, see [Note: collective calls].
        """
        part = UpdatedPart(member_index(self._names, name, "run.call"))
        self._refuse_layout("run.call")
        held, stepper, mine = self._stepper.held, self._stepper, self._names_of(part.members)
        updater = held.weights.updater
        self._check_method(held, part, method, args, given)
        names: Set[str] = frozenset()
        self._left.refuse_changes("run.call")
        if self._waiting is not None and self._waiting.names & mine:
            self._waiting.add_up()
            names = self._waiting.names & mine
            held.weights.store.deliver()
        updater.unused = frozenset(mine - names)
        updater.live.reread()
        results: list[Any] = []
        stepper.change(held, lambda: results.extend(_called(updater, part, method, args, given)))
        result, dropped = results
        with outside_step():
            if any(gather_values(bool(dropped), self._own.layout.world_size)):  # as `optimizer.zero_grad()` in it does
                self._drop(mine)
        self._use_up()
        self._note_left()
        return result

    def _check_method(
        self, assembly: Assembly, part: UpdatedPart, method: str, args: tuple[Any, ...], given: Mapping[str, Any]
    ) -> None:
        """Refuse a method that an optimizer does not have, or that the layout would change.

        Raises:
            ModelError: it has none, or the method does not take the arguments.
            LayoutError: the method couples what the layout divides.
        """
        source, layout = self._own.source.optimizer, self._own.layout
        if (part.members, method) in self._methods:
            return

        def run(optimizer: Optimizer) -> None:
            for index, member in enumerate(members_of(optimizer)):
                if part.members is None or index in part.members:
                    getattr(member, method)(*args, **given)

        optimizer = assembly.weights.updater.optimizer
        for index, member in enumerate(members_of(optimizer) if optimizer is not None else ()):
            function = getattr(member, method, None)
            if part.members is not None and index not in part.members:
                continue
            if not callable(function):
                raise ModelError("several-models", f"run.call: {type(member).__name__} has no method {method!r}")
            try:
                inspect.signature(function).bind(*args, **given)
            except TypeError as error:
                raise ModelError(
                    "run-call-arguments",
                    f"run.call: {type(member).__name__}.{method} does not take its arguments ({error})",
                ) from None
        check_call(source, assembly.model.spec, layout, assembly.weights.updater.whole.weights.attributes, method, run)
        self._methods.add((part.members, method))

    def _check_closure(self, part: UpdatedPart, mine: Set[str]) -> None:
        """Refuse an optimizer that evaluates the loss again where the gradients of several backwards wait.

        Raises:
            ModelError: a closure would repeat one of them.
        """
        evaluates = self._stepper.held.weights.updater.whole.evaluates(part)
        if evaluates and len([one for one in self._taken if one.names & mine]) > 1:
            raise ModelError(
                "closure-unsupported",
                "run.update: the step of this optimizer evaluates the loss again, and the gradients of several backwards wait: one backward of the sum of their losses works",
            )

    def _check_options(self, part: UpdatedPart) -> None:
        """Refuse options that the step of an optimizer does not take.

        Raises:
            ModelError: there is one.
        """
        optimizer = self._stepper.held.weights.updater.optimizer
        for index, member in enumerate(members_of(optimizer) if part.options and optimizer is not None else ()):
            if part.members is not None and index not in part.members:
                continue
            try:
                inspect.signature(type(member).step).bind(member, **part.options)
            except TypeError as error:
                raise ModelError(
                    "run-call-arguments",
                    f"run.update gives {', '.join(part.options)} to {type(member).__name__}.step, which does not take it ({error}): "
                    "options of the optimizer's own step work",
                ) from None

    def _norm_of(self, names: Set[str] | None) -> float:
        """Return the norm of the gradients of some weights, or of all, which the store has, over all ranks; the host waits for it."""
        held = self._stepper.held
        total = held.weights.store.norm_squared(names)
        if self._own.layout.world_size > 1:
            with owned("scalars"):
                dist.all_reduce(total, group=held.parallel.mesh.groups["world"])
        return math.sqrt(float(total)) if math.isfinite(float(total)) else math.inf

    # -- what waits --------------------------------------------------------------------------------

    def zero_grad(self, name: str | int | None) -> None:
        """Let the gradients of an optimizer, or of all, wait no more; sends nothing."""
        members = member_index(self._names, name, "run.zero_grad")
        if self._waiting is None:
            return
        self._drop(self._names_of(members))
        self._note_left()
        self._use_up()

    def _use_up(self) -> None:
        """Count the batch of the last backward as taken, if there was one."""
        self._stepper.steps_taken = max(self._stepper.steps_taken, self._last[0] + 1)

    def gradients(self) -> dict[str, Tensor]:
        """Return what waits, by weight: reduced over all ranks, divided by the counts, not clipped. It may be changed in place.

        Collective over the axes on which ranks hold parts of gradients, see [Note: collective calls].
        """
        waiting, names = self._waiting_for(self._names_of(None), "run.gradients")
        waiting.add_up()
        held = self._stepper.held
        found = held.weights.store.local.finished()
        self._left.note(held, may_be_written=True)
        return gradient_views.of_whole_weights(held, {name: one for name, one in found.items() if name in names})

    def refuse_waiting(self, method: str) -> None:
        """Refuse a call while gradients wait.

        Raises:
            ModelError: some do.
        """
        if self._waiting is not None and self._waiting.names:
            name = min(self._waiting.names)
            raise ModelError(
                "run-call-time",
                f"run.{method} while gradients wait, of {name} for one: run.update uses them, and run.zero_grad forgets them; behind "
                "either it works",
            )

    def forget(self) -> None:
        """Forget all that waits, since the weights were read from files."""
        if self._waiting is not None:
            self._drop(self._names_of(None))
        self._left.forget()
        self._last = -1, 0

    def _drop(self, names: Set[str]) -> None:
        assert self._waiting is not None
        self._waiting.drop(names)
        left = self._waiting.names
        self._taken = [one for one in self._taken if one.names & left]

    def _waiting_for(self, mine: Set[str], method: str) -> tuple[WaitingGradients, frozenset[str]]:
        """Return what waits, and of which of these weights.

        Raises:
            ModelError: nothing does.
        """
        self._refuse_layout(method)
        waiting = self._waiting
        if waiting is None or not (
            waiting.names & mine or any(one.read.note and one.names & mine for one in self._taken)
        ):
            raise ModelError(
                "run-call-time",
                f"{method}: no gradient waits for it; run.backward(batch, loss) before it works",
            )
        self._left.refuse_changes(method)
        return waiting, waiting.names & mine

    def _note_left(self) -> None:
        """Note what stands in the module's gradients, where some wait."""
        if self._waiting is not None and self._waiting.names:
            self._left.note(self._stepper.held)
        else:
            self._left.forget()

    @property
    def _names(self) -> tuple[str | int, ...]:
        return names_of(self._own.source.optimizer)

    def weights_of(self, name: str | int | None) -> frozenset[str]:
        """Return the trained weights of the whole model that an optimizer holds, or all of them."""
        return self._names_of(member_index(self._names, name, "run.update"))

    def _names_of(self, members: tuple[int, ...] | None) -> frozenset[str]:
        """Return the trained weights of the whole model that some of the optimizers hold."""
        updater = self._stepper.held.weights.updater
        trained = frozenset(self._stepper.used.names)
        if members is None:
            return trained
        return frozenset(name for name in trained if updater.whole.member_of_weight[name] in members)

    def _refuse_layout(self, method: str) -> None:
        """Refuse what cannot be taken in parts.

        Raises:
            ModelError: replicas are trained apart, or gradients are compressed.
        """
        numerics = self._stepper.job.numerics
        if numerics.exchange_every != 1:
            raise ModelError(
                "diloco-unsupported",
                f"{method} with numerics.exchange_every = {numerics.exchange_every}: run.step works, or 1",
            )
        if numerics.compression != "none":
            raise ModelError(
                "compression-unsupported",
                f'{method} with numerics.compression = "{numerics.compression}": run.step works, or "none"',
            )


def _leaves(assembly: Assembly, names: Set[str]) -> list[Tensor] | None:
    """Return the weights of these names, where autograd can leave the others out of a backward; None for all.

    It can where each rank has all weights, and no exchange in a backward is waited for by ranks whose graphs may differ.
    """
    layout = assembly.parallel.program.step.layout
    is_whole = layout.dp == layout.world_size and layout.ep == 1 and layout.zero < 2
    if not is_whole or not isinstance(assembly.objective.exchanges, NothingToJoin):
        return None
    named = assembly.model.module.named_parameters()
    return [weight for name, weight in named if name in names and weight.requires_grad] or None


@torch.no_grad()
def _called(
    updater: Updater, part: UpdatedPart, method: str, args: tuple[Any, ...], given: Mapping[str, Any]
) -> tuple[Any, bool]:
    """Let the members of a part run a method over their pieces, which have their gradients; return what the last one returns, and
    whether it has dropped a gradient.
    """
    pieces = updater.pieces_of(part)
    if updater.optimizer is None or not pieces:
        return None, False
    gradients = host_copies.beside(gradients_of(pieces), [piece.value for piece in pieces])
    result = None
    with updater.widened(pieces), updater.lent(pieces, gradients):
        with alone(type(updater.optimizer).__name__):
            for index, member in enumerate(members_of(updater.optimizer)):
                if part.members is None or index in part.members:
                    result = getattr(member, method)(*args, **given)
        dropped = any(piece.value.grad is None for piece in pieces if piece.name not in updater.unused)
    return result, dropped


def _marks_of(leaves: Sequence[Any]) -> list[Any]:
    """Return what tells values from others: a tensor that was written meanwhile is another one."""
    return [(id(leaf), version_of(leaf) if isinstance(leaf, Tensor) else digest(leaf)) for leaf in leaves]
