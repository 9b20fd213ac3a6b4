"""What a run says while it is trained: on the terminal, in `metrics.jsonl` and in trackers, on rank 0 alone.

All ranks take the same way through a training; those other than rank 0 have `NoLog`, which says nothing.

Its goodput is the part of a run's time in which it took steps that count:

    goodput = seconds of steps that counted / seconds from the first start to the last step

The times of a run are those of rank 0, and are written with each checkpoint: the steps after it are lost where the run is started again
from it, so the time since then counts as lost to the restart, with the pause and the start. A pause between a run that ended in order and its
resume is nobody's loss, and is left out.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from samestep.building.torch_seams import default_store
from samestep.output.durable_files import write_whole
from samestep.output.text import listed
from samestep.program.ranks import Ranks
from samestep.runtime.recording.sums import StepSums, StragglerWatch, describe_stragglers
from samestep.runtime.run import Run
from samestep.runtime.step_report import StepReport
from samestep.training import run_folder
from samestep.training.check import Checked
from samestep.training.evaluations import Evaluations
from samestep.training.metrics import Metrics, Screen, speed_of
from samestep.training.trackers import open_trackers
from samestep.training.workload import describe_losses

_Spent = Literal["start", "steps", "skipped", "saves", "evaluations", "restarts"]
"""What time is spent on: what comes between the preparation of a process and its first step, steps that counted, and so on."""
TIMES_FILE = "goodput.jsonl"


class NoLog:
    """The log of a rank that says nothing: each method of a `RunLog` does nothing, and returns a context that does nothing."""

    def __getattr__(self, name: str) -> Callable[..., AbstractContextManager[None]]:
        return lambda *_, **__: nullcontext()


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

    def spending(self, on: _Spent) -> AbstractContextManager[None]:
        """Return a context whose time is not that of steps."""
        return self.goodput.spend(on)

    def saved(self, step: int) -> None:
        """Note that all steps up to this one are in a checkpoint."""
        self.goodput.save(step)

    def straggler(self, straggler: Mapping[str, Any]) -> None:
        """Print that a rank is slow, on the terminal and in the next line of the metrics."""
        if straggler:
            self._metrics.straggler = dict(straggler)
            self.say(describe_stragglers(straggler))

    def rolled_back(self) -> None:
        """Note that the steps since the last checkpoint are undone."""
        self.goodput.roll_back()

    def sync(self) -> None:
        """Return once every line is on disk, or the disk refuses it."""
        self._metrics.sync()

    def _say_start(self, checked: Checked, run: Run) -> None:
        workload, job, first = checked.workload, checked.workload.job, run.steps_taken
        words = f"{workload.spec.name}: {workload.spec.num_params:,} weights, layout {str(checked.layout)!r}, {checked.folder}"
        if checked.name:
            self.say(checked.name)
        self.say(words if checked.resume_from is None else f"{words}, resumes after step {first} of {checked.until}")
        for change in run.changes:
            self.say(change)
        if checked.first_weights is not None:
            self.say(f"starts from the weights of {checked.first_weights.origin}")
        for remark in (*(f"{job.model.source}: {remark}" for remark in workload.remarks), *workload.data_remarks):
            self.say(remark)
        if first == checked.until:
            self.say(f"step {first} was the last step: nothing is left to train")
        elif job.run.compile != "none":
            self.say(
                f"run.compile: step {first + 1} compiles the {job.run.compile} by {job.run.compile_backend}, which takes a while"
            )

    def end(self, evaluated: Evaluations, losses: Mapping[str, float], accuracy: float | None) -> None:
        """Close the metrics, and print the validation losses at the end, and whether the run ended because they did not become less."""
        self._metrics.close()
        if evaluated.is_over and evaluated.best is not None:
            best = evaluated.best
            self.say(f"ends early: no validation loss since step {best.step} was below {best.loss:.4f}")
        if losses:
            self.say(describe_losses(losses, evaluated.run.job.judge))
        if accuracy is not None:
            self.say(f"validation accuracy {accuracy:.1%}")
        if evaluated.run.steps_taken == self._first:
            self.goodput.forget()  # a finished run was looked at, and is as it was
            return
        self.goodput.save(evaluated.run.steps_taken, ended=True)
        self.say(self.goodput.to_line())

    def show_proof(self, proven: str, waived: Sequence[str], tried: Sequence[str]) -> None:
        """Print whether the layout is proven, and what is allowed or tried instead."""
        lines = [proven, *(f"not proven, but allowed: {text}" for text in waived)]
        if tried:
            lines.append(f"tried, not proven: {listed(tried, 4)}")
        for line in lines:
            self.say(line)


@dataclass(slots=True)
class Goodput:
    """The seconds of a run by what they were spent on, with those of its processes before this one."""

    path: Path
    clock: Callable[[], float] = time.time
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(get_args(_Spent), 0.0))
    _last: float = 0.0
    """When the time was last given to something."""
    _before: dict[str, float] = field(default_factory=dict)
    """The seconds of the processes before this one, and of the way to it."""
    _saved_steps_s: float = 0.0
    """Seconds of steps up to the last checkpoint."""

    @classmethod
    def of(cls, folder: Path, first: int, clock: Callable[[], float] = time.time) -> Goodput:
        """Return the times of a run that goes on after step `first`, from its folder; of a new run all are 0."""
        goodput = cls(folder / TIMES_FILE, clock, _last=clock())
        if first == 0:
            goodput.path.unlink(missing_ok=True)
        every = _rows(goodput.path)
        if rows := [row for row in every if row["step"] <= first]:
            goodput.seconds |= rows[-1]["seconds"]
            goodput._saved_steps_s = goodput.seconds["steps"]
            if not rows[-1]["ended"] or rows[-1]["step"] != max(row["step"] for row in every):
                goodput.seconds["restarts"] += max(0.0, goodput._last - rows[-1]["unix_s"])
        goodput._before = dict(goodput.seconds)
        return goodput

    def give(self, to: _Spent) -> None:
        """Give the time since the last call to one kind of work."""
        now = self.clock()
        self.seconds[to] += max(0.0, now - self._last)
        self._last = now

    @contextmanager
    def spend(self, to: _Spent) -> Iterator[None]:
        """Give the time of the body of the `with` statement to one kind of work, and that before it to steps."""
        self.give("steps")
        try:
            yield
        finally:
            self.give(to)

    def forget(self) -> None:
        """Forget what was given to anything by this process, which has taken no step."""
        self.seconds = dict(self._before)

    def roll_back(self) -> None:
        """Count the steps since the last checkpoint as skipped: the run has gone back to it."""
        self.seconds["skipped"] += self.seconds["steps"] - self._saved_steps_s
        self.seconds["steps"] = self._saved_steps_s

    def save(self, step: int, *, ended: bool = False) -> None:
        """Write the times up to a checkpoint of a step, or up to the run's end in order."""
        self._saved_steps_s = self.seconds["steps"]
        row = {"step": step, "unix_s": self._last, "seconds": self.seconds, "ended": ended}
        with contextlib.suppress(OSError), self.path.open("a", encoding="utf-8") as file:  # as on a full disk
            file.write(json.dumps(row) + "\n")

    @property
    def fraction(self) -> float:
        """The part of all seconds in steps that counted; 1 before any."""
        total_s = sum(self.seconds.values())
        return self.seconds["steps"] / total_s if total_s else 1.0

    def to_line(self) -> str:
        """Return what a person reads of it, one line."""
        others = {name: value for name, value in self.seconds.items() if name != "steps" and value >= 0.05}
        rest = ", ".join(f"{name} {value:,.1f} s" for name, value in sorted(others.items(), key=lambda item: -item[1]))
        total_s = sum(self.seconds.values())
        text = f"goodput {self.fraction:.1%}: {self.seconds['steps']:,.1f} of {total_s:,.1f} s were training steps"
        return f"{text}; {rest}" if rest else text


def _rows(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a file that are whole; a line that a crash has cut short is left out."""
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            rows.append(json.loads(line))
        except ValueError:
            continue
    return rows


def watch_of(run: Run) -> StragglerWatch | None:
    """Return the watch on slow ranks; None where this rank has no peers."""
    world = run.layout.world_size
    if world == 1:
        return None
    ranks = Ranks.of(run.layout, run.place.ranks_per_node)
    stages = [ranks.coordinate(rank, "pp") for rank in range(world)]
    return StragglerWatch(run.place.rank, stages, default_store(), is_gpu=run.place.device.type == "cuda")
