"""What a run says while it is trained: on the terminal, in `metrics.jsonl` and in trackers, on rank 0 alone.

All ranks take the same way through a training; those other than rank 0 have `NoLog`, which says nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

from samestep.output.output_file import write_whole
from samestep.runtime.recording import stragglers
from samestep.runtime.recording.sums import StepSums
from samestep.runtime.run import Run
from samestep.runtime.step_report import StepReport
from samestep.training import run_folder
from samestep.training.check import Checked
from samestep.training.evaluations import Evaluations
from samestep.training.goodput import Goodput, Spent
from samestep.training.metrics import Metrics, Screen, speed_of
from samestep.training.trackers import open_trackers
from samestep.training.workload import describe_losses


class NoLog:
    """The log of a rank that says nothing."""

    last_loss: ClassVar[float | None] = None

    def say(self, text: str) -> None:
        """Do nothing."""

    def live(self) -> AbstractContextManager[None]:
        """Return a context that shows nothing."""
        return nullcontext()

    def step(self, report: StepReport, sums: StepSums, *, is_last: bool) -> None:
        """Do nothing."""

    def sync(self) -> None:
        """Do nothing."""

    def spending(self, on: Spent) -> AbstractContextManager[None]:
        """Return a context that measures nothing."""
        return nullcontext()

    def saved(self, step: int) -> None:
        """Do nothing."""

    def rolled_back(self) -> None:
        """Do nothing."""

    def straggler(self, found: Mapping[str, Any]) -> None:
        """Do nothing."""


class RunLog:
    """The log of a run on rank 0."""

    def __init__(self, checked: Checked, run: Run) -> None:
        """Write the head of the run folder, and say what is trained, where, and from which weights."""
        workload, first = checked.workload, run.steps_taken
        self._first = first
        write_whole(checked.folder / run_folder.JOB, checked.job.to_toml(with_folder=True))
        write_whole(checked.folder / "layout.txt", f"{checked.layout}\n")
        speed, every = speed_of(workload.spec, run.job, run.layout, run.place.device), run.job.run.log_every
        trackers = open_trackers(run.job, checked.folder, first)
        self._screen = Screen(first, checked.until, speed, every, workload.counted)
        self._metrics = Metrics(checked.folder, first, trackers, speed, every)
        self.goodput = Goodput.of(checked.folder, first)
        self._say_start(checked, run)

    @property
    def last_loss(self) -> float | None:
        """The loss of the last step; None where it was not finite."""
        return self._metrics.last_loss

    def say(self, text: str) -> None:
        """Print a permanent line."""
        self._screen.say(text)

    def live(self) -> AbstractContextManager[None]:
        """Show the live line while the body of the `with` statement runs."""
        self.goodput.give("start")
        return self._screen.live()

    def step(self, report: StepReport, sums: StepSums, *, is_last: bool) -> None:
        """Write one step, and show it; `sums` are of the newest step whose times are known."""
        self.goodput.give("skipped" if report.skipped else "steps")
        self._metrics.write(report, is_last=is_last, sums=sums)
        self._screen.show(report)

    def spending(self, on: Spent) -> AbstractContextManager[None]:
        """Return a context whose time is not that of steps."""
        return self.goodput.spend(on)

    def saved(self, step: int) -> None:
        """Note that all steps up to this one are in a checkpoint."""
        self.goodput.save(step)

    def straggler(self, found: Mapping[str, Any]) -> None:
        """Print that a rank is slow, on the terminal and in the next line of the metrics."""
        if found:
            self._metrics.straggler = dict(found)
            self.say(stragglers.describe(found))

    def rolled_back(self) -> None:
        """Note that the steps since the last checkpoint are undone."""
        self.goodput.roll_back()

    def sync(self) -> None:
        """Return once every line is on disk, or the disk refuses it."""
        self._metrics.sync()

    def _say_start(self, checked: Checked, run: Run) -> None:
        workload, job, first = checked.workload, checked.workload.job, run.steps_taken
        words = f"{workload.spec.name}: {workload.spec.num_params:,} weights, layout {str(checked.layout)!r}, {checked.folder}"
        self.say(words if checked.resume_from is None else f"{words}, resumes after step {first}")
        for change in run.changes:
            self.say(change)
        if checked.first_weights is not None:
            self.say(f"starts from the weights of {checked.first_weights.origin}")
        for remark in (*(f"{job.model.source}: {one}" for one in workload.remarks), *workload.data_remarks):
            self.say(remark)
        if first == checked.until:
            self.say(f"step {first} was the last step: nothing is left to train")
        elif job.run.compile != "none":
            self.say(
                f"run.compile: step {first + 1} compiles the {job.run.compile} by {job.run.compile_backend}, which takes a while"
            )

    def end(self, evaluated: Evaluations, losses: Mapping[str, float], accuracy: float | None) -> None:
        """Close the metrics, and print the held-out losses at the end, and whether the run ended because they did not become less."""
        self._metrics.close()
        if evaluated.is_over and evaluated.best is not None:
            best = evaluated.best
            self.say(f"ends early: no held-out loss since step {best.step} was below {best.loss:.4f}")
        if losses:
            self.say(describe_losses(losses, evaluated.run.job.judge))
        if accuracy is not None:
            self.say(f"held-out accuracy {accuracy:.1%}")
        if evaluated.run.steps_taken == self._first:
            self.goodput.forget()  # a finished run was looked at, and is as it was
            return
        self.goodput.save(evaluated.run.steps_taken, ended=True)
        self.say(self.goodput.to_line())

    def show_proof(self, run: Run, proven: str, waived: Sequence[str], tried: Sequence[str]) -> None:
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
            self.say(line)


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
