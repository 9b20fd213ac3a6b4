"""A model in a layout that takes steps: a user's loop, the trainer and the proof call it.

```python
run = samestep.parallelize(model, loss, optimizer, layout="dp=2 zero=3", job=job)
for batch in samestep.batches(dataset, job):
    report = run.step(batch)
```
The forwards and backwards of a step are carried out by an `Interpreter`. The ranks then agree on the step by one all_reduce,
and each updates its weights, or none does.
A run is a facade over few parts. Its steps stand here; its other methods with what they do.

```
step                       ─► RunBatches    what a loop hands over, as a batch         batches/run_batches.py
                           ─► Stepper       one step                                   stepper.py
model, updater, program    ─► HeldRun       what it holds, for whoever looks         held_run.py
backward, update           ─► StepsByHand   the two halves of a step, in any order     own_steps/
save, load, state_dict     ─► SavedRun     weights in files, dicts, and whole         checkpoints/
evaluate, predict          ─► EvaluatedRun  forwards without gradients                 evaluated_run.py
record                     ─► RecordedRun   where the time of steps goes               recording/recorded_run.py
```
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from samestep import calls
from samestep.building.loss import named_loss
from samestep.building.loss_scope import scoped
from samestep.building.over_samples import IGNORING
from samestep.building.several_models import Built, Forward, as_one
from samestep.errors import LayoutError
from samestep.examination.examine import Loss, Source
from samestep.job import Job
from samestep.layout import Layout
from samestep.runtime.batches.run_batches import RunBatches
from samestep.runtime.checkpoints.run_state import RunState
from samestep.runtime.checkpoints.saved_run import SavedRun
from samestep.runtime.evaluated_run import EvaluatedRun
from samestep.runtime.guards import chosen_kernels
from samestep.runtime.guards.shared_weights import SharedWeights
from samestep.runtime.held_assembly import HeldAssembly
from samestep.runtime.held_run import HeldRun
from samestep.runtime.local_replicas import LocalReplicas
from samestep.runtime.optimizers.held_bytes import held_bytes
from samestep.runtime.optimizers.optimizer_source import OptimizerLike, optimizer_source
from samestep.runtime.own_steps.steps_by_hand import StepsByHand
from samestep.runtime.own_steps.steps_in_parts import StepsInParts
from samestep.runtime.processes import join, mesh, rank_order
from samestep.runtime.processes.join import RankInfo
from samestep.runtime.processes.process_groups import forget_groups
from samestep.runtime.recording.recorded_run import RecordedRun
from samestep.runtime.recording.step_recorder import StepRecorder
from samestep.runtime.step_batch import StepBatch
from samestep.runtime.step_observer import StepObserver
from samestep.runtime.step_report import StepReport
from samestep.runtime.stepper import Stepper
from samestep.runtime.weights.moving_averages import Following, ModelAverages
from samestep.runtime.weights.weights_in_loops import computing

_NOBODY, _NONE_FOLLOWS = StepObserver(), ModelAverages()


class Run(HeldRun, StepsByHand, SavedRun, EvaluatedRun, RecordedRun):
    """A model in a layout, ready to take steps.

    Every rank makes one, and all call its methods in the same order: each is collective over the world, see [Note: collective
    calls], unless it says otherwise.
    """

    def __init__(
        self,
        source: Source,
        layout: Layout,
        job: Job,
        place: RankInfo,
        observer: StepObserver = _NOBODY,
        *,
        owns_weights: bool = False,
        watches_given: bool = False,
        batch_dim: int = 0,
        averages: ModelAverages = _NONE_FOLLOWS,
    ) -> None:
        """Make a run; with `owns_weights` nobody else holds a weight between two steps, when zero=1 may still gather it.

        If it `watches_given`, its steps are refused while another such run takes steps with weights that both were given.
        """
        self.job, self.place = job, place
        self.changes: tuple[str, ...] = ()
        """What resumes have changed of the job and its layout, and after which steps."""
        self._kernels = chosen_kernels.of_job(job, place.device)
        self.receivers: list[Callable[[StepReport, StepBatch, bool], StepReport]] = []
        """What is given the report of each step or of a part of it, and returns what the loop is given: those of `samestep.track`."""
        held = HeldAssembly if job.numerics.exchange_every == 1 else LocalReplicas
        self._own = held(source, layout, job, place, averages)
        self.recorder = StepRecorder(observer, job, place.device, place.rank)
        self._stepper = Stepper(self._own, self.recorder, owns_weights=owns_weights)
        self._shared = SharedWeights(is_watched=watches_given)
        self._parts = StepsInParts(self._stepper, self._own)
        self._refuse_waiting = self._parts.refuse_waiting
        self._batches = RunBatches(self._own, self._stepper.guards, batch_dim)
        self.data, self.lanes = self._batches.data, self._batches.lanes
        self._state = RunState(self, self._own, self._stepper.guards.forget_replicas)
        self._after_step: list[Callable[[int], None]] = [self._stepper.follow] if averages.following else []
        """What is done after each step, with its index: nothing, unless models follow others or replicas are trained apart."""
        if self._own.are_apart:
            self._after_step.append(lambda step: self._own.exchange(step + 1))
            self._after_step.append(lambda _: self._stepper.guards.note_replicas())

    def __repr__(self) -> str:
        """Return the layout and the number of steps, as a notebook shows them."""
        return f"Run({str(self.layout)!r}, steps_taken={self.steps_taken})"

    @property
    def layout(self) -> Layout:
        """The layout; once the run is prepared, with what the model asks for besides."""
        return self._own.layout

    @property
    def steps_taken(self) -> int:
        """The number of steps that were taken, in this process or before."""
        return self._stepper.steps_taken

    @steps_taken.setter
    def steps_taken(self, number: int) -> None:
        self._stepper.steps_taken = number
        self._stepper.guards.forget_replicas()
        self._parts.forget()

    def prepare(self, example: Any) -> None:
        """Build the model in its layout, unless that is done; `example` is a batch as `step` takes it, or samples of one from
        `batch.samples`.
        """
        if self._own.is_prepared:
            return
        if hasattr(example, "shares") and hasattr(example, "samples"):
            self.labelled(self.batch_of(example, "run.prepare"))
            return
        self._batches.begin(example)
        for remark in self._own.assemble(example):
            self._stepper.refusals.remark(remark)
        if remark := self._shared.begin(self._own.current):
            self._stepper.refusals.remark(remark)
        self._state.begin()

    def step(self, batch: StepBatch | Any, *, local: bool = False) -> StepReport:
        """Take one optimizer step on the global batch; once a rank was asked to stop, it is the last of its stream.

        The batch is one of `samestep.batches`, or the values of a whole batch in tensors, dicts, tuples, lists and dataclasses:
        equal on all ranks, or on rank 0, which sends them, and None on the others. With `local` each data rank is given its own samples, in
        any number, and the batch is all of them in the order of ranks.

        Raises:
            CheckpointError: it is the first step after a load, and the data is not that of the checkpoint.
            DataError: ranks were given different values without `local`; or every label is masked, in `numerics.max_skipped` steps
                before too, since one such step is skipped.
            UnprovenError: the loss is no sum over samples, or the model, the loss, the optimizer or the data set draws
                random numbers that layouts would not share.
            ModelError: another run takes steps with weights that were given to both.
            NonFiniteError: loss or gradients are not finite, and `numerics.on_nonfinite` is "stop".
            DriftError: ranks that must hold equal values differ; compared every `train.watch_every` steps.
            RepeatError: a sample that is run again in such a step, or a weight's update, gives something else; in the
                first step it is an UnprovenError, before any weight has changed.
        """
        self._refuse_waiting("step")
        report, batch = self._taken(batch, "step", self._stepper.take, local=local)
        for act in self._after_step:
            act(batch.step)
        return self._received(report, batch)

    def _taken(
        self, batch: StepBatch | Any, method: str, take: Callable[[StepBatch], StepReport], *, local: bool
    ) -> tuple[StepReport, StepBatch]:
        """Take a step or a backward on a batch that is checked and labelled; return the report, and that batch."""
        self._state.refuse(method)
        values, step = batch, self.steps_taken if method == "step" else self._parts.step_of(batch)
        given = self.batch_of(batch, f"run.{method}", local=local, step=step)
        self._parts.note_values(values, step)
        batch = self.labelled(given)
        self.changes += self._batches.begin_step(given)
        held = self._own.current
        module, program, updater = held.model.module, held.parallel.program, held.weights.updater
        kept = functools.partial(held_bytes, module, program, updater)
        recorded = self.recorder.taking(batch.step + 1, program, module, held.model.spec, kept)
        self._shared.refuse_others()
        try:
            with self._computing(), recorded:
                report = take(batch)
        except BaseException:
            self._shared.end()
            if self.layout.pp > 1:  # messages that nobody has received would meet those of the next run of this process
                forget_groups()
            raise
        self._shared.note(report, is_last=batch.step + 1 >= self.job.train.steps)
        return report, batch

    def _received(self, report: StepReport, batch: StepBatch, *, is_part: bool = False) -> StepReport:
        """Return a report as its receivers leave it, who end the stream of the batch where the loop is to end."""
        for receiver in self.receivers:
            report = receiver(report, batch, is_part)
        return report

    def _computing(self) -> AbstractContextManager[None]:
        """Return a context in which the run computes: with the kernels of its job, with weights that no loop has meanwhile, and without a
        trace of what is no part of a step."""
        in_loops = [one.weights.in_loops for one in self._own.assemblies if one.weights.in_loops]
        return computing(in_loops, self._kernels) if in_loops or self._kernels else IGNORING

    def forward_backward(self, batch: StepBatch) -> Tensor:
        """Run the forwards and backwards of the program; return this rank's loss sum and count, float64 [2]."""
        batch = self.labelled(batch)
        with self._computing():
            return self._stepper.forward_backward(batch)

    def batch_of(self, given: Any, method: str, *, local: bool = False, step: int | None = None) -> StepBatch:
        """Return what a method of this run was given as the batch of its next step, or of another one.

        Collective over the world where it is no batch of `samestep.batches`, see [Note: collective calls].

        Raises:
            DataError: it is neither a batch nor the values of one.
        """
        return self._batches.of(given, method, self.steps_taken if step is None else step, local=local)

    def labelled(self, batch: StepBatch) -> StepBatch:
        """Return a batch as the loss is given it: with labels of the next token, where they are aligned with the inputs.

        Raises:
            DataError: the samples of a causal model do not show which token their labels are, or contradict `data.labels`.
        """
        if not self._own.is_prepared:
            self.prepare(batch.samples(batch.shares(0, 1, 1)[0][:1]))
        return self._batches.labelled(batch)


@calls.checked
def parallelize(
    model: Built | Mapping[str, Built],
    loss: Loss | str,
    optimizer: OptimizerLike | Sequence[OptimizerLike] | Mapping[str, OptimizerLike],
    *,
    layout: str | Layout = "",
    job: Job | None = None,
    stages: Sequence[str] | None = None,
    forward: Forward | None = None,
    batch_dim: int = 0,
    ema: Following | None = None,
    offload: Sequence[str] | None = None,
) -> Run:
    """Put any model into a layout; `run.step(batch)` then takes one optimizer step of the job.

    Every rank calls it with equal arguments, started by `samestep.launch`, torchrun or srun, or as the only process.

    A run trains weights of its own: of an instance it takes the values. So two runs over the same modules or optimizer, which
    take steps in turn, are refused.

    Args:
        model: a build function, whose weights start as functions of (seed, name); or an instance, whose values stay; or several of
            these by name, with a `forward`. Those whose weights take no gradient are frozen.
        loss: (outputs, batch) -> (sum, count), or one of `samestep.whole_batch`, or a word of the key `train.loss`: "cross_entropy",
            "mse", or "model" for what the forward returns, which is then given the labels.
        optimizer: a function of the list of parameters, or of a list of (name, parameter); an instance over the model instance
            that has not stepped; or a list or a dict of these, which together hold each weight once.
        layout: one line of text such as "dp=2 zero=3"; empty replicates over all ranks.
        job: global batch, steps, seed, schedule, numerics, `optimizer.clip_norm`, and `data.labels`, which says what the labels of
            a causal model of transformers are for "cross_entropy". Its model, the rest of its data, its loss and the rest of
            its optimizer table are not read: the arguments above replace them.
        stages: names of modules with which the later stages of a pipeline may begin, such as ["encoder.3", "head"]; by default
            those of `job.model.stages`, and else blocks, or the calls of any modules.
        forward: a function of the model, or of the models by name, and of a batch with its labels, which returns the outputs that
            the loss is given; by default the model is called with what its forward takes of the batch.
        batch_dim: the dimension of the samples in the tensors that the forward and the loss are given, and in batches that a
            collate_fn or the loop puts together: 1 for a recurrent model over [tokens, samples].
        ema: models that follow others behind each step, {"teacher": ("student", 0.996)}: the decay is a number, or a function of the
            step. Such a model is frozen, and starts as a copy of the one that it follows, unless `model` has one of its name.
        offload: names of models, or of modules, whose weights take no gradient, such as ["reference"]: they are in the host's memory,
            and on the device while a forward or a backward reads them; by default those of `job.model.offload`.

    Raises:
        InputError: a model, optimizer or layout that cannot run; the text says what would.
    """
    job = (job or Job()).with_modules(stages=stages, offload=offload)
    place, where = _joined(job, layout)
    averages = ModelAverages(ema or {})
    averages.check(where, job)
    whole = as_one(model, forward, {name: followed for name, (followed, _) in averages.following.items()})
    source = _source_of(whole, loss, optimizer, job)
    return Run(source, where, job, place, watches_given=True, batch_dim=batch_dim, averages=averages)


def _joined(job: Job, layout: str | Layout) -> tuple[RankInfo, Layout]:
    """Join the ranks of the job; return this rank's place among them, and the layout, which has as many ranks.

    Raises:
        LayoutError: it has another number, or its order of ranks does not fit the hosts.
    """
    had_joined = dist.is_initialized()
    place = join.join(job.run.device, timeout_s=job.run.timeout_s, ranks_per_node=job.run.ranks_per_node)
    where = Layout.parse(layout) if isinstance(layout, str) else layout
    if layout == "":
        where = Layout(dp_replicate=place.world_size)
    try:
        mesh.check_world(where)
        rank_order.check(where, place.hosts)
    except LayoutError:
        if not had_joined:  # a process in no group may still fork the ranks that the refusal asks for
            join.leave()
        raise
    return place, where


def _source_of(
    model: Built,
    loss: Loss | str,
    optimizer: OptimizerLike | Sequence[OptimizerLike] | Mapping[str, OptimizerLike],
    job: Job,
) -> Source:
    """Return a model, a loss and an optimizer as a run takes them."""
    of_samples = scoped(named_loss(loss) if isinstance(loss, str) else loss, job)
    names = {id(param): name for name, param in model.named_parameters()} if isinstance(model, nn.Module) else None
    name = type(model).__name__ if isinstance(model, nn.Module) else getattr(model, "__name__", "model")
    return Source(model, of_samples, optimizer_source(optimizer, names), name)
