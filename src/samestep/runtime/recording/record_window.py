"""A window of a rank: the steps that are recorded op by op, the marks that hear the ops, and the file that holds them.

On wish (`train.record_kernels`) torch.profiler runs meanwhile, for the operations of torch, or the kernels of a GPU, of each step:

```
recorder    begin_ns ├─ F0 ── layers.0 ──────────── ...       its clock: the host's monotonic one
profiler          anchor ├─ aten::mm ─ aten::add ─ ...        a clock of its own
```
Each step begins with *anchors*, ranges of the profiler whose times the host notes, too: so the times of both are those of one clock.
What belongs to which block is found by time when the record is read (`wings/explain/step_kernels.py`).

A recorder reads points of time, memory in use, and the time for which threads were queued. A stamp is a point of time of the host on a CPU, or of a
GPU's stream: an event, which the host launches before it goes on. Its time follows from that of an event at the begin of the step, once the
device has passed it, without any value that the host would wait for. Memory is sampled where a layer or a task ends, and named by the op
that has ended there:

    allocated   ▁▂▃▄▅▆▅▄▃▂▁        what tensors have; its most since the step began is the allocator's own count
    reserved    ▆▆▆▆▆▆▆▆▆▆▆        what the allocator has taken from the device

The host samples where it issues, in the order in which the allocator is asked. On a CPU the resident memory of the process is all
that a recorder can know: libraries are part of it, and a peak between two samples is not seen.

Linux counts for a process or a thread in files, which are kept open: reading one again takes two microseconds, opening it twenty.

    wall time of a thread = had a processor + queued for one + asleep, by its own wish: in a sleep, a read or a wait

A rank that is late because other programs run is queued; one that is late by what it does itself is not.
Source: Documentation/scheduler/sched-stats.rst (`schedstat`: nanoseconds on a processor, nanoseconds queued) and
Documentation/filesystems/proc.rst (`statm`: pages) of Linux.
"""

from __future__ import annotations

import bisect
import gc
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import IO, Any, Protocol

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, supported_activities
from torch.utils.hooks import RemovableHandle

from samestep.building.torch_seams import RecordFunctionFast, profiler_runs
from samestep.job import Job
from samestep.models.spec import ModelSpec, to_json
from samestep.output.durable_files import write_whole
from samestep.program import recorded
from samestep.program.program import Program
from samestep.program.recorded import Kernel, RecordedStep, RecordHead, SentOp, StepKernels
from samestep.runtime.recording.marks import LayerListener, mark_layers

Stamp = Any
"""Nanoseconds; or the nanoseconds of the host, and an event of a GPU."""
_PAGE = 4096


Sample = Any
"""What was sampled, as the system or the allocator says it: it is read after the step."""


class HostClock:
    """The monotonic clock of the host."""

    now = staticmethod(time.perf_counter_ns)

    def is_past(self, stamp: Stamp) -> bool:
        """Return whether the time of a stamp can be read without a wait."""
        return True

    def ns(self, stamps: Sequence[Stamp], base: tuple[int, Stamp]) -> Sequence[int]:
        """Return the times of stamps in nanoseconds."""
        return stamps

    def host_ns(self, stamp: Stamp) -> int:
        """Return when the host has taken a stamp."""
        return int(stamp)


class DeviceClock:
    """The clock of a GPU's current stream, in the host's nanoseconds."""

    def now(self) -> Stamp:
        """Return a new event."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return time.perf_counter_ns(), event

    def is_past(self, stamp: Stamp) -> bool:
        """Return whether the device has passed an event."""
        return bool(stamp[1].query())

    def host_ns(self, stamp: Stamp) -> int:
        """Return when the host has launched an event."""
        return int(stamp[0])

    def ns(self, stamps: Sequence[Stamp], base: tuple[int, Stamp]) -> Sequence[int]:
        """Return the times of events, from that of the step's begin."""
        began_ns, (_, first) = base
        return [began_ns + round(first.elapsed_time(event) * 1e6) for _, event in stamps]


def clock_of(device: torch.device) -> HostClock | DeviceClock:
    """Return the clock by which the ops of a device are measured."""
    return DeviceClock() if device.type == "cuda" else HostClock()


class MemorySampler:
    """Samples the memory of one device."""

    def __init__(self, device: torch.device) -> None:
        self._is_counted = device.type == "cuda"
        self.sample: Callable[[], Sample] = (
            partial(_allocated, device) if self._is_counted else _SystemFile("/proc/self/statm").text
        )
        """Returns what is in use now, for `read`."""

    def read(self, samples: Sequence[Sample]) -> Sequence[tuple[int, int, int]]:
        """Return the bytes in use, those reserved, and the most in use since the step began, of each sample."""
        if self._is_counted:
            return samples
        return [(int(sample.split()[1]) * _PAGE if sample else 0, 0, 0) for sample in samples]


def _allocated(device: torch.device) -> tuple[int, int, int]:
    stats = torch.cuda.memory_stats_as_nested_dict(device)
    allocated, reserved = stats["allocated_bytes"]["all"], stats["reserved_bytes"]["all"]
    return allocated["current"], reserved["current"], allocated["peak"]


class _SystemFile:
    """A file of numbers below /proc/self or /proc/thread-self; other threads and forked processes may read the same object."""

    def __init__(self, path: str) -> None:
        self._path, self._is_of_thread = path, "thread-self" in path
        self._owner = (0, 0)
        self._file = -1

    def read(self) -> list[bytes]:
        """Return the words of the file now; none where there is no such file."""
        return self.text().split()

    def text(self) -> bytes:
        """Return the file now; nothing where there is no such file."""
        owner = (os.getpid(), threading.get_ident() if self._is_of_thread else 0)
        if owner != self._owner:
            self.close()
            self._owner = owner
            try:
                self._file = os.open(self._path, os.O_RDONLY) if hasattr(os, "pread") else -1
            except OSError:
                return b""
        return os.pread(self._file, 256, 0) if self._file >= 0 else b""

    def close(self) -> None:
        """Close the file."""
        if self._file >= 0:
            os.close(self._file)
        self._owner, self._file = (0, 0), -1

    __del__ = close


class ProcessorTime:
    """The time of the thread that asks."""

    def __init__(self) -> None:
        self._counts = _SystemFile("/proc/thread-self/schedstat")

    def read(self) -> tuple[int, int | None]:
        """Return the nanoseconds for which this thread had a processor, and for which it was queued; None where the system does not say."""
        counts = self._counts.text().split()
        return time.thread_time_ns(), int(counts[1]) if len(counts) > 1 else None


def queued_threads() -> dict[str, int]:
    """Return the nanoseconds for which each thread of this process has wanted a processor and had none; empty where the system does not say."""
    queued_threads: dict[str, int] = {}
    try:
        threads = os.listdir("/proc/self/task")
    except OSError:
        return queued_threads
    for thread in threads:
        try:
            file = os.open(f"/proc/self/task/{thread}/schedstat", os.O_RDONLY)
        except OSError:
            continue  # it has ended
        try:
            queued_threads[thread] = int(os.read(file, 256).split()[1])
        except (OSError, IndexError):
            continue
        finally:
            os.close(file)
    return queued_threads


_ANCHOR = "samestep::step "
ANOTHER = "another profiler ran in this process, and torch has one at a time"
_ANCHORS = 3
"""Anchors of a step, of which the one that took least time is used."""
Anchor = tuple[int, str, int, int]
"""Step and name of an anchor, and the host's times before and after the profiler has noted its begin."""
Ran = tuple[str, int, int, int, int]
"""The name of what ran, when it was issued, began and ended, and its own nanoseconds, on the clock of the host."""


class WindowListener(LayerListener, Protocol):
    """Hears the layers of a window, and what the host does outside of tasks."""

    def begin(self, region: str) -> Callable[[], None]:
        """Hear that the host begins to do something outside of tasks; the result is called at its end."""


class RecordWindow:
    """The steps that are recorded op by op, and the file that holds them."""

    def __init__(self, steps: range, path: Path, job: Job, profile: KernelProfile | None) -> None:
        self.steps, self._path, self._job, self.profile = steps, path, job, profile
        self.held: Mapping[str, int] = {}
        self._file: IO[str] | None = None
        self._handles: list[RemovableHandle] = []
        self._collecting: Callable[[str, Mapping[str, int]], None] | None = None

    def overlaps(self, steps: range) -> bool:
        """Return whether it has one of some steps."""
        return self.steps.start < steps.stop and steps.start < self.steps.stop

    @property
    def is_open(self) -> bool:
        """Whether a step of it has begun."""
        return self._file is not None

    def open(self, recorder: WindowListener, head: RecordHead, module: nn.Module, spec: ModelSpec) -> None:
        """Mark the layers and begin the file."""
        folder = self._path.parent
        folder.mkdir(parents=True, exist_ok=True)
        if head.rank == 0:
            write_whole(folder / recorded.MODEL, to_json(spec))
            write_whole(folder / recorded.JOB, self._job.to_toml(with_folder=True))
        self._file = self._path.open("w", encoding="utf-8")
        self._file.write(recorded.head_line(head))
        self._file.flush()
        self._handles = mark_layers(module, spec, recorder)
        ends: list[Callable[[], None]] = []

        def collecting(phase: str, _: Mapping[str, int]) -> None:
            if phase == "start":
                ends.append(recorder.begin("host:gc"))
            elif ends:
                ends.pop()()

        self._collecting = collecting
        gc.callbacks.append(collecting)
        if self.profile is not None:
            self.profile.start()

    def write(self, step: RecordedStep, host_events: Sequence[Sequence[Any]]) -> None:
        """Append a step; `host_events` are what a profile needs besides."""
        if self._file is not None:
            self._file.write(recorded.step_line(step))
            self._file.flush()
            if self.profile is not None:
                self.profile.add(step, host_events)

    def leave(self) -> None:
        """Remove the marks."""
        for handle in self._handles:
            handle.remove()
        if self._collecting is not None:
            gc.callbacks.remove(self._collecting)
        self._handles, self._collecting = [], None
        if self.profile is not None:
            self.profile.stop()

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            if self.profile is not None:
                self.profile.write()
        self._file = None


def sent_ops(program: Program) -> list[SentOp]:
    """Return the collectives and messages of a step, in the order of the program, followed by those of exchanges."""
    sent_ops = [
        SentOp(op.owner, str(op.kind), op.axis, op.size_bytes, f"{task.kind}{task.microbatch}")
        for task, op in program.ops()
        if op.axis is not None
    ]
    exchanged = [op for op in program.exchange if op.axis is not None]
    last = f"{program.tasks[-1].kind}{program.tasks[-1].microbatch}"
    return sent_ops + [SentOp(op.owner, str(op.kind), str(op.axis), op.size_bytes, last) for op in exchanged]


def head_of(program: Program, spec: ModelSpec, rank: int, device: torch.device) -> RecordHead:
    """Return the description of a rank in front of its steps."""
    step = program.step
    ops = sent_ops(program)
    return RecordHead(
        rank=rank,
        world_size=step.layout.world_size,
        host=socket.gethostname(),
        clock=_clock_identity(),
        layout=str(step.layout),
        stage=step.stage,
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        groups={axis: list(step.ranks.group(rank, axis)) for axis in dict.fromkeys(op.axis for op in ops)},
        ops=ops,
        layers=[layer.name for layer in spec.layers],
        num_exchanged=len(ops) - sum(op.axis is not None for _, op in program.ops()),
    )


def _clock_identity() -> str:
    """Return a word that is equal for processes with the same monotonic clock: that of the boot, and the host's name."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return socket.gethostname()


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
        self._ran = sorted(_ran(list(ended.events() or ()), self._anchors), key=lambda pair: pair[1])

    def add(self, step: RecordedStep, events: Sequence[Sequence[Any]]) -> None:
        """Add a step whose times are known; `events` have times of the host's clock, the step those of the device's."""
        self._steps.append((step, events))

    def write(self) -> None:
        """Write the kernels of all steps."""
        with self._path.open("w", encoding="utf-8") as file:
            file.write(recorded.kernel_head(self._rank, self._missing))
            for step, events in self._steps:
                file.write(recorded.kernel_line(_of_step(step, events, self._ran)))


def _of_step(step: RecordedStep, events: Sequence[Sequence[Any]], ran: Sequence[Ran]) -> StepKernels:
    first, last = (
        bisect.bisect_left(ran, time_ns, key=lambda pair: pair[1]) for time_ns in (step.begin_ns, step.until_ns)
    )
    names: dict[str, int] = {}
    at = step.begin_ns
    kernels = [
        Kernel(names.setdefault(name, len(names)), issued - at, begin - at, end - at, own_ns)
        for name, issued, begin, end, own_ns in ran[first:last]
    ]
    return StepKernels(step=step.step, names=[*names], kernels=kernels, events=events)


def _ran(events: Iterable[Any], anchors: Sequence[Anchor]) -> Iterator[Ran]:
    """Yield the kernels that ran, or where the profiler has seen none the operations of the host, on the clock of the anchors."""
    events = list(events)
    seen = {event.name: round(event.time_range.start * 1e3) for event in events if event.name.startswith(_ANCHOR)}
    best: dict[int, tuple[int, int, int]] = {}
    for step, name, before, after in anchors:
        if name in seen:
            estimate = after - before, seen[name], (before + after) // 2 - seen[name]
            best[step] = min(best.get(step, estimate), estimate)
    offsets = sorted((at, offset) for _, at, offset in best.values())

    def on_host(time_us: float) -> int:
        at = round(time_us * 1e3)
        place = bisect.bisect_right(offsets, at, key=lambda pair: pair[0])
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
