"""The checks of a run before any process starts: layout, ranks, steps, run folder, data, model, optimizer, checkpoint.

`train` and `train --dry-run` both call `check`, so that every run that a dry run accepts also starts. A mistake found
here costs seconds on one process instead of minutes on all of them. A dry run then shows the resolved job and each
rank's bytes and samples, and starts nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

import torch

from samestep import errors, hardware, wings
from samestep.errors import CheckpointError, JobError, LayoutError, SamestepError
from samestep.job import Job
from samestep.layout import Layout, layout_from
from samestep.memory.memory_use import MemoryUse, at_rest
from samestep.program.ranks import Ranks
from samestep.program.update_rules import states_per_param
from samestep.runtime import memory_limits
from samestep.runtime.axes import compiled_blocks, forward_state, recompute
from samestep.runtime.checkpoints import manifests
from samestep.runtime.optimizers.optimizer_source import check_optimizer
from samestep.runtime.processes import rank_order, workers
from samestep.runtime.processes.join import RankInfo, resolve_device
from samestep.runtime.processes.messages import broadcast_value
from samestep.strategies import program_of
from samestep.training import evaluations, run_folder, trackers
from samestep.training.first_weights import FirstWeights, refuse_resumed
from samestep.training.workload import Workload, step_samples

T = TypeVar("T")
AUTO = "auto"
"""The value of `layout` that asks for a search."""
_TRIED_LAYOUTS = 40
"""The number of the search's fastest layouts that are tested: the optimizer may not support the first ones."""


@dataclass(frozen=True, slots=True)
class Checked:
    """A run that has passed every check that is possible before a worker starts."""

    workload: Workload
    layout: Layout
    folder: Path
    until: int
    """The number of the last step, counted from 1."""
    resume_from: Path | None
    """The checkpoint folder to resume from; None for a new run."""
    first_weights: FirstWeights | None
    """The weights that a new run starts from, if not the model's own."""
    why: str = ""
    """The chosen layout and the reason for it, as text; empty where the layout was given."""
    passed_over: tuple[tuple[Path, str], ...] = ()
    """Checkpoints newer than the one to resume from, and the damage of each."""
    ranks_per_node: int | None = None
    """The number of ranks on one machine; None where all are."""
    name: str = ""
    """The first line that the run prints."""

    @property
    def is_finished(self) -> bool:
        """Whether the checkpoint to resume from is that of the last step."""
        return self.resume_from is not None and self.resume_from.name == f"step-{self.until:06d}"

    @property
    def job(self) -> Job:
        """The job with the layout written into it, so that the file in the run folder alone repeats the run."""
        return self.workload.job.model_copy(update={"layout": self.layout.options})


def check(
    job: Job,
    *,
    layout: Layout | str | None = None,
    ranks: int | None = None,
    steps: int | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    init_from: str | Path | None = None,
    auto_resume: bool = False,
    place: RankInfo | None = None,
    num_hosts: int = 1,
    allow_code: bool = False,
    name: str = "",
) -> Checked:
    """Check the arguments of `train` and return the run that they describe; nothing is started or written.

    Where `place` is given this process is one rank of an existing world, and the call is collective: every rank must
    call it, because rank 0 broadcasts its run folder and, under `layout="auto"`, its layout. If one rank does not, the
    others wait until the time limit of the process group. On several hosts the leading one calls it with their number.

    Raises:
        InputError: the job, layout or data cannot run; the text says what would work.
    """
    refuse_resumed(init_from, resume)
    ranks = place.world_size if place else ranks
    where = None if layout == AUTO else resolve_layout(job, layout, ranks, num_hosts)
    until = job.train.steps if steps is None else steps
    if until > job.train.steps:
        raise JobError(
            "schedule-too-long",
            f"--steps {until} is beyond train.steps = {job.train.steps}, where the learning-rate schedule ends. Use "
            f"--set train.steps={until}",
        )
    trackers.check(job)
    compiled_blocks.check(job.run)
    evaluations.check(job)
    folder = Path(decide_on_rank_0(lambda: str(run_folder.choose_folder(out, resume, auto_resume)), place))
    resume_from = _resume_from(folder, job, until) if resume and not auto_resume else None
    resume_from, passed_over = _whole_from(folder, job, until) if auto_resume else (resume_from, ())
    first_weights = (
        FirstWeights.of(init_from, job, allow_code) if init_from is not None and resume_from is None else None
    )
    workload = Workload(job, where)
    why = ""
    if where is None:
        words, why = decide_on_rank_0(lambda: search_layout(workload, ranks or job.run.ranks, num_hosts), place)
        where = Layout(words)
    per_node = place.ranks_per_node if place else job.run.ranks_per_node
    if per_node is None and num_hosts > 1:
        per_node = shares(where.world_size, num_hosts)[0]
    if place:
        rank_order.check(where, place.hosts)
    where, why = place_workload(workload, where, per_node, why)
    device = place.device if place else torch.device(resolve_device(job.run.device))
    if place or device.type == "cpu":  # ranks that this process forks ask their GPUs themselves
        peak = memory_limits.predicted_peak(workload.spec, job, where, per_node)
        memory_limits.refuse_too_large(peak, job, where, device, per_node)
    return Checked(workload, where, folder, until, resume_from, first_weights, why, passed_over, per_node, name)


def place_workload(workload: Workload, layout: Layout, ranks_per_node: int | None, why: str = "") -> tuple[Layout, str]:
    """Return the layout of a workload that is to run in `layout`, and the reasons for it as text.

    Raises:
        InputError: it cannot run in this layout.
    """
    workload.trace_for(layout)
    taken = recompute.layout_for(layout, workload.analysis)
    if taken != layout:
        layout, why = taken, "\n".join(filter(None, (why, recompute.TAKEN)))
    spec = check_optimizer(workload.source.optimizer, workload.spec, layout)
    program = program_of(spec, workload.job, layout, ranks_per_node)
    forward_state.check(workload.analysis.states, program, workload.job.run)
    return layout, why


def shares(ranks: int, num_hosts: int) -> tuple[int, ...]:
    """Return the number of ranks of each host.

    Raises:
        LayoutError: they cannot be shared equally.
    """
    if ranks % num_hosts:
        near = max(1, ranks // num_hosts) * num_hosts
        raise LayoutError(
            "ranks-indivisible", f"{num_hosts} hosts cannot share {ranks} ranks equally. Use {near} ranks"
        )
    return (ranks // num_hosts,) * num_hosts


def search_layout(workload: Workload, ranks: int | None, num_hosts: int) -> tuple[str, str]:
    """Search for the fastest layout that is likely to fit on this machine, and that the optimizer supports; return it and the reason.

    Raises:
        LayoutError: no layout of these ranks is legal, fits and suits the optimizer.
    """
    search, prediction = wings.required("plan", "search"), wings.required("plan", "simulation.simulate")
    job, count = workload.job, ranks or num_hosts * workers.default_ranks(workload.job.run.device)
    machine = hardware.resolve_hardware(None)
    states = states_per_param(job)
    layouts = search.plan(workload.spec, job, machine, count, top=_TRIED_LAYOUTS, states_per_param=states)
    reason = layouts.nearest
    for best in (*([layouts.safe] if layouts.safe else []), *layouts.best):
        try:
            check_optimizer(workload.source.optimizer, workload.spec, best.layout)
        except LayoutError as error:
            reason = str(error)
            continue
        choice = (
            f'layout "{best.layout}", the fastest{" that is likely to fit" * (best is layouts.safe)} of {layouts.considered} on {count} devices of {machine.name}: '
            f"predicted {best.step_s:.3g} s per step, bound by {prediction.binds(best)}"
        )
        return str(best.layout), "\n".join([choice, *hardware.cautions_here(machine, count)])
    raise LayoutError("no-layout-fits", f"--layout auto found no layout for {count} ranks: {reason}")


def resolve_layout(job: Job, layout: Layout | str | None, ranks: int | None, num_hosts: int = 1) -> Layout:
    """Return the layout of a run: the given one, or the job's own, or replicas over all ranks.

    Raises:
        LayoutError: the layout and the number of ranks contradict each other.
    """
    ranks = ranks or job.run.ranks
    if layout is not None or job.layout:
        of_run = layout_from(job.layout if layout is None else layout)
    else:
        of_run = Layout(dp_replicate=ranks or num_hosts * workers.default_ranks(job.run.device))
    if ranks is not None and ranks != of_run.world_size:
        words = str(of_run)
        raise LayoutError(
            "devices-and-ranks",
            f"layout {words!r} has {of_run.world_size} rank{'s' if of_run.world_size > 1 else ''}, not {ranks}. Use "
            f"--ranks {of_run.world_size}, or a layout with degrees that multiply to {ranks}, such as dp={ranks}",
        )
    return of_run


def decide_on_rank_0(decide: Callable[[], T], place: RankInfo | None) -> T:
    """Return rank 0's decision, a plain value, on every rank; an error that rank 0 raises is raised on every rank.

    Ranks could decide differently: their clocks and hardware profiles differ, and only rank 0 creates the folder.
    """
    if place is None or place.world_size == 1:
        return decide()
    decision: Any = None
    raised: tuple[str, tuple[str, ...]] | None = None
    if place.rank == 0:
        try:
            decision = decide()
        except SamestepError as error:
            raised = errors.to_words(error)
    decision, raised = broadcast_value(0, (decision, raised))
    if raised is not None:
        raise errors.of_words(*raised)
    return cast(T, decision)


def _whole_from(folder: Path, job: Job, until: int) -> tuple[Path | None, tuple[tuple[Path, str], ...]]:
    """Return the newest undamaged checkpoint of a run folder, if there is one, and the damage of newer ones."""
    newest, wrong = manifests.newest_whole(folder / run_folder.CHECKPOINTS)
    if newest is not None:
        _check_resumable(newest, job, until)
    return newest, tuple(wrong)


def _resume_from(folder: Path, job: Job, until: int) -> Path:
    """Return the newest checkpoint of a run folder, and refuse it where the job cannot resume from it."""
    newest = manifests.latest(folder / run_folder.CHECKPOINTS)
    if newest is None:
        raise CheckpointError(
            "checkpoint-missing", f"{folder} holds no checkpoint to resume from: another --out starts a new run"
        )
    _check_resumable(newest, job, until)
    return newest


def _check_resumable(newest: Path, job: Job, until: int) -> None:
    """Refuse a checkpoint from which the job cannot resume."""
    manifest = manifests.read_manifest(newest)
    manifests.check_job(manifest, job, newest)
    if manifest["step"] > until:
        raise CheckpointError(
            "checkpoint-past-end",
            f"{newest} was saved after step {manifest['step']}, and the run would end at step {until}. Use "
            f"--steps {manifest['step']} or more",
        )


@dataclass(frozen=True, slots=True)
class RankShare:
    """One rank's part of a run: its memory between steps, and the samples that it reads in step 1."""

    memory: MemoryUse
    """Predicted bytes between two steps."""
    samples: tuple[int, ...]
    """Indices into the dataset."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DryRun:
    """The run that `train` would start."""

    job: Job
    """The resolved job with the layout in it, so that the file alone repeats the run."""
    layout: Layout
    num_microbatches: int
    microbatch_samples: int
    """The number of samples in the largest micro-batch."""
    ranks: tuple[RankShare, ...]
    """One entry for each rank, in the order of ranks."""
    why: str
    """The chosen layout and the reason for it, as text; empty where the layout was given."""

    def to_record(self) -> dict[str, Any]:
        """Return plain data: the resolved job with its layout, and the bytes and samples of each rank."""
        ranks = [{"memory": share.memory.to_record(), "samples": share.samples} for share in self.ranks]
        sizes = {"num_microbatches": self.num_microbatches, "microbatch_samples": self.microbatch_samples}
        return {"layout": str(self.layout), **sizes, "ranks": ranks, "why": self.why, "job": self.job.model_dump()}

    def to_text(self) -> str:
        """Return the text for a terminal: the layout, a line for each rank, and the job as TOML."""
        count, size, ranks = self.num_microbatches, self.microbatch_samples, len(self.ranks)
        lines = [self.why] if self.why else []
        lines += [
            f'layout "{self.layout}": {ranks} rank{"s" * (ranks > 1)}, {count} micro-batch{"es" * (count > 1)} '
            f"of at most {size} sample{'s' * (size > 1)}"
        ]
        lines += [
            f"rank {rank}: weights {share.memory.weights:,} B, gradients {share.memory.gradients:,} B, optimizer "
            f"{share.memory.optimizer:,} B; samples of step 1: {' '.join(map(str, share.samples)) or 'none'}"
            for rank, share in enumerate(self.ranks)
        ]
        heading = "# Keys that are not the default; --json has all:"
        return "\n".join([*lines, "", heading, self.job.to_toml(is_short=True)])


def dry_run(job: Job, **arguments: Any) -> DryRun:
    """Return the run that `train` would start with the same arguments, those of `check`, after the same checks; nothing is started or written.

    Raises:
        InputError: the job, layout or data cannot run; the text says what would work.
    """
    checked = check(job, **arguments)
    where, states = checked.layout, states_per_param(job)
    programs = [
        program_of(checked.workload.spec, job, where, checked.ranks_per_node, stage=stage) for stage in range(where.pp)
    ]
    step, order = programs[0].step, Ranks.of(where)
    samples = step_samples(job, where, checked.workload.dataset, step.num_microbatches)
    shares = (
        RankShare(
            at_rest(programs[order.coordinate(rank, "pp")], states, rank),
            tuple(map(int, samples[order.coordinate(rank, "dp")])),
        )
        for rank in range(where.world_size)
    )
    return DryRun(
        job=checked.job,
        layout=where,
        num_microbatches=step.num_microbatches,
        microbatch_samples=step.microbatch_samples,
        ranks=tuple(shares),
        why=checked.why,
    )
