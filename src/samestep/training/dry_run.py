"""`train --dry-run`: the same checks as `train`, then the resolved job and each rank's bytes and samples; starts nothing."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from samestep.job import Job
from samestep.layout import Layout
from samestep.program.ranks import Ranks
from samestep.program.update_rules import states_per_param
from samestep.simulation.memory import MemoryUse, at_rest
from samestep.strategies import program_of
from samestep.training.check import check
from samestep.training.workload import step_samples


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

    def to_text(self) -> str:
        """Return the text for a terminal: the layout, a line for each rank, and the job as TOML."""
        count, size, ranks = self.num_microbatches, self.microbatch_samples, len(self.ranks)
        lines = [self.why] if self.why else []
        lines += [
            f'layout "{self.layout}": {ranks} rank{"s" * (ranks > 1)}, {count} micro-batch{"es" * (count > 1)} '
            f"of at most {size} sample{'s' * (size > 1)}",
        ]
        for rank, share in enumerate(self.ranks):
            held = share.memory
            lines.append(
                f"rank {rank}: weights {held.weights:,} B, gradients {held.gradients:,} B, "
                f"optimizer {held.optimizer:,} B; samples of step 1: {' '.join(map(str, share.samples)) or 'none'}"
            )
        return "\n".join([*lines, "", self.job.to_toml()])


def dry_run(
    job: Job,
    *,
    layout: Layout | str | None = None,
    ranks: int | None = None,
    steps: int | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    init_from: str | Path | None = None,
    auto_resume: bool = False,
    num_hosts: int = 1,
    allow_code: bool = False,
) -> DryRun:
    """Return the run that `train` would start with the same arguments, after the same checks; nothing is started or written.

    Raises:
        InputError: the job, layout or data cannot run; the text says what would work.
    """
    checked = check(
        job,
        layout=layout,
        ranks=ranks,
        steps=steps,
        out=out,
        resume=resume,
        init_from=init_from,
        auto_resume=auto_resume,
        allow_code=allow_code,
        num_hosts=num_hosts,
    )
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
