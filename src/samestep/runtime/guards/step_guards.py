"""One observer that calls all guards of a rank's steps: which step is watched, by which of them, and in which order.

```
take    ─► watch          a watched step: samples run again, one update made again, ranks compared
begin   ─► begin_step     what the loop has changed since the last step; samples read twice
tasks   ─► observer       that of the run, in a watched step by way of `WatchedStep`
        ─► generators     random numbers
        ─► trials         the loss, calls of torch.distributed
agree   ─► refusals       one flag of the step's all_reduce
decide  ─► note_of        a step that is not finite, whose cause is looked for, or all masked
        ─► spikes         a loss far above those before
        ─► skipped        whether it is skipped
```
The table in the head of this room lists what each of them finds, and what it costs. Which steps are watched:

```
step of this process     1  2     4           8                       16 ...      early: a sample alone
                                           every     2 every     3 every          regular: a weight's update and the ranks too
```
Code that begins to act otherwise after a while is found within twice that time, until the regular checks begin; code that does from
the beginning, such as one that divides by the number of samples in a micro-batch, whether there are regular checks or not.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from samestep.building.autograd_graph import nodes_from
from samestep.building.model import call_model
from samestep.building.model_loss import ModelLoss
from samestep.errors import UnprovenError
from samestep.examination.examine import Loss
from samestep.program.ops import Task
from samestep.program.program import Program
from samestep.randomness.mode import needs_mode
from samestep.runtime import evaluation
from samestep.runtime.assembly import Assembly
from samestep.runtime.guards import nonfinite
from samestep.runtime.guards.canary import WatchedStep, WatchRecord
from samestep.runtime.guards.cut_operations import OF_STAGES, CutOperations, SeenOperations
from samestep.runtime.guards.drift import DriftMonitor
from samestep.runtime.guards.loss_trials import LossTrials, is_split
from samestep.runtime.guards.named_samples import NamedSamples
from samestep.runtime.guards.outside_changes import OutsideChanges
from samestep.runtime.guards.randomness import GeneratorWatch, refusal
from samestep.runtime.guards.refusals import Refusals
from samestep.runtime.guards.repeat import Repeat, TriedLoss, marks_of_weights
from samestep.runtime.guards.unusual_steps import MASKED, SkippedSteps, SpikeWatch
from samestep.runtime.held_assembly import HeldAssembly
from samestep.runtime.processes.messages import gather_values
from samestep.runtime.recording.step_recorder import StepRecorder
from samestep.runtime.step_observer import StepBatch, StepNumbers, StepObserver
from samestep.runtime.step_report import StepReport
from samestep.state.snapshot import KeptValues
from samestep.state.writes import Marks
from samestep.trees import tensors_in

_MOST_GRAPHS = 8
"""So many graphs of one rank are tried: of the first few alone, where the data decide."""


class ForwardGraphs:
    """The graphs that the forwards of a rank have built, by their number of nodes, which costs nothing to know, and in the first
    micro-batch also by their operations and the dimensions of these.

    A forward that a flag, a counter or a global lets take another branch builds another graph. Its samples may influence each other from
    then on, so it is tried as in a watched step, before the update (`canary.py`); and it may combine parts of several ranks
    (`cut_operations.py`).
    """

    def __init__(self, program: Program) -> None:
        """Keep none yet, of forwards of a program; those that choose experts build others with each batch."""
        spec, layout = program.step.model, program.step.layout
        is_one = not any(layer.dispatches for layer in spec.layers)
        self.tries_samples = is_one and is_split(program) and not spec.couples_samples
        """Whether samples are divided, and tried apart."""
        self.tries_parts = is_one and (layout.model_ranks > 1 or layout.cp > 1 or layout.pp > 1) and not spec.looks
        """Whether ranks have parts of a model; code that looks at values runs other operations with each batch."""
        self._graphs: set[tuple[int, int, int]] = set()
        self.kinds: set[int] = set()
        """Micro-batches of the first step that have built larger or smaller graphs than those before, such as the first one with a picture."""

    def is_new(self, task: Task, num_nodes: int, outputs: Any, *, is_first: bool) -> bool:
        """Return whether a chunk has not built such a graph before, if that is tried; `is_first` in the first step."""
        if not (self.tries_samples or self.tries_parts) or len(self._graphs) >= _MOST_GRAPHS:
            return False
        graph = task.chunk, num_nodes, 0 if task.microbatch else _operations_of(outputs)
        if is_first and all(known[:2] != graph[:2] for known in self._graphs):
            self.kinds.add(task.microbatch)
        is_new = graph not in self._graphs
        self._graphs.add(graph)
        return is_new


def _operations_of(outputs: Any) -> int:
    """Return a number for the operations that have made outputs, and for the dimensions along which they compute."""
    number = 0
    for node in nodes_from(tensor.grad_fn for tensor in tensors_in(outputs)):
        of_node: Any = type(node)
        kind, place = _kind_of(of_node)
        number = hash((number, kind, getattr(node, place) if place else None))
    return number


_RESHAPED = ("ViewBackward0", "ReshapeAliasBackward0", "UnsafeViewBackward0")
"""What a reshape leaves, by the strides that its operand happens to have."""


@functools.cache
def _kind_of(node: type) -> tuple[str, str]:
    """Return the operation of a class of nodes, and the name under which these keep its dimension; empty if they keep none."""
    name = node.__name__
    dims = (place for place in ("_saved_dim", "_saved_dims") if hasattr(node, place))
    return _RESHAPED[0] if name in _RESHAPED else name, next(dims, "")


class StepGuards:
    """The guards of a run's steps. Every rank makes one, and all call its methods in the same order."""

    def __init__(self, assemblies: HeldAssembly, observer: StepObserver, recorder: StepRecorder) -> None:
        """Make them before the run is prepared; `observer` sees the steps as the guards do."""
        self.observer = observer
        """What sees the steps: in a watched step the one that watches it, which passes on what it hears."""
        self.recorder = recorder
        """What records where the time of steps goes."""
        self.refusals = Refusals(assemblies.job.run)
        self.skipped = SkippedSteps(assemblies.job.numerics)
        self.spikes = SpikeWatch(assemblies.job.numerics)
        """The losses of the last steps, by which a spike is recognised."""
        self.num_taken = 0
        """Number of steps that this process has begun to take."""
        self._own = assemblies
        self._seed = assemblies.job.train.seed
        self._is_data_tried = False
        self._shown = WatchRecord()
        self._weights: Marks | None = None
        """The marks of the weights at the beginning of a watched step, and of the first one."""
        self._operations: SeenOperations | None = None
        """What forwards have run on parts of tensors, from the first step on; None where ranks have no parts."""
        self._compares_operations = False
        """Whether this step is one in which that is compared, whatever graphs its forwards build."""
        self._again: Repeat | None = None
        """The repetitions of a watched step, which it shares with the trial of the loss."""

    # -- a whole step ------------------------------------------------------------------------------

    def looks_closer(self, step: int) -> bool:
        """Return whether the next step of this process, with this index, is one in which something is repeated or compared."""
        return self.num_taken == 0 or any(self._due(step, self.num_taken + 1)[1:])

    def watch(self, batch: StepBatch, take: Callable[[], StepReport], *, replays: bool) -> StepReport:
        """Take a step or a part of one by `take`; where one is due, do a part of it once more, and compare what ranks hold.

        `replays` makes an update again too. Collective over the world, see [Note: collective calls].
        """
        self.num_taken += 1
        taken, assembly = self.num_taken, self._own.current
        is_early, tries_samples, regularly = self._due(batch.step, taken)
        tries_parts = self._graphs.tries_parts and not self.observer.is_proof
        self._compares_operations = tries_parts and (regularly or is_early)
        if taken == 1 and tries_parts:
            take = functools.partial(self._noting_operations, batch, take)
        self._weights = marks_of_weights(assembly) if tries_samples or regularly or taken == 1 else None
        self._again = None
        if not (tries_samples or regularly):
            return take()
        assembly.weights.store.settle()  # what is repeated or compared reads any weight
        if self.observer.is_proof:  # which compares more
            return self._compare(batch, take) if regularly else take()
        self.trials.is_tried = False  # again: a loss may come to couple samples later
        assembly.model.dropout.begin_step()  # its hooks are part of the state that a repetition keeps
        make_mode, is_first = self.observer.dropout_mode, taken == 1
        again = Repeat(assembly, batch, self.trials.loss, self._seed, make_mode, weights=self._weights)
        replays &= regularly
        watched = WatchedStep(
            again, self.observer, self.refusals, self._shown, replays=replays, is_event=replays and not is_first
        )
        self._again = None if watched.is_routed else again
        outer, self.observer = self.observer, watched
        try:
            return watched.take(functools.partial(self._compare, batch, take) if regularly else take)
        finally:
            self.observer = outer

    def _due(self, step: int, taken: int) -> tuple[bool, bool, bool]:
        """Return whether a step, counted from 0, is an early one: the first, second, fourth and so on of this process; whether samples are
        run again in it for that; and whether it is one of `train.watch_every`, or the first of a model with what no rule shows.

        `taken` is the number of steps of this process, with this one.
        """
        every, program = self._own.job.train.watch_every, self._own.current.parallel.program
        is_first = taken == 1 and bool(program.step.model.tried)
        is_regular = every > 0 and (step + 1) % every == 0
        is_early, is_divided = taken & (taken - 1) == 0 and (taken == 1 or taken < every), is_split(program)
        return is_early, is_early and is_divided, is_regular or (is_first and is_divided)

    def _compare(self, batch: StepBatch, take: Callable[[], StepReport]) -> StepReport:
        """Take a step or a part of one, and compare what several ranks must hold alike."""
        if self._own.layout.world_size == 1:
            return take()
        return self._drift_monitor.watch(take, batch.shares(0, 1, 1)[0])

    # -- parts of a step ---------------------------------------------------------------------------

    def find_loss(self, assembly: Assembly, batch: StepBatch) -> None:
        """Find out, before its first use, how a loss that the forward returns adds up over the parts of a batch.

        Collective over the world, see [Note: collective calls].
        """
        loss = self._own.source.loss
        if isinstance(loss, ModelLoss) and loss.rule is None:
            self.trials.find_rule(Repeat(assembly, batch, loss, self._seed))

    def note_forward(self, task: Task, num_nodes: int, outputs: Any) -> None:
        """Ask for a trial of a forward that has built another graph than before, unless the step is watched; and if its operations are compared."""
        is_first = self.num_taken == 1
        is_new = self._graphs.is_new(task, num_nodes, outputs, is_first=is_first) and self._again is None
        if not is_first and (is_new or self._compares_operations):
            share, _ = self._own.current.parallel.mesh.data_share
            self.refusals.new_forward = share, task.microbatch

    @functools.cached_property
    def _graphs(self) -> ForwardGraphs:
        return ForwardGraphs(self._own.current.parallel.program)

    def try_step(
        self,
        trials: LossTrials,
        assembly: Assembly,
        batch: StepBatch,
        asks: int,
        new_forwards: Sequence[tuple[int, int]],
    ) -> None:
        """Try a loss on samples of this step, as often as some rank has asked, and the forward in the micro-batches of data shares where it is new.

        Collective over the world, see [Note: collective calls].
        """
        is_of_run = trials is self.trials  # other losses may be tried after an update of the same step
        again = self._again if is_of_run else None
        weights = self._weights if is_of_run else None
        again = again or Repeat(assembly, batch, trials.loss, self._seed, self.observer.dropout_mode, weights=weights)
        if asks:
            trials.run(assembly, again, asks)
        if new_forwards and not self.observer.is_proof:
            share, _ = assembly.parallel.mesh.data_share
            number = next((microbatch for other, microbatch in new_forwards if other == share), 0)
            if self._graphs.tries_samples and self._again is None:
                WatchedStep(again, self.observer, self.refusals, self._shown, number=number).look()
            self._compare_operations(again, number)

    def _noting_operations(self, batch: StepBatch, take: Callable[[], StepReport]) -> StepReport:
        """Take the first step, and keep what its forwards of each kind run on parts."""
        report, assembly = take(), self._own.current
        kinds = {0}.union(*gather_values(self._graphs.kinds, self._own.layout.world_size))
        assembly.weights.store.settle()
        again = Repeat(assembly, batch, self.trials.loss, self._seed, self.observer.dropout_mode)
        self._operations = SeenOperations()
        for number in sorted(kinds):
            self._operations.note(CutOperations(again, number))
        return report

    def _compare_operations(self, again: Repeat, number: int) -> None:
        """Refuse the step if its forward runs more on parts than those before it, which no proof has seen.

        Collective over the world, see [Note: collective calls].
        """
        if self._operations is None or self.refusals.is_waived("state"):
            return
        now = CutOperations(again, number)
        if names := self._operations.added(now):
            first = min(names)
            what, option = ("a part of the tokens", "cp=1") if now.of_tokens else ("a part of the features", "tp=1")
            if OF_STAGES in first:
                what, option = "stand-ins of these", "pp=1"
            self.refuse_state(
                again.batch,
                f"the forward now runs {first}, which it did not run in the trace, and a rank has {what}. Use {option}, or a flag that "
                "does not change during the run",
            )

    @contextmanager
    def trying_measure(self, assembly: Assembly, batch: StepBatch, measure: Loss) -> Iterator[None]:
        """Try whether a measure is a sum over samples, which are evaluated in several parts, and whether it keeps those of this rank.

        Collective over the world, see [Note: collective calls].

        Raises:
            UnprovenError: it is none, or keeps some.
        """
        if not evaluation.is_parted(assembly, batch):
            yield
            return
        used = evaluation.Measure(measure)
        again = Repeat(assembly, batch, measure, self._seed, measure=used)
        with evaluation.evaluating(assembly):
            reasons = gather_values(again.try_loss(TriedLoss(used)).reason, again.world_size)
        if reason := next(filter(None, reasons), ""):
            raise UnprovenError(
                "loss-not-a-sum",
                f"the metric of run.evaluate is not a sum over samples: {reason}. Use (sum over samples, their number), or a metric "
                "that is computed of run.predict(set), which returns the outputs of all samples",
            )
        outer = KeptValues(measure)
        yield
        names = gather_values(outer.changed(), self._own.layout.world_size) if self._own.layout.dp_cp_size > 1 else []
        if name := next(filter(None, names), ""):
            raise UnprovenError(
                "loss-not-a-sum",
                f"the metric of run.evaluate keeps something between its calls ({name}), and each rank calls it on its own samples. Return "
                "sums and counts, or compute of run.predict(set), which returns the outputs of all samples on every rank.",
            )

    def begin_step(self, assembly: Assembly, batch: StepBatch) -> None:
        """Look at what the loop has changed since the last step, and in the first one at the data.

        Collective over the world in its first call, see [Note: collective calls].
        """
        reason = self.outside.refusal(assembly)
        if reason:
            self.refuse_state(batch, reason)
        self.refusals.evaluated = self.outside.evaluated_paths()
        if not self._is_data_tried:
            self._is_data_tried = True
            is_parted = is_split(assembly.parallel.program)
            if reason := NamedSamples(assembly, batch).refusal(is_split=is_parted):
                self.refusals.add("data", "data-differs", reason)

    def refuse_generator(
        self, generator: str, assembly: Assembly, step: int, samples: Callable[[], Any] | None = None
    ) -> None:
        """Refuse a step, counted from 1, since a generator has moved: in its forwards and backwards, some of which `samples` returns; or
        without them in its update.
        """
        layout, model = self._own.layout, assembly.model.module
        if samples is None:
            reason = refusal("the optimizer", generator)
            if layout.world_size == 1:  # other layouts refuse it by their own rule
                self.refusals.remark(reason)
                return
        elif needs_mode(model):
            self.refusals.asks_again = True
            return
        else:
            path = ""
            if layout.model_ranks == 1 and not assembly.parallel.batch_norms.sends and not layout.gathers_weights:
                assembly.weights.store.settle()
                again = samples()
                with assembly.model.compiled.off():
                    path = self.generators.first_module_that_draws(model, lambda: call_model(model, again))
            reason = refusal(f"{path} in the forward" if path else "a forward, a loss or a backward", generator)
        self.refusals.add("random", "random-numbers", f"step {step}: {reason}")

    def note_of(
        self, numbers: StepNumbers, assembly: Assembly, batch: StepBatch, again: Callable[[StepBatch], Tensor]
    ) -> str:
        """Return why the numbers of a step are not finite: nothing counts, or `again`, which runs the forwards and backwards once more,
        shows the first module at fault.

        Collective over the world, see [Note: collective calls].
        """
        if numbers.is_masked:
            return MASKED
        return nonfinite.cause_of_nonfinite(assembly, lambda: again(batch)[0], batch)

    def refuse_state(self, batch: StepBatch, reason: str) -> None:
        """Refuse a step at its end, on all ranks, for a state that no layout keeps."""
        self.refusals.add("state", "forward-state", f"step {batch.step + 1}: {reason}")

    # -- the guards --------------------------------------------------------------------------------

    def trials_of(self, loss: Loss) -> LossTrials:
        """Return the trials of a loss, whose generators are watched from now on."""
        self._watch(self.generators, loss)
        return LossTrials(loss, self._own.current.parallel.program, self.refusals)

    @functools.cached_property
    def trials(self) -> LossTrials:
        """The trials of the run's loss."""
        return self.trials_of(self._own.source.loss)

    @functools.cached_property
    def generators(self) -> GeneratorWatch:
        """The watch over the generators of the process, and over those that the model or a loss holds."""
        generators = GeneratorWatch(self._own.place.device)
        self._watch(generators, self._own.current.model.module)
        return generators

    def _watch(self, generators: GeneratorWatch, code: nn.Module | Loss) -> None:
        """Watch the generators that a model or a loss holds, and refuse iterators, since trials advance them."""
        for name in generators.watch(code):
            self.refusals.add(
                "state",
                "forward-state",
                f"{name} is an iterator, which trials of the model and of the loss advance too. Use a number that the loop sets, or a buffer",
            )

    @functools.cached_property
    def _drift_monitor(self) -> DriftMonitor:
        return DriftMonitor(self._own.current)

    @functools.cached_property
    def outside(self) -> OutsideChanges:
        """The watch over what the loop may change between two steps."""
        return OutsideChanges(self._own.current)
