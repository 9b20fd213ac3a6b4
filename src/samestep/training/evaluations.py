"""The held-out losses of a run while it trains: the log, the best checkpoint, and early stopping.

    train.evaluate_every = 100     the loss over train.evaluate_samples held-out samples, after every 100th step
    checkpoint.keep_best = true    RUN/best/ holds the checkpoint with the least of these losses
    train.patience = 5             the run ends after 5 of them in a row that are not below the least before
    data.held_out_sets = {...}     other sets that are evaluated too; train.judged_by names the one whose loss decides

`evaluations.jsonl` has a line for each; a resumed run keeps those up to its step. A best checkpoint of a later step,
which the run drops, is moved aside then, and the least loss since becomes the next one. Every rank has the same
losses, so all decide alike.

A loop of the user's own says the same with `samestep.HeldOut`, one of the receivers of `samestep.track`.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from samestep.errors import DataError, JobError, SaveError, did_you_mean
from samestep.job import Job
from samestep.job_tables import HELD_OUT
from samestep.output import durable_files
from samestep.output.output_file import write_whole
from samestep.runtime.checkpoints import checkpoint, manifests
from samestep.runtime.evaluated_run import Measure
from samestep.runtime.processes.messages import gather_values
from samestep.runtime.run import Run
from samestep.training.workload import Workload, describe_losses, held_out_losses, use_evaluated_weights

FILE = "evaluations.jsonl"
BEST = "best"
"""The folder in a run's folder that holds the best checkpoint."""
DROPPED = "best.dropped"
"""The folder in a run's folder that holds the best checkpoint of steps that a resume has dropped."""


class EvaluatedStep(NamedTuple):
    """The held-out losses after a step."""

    step: int
    loss: float
    """The mean loss of the set that `train.judged_by` names."""
    losses: Mapping[str, float]
    """The mean loss of each set, by name."""


def check(job: Job) -> None:
    """Refuse settings of evaluations that a job without held-out samples, or without evaluations, cannot have.

    Raises:
        DataError: the job asks for evaluations, and holds no samples out.
    """
    if job.train.evaluate_every and not job.evaluated_sets:
        raise DataError(
            "train.evaluate_every needs samples that are held out: data.held_out above 0 and train.evaluate_samples above 0 work"
        )


def read(folder: Path, last_step: int) -> list[EvaluatedStep]:
    """Return the evaluations of a run folder up to a step, without an incomplete last line."""
    found: list[EvaluatedStep] = []
    with contextlib.suppress(OSError, ValueError, KeyError):
        for line in (folder / FILE).read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            if row["step"] <= last_step:
                losses = {name: _number(loss) for name, loss in row.get("losses", {}).items()}
                found.append(EvaluatedStep(row["step"], _number(row["loss"]), losses))
    return found


def _number(loss: float | None) -> float:
    return math.nan if loss is None else loss


def _line(row: EvaluatedStep) -> str:
    """Return an evaluation as a line of the log, in which a number that is not finite is null."""
    losses = {name: loss if math.isfinite(loss) else None for name, loss in row.losses.items()}
    loss = row.loss if math.isfinite(row.loss) else None
    return json.dumps({"step": row.step, "loss": loss, "losses": losses}) + "\n"


def _drop_later_best(folder: Path, first: int, rank: int) -> tuple[int, str]:
    """Move the best checkpoint aside on rank 0, if it is of a step after `first`; return its step, and why it cannot
    be moved."""
    newest = manifests.latest(folder / BEST) if rank == 0 else None
    step = int(newest.name.removeprefix("step-")) if newest is not None else 0
    if step > first:
        try:
            durable_files.remove_folder(folder / DROPPED)
            durable_files.rename(folder / BEST, folder / DROPPED)
        except OSError as error:
            return (
                step,
                f"{folder / BEST} holds weights of steps that are dropped, and cannot be moved to {DROPPED}: {error}",
            )
    return step, ""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationRule:
    """The rule of a run's evaluations: the sets, how often, and what follows from the result."""

    losses: Callable[[Run], Mapping[str, float]]
    """Returns the mean of each set, by name; every rank calls it."""
    judge: str | None
    """The name of the mean that decides."""
    every: int
    patience: int
    keep_best: bool
    largest: bool = False
    """Whether the largest mean is the best one, as of an accuracy."""

    @classmethod
    def of(cls, job: Job, workload: Workload) -> EvaluationRule:
        """Return the rule of a job."""
        train = job.train
        return cls(
            losses=lambda run: held_out_losses(run, workload),
            judge=job.judge,
            every=train.evaluate_every,
            patience=train.patience,
            keep_best=job.checkpoint.keep_best,
        )

    def is_better(self, one: float, other: float) -> bool:
        """Return whether a mean is better than another one."""
        return one > other if self.largest else one < other


@dataclass(frozen=True)
class HeldOut:
    """Held-out samples that a user's loop evaluates, to end in time and to keep the best checkpoint.

    It is one of the receivers of `samestep.track`. Each report of a step after which it is evaluated has the means in `held_out`:
    that of the loss under the set's name, and those of `measure` as "NAME/MEASURE".
    """

    sets: Any
    """A data set, whose name is "held_out", or a dict of data sets by name."""
    every: int = 100
    """Steps between two evaluations."""
    patience: int = 0
    """Evaluations in a row without a better mean after which the loop ends; 0: it goes on."""
    keep_best: bool = False
    """Whether FOLDER/best holds the checkpoint with the best mean."""
    measure: Measure | None = None
    """A function of (outputs, batch) -> {"name": (sum, count), ...}, whose means are taken besides the loss."""
    judged_by: str = ""
    """The mean that decides, such as "held_out/accuracy"; by default the loss of the first set."""
    largest: bool = False
    """Whether the largest mean is the best one, as of an accuracy."""

    def __post_init__(self) -> None:
        """Refuse numbers of steps and of evaluations that mean nothing, and what is no data set.

        Raises:
            JobError: `every` is below 1, or `patience` below 0, or no whole number.
            DataError: `sets` holds nothing.
        """
        if self.sets is None or (isinstance(self.sets, Mapping) and not self.sets):
            raise DataError(
                f"HeldOut(sets={self.sets!r}) holds no data set: a data set works, and so does a dict of data sets by name"
            )
        if not all(isinstance(number, int) for number in (self.every, self.patience)):
            raise JobError(
                f"HeldOut(every={self.every!r}, patience={self.patience!r}): whole numbers work, such as every=100 and patience=5"
            )
        if self.every < 1 or self.patience < 0:
            raise JobError(
                f"HeldOut(every={self.every}, patience={self.patience}): every=100 evaluates after each 100th step, and patience=0 "
                "never ends the loop"
            )

    def rule(self) -> EvaluationRule:
        """Return it as the rule that decides."""
        sets = self.sets if isinstance(self.sets, Mapping) else {HELD_OUT: self.sets}
        judge = self.judged_by or next(iter(sets))

        def losses(run: Run) -> Mapping[str, float]:
            found: dict[str, float] = {}
            for name, dataset in sets.items():
                means = run.evaluate(dataset, self.measure)
                found |= {name if key == "loss" else f"{name}/{key}": mean for key, mean in means.items()}
            if judge not in found:
                raise JobError(
                    f"HeldOut(judged_by={judge!r}) is none of the means {', '.join(found)}{did_you_mean(judge, found)}"
                )
            return found

        return EvaluationRule(
            losses=losses,
            judge=judge,
            every=self.every,
            patience=self.patience,
            keep_best=self.keep_best,
            largest=self.largest,
        )


@dataclass(slots=True)
class Evaluations:
    """The evaluations of one run."""

    run: Run
    rule: EvaluationRule
    folder: Path
    rows: list[EvaluatedStep] = field(default_factory=list)
    """The evaluations so far, in order."""
    kept: EvaluatedStep | None = None
    """The evaluation whose weights the best checkpoint has."""

    def settle_best(self, first: int) -> str:
        """Find the best checkpoint of a run that goes on from a step; return a line for the screen where it is of dropped steps.

        Every rank must call it.

        Raises:
            SaveError: the file system does not allow it.
        """
        run = self.run
        if not self.rule.keep_best:
            return ""
        newest, reason = gather_values(_drop_later_best(self.folder, first, run.place.rank), run.layout.world_size)[0]
        if reason:
            raise SaveError(reason)
        step = int(newest)
        held = next((row for row in self.rows if row.step == min(step, first)), None)
        if step <= first:
            self.kept = held
            return ""
        if held is not None and run.steps_taken == first:  # a loop of one's own has taken a step by now
            checkpoint.save(run, self.folder / BEST, 1)
            self.kept = held
        return f"{BEST} held the weights of step {step}, which is dropped as the run goes on after step {first}: they are in {DROPPED}"

    @property
    def best(self) -> EvaluatedStep | None:
        """The evaluation with the best loss, the first of equal ones; None before the first finite one."""
        sign = -1 if self.rule.largest else 1
        return min((row for row in self.rows if math.isfinite(row.loss)), key=lambda row: sign * row.loss, default=None)

    @property
    def is_over(self) -> bool:
        """Whether as many evaluations as the patience have followed the best one."""
        patience, best = self.rule.patience, self.best
        since = len(self.rows) if best is None else len(self.rows) - 1 - self.rows.index(best)
        return 0 < patience <= since

    def is_due(self, step: int) -> bool:
        """Return whether an evaluation follows a step."""
        return self.rule.every > 0 and step % self.rule.every == 0

    def losses(self) -> Mapping[str, float]:
        """Return the held-out loss of each set. Every rank must call it."""
        with use_evaluated_weights(self.run):
            return self.rule.losses(self.run)

    def add(self, step: int, losses: Mapping[str, float]) -> str:
        """Log the losses after a step and save a best checkpoint; return a line for the screen. Every rank must call it."""
        judge = self.rule.judge
        assert judge is not None, "check has refused it"
        self.rows.append(EvaluatedStep(step, losses[judge], losses))
        is_best = self.best is self.rows[-1]
        if self.run.place.rank == 0:
            write_whole(self.folder / FILE, "".join(map(_line, self.rows)))
        loss = losses[judge]
        is_better = math.isfinite(loss) and (self.kept is None or self.rule.is_better(loss, self.kept.loss))
        if is_better and self.rule.keep_best:
            checkpoint.save(self.run, self.folder / BEST, 1)
            self.kept = self.rows[-1]
        word = "largest" if self.rule.largest else "least"
        more = f" (the {word} so far)" if len(losses) > 1 else f", the {word} so far"
        return f"step {step}: {describe_losses(losses, judge)}{more if is_best else ''}"


def resume_evaluations(
    run: Run, rule: EvaluationRule, folder: Path, say: Callable[[str], None], first: int
) -> Evaluations:
    """Return the evaluations of a resumed run up to its step `first`, and print a line if its best checkpoint was dropped;
    every rank must call it.

    Raises:
        SaveError: the best checkpoint is of dropped steps, and the file system does not let it be moved aside.
    """
    mine = read(folder, first) if run.place.rank == 0 else []
    plain = [(row.step, row.loss, dict(row.losses)) for row in mine]
    rows = gather_values(plain, run.layout.world_size)[0]
    found = Evaluations(run, rule, folder, [EvaluatedStep(*row) for row in rows])
    if line := found.settle_best(first):
        say(line)
    return found
