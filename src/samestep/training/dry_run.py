"""What `train` would run, checked as `train` checks it, without starting anything."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from samestep.job import Job
from samestep.layout import Layout
from samestep.program.ranks import Ranks
from samestep.simulation.memory import MemoryUse, at_rest, states_per_param
from samestep.strategies import program_of
from samestep.training.check import check
from samestep.training.workload import step_samples


@dataclass(frozen=True, slots=True)
class RankShare:
    """What one rank holds between steps, and which samples it reads in step 1."""

    memory: MemoryUse
    samples: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DryRun:
    """A run as it would start."""

    job: Job
    """With the layout in it, so that the file alone repeats the run."""
    layout: Layout
    num_microbatches: int
    microbatch_samples: int
    """Samples of the largest micro-batch."""
    ranks: tuple[RankShare, ...]
    why: str
    """Of a layout that was searched for: what was chosen, and why."""

    def to_text(self) -> str:
        """Write the job as TOML, the layout, and a line for each rank."""
        count, size, ranks = self.num_microbatches, self.microbatch_samples, len(self.ranks)
        lines = [self.why] if self.why else []
        lines += [
            self.job.to_toml(),
            f'layout "{self.layout}": {ranks} rank{"s" * (ranks > 1)}, {count} micro-batch{"es" * (count > 1)} '
            f"of at most {size} sample{'s' * (size > 1)}",
        ]
        for rank, share in enumerate(self.ranks):
            held = share.memory
            lines.append(
                f"rank {rank}: weights {held.weights:,} B, gradients {held.gradients:,} B, "
                f"optimizer {held.optimizer:,} B; samples of step 1: {' '.join(map(str, share.samples)) or 'none'}"
            )
        return "\n".join(lines)


def dry_run(
    job: Job,
    *,
    layout: Layout | str | None = None,
    ranks: int | None = None,
    steps: int | None = None,
    out: str | Path | None = None,
    resume: bool = False,
) -> DryRun:
    """Check what `train` would be given, and return what it would run; nothing is started or written.

    Raises:
        InputError: the job, layout or data cannot run; the text says what would.
    """
    checked = check(job, layout=layout, ranks=ranks, steps=steps, out=out, resume=resume)
    where, states = checked.layout, states_per_param(job)
    programs = [
        program_of(checked.workload.spec, job, where, job.run.ranks_per_node, stage=stage) for stage in range(where.pp)
    ]
    samples, order = step_samples(job, where, checked.workload.dataset), Ranks.of(where)
    shares = (
        RankShare(
            at_rest(programs[order.coordinate(rank, "pp")], states, rank),
            tuple(map(int, samples[order.coordinate(rank, "dp")])),
        )
        for rank in range(where.world_size)
    )
    step = programs[0].step
    return DryRun(
        job=checked.job,
        layout=where,
        num_microbatches=step.num_microbatches,
        microbatch_samples=step.microbatch_samples,
        ranks=tuple(shares),
        why=checked.why,
    )
