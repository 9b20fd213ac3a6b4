"""The repetition of a part of a watched step: the forward of one sample by itself, and the update of one weight.

A proof shows what a forward does with what it is given; what changes while a run goes on, it cannot show: a random
generator of a module's own, state that one micro-batch hands to the next, a capacity that becomes scarce, a branch that
some data takes. So every `train.watch_every` steps each data rank takes one sample of one micro-batch, runs it again
after the step's last backward, by itself and on the weights of the step, and holds its outputs against those that the
step computed for it:

    step      begin ─► forward of the micro-batch ─► ... ─► last backward ─► scalars ─► update
    canary    state      keeps the sample's outputs             the sample alone ─┘    └─ one weight again

The sample runs from the state with which the step began (`repeat.py`), as in one device's forward of the whole batch.
Where the batch is not split, samples may depend on one another; if this one does, the whole micro-batch is run again instead.

The outputs of a sample alone differ from those in a batch by roundings. How much that may be is measured as `verify`
does: 8 times the largest deviation of 8 forwards of this sample, in each of which the output of every module with weights is
off by one rounding. This allowance is measured when a deviation first exceeds what was measured before; mostly one forward is run.

The trial of padding: two samples of different sizes, padded to one, must have the loss that they have alone.

    (sum, count) of [long, short padded]    =    (sum, count) of [long]  +  (sum, count) of [short]

The size to which a sample is padded is that of the longest one that is read with it, which a layout changes. So are any two samples
tried where none can be taken out of what the forward is given, as out of graphs that a `collate_fn` has put together.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from samestep.errors import RepeatError, UnprovenError
from samestep.examination.examine import Loss
from samestep.independence.roundings import (
    NUM_PERTURBED,
    allowance,
    floating_tensors,
    largest_deviation,
    relative_deviation,
    rows_of,
    samples_dim,
)
from samestep.job import Job
from samestep.job_tables import Waiver
from samestep.program.ops import Task
from samestep.randomness import mode as dropout
from samestep.randomness.dropout_state import Dropout
from samestep.runtime.assembly import Assembly
from samestep.runtime.axes import precision
from samestep.runtime.axes.expert import RouteMode, tokens_of_first
from samestep.runtime.guards.repeat import FAILURES, Nudge, Repeat
from samestep.runtime.guards.update_replay import UpdateReplay
from samestep.runtime.ledger import outside_step
from samestep.runtime.microbatches import Microbatches
from samestep.runtime.processes.messages import gather_values
from samestep.runtime.step_batch import Indices, StepBatch
from samestep.runtime.step_observer import MakeMode, StepObserver, StepScalars
from samestep.runtime.step_report import StepReport
from samestep.schedules import TaskKind
from samestep.state.snapshot import preserve_generators
from samestep.state.writes import Marks, exact_norms, marks_of
from samestep.trees import have_same_values, map_tensors, tensors_in, tree_leaves

LossOf = Callable[[Indices, Nudge | None], Tensor | None]
"""Returns the sum and the count of the loss of samples that are read together, and None where there is none: on a stage that does
not end the model, or where the model fails. A relative rounding shakes every module, with a seed of its signs."""
_TRIED = 4
"""Of so many samples of each group the sizes are compared."""


def pair_of_two_sizes(groups: Iterable[Indices], shapes_of: Callable[[list[int]], list[torch.Size]]) -> Indices | None:
    """Return two samples that are larger together than one of them alone, of the first of each group; None if there are none.

    `shapes_of` returns the shapes of samples that are read together, without the dimension of the samples.
    """
    tried = dict.fromkeys(index for group in groups for index in group[:_TRIED].tolist())
    sized = sorted((sum(math.prod(shape) for shape in shapes_of([index])), index) for index in tried)
    (least, small), (most, large) = sized[0], sized[-1]
    if least == most or shapes_of([small, large]) == shapes_of([small]):
        return None
    return np.array([large, small], dtype=np.int64)


def pair_refusal(
    pair: Indices, loss_of: LossOf, largest: Callable[[float], float], rounding: float, *, is_idle: bool
) -> float:
    """Return by how much the loss of a pair of samples is not the sum of theirs alone; 0 if it is, up to roundings.

    Collective over the world: every rank calls it, and one that has no such pair runs as many forwards (`is_idle`); if one does
    not, the others wait until the time limit. `largest` returns the largest of all ranks' values; `rounding` is that of the dtype.
    """
    both, one, other = (loss_of(part, None) for part in (pair, pair[:1], pair[1:]))
    alone = None if one is None or other is None else one + other
    deviation = largest(0.0 if is_idle or both is None or alone is None else relative_deviation(both, alone))
    if deviation <= allowance(rounding):
        return 0.0
    shaken = [loss_of(pair, (rounding, seed)) for seed in range(NUM_PERTURBED)]
    measured = [relative_deviation(both, loss) for loss in shaken if both is not None and loss is not None]
    return deviation if deviation > allowance(rounding, largest(max(measured, default=0.0))) else 0.0


_PADDED = (
    "samples {0} and {1} have different sizes, and padded to one size their loss and count differ by {2:.1e} from the sum of "
    "theirs alone: what they are padded with counts, and how long a sample is padded depends on the samples that are read with it, "
    "which a layout changes; a forward and a loss that mask the padding work, samples of one size, and one rank with the whole batch as "
    "its micro-batch"
)
_TOGETHER = (
    "the loss and count of samples {0} and {1} together differ by {2:.1e} from the sum of theirs alone, so samples influence each "
    "other; one device with the whole batch at once works"
)
_WRITES = (
    "the forward writes into weights, and the micro-batches of a step run it several times: the whole batch in one forward "
    "works (dp=1 without microbatch); so does to write none"
)


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of a repetition."""

    waiver: Waiver
    """The word of `run.allow` that lets the run go on."""
    text: str


class Canary:
    """The repetitions of a run's steps under watch, and what they have shown. Every rank makes one."""

    def __init__(self, assembly: Assembly, job: Job, loss: Loss) -> None:
        self.assembly, self.job, self.loss = assembly, job, loss
        step, spec = assembly.parallel.program.step, assembly.model.spec
        self.is_split = step.layout.dp > 1 or step.num_microbatches > 1
        self.alone = not spec.couples_samples
        """Whether a sample is run by itself; otherwise with the rest of its micro-batch."""
        self.routed = any(layer.dispatches for layer in spec.layers)
        self.allowance = 0.0
        self.dims: dict[int, int] = {}
        """The dimension that holds the samples, by output; 0 unless the first sample alone has shown another."""
        self.waived: set[Waiver] = set()
        self._num_watched = 0

    @contextmanager
    def watching(
        self, batch: StepBatch, inner: StepObserver, *, is_first: bool, replays: bool = True
    ) -> Iterator[WatchedStep]:
        """Return the context of a watched step, in which the canary's observer replaces `inner` and calls it.

        `replays` makes a weight's update again too. What is found in the first step of a process refuses the layout.
        """
        model, store = self.assembly.model, self.assembly.weights.store
        model.dropout.begin_step()  # its hooks are part of the state that is kept below
        turn, self._num_watched = self._num_watched, self._num_watched + 1
        watched = WatchedStep(self, batch, inner, turn, is_first=is_first, replays=replays)
        store.watch.compare_values(True)
        handle = model.module.register_forward_hook(watched.see, with_kwargs=True)
        try:
            yield watched
        finally:
            handle.remove()
            store.watch.compare_values(False)
            if model.dropout.dropout is Dropout.ABSENT:
                dropout.untrack_modules(model.module)


class WatchedStep(StepObserver):
    """One step under watch: what it has computed of one sample, and that sample run again. All ranks call it alike."""

    def __init__(
        self, canary: Canary, batch: StepBatch, inner: StepObserver, turn: int, *, is_first: bool, replays: bool
    ) -> None:
        assembly = canary.assembly
        num_microbatches = assembly.parallel.program.step.num_microbatches
        self._canary, self._assembly, self._batch, self._inner = canary, assembly, batch, inner
        self._turn, self._is_first, self._replays = turn, is_first, replays
        self._microbatch = -(turn + 1) % num_microbatches  # the last one first, too
        self._indices = Microbatches(assembly, batch).drawn(self._microbatch)
        """The samples of the micro-batch."""
        self._row = -(turn // num_microbatches + 1) % len(self._indices)  # the last one first
        """The sample that is run again."""
        self._weights = self._marks_of_weights()
        """The marks of the weights, which a forward may write."""
        self._again = Repeat(assembly, batch, canary.loss, canary.job.train.seed, inner.dropout_mode)
        self._inputs: list[Tensor] = []
        self._outputs: list[tuple[torch.Size, list[Tensor]]] = []
        """Each output's shape, and this sample's part of it, in each way in which its rows may lie."""
        self._losses: list[Tensor] = []
        """The loss of the sample run again, and once more on the same outputs."""
        self._task: Task | None = None
        self._is_measured = False
        self._findings: list[Finding] = []
        self._allowed: list[str] = []
        """Findings that `run.allow` waives, as text."""

    @contextmanager
    def running(self, task: Task, samples: Indices) -> Iterator[None]:
        """Note which task runs; before the update copy a weight, and make its update again afterwards."""
        replay = None
        with self._inner.running(task, samples):
            self._task = task
            if task.kind is TaskKind.UPDATE and self._replays and "optimizer" not in self._canary.waived:
                updater = self._assembly.weights.updater
                replay = None if updater.whole.couples_weights else UpdateReplay.before(updater, self._turn)
            yield
            self._task = None
        if replay is not None and (deviation := replay.deviation()):
            text = (
                f"the update of {replay.piece.name}, made again from the same value, gradient and state, differs "
                f"by {deviation:.1e} of the largest weight: {replay.optimizer} draws random numbers, looks at more than one element of a "
                "weight that the layout divides, or something else writes weights"
            )
            self._findings.append(Finding("optimizer", text))

    def dropout_mode(self) -> MakeMode | None:
        """Return the mode that notes the experts of the micro-batch whose sample is run again."""
        make = self._inner.dropout_mode()
        if make is not None or not (self._canary.routed and self._is_chosen()):
            return make
        return functools.partial(RouteMode, routes=self._again.routes, own=tokens_of_first, replays=False)

    def asked_to_record(self, step: int) -> str:
        """Pass the request on."""
        return self._inner.asked_to_record(step)

    def agreed(self, scalars: StepScalars) -> None:
        """Run the sample again, before the weights change, unless the step is not finite."""
        self._inner.agreed(scalars)
        if self._is_measured or not math.isfinite(scalars.loss_sum + scalars.norm_squared):
            return
        self._is_measured = True
        if {"samples", "random", "state", "data", "loss"} & self._canary.waived:
            return
        again, checkpoints = self._again.state.generators, self._assembly.parallel.checkpoints
        with outside_step(), torch.no_grad(), preserve_generators(again), checkpoints:
            finding = self._repeat()
            self._assembly.weights.store.calls.end_forward_only()
        if finding is not None:
            self._findings.append(finding)
        self._judge()

    def checked(self, report: StepReport) -> StepReport:
        """Return the report of the step, with a note of findings that `run.allow` waives.

        Collective over the world, see [Note: collective calls].

        Raises:
            RepeatError: the repeated update gave something else on some rank.
        """
        self._judge()
        return replace(report, note="; ".join(filter(None, [report.note, *self._allowed])))

    def _judge(self) -> None:
        """Raise the first finding of any rank, or note it if `run.allow` waives it; every rank calls it.

        Raises:
            RepeatError: a repetition gave something else on some rank.
            UnprovenError: it did in the first step of this process, or between the steps of regular checks.
        """
        with outside_step():
            if not self._again.largest(float(len(self._findings))):
                return
            mine = [(one.waiver, one.text) for one in self._findings]
            found = gather_values(mine, self._assembly.parallel.mesh.size("world"))
        self._findings.clear()
        rank, finding = next((rank, Finding(*one)) for rank, findings in enumerate(found) for one in findings)
        text = f"step {self._batch.step + 1}, rank {rank}: {finding.text}"
        if finding.waiver in self._canary.job.run.allow:
            self._canary.waived.add(finding.waiver)
            self._allowed.append(f"{text} (allowed)")
        elif self._is_first or not self._replays:
            raise UnprovenError(text, finding.waiver)
        else:
            raise RepeatError(f'{text}; run.allow = ["{finding.waiver}"] lets it run unproven')

    # -- samples of different sizes ----------------------------------------------------------------

    def _pair(self, rounding: float) -> Finding | None:
        """Hold the loss of two samples read together against the sum of theirs alone: of two of different sizes, padded to one, or of any
        two, where none can be taken out of those that are read together.
        """
        if not self._canary.is_split or self._assembly.model.spec.couples_samples or self._canary.routed:
            return None
        everything, words = self._batch.shares(0, 1, 1)[0], _PADDED
        pair = pair_of_two_sizes((self._indices, everything), self._again.shapes) if self._canary.alone else None
        if pair is None and (not self._canary.alone or len(self._with_companion()) == 1):
            pair, words = next((some[:2] for some in (self._indices, everything) if len(some) > 1), None), _TOGETHER
        if not self._again.largest(float(pair is not None)):
            return None
        tried = self._indices[:1].repeat(2) if pair is None else pair  # a rank without runs as many forwards
        deviation = pair_refusal(tried, self._loss_of, self._again.largest, rounding, is_idle=pair is None)
        return Finding("samples", words.format(tried[0], tried[1], deviation)) if deviation else None

    def _loss_of(self, indices: Indices, nudge: Nudge | None) -> Tensor | None:
        """Return the sum and count of the loss of samples that are read together; None on other stages, or if it fails."""
        samples = self._again.read(indices)
        try:
            return next(iter(self._again.run(indices, samples, nudge=nudge, num_losses=1)[1]), None)
        except FAILURES:
            return None

    # -- what the step computes --------------------------------------------------------------------

    def _is_chosen(self) -> bool:
        task = self._task
        return task is not None and task.kind is TaskKind.FORWARD and task.microbatch == self._microbatch

    def see(self, _: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """Keep the sample's rows of the model's inputs and outputs in the forward of the step."""
        if not self._is_chosen() or self._is_measured:
            return
        count = len(self._indices)
        self._inputs = [rows_of(given, 0, self._row, count) for given in _inputs_with_rows(args, kwargs, count)]
        task, stage = self._task, self._assembly.parallel.stage
        if task is not None and stage.is_last(task.chunk):
            self._outputs = [
                (leaf.shape, self._parts(index, leaf)) for index, leaf in enumerate(floating_tensors(output))
            ]

    def _parts(self, index: int, leaf: Tensor) -> list[Tensor]:
        """Return copies of this sample's rows of an output of the micro-batch: side by side, and as those of stacked views."""
        dim, count = self._canary.dims.get(index, 0), len(self._indices)
        if leaf.dim() <= dim or leaf.shape[dim] % count:
            return []
        beside = rows_of(leaf.detach(), dim, self._row, count)
        if leaf.shape[dim] == count:
            return [beside]
        return [beside, leaf.detach().unflatten(dim, (-1, count)).select(dim + 1, self._row).clone()]

    # -- once more ---------------------------------------------------------------------------------

    def _repeat(self) -> Finding | None:
        """Run the sample again; return what that shows, which is the same on all ranks but for its text."""
        if self._again.largest(
            float(any(self._marks_of_weights().since(self._weights)))
        ):  # which could not be put back
            return Finding("state", _WRITES) if self._assembly.parallel.program.step.num_microbatches > 1 else None
        rounding = torch.finfo(precision.DTYPES[self._assembly.parallel.program.step.compute_dtype]).eps
        if finding := self._pair(rounding):
            return finding
        first = self._forward(self._canary.alone)
        deviation = self._again.largest(self._deviation(first))
        if math.isinf(deviation) and self._canary.alone:
            self._canary.alone = False  # a forward that takes no sample by itself
            if finding := self._pair(rounding):
                return finding
            first = self._forward(False)
            deviation = self._again.largest(self._deviation(first))
        # Kernels of a GPU may add up in another order each time; those of a CPU do not.
        repeatable = 0.0 if self._assembly.parallel.mesh.device.type == "cpu" else allowance(rounding)
        if self._again.largest(relative_deviation(*self._losses) if self._losses else 0.0) > repeatable:
            why = "it draws random numbers, or keeps something from one call to the next"
            return Finding("loss", f"the loss of the same outputs is another the second time: {why}")
        if math.isinf(deviation) or deviation <= max(self._canary.allowance, allowance(rounding)):
            return None
        if self._again.largest(largest_deviation(self._forward(self._canary.alone), first)) > repeatable:
            return self._finding(deviation, is_random=True)
        perturbed = [self._forward(self._canary.alone, (rounding, seed)) for seed in range(NUM_PERTURBED)]
        measured = self._again.largest(max(largest_deviation(one, first) for one in perturbed))
        self._canary.allowance = allowance(rounding, measured)
        if deviation <= self._canary.allowance:
            return None
        return self._finding(deviation, is_random=False)

    def _marks_of_weights(self) -> Marks:
        weights = [param for param in self._assembly.model.module.parameters() if not param.is_meta]  # other stages'
        return marks_of(weights, norms=exact_norms)

    def _finding(self, deviation: float, *, is_random: bool) -> Finding | None:
        """Find out by further forwards why a sample deviates; None if it may."""
        sample = int(self._indices[self._row])
        text = f"sample {sample}, run again, deviates by {deviation:.1e} of its largest output"
        if self._again.largest(float(self._has_other_inputs())):
            return Finding("data", f"{text}: it reads other values the second time; a data set that draws none works")
        if is_random:
            why = "two forwards of it differ, so the model draws random numbers from a generator of its own"
            return Finding("random", f"{text}: {why}; nn.Dropout and torch.nn.functional.dropout work")
        if self._canary.alone and self._again.largest(self._deviation(self._forward(False))) <= self._canary.allowance:
            if not self._canary.is_split:
                self._canary.alone = False
                return None
            why = "with the rest of its micro-batch it does not, so samples influence each other"
            return Finding("samples", f"{text}: {why}; one device with the whole batch at once works")
        why = "and so does its whole micro-batch: the forward reads what an earlier forward of this step has written"
        return Finding("state", f"{text}, {why}; a forward that keeps nothing from one micro-batch to the next works")

    def _forward(self, alone: bool, nudge: Nudge | None = None) -> list[Tensor] | None:
        """Run the sample again, or its whole micro-batch; return the floating outputs, None where there are none."""
        count = len(self._indices)
        indices = self._with_companion() if alone else self._indices
        samples = self._again.read(indices)
        if alone and count > 1:
            if not all(_has_rows(leaf, len(indices)) for leaf in tree_leaves(samples)):
                return []
            samples = map_tensors(samples, lambda leaf: leaf[self._row : self._row + 1])
            indices = indices[self._row : self._row + 1]
        microbatch, num_losses = None if alone else self._microbatch, 2 if nudge is None else 0
        try:
            outputs, losses = self._again.run(
                indices, samples, microbatch=microbatch, nudge=nudge, num_losses=num_losses
            )
        except FAILURES:
            if not alone or count == 1:
                raise
            return []  # code that takes no sample by itself
        self._losses = losses or self._losses
        if outputs is None or len(indices) == count or not alone or count > 1:
            return None if outputs is None else list(floating_tensors(outputs))
        return [self._of_second(index, leaf) for index, leaf in enumerate(floating_tensors(outputs))]

    def _with_companion(self) -> Indices:
        """Return the samples of the micro-batch; if it is one alone, with another sample of the step before it."""
        others = [index for index in self._batch.shares(0, 1, 1)[0].tolist() if index not in self._indices]
        if len(self._indices) > 1 or not others or self._canary.routed:
            return self._indices
        pair = np.array([others[0], *self._indices.tolist()], dtype=np.int64)
        try:
            is_alike = self._again.shapes(pair) == self._again.shapes(self._indices)
        except (RuntimeError, ValueError, TypeError):  # samples of different sizes, which no batch holds
            return self._indices
        return pair if is_alike else self._indices

    def _of_second(self, index: int, leaf: Tensor) -> Tensor:
        """Return the rows of the second of two samples: side by side, or those of stacked views where these are nearer."""
        dim = self._canary.dims.get(index, 0)
        if leaf.dim() <= dim or leaf.shape[dim] % 2:
            return leaf
        ways = [rows_of(leaf, dim, 1, 2), leaf.unflatten(dim, (-1, 2)).select(dim + 1, 1)]
        kept = self._outputs[index][1] if index < len(self._outputs) else []
        if not kept or kept[0].shape != ways[0].shape:
            return ways[0]
        return min(ways, key=lambda one: relative_deviation(kept[0], one))

    def _has_other_inputs(self) -> bool:
        """Return whether the sample, read again, is not what the step has read."""
        samples = self._again.read(self._indices)
        read = [leaf[self._row : self._row + 1] for leaf in tensors_in(samples)]
        return not all(any(have_same_values(given, one) for one in read) for given in self._inputs)

    def _deviation(self, outputs: list[Tensor] | None) -> float:
        """Return the largest relative deviation from the step's outputs; infinity if none can be compared."""
        if outputs is None or not self._outputs:
            return 0.0
        found: list[float] = []
        for index, ((shape, kept), leaf) in enumerate(zip(self._outputs, outputs, strict=False)):
            ours = self._parts(index, leaf) if leaf.shape == shape else [leaf] * len(kept)
            pairs = [(one, other) for one, other in zip(kept, ours, strict=True) if one.shape == other.shape]
            if pairs and (self._canary.alone or leaf.shape == shape):
                found.append(min(relative_deviation(one, other) for one, other in pairs))
            elif (dim := samples_dim(shape, leaf.shape, len(self._indices))) is not None:
                self._canary.dims[index] = dim  # the next step under watch keeps these rows
                found.append(0.0)
        return max(found, default=math.inf)


def _has_rows(leaf: Any, count: int) -> bool:
    """Return whether a sample's part of a value of `count` samples is known: its row, or a number or word that belongs to each."""
    if isinstance(leaf, Tensor):
        return leaf.shape[:1] == (count,)
    return leaf is None or isinstance(leaf, int | float | complex | str | bytes)


def _inputs_with_rows(args: Any, kwargs: Any, count: int) -> list[Tensor]:
    return [given for given in tensors_in((args, kwargs)) if given.dim() and given.shape[0] == count]
