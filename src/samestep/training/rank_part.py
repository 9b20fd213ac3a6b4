"""One rank's part of a training: it prepares or resumes the run, takes its steps, evaluates, and saves.

```
prepare, load ─► for report in steps_of(run, ...):   log ─► evaluate ─► go back after a spike ─► save     ─► evaluate, result
```

Checkpoints are saved by `[checkpoint]` of the job and on request. With `run.profile = "10:12"` torch's profiler records these steps, with
the program's names as events:

    samestep::task F0                     the forward of micro-batch 0, as in a timeline of `simulate`
    samestep::op forward:layers.1         one op of the program: the forward of a layer
    samestep::owner bucket.0              the collectives of an op, as the ledger names their owner

Every rank writes `profile/steps-10-12.rank0.json.gz` into the run folder, for chrome://tracing or ui.perfetto.dev; on a GPU also
`profile/steps-10-12.rank0.memory.pickle`, every allocation with its stack, for pytorch.org/memory_viz.

Python's garbage is collected after the same steps on every rank (`collect_after_steps`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.hooks import RemovableHandle

from samestep.building.torch_seams import RecordFunctionFast
from samestep.datasets import Dataset, batches
from samestep.errors import OutOfMemoryError, SaveError
from samestep.models.spec import ModelSpec
from samestep.output.durable_files import write_whole
from samestep.program import recorded
from samestep.program.ops import Task
from samestep.proof import record
from samestep.runtime import memory_limits
from samestep.runtime.checkpoints import checkpoint, manifests
from samestep.runtime.checkpoints.writer import Retention, Writing
from samestep.runtime.processes import whereabouts
from samestep.runtime.processes.join import RankInfo
from samestep.runtime.processes.messages import gather_values
from samestep.runtime.run import Run
from samestep.runtime.step_observer import Indices, StepObserver
from samestep.runtime.step_report import StepReport
from samestep.training import evaluations, out_of_memory, run_folder
from samestep.training.check import Checked
from samestep.training.run_folder import Summary
from samestep.training.run_log import NoLog, RunLog, watch_of
from samestep.training.trained import printable, sample_text
from samestep.training.workload import held_out_accuracy, held_out_losses, use_evaluated_weights

OnStep = Callable[[StepReport, bool], None]
"""A function that is called behind each step, with its report and whether it is the last."""


def work(place: RankInfo, checked: Checked, on_step: OnStep | None = None) -> Summary | None:
    """Do one rank's part of a run; return its result on rank 0.

    Raises:
        UnprovenError: the GPUs have far less memory than the run is predicted to need.
        OutOfMemoryError: memory ran out on this rank.
    """
    job = checked.workload.job
    if place.device.type == "cuda":
        peak = memory_limits.predicted_peak(checked.workload.spec, job, checked.layout, checked.ranks_per_node)
        memory_limits.refuse_too_large(peak, job, checked.layout, place.device, checked.ranks_per_node)
    profiler = Profiler(job.run.profiled_steps, checked.folder, place)
    run = Run(checked.workload.source, checked.layout, job, place, profiler, owns_weights=True)
    try:
        return _train(run, checked, profiler, on_step)
    except Exception as error:
        if not out_of_memory.is_shortage(error):
            raise
        text = out_of_memory.shortage(error, run)
    # Outside the except clause, where the tensors of the failed step are freed: the search needs memory too.
    raise OutOfMemoryError("out-of-memory", f"{text}\n{out_of_memory.less_memory(checked, place.device.type)}")


def _train(run: Run, checked: Checked, profiler: Profiler, on_step: OnStep | None) -> Summary | None:
    """Prepare or resume the run, take its remaining steps, and print and write its progress and its result."""
    workload, folder = checked.workload, checked.folder
    run.data.is_of(workload.stamp)
    run.prepare(workload.example)
    if checked.resume_from is not None:
        checkpoint.load(run, checked.resume_from)
    if checked.first_weights is not None:
        checked.first_weights.load(run)
    first = run.steps_taken
    run.recorder.folder = folder / recorded.FOLDER
    if run.job.train.record:
        run.record(run.job.train.record, folder / recorded.FOLDER)
    log = NoLog() if run.place.rank else RunLog(checked, run)
    if first < checked.until and (first or checked.first_weights is not None):  # weights that were drawn write noise
        with use_evaluated_weights(run):
            _print_sample(run, log, "before training" if first == 0 else "resumed")
    rule = evaluations.EvaluationRule.of(run.job, workload)
    evaluated = evaluations.resume_evaluations(run, rule, folder, log.say, first)
    _loop(evaluated, checked, log, profiler, on_step)
    with whereabouts.apart("the evaluation at the end"):
        return _finish(evaluated, checked, log)


def steps_of(run: Run, dataset: Dataset, until: int, profiler: Profiler | None = None) -> Iterator[StepReport]:
    """Take the steps that are left up to step `until`, and yield the report of each; end early when a rank must stop.

    A profiler surrounds each step.

    Collective over the world: every rank iterates; if one does not, the others wait for it in the next step.
    """
    first = run.steps_taken
    for batch in batches(dataset, run.job, first_step=first):
        if batch.step >= until:
            return
        with (
            whereabouts.taking(batch.step + 1, is_first=batch.step == first),
            profiler.step(batch.step + 1, run) if profiler else contextlib.nullcontext(),
        ):
            report = run.step(batch)
        yield report


def _loop(
    evaluated: evaluations.Evaluations,
    checked: Checked,
    log: RunLog | NoLog,
    profiler: Profiler,
    on_step: OnStep | None,
) -> None:
    """Take the remaining steps and log each; evaluate and save checkpoints as often as the job says, and save after the last."""
    run = evaluated.run
    until = run.steps_taken if evaluated.is_over else checked.until
    saver = Saver(run, checked.folder / run_folder.CHECKPOINTS, log.say)
    watch = watch_of(run)
    with log.live():
        for report in collect_after_steps(steps_of(run, checked.workload.dataset, until, profiler)):
            is_last = report.stop or report.step == until
            with whereabouts.apart("an evaluation"), log.spending("evaluations"):
                losses = evaluated.losses() if evaluated.is_due(report.step) and not report.stop else {}
            log.straggler(watch.step(run.recorder.sums, report.step_s) if watch else {})
            log.step(
                dataclasses.replace(report, held_out=losses) if losses else report, run.recorder.sums, is_last=is_last
            )
            if losses:
                with whereabouts.apart("a save of the best weights"):
                    log.say(evaluated.add(report.step, losses))
            if run.job.numerics.on_spike == "rollback" and report.spike:
                with whereabouts.apart("a way back to a checkpoint"):
                    log.say(saver.roll_back(report.step))
                    log.rolled_back()
            is_last |= evaluated.is_over
            if is_last or saver.is_due(report):
                with whereabouts.apart("a save"), log.spending("saves"):
                    log.sync()  # before the checkpoint, which must never be ahead of the log
                    saver.save(is_last=is_last)
                log.saved(report.step)
            if on_step is not None:
                on_step(report, is_last)
            if is_last:
                break
    profiler.close()  # a run that was stopped
    run.recorder.close()


def _finish(evaluated: evaluations.Evaluations, checked: Checked, log: RunLog | NoLog) -> Summary | None:
    """Evaluate a run that has taken its steps or was stopped, and print and write its result."""
    run, workload, folder = evaluated.run, checked.workload, checked.folder
    stopped = run.steps_taken < checked.until and not evaluated.is_over
    losses: dict[str, float] = {}
    accuracy = None
    if not stopped:
        with use_evaluated_weights(run), log.spending("evaluations"):
            losses, accuracy = held_out_losses(run, workload), held_out_accuracy(run, workload)
            if (
                evaluated.is_over or run.steps_taken >= run.job.train.steps
            ):  # --steps ended no shorter run, which would write noise
                _print_sample(run, log, "after training")
    waived = run.skipped_checks()
    if isinstance(log, NoLog):
        return None
    log.end(evaluated, losses, accuracy)
    if stopped:
        log.say(f"stopped after step {run.steps_taken}; --resume --out {folder} resumes it")
    proof = record.find_record(run.job, run.layout, folder)
    proven = proof.to_line() if proof else record.NOT_PROVEN
    tried = run.assembly.model.spec.tried if run.layout.world_size > 1 else ()
    log.show_proof(proven, waived, tried)
    origin = checked.first_weights.origin if checked.first_weights else ""
    known = (proven, waived, tried, (*workload.remarks, *workload.data_remarks), origin, run.changes)
    held_out = losses.get(run.job.judge or "")
    summary = Summary(
        folder,
        run.steps_taken,
        log.last_loss,
        held_out,
        accuracy,
        stopped,
        *known,
        held_out_losses=losses,
        goodput=log.goodput.fraction,
        seconds=log.goodput.seconds,
    )
    write_whole(folder / run_folder.SUMMARY, summary.to_json() + "\n")
    return summary


def _print_sample(run: Run, log: RunLog | NoLog, when: str) -> None:
    """Print a text sample of a language model on rank 0; every rank must call it, since weights may be cut."""
    train, layout = run.job.train, run.layout
    if not train.sample_tokens or not run.job.data.is_text:
        return
    if run.place.rank and layout.zero < 2 and not layout.borrows_data_ranks and layout.dp_cp_size == layout.world_size:
        return  # rank 0 holds all weights and samples alone
    text = sample_text(run, train.prompt, train.sample_tokens, train.sample_temperature)
    if text is not None:
        log.say(f"--- sample, {when}\n{printable(text)}\n---")


class Saver:
    """The checkpoints of a run; with `checkpoint.background` one of them may still be on its way to the disk."""

    def __init__(self, run: Run, folder: Path, say: Callable[[str], object]) -> None:
        self._run, self._folder, self._say = run, folder, say
        self._settings = run.job.checkpoint
        self._retention = Retention(self._settings.keep, self._settings.keep_every)
        self._writing: Writing | None = None

    def is_due(self, report: StepReport) -> bool:
        """Return whether a checkpoint follows a step that is not the last one."""
        every = self._settings.every
        return report.save or (every > 0 and report.step % every == 0)

    def save(self, *, is_last: bool) -> None:
        """Save a checkpoint once the one before is on disk; the last one is on disk when this returns.

        Collective over the world, see [Note: collective calls].

        Raises:
            SaveError: the last one cannot be written, or another one where `checkpoint.on_failure` is "stop".
        """
        self._try(self._finish, must=False)
        self._try(self._begin, must=is_last)
        if is_last or not self._settings.background:
            self._try(self._finish, must=is_last)

    def roll_back(self, step: int) -> str:
        """Restore weights and states of the newest checkpoint and continue after `step`; return one line that says so.

        Collective over the world, see [Note: collective calls].

        Raises:
            CheckpointError: the checkpoint is damaged.
        """
        run = self._run
        self._try(self._finish, must=False)
        newest = gather_values(str(manifests.latest(self._folder) or ""), run.layout.world_size)[0]
        if not newest:
            return f"step {step}: there is no checkpoint to go back to"
        spikes = run.spikes.count
        checkpoint.load(run, Path(newest))
        back, run.steps_taken, run.spikes.count = run.steps_taken, step, spikes
        run.held.catch_up(step)
        return f"step {step}: continues with the weights from after step {back}, without the samples since"

    def _begin(self) -> None:
        self._writing = checkpoint.begin(self._run, self._folder, self._retention)

    def _finish(self) -> None:
        writing, self._writing = self._writing, None
        if writing is not None:
            checkpoint.finish(self._run, writing)

    def _try(self, save: Callable[[], None], *, must: bool) -> None:
        try:
            save()
        except SaveError as error:
            if must or self._settings.on_failure == "stop":
                raise
            self._say(f"warning: {error}; training continues")


T = TypeVar("T")

EVERY = 10
"""Steps between two collections."""
THRESHOLD = 50_000
"""Objects that must have become more since the last collection for Python to collect by itself."""


def collect_after_steps(steps: Iterable[T]) -> Iterator[T]:
    """Yield all steps; collect garbage after every tenth, without the objects that exist after the first one.

    Where other code has frozen objects, which cannot be distinguished from these, nothing is done.

    A process that has imported torch and transformers holds 400,000 objects that it keeps. A full collection goes through all of
    them: a quarter of a second, in which every other rank waits, at a different time on each rank. `gc.freeze` leaves them out, and the
    young ones are collected after every tenth step, when all ranks are between two steps. Between two of these, Python collects by itself
    only if a step makes many more objects than usual, so that cycles which hold memory do not pile up.

    Frozen objects that become garbage are freed only when the training ends. So this is done only if samestep itself takes the steps: a
    user's loop may drop a model that it has trained before, and would keep its memory. If a user's code calls `gc.enable`,
    `gc.disable` or `gc.set_threshold` in a step, that decides from then on.
    """
    settings_before = (gc.isenabled(), gc.get_threshold())
    ours = (gc.isenabled(), (THRESHOLD, *settings_before[1][1:]))
    is_frozen = False
    try:
        for number, step in enumerate(steps):
            yield step
            if number == 0 and not gc.get_freeze_count():
                gc.collect()
                gc.freeze()
                is_frozen = True
                if settings_before == (True, gc.get_threshold()):
                    gc.set_threshold(*ours[1])
            elif is_frozen and number % EVERY == 0 and ours == (gc.isenabled(), gc.get_threshold()):
                gc.collect(1)
    finally:
        if is_frozen:
            gc.unfreeze()
        if is_frozen and ours == (gc.isenabled(), gc.get_threshold()):
            gc.set_threshold(*settings_before[1])


_MOST_ALLOCATIONS = 1_000_000
"""The number of allocations whose history is kept; older ones are forgotten."""


class Profiler(StepObserver):
    """Profiles some steps of a run; an observer that labels tasks and forwards in them, and does nothing in others."""

    def __init__(self, steps: range, folder: Path, place: RankInfo) -> None:
        self._steps, self._folder, self._place = steps, folder / "profile", place
        self._profile: profile | None = None
        self._hooks: list[RemovableHandle] = []

    @contextmanager
    def step(self, number: int, run: Run) -> Iterator[None]:
        """Surround a step of a prepared run by its number, counted from 1."""
        if number in self._steps and self._profile is None:
            self._start(run.model, run.assembly.model.spec)
        yield
        if number + 1 not in self._steps:
            self.close()

    def running(self, task: Task, samples: Indices) -> AbstractContextManager[None]:
        """Return a context that labels the operations of a task in the profile."""
        if self._profile is None:
            return nullcontext()
        label: AbstractContextManager[None] = RecordFunctionFast(f"samestep::task {task.kind}{task.microbatch}")
        return label

    def close(self) -> None:
        """Write the profile, if there is one."""
        if self._profile is None:
            return
        running, self._profile = self._profile, None
        running.__exit__(None, None, None)
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self._folder.mkdir(exist_ok=True)
        name = f"steps-{self._steps.start}-{self._steps.stop - 1}.rank{self._place.rank}"
        running.export_chrome_trace(str(self._folder / f"{name}.json.gz"))
        if self._place.device.type == "cuda":
            torch.cuda.memory._dump_snapshot(str(self._folder / f"{name}.memory.pickle"))
            torch.cuda.memory._record_memory_history(enabled=None)

    def _start(self, module: nn.Module, spec: ModelSpec) -> None:
        activities = [ProfilerActivity.CPU]
        if self._place.device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
            torch.cuda.memory._record_memory_history(max_entries=_MOST_ALLOCATIONS)
        here = dict(module.named_modules())
        for layer in spec.layers:
            for path in layer.modules:
                if path and path in here:  # other stages hold other layers
                    self._hooks += _label_forwards(here[path], f"samestep::op forward:{layer.name}")
        self._profile = profile(
            activities=activities, profile_memory=True, acc_events=True
        )  # without, torch may warn of cycles
        self._profile.__enter__()


def _label_forwards(module: nn.Module, name: str) -> tuple[RemovableHandle, RemovableHandle]:
    """Label the forwards of a module; calls within calls close in reverse order."""
    open_labels: list[Any] = []

    def enter(*_: Any) -> None:
        label = RecordFunctionFast(name)
        label.__enter__()
        open_labels.append(label)

    def leave(*_: Any) -> None:
        if open_labels:
            open_labels.pop().__exit__(None, None, None)

    return module.register_forward_pre_hook(enter), module.register_forward_hook(leave, always_call=True)
