"""The checkpoints of a run: when they are saved, by `[checkpoint]` of the job and on request, and what follows a
failure."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from samestep.errors import SaveError
from samestep.runtime.checkpoints import checkpoint, manifests
from samestep.runtime.checkpoints.writer import Retention, Writing
from samestep.runtime.processes.messages import gather_values
from samestep.runtime.run import Run
from samestep.runtime.step_report import StepReport


class Saver:
    """The checkpoints of a run; with `checkpoint.background` one of them may still be on its way to the disk."""

    def __init__(self, run: Run, folder: Path, say: Callable[[str], None]) -> None:
        self._run, self._folder, self._say = run, folder, say
        self._settings = run.job.checkpoint
        self._retention = Retention(self._settings.keep, self._settings.keep_every)
        self._writing: Writing | None = None

    def is_due(self, report: StepReport) -> bool:
        """Return whether a checkpoint follows a step that is not the last one."""
        every = self._settings.every
        return report.save or (every > 0 and report.step % every == 0)

    def save(self, *, is_last: bool) -> None:
        """Save a checkpoint once the one before is on disk; the last one is on disk when this returns.

        Collective over the world, see [Note: collective calls].

        Raises:
            SaveError: the last one cannot be written, or another one where `checkpoint.on_failure` is "stop".
        """
        self._try(self._finish, must=False)
        self._try(self._begin, must=is_last)
        if is_last or not self._settings.background:
            self._try(self._finish, must=is_last)

    def roll_back(self, step: int) -> str:
        """Restore weights and states of the newest checkpoint and continue after `step`; return one line that says so.

        Collective over the world, see [Note: collective calls].

        Raises:
            CheckpointError: the checkpoint is damaged.
        """
        run = self._run
        self._try(self._finish, must=False)
        newest = gather_values(str(manifests.latest(self._folder) or ""), run.layout.world_size)[0]
        if not newest:
            return f"step {step}: there is no checkpoint to go back to"
        spikes = run.spikes.count
        checkpoint.load(run, Path(newest))
        back, run.steps_taken, run.spikes.count = run.steps_taken, step, spikes
        run.replicas.catch_up(back, step)
        return f"step {step}: goes on with the weights from after step {back}, without the samples since"

    def _begin(self) -> None:
        self._writing = checkpoint.begin(self._run, self._folder, self._retention)

    def _finish(self) -> None:
        writing, self._writing = self._writing, None
        if writing is not None:
            checkpoint.finish(self._run, writing)

    def _try(self, save: Callable[[], None], *, must: bool) -> None:
        try:
            save()
        except SaveError as error:
            if must or self._settings.on_failure == "stop":
                raise
            self._say(f"warning: {error}; training goes on")
