"""The memory of a rank within a step of a window: sampled where a layer or a task ends, and named by the op that has ended there.

    allocated   ▁▂▃▄▅▆▅▄▃▂▁        what tensors have; its most since the step began is the allocator's own count
    reserved    ▆▆▆▆▆▆▆▆▆▆▆        what the allocator has taken from the device

The host samples where it issues, in the order in which the allocator is asked, so that nothing is waited for. On a CPU the resident
memory of the process is all that a recorder can know: libraries are part of it, and a peak between two samples is not seen.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from samestep.runtime.recording.system_files import SystemFile

_PAGE = 4096


Sample = Any
"""What was sampled, as the system or the allocator says it: it is read after the step."""


class MemorySampler:
    """Samples the memory of one device."""

    def __init__(self, device: torch.device) -> None:
        self._is_counted = device.type == "cuda"
        self.sample: Callable[[], Sample] = (
            partial(_allocated, device) if self._is_counted else SystemFile("/proc/self/statm").text
        )
        """Returns what is in use now, for `read`."""

    def read(self, samples: Sequence[Sample]) -> Sequence[tuple[int, int, int]]:
        """Return the bytes in use, those reserved, and the most in use since the step began, of each sample."""
        if self._is_counted:
            return samples
        return [(int(sample.split()[1]) * _PAGE if sample else 0, 0, 0) for sample in samples]


def _allocated(device: torch.device) -> tuple[int, int, int]:
    found = torch.cuda.memory_stats_as_nested_dict(device)
    allocated, reserved = found["allocated_bytes"]["all"], found["reserved_bytes"]["all"]
    return allocated["current"], reserved["current"], allocated["peak"]
