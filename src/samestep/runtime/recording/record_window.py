"""A window of a rank: the steps that are recorded op by op, the marks that hear the ops, and the file that holds them.

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

import gc
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import IO, Any, Protocol

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from samestep.job import Job
from samestep.models.spec import ModelSpec, to_json
from samestep.output.durable_files import write_whole
from samestep.program import recorded
from samestep.program.program import Program
from samestep.program.recorded import RecordedStep, RecordHead, SentOp
from samestep.runtime.recording.marks import LayerListener, mark_layers

Stamp = Any
"""Nanoseconds, or an event of a GPU."""
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


class WindowListener(LayerListener, Protocol):
    """Hears the layers of a window, and what the host does outside of tasks."""

    def begin(self, region: str) -> Callable[[], None]:
        """Hear that the host begins to do something outside of tasks; the result is called at its end."""


class RecordWindow:
    """The steps that are recorded op by op, and the file that holds them."""

    def __init__(self, steps: range, path: Path, job: Job) -> None:
        self.steps, self._path, self._job = steps, path, job
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

    def write(self, step: RecordedStep) -> None:
        """Append a step."""
        if self._file is not None:
            self._file.write(recorded.step_line(step))
            self._file.flush()

    def leave(self) -> None:
        """Remove the marks."""
        for handle in self._handles:
            handle.remove()
        if self._collecting is not None:
            gc.callbacks.remove(self._collecting)
        self._handles, self._collecting = [], None

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
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
