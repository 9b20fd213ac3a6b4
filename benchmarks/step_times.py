"""The seconds of a step and its peak of memory, whether the host waits for the device in each step or runs ahead of it.

Steps are timed in groups, between two moments at which the host waits for the device:

    seconds of a step = median over groups of (seconds of a group / its steps)

Long steps stand alone in a group: what the host does at its two ends then weighs little.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

FIRST_STEPS = 3
"""Steps before the timed ones: kernels are chosen, the allocator's memory grows."""

ENOUGH_S = 1.0
"""Seconds of a group that are enough."""

Losses = Iterator[Callable[[], float]]
"""One step after the other; calling what a step yields waits for its loss and returns it."""


@dataclass(frozen=True, slots=True)
class Timed:
    """What steps needed."""

    losses: tuple[float, ...]
    """Of the first steps."""
    first_step_s: float
    step_s: float
    allocated_bytes: int
    """The peak that torch's allocator had given away on a GPU; 0 on a CPU."""
    reserved_bytes: int
    """The peak that it had taken from the driver."""


def timed(device: torch.device, steps: Losses, groups: int, of: int) -> Timed:
    """Take the first steps, then `groups` groups of at most `of` steps, which are timed."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    began = time.perf_counter()
    losses = [next(steps)()]
    _wait(device)
    first_s = last_s = time.perf_counter() - began
    for _ in range(FIRST_STEPS - 1):
        began = time.perf_counter()
        losses.append(next(steps)())
        last_s = time.perf_counter() - began
    of = min(of, math.ceil(ENOUGH_S / max(last_s, 1e-9)))
    taken = []
    for _ in range(groups):
        _wait(device)
        began = time.perf_counter()
        for _ in range(of):
            read = next(steps)
        read()
        _wait(device)
        taken.append((time.perf_counter() - began) / of)
    most = (0, 0)
    if device.type == "cuda":
        most = (torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device))
    return Timed(tuple(losses), first_s, statistics.median(taken), *most)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
