"""The loggers of a user loop's reports, `samestep.track`: the same as those of `samestep train`.

    samestep.track(run, "progress", "metrics.jsonl", "tensorboard", samestep.EarlyStopping(held_out, every=100, patience=5))
    for batch in samestep.batches(dataset, job):
        report = run.step(batch)

    progress        a live line on a terminal, and a permanent one every few steps
    metrics.jsonl   one JSON object for each logged step, in the folder (`metrics.py`)
    tensorboard, wandb, mlflow, module:function, a function of a report      as in `run.report` (`trackers.py`)
    EarlyStopping         held-out means, which end the loop in time and keep the best checkpoint (`evaluations.py`)

A step that the loop takes in parts (`run.update`) is one report, once all its parts are taken.
All but `EarlyStopping` act on rank 0 alone. They are opened with the first report, so that a resumed run continues its files.
"""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from samestep.errors import JobError, did_you_mean, short_repr
from samestep.runtime.recording.sums import StragglerWatch, describe_stragglers
from samestep.runtime.run import Run
from samestep.runtime.step_observer import StepBatch
from samestep.runtime.step_report import StepReport
from samestep.training import evaluations, trackers
from samestep.training.evaluations import EarlyStopping, Evaluations
from samestep.training.metrics import FILE, Metrics, Screen, speed_of
from samestep.training.run_log import watch_of
from samestep.training.trackers import Logger

PROGRESS = "progress"
FOLDER = "runs/loop"


def track(run: Run, *loggers: Logger | EarlyStopping, folder: str | Path | None = None) -> Tracking:
    """Pass the report of each step of a user's loop to loggers; `run.step` does it from now on. Every rank must call this.

    Args:
        run: the run to track.
        loggers: "progress", "metrics.jsonl", "tensorboard", "wandb", "mlflow", a "module:function", a function of a `StepReport`,
            and a `samestep.EarlyStopping`. All but the last run on rank 0 only, for each step that `run.log_every` logs.
        folder: the folder of the files, and of the best checkpoint; by default runs/loop. A run that resumes from a checkpoint continues them.

    Returns:
        The tracking; `close` or the last step of the loop ends it.

    Raises:
        JobError: a logger is not known, or its library is not installed.
    """
    if not isinstance(run, Run):
        raise JobError(
            "argument-type",
            f"samestep.track was given a {type(run).__name__} as the run: the run first, then its loggers, as in "
            'samestep.track(run, "progress")',
        )
    folder = FOLDER if folder is None else folder
    if not isinstance(folder, str | Path) or (Path(folder).exists() and not Path(folder).is_dir()):
        raise JobError(
            "run-folder-unwritable",
            f"samestep.track: folder={short_repr(folder)} is not a folder. Use the path of one, which need not exist",
        )
    held_out = [logger for logger in loggers if isinstance(logger, EarlyStopping)]
    others = [logger for logger in loggers if not isinstance(logger, EarlyStopping)]
    for other in others:
        _check(other, run.job.run.folder)
    if len(held_out) > 1:
        raise JobError(
            "held-out-rule",
            f"samestep.track was given {len(held_out)} samestep.EarlyStopping, and their decisions could differ. Use one with a dict of data sets",
        )
    for stopping in held_out:
        stopping.rule()  # which refuses a mean that is none
    tracking = Tracking(run, others, held_out[0] if held_out else None, Path(folder))
    run.loggers.append(tracking.receive)
    if held_out:
        run.before_steps.append(tracking.before_step)
    return tracking


def _check(logger: object, folder: str | None) -> None:
    """Refuse what is no logger.

    Raises:
        JobError: it is none, or its library is not installed.
    """
    if callable(logger) and not isinstance(logger, type):
        return
    if not isinstance(logger, str):
        raise JobError(
            "argument-type",
            f'samestep.track was given a {type(logger).__name__} as a logger. Use words such as "progress", functions of a report and a '
            "samestep.EarlyStopping, one after another: samestep.track(run, first, second)",
        )
    words = (PROGRESS, FILE, trackers.TENSORBOARD, *trackers.SERVICES)
    if ":" not in logger and logger not in words:
        raise JobError(
            "argument-type",
            f"samestep.track: {logger!r} must be one of {', '.join(words)}{did_you_mean(logger, words)}, or module:function",
        )
    if logger not in (PROGRESS, FILE):
        trackers.check_receiver(logger, folder, f'samestep.track(run, "{logger}")')


class Tracking:
    """The loggers of one run's reports."""

    def __init__(self, run: Run, loggers: Sequence[Logger], held_out: EarlyStopping | None, folder: Path) -> None:
        self._run, self._loggers, self._held_out, self._folder = run, loggers, held_out, folder
        self._evaluated: Evaluations | None = None
        self._metrics: Metrics | None = None
        self._screen: Screen | None = None
        self._watch: StragglerWatch | None = None
        self._live = ExitStack()
        self._last: StepReport | None = None
        self._part: tuple[StepReport, StepBatch] | None = None
        """The report so far of a step that the loop takes in parts, and its batch."""
        self._is_closed = self._has_asked = False
        self._ended: StepReport | None = None
        """The report of a loop that had ended before this process began."""

    @property
    def is_over(self) -> bool:
        """Whether the held-out means have not become better for as long as `EarlyStopping.patience` says."""
        return self._evaluated is not None and self._evaluated.is_over

    def before_step(self, batch: StepBatch) -> StepReport | None:
        """Return the report of a loop that its held-out means have ended before this process began, which takes no step more; None for
        one that goes on.

        Collective over the world before the first step, see [Note: collective calls].

        Raises:
            JobError: the measure does not return the mean that decides.
        """
        run, first, held_out = self._run, self._run.steps_taken, self._held_out
        if self._ended is not None:
            batch.end_stream()
            return self._ended
        if self._has_asked or held_out is None:
            return None
        self._has_asked, rule = True, held_out.rule()
        rule.check(run)
        evaluated = evaluations.evaluations_before(run, rule, self._folder, first)
        if not evaluated.is_over:
            return None
        self._evaluated, self._is_closed = evaluated, True
        batch.end_stream()
        if run.place.rank == 0:
            print(
                f"samestep: no step is taken after step {first}, where the held-out means have ended the loop",
                file=sys.stderr,
            )
        self._ended = StepReport(
            step=first, loss=math.nan, grad_norm=math.nan, lr=math.nan, tokens=0, step_s=0.0, tokens_per_s=0.0, memory_bytes=0,
            held_out=evaluated.rows[-1].losses, stop=True,
        )  # fmt: skip
        return self._ended

    def receive(self, report: StepReport, batch: StepBatch | None = None, is_part: bool = False) -> StepReport:
        """Give the report of a step to the loggers, once; return it with the held-out means, and with `stop` where these end the loop.

        A step in parts is over when its stream is asked for the next batch: it then has the numbers of its last update, and the terms
        and values of all. A step whose batch is of no stream is given with its first update.

        Collective over the world where there is a `EarlyStopping`, see [Note: collective calls].

        Raises:
            JobError: a logger fails, or cannot be started.
        """
        if is_part and batch is not None and getattr(batch, "stream", None) is not None and not self._is_closed:
            previous = report if self._part is None else self._part[0]
            terms, values = {**previous.terms, **report.terms}, {**previous.values, **report.values}
            self._part = dataclasses.replace(report, terms=terms, values=values), batch
            batch.before_next(self._end_part)
            return report
        if self._last is not None and self._last.step == report.step:
            return dataclasses.replace(report, held_out=self._last.held_out, stop=self._last.stop)
        if self._is_closed:
            return report
        result = self._given(report)
        if batch is not None and result.stop and not report.stop:
            batch.end_stream()
        return result

    def _end_part(self) -> None:
        """Give the report of a step in parts to the loggers."""
        if self._part is not None:
            (report, batch), self._part = self._part, None
            self.receive(report, batch)

    def _given(self, report: StepReport) -> StepReport:
        if self._last is None:
            self._begin(report)
        report, line = self._evaluate(report)
        self._last = report
        sums = self._run.recorder.sums
        late = self._watch.step(sums, report.step_s) if self._watch else {}
        is_last = report.stop or report.step >= self._run.job.train.steps
        if self._metrics is not None:
            self._metrics.straggler = late
            self._metrics.write(report, is_last, sums)
            if self._screen is not None:
                self._screen.show(report)
                self._say(line)
                self._say(describe_stragglers(late) if late else "")
        if is_last:  # on every rank, or some would evaluate without the others
            self.close()
        return report

    __call__ = receive

    def _begin(self, report: StepReport) -> None:
        """Open the loggers after the first step that they receive."""
        run, first = self._run, report.step - 1
        self._watch = watch_of(run)
        job, folder = run.job, self._folder
        if run.place.rank == 0:
            speed = speed_of(run.assembly.model.spec, job, run.layout, run.place.device)
            if PROGRESS in self._loggers:
                counted = "samples" if report.tokens == job.train.global_batch else "tok"
                self._screen = Screen(first, job.train.steps, speed, job.run.log_every, counted)
                self._live.enter_context(self._screen.live())
            if any(logger != PROGRESS and isinstance(logger, str) for logger in self._loggers):
                folder.mkdir(parents=True, exist_ok=True)
            opened = [
                trackers.open_receiver(logger, job, folder, first, _name_of(logger))
                for logger in self._loggers
                if logger not in (PROGRESS, FILE)
            ]
            self._metrics = Metrics(folder if FILE in self._loggers else None, first, opened, speed, job.run.log_every)
        if self._held_out is not None:
            folder.mkdir(parents=True, exist_ok=True)
            self._evaluated = evaluations.resume_evaluations(run, self._held_out.rule(), folder, self._say, first)

    def _say(self, line: str) -> None:
        if self._screen is not None and line:
            self._screen.say(line)

    def _evaluate(self, report: StepReport) -> tuple[StepReport, str]:
        """Return a report with the held-out means, where they are due, and a line for the screen."""
        evaluated = self._evaluated
        if evaluated is None or not evaluated.is_due(report.step) or report.stop:
            return report, ""
        means = evaluated.losses()
        line = evaluated.add(report.step, means)
        return dataclasses.replace(report, held_out=means, stop=evaluated.is_over), line

    def close(self) -> None:
        """End the entries and close the files; later reports are not received."""
        self._end_part()
        if not self._is_closed and self._metrics is not None:
            self._live.close()
            self._metrics.close()
        self._is_closed = True

    def __enter__(self) -> Tracking:
        """Return itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close it."""
        self.close()


def _name_of(logger: Logger) -> str:
    name = logger if isinstance(logger, str) else getattr(logger, "__qualname__", type(logger).__name__)
    return f"the logger {name}"
