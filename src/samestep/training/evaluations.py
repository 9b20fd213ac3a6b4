"""The validation losses of a run while it trains: the log, the best checkpoint, and early stopping.

    train.evaluate_every = 100     the loss over train.evaluate_samples held-out samples, after every 100th step
    checkpoint.keep_best = true    RUN/best/ holds the checkpoint with the least of these losses
    train.patience = 5             the run ends after 5 of them in a row that are not below the least before
    data.held_out_sets = {...}     other sets that are evaluated too; train.monitor names the one whose loss decides

`evaluations.jsonl` has a line for each; a resumed run keeps those up to its step. A best checkpoint of a later step,
which the run drops, is moved aside then, and the least loss since becomes the next one. Every rank has the same
losses, so all decide alike.

A loop of the user's own says the same with `samestep.EarlyStopping`, one of the loggers of `samestep.track`.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from torch import Tensor

from samestep.building.loss import values_of
from samestep.datasets.opening import batch_to_evaluate
from samestep.errors import DataError, JobError, SamestepError, SaveError, did_you_mean
from samestep.examination.examine import Loss
from samestep.job import Job
from samestep.job_tables import HELD_OUT
from samestep.output import durable_files
from samestep.output.durable_files import write_whole
from samestep.runtime.checkpoints import checkpoint, manifests
from samestep.runtime.processes.messages import gather_values
from samestep.runtime.run import Run
from samestep.state.snapshot import preserve_function
from samestep.training.workload import Workload, describe_losses, held_out_losses, use_evaluated_weights

FILE = "evaluations.jsonl"
BEST = "best"
"""The folder in a run's folder that holds the best checkpoint."""
DROPPED = "best.dropped"
"""The folder in a run's folder that holds the best checkpoint of steps that a resume has dropped."""


class EvaluatedStep(NamedTuple):
    """The validation losses after a step."""

    step: int
    loss: float
    """The mean loss of the set that `train.monitor` names."""
    losses: Mapping[str, float]
    """The mean loss of each set, by name."""


def check(job: Job) -> None:
    """Refuse settings of evaluations that a job without held-out samples, or without evaluations, cannot have.

    Raises:
        DataError: the job asks for evaluations, and holds no samples out.
    """
    if job.train.evaluate_every and not job.evaluated_sets:
        raise DataError(
            "held-out-missing",
            "train.evaluate_every needs samples that are held out. Use data.held_out above 0 and train.evaluate_samples above 0",
        )


def read(folder: Path, last_step: int) -> list[EvaluatedStep]:
    """Return the evaluations of a run folder up to a step, without an incomplete last line."""
    evaluated_steps: list[EvaluatedStep] = []
    with contextlib.suppress(OSError, ValueError, KeyError):
        for line in (folder / FILE).read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            if row["step"] <= last_step:
                means = row.get("losses", row.get("means", {}))
                judged = row["mean"] if "mean" in row else row["loss"]
                evaluated_steps.append(
                    EvaluatedStep(row["step"], _number(judged), {k: _number(v) for k, v in means.items()})
                )
    return evaluated_steps


def _number(loss: float | None) -> float:
    return math.nan if loss is None else loss


def _line(row: EvaluatedStep, judge: str) -> str:
    """Return an evaluation as a line of the log, in which a number that is not finite is null; other means than losses are named so."""
    losses = {name: loss if math.isfinite(loss) else None for name, loss in row.losses.items()}
    loss = row.loss if math.isfinite(row.loss) else None
    if any("/" in name for name in losses):
        return json.dumps({"step": row.step, "monitor": judge, "mean": loss, "means": losses}) + "\n"
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
    check: Callable[[Run], None] = lambda _: None
    """Refuses a mean that decides and that the metrics do not return, before the first step; every rank calls it."""

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

    def is_better(self, mean: float, other: float) -> bool:
        """Return whether a mean is better than another one."""
        return mean > other if self.largest else mean < other


@dataclass(frozen=True)
class EarlyStopping:
    """Validation sets that a user's loop evaluates, for early stopping and to keep the best checkpoint.

    Pass it to `samestep.track` as a logger. If a set is evaluated after a step, the report of the step has its means in `held_out`: the
    loss under the name of the set, and each metric as "NAME/METRIC".
    """

    sets: Any
    """A data set or the values of a batch, which gets the name "held_out", or a dict of data sets by name."""
    every: int = 100
    """Steps between two evaluations."""
    patience: int = 0
    """End the loop after this many evaluations without a better mean; 0: never."""
    keep_best: bool = False
    """Whether FOLDER/best holds the checkpoint with the best mean."""
    metrics: Loss | None = None
    """A function of (outputs, batch) -> {"name": (sum, count), ...}. Its means are reported beside the loss."""
    monitor: str = ""
    """The mean that decides, such as "held_out/accuracy"; by default the loss of the first set."""
    mode: Literal["min", "max"] = "min"
    """Whether the smallest or the largest mean is the best one; "max" for an accuracy."""

    def __post_init__(self) -> None:
        """Refuse numbers of steps and of evaluations that mean nothing, and what is no data set.

        Raises:
            JobError: `every` is below 1, or `patience` below 0, or no whole number.
            DataError: `sets` holds nothing.
        """
        if self.sets is None or (isinstance(self.sets, Mapping) and not self.sets):
            raise DataError(
                "held-out-rule",
                f"EarlyStopping(sets={self.sets!r}) holds no data set. Use a data set, or a dict of data sets by name",
            )
        if self.mode not in ("min", "max"):
            raise JobError("held-out-rule", f'EarlyStopping(mode={self.mode!r}): use "min" or "max"')
        if not all(isinstance(number, int) for number in (self.every, self.patience)):
            raise JobError(
                "held-out-rule",
                f"EarlyStopping(every={self.every!r}, patience={self.patience!r}). Use whole numbers, such as every=100 and patience=5",
            )
        if self.every < 1 or self.patience < 0:
            raise JobError(
                "held-out-rule",
                f"EarlyStopping(every={self.every}, patience={self.patience}): every=100 evaluates after each 100th step, and patience=0 "
                "never ends the loop",
            )

    def rule(self) -> EvaluationRule:
        """Return it as the rule that decides.

        Raises:
            JobError: `monitor` is no mean and no metric of the sets.
        """
        is_named = isinstance(self.sets, Mapping) and not any(isinstance(value, Tensor) for value in self.sets.values())
        sets = self.sets if is_named else {HELD_OUT: self.sets}
        judge = self.monitor or next(iter(sets))
        if len(sets) == 1 and self.metrics is not None and judge not in sets and "/" not in judge:
            judge = f"{next(iter(sets))}/{judge}"
        if judge not in sets and (self.metrics is None or judge.partition("/")[0] not in sets):
            raise JobError(
                "held-out-rule",
                f"EarlyStopping(monitor={judge!r}) must be one of the means {', '.join(sets)}"
                f"{', and its metrics as NAME/METRIC' if self.metrics else ''}{did_you_mean(judge, sets)}",
            )

        def losses(run: Run) -> Mapping[str, float]:
            by_name: dict[str, float] = {}
            for name, dataset in sets.items():
                means = run.evaluate(dataset, self.metrics)
                by_name |= {name if key == "loss" else f"{name}/{key}": mean for key, mean in means.items()}
            refuse_other(by_name)
            return by_name

        def refuse_other(means: Mapping[str, float]) -> None:
            if judge not in means:
                raise JobError(
                    "held-out-rule",
                    f"EarlyStopping(monitor={judge!r}) must be one of the means {', '.join(means)}{did_you_mean(judge, means)}",
                )

        def check(run: Run) -> None:
            name = judge.partition("/")[0]
            names = _names_of(self.metrics, run, sets[name]) if self.metrics is not None else ()
            if names and judge not in sets:
                refuse_other({**dict.fromkeys(sets, 0.0), **{f"{name}/{key}": 0.0 for key in names}})

        return EvaluationRule(
            losses=losses,
            judge=judge,
            every=self.every,
            patience=self.patience,
            keep_best=self.keep_best,
            largest=self.mode == "max",
            check=check,
        )


def _names_of(measure: Loss, run: Run, dataset: Any) -> tuple[str, ...]:
    """Return the names of what a measure returns for the first sample of a data set, or for a few; none where these are not put together,
    or the set can only be read in order.

    Raises:
        JobError: the measure fails on one sample and on a few.
    """
    if not hasattr(dataset, "__len__"):
        return ()
    to_evaluate = batch_to_evaluate(dataset, "run.evaluate", run.job.train.global_batch, {})
    batch = run.labelled(run.batch_of(to_evaluate, "run.evaluate"))
    first, error = batch.shares(0, 1, 1)[0], None
    for count in (1, _FEW):
        try:
            samples = batch.samples(first[:count])
            outputs = run.outputs(samples)
        except SamestepError:
            return ()
        try:
            with preserve_function(measure):
                return tuple(values_of(measure)(outputs, samples))
        except SamestepError as caught:
            error = caught
    assert error is not None
    raise error


_FEW = 8
"""So many samples a measure is tried on that fails on one."""


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
            raise SaveError("checkpoint-unwritable", reason)
        step = int(newest)
        best = next((row for row in self.rows if row.step == min(step, first)), None)
        if step <= first:
            self.kept = best
            return ""
        if best is not None and run.steps_taken == first:  # a loop of one's own has taken a step by now
            checkpoint.save(run, self.folder / BEST, 1)
            self.kept = best
        return f"{BEST} held the weights of step {step}, which is dropped as the run continues after step {first}: they are in {DROPPED}"

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
        """Return the validation loss of each set. Every rank must call it."""
        with use_evaluated_weights(self.run):
            return self.rule.losses(self.run)

    def add(self, step: int, losses: Mapping[str, float]) -> str:
        """Log the losses after a step and save a best checkpoint; return a line for the screen. Every rank must call it."""
        judge = self.rule.judge
        assert judge is not None, "check has rejected it"
        self.rows.append(EvaluatedStep(step, losses[judge], losses))
        is_best = self.best is self.rows[-1]
        if self.run.place.rank == 0:
            with contextlib.suppress(OSError):  # as on a full disk; the next evaluation writes all lines again
                write_whole(self.folder / FILE, "".join(_line(row, judge) for row in self.rows))
        loss = losses[judge]
        is_better = math.isfinite(loss) and (self.kept is None or self.rule.is_better(loss, self.kept.loss))
        if is_better and self.rule.keep_best:
            checkpoint.save(self.run, self.folder / BEST, 1)
            self.kept = self.rows[-1]
        word = "largest" if self.rule.largest else "least"
        more = f" (the {word} so far)" if len(losses) > 1 else f", the {word} so far"
        return f"step {step}: {describe_losses(losses, judge)}{more if is_best else ''}"


def evaluations_before(run: Run, rule: EvaluationRule, folder: Path, first: int) -> Evaluations:
    """Return the evaluations of a run up to its step `first`, as its folder has them; every rank must call it."""
    evaluated = read(folder, first) if run.place.rank == 0 else []
    plain = [(row.step, row.loss, dict(row.losses)) for row in evaluated]
    rows = gather_values(plain, run.layout.world_size)[0]
    return Evaluations(run, rule, folder, [EvaluatedStep(*row) for row in rows])


def resume_evaluations(
    run: Run, rule: EvaluationRule, folder: Path, say: Callable[[str], object], first: int
) -> Evaluations:
    """Return the evaluations of a resumed run up to its step `first`, and print a line if its best checkpoint was dropped;
    every rank must call it.

    Raises:
        SaveError: the best checkpoint is of dropped steps, and the file system does not let it be moved aside.
    """
    evaluations = evaluations_before(run, rule, folder, first)
    if line := evaluations.settle_best(first):
        say(line)
    return evaluations
