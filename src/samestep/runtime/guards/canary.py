"""The repetition of a part of a watched step: a micro-batch, its halves and a sample by itself, and the update of one weight.

A proof shows what a forward does with what it is given; what changes while a run goes on, it cannot show: a random
generator of a module's own, state that one micro-batch hands to the next, a capacity that becomes scarce, a branch that
some data takes. So in watched steps each data rank runs one micro-batch once more after the step's last backward, on the weights of
the step and from the state with which it began (`repeat.py`):

    the micro-batch        against what the step has computed         other data, random numbers, state
    its halves             against their rows of the micro-batch      samples that influence each other
    two samples alone      against their rows of a pair
    two of other sizes     their losses against that of both          padding that counts
    the update of a weight against what a twin of the optimizer       random numbers, one weight kept for another,
                           makes of it, or of its first half          elements that influence each other

If the loss of the step was just tried on samples that begin with the micro-batch, those forwards are taken (`Repeat.divided_first`).
The forward of fewer samples rounds otherwise. How much that may be is measured as `verify` does: 8 times the largest deviation of 8
forwards, in each of which the output of every module with weights is off by one rounding. This allowance is measured when a deviation
first exceeds what was measured before. Samples that the job lets influence each other, as in a batch norm, are run with their micro-batch alone.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from samestep.independence.roundings import (
    NUM_PERTURBED,
    allowance,
    floating_tensors,
    is_let_go,
    largest_deviation,
    relative_deviation,
)
from samestep.job_tables import Waiver
from samestep.program.ops import Task
from samestep.randomness import mode as dropout
from samestep.randomness.dropout_state import Dropout
from samestep.runtime.axes import precision
from samestep.runtime.axes.expert import RouteMode, tokens_of_first
from samestep.runtime.guards.divided_samples import Samples, deviation_of_halves
from samestep.runtime.guards.loss_trials import is_split
from samestep.runtime.guards.refusals import Refusals
from samestep.runtime.guards.repeat import HalvedRun, Nudge, Repeat
from samestep.runtime.guards.update_replay import UpdateReplay
from samestep.runtime.step_observer import Indices, MakeMode, StepObserver, StepScalars
from samestep.runtime.step_report import StepReport
from samestep.schedules import TaskKind
from samestep.trees import have_same_values, tensors_in

_ELEMENTS = 2**16
"""Of each input and output of the step at most twice as many elements are kept."""


_PADDED = (
    "samples {0} and {1} have different sizes, and read together, padded or joined, their loss and count differ by {2:.1e} from the sum of "
    "theirs alone. Padding counts, or one reads the other, and a layout changes which samples are read together. Use a forward and a loss "
    "that mask the padding, or samples of one size, or one rank with the whole batch as its micro-batch"
)
_TOGETHER = (
    "the loss and count of samples {0} and {1} together differ by {2:.1e} from the sum of theirs alone, so samples influence each "
    "other. Use one device with the whole batch at once"
)
_COUPLED = (
    "sample {0}, run again without the rest of its micro-batch, deviates by {1:.1e} of its largest output, so samples influence each other{2}. Use "
    "one device with the whole batch at once"
)
_CHANGED = "sample {0}, run again with its micro-batch, deviates by {1:.1e} of the largest output: "
_WRITES = (
    "the forward writes into weights, and the micro-batches of a step run it several times. Use the whole batch in one forward"
    " (dp=1 without microbatch), or write no weights"
)


_OTHER_UPDATE = (
    "the update of {0}, made again from the same value, gradient and state, differs by {1:.1e} of the largest weight. Either {2} draws random "
    "numbers or looks at more than one element of a weight that the layout divides, or something else writes weights"
)

Finding = tuple[Waiver, str]
"""The result of a repetition: the word of `run.allow` that lets the run go on, and what differs."""


class _Sampled(NamedTuple):
    """Some elements of a tensor, at places that follow from its shape."""

    shape: torch.Size
    values: Tensor

    @classmethod
    def of(cls, tensor: Tensor) -> _Sampled:
        """Copy some elements of a tensor."""
        if is_let_go(tensor):
            return cls(torch.Size((0,)), tensor.new_zeros(0))
        flat = (tensor if tensor.layout is torch.strided else tensor.to_dense()).detach().flatten()
        return cls(tensor.shape, flat[:: 1 + flat.numel() // _ELEMENTS].clone())

    def has_same_values(self, other: _Sampled) -> bool:
        """Return whether the elements of another tensor are the same."""
        return self.shape == other.shape and have_same_values(self.values, other.values)


@dataclass(slots=True)
class WatchRecord:
    """The outcome of the watched steps of a run so far, on this rank."""

    num_watched: int = 0
    allowance: float = 0.0
    """The largest deviation that roundings explain, as they were measured last."""
    waived: set[Waiver] = field(default_factory=set)
    """The words of `run.allow` for which a repetition has shown that the job needs them: these are looked for no more."""


class WatchedStep(StepObserver):
    """One step under watch: what it has computed of one micro-batch, and that micro-batch run again. All ranks call it alike."""

    def __init__(
        self,
        again: Repeat,
        inner: StepObserver,
        refusals: Refusals,
        shown: WatchRecord,
        *,
        replays: bool = False,
        is_event: bool = False,
        number: int | None = None,
    ) -> None:
        """Watch the step of `again`, and call `inner`, which observes it otherwise.

        `replays` makes a weight's update again too. What is found refuses the layout, unless it `is_event` of a run that was proven before.
        `number` is that of the micro-batch that is run again; by default each in turn.
        """
        assembly = again.assembly
        step, spec = assembly.parallel.program.step, assembly.model.spec
        self.again, self._inner, self._refusals, self._shown = again, inner, refusals, shown
        self._replays, self._is_event = replays, is_event
        self.is_routed = any(layer.dispatches for layer in spec.layers)
        """Whether its repetitions choose experts as the step does."""
        self._is_divided = is_split(assembly.parallel.program) and not spec.couples_samples
        """Whether samples are run without the rest of their micro-batch."""
        if number is None:
            number = -(shown.num_watched + 1) % step.num_microbatches  # the last one first, too
        self._microbatch, self._indices = number, again.of_microbatch(number)
        self._noted: tuple[list[_Sampled], list[_Sampled]] | None = [], []
        """Elements of what the model was given, and of its outputs, in the forward of the step; None once it was run again."""
        self._forward_task: Task | None = None
        """The forward of the micro-batch that is run again, while it runs in the step."""

    def take(self, step: Callable[[], StepReport]) -> StepReport:
        """Take the step and watch it; return its report with what a repeated update has shown.

        Collective over the world, see [Note: collective calls].

        Raises:
            RepeatError: the repeated update gave something else on some rank.
        """
        model, store = self.again.assembly.model, self.again.assembly.weights.store
        store.compare_values(True)
        handle = model.module.register_forward_hook(self._see, with_kwargs=True)
        try:
            report = step()
        finally:
            self._shown.num_watched += 1
            handle.remove()
            store.compare_values(False)
            if model.dropout.dropout is Dropout.ABSENT:
                dropout.untrack_modules(model.module)
        if self._replays:
            self._refusals.raise_found(self.again.world_size)
        return replace(report, remarks=(*report.remarks, *self._refusals.news()))

    @contextmanager
    def running(self, task: Task, samples: Indices) -> Iterator[None]:
        """Note whether the forward runs that is run again; before the update copy a weight, and make its update again afterwards."""
        replay, kind = None, task.body.kind
        with self._inner.running(task, samples):
            is_repeated = kind is TaskKind.FORWARD and task.microbatch == self._microbatch
            self._forward_task = task if is_repeated else None
            if kind is TaskKind.UPDATE and self._replays and "optimizer" not in self._shown.waived:
                updater = self.again.assembly.weights.updater
                replay = (
                    None if updater.whole.couples_weights else UpdateReplay.before(updater, self._shown.num_watched)
                )
            yield
            self._forward_task = None
        if replay is not None and (deviation := replay.deviation()):
            self._refuse("optimizer", _OTHER_UPDATE.format(replay.piece.name, deviation, replay.optimizer))

    def dropout_mode(self) -> MakeMode | None:
        """Return the mode that notes the experts of the micro-batch that is run again."""
        make = self._inner.dropout_mode()
        if make is not None or not self.is_routed or self._forward_task is None:
            return make
        return functools.partial(RouteMode, routes=self.again.routes, own=tokens_of_first, replays=False)

    def agreed(self, scalars: StepScalars) -> None:
        """Run the micro-batch again, before the weights change, unless the step is not finite.

        Raises:
            RepeatError: a repetition gave something else on some rank.
            UnprovenError: it did in the first step of this process, or between the steps of regular checks.
        """
        self._inner.agreed(scalars)
        if self._noted is None or not math.isfinite(scalars.loss_sum + scalars.norm_squared):
            return
        self.look()
        self._noted = None

    def look(self) -> None:
        """Run the micro-batch again, and parts of it.

        Collective over the world, see [Note: collective calls].

        Raises:
            RepeatError: a repetition gave something else on some rank.
            UnprovenError: it did in the first step of this process, or between the steps of regular checks.
        """
        if self._noted is None or {"samples", "random", "state", "data", "loss"} & self._shown.waived:
            return
        with self.again.running():
            finding = self._repeat(*self._noted)
        if finding is not None:
            self._refuse(*finding)
            self._refusals.raise_found(self.again.world_size)

    def _refuse(self, waiver: Waiver, text: str) -> None:
        """Refuse the step, on all ranks at the next `Refusals.raise_found`; what `run.allow` waives is looked for no more."""
        if self._refusals.is_waived(waiver):
            self._shown.waived.add(waiver)
        text = f"step {self.again.batch.step + 1}, rank {self.again.assembly.parallel.mesh.rank}: {text}"
        self._refusals.add(waiver, "repetition-differs", text, is_event=self._is_event)

    # -- samples of different sizes ----------------------------------------------------------------

    def _pair(self, rounding: float, *, any_two: bool = False) -> Finding | None:
        """Hold the loss of two samples read together against the sum of theirs alone: of two of different sizes, padded to one, or of any
        two, where none can be taken out of those that are read together.
        """
        if not self._is_divided or self.is_routed:
            return None
        words, groups = _TOGETHER if any_two else _PADDED, (self._indices, self.again.everyone)
        pair = (
            next((some[:2] for some in groups if len(some) > 1), None)
            if any_two
            else self.again.two_sizes(self._indices)
        )
        if not self.again.largest(float(pair is not None)):
            return None
        tried = self.again.few(2, self._indices) if pair is None else pair  # a rank without runs as many forwards
        deviation = self.again.excess_of_halves(tried, rounding) or 0.0
        return ("samples", words.format(tried[0], tried[1], deviation)) if deviation else None

    # -- what the step computes --------------------------------------------------------------------

    def _see(self, _: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """Keep elements of the model's inputs and outputs in the forward of the step."""
        if self._noted is None or self._forward_task is None:
            return
        inputs = [*map(_Sampled.of, tensors_in((args, kwargs)))]
        is_last = self.again.assembly.parallel.stage.is_last(self._forward_task.chunk)
        self._noted = inputs, [_Sampled.of(leaf) for leaf in floating_tensors(output)] if is_last else self._noted[1]

    # -- once more ---------------------------------------------------------------------------------

    def _repeat(self, inputs: list[_Sampled], outputs: list[_Sampled]) -> Finding | None:
        """Run the micro-batch again, and parts of it; return what that shows, which is the same on all ranks but for its text.

        `inputs` and `outputs` are elements of those of the step.
        """
        again, step = self.again, self.again.assembly.parallel.program.step
        if again.weights_were_written:  # which could not be put back
            return ("state", _WRITES) if step.num_microbatches > 1 else None
        rounding = torch.finfo(precision.DTYPES[step.compute_dtype]).eps
        if finding := self._pair(rounding):
            return finding
        # Of experts, whose choices are known for a micro-batch alone.
        is_one = self.is_routed and again.largest(float(len(self._indices) < 2)) > 0
        run = again.halves if self.is_routed else again.divided_first
        halved = run(self._indices) if self._is_divided and not is_one else None
        same, few, offs = None, self._indices, []
        if halved is not None:
            same, few = self._same(halved), halved.indices[: halved.halves[0].size]
            offs, pair = [deviation_of_halves(halved.together, halved.halves)], halved.indices[:2]
        has_more = again.largest(float(halved is not None and halved.together.size > 2)) > 0
        has_other = again.largest(float(same is None))  # as on a rank with a smaller micro-batch than others have
        repeated = self._forward() if same is None or has_other else same.outputs
        now = () if repeated is None else map(_Sampled.of, floating_tensors(repeated))
        pairs = [(old, new) for old, new in zip(outputs, now, strict=False) if old.shape == new.shape]
        deviation = max((relative_deviation(old.values, new.values) for old, new in pairs), default=0.0)
        finding = self._changed(inputs, deviation, rounding)
        again.latest = None
        del halved, same, repeated, now, pairs  # before further forwards
        if finding is not None:
            return finding
        if has_more and (paired := again.halves(pair)) is not None:
            offs.append(deviation_of_halves(paired.together, paired.halves))
            few = pair[:1]  # of fewer samples, fewer meet
            del paired
        if offs:
            return self._coupled(offs, few, rounding)
        return self._pair(rounding, any_two=True) if self._is_divided else None

    def _same(self, run: HalvedRun) -> Samples | None:
        """Return the part of a run that is the micro-batch; None if none is. No run names a sample twice, as a micro-batch may."""
        number = len(set(self._indices.tolist()))
        parts = (run.together, run.halves[0]) if number == len(self._indices) else ()
        return next((samples for samples in parts if samples.size == number), None)

    def _changed(self, inputs: list[_Sampled], deviation: float, rounding: float) -> Finding | None:
        """Return why the outputs of the micro-batch that was run again deviate from those of the step, which had these inputs."""
        deviation = self.again.largest(deviation)
        if deviation <= max(self._shown.allowance, allowance(rounding)):
            return None
        # Kernels of a GPU may add up in another order each time; those of a CPU do not.
        repeatable = 0.0 if self.again.assembly.parallel.mesh.device.type == "cpu" else allowance(rounding)
        text = _CHANGED.format(int(self._indices[0]), deviation)
        read = [_Sampled.of(leaf) for leaf in tensors_in(self.again.read(self._indices))]
        is_read = (any(noted.has_same_values(leaf) for leaf in read) for noted in inputs if len(noted.shape))
        if self.again.largest(float(not all(is_read))):
            works = "Use a forward and a loss that change no batch in place, and a data set that draws no numbers"
            return "data", f"{text}it reads other values the second time. {works}"
        first = self._forward()
        if self.again.largest(largest_deviation(self._forward(), first)) > repeatable:
            why = "two forwards of it differ: the model draws random numbers from a generator of its own, or reads a value that changes"
            return "random", f"{text}{why}. Use nn.Dropout and torch.nn.functional.dropout"
        if not self._is_more(deviation, self._indices, rounding):
            return None
        why = "the forward reads a value that an earlier forward of this step has written"
        return "state", f"{text}{why}. Use a forward that keeps nothing from one micro-batch to the next"

    def _coupled(self, offs: list[float | None], few: Indices, rounding: float) -> Finding | None:
        """Hold samples that were run in halves against those that were run together, whose deviations are `offs`; `few` are the smallest half."""
        if self.again.largest(float(None in offs)):  # no dimension holds the samples
            return self._pair(rounding, any_two=True)
        deviation = self.again.largest(max(filter(None, offs), default=0.0))
        is_little = deviation <= max(self._shown.allowance, allowance(rounding))
        if is_little or not self._is_more(deviation, few, rounding):
            return None
        has_dropout = self.again.assembly.model.dropout.dropout is not Dropout.ABSENT
        drawn = ", or random numbers are drawn in another order, as by torch.rand(K * B) instead of torch.rand(K, B)"
        return "samples", _COUPLED.format(int(few[0]), deviation, drawn if has_dropout else "")

    def _is_more(self, deviation: float, few: Indices, rounding: float) -> bool:
        """Return whether a deviation of some samples is more than roundings explain, which are measured."""
        nudges = ((rounding, seed) for seed in range(NUM_PERTURBED))
        forwards = self._forwards(few, (None, *nudges))
        first = next(forwards)
        measured = self.again.largest(max(largest_deviation(outputs, first) for outputs in forwards))
        self._shown.allowance = allowance(rounding, measured)
        return deviation > self._shown.allowance

    def _forward(self) -> Any:
        """Run the micro-batch again; return its outputs, None where there are none."""
        return next(self._forwards(self._indices, (None,)))

    def _forwards(self, indices: Indices, nudges: Sequence[Nudge | None]) -> Iterator[Any]:
        """Yield the outputs of the micro-batch, or of a few of its samples, which are read once."""
        microbatch = self._microbatch if self.again.assembly.model.spec.couples_samples else None
        samples = self.again.read(indices)
        for nudge in nudges:
            yield self.again.run(indices, samples, microbatch=microbatch, nudge=nudge)[0]
