"""The held-out losses of a run while it trains: the log, the checkpoint with the least of them, and the end of a run without a new one.

    train.evaluate_every = 100     the loss over train.evaluate_samples held-out samples, after every 100th step
    checkpoint.keep_best = true    RUN/best/ holds the checkpoint with the least of these losses
    train.patience = 5             the run ends after 5 of them in a row that are not below the least before

`evaluations.jsonl` has a line for each; a resumed run goes on from those up to its step. Every rank has the same losses, so all decide
alike.
"""

from __future__ import annotations

import contextlib
import json
import math
from dataclasses import dataclass, field
from pathlib import Path

from samestep.errors import DataError
from samestep.job import Job
from samestep.output.output_file import write_whole
from samestep.runtime import checkpoint
from samestep.runtime.run import Run
from samestep.training.workload import Workload, held_out_loss

FILE = "evaluations.jsonl"
BEST = "best"
"""The folder in a run's folder that holds the best checkpoint."""


def check(job: Job) -> None:
    """Refuse settings of evaluations that a job without held-out samples, or without evaluations, cannot have.

    Raises:
        DataError: the job asks for evaluations, and holds no samples out.
    """
    if job.train.evaluate_every and not (job.train.evaluate_samples and job.data.held_out):
        raise DataError(
            "train.evaluate_every needs samples that are held out: data.held_out above 0 and train.evaluate_samples above 0 work"
        )


def read(folder: Path, last_step: int) -> list[tuple[int, float]]:
    """Return step and loss of the evaluations of a run folder up to a step; of a line that is cut off nothing."""
    found: list[tuple[int, float]] = []
    with contextlib.suppress(OSError, ValueError, KeyError):
        for line in (folder / FILE).read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            if row["step"] <= last_step:
                found.append((row["step"], math.nan if row["loss"] is None else row["loss"]))
    return found


@dataclass(slots=True)
class Evaluations:
    """The evaluations of one run."""

    run: Run
    workload: Workload
    folder: Path
    rows: list[tuple[int, float]] = field(default_factory=list)
    """Step and mean loss of each, in order."""

    @property
    def best(self) -> tuple[int, float] | None:
        """Step and loss of the evaluation with the least loss, of equal ones the first; None before the first finite one."""
        return min((row for row in self.rows if math.isfinite(row[1])), key=lambda row: row[1], default=None)

    @property
    def is_over(self) -> bool:
        """Whether `train.patience` evaluations have followed the best one."""
        patience, best = self.run.job.train.patience, self.best
        since = len(self.rows) if best is None else len(self.rows) - 1 - self.rows.index(best)
        return 0 < patience <= since

    def is_due(self, step: int) -> bool:
        """Return whether an evaluation follows a step."""
        every = self.run.job.train.evaluate_every
        return every > 0 and step % every == 0

    def add(self, step: int) -> str:
        """Evaluate after a step, log it and save a best checkpoint; return a line for the screen. Every rank must call it."""
        loss = held_out_loss(self.run, self.workload)
        assert loss is not None, "check has refused it"
        self.rows.append((step, loss))
        is_best = self.best == (step, loss)
        if self.run.place.rank == 0:
            lines = (
                json.dumps({"step": at, "loss": one if math.isfinite(one) else None}) + "\n" for at, one in self.rows
            )
            write_whole(self.folder / FILE, "".join(lines))
        if is_best and self.run.job.checkpoint.keep_best:
            checkpoint.save(self.run, self.folder / BEST, 1)
        return f"step {step}: held-out loss {loss:.4f}" + (", the least so far" if is_best else "")
