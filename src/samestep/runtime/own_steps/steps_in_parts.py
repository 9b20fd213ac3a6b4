"""Steps that a loop takes in parts: backwards, whose gradients add up, and updates of all or some of the optimizers.

```
run.backward(batch, d_loss, into="d");  run.update("d")
run.backward(batch, g_loss, into="g");  run.update("g")
```
A step is one batch, however many parts it has: `steps_taken` and the keys of random numbers count it once, and the number of its
backwards before is part of the key of masks. A backward is `Stepper.backward`, and an update is `Stepper.update` of the gradients that
wait. Gradients are reduced by the first update, or `gradients`, where ranks have whole ones; else each backward
reduces its own, and after one for the same weights the update needs no other number. In all other cases the ranks add up a norm.
A loss other than that of the run is checked, tried and named once, as that of the run is when it is prepared (`OtherLosses`).
"""

from __future__ import annotations

import functools
import inspect
import math
import types
from collections.abc import Mapping, Sequence, Set
from dataclasses import replace
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from samestep.building.loss import check_results_of
from samestep.building.loss_result import loss_result
from samestep.building.named_tensors import cast_batch
from samestep.building.over_samples import mark_of
from samestep.errors import ModelError
from samestep.examination.examine import Loss
from samestep.models.spec import LossNames
from samestep.randomness import mode as dropout
from samestep.randomness.dropout_state import Dropout
from samestep.runtime import evaluation
from samestep.runtime.assembly import Assembly
from samestep.runtime.axes import loss_terms, tensor
from samestep.runtime.axes.exchanging_calls import NothingToJoin
from samestep.runtime.guards.step_trials import StepTrials, is_split
from samestep.runtime.held_assembly import HeldAssembly
from samestep.runtime.ledger import outside_step, owned
from samestep.runtime.loss_watch import LossWatch
from samestep.runtime.objective import watched, watching_reads
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
from samestep.runtime.processes.messages import gather_values
from samestep.runtime.step_observer import StepBatch
from samestep.runtime.step_report import StepReport
from samestep.runtime.stepper import Stepper
from samestep.state.fingerprints import digest
from samestep.state.writes import version_of
from samestep.trees import tree_leaves

_OF_BATCH = 8
"""So many samples show the names of what a loss over the whole batch reports, which may need several."""


class OtherLosses:
    """The losses that a loop has given to the backwards of one run."""

    def __init__(self, stepper: Stepper, assemblies: HeldAssembly) -> None:
        self._stepper, self._own = stepper, assemblies
        self._known: dict[object, tuple[StepTrials, LossNames, LossWatch]] = {}
        """The trials of each loss, the names of what it reports, and the watch over its calls, by its code."""

    def of_backward(
        self, assembly: Assembly, loss: Loss | None, batch: StepBatch
    ) -> tuple[Assembly | None, StepTrials | None]:
        """Return the assembly with another loss than the run's, and the trials of that loss, which functions of one code share.

        Raises:
            ModelError: the logits of the run's own loss are cut, or never whole, which another loss needs.
        """
        if loss is None or loss is self._own.source.loss:
            return None, None
        program = assembly.parallel.program
        if tensor.cuts_logits(program) or program.step.layout.loss_chunk is not None:
            word = f"tp={program.step.layout.tp}" if tensor.cuts_logits(program) else "loss_chunk"
            raise ModelError(
                "loss-over-batch",
                f"run.backward was given another loss than the run's, and {word} never makes whole logits. Use a loss of the "
                "run that is a function of (outputs, batch) in place of its word",
            )
        sums = assembly.objective.sums
        if mark_of(loss) is not None and not sums.is_whole and is_split(program):
            raise ModelError(
                "loss-over-batch",
                "run.backward was given a loss over the whole batch, and the loss of the run is a sum over samples, so that nothing is "
                "exchanged for it. Use samestep.whole_batch around the run's own loss too, or one rank with one micro-batch",
            )
        key, seen = _key_of(loss), loss
        if key not in self._known:
            trials = StepTrials(
                assembly, loss, self._stepper.refusals, self._stepper.place.device, self._stepper.job.train.seed
            )
            self._known[key] = trials, self._names_in(assembly, loss, batch), LossWatch()
            seen = watching_reads(loss, self._own.source, assembly.model.module, program)
            if assembly.model.dropout.dropout is Dropout.ABSENT:  # this loss may draw
                assembly.model.dropout.dropout = Dropout.UNKNOWN
                dropout.track_modules(assembly.model.module)
        trials, names, watch = self._known[key]
        checked = check_results_of(seen) if sums.is_whole else watched(seen, program, watch)
        if not sums.is_whole:
            sums = loss_terms.sums_of(loss, program, assembly.parallel.mesh, watch, names)
        objective = replace(assembly.objective, loss=checked, names=names, sums=sums, watch=watch)
        return replace(assembly, objective=objective), trials

    def _names_in(self, assembly: Assembly, loss: Loss, batch: StepBatch) -> LossNames:
        """Return the names of what a loss reports, as one sample shows them, or some of a loss over the whole batch; none where it needs
        gradients to be computed.

        Collective over the world, see [Note: collective calls].
        """
        number = 1 if mark_of(loss) is None else _OF_BATCH
        samples = batch.samples(batch.shares(0, 1, 1)[0][:number])
        outputs = evaluation.outputs_of(assembly, samples, self._stepper.job.train.seed)
        model = assembly.model
        cast = cast_batch(samples, model.master_dtype, keeps_double=model.keeps_double)
        try:
            return loss_result(loss(outputs, cast)).names
        except Exception:  # of the user's own code, which the backward itself will raise, if it does
            return LossNames()


def _key_of(loss: Loss) -> object:
    """Return what tells a loss from others: functions that a loop makes anew in each step are one, unless they hold other numbers."""
    function: Any = inspect.unwrap(loss)
    code = getattr(function, "__code__", None)
    if code is None:
        return function
    contents = [cell.cell_contents for cell in function.__closure__ or () if cell != types.CellType()]
    plain = [
        value for value in (*contents, *(function.__defaults__ or ())) if isinstance(value, str | int | float | bool)
    ]
    return code, repr(plain), mark_of(loss) is not None


class _Taken(NamedTuple):
    """A backward whose gradients wait."""

    read: ReadStep
    names: Set[str]
    """The weights to which it gave a gradient."""
    loss: float
    """The sum of its loss and of those of the backwards that waited with it."""


class StepsInParts:
    """The backwards and updates that the loop of a run calls itself."""

    def __init__(self, stepper: Stepper, assemblies: HeldAssembly) -> None:
        self._stepper, self._own = stepper, assemblies
        self._waiting: WaitingGradients | None = None
        self._taken: list[_Taken] = []
        """The backwards of which something waits."""
        self._last: tuple[int, int] = (-1, 0)
        """The step of the last backward, and the number of its backwards so far."""
        self._values: tuple[list[Any], int, list[Any]] = [], -1, []
        """The tensors of the last batch that was given by values, its step, and what tells them from others."""
        self._methods: set[tuple[tuple[int, ...] | None, str]] = set()
        """The methods of optimizers that were called, and do not couple what the layout divides."""
        self._losses = OtherLosses(stepper, assemblies)
        self._left = LeftGradients()

    # -- values as a batch -------------------------------------------------------------------------

    def step_of(self, batch: Any) -> int:
        """Return the step of what a backward was given: values that were given before, of the same tensors, belong to the step of then.

        Collective over the world for values, see [Note: collective calls]: some ranks may be given none.
        """
        if hasattr(batch, "shares"):
            return self._stepper.steps_taken
        is_same = None if batch is None else _marks_of(tree_leaves(batch)) == self._values[2]
        with outside_step():
            known = gather_values(is_same, self._own.layout.world_size)
        return self._values[1] if True in known and False not in known else self._stepper.steps_taken

    def note_values(self, batch: Any, step: int) -> None:
        """Note the values of the batch of a step; a batch of `samestep.batches` knows its step."""
        if hasattr(batch, "shares"):
            self._values = [], step, []
        else:
            leaves = tree_leaves(batch)
            self._values = leaves, step, _marks_of(leaves)

    # -- backward ----------------------------------------------------------------------------------

    def backward(self, batch: StepBatch, loss: Loss | None, into: str | int | None) -> StepReport:
        """Run the forwards and backwards of a batch, and let the gradients wait; return the report of all that waits.

        Collective over the world, see [Note: collective calls].

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
        names = self._names_of(member_index(self._names, into, "run.backward"))
        number = self._last[1] if self._last[0] == batch.step else int(self._stepper.steps_taken == batch.step + 1)
        loss_of = self._losses.of_backward(assembly, loss, batch)
        # In fp16 the sum over the ranks of each backward shows whether float16 overflows.
        waits = assembly.weights.store.local.can_wait and not assembly.weights.updater.loss_scale.is_dynamic
        leaves = None if into is None else _leaves(assembly, names)
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
        loss = read.numbers.loss + sum(entry.read.numbers.loss for entry in self._taken)
        self._taken.append(_Taken(read, names or self._names_of(None), loss))
        self._note_left()
        return replace(self._stepper.report(read), loss=loss, grad_norm=math.nan)

    # -- update ------------------------------------------------------------------------------------

    def update(self, name: str | int | None, options: Mapping[str, Any]) -> tuple[StepReport, StepBatch]:
        """Clip the gradients that wait for an optimizer, or for all, and let it update its weights; return the report, and the batch.

        Collective over the world, see [Note: collective calls].
        """
        part = UpdatedPart(member_index(self._names, name, "run.update"), dict(options))
        weights = self._names_of(part.members)
        waiting, names = self._waiting_for(weights, "run.update")
        check_options(self._stepper.held.weights.updater.optimizer, part)
        self._check_closure(part, weights)
        last = self._taken[-1]
        batch = last.read.opened.batch
        report = self._stepper.update(self._what_waits(waiting, names, weights), part, frozenset(weights - names))
        report = replace(report, loss=last.loss)
        self._stepper.held.weights.updater.rates.count(batch.step, part)
        self._drop(weights)
        self._note_left()
        return report, batch

    def _what_waits(self, waiting: WaitingGradients, names: Set[str], weights: Set[str]) -> ReadStep:
        """Let the store have all gradients that wait for some weights, and return them as one step's.

        Collective over the world, see [Note: collective calls].
        """
        read = next(
            (entry.read for entry in self._taken if entry.read.note and entry.names & weights), self._taken[-1].read
        )
        numbers, of, is_one = read.numbers, read.opened.of, waiting.are_one_backward(names)
        waiting.reduce() if is_one else waiting.add_up()
        if not is_one or of.waits:
            norm = self._norm_of(of.names if is_one else names) * waiting.factor
            numbers = replace(numbers, norm=norm if not read.note else math.inf, norms=[norm])
        note = read.note or ("" if numbers.are_finite else "the gradients that wait are not finite")
        return replace(read, numbers=replace(numbers, scales=[waiting.factor]), note=note)

    def call(self, name: str | int | None, method: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Let an optimizer run a method over its pieces, with the gradients that wait, not clipped; return what it returns.

        Collective over the world, see [Note: collective calls].
        """
        part = UpdatedPart(member_index(self._names, name, "run.call"))
        self._refuse_layout("run.call")
        assembly, stepper, weights = self._stepper.held, self._stepper, self._names_of(part.members)
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
        stepper.change(assembly, lambda: results.extend(updater.call(part, method, args, kwargs)))
        result, dropped = results
        with outside_step():
            if any(gather_values(bool(dropped), self._own.layout.world_size)):  # as `optimizer.zero_grad()` in it does
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
        assembly, source, layout = self._stepper.held, self._own.source.optimizer, self._own.layout
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
        if evaluates and len([entry for entry in self._taken if entry.names & weights]) > 1:
            raise ModelError(
                "closure-unsupported",
                "run.update: the step of this optimizer evaluates the loss again, and the gradients of several backwards wait. Use one backward of the sum of their losses",
            )

    def _norm_of(self, names: Set[str] | None) -> float:
        """Return the norm of the gradients of some weights, or of all, which the store has, over all ranks; the host waits for it."""
        assembly = self._stepper.held
        total = assembly.weights.store.norm_squared(names)
        if self._own.layout.world_size > 1:
            with owned("scalars"):
                dist.all_reduce(total, group=assembly.parallel.mesh.groups["world"])
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
        assembly = self._stepper.held
        by_name = assembly.weights.store.local.finished()
        self._left.note(assembly, may_be_written=True)
        return gradient_views.of_whole_weights(
            assembly, {name: gradient for name, gradient in by_name.items() if name in names}
        )

    def refuse_waiting(self, method: str) -> None:
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
        self._taken = [entry for entry in self._taken if entry.names & left]

    def _waiting_for(self, weights: Set[str], method: str) -> tuple[WaitingGradients, frozenset[str]]:
        """Return what waits, and of which of these weights.

        Raises:
            ModelError: nothing does.
        """
        self._refuse_layout(method)
        waiting = self._waiting
        if waiting is None or not (
            waiting.names & weights or any(entry.read.note and entry.names & weights for entry in self._taken)
        ):
            raise ModelError(
                "run-call-time",
                f"{method}: no gradient waits for it. Use run.backward(batch, loss) before it",
            )
        self._left.refuse_changes(method)
        return waiting, waiting.names & weights

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
    if not is_whole or not isinstance(assembly.objective.exchanges, NothingToJoin):
        return None
    named = assembly.model.module.named_parameters()
    return [weight for name, weight in named if name in names and weight.requires_grad] or None


def _marks_of(leaves: Sequence[Any]) -> list[Any]:
    """Return what tells values from others: a tensor that was written meanwhile is another one."""
    return [(id(leaf), version_of(leaf) if isinstance(leaf, Tensor) else digest(leaf)) for leaf in leaves]
