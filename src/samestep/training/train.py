"""The verb `train`: start the workers of a job, take its steps, and write metrics and checkpoints.

```
train ── check: every mistake that can be found ── run_workers ──► _work on every rank
         the model is built and traced once                           for report in steps_of(run, ...): log, save
```
The model is built and traced before the workers are forked, so that importing torch, the build and the trace happen once
instead of once a rank; so it is on each of several hosts (`training/hosts.py`). Under torchrun or srun this process is a
worker already, and calls `_work` itself.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import secrets
import signal
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from samestep import calls
from samestep.building.pretrained_form import unread_tokenizer
from samestep.datasets import Dataset, batches
from samestep.errors import JobError, OutOfMemoryError, RunError, WorkerError
from samestep.job import Job
from samestep.layout import Layout
from samestep.output.output_file import write_whole
from samestep.program import recorded
from samestep.proof import record
from samestep.proof.record import ProofRecord
from samestep.proof.verify import verify
from samestep.runtime.assembly import store_of
from samestep.runtime.checkpoints import checkpoint
from samestep.runtime.processes import hang_watch, join, local_workers, whereabouts, workers
from samestep.runtime.processes.join import RankInfo
from samestep.runtime.processes.meeting import Meeting, Rendezvous, meet
from samestep.runtime.run import Run
from samestep.runtime.step_report import StepReport
from samestep.training import evaluations, foreign_code, hosts, out_of_memory, run_folder
from samestep.training.check import AUTO, Checked, check, decide_on_rank_0
from samestep.training.elastic import Elasticity, restarting
from samestep.training.garbage import collect_after_steps
from samestep.training.metrics import Metrics, Screen, speed_of
from samestep.training.profiling import Profiler
from samestep.training.saving import Saver
from samestep.training.trackers import open_trackers
from samestep.training.trained import printable, sample_text
from samestep.training.workload import (
    Workload,
    describe_losses,
    held_out_accuracy,
    held_out_losses,
    use_evaluated_weights,
)


@dataclass(frozen=True, slots=True)
class Summary:
    """The result of a run: its folder, its steps and its losses."""

    folder: Path
    steps: int
    """The number of steps taken in all, including those before a resume."""
    loss: float | None
    """The training loss of the last step, a mean over counted tokens; None where it was not finite."""
    held_out_loss: float | None
    """The mean loss over the held-out samples, of several sets the one that decides (`train.judged_by`); None where nothing is
    held out or the run was stopped."""
    held_out_accuracy: float | None
    """The fraction of the held-out samples whose class is found; None where a sample has no class."""
    stopped: bool
    """Whether the run was asked to stop before its last step."""
    proof: str = ""
    """When and how the layout was proven to give one device's result, or that it is not proven."""
    waived: tuple[str, ...] = ()
    """The refusals that the run met and `run.allow` waived."""
    tried: tuple[str, ...] = ()
    """What a trial has passed and no rule shows, such as an operation of a library."""
    remarks: tuple[str, ...] = ()
    """Tensors that the folder of `model.source` lacks, which were made as in a new model, and those that it has besides."""
    started_from: str = ""
    """The weights of another run or folder from which it started, as `--init-from` says."""
    changes: tuple[str, ...] = ()
    """What resumes have changed of the job and its layout, and after which steps."""
    held_out_losses: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """The mean loss of each held-out set, by name; `held_out` is the part of the data that is held out."""
    stop_signal: int = 0
    """The signal that stopped it, with whose status the command ends; 0 without one, and under torchrun."""

    def to_record(self) -> dict[str, Any]:
        """Return it as plain data, but for its path."""
        return dataclasses.asdict(self)

    def to_json(self) -> str:
        """Return it as JSON."""
        return json.dumps(self.to_record(), indent=1, default=str)

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> Summary:
        """Return it from what `to_json` wrote."""
        values: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in record.items()
        }
        return cls(**{**values, "folder": Path(record["folder"])})


OnStep = Callable[[StepReport, bool], None]
"""A function that is called behind each step, with its report and whether it is the last."""


@calls.checked
def train(
    job: Job,
    *,
    layout: Layout | str | None = None,
    ranks: int | None = None,
    steps: int | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    init_from: str | Path | None = None,
    auto_resume: bool = False,
    prove: bool = False,
    rendezvous: Rendezvous | None = None,
    least_ranks: int | None = None,
    allow_code: bool = False,
    on_step: OnStep | None = None,
) -> Summary | None:
    """Train `job` in a layout, on this machine's workers, with those of other hosts, or as one rank of torchrun or srun.

    Args:
        job: what is computed.
        layout: where it is computed; by default the job's own layout, or else replicas over all ranks. `auto` takes the
            layout that is predicted to be the fastest on this machine.
        ranks: the number of worker processes; by default the number of ranks of the layout.
        steps: end after this step; the learning-rate schedule stays that of the job's own number of steps.
        out: the run folder; by default a new one below `runs`.
        resume: resume from the newest checkpoint in `out`, or without `out` in the newest run below `runs`.
        init_from: a run folder, a checkpoint, of torch.distributed.checkpoint too, or a folder of transformers, from whose
            weights a new run starts.
        auto_resume: resume from the newest whole checkpoint in `out` if there is one, or else start there; a run that has
            taken its last step is left as it is.
        prove: first prove, as `verify` does, that the layout gives the result of one device; train nothing if it does not.
        rendezvous: where this host meets the others, each of which calls `train` with the same arguments.
        least_ranks: where ranks are lost for good, a restart (`run.restarts`) goes on with as few as these; by default it
            needs all. The global batch and its samples stay; only data degrees shrink, or `layout="auto"` plans anew.
        allow_code: run functions that the checkpoint of `init_from` names, and neither this job nor a run before has named.
        on_step: under a launcher of ranks, called on every rank behind each step, with its report and whether it is the last.

    Returns:
        The result of the run; None on ranks of torchrun or srun other than 0.

    Raises:
        InputError: the job, layout or data cannot run; nothing has been started or written.
        WorkerError: a worker process died; the first line of the text names it and the cause.
    """
    run = job.run
    given = {"layout": layout, "ranks": ranks, "steps": steps, "out": out}
    given |= {"resume": resume, "init_from": init_from, "auto_resume": auto_resume}
    given["allow_code"] = allow_code
    if least_ranks is not None and not run.restarts:
        raise JobError(
            f"--ranks {least_ranks}:{ranks} lets a restart go on with fewer ranks, and run.restarts = 0: "
            f"--set run.restarts=3 works"
        )
    place, info = None, hosts.launched_by(rendezvous)
    if (info.is_engine or info.num_hosts > 1) and (prove or rendezvous):
        flag = "--prove" if prove else "--rendezvous"
        more = "; prove it with samestep verify, whose proof a run finds" if prove else ""
        raise JobError(f"{flag} starts workers of its own, and the launcher has started this one: leave it out{more}")
    if info.num_hosts > 1:
        return hosts.run_share(job, given, info, _rank_of_host)
    if info.is_engine:
        given_to_join: dict[str, Any] = {"timeout_s": run.timeout_s, "ranks_per_node": run.ranks_per_node}
        place = join.join(run.device, **given_to_join, threads=run.threads, may_renew=True)
    if rendezvous is None:
        workers.say_inside(info)
        return _lead_workers(job, given, place, prove, Elasticity(least_ranks, layout == AUTO), on_step=on_step)
    return _on_hosts(job, given, prove, least_ranks, rendezvous)


def _rank_of_host(place: RankInfo, job: Job, given: Mapping[str, Any]) -> tuple[Summary | None, int]:
    """Do one rank's part as under a launcher of ranks; return its result, and the signal that stopped the run."""
    return _lead_workers(job, given, place, False, Elasticity(None, plans_anew=False)), join.ended_by()


def _on_hosts(
    job: Job, given: Mapping[str, Any], prove: bool, least_ranks: int | None, rendezvous: Rendezvous
) -> Summary:
    """Lead a run on several hosts, or follow the one that does; where that one is lost, go on with those that are left."""
    mine = hosts.identity(job, {**given, "prove": prove, "least_ranks": least_ranks})
    meeting = meet(rendezvous, mine, job.run.timeout_s)
    while True:
        with meeting:
            if meeting.leader is None:
                elastic = Elasticity(least_ranks, given["layout"] == AUTO, meeting)
                summary = _lead_workers(job, given, None, prove, elastic, rendezvous.num_hosts)
                assert summary is not None
                meeting.dismiss(json.loads(summary.to_json()))
                return summary
            last = hosts.follow(meeting, job, given["init_from"], _work, allow_code=given["allow_code"])
        if not isinstance(last, hosts.Lost):
            return Summary.of(last)
        if least_ranks is None:
            raise WorkerError(f"{last.why}; --ranks MIN:MAX lets the others go on, and --auto-resume all of them later")
        meeting = hosts.meet_again(last, rendezvous, mine)
        given, prove = {**given, "out": last.folder, "resume": False, "auto_resume": True}, False


def _lead_workers(
    job: Job,
    given: Mapping[str, Any],
    place: RankInfo | None,
    prove: bool,
    elastic: Elasticity,
    num_hosts: int = 1,
    on_step: OnStep | None = None,
) -> Summary | None:
    """Check a run and carry it out: on workers of this host and of those that it leads, or as one rank of a launcher."""
    meeting = elastic.meeting
    checked = check(job, **given, place=place, num_hosts=num_hosts)
    if given["auto_resume"] and checked.is_finished:
        print(f"{checked.folder} is finished: step {checked.until} was its last", flush=True)
        return Summary(checked.folder, checked.until, None, None, None, stopped=False)
    if meeting and meeting.num_hosts < num_hosts:
        checked = elastic.on_hosts_left(checked, num_hosts)
    is_first = place is None or place.rank == 0
    if is_first:
        foreign_code.note(job)
        if checked.why:
            print(checked.why, flush=True)
        _warn(checked, place, meeting)
    proof = _proven(checked) if prove else None
    with contextlib.ExitStack() as stack:
        is_new = not (given["resume"] or given["auto_resume"])
        decide_on_rank_0(lambda: _claim(checked, stack, is_new=is_new) if is_first else None, place)
        if proof is not None:
            record.keep(proof, checked.folder)
        if place is None:
            return _by_workers(checked, elastic)
        start = decide_on_rank_0(lambda: secrets.token_hex(8), place)
        try:
            with hang_watch.watching(place, job.run.hang_s, start):
                summary = _work(place, checked, on_step)
                stack.close()
                if join.ended_by():  # a launcher kills the others once one rank ends with the status of a signal
                    decide_on_rank_0(lambda: None, place)
                return _note_stop_signal(summary, join.ended_by())
        finally:
            join.leave()


def _claim(checked: Checked, stack: contextlib.ExitStack, *, is_new: bool) -> None:
    """Keep other runs out of the run folder until the stack is left, and set damaged checkpoints aside."""
    stack.enter_context(run_folder.claim_folder(checked.folder, is_new=is_new))
    for _, wrong in checked.passed_over:
        print(f"{wrong}; it is set aside", flush=True)
    run_folder.set_aside(path for path, _ in checked.passed_over)


def _by_workers(checked: Checked, elastic: Elasticity) -> Summary | None:
    """Run the workers of this host and of those that it leads, again where one fails and `run.restarts` says so, and return the result."""
    run = checked.workload.job.run
    store_of(checked.layout)

    def work(checked: Checked) -> Summary | None:
        return workers.run_workers(
            _work,
            (checked,),
            ranks=checked.layout.world_size,
            device=run.device,
            threads=run.threads,
            timeout_s=run.timeout_s,
            hang_s=run.hang_s,
            ranks_per_node=run.ranks_per_node,
            away=hosts.away(checked, elastic.meeting) if elastic.meeting else None,
        )

    try:
        summary = restarting(work, checked, elastic)
        return _note_stop_signal(summary, workers.last_stop_signal() or signal.SIGTERM)
    except WorkerError as error:
        first, device = str(error).partition("\n")[0], join.resolve_device(run.device)
        is_shortage = local_workers.OUT_OF_MEMORY in first
        # A worker killed by the kernel leaves no report of its own: only the prediction can be shown.
        if is_shortage or ("killed by SIGKILL" in first and out_of_memory.is_too_large(checked, device)):
            raise WorkerError(f"{error}\n{out_of_memory.less_memory(checked, device)}") from None
        raise WorkerError(run_folder.with_way_on(str(error), checked.folder)) from None


def _note_stop_signal(summary: Summary | None, number: int) -> Summary | None:
    """Return the result of a run with the signal that stopped it, if it was stopped."""
    return dataclasses.replace(summary, stop_signal=int(number)) if summary and summary.stopped else summary


def _proven(checked: Checked) -> ProofRecord:
    """Prove the run's layout before it is trained, and return the record.

    Raises:
        RunError: the layout differs from one device.
    """
    job = checked.workload.job
    verdict = verify(job, layout=checked.layout)
    if not verdict.proven:
        raise RunError(f"--prove: nothing is trained, since the layout is not one device:\n{verdict.to_text()}")
    print(verdict.to_text(), flush=True)
    return record.record_of(job, verdict)


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


def _work(place: RankInfo, checked: Checked, on_step: OnStep | None = None) -> Summary | None:
    """Do one rank's part of a run.

    Raises:
        OutOfMemoryError: memory ran out on this rank.
    """
    job = checked.workload.job
    profiler = Profiler(job.run.profiled_steps, checked.folder, place)
    run = Run(checked.workload.source, checked.layout, job, place, profiler, owns_weights=True)
    try:
        return _train_rank(run, place, checked, profiler, on_step)
    except Exception as error:
        if not out_of_memory.is_shortage(error):
            raise
        text = out_of_memory.shortage(error, run)
    # Outside the except clause, where the tensors of the failed step are freed: the search needs memory too.
    raise OutOfMemoryError(f"{text}\n{out_of_memory.less_memory(checked, place.device.type)}")


def _train_rank(
    run: Run, place: RankInfo, checked: Checked, profiler: Profiler, on_step: OnStep | None
) -> Summary | None:
    """Prepare or resume the run, take its remaining steps, and print and write its progress and its result."""
    workload, folder, until = checked.workload, checked.folder, checked.until
    run.data.is_of(workload.stamp)
    run.prepare(workload.example)
    if checked.resume_from is not None:
        checkpoint.load(run, checked.resume_from)
    if checked.first_weights is not None:
        checked.first_weights.load(run)
    first = run.steps_taken
    if run.job.train.record:
        run.record(run.job.train.record, folder / recorded.FOLDER)
    screen = metrics = None
    if place.rank == 0:
        _write_head(checked)
        speed, every = speed_of(workload.spec, run.job, run.layout, place.device), run.job.run.log_every
        trackers = open_trackers(run.job, folder, first)
        screen, metrics = (
            Screen(first, until, speed, every, workload.counted),
            Metrics(folder, first, trackers, speed, every),
        )
        _say_start(screen, checked, run)
    if first < until:
        with use_evaluated_weights(run):
            _print_sample(run, workload, screen, "before training" if first == 0 else "resumed")
    rule = evaluations.EvaluationRule.of(run.job, workload)
    evaluated = evaluations.resume_evaluations(run, rule, folder, screen.say if screen else lambda text: None, first)
    _loop(evaluated, workload.dataset, until, profiler, screen, metrics, on_step)
    with whereabouts.apart("the evaluation at the end"):
        return _finish(evaluated, checked, screen, metrics)


def _finish(
    evaluated: evaluations.Evaluations, checked: Checked, screen: Screen | None, metrics: Metrics | None
) -> Summary | None:
    """Evaluate a run that has taken its steps or was stopped, and print and write its result."""
    run, workload, folder = evaluated.run, checked.workload, checked.folder
    stopped = run.steps_taken < checked.until and not evaluated.is_over
    losses: dict[str, float] = {}
    accuracy = None
    if not stopped:
        with use_evaluated_weights(run):
            losses, accuracy = held_out_losses(run, workload), held_out_accuracy(run, workload)
            _print_sample(run, workload, screen, "after training")
    waived = run.all_waived()
    if screen is None or metrics is None:
        return None
    metrics.close()
    _say_held_out(screen, evaluated, losses)
    if accuracy is not None:
        screen.say(f"held-out accuracy {accuracy:.1%}")
    if stopped:
        screen.say(f"stopped after step {run.steps_taken}; --resume --out {folder} resumes it")
    proof = record.find_record(run.job, run.layout, folder)
    proven = proof.to_line() if proof else record.NOT_PROVEN
    tried = run.assembly.model.spec.tried if run.layout.world_size > 1 else ()
    _say_shown(screen, run, proven, waived, tried)
    took, loss = run.steps_taken, metrics.last_loss
    origin = checked.first_weights.origin if checked.first_weights else ""
    known = (proven, waived, tried, (*workload.remarks, *workload.data_remarks), origin, run.changes)
    held_out = losses.get(run.job.judge or "")
    summary = Summary(folder, took, loss, held_out, accuracy, stopped, *known, held_out_losses=losses)
    write_whole(folder / "summary.json", summary.to_json() + "\n")
    return summary


def _say_start(screen: Screen, checked: Checked, run: Run) -> None:
    """Print what is trained, where, and from which weights."""
    workload, job, first = checked.workload, checked.workload.job, run.steps_taken
    words = (
        f"{workload.spec.name}: {workload.spec.num_params:,} weights, layout {str(checked.layout)!r}, {checked.folder}"
    )
    screen.say(words if checked.resume_from is None else f"{words}, resumes after step {first}")
    for change in run.changes:
        screen.say(change)
    if checked.first_weights is not None:
        screen.say(f"starts from the weights of {checked.first_weights.origin}")
    for remark in (*(f"{job.model.source}: {one}" for one in workload.remarks), *workload.data_remarks):
        screen.say(remark)
    if first == checked.until:
        screen.say(f"step {first} was the last step: nothing is left to train")
    elif job.run.compile != "none":
        screen.say(
            f"run.compile: step {first + 1} compiles the blocks by {job.run.compile_backend}, which takes a while"
        )


def _say_held_out(screen: Screen, evaluated: evaluations.Evaluations, losses: Mapping[str, float]) -> None:
    """Print the held-out losses at the end of a run, and whether the run ended because it did not become less."""
    if evaluated.is_over and evaluated.best is not None:
        best = evaluated.best
        screen.say(f"ends early: no held-out loss since step {best.step} was below {best.loss:.4f}")
    if losses:
        screen.say(describe_losses(losses, evaluated.run.job.judge))


def _say_shown(screen: Screen, run: Run, proven: str, waived: tuple[str, ...], tried: tuple[str, ...]) -> None:
    """Print whether the layout is proven, what is allowed or tried instead, and what ranks of tp compute whole."""
    lines = [proven, *(f"not proven, but allowed: {text}" for text in waived)]
    if tried:
        lines.append(f"tried, not proven: {_some(tried)}")
    reasons: dict[str, list[str]] = {}
    for path, reason in run.assembly.model.gathered.items():
        reasons.setdefault(reason, []).append(path)
    lines += [
        f"tp: every rank computes what follows {_some(paths)} whole, since {reason}"
        for reason, paths in reasons.items()
    ]
    for line in lines:
        screen.say(line)


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def _loop(
    evaluated: evaluations.Evaluations,
    dataset: Dataset,
    until: int,
    profiler: Profiler,
    screen: Screen | None,
    metrics: Metrics | None,
    on_step: OnStep | None,
) -> None:
    """Take the remaining steps and log each; evaluate and save checkpoints as often as the job says, and save after the last."""
    run, folder = evaluated.run, evaluated.folder
    until = run.steps_taken if evaluated.is_over else until
    saver = Saver(run, folder / run_folder.CHECKPOINTS, screen.say if screen else lambda text: None)
    with screen.live() if screen else contextlib.nullcontext():
        for report in collect_after_steps(steps_of(run, dataset, until, profiler)):
            with whereabouts.apart("an evaluation"):
                losses = evaluated.losses() if evaluated.is_due(report.step) and not report.stop else {}
            if screen is not None and metrics is not None:
                logged = dataclasses.replace(report, held_out=losses) if losses else report
                metrics.write(logged, is_last=report.stop or report.step == until, sums=run.recorder.sums)
                screen.show(logged)
            with whereabouts.apart("a save of the best weights"):
                line = evaluated.add(report.step, losses) if losses else ""
            if screen is not None and line:
                screen.say(line)
            if run.job.numerics.on_spike == "rollback" and report.spike:
                with whereabouts.apart("a way back to a checkpoint"):
                    line = saver.roll_back(report.step)
                if screen is not None:
                    screen.say(line)
            is_last = report.stop or report.step == until or evaluated.is_over
            if is_last or saver.is_due(report):
                if metrics is not None:
                    metrics.sync()  # before the checkpoint, which must never be ahead of the log
                with whereabouts.apart("a save"):
                    saver.save(is_last=is_last)
            if on_step is not None:
                on_step(report, is_last)
            if is_last:
                break
    profiler.close()  # a run that was stopped
    run.recorder.close()


def _print_sample(run: Run, workload: Workload, screen: Screen | None, when: str) -> None:
    """Print a text sample of a language model on rank 0; every rank must call it, since weights may be cut."""
    train = run.job.train
    if not train.sample_tokens or not run.job.data.is_text:
        return
    layout = run.layout
    if screen is None and layout.zero < 2 and not layout.borrows_data_ranks and layout.dp_cp_size == layout.world_size:
        return  # rank 0 holds all weights and samples alone
    text = sample_text(run, train.prompt, train.sample_tokens, train.sample_temperature)
    if screen is not None and text is not None:
        screen.say(f"--- sample, {when}\n{printable(text)}\n---")


def _warn(checked: Checked, place: RankInfo | None, meeting: Meeting | None) -> None:
    """Warn about settings that have no effect on this machine, or a bad one."""
    job = checked.workload.job
    run = job.run
    if folder := unread_tokenizer(job):
        warnings.warn(
            f"text becomes bytes, not tokens of the model: data.tokenizer = {str(folder)!r} reads its own", stacklevel=3
        )
    on_cpu = place.device.type == "cpu" if place else run.device == "cpu" or not torch.cuda.device_count()
    if checked.layout.offload and on_cpu:
        warnings.warn(
            "offload moves the optimizer's state to the host; on a CPU it is there already, so nothing is saved",
            stacklevel=3,
        )
    here = checked.layout.world_size // (meeting.num_hosts if meeting else 1)
    if place is None and on_cpu and (text := workers.oversubscription_warning(here, run.threads)):
        warnings.warn(text, stacklevel=3)


def _write_head(checked: Checked) -> None:
    """Write the resolved job and the layout into the run folder."""
    write_whole(checked.folder / run_folder.JOB, checked.job.to_toml(with_folder=True))
    write_whole(checked.folder / "layout.txt", f"{checked.layout}\n")
