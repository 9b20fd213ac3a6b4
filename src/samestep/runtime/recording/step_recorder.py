"""The recorder of a run: where the time of its steps goes, as sums in every step, and op by op in a window of steps.

```
step k      begin ── host ── F0 ──── B0 ──── reductions, agreement ── U ── end ── log, save, next batch ── until
                              │ layer, sent, wait, region: `program/recorded.py`                            begin of k + 1
```
It asks the device for no value: on a GPU the times are those of events, read once the device has passed them, a step later. It adds
no node to a graph: layers are marked by hooks on modules and on the gradients of their outputs, in a window alone.
"""

from __future__ import annotations

import gc
import socket
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from samestep.job import Job
from samestep.models.spec import ModelSpec
from samestep.models.spec_json import to_json
from samestep.output.output_file import write_whole
from samestep.program import recorded, recorded_kernels
from samestep.program.bodies import Task
from samestep.program.program import Program
from samestep.program.recorded import MemoryMark, RecordedStep, RecordHead, SentOp
from samestep.runtime.recording import marks
from samestep.runtime.recording.device_clock import Stamp, clock_of
from samestep.runtime.recording.kernel_profile import KernelProfile
from samestep.runtime.recording.layer_marks import mark_layers
from samestep.runtime.recording.memory_marks import MemorySampler
from samestep.runtime.recording.sums import StepSums, sums_of
from samestep.runtime.recording.system_files import ProcessorTime
from samestep.runtime.step_observer import Indices, MakeMode, StepObserver, StepScalars

_AROUND_LAYERS = {
    "F": "forward:between layers",
    "B": "backward:between layers",
    "W": "weight:between layers",
    "U": "update:optimizer",
}
"""Names of what a task does outside of its layers."""
ASKED_STEPS = 6
"""Steps that a signal lets be recorded: `explain` leaves the first one out."""


@dataclass(slots=True)
class _OpenStep:
    """A step whose events are heard, or not yet read."""

    step: int
    base: tuple[int, Stamp]
    """The host's time at its begin, and the stamp of that."""
    processor: tuple[int, int | None]
    """What the thread had of a processor, and was queued for one; until its end, since the thread began."""
    window: _Window | None
    """The window that it is in."""
    events: list[list[Any]] = field(default_factory=list)
    memory: list[tuple[Any, ...]] = field(default_factory=list)
    """A stamp, and the sample of then."""
    held: Mapping[str, int] = field(default_factory=dict)
    begun: list[tuple[int, Stamp]] = field(default_factory=list)
    """The host's time at the begin of each task, and the stamp of that, where the device is another clock."""
    counts: Counter[str] = field(default_factory=Counter)
    host_events: list[list[Any]] = field(default_factory=list)
    """The events with times of the host, where kernels are recorded and the device is another clock."""
    end: Stamp = None
    until: Stamp = None

    @property
    def hears(self) -> bool:
        """Whether ops belong to it: after its end those of evaluations come, of which there may be any number."""
        return self.end is None


def _since_begin(events: Sequence[Sequence[Any]], step: RecordedStep) -> list[list[Any]]:
    """Return events of the host with times since the begin of their step."""
    begin, until = step.begin_ns, step.until_ns
    return [
        [form, name, start - begin, (until if stop is None else stop) - begin, *more]
        for form, name, start, stop, *more in events
    ]


def _unheard() -> _OpenStep:
    return _OpenStep(0, (0, 0), (0, None), None)


class _Issued:
    """A collective or message that is issued; it is an `Issue`."""

    __slots__ = ("_event", "_number", "_recorder", "_step")

    def __init__(self, recorder: StepRecorder, owner: str, kind: str, step: _OpenStep) -> None:
        self._recorder, self._step = recorder, step.step
        key = f"{owner} {kind}" if kind else owner
        self._number = step.counts[key]
        step.counts[key] += 1
        self._event = ["sent", owner, recorder.now(), None, self._number, kind, 0]
        step.events.append(self._event)

    def sent(self, work: Any) -> Any:
        if work is None:
            return None
        self._event[6] = 1
        return marks.TimedWork(work, self._wait)

    def end(self) -> None:
        self._event[3] = self._recorder.now()

    def _wait(self) -> Callable[[], None]:
        event = ["wait", self._event[1], self._recorder.now(), None, self._number, self._event[5], self._step]
        return self._recorder.add(event)


class _RunningTask:
    """The context of a task, whose begin and end are noted; a class, since a generator takes twice as many calls."""

    __slots__ = ("_end", "_event", "_inner", "_opened", "_recorder", "_task")

    def __init__(
        self, recorder: StepRecorder, inner: AbstractContextManager[None], task: Task, opened: _OpenStep
    ) -> None:
        self._recorder, self._inner, self._task, self._opened = recorder, inner, task, opened

    def __enter__(self) -> None:
        self._inner.__enter__()
        self._event, self._end = self._recorder.note_task(self._task, self._opened)

    def __exit__(self, *error: Any) -> bool | None:
        self._end()
        if self._opened.window is not None:
            self._recorder.sample(self._event[3])
        return self._inner.__exit__(*error)


class StepRecorder(StepObserver):
    """Records the steps of a run on one rank; what it observes, the observer that it is given observes too."""

    def __init__(self, inner: StepObserver, job: Job, device: torch.device, rank: int) -> None:
        self._inner, self._job, self._device, self.rank = inner, job, device, rank
        self._clock = clock_of(device)
        self.now: Callable[[], Stamp] = self._clock.now
        self._open: _OpenStep | None = None
        self._unread: deque[_OpenStep] = deque()
        self._windows: list[_Window] = []
        """The windows that are not over, in the order of their steps, of which no two overlap."""
        self._left: list[_Window] = []
        """Windows that are over, while steps of theirs are not yet read."""
        self.folder = Path(recorded.FOLDER)
        """The folder of windows that a signal asks for."""
        self._axes: dict[str, str] | None = None
        """The axis of each collective of the program, by owner, from the first step on."""
        self.memory = MemorySampler(device)
        self._processor = ProcessorTime()
        self.sums = StepSums()
        """The sums of the newest step whose times are known."""

    # -- what the run calls ------------------------------------------------------------------------

    def record(self, steps: range, folder: Path, *, kernels: bool = False) -> None:
        """Record every op of some steps into a folder, in a file of this rank; windows with steps of these are given up.

        With `kernels` torch.profiler runs too, and its kernels are written into a file of their own.
        """
        for one in [one for one in self._windows if one.overlaps(steps)]:
            self._leave(one)
        path = recorded.path_of(folder, steps, self.rank)
        profile = KernelProfile(recorded_kernels.path_beside(path), self._device, self.rank) if kernels else None
        self._windows = sorted(
            [*self._windows, _Window(steps, path, self._job, profile)], key=lambda one: one.steps.start
        )

    def asked_to_record(self, step: int) -> str:
        """Record the steps after the next one, unless some of them are recorded anyway; return the line of the log.

        A rank may learn of it while it begins the next step, so that all ranks can record the one after that.
        """
        steps = range(step + 2, step + 2 + ASKED_STEPS)
        if any(one.overlaps(steps) for one in self._windows):
            return ""
        self.record(steps, self.folder, kernels=self._job.train.record_kernels)
        return f"steps {steps.start} to {steps.stop - 1} are recorded into {self.folder}, for samestep explain, as a signal has asked"

    @contextmanager
    def taking(
        self, step: int, program: Program, module: nn.Module, spec: ModelSpec, held: Callable[[], Mapping[str, int]]
    ) -> Iterator[None]:
        """Surround a step, counted from 1; `held` counts what is kept between steps, once in a window."""
        self._next(step, program, module, spec)
        opened = self._open
        yield
        if opened is not None and self._open is opened:
            opened.end = self.now()
            (had, queued), (had_before, before) = self._processor.read(), opened.processor
            opened.processor = had - had_before, None if queued is None or before is None else queued - before
            if (window := opened.window) is not None:
                opened.held = window.held = window.held or held()

    def close(self) -> None:
        """Write what is left of the window; the steps of this run are over, or a loop has ended its window."""
        self._finish_open()
        if self._unread and self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
        self._read()
        for one in [*self._windows]:
            self._leave(one)
        if marks.listener() is self:
            marks.listen(None)

    @property
    def step(self) -> int:
        """The step that is being taken, or was taken last, counted from 1; 0 before the first."""
        return 0 if self._open is None else self._open.step

    # -- what is observed --------------------------------------------------------------------------

    @property
    def is_proof(self) -> bool:  # type: ignore[override]
        """Whether the observer that it is given compares steps with those of another run."""
        return self._inner.is_proof

    @property
    def hears_scalars(self) -> bool:
        """Whether the observer that it wraps reads a step's scalars."""
        return self._inner.hears_scalars

    def dropout_mode(self) -> MakeMode | None:
        """Return the factory of the observer that it is given."""
        return self._inner.dropout_mode()

    def agreed(self, scalars: StepScalars) -> None:
        """Pass the scalars on."""
        self._inner.agreed(scalars)

    def running(self, task: Task, samples: Indices) -> AbstractContextManager[None]:
        """Note when a task begins and ends."""
        inner, opened = self._inner.running(task, samples), self._open
        return inner if opened is None or opened.end is not None else _RunningTask(self, inner, task, opened)

    def note_task(self, task: Task, opened: _OpenStep) -> tuple[list[Any], Callable[[], None]]:
        """Note that a task begins; return its event, and a function that ends it."""
        event = ["task", f"{task.kind.value}{task.microbatch}", self.now(), None]
        end = self.add(event)
        if self._device.type == "cuda":
            opened.begun.append((time.perf_counter_ns(), event[2]))
        if opened.window is not None:
            self.memory.begin(_AROUND_LAYERS.get(task.kind.value, "host"))
        return event, end

    def issue(self, owner: str, kind: str) -> marks.Issue:
        """Note that a collective or message is issued."""
        opened = self._open
        return _Issued(self, owner, kind, opened if opened is not None and opened.hears else _unheard())

    def begin(self, region: str) -> Callable[[], None]:
        """Note that the host does something outside of tasks."""
        return self.add(["region", region, self.now(), None])

    def add(self, event: list[Any]) -> Callable[[], None]:
        """Add an event that has begun; return a function that ends it."""
        twin = None
        if self._open is not None and (self._open.hears or event[0] == "region"):
            self._open.events.append(event)
            if self._open.window is not None and self._open.window.profile is not None and self._device.type == "cuda":
                twin = [*event[:2], time.perf_counter_ns(), None, *event[4:]]
                self._open.host_events.append(twin)

        def end() -> None:
            event[3] = self.now()
            if twin is not None:
                twin[3] = time.perf_counter_ns()

        return end

    def sample(self, stamp: Stamp) -> None:
        """Note the memory at the end of an op of a step in a window."""
        if self._open is not None and self._open.window is not None and self._open.hears:
            self._open.memory.append((stamp, *self.memory.sample()))

    # -- steps and windows -------------------------------------------------------------------------

    def _next(self, step: int, program: Program, module: nn.Module, spec: ModelSpec) -> None:
        self._finish_open()
        for one in [one for one in self._windows if step >= one.steps.stop]:
            self._leave(one)
        window = next((one for one in self._windows if step in one.steps), None)
        if window is not None and not window.is_open:
            window.open(self, program, module, spec, self.rank, self._device)
        if window is not None and window.profile is not None:
            window.profile.begin_step(step)
        if self._axes is None:
            self._axes = {op.owner: op.axis for op in sent_ops(program)}
        self._open = _OpenStep(step, (time.perf_counter_ns(), self.now()), self._processor.read(), window)
        marks.listen(self)
        self._read()

    def _finish_open(self) -> None:
        if self._open is None:
            return
        opened, self._open = self._open, None
        opened.until = self.now()
        if opened.end is None:  # the step has failed
            return
        self._unread.append(opened)
        if self._device.type != "cuda":
            self._read()

    def _read(self, until_empty: bool = False) -> None:
        """Read the steps that the device has passed."""
        while self._unread and (until_empty or self._clock.is_past(self._unread[0].until)):
            one = self._unread.popleft()
            step = self._closed(one)
            self.sums = sums_of(step, self._axes or {})
            if one.window is not None:
                one.window.write(step, _since_begin(one.host_events, step))
            self._close_files()

    def _closed(self, one: _OpenStep) -> RecordedStep:
        """Return a step with its times in nanoseconds."""
        base, clock = one.base, self._clock
        begin = clock.ns(base[1], base)

        def since(stamp: Stamp) -> int:
            return clock.ns(stamp, base) - begin

        until = since(one.until)
        events = [
            [form, name, since(start), until if stop is None else since(stop), *more]
            for form, name, start, stop, *more in one.events
        ]
        ahead = [clock.ns(stamp, base) - host for host, stamp in one.begun]
        return RecordedStep(
            step=one.step,
            begin_ns=begin,
            end_ns=begin + since(one.end),
            until_ns=begin + until,
            cpu_ns=one.processor[0],
            queued_ns=one.processor[1],
            ahead_ns=max(0, *ahead) if ahead else 0,
            events=events,
            memory=[MemoryMark(since(stamp), *sampled) for stamp, *sampled in one.memory],
            held=one.held,
        )

    def _leave(self, window: _Window) -> None:
        """End a window: its marks are removed now, and its file is closed once its last step is written."""
        self._windows.remove(window)
        window.leave()
        self._left.append(window)
        self._close_files()

    def _close_files(self) -> None:
        for one in [one for one in self._left if all(step.window is not one for step in self._unread)]:
            self._left.remove(one)
            one.close()


class _Window:
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

    def open(
        self,
        recorder: StepRecorder,
        program: Program,
        module: nn.Module,
        spec: ModelSpec,
        rank: int,
        device: torch.device,
    ) -> None:
        """Mark the layers and begin the file."""
        folder = self._path.parent
        folder.mkdir(parents=True, exist_ok=True)
        if rank == 0:
            write_whole(folder / recorded.MODEL, to_json(spec))
            write_whole(folder / recorded.JOB, self._job.to_toml(with_folder=True))
        self._file = self._path.open("w", encoding="utf-8")
        self._file.write(recorded.head_line(_head(program, spec, rank, device)))
        self._file.flush()

        def forward(name: str) -> Callable[[], None]:
            event = ["layer", name, recorder.now(), None]
            end_of_event = recorder.add(event)
            recorder.memory.begin(f"forward:{name}")

            def end() -> None:
                end_of_event()
                recorder.sample(event[3])

            return end

        def backward(name: str) -> None:
            event = ["backward", name, recorder.now(), None]
            recorder.add(event)()
            recorder.sample(event[3])
            recorder.memory.begin(f"backward:{name}")

        self._handles = mark_layers(module, spec, forward, backward)
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
    found = [
        SentOp(op.owner, str(op.kind), op.axis, op.size_bytes, f"{task.kind}{task.microbatch}")
        for task, op in program.ops()
        if op.axis is not None
    ]
    exchanged = [op for phases in program.exchanges for ops in phases.values() for op in ops if op.axis is not None]
    last = f"{program.tasks[-1].kind}{program.tasks[-1].microbatch}"
    return found + [SentOp(op.owner, str(op.kind), str(op.axis), op.size_bytes, last) for op in exchanged]


def _head(program: Program, spec: ModelSpec, rank: int, device: torch.device) -> RecordHead:
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
    )


def _clock_identity() -> str:
    """Return a word that is equal for processes with the same monotonic clock: that of the boot, and the host's name."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return socket.gethostname()
