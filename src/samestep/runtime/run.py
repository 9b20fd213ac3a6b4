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
step                       ─► RunBatches    what a loop hands over, as a batch         run_batches.py
                           ─► Stepper       one step                                   stepper.py
backward, update           ─► RunInParts    the two halves of a step, in any order     own_steps/
save, load, state_dict     ─► SavedRun      weights in files, dicts, and whole         checkpoints/
evaluate, predict          ─► evaluation    forwards without gradients                 evaluation.py
record                     ─► StepRecorder  where the time of steps goes               recording/step_recorder.py
```
"""

from __future__ import annotations

import functools
import re
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from samestep import calls
from samestep.building.loss import loss_from
from samestep.building.over_samples import IGNORING, scoped
from samestep.building.owned_model import OwnedModel
from samestep.building.several_models import Built, Forward, as_one
from samestep.datasets.batch import ONE_LOOP, Dataset, example_in
from samestep.datasets.opening import batch_to_evaluate
from samestep.errors import DataError, JobError, LayoutError, ModelError
from samestep.examination.examine import Loss, Source
from samestep.job import Job
from samestep.layout import Layout, layout_from
from samestep.program import recorded
from samestep.runtime.checkpoints.saved_run import Lent
from samestep.runtime.evaluation import evaluate, outputs_of, predict
from samestep.runtime.guards import chosen_kernels
from samestep.runtime.held_assembly import held_assembly_of
from samestep.runtime.memory_limits import held_bytes
from samestep.runtime.optimizers.optimizer_source import OptimizerLike, optimizer_source
from samestep.runtime.own_steps.other_losses import OtherLosses
from samestep.runtime.own_steps.steps_in_parts import RunInParts
from samestep.runtime.processes import join, mesh, rank_order, whereabouts
from samestep.runtime.processes.join import RankInfo
from samestep.runtime.processes.mesh import forget_groups
from samestep.runtime.processes.messages import gather_values
from samestep.runtime.recording.step_recorder import StepRecorder
from samestep.runtime.run_batches import RunBatches
from samestep.runtime.step_observer import StepBatch, StepObserver
from samestep.runtime.step_report import StepReport
from samestep.runtime.stepper import Stepper
from samestep.runtime.weights.moving_averages import Following, ModelAverages
from samestep.runtime.weights.weights_in_loops import computing

_NOBODY, _NONE_FOLLOWS = StepObserver(), ModelAverages()


class Run(RunInParts):
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
        batch_dim: int = 0,
        averages: ModelAverages = _NONE_FOLLOWS,
    ) -> None:
        """Make a run; with `owns_weights` nobody else holds a weight between two steps, when zero=1 may still gather it: then the run
        trains a copy of an instance, which otherwise it owns.

        Raises:
            ModelError: another run owns a part of the instance.
        """
        super().__init__()
        self.job, self.place, self.changes = job, place, ()
        self._owner = None if owns_weights else OwnedModel(source.model)
        if self._owner is not None:
            source = replace(source, owner=self._owner if isinstance(source.model, nn.Module) else None)
            weakref.finalize(self, self._owner.abandon).atexit = False
        self._kernels = chosen_kernels.of_job(job, place.device)
        self.loggers: list[Callable[[StepReport, StepBatch, bool], StepReport]] = []
        """What is given the report of each step or of a part of it, and returns what the loop is given: those of `samestep.track`."""
        self.before_steps: list[Callable[[StepBatch], StepReport | None]] = []
        """What is asked before each step of a prepared run; a report in place of None says that the loop has ended before it."""
        self.ended: StepReport | None = None
        """The report of a loop that had ended before this process began, which takes no step more."""
        self._own = held_assembly_of(job)(source, layout, job, place, averages)
        self.recorder = StepRecorder(job, place.device, place.rank)
        self._stepper = Stepper(self._own, observer, self.recorder, owns_weights=owns_weights)
        self._losses = OtherLosses(self._stepper, self._own)
        self._batches = RunBatches(self._own, self._stepper.guards, batch_dim)
        self.data, self.lanes = self._batches.data, self._batches.lanes

    def __repr__(self) -> str:
        """Return the layout and the number of steps, as a notebook shows them."""
        return f"Run({str(self.layout)!r}, steps_taken={self.steps_taken})"

    def skipped_checks(self) -> tuple[str, ...]:
        """Return the failed checks of all ranks that `run.allow` skips; `job.run.waived` lists each."""
        everyone = gather_values(self.job.run.met, self._own.layout.world_size)
        return tuple(dict.fromkeys(text for texts in everyone for text in texts))

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
        with self._trained_as_saved():
            for remark in self._own.assemble(example):
                self._stepper.refusals.remark(remark)
            for line in self._own.current.model.gathered_lines() if self.place.rank == 0 else ():
                print(f"samestep: {line}", file=sys.stderr, flush=True)
            if self._owner is not None:
                model = self._own.current.model
                self._owner.copies(model.given, frozenset(param.name for param in model.spec.params if param.trainable))
            self._set_kept()

    def step(self, batch: StepBatch | Any, *, local: bool = False) -> StepReport:
        """Take one optimizer step on the global batch. After a signal to stop (Ctrl-C, SIGTERM), it is the last step of the stream.

        The batch is one of `samestep.batches`, or the values of a whole batch in tensors, dicts, tuples, lists and dataclasses. They are
        equal on all ranks, or on rank 0, which sends them, and None on the others. With `local` each data rank is given its own samples, in
        any number, and the batch is all of them in the order of ranks.

        Raises:
            CheckpointError: it is the first step after a load, and the data differs from the checkpoint.
            DataError: ranks were given different values without `local`; or every label is masked, in `numerics.max_skipped` steps
                before too, since one such step is skipped.
            UnprovenError: the loss is not a sum over samples, or the model, the loss, the optimizer or the data set draws
                random numbers that layouts would not share.
            ModelError: the run was released.
            NonFiniteError: loss or gradients are not finite, and `numerics.on_nonfinite` is "stop".
            DriftError: ranks that must hold equal values differ; compared every `train.watch_every` steps.
            RepeatError: a sample that is run again in such a step, or a weight's update, gives something else; in the
                first step it is an UnprovenError, before any weight has changed.
        """
        self._refuse_waiting("step")
        with whereabouts.taking(self.steps_taken + 1, hang_s=self.job.run.hang_s):
            report, batch = self._taken(batch, "step", self._stepper.take, local=local)
            if report.step > batch.step and (self._own.averages.following or self._own.is_apart):
                self._stepper.end_step(batch.step)
        return self._received(report, batch)

    def _taken(
        self, batch: StepBatch | Any, method: str, take: Callable[[StepBatch], StepReport], *, local: bool
    ) -> tuple[StepReport, StepBatch]:
        """Take a step or a backward on a batch that is checked and labelled; return the report, and that batch."""
        self._refuse_lent(method)
        if torch.is_autocast_enabled(self.place.device.type):
            raise ModelError(
                "run-call-time",
                f"run.{method} within torch.autocast, which would compute in another precision than numerics.precision = "
                f'"{self.job.numerics.precision}" of the job. Use "bf16" or "fp16" there, without it',
            )
        values, step = batch, self.steps_taken if method == "step" else self._step_of(batch)
        read = self._batches.of(batch, f"run.{method}", step, local=local)
        self._note_values(values, step)
        if read.step + 1 < self.steps_taken:
            raise DataError(
                "stream-position",
                f"run.{method} was given the batch of step {read.step + 1} after step {self.steps_taken}: each call of samestep.batches begins "
                f"again. {ONE_LOOP}",
            )
        batch = self.labelled(read)
        for ask in self.before_steps:
            if (ended := ask(read)) is not None:
                self.ended = ended
                return ended, batch
        self.changes += self._batches.begin_step(read)
        assembly = self._own.current
        module, program, updater = assembly.model.module, assembly.parallel.program, assembly.weights.updater
        count_bytes = functools.partial(held_bytes, module, program, updater)
        recording = self.recorder.taking(batch.step + 1, program, module, assembly.model.spec, count_bytes)
        try:
            with self._computing(), recording:
                report = take(batch)
        except BaseException:
            if self.layout.pp > 1:  # messages that nobody has received would meet those of the next run of this process
                forget_groups()
            raise
        return report, batch

    def _received(self, report: StepReport, batch: StepBatch, *, is_part: bool = False) -> StepReport:
        """Return a report as its loggers leave it, who end the stream of the batch where the loop is to end."""
        for logger in self.loggers:
            report = logger(report, batch, is_part)
        return report

    def _computing(self) -> AbstractContextManager[None]:
        """Return a context in which the run computes: with the kernels of its job, with weights that no loop has meanwhile, and without a
        trace of what is no part of a step."""
        in_loops = (self._own.current.weights.in_loops or None) if self._own.is_prepared else None
        return computing(in_loops, self._kernels) if in_loops or self._kernels else IGNORING

    def forward_backward(self, batch: StepBatch) -> Tensor:
        """Run the forwards and backwards of the program; return this rank's loss sum and count, float64 [2]."""
        batch = self.labelled(batch)
        with self._computing():
            return self._stepper.forward_backward(batch)

    def batch_of(self, values: Any, method: str, *, local: bool = False) -> StepBatch:
        """Return the batch of the next step from an argument of a method of this run.

        Collective over the world if it is not a batch of `samestep.batches`, see [Note: collective calls].

        Raises:
            DataError: it is neither a batch nor the values of one.
        """
        return self._batches.of(values, method, self.steps_taken, local=local)

    def labelled(self, batch: StepBatch) -> StepBatch:
        """Return the batch of the loss: labels that are aligned with the inputs are shifted by one token.

        Raises:
            DataError: the samples of a causal model do not show which token their labels are, or contradict `data.labels`.
        """
        if not self._own.is_prepared:
            self.prepare(example_in(batch))
        return self._batches.labels.of(batch, self._own.current.model.module)

    def record(self, steps: int | str, folder: str | Path | None = None) -> Path:
        """Record the time of some steps, operation by operation, for `samestep explain FOLDER`; return the folder.

        `steps` is `FIRST:LAST`, counted from 1, or a number of steps. Every rank calls it, and writes files of its
        own, in a folder that all ranks share.

        Raises:
            InputError: the text names no steps.
        """
        path = Path(recorded.FOLDER if folder is None else folder)
        self.recorder.record(recorded.parse_steps(str(steps), self.steps_taken), path)
        return path

    # -- forwards without gradients ----------------------------------------------------------------

    @calls.checked
    def evaluate(
        self, batch: StepBatch | Dataset | Any, metrics: Loss | None = None, *, local: bool = False
    ) -> dict[str, float]:
        """Return the mean of the loss over a dataset or a batch, as {"loss": ...}, without gradients; each sample counts once.

        `metrics`, a function of (outputs, batch) -> {"name": (sum, count), ...}, adds the means of these sums, such as
        {"accuracy": (right, answers)}. (sum, count) alone has the function's name. Values are taken as by `step`.

        Raises:
            UnprovenError: a metric is not a sum over samples, and they are evaluated in several parts.
        """
        samples = self._to_evaluate(batch, "evaluate", local=local)
        guards, seed = self._stepper.guards, self.job.train.seed
        guards.find_loss(self._stepper.held, samples)
        with self._computing(), self._own.outer():
            assembly = self._stepper.whole_assembly
            with guards.trying_measure(assembly, samples, metrics) if metrics is not None else nullcontext():
                return evaluate(assembly, samples, seed, metrics)

    @calls.checked
    def predict(self, batch: StepBatch | Dataset | Any, *, local: bool = False) -> Any:
        """Return the model's outputs for all samples of a dataset or a batch, in order, on every rank's CPU, without gradients.

        They are dicts, lists and tuples of tensors as the forward nests them, the samples first; other objects, such as caches, are
        left out. If samples differ in size, it is a list with the outputs of each. Values are taken as by `step`.

        Raises:
            DataError: an output has no dimension of samples, and is not the same for all of them.
        """
        samples = self._to_evaluate(batch, "predict", local=local)
        with self._computing(), self._own.outer():
            return predict(self._stepper.whole_assembly, samples, self.job.train.seed)

    def _to_evaluate(self, given: Any, word: str, *, local: bool) -> StepBatch:
        """Return a data set or a batch that a method is given, as one batch with labels."""
        self._refuse_lent(word, Lent.WHOLE)
        method = f"run.{word}"
        batch = batch_to_evaluate(given, method, self.job.train.global_batch, self._batches.dims)
        return self.labelled(self.batch_of(batch, method, local=local))

    def outputs(self, samples: Any) -> Any:
        """Run the model forward on samples that every rank holds, and return its outputs on every rank."""
        self._refuse_lent("outputs", Lent.WHOLE)
        self.prepare(samples)
        with self._computing(), self._own.outer():
            return outputs_of(self._stepper.whole_assembly, samples, self.job.train.seed)


_READ_IN_A_LOOP = {
    "model.stages", "model.offload", "data.labels", "optimizer.clip_norm", "checkpoint.keep", "checkpoint.save_pretrained",
    "train.global_batch", "train.steps", "train.seed", "train.ema", "train.watch_every",
    "run.device", "run.folder", "run.data_workers", "run.ranks_per_node", "run.timeout_s", "run.hang_s", "run.compile",
    "run.compile_backend", "run.compile_mode", "run.attention", "run.allow", "run.log_every",
}  # fmt: skip
"""The keys that a run in a loop of one's own reads, beside those of numerics and schedule and the layout."""
_IN_A_LOOP = {
    r"model|optimizer|train\.loss": "the arguments model, loss and optimizer of parallelize",
    r"data": "the dataset of samestep.batches",
    r"train\.(evaluate|patience|monitor)|checkpoint\.keep_best": "a samestep.EarlyStopping of samestep.track",
    r"train\.record": "run.record(steps)",
    r"checkpoint": "`if report.step % 100 == 0: run.save(folder)`",
    r"run\.report": "the loggers of samestep.track",
    r"run\.(ranks|threads)": "the arguments of samestep.launch",
}
"""What a loop of one's own has for keys that it does not read, by the beginning of their names."""


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

    The run owns a model instance, as DDP and `fully_shard` do: `run.model` is the instance. Its parameters are trained in place. With
    zero=2, zero=3, tp, ep and pp they are replaced by the shards of this rank. No other run can use a part of it until
    `run.release()` gives it back in full.

    Args:
        model: a build function (weights start as functions of (seed, name)), an instance (its values stay), or several of these by name, with
            a `forward`. A model without trainable weights is frozen.
        loss: (outputs, batch) -> (sum, count), a loss of torch such as `nn.CrossEntropyLoss()` or `F.mse_loss`, a mean by `samestep.mean_over`,
            or a loss of `samestep.whole_batch`. Or a word of the key `train.loss`: "cross_entropy", "mse", or "model" for the loss that the
            forward returns, which then gets the labels.
        optimizer: a function of the list of parameters, or of a list of (name, parameter), or an instance over the model instance
            that has not stepped. Several are a list or a dict of these, which together hold each weight once.
        layout: one line of text such as "dp=2 zero=3"; by default the layout of `samestep launch` or of the job, or replicas on all ranks.
        job: global batch, steps, seed, schedule, numerics, `optimizer.clip_norm`, and `data.labels`, the form of the labels of a causal model
            of transformers for "cross_entropy". The arguments above replace its model, its loss and the rest of its optimizer table. A
            key that only `samestep train` reads is an error if its value is not the default.
        stages: names of modules at which pipeline stages may begin, such as ["encoder.3", "head"]; by default `job.model.stages`, or else
            blocks, or the calls of any modules.
        forward: a function of the model, or of the models by name, and of a batch with its labels. It returns the outputs for the loss. By
            default the model is called with the fields of the batch that its forward takes.
        batch_dim: the dimension of the samples in the tensors for the forward and the loss, and in batches that a collate_fn or the loop
            makes. It is 1 for a recurrent model over [tokens, samples].
        ema: models that follow others after each step, {"teacher": ("student", 0.996)}: the decay is a number, or a function of the
            step. Such a model is frozen, and starts as a copy of the followed one, unless `model` has one of its name.
        offload: names of frozen models or modules, such as ["reference"]: CPU memory holds them, and the device only during a forward or
            backward pass that reads them; by default `job.model.offload`.

    Raises:
        InputError: a model, optimizer or layout that cannot run; the text names a fix.
    """
    job = (job or Job()).with_modules(stages=stages, offload=offload)
    _check_keys(job)
    place, where = _joined(job, layout)
    averages = ModelAverages(ema or {})
    averages.check(where, job)
    built = as_one(model, forward, {name: followed for name, (followed, _) in averages.following.items()})
    _check_dtypes(built, job, says=place.rank == 0)
    source = _source_of(built, loss, optimizer, job)
    return Run(source, where, job, place, batch_dim=batch_dim, averages=averages)


def _check_keys(job: Job) -> None:
    """Refuse a job with keys that a run in a loop of one's own does not read.

    Raises:
        JobError: it has one.
    """
    if unread := sorted(job.set_keys("model", "data", "train", "optimizer", "checkpoint", "run") - _READ_IN_A_LOOP):
        instead = [use for begin, use in _IN_A_LOOP.items() if any(re.match(begin, key) for key in unread)]
        uses = f"Use {', and '.join(instead)} without these keys" if instead else "Remove these keys"
        raise JobError(
            "job-key-unread",
            f"parallelize does not read {', '.join(unread)} of the job. {uses}, or samestep.train(job), which reads them",
        )


def _check_dtypes(model: Built, job: Job, *, says: bool) -> None:
    """Refuse an instance of float64 weights in a job that trains it in fewer bits, unless the job says so; of half the bits `says` says so.

    Raises:
        ModelError: it has float64 weights.
    """
    if not isinstance(model, nn.Module) or "precision" in job.numerics.model_fields_set:
        return
    for name, param in model.named_parameters():
        text = f'parameter {name} is {param.dtype}, and numerics.precision is "float32"'
        if param.dtype == torch.float64:
            fix = 'Set numerics.precision = "float64", or give float32 by model.float()'
            raise ModelError("tensor-form", f"{text}. {fix}")
        if says and param.requires_grad and param.dtype.itemsize == 2:
            fix = 'Set it to "bf16" or "fp16" to compute in half the bits, with master weights in float32'
            print(f"samestep: {text}, so it is trained in float32. {fix}", file=sys.stderr, flush=True)
            says = False


def _joined(job: Job, layout: str | Layout) -> tuple[RankInfo, Layout]:
    """Join the ranks of the job; return this rank's place among them, and the layout, which has as many ranks.

    Raises:
        LayoutError: it has another number, or its order of ranks does not fit the hosts.
    """
    had_joined = dist.is_initialized()
    place = join.join(job.run.device, timeout_s=job.run.timeout_s, ranks_per_node=job.run.ranks_per_node)
    where = layout_from(layout or join.launched_layout() or job.layout or Layout(dp=place.world_size))
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
    of_samples = scoped(loss_from(loss), job)
    names = {id(param): name for name, param in model.named_parameters()} if isinstance(model, nn.Module) else None
    name = type(model).__name__ if isinstance(model, nn.Module) else getattr(model, "__name__", "model")
    return Source(model, of_samples, optimizer_source(optimizer, names), name)
