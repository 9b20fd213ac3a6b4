"""Everything that can be wrong with a run, found before any process starts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

import torch.distributed as dist

from samestep import hardware
from samestep.errors import (
    CheckpointError,
    JobError,
    LayoutError,
    SamestepError,
)
from samestep.job import Job
from samestep.layout import Layout
from samestep.planning import ranking, search
from samestep.runtime import checkpoint
from samestep.runtime.optimizer_step import check_optimizer
from samestep.runtime.processes import workers
from samestep.runtime.processes.join import RankInfo
from samestep.simulation import memory
from samestep.strategies import program_of
from samestep.training import run_folder
from samestep.training.workload import Workload

T = TypeVar("T")
AUTO = "auto"
"""The word for a layout that is searched for."""
_TRIED_LAYOUTS = 40
"""The fastest of a search: some may not suit the optimizer."""
_CLEARLY_LESS = 0.8
"""Of the memory that was predicted for a layout that ran out of it."""


@dataclass(frozen=True, slots=True)
class Checked:
    """A run of which all has been checked that can be before a worker starts."""

    workload: Workload
    layout: Layout
    folder: Path
    until: int
    """The last step."""
    resume_from: Path | None
    """The checkpoint to go on from."""
    why: str = ""
    """Of a layout that was searched for: what was chosen, and why."""

    @property
    def job(self) -> Job:
        """The job with the layout that it runs in, so that the file in the run folder alone repeats the run."""
        words = {
            field.name: getattr(self.layout, field.name)
            for field in dataclasses.fields(self.layout)
            if field.name == "dp_replicate" or getattr(self.layout, field.name) != field.default
        }
        return self.workload.job.model_copy(update={"layout": words})


def check(
    job: Job,
    *,
    layout: Layout | str | None = None,
    ranks: int | None = None,
    steps: int | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    place: RankInfo | None = None,
) -> Checked:
    """Check what `train` is given; nothing is started or written. Collective where there is a `place`.

    Raises:
        InputError: the job, layout or data cannot run; the text says what would.
    """
    ranks = place.world_size if place else ranks
    where = None if layout == AUTO else resolve_layout(job, layout, ranks)[0]
    until = job.train.steps if steps is None else steps
    if until > job.train.steps:
        raise JobError(
            f"--steps {until} is beyond train.steps = {job.train.steps}, where the learning rate ends: "
            f"--set train.steps={until} works"
        )
    folder = _agreed(lambda: run_folder.chosen(out, resume), place)
    resume_from = _resume_from(folder, job, until) if resume else None
    workload = Workload(job)
    why = ""
    if where is None:
        where, why = _agreed(lambda: _searched(workload, ranks or job.run.ranks), place)
    workload.slice(where)
    program_of(workload.spec, job, where, place.ranks_per_node if place else job.run.ranks_per_node)
    check_optimizer(workload.source.optimizer, workload.spec, where)
    return Checked(workload, where, folder, until, resume_from, why)


def _searched(workload: Workload, ranks: int | None) -> tuple[Layout, str]:
    """Search the fastest layout of so many ranks on this machine that the optimizer can follow; say what it was."""
    job, count = workload.job, ranks or workers.default_ranks(workload.job.run.device)
    machine = hardware.own_or("cpu-laptop")
    states = memory.states_per_param(job)
    found = search.plan(workload.spec, job, machine, count, top=_TRIED_LAYOUTS, states_per_param=states)
    reason = found.nearest
    for best in found.best:
        try:
            check_optimizer(workload.source.optimizer, workload.spec, best.layout)
        except LayoutError as error:
            reason = str(error)
            continue
        said = (
            f'layout "{best.layout}", the fastest of {found.considered} on {count} devices of {machine.name}: '
            f"{best.step_s:.3g} s a step predicted, bound by {ranking.binds(best)}"
        )
        return best.layout, "\n".join([said, *hardware.cautions_here(machine, count)])
    raise LayoutError(f"--layout auto found none for {count} ranks: {reason}")


def resolve_layout(job: Job, layout: Layout | str | None, ranks: int | None) -> tuple[Layout, int]:
    """Return the layout and the number of its ranks; either of them may say what the other leaves open.

    Raises:
        LayoutError: they contradict each other.
    """
    ranks = ranks or job.run.ranks
    given = Layout.parse(layout) if isinstance(layout, str) else layout
    if given is None and job.layout:
        given = Layout.of(job.layout)
    if given is None:
        given = Layout(dp_replicate=ranks or workers.default_ranks(job.run.device))
    if ranks is not None and ranks != given.world_size:
        words = str(given)
        raise LayoutError(
            f"layout {words!r} has {given.world_size} rank{'s' if given.world_size > 1 else ''}, not {ranks}: "
            f"--ranks {given.world_size} works, or a layout whose degrees multiply to {ranks}, as dp={ranks}"
        )
    return given, given.world_size


def _agreed(decide: Callable[[], T], place: RankInfo | None) -> T:
    """Return what rank 0 decides: clocks and profiles differ, and the others may look when it has begun to write."""
    if place is None or place.world_size == 1:
        return decide()
    told: list[Any] = [None]
    if place.rank == 0:
        try:
            told = [decide()]
        except SamestepError as error:
            told = [error]
    dist.broadcast_object_list(told, src=0, device=place.device)
    if isinstance(told[0], SamestepError):
        raise told[0]
    return cast(T, told[0])


def _resume_from(folder: Path, job: Job, until: int) -> Path:
    """Return the newest checkpoint of a run, if the job can go on from it."""
    newest = checkpoint.newest(folder / "checkpoints")
    if newest is None:
        raise CheckpointError(f"{folder} holds no checkpoint to go on from: another --out starts anew")
    manifest = checkpoint.read_manifest(newest)
    checkpoint.check_job(manifest, job, newest)
    if manifest["step"] > until:
        raise CheckpointError(
            f"{newest} is after step {until}, where the run would end; at least {manifest['step']} works"
        )
    return newest
