"""Loss spikes: a finite loss far above those of the steps before it, whose update is left out.

    m, s     mean and standard deviation of the losses of the last numerics.spike_window steps that were taken
    spike    loss > m + numerics.spike_deviations * max(s, |m| / 1000)

Until so many steps have been taken no loss is a spike, and the loss of a spike is not among the last ones. The loss is that
of the global batch, which every rank knows alike, so all ranks and all layouts decide alike; the window is a part of every
checkpoint, so a resumed run decides as one that never stopped. Source: Chowdhery et al. 2022 (PaLM), arXiv:2204.02311,
section 5.1, where training went back to a checkpoint before each spike and passed over the batches around it.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterable

from samestep.job_tables import NumericsTable

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
        if not self.acts:
            return ""
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
