"""Whether a step is skipped that has a bad number or counts nothing: its samples are used up, and its update is left out.

Bounded, so that no run skips for ever.
"""

from __future__ import annotations

import math

from samestep.errors import DataError, NonFiniteError, SpikeError
from samestep.job_tables import NumericsTable
from samestep.runtime.step_observer import StepNumbers

MASKED = "no label of its batch counts, since all are masked, so no update is made"
"""The note of a step that counts nothing; the learning rate goes on with the number of the step."""


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
            raise NonFiniteError(
                "non-finite",
                f"step {step}: {note}; numerics.on_nonfinite = 'skip' would continue",
            )
        return self._policy == "skip"
