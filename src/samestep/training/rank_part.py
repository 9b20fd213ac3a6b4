"""One rank's part of a training: it prepares or resumes the run, takes its steps, evaluates, and saves.

```
prepare, load ─► for report in steps_of(run, ...):   log ─► evaluate ─► go back after a spike ─► save     ─► evaluate, result
```
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator

from samestep.datasets import Dataset, batches
from samestep.errors import OutOfMemoryError
from samestep.output.output_file import write_whole
from samestep.program import recorded
from samestep.proof import record
from samestep.runtime.checkpoints import checkpoint
from samestep.runtime.processes import whereabouts
from samestep.runtime.processes.join import RankInfo
from samestep.runtime.run import Run
from samestep.runtime.step_report import StepReport
from samestep.training import evaluations, out_of_memory, run_folder
from samestep.training.check import Checked
from samestep.training.garbage import collect_after_steps
from samestep.training.profiling import Profiler
from samestep.training.run_log import NoLog, RunLog
from samestep.training.saving import Saver
from samestep.training.slow_ranks import watch_of
from samestep.training.summary import Summary
from samestep.training.trained import printable, sample_text
from samestep.training.workload import held_out_accuracy, held_out_losses, use_evaluated_weights

OnStep = Callable[[StepReport, bool], None]
"""A function that is called behind each step, with its report and whether it is the last."""


def work(place: RankInfo, checked: Checked, on_step: OnStep | None = None) -> Summary | None:
    """Do one rank's part of a run; return its result on rank 0.

    Raises:
        OutOfMemoryError: memory ran out on this rank.
    """
    job = checked.workload.job
    profiler = Profiler(job.run.profiled_steps, checked.folder, place)
    run = Run(checked.workload.source, checked.layout, job, place, profiler, owns_weights=True)
    try:
        return _train(run, checked, profiler, on_step)
    except Exception as error:
        if not out_of_memory.is_shortage(error):
            raise
        text = out_of_memory.shortage(error, run)
    # Outside the except clause, where the tensors of the failed step are freed: the search needs memory too.
    raise OutOfMemoryError(f"{text}\n{out_of_memory.less_memory(checked, place.device.type)}")


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
        run.record(run.job.train.record, folder / recorded.FOLDER, kernels=run.job.train.record_kernels)
    log = NoLog() if run.place.rank else RunLog(checked, run)
    if first < checked.until:
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
            _print_sample(run, log, "after training")
    waived = run.all_waived()
    if isinstance(log, NoLog):
        return None
    log.end(evaluated, losses, accuracy)
    if stopped:
        log.say(f"stopped after step {run.steps_taken}; --resume --out {folder} resumes it")
    proof = record.find_record(run.job, run.layout, folder)
    proven = proof.to_line() if proof else record.NOT_PROVEN
    tried = run.assembly.model.spec.tried if run.layout.world_size > 1 else ()
    log.show_proof(run, proven, waived, tried)
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
