"""Stamps: points of time of the host on a CPU, or of a GPU's stream, which are read once the device has passed them.

A stamp of a GPU is an event: the host launches it and goes on. Its time follows from that of an event at the begin of the step,
without any value that the host would wait for.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch

Stamp = Any
"""Nanoseconds, or an event of a GPU."""


class HostClock:
    """The monotonic clock of the host."""

    now = staticmethod(time.perf_counter_ns)

    def is_past(self, stamp: Stamp) -> bool:
        """Return whether the time of a stamp can be read without a wait."""
        return True

    def ns(self, stamps: Sequence[Stamp], base: tuple[int, Stamp]) -> Sequence[int]:
        """Return the times of stamps in nanoseconds."""
        return stamps


class DeviceClock:
    """The clock of a GPU's current stream, in the host's nanoseconds."""

    def now(self) -> Stamp:
        """Return a new event."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def is_past(self, stamp: Stamp) -> bool:
        """Return whether the device has passed an event."""
        return bool(stamp.query())

    def ns(self, stamps: Sequence[Stamp], base: tuple[int, Stamp]) -> Sequence[int]:
        """Return the times of events, from that of the step's begin."""
        began_ns, first = base
        return [began_ns + round(first.elapsed_time(stamp) * 1e6) for stamp in stamps]


def clock_of(device: torch.device) -> HostClock | DeviceClock:
    """Return the clock by which the ops of a device are measured."""
    return DeviceClock() if device.type == "cuda" else HostClock()
