"""The verb `train`: from a job to a trained model, a loop over steps and the files it leaves.

```
train ── check: everything, before anything starts ── run_workers ──► _work on every rank
         builds and traces the model once                                for report in steps_of(run, ...): log, save
```
What a worker needs is made before the workers are forked, so that `import torch`, the build and the trace are paid
once. Started by torchrun or srun, this process is a worker already and does the same work itself.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from samestep import hardware
from samestep.datasets import Batch, Dataset, batches, sample_indices
from samestep.errors import (
    OutOfMemoryError,
    WorkerError,
)
from samestep.job import Job
from samestep.layout import Layout
from samestep.output.byte_sizes import readable
from samestep.output.output_file import write_whole
from samestep.planning.nearest_layout import nearest
from samestep.runtime import checkpoint
from samestep.runtime.assembly import store_of
from samestep.runtime.processes import join, workers
from samestep.runtime.processes.join import RankInfo
from samestep.runtime.run import Run
from samestep.runtime.step_report import StepReport
from samestep.simulation import memory
from samestep.simulation.prediction import predict
from samestep.training import out_of_memory, run_folder
from samestep.training.check import _CLEARLY_LESS, Checked, check
from samestep.training.metrics import Metrics, Screen
from samestep.training.sampling import _printable, sample_text
from samestep.training.workload import Workload, _is_text


@dataclass(frozen=True, slots=True)
class Summary:
    """What a run ended with."""

    folder: Path
    steps: int
    """Taken in all, those before a resume included."""
    loss: float | None
    """Of the last step."""
    held_out_loss: float | None
    stopped: bool
    """It was asked to stop before its last step."""


def train(
    job: Job,
    *,
    layout: Layout | str | None = None,
    ranks: int | None = None,
    steps: int | None = None,
    out: str | Path | None = None,
    resume: bool = False,
) -> Summary | None:
    """Train `job` in a layout, on this machine's workers or as one rank of torchrun or srun.

    Args:
        job: what to compute.
        layout: where; without it the job's own, and without that replicas over all ranks. `auto` searches for it.
        ranks: worker processes; without it as many as the layout has.
        steps: end after this step; the learning rate goes on as if the job's own number were meant.
        out: the run folder; without it a new one below `runs`.
        resume: go on from the newest checkpoint in `out`; without `out`, in the newest run below `runs`.

    Returns:
        What the run ended with; None on ranks other than 0.

    Raises:
        InputError: the job, layout or data cannot run; nothing has been started or written.
        WorkerError: a worker died.
    """
    run = job.run
    place = None
    if join.launched_from_outside():
        place = join.join(run.device, timeout_s=run.timeout_s, ranks_per_node=run.ranks_per_node, threads=run.threads)
    checked = check(job, layout=layout, ranks=ranks, steps=steps, out=out, resume=resume, place=place)
    if place is None or place.rank == 0:
        if checked.why:
            print(checked.why, flush=True)
        _warn(checked, place)
        run_folder.make(checked.folder)
    if place is not None:
        try:
            return _work(place, checked)
        finally:
            join.leave()
    store_of(checked.layout)
    try:
        return workers.run_workers(
            _work,
            (checked,),
            ranks=checked.layout.world_size,
            device=run.device,
            threads=run.threads,
            timeout_s=run.timeout_s,
            ranks_per_node=run.ranks_per_node,
        )
    except WorkerError as error:
        if "out of memory?" not in str(error).partition("\n")[0]:
            raise
        cause = str(error)
    # The kernel kills without a word: what was predicted is all there is to say.
    raise WorkerError(f"{cause}\n{_less_memory(checked, join.resolve_device(run.device))}")


def steps_of(run: Run, dataset: Dataset, until: int) -> Iterator[StepReport]:
    """Take the steps up to number `until`, from where the run stands; end early when a rank was asked to stop."""
    for batch in batches(dataset, run.job, first_step=run.steps_taken):
        if batch.step >= until:
            return
        report = run.step(batch)
        yield report
        if report.stop:
            return


def _less_memory(checked: Checked, device_type: str) -> str:
    """Say what was predicted of the memory of a layout that ran out of it, and the nearest layout that needs less."""
    spec, job, layout = checked.workload.spec, checked.job, checked.layout
    machine, states = hardware.own_or("cpu-laptop"), memory.states_per_param(job)
    room = out_of_memory.limit_bytes(torch.device(device_type))
    room //= 1 if device_type == "cuda" else min(layout.world_size, job.run.ranks_per_node or layout.world_size)
    peak = predict(spec, job, layout, machine, states).peak
    parts = ", ".join(f"{name} {readable(size)}" for name, size in peak.parts().items())
    total = readable(peak.total)
    lines = [f"  predicted  {parts}; {total} in all at {peak.peak_at}, of {readable(room)} a rank"]
    # What was predicted to fit and did not is no guide: then what needs clearly less is.
    smaller = dataclasses.replace(machine, memory_bytes=max(1, int(min(room, _CLEARLY_LESS * peak.total))))
    near = nearest(spec, job, smaller, layout, layout.world_size, states)
    if near is not None:
        needs, step_s = readable(near.peak.total), f"{near.step_s:.3g} s"
        lines.append(f'  "{near.layout}" needs {needs} as predicted, and {step_s} a step')
    else:
        lines.append(f"  no layout of {layout.world_size} ranks needs clearly less")
    return "\n".join(lines)


def _work(place: RankInfo, checked: Checked) -> Summary | None:
    """Do one rank's part of a run.

    Raises:
        OutOfMemoryError: memory ran out here.
    """
    run = Run(checked.workload.source, checked.layout, checked.workload.job, place)
    try:
        return _trained(run, place, checked)
    except Exception as error:
        if not out_of_memory.is_shortage(error):
            raise
        text = out_of_memory.told(error, run)
    # Behind the clause, so that what the failed step held is free: the search for another layout needs room too.
    raise OutOfMemoryError(f"{text}\n{_less_memory(checked, place.device.type)}")


def _trained(run: Run, place: RankInfo, checked: Checked) -> Summary | None:
    """Train from where the run stands to its end, with all that is told and written on the way."""
    workload, folder, until = checked.workload, checked.folder, checked.until
    run.prepare(workload.example)
    if checked.resume_from is not None:
        checkpoint.load(run, checked.resume_from)
    first = run.steps_taken
    screen = metrics = None
    if place.rank == 0:
        _write_head(checked)
        screen, metrics = Screen(first, until), Metrics(folder, first)
        words = f"{workload.spec.name}: {workload.spec.num_params:,} weights, layout {str(checked.layout)!r}, {folder}"
        screen.say(words if checked.resume_from is None else f"{words}, goes on after step {first}")
        if first == until:
            screen.say(f"step {first} was the last: there is nothing left to train")
    if first < until:
        _say_sample(run, workload, screen, "before" if first == 0 else "resumed")
    _loop(run, workload, folder, until, screen, metrics)
    stopped = run.steps_taken < until
    held_out = None if stopped else _held_out_loss(run, workload)
    if not stopped:
        _say_sample(run, workload, screen, "after")
    if screen is None or metrics is None:
        return None
    metrics.close()
    if held_out is not None:
        screen.say(f"held-out loss {held_out:.4f}")
    if stopped:
        screen.say(f"stopped after step {run.steps_taken}; go on with --resume --out {folder}")
    summary = Summary(folder, run.steps_taken, metrics.last_loss, held_out, stopped)
    write_whole(folder / "summary.json", json.dumps(dataclasses.asdict(summary), indent=1, default=str) + "\n")
    return summary


def _loop(
    run: Run, workload: Workload, folder: Path, until: int, screen: Screen | None, metrics: Metrics | None
) -> None:
    """Take the steps, logging each; save now and then and after the last."""
    every = run.job.checkpoint.every
    with screen.live() if screen else contextlib.nullcontext():
        for report in steps_of(run, workload.dataset, until):
            if screen is not None and metrics is not None:
                metrics.write(report)
                screen.show(report)
            if report.stop or report.step == until or (every and report.step % every == 0):
                if metrics is not None:
                    metrics.sync()  # first: a checkpoint is never ahead of the log
                checkpoint.save(run, folder / "checkpoints", run.job.checkpoint.keep)


def _held_out_loss(run: Run, workload: Workload) -> float | None:
    """Return the mean loss over held-out samples, the same ones in every layout. Collective over the world."""
    if workload.held_out is None:
        return None
    count = min(run.job.train.evaluate_samples, len(workload.held_out))
    indices = sample_indices(0, count, len(workload.held_out), run.job.train.seed)
    loss, tokens = run.evaluate(Batch(0, indices, workload.held_out))
    return loss / tokens if tokens else math.nan


def _say_sample(run: Run, workload: Workload, screen: Screen | None, when: str) -> None:
    """Print a text sample of a language model. Every rank calls it; where weights are cut, every rank is needed."""
    train = run.job.train
    if not train.sample_tokens or not _is_text(run.job):
        return
    layout = run.layout
    if screen is None and layout.zero < 2 and not layout.borrows_data_ranks and layout.dp_cp_size == layout.world_size:
        return  # rank 0 has the weights whole, and the cores to itself
    text = sample_text(run, train.prompt, train.sample_tokens, train.sample_temperature)
    if screen is not None and text is not None:
        screen.say(f"--- sample, {when}\n{_printable(text)}\n---")


def _warn(checked: Checked, place: RankInfo | None) -> None:
    """Say once what will have no effect, or a bad one."""
    run = checked.workload.job.run
    on_cpu = place.device.type == "cpu" if place else run.device == "cpu" or not torch.cuda.device_count()
    if checked.layout.offload and on_cpu:
        warnings.warn(
            "offload moves optimizer state to the host, where a CPU has it already: it saves nothing", stacklevel=3
        )
    if place is None and on_cpu and (text := workers.oversubscribed(checked.layout.world_size, run.threads)):
        warnings.warn(text, stacklevel=3)


def _write_head(checked: Checked) -> None:
    """Write what the run is."""
    write_whole(checked.folder / run_folder.JOB, checked.job.to_toml())
    write_whole(checked.folder / "layout.txt", f"{checked.layout}\n")
