"""Steps that a loop takes in parts: backwards, whose gradients add up, and updates of all or some of the optimizers.

```
run.backward(batch, d_loss, into="d");  run.update("d")
run.backward(batch, g_loss, into="g");  run.update("g")
```
A step is one batch, however many parts it has: `steps_taken` and the keys of random numbers count it once, and the number of its
backwards before is part of the key of masks. A backward is `Stepper.backward`, and an update is `Stepper.update` of the gradients that
wait. Gradients are reduced by the first update, or `gradients`, where ranks have whole ones; else each backward
reduces its own, and after one for the same weights the update needs no other number. In all other cases the ranks add up a norm.
A loss other than that of the run is one of `OtherLosses`.
"""

from __future__ import annotations

import functools
import math
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from samestep.building.loss import loss_from
from samestep.errors import ModelError
from samestep.examination.examine import Loss
from samestep.runtime.assembly import Assembly
from samestep.runtime.checkpoints.saved_run import SavedRun
from samestep.runtime.ledger import outside_step, owned
from samestep.runtime.open_step import ReadStep, StepBackward
from samestep.runtime.optimizers.optimizer_source import check_call
from samestep.runtime.optimizers.optimizers_by_name import (
    UpdatedPart,
    check_method,
    check_options,
    member_index,
    members_in,
    names_of,
)
from samestep.runtime.own_steps import gradient_views
from samestep.runtime.own_steps.gradient_views import LeftGradients, WaitingGradients
from samestep.runtime.own_steps.other_losses import OtherLosses
from samestep.runtime.processes import whereabouts
from samestep.runtime.processes.messages import gather_values
from samestep.runtime.run_batches import RunBatches
from samestep.runtime.step_observer import StepBatch
from samestep.runtime.step_report import StepReport
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


class RunInParts(SavedRun):
    """Backwards and updates of a run, which its loop calls one by one."""

    _batches: RunBatches
    _losses: OtherLosses
    ended: StepReport | None
    _waiting: WaitingGradients | None = None

    def __init__(self) -> None:
        """Begin without a backward."""
        self._entries: list[_Taken] = []
        """The backwards of which something waits."""
        self._last: tuple[int, int] = (-1, 0)
        """The step of the last backward, and the number of its backwards so far."""
        self._values: tuple[list[Any], int, list[Any]] = [], -1, []
        """The tensors of the last batch that was given by values, its step, and what tells them from others."""
        self._methods: set[tuple[tuple[int, ...] | None, str]] = set()
        """The methods of optimizers that were called, and do not couple what the layout divides."""
        self._left = LeftGradients()

    @abstractmethod
    def _computing(self) -> AbstractContextManager[None]:
        """Return a context in which the run computes."""

    @abstractmethod
    def _taken(
        self, batch: StepBatch | Any, method: str, take: Callable[[StepBatch], StepReport], *, local: bool
    ) -> tuple[StepReport, StepBatch]:
        """Take a step or a backward on a batch; return the report, and that batch as the loss is given it."""

    @abstractmethod
    def _received(self, report: StepReport, batch: StepBatch, *, is_part: bool = False) -> StepReport:
        """Return a report as its loggers leave it."""

    # -- values as a batch -------------------------------------------------------------------------

    def _step_of(self, batch: Any) -> int:
        """Return the step of what a backward was given: values that were given before, of the same tensors, belong to the step of then.

        Collective over the world for values, see [Note: collective calls]: some ranks may be given none.
        """
        if hasattr(batch, "shares"):
            return self._stepper.steps_taken
        is_same = None if batch is None else _marks_of(tree_leaves(batch)) == self._values[2]
        with outside_step():
            known = gather_values(is_same, self.layout.world_size)
        return self._values[1] if True in known and False not in known else self._stepper.steps_taken

    def _note_values(self, batch: Any, step: int) -> None:
        """Note the values of the batch of a step; a batch of `samestep.batches` knows its step."""
        if hasattr(batch, "shares"):
            self._values = [], step, []
        else:
            leaves = tree_leaves(batch)
            self._values = leaves, step, _marks_of(leaves)

    # -- backward ----------------------------------------------------------------------------------

    def backward(
        self,
        batch: StepBatch | Any,
        loss: Loss | str | None = None,
        into: str | int | None = None,
        *,
        local: bool = False,
    ) -> StepReport:
        """Run the forward and backward passes of a batch, and accumulate the gradients for `run.update`; return their report.

        Gradients add up, each backward's divided by its own count. A step is one batch, with any number of backwards.

        Args:
            batch: one of `samestep.batches`, or values of a full batch as `step` takes them.
            loss: (outputs, batch) -> (sum, count), or a word of the key `train.loss`; by default the loss of the run.
            into: the name of an optimizer: only its weights get gradients, and all others are constants.
            local: whether each data rank has its own samples, as `step` takes them.

        Raises:
            ModelError: no optimizer has the name, or gradients are compressed or not exchanged in every step.
            InputError: as for `step`.
        """
        other = None if loss is None else loss_from(loss)
        with whereabouts.taking(self._stepper.steps_taken + 1, hang_s=self.job.run.hang_s):
            report, _ = self._taken(
                batch,
                "backward",
                lambda labelled: self._backward(labelled, self._batches.loss_of(other), into),
                local=local,
            )
        return report

    def _backward(self, batch: StepBatch, loss: Loss | None, into: str | int | None) -> StepReport:
        """Run a backward, and let the gradients wait; return the report of all that waits.

        Raises:
            ModelError: the stream of the batch has ended.
        """
        self._refuse_layout("run.backward")
        assembly = self._stepper.held
        if self._waiting is None:
            self._waiting = WaitingGradients(assembly.weights.store)
        if getattr(batch, "is_over", False):
            raise ModelError(
                "run-call-time",
                f"run.backward was given the batch of step {batch.step + 1}, and its stream has ended. Call it within the loop over "
                "the batches",
            )
        names = self._weights_of(member_index(self._optimizer_names, into, "run.backward"))
        number = self._last[1] if self._last[0] == batch.step else int(self._stepper.steps_taken == batch.step + 1)
        loss_of = self._losses.of_backward(assembly, loss, batch)
        # In fp16 the sum over the ranks of each backward shows whether float16 overflows.
        waits = assembly.weights.store.can_wait and not assembly.weights.updater.loss_scale.is_dynamic
        leaves = None if into is None else _leaves(assembly, names)
        only = None if into is None else names
        of = StepBackward(number, only, *loss_of, is_apart=True, waits=waits, into=leaves)
        self._last = batch.step, number + 1
        take = functools.partial(self._accumulate, self._waiting, batch, of)
        return self._stepper.take(batch, take, watches=number == 0)

    def _accumulate(self, waiting: WaitingGradients, batch: StepBatch, of: StepBackward) -> StepReport:
        self._left.refuse_changes("run.backward")
        waiting.make_room()
        read = self._stepper.read(self._stepper.backward(batch, of))
        used = self._weights_of(None) - self._stepper.used.agreed
        names = used if of.names is None else used & of.names
        waiting.add(names, read.numbers.scales[0] or 0.0, is_reduced=not of.waits)
        loss = read.numbers.loss + sum(entry.read.numbers.loss for entry in self._entries)
        self._entries.append(_Taken(read, names or self._weights_of(None), loss))
        self._note_left()
        return replace(self._stepper.report(read), loss=loss, grad_norm=math.nan)

    # -- update ------------------------------------------------------------------------------------

    def update(self, name: str | int | None = None, **options: Any) -> StepReport:
        """Update the weights of an optimizer, or of all, with the accumulated gradients, and clear these; return the report.

        These gradients are clipped by their common norm (`optimizer.clip_norm`). `options` go to the optimizer's
        `step`.

        Raises:
            ModelError: no gradient is accumulated, no optimizer has the name, or its `step` does not take the options.
            NonFiniteError: loss or gradients are not finite, and `numerics.on_nonfinite` is "stop".
        """
        self._refuse_lent("update")
        if self.ended is not None:
            return self.ended
        with self._computing():
            part = UpdatedPart(member_index(self._optimizer_names, name, "run.update"), options)
            weights = self._weights_of(part.members)
            waiting, names = self._waiting_for(weights, "run.update")
            check_options(self._stepper.held.weights.updater.optimizer, part)
            self._check_closure(part, weights)
            last = self._entries[-1]
            batch = last.read.opened.batch
            report = self._stepper.update(self._what_waits(waiting, names, weights), part, frozenset(weights - names))
            self._stepper.held.weights.updater.rates.count(batch.step, part)
            self._drop(weights)
            self._note_left()
            self._stepper.follow(batch.step, weights)
        return self._received(replace(report, loss=last.loss), batch, is_part=True)

    def _what_waits(self, waiting: WaitingGradients, names: Set[str], weights: Set[str]) -> ReadStep:
        """Let the store have all gradients that wait for some weights, and return them as one step's.

        Collective over the world, see [Note: collective calls].
        """
        read = next(
            (entry.read for entry in self._entries if entry.read.note and entry.names & weights), self._entries[-1].read
        )
        numbers, of, is_one = read.numbers, read.opened.of, waiting.are_one_backward(names)
        waiting.reduce() if is_one else waiting.add_up()
        if not is_one or of.waits:
            norm = self._norm_of(of.names if is_one else names) * waiting.factor
            numbers = replace(numbers, norm=norm if not read.note else math.inf, norms=[norm])
        note = read.note or ("" if numbers.are_finite else "the accumulated gradients are not finite")
        return replace(read, numbers=replace(numbers, scales=[waiting.factor]), note=note)

    def call(self, name: str | int | None, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of an optimizer over the weights of this rank, with the accumulated gradients; return its result.

        Use it for `update_hessian` of Sophia, or the two steps of SAM. `name` is the name of the optimizer, or None for the only one. The method
        may change weights and states. The gradients stay, unless the method drops them.

        Raises:
            ModelError: no optimizer has the name, or the optimizer no such method.
            LayoutError: the method couples weights, or elements of one, that the layout divides.
        """
        self._refuse_lent("call")
        with self._computing():
            part = UpdatedPart(member_index(self._optimizer_names, name, "run.call"))
            self._refuse_layout("run.call")
            assembly, weights = self._stepper.held, self._weights_of(part.members)
            updater = assembly.weights.updater
            self._check_method(part, method, args, kwargs)
            names: Set[str] = frozenset()
            self._left.refuse_changes("run.call")
            if self._waiting is not None and self._waiting.names & weights:
                self._waiting.add_up()
                names = self._waiting.names & weights
                assembly.weights.store.deliver()
            updater.unused = frozenset(weights - names)
            updater.live.reread()
            results: list[Any] = []
            self._stepper.change(assembly, lambda: results.extend(updater.call(part, method, args, kwargs)))
            result, dropped = results
            with outside_step():
                if any(gather_values(bool(dropped), self.layout.world_size)):  # as `optimizer.zero_grad()` in it does
                    self._drop(weights)
            self._use_up()
            self._note_left()
        return result

    def _check_method(self, part: UpdatedPart, method: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Refuse a method that an optimizer does not have, or that the layout would change.

        Raises:
            ModelError: it has none, or the method does not take the arguments.
            LayoutError: the method couples what the layout divides.
        """
        if (part.members, method) in self._methods:
            return
        assembly, source, layout = self._stepper.held, self._own.source.optimizer, self.layout
        check_method(assembly.weights.updater.optimizer, part, method, args, kwargs)

        def run(optimizer: Optimizer) -> None:
            for member in members_in(optimizer, part):
                getattr(member, method)(*args, **kwargs)

        attributes = assembly.weights.updater.whole.weights.attributes
        check_call(source, assembly.model.spec, layout, attributes, method, run)
        self._methods.add((part.members, method))

    def _check_closure(self, part: UpdatedPart, weights: Set[str]) -> None:
        """Refuse an optimizer that evaluates the loss again where the gradients of several backwards wait.

        Raises:
            ModelError: a closure would repeat one of them.
        """
        evaluates = self._stepper.held.weights.updater.whole.evaluates(part)
        if evaluates and len([entry for entry in self._entries if entry.names & weights]) > 1:
            raise ModelError(
                "closure-unsupported",
                "run.update: the step of this optimizer evaluates the loss again, and gradients of several backwards are accumulated. Use one backward of the sum of their losses",
            )

    def _norm_of(self, names: Set[str] | None) -> float:
        """Return the norm of the gradients of some weights, or of all, which the store has, over all ranks; the host waits for it."""
        assembly = self._stepper.held
        total = assembly.weights.store.norm_squared(names)
        if self.layout.world_size > 1:
            with owned("scalars"):
                dist.all_reduce(total, group=assembly.parallel.mesh.groups["world"])
        return math.sqrt(float(total)) if math.isfinite(float(total)) else math.inf

    # -- what waits --------------------------------------------------------------------------------

    def zero_grad(self, name: str | int | None = None) -> None:
        """Clear the accumulated gradients of an optimizer, or of all. Every rank must call it; it communicates nothing.

        Raises:
            ModelError: no optimizer has the name.
        """
        members = member_index(self._optimizer_names, name, "run.zero_grad")
        if self._waiting is None:
            return
        self._drop(self._weights_of(members))
        self._note_left()
        self._use_up()

    def _use_up(self) -> None:
        """Count the batch of the last backward as taken, if there was one."""
        self._stepper.steps_taken = max(self._stepper.steps_taken, self._last[0] + 1)

    def gradients(self) -> dict[str, Tensor]:
        """Return the accumulated gradients by weight: summed over all ranks, divided by the counts, not clipped.

        You may change them in place; `run.update` then uses them. With zero=2, zero=3 and tp they are DTensors, sharded or replicated. With pp a
        rank has the gradients of all stages, and changes count for its own stage.

        Collective over the axes that divide the weights, see [Note: collective calls].

        Raises:
            ModelError: no gradient is accumulated.
        """
        waiting, names = self._waiting_for(self._weights_of(None), "run.gradients")
        waiting.add_up()
        assembly = self._stepper.held
        by_name = assembly.weights.store.finished()
        gradients = gradient_views.of_whole_weights(
            assembly, {name: gradient for name, gradient in by_name.items() if name in names}
        )
        self._left.note(assembly, lambda: gradients, may_be_written=True)
        return gradients

    def _refuse_waiting(self, method: str) -> None:
        """Refuse a call while gradients wait.

        Raises:
            ModelError: some do.
        """
        if self._waiting is not None and self._waiting.names:
            name = min(self._waiting.names)
            raise ModelError(
                "run-call-time",
                f"run.{method}: accumulated gradients are not used yet, for example of {name}: run.update uses them, and run.zero_grad forgets them. Call "
                "one of these first",
            )

    def _forget_gradients(self) -> None:
        """Forget all that waits, since the weights were read from files."""
        if self._waiting is not None:
            self._drop(self._weights_of(None))
        self._left.forget()
        self._last = -1, 0

    def _drop(self, names: Set[str]) -> None:
        assert self._waiting is not None
        self._waiting.drop(names)
        left = self._waiting.names
        self._entries = [entry for entry in self._entries if entry.names & left]

    def _waiting_for(self, weights: Set[str], method: str) -> tuple[WaitingGradients, frozenset[str]]:
        """Return what waits, and of which of these weights.

        Raises:
            ModelError: nothing does.
        """
        self._refuse_layout(method)
        waiting = self._waiting
        if waiting is None or not (
            waiting.names & weights or any(entry.read.note and entry.names & weights for entry in self._entries)
        ):
            raise ModelError(
                "run-call-time", f"{method}: no gradient is accumulated for it. Use run.backward(batch, loss) before it"
            )
        self._left.refuse_changes(method)
        return waiting, waiting.names & weights

    def _note_left(self) -> None:
        """Note what stands in the module's gradients, where some wait."""
        if self._waiting is not None and self._waiting.names:
            self._left.note(self._stepper.held, self.gradients)
        else:
            self._left.forget()

    @property
    def _optimizer_names(self) -> tuple[str | int, ...]:
        return names_of(self._own.source.optimizer)

    def _weights_of(self, members: tuple[int, ...] | None) -> frozenset[str]:
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
                f"{method} with numerics.exchange_every = {numerics.exchange_every}. Use run.step, or 1",
            )
        if numerics.compression != "none":
            raise ModelError(
                "compression-unsupported",
                f'{method} with numerics.compression = "{numerics.compression}". Use run.step, or "none"',
            )


def _leaves(assembly: Assembly, names: Set[str]) -> list[Tensor] | None:
    """Return the weights of these names, where autograd can leave the others out of a backward; None for all.

    It can where each rank has all weights, and no exchange in a backward is waited for by ranks whose graphs may differ.
    """
    layout = assembly.parallel.program.step.layout
    is_whole = layout.dp == layout.world_size and layout.ep == 1 and layout.zero < 2
    if not is_whole or assembly.objective.exchanges is not None:
        return None
    named = assembly.model.module.named_parameters()
    return [weight for name, weight in named if name in names and weight.requires_grad] or None


def _marks_of(leaves: Sequence[Any]) -> list[Any]:
    """Return what tells values from others: a tensor that was written meanwhile is another one."""
    return [(id(leaf), version_of(leaf) if isinstance(leaf, Tensor) else digest(leaf)) for leaf in leaves]
