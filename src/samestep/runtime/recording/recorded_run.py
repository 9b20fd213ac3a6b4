"""The method of a run that records where the time of its steps goes."""

from __future__ import annotations

from abc import abstractmethod
from pathlib import Path

from samestep.program import recorded as spans
from samestep.runtime.recording.step_recorder import StepRecorder


class RecordedRun:
    """The records of a run's steps."""

    recorder: StepRecorder
    """Where the time of its steps goes."""

    @property
    @abstractmethod
    def steps_taken(self) -> int:
        """The number of steps that were taken, in this process or before."""

    def record(self, steps: int | str, folder: str | Path = spans.FOLDER, *, kernels: bool = False) -> Path:
        """Record where the time of some steps goes, op by op, for `samestep explain FOLDER`; return the folder.

        `steps` is `FIRST:LAST`, counted from 1, or a number of steps; `kernels` adds what torch.profiler sees. Every rank calls
        it, and writes files of its own, in a folder that all ranks share.

        Raises:
            InputError: the text names no steps.
        """
        self.recorder.record(spans.parse_steps(str(steps), self.steps_taken), Path(folder), kernels=kernels)
        return Path(folder)
