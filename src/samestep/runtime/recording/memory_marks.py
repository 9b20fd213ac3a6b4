"""The memory of a rank within a step of a window: sampled where a layer or a task ends, and named by the op that has ended there.

    allocated   ▁▂▃▄▅▆▅▄▃▂▁        what tensors have; its most since the step began is the allocator's own count
    reserved    ▆▆▆▆▆▆▆▆▆▆▆        what the allocator has taken from the device

The host samples where it issues, in the order in which the allocator is asked, so that nothing is waited for. On a CPU the resident
memory of the process is all that a recorder can know: libraries are part of it, and a peak between two samples is not seen.
"""

from __future__ import annotations

import torch

from samestep.runtime.recording.system_files import SystemFile

_PAGE = 4096


class MemorySampler:
    """Samples the memory of one device; `begin` and `name` keep the op that is being done."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._resident = device, SystemFile("/proc/self/statm")
        self._doing = ""

    def begin(self, op: str) -> None:
        """Note the op that begins."""
        self._doing = op

    def sample(self) -> tuple[int, int, int, str]:
        """Return the bytes in use, those reserved, the most in use since the step began, and the op that has ended."""
        if self._device.type != "cuda":
            pages = self._resident.read()
            return int(pages[1]) * _PAGE if pages else 0, 0, 0, self._doing
        found = torch.cuda.memory_stats_as_nested_dict(self._device)
        allocated, reserved = found["allocated_bytes"]["all"], found["reserved_bytes"]["all"]
        return allocated["current"], reserved["current"], allocated["peak"], self._doing
