"""Steps that are skipped: their samples are used up, and their update is left out. They have a bad number, count nothing, or are loss spikes.

    m, s     mean and standard deviation of the losses of the last numerics.spike_window steps that were taken
    spike    loss > m + numerics.spike_deviations * max(s, |m| / 1000)

Until so many steps have been taken no loss is a spike, and the loss of a spike is not among the last ones. The loss is that
of the global batch, which every rank knows alike, so all ranks and all layouts decide alike; the window is a part of every
checkpoint, so a resumed run decides as one that never stopped. Source: Chowdhery et al. 2022 (PaLM), arXiv:2204.02311,
section 5.1, where training went back to a checkpoint before each spike and passed over the batches around it.

A run skips at most `numerics.max_skipped` steps in a row.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterable

from samestep.errors import DataError, NonFiniteError, SpikeError
from samestep.job_tables import NumericsTable
from samestep.runtime.step_observer import StepNumbers

MASKED = "no label of its batch counts, since all are masked, so no update is made"
"""The note of a step that counts nothing; the learning rate goes on with the number of the step."""
_LEAST_DEVIATION = 1e-3
"""The least standard deviation, over the mean: losses that hardly differ would make every one a spike."""


class SpikeWatch:
    """The losses of the last steps, and how many spikes there were."""

    def __init__(self, numerics: NumericsTable) -> None:
        self.acts = numerics.on_spike != "continue"
        """Whether a spike changes what a step does; otherwise no loss is kept."""
        self.losses: deque[float] = deque(maxlen=numerics.spike_window)
        """The losses that the next one is held against, the newest last."""
        self.count = 0
        """The number of spikes of the whole run so far."""
        self._most = numerics.spike_deviations

    def judge(self, loss: float) -> str:
        """Return why a step's finite loss is a spike, as text; empty where it is none, and it is kept then."""
        if len(self.losses) == self.losses.maxlen:
            mean, deviation = statistics.fmean(self.losses), statistics.pstdev(self.losses)
            deviation = max(deviation, _LEAST_DEVIATION * abs(mean))
            if deviation > 0.0 and loss > mean + self._most * deviation:
                self.count += 1
                above = (loss - mean) / deviation
                return (
                    f"loss {loss:.4f} is a spike, {above:.1f} standard deviations above {mean:.4f}, the mean of the last "
                    f"{len(self.losses)} steps"
                )
        if math.isfinite(loss):
            self.losses.append(loss)
        return ""

    def restore(self, losses: Iterable[float], count: int) -> None:
        """Set what a checkpoint holds."""
        self.losses.clear()
        self.losses.extend(losses)
        self.count = count


class SkippedSteps:
    """The number of steps that were skipped since the last one that was not, and the policy of the job."""

    def __init__(self, numerics: NumericsTable) -> None:
        self._policy, self._most = numerics.on_nonfinite, numerics.max_skipped
        self._num_in_a_row = 0

    def judge(self, step: int, note: str, numbers: StepNumbers, *, is_scaled: bool) -> bool:
        """Return whether a step, counted from 1, is skipped: if there is a note on why it is unusual. Every rank decides alike.

        Raises:
            NonFiniteError, SpikeError, DataError: as `_skips` says.
        """
        skipped = bool(note) and self._skips(step, note, numbers, is_scaled=is_scaled)
        self._num_in_a_row = self._num_in_a_row + 1 if skipped else 0
        return skipped

    def _skips(self, step: int, note: str, numbers: StepNumbers, *, is_scaled: bool) -> bool:
        """Return whether a step is skipped that is not finite, whose loss is a spike, or of which every label is masked.

        Raises:
            NonFiniteError: `numerics.on_nonfinite` is "stop", or `numerics.max_skipped` steps were skipped before it.
            SpikeError: so many were skipped before a spike.
            DataError: so many were skipped before a step that counts nothing.
        """
        is_spike = numbers.are_finite
        if self._num_in_a_row >= self._most:
            kind = DataError if numbers.is_masked else SpikeError if is_spike else NonFiniteError
            raise kind(
                "skipped-too-many",
                f"step {step}: {note}; the {self._most} steps before were skipped too, and "
                f"numerics.max_skipped = {self._most}",
            )
        if is_spike or numbers.is_masked:
            return True
        if math.isfinite(numbers.loss) and is_scaled:
            return True  # an overflow of scaled gradients: the next step runs at half the scale
        if self._policy == "stop":
            raise NonFiniteError("non-finite", f"step {step}: {note}; numerics.on_nonfinite = 'skip' would continue")
        return self._policy == "skip"
