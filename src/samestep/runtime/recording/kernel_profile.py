"""torch.profiler during a window, on wish (`train.record_kernels`): the operations of torch, or the kernels of a GPU, of each step.

```
recorder    begin_ns ├─ F0 ── layers.0 ──────────── ...       its clock: the host's monotonic one
profiler          anchor ├─ aten::mm ─ aten::add ─ ...        a clock of its own
```
Each step begins with *anchors*, ranges of the profiler whose times the host notes, too: so the times of both are those of one clock.
What belongs to which block is found by time when the record is read (`explanation/step_kernels.py`).
"""

from __future__ import annotations

import bisect
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, supported_activities

from samestep.building.torch_seams import RecordFunctionFast, profiler_runs
from samestep.program import recorded_kernels
from samestep.program.recorded import RecordedStep
from samestep.program.recorded_kernels import Kernel, StepKernels

_ANCHOR = "samestep::step "
ANOTHER = "another profiler ran in this process, and torch has one at a time"
_ANCHORS = 3
"""Anchors of a step, of which the one that took least time is used."""
Anchor = tuple[int, str, int, int]
"""Step and name of an anchor, and the host's times before and after the profiler has noted its begin."""
Ran = tuple[str, int, int, int, int]
"""The name of what ran, when it was issued, began and ended, and its own nanoseconds, on the clock of the host."""


class KernelProfile:
    """The profiler of one window on one rank."""

    def __init__(self, path: Path, device: torch.device, rank: int) -> None:
        self._path, self._device, self._rank = path, device, rank
        self._profile: profile | None = None
        self._missing = ""
        self._anchors: list[Anchor] = []
        self._ran: list[Ran] = []
        self._steps: list[tuple[RecordedStep, Sequence[Sequence[Any]]]] = []

    def start(self) -> None:
        """Begin to profile."""
        wanted = (
            {ProfilerActivity.CPU, ProfilerActivity.CUDA} if self._device.type == "cuda" else {ProfilerActivity.CPU}
        )
        if profiler_runs():
            self._missing = ANOTHER
            return
        self._profile = profile(activities=wanted & supported_activities(), acc_events=True)
        self._profile.__enter__()

    def begin_step(self, step: int) -> None:
        """Mark the begin of a step."""
        for number in range(_ANCHORS):
            name = f"{_ANCHOR}{step}.{number}"
            mark = RecordFunctionFast(name)
            before = time.perf_counter_ns()
            mark.__enter__()
            after = time.perf_counter_ns()
            mark.__exit__(None, None, None)
            self._anchors.append((step, name, before, after))

    def stop(self) -> None:
        """End the profile, and keep what ran."""
        ended, self._profile = self._profile, None
        if ended is None:
            return
        ended.__exit__(None, None, None)
        self._ran = sorted(_ran(list(ended.events() or ()), self._anchors), key=lambda one: one[1])

    def add(self, step: RecordedStep, events: Sequence[Sequence[Any]]) -> None:
        """Add a step whose times are known; `events` have times of the host's clock, the step those of the device's."""
        self._steps.append((step, events))

    def write(self) -> None:
        """Write the kernels of all steps."""
        with self._path.open("w", encoding="utf-8") as file:
            file.write(recorded_kernels.head_line(self._rank, self._missing))
            for step, events in self._steps:
                file.write(recorded_kernels.step_line(_of_step(step, events, self._ran)))


def _of_step(step: RecordedStep, events: Sequence[Sequence[Any]], ran: Sequence[Ran]) -> StepKernels:
    first, last = (
        bisect.bisect_left(ran, time_ns, key=lambda one: one[1]) for time_ns in (step.begin_ns, step.until_ns)
    )
    names: dict[str, int] = {}
    at = step.begin_ns
    kernels = [
        Kernel(names.setdefault(name, len(names)), issued - at, begin - at, end - at, own)
        for name, issued, begin, end, own in ran[first:last]
    ]
    return StepKernels(step=step.step, names=[*names], kernels=kernels, events=events)


def _ran(events: Iterable[Any], anchors: Sequence[Anchor]) -> Iterator[Ran]:
    """Yield the kernels that ran, or where the profiler has seen none the operations of the host, on the clock of the anchors."""
    events = list(events)
    seen = {event.name: round(event.time_range.start * 1e3) for event in events if event.name.startswith(_ANCHOR)}
    best: dict[int, tuple[int, int, int]] = {}
    for step, name, before, after in anchors:
        if name in seen:
            found = after - before, seen[name], (before + after) // 2 - seen[name]
            best[step] = min(best.get(step, found), found)
    offsets = sorted((at, offset) for _, at, offset in best.values())

    def on_host(time_us: float) -> int:
        at = round(time_us * 1e3)
        place = bisect.bisect_right(offsets, at, key=lambda one: one[0])
        return at + offsets[max(0, place - 1)][1]

    if not offsets:
        return
    operations = [event for event in events if _is_of_host(event) and not _is_note(event)]
    launched = {event.id: event for event in operations}
    kernels = [event for event in events if not _is_of_host(event) and event.id in launched]
    for event in kernels or operations:
        begin, end = on_host(event.time_range.start), on_host(event.time_range.end)
        by = launched[event.id].time_range
        issued = on_host((by.start + by.end) / 2)
        yield event.name, issued, begin, end, end - begin if kernels else round(event.self_cpu_time_total * 1e3)


def _is_of_host(event: Any) -> bool:
    return bool(event.device_type.name == "CPU")


def _is_note(event: Any) -> bool:
    """Return whether an event is a range of a user, of samestep or of a collective, and no operation."""
    return (
        event.is_async
        or event.name.startswith(("samestep::", "gloo:", "nccl:"))
        or bool(getattr(event, "is_user_annotation", False))
    )
