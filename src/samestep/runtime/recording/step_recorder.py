"""The recorder of a run: where the time of its steps goes, as sums in every step, and op by op in a window of steps.

```
step k      begin ── host ── F0 ──── B0 ──── reductions, agreement ── U ── end ── log, save, next batch ── until
                              │ layer, sent, wait, region: `program/recorded.py`                            begin of k + 1
```
It asks the device for no value: on a GPU the times are those of events, read once the device has passed them, a step later. It adds
no node to a graph: layers are marked by hooks on modules and on the gradients of their outputs, in a window alone.
"""

from __future__ import annotations

import functools
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from samestep.job import Job
from samestep.models.spec import ModelSpec
from samestep.program import recorded
from samestep.program.ops import Task
from samestep.program.program import Program
from samestep.program.recorded import MemoryMark, RecordedStep
from samestep.runtime.recording import marks
from samestep.runtime.recording.marks import LayerEvent
from samestep.runtime.recording.record_window import (
    MemorySampler,
    ProcessorTime,
    RecordWindow,
    Sample,
    Stamp,
    clock_of,
    head_of,
    queued_threads,
    sent_ops,
)
from samestep.runtime.recording.sums import StepSums, sums_of
from samestep.runtime.step_observer import Indices, StepObserver

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
    window: RecordWindow | None
    """The window that it is in."""
    is_weighed: bool = False
    """Whether the bytes of what is sent are counted: in the first step of a window, whose times are left out."""
    threads: Mapping[str, int] = field(default_factory=dict)
    """For how long each thread was queued for a processor before the step, in a window."""
    others_queued_ns: int | None = None
    events: list[list[Any]] = field(default_factory=list)
    memory: list[tuple[Stamp, Sample, str]] = field(default_factory=list)
    """A stamp, what was sampled then, and the op that had ended."""
    held: Mapping[str, int] = field(default_factory=dict)
    begun: list[tuple[int, Stamp]] = field(default_factory=list)
    """The host's time at the begin of each task, and the stamp of that, where the device is another clock."""
    counts: defaultdict[str, int] = field(default_factory=functools.partial(defaultdict, int))
    end: Stamp = None
    """Until it has a value ops belong to the step: after its end those of evaluations come, of which there may be any number."""
    until: Stamp = None


def _nothing() -> None:
    """End an event that is not noted."""


def _unheard() -> _OpenStep:
    return _OpenStep(0, (0, 0), (0, None), None)


class _Issued:
    """A collective or message that is issued: an `Issue`, and the work of torch, of which it records the waits."""

    __slots__ = ("_event", "_number", "_recorder", "_step", "_work", "is_weighed")

    def __init__(self, recorder: StepRecorder, owner: str, kind: str, step: _OpenStep) -> None:
        self._recorder, self._step, self.is_weighed = recorder, step.step, step.is_weighed
        key = f"{owner} {kind}" if kind else owner
        self._number = step.counts[key]
        step.counts[key] += 1
        self._event = ["sent", owner, recorder.now(), None, self._number, kind, 0]
        step.events.append(self._event)

    def sent(self, work: Any) -> Any:
        if work is None:
            return None
        self._event[6] = 1
        self._work = work
        return self

    def end(self, size_bytes: int | None) -> None:
        self._event[3] = self._recorder.now()
        if size_bytes is not None:
            self._event.append(size_bytes)

    def wait(self, *args: Any) -> Any:
        """Wait as the work does."""
        event = ["wait", self._event[1], self._recorder.now(), None, self._number, self._event[5], self._step]
        self._recorder.append(event)
        try:
            return self._work.wait(*args)
        finally:
            event[3] = self._recorder.now()

    def __getattr__(self, name: str) -> Any:
        """Return what else the work has."""
        return getattr(self._work, name)


class _RunningTask:
    """The context of a task, whose begin and end are noted; a class, since a generator takes twice as many calls."""

    __slots__ = ("_event", "_inner", "_opened", "_recorder", "_task")

    def __init__(
        self, recorder: StepRecorder, inner: AbstractContextManager[None] | None, task: Task, opened: _OpenStep
    ) -> None:
        self._recorder, self._inner, self._task, self._opened = recorder, inner, task, opened

    def __enter__(self) -> None:
        if self._inner is not None:
            self._inner.__enter__()
        recorder, opened, kind = self._recorder, self._opened, self._task.body.kind
        self._event = ["task", f"{kind}{self._task.microbatch}", recorder.now(), None]
        if recorder.device.type == "cuda":
            opened.begun.append((time.perf_counter_ns(), self._event[2]))
        if opened.window is not None:
            recorder.doing = _AROUND_LAYERS.get(kind, "host")
        recorder.append(self._event)

    def __exit__(self, *error: Any) -> bool | None:
        self._event[3] = self._recorder.now()
        if self._opened.window is not None:
            self._recorder.sample(self._event[3])
        return None if self._inner is None else self._inner.__exit__(*error)


class StepRecorder:
    """Records the steps of a run on one rank."""

    def __init__(self, job: Job, device: torch.device, rank: int) -> None:
        self._job, self.device, self.rank = job, device, rank
        self._clock = clock_of(device)
        self.now: Callable[[], Stamp] = self._clock.now
        self._open: _OpenStep | None = None
        self._unread: deque[_OpenStep] = deque()
        self._windows: list[RecordWindow] = []
        """The windows that are not over, in the order of their steps, of which no two overlap."""
        self._left: list[RecordWindow] = []
        """Windows that are over, while steps of theirs are not yet read."""
        self.folder = Path(recorded.FOLDER)
        """The folder of windows that a signal asks for."""
        self._axes: dict[str, str] | None = None
        """The axis of each collective of the program, by owner, from the first step on."""
        self._memory = MemorySampler(device)
        self.doing = ""
        """The op that is being done."""
        self._processor = ProcessorTime()
        self._newest: _OpenStep | RecordedStep | None = None
        """The newest step whose times are known."""
        self._sums = StepSums()

    # -- what the run calls ------------------------------------------------------------------------

    def record(self, steps: range, folder: Path) -> None:
        """Record every op of some steps into a folder, in a file of this rank; windows with steps of these are given up."""
        for overlapping in [window for window in self._windows if window.overlaps(steps)]:
            self._leave(overlapping)
        path = recorded.path_of(folder, steps, self.rank)
        self._windows = sorted(
            [*self._windows, RecordWindow(steps, path, self._job)], key=lambda window: window.steps.start
        )

    def asked_to_record(self, step: int) -> str:
        """Record the steps after the next one, since a signal has asked some rank for it, unless some of them are recorded anyway; return the
        line of the log.

        All ranks learn it of the same step, counted from 1. A rank may learn of it while it begins the next step, so that all ranks can record the one after that.
        """
        steps = range(step + 2, step + 2 + ASKED_STEPS)
        if any(window.overlaps(steps) for window in self._windows):
            return ""
        self.record(steps, self.folder)
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
            (had, queued), (had_before, queued_before) = self._processor.read(), opened.processor
            opened.processor = (
                had - had_before,
                None if queued is None or queued_before is None else queued - queued_before,
            )
            if (window := opened.window) is not None:
                opened.held = window.held = window.held or held()
                opened.others_queued_ns = self._longest_queued(opened.threads)

    def _longest_queued(self, before: Mapping[str, int]) -> int | None:
        """Return for how long that thread of the process but this one which waited most was queued since `before`."""
        own_id = str(threading.get_native_id())
        now = queued_threads()
        return max([now[key] - before.get(key, 0) for key in now if key != own_id], default=None)

    def close(self) -> None:
        """Write what is left of the window; the steps of this run are over, or a loop has ended its window."""
        self._finish_open()
        if self._unread and self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()
        self._read()
        for window in [*self._windows]:
            self._leave(window)
        if marks.listener() is self:
            marks.listen(None)

    @property
    def sums(self) -> StepSums:
        """The sums of the newest step whose times are known: most loops do not ask for them."""
        newest, self._newest = self._newest, None
        if newest is not None:
            step = self._closed(newest) if isinstance(newest, _OpenStep) else newest
            self._sums = sums_of(step, self._axes or {})
        return self._sums

    @property
    def step(self) -> int:
        """The step that is being taken, or was taken last, counted from 1; 0 before the first."""
        return 0 if self._open is None else self._open.step

    # -- what is observed --------------------------------------------------------------------------

    def running(self, task: Task, samples: Indices, observer: StepObserver) -> AbstractContextManager[None]:
        """Note when a task begins and ends, within what an observer does around it."""
        opened = self._open
        if opened is None or opened.end is not None:
            return observer.running(task, samples)
        sees_tasks = type(observer).running is not StepObserver.running
        return _RunningTask(self, observer.running(task, samples) if sees_tasks else None, task, opened)

    def issue(self, owner: str, kind: str) -> marks.Issue:
        """Note that a collective or message is issued."""
        opened = self._open
        return _Issued(self, owner, kind, opened if opened is not None and opened.end is None else _unheard())

    def begin(self, region: str) -> Callable[[], None]:
        """Note that the host does something outside of tasks; return a function that ends it."""
        event: list[Any] = ["region", region, self.now(), None]
        self.append(event)

        def end() -> None:
            event[3] = self.now()

        return end

    def begin_copy(self, owner: str, stream: str, *, is_awaited: bool) -> Callable[[], None]:
        """Note that a copy between device and host begins on the current stream, or a wait for one; in a window alone."""
        opened = self._open
        if opened is None or opened.window is None or opened.end is not None:
            return _nothing
        event = ["awaited" if is_awaited else "copy", owner, self.now(), None, stream]
        opened.events.append(event)

        def end() -> None:
            event[3] = self.now()

        return end

    def append(self, event: list[Any]) -> None:
        """Add an event to the step, if it is heard."""
        opened = self._open
        if opened is not None and (opened.end is None or event[0] == "region"):
            opened.events.append(event)

    def begin_layer(self, name: str, op: str) -> LayerEvent:
        """Note that the forward of a layer begins."""
        event = ["layer", name, self.now(), None]
        self.doing = op
        self.append(event)
        return event

    def end_layer(self, begun: LayerEvent) -> None:
        """Note that the forward of a layer ends."""
        begun[3] = self.now()
        self.sample(begun[3])

    def begin_backward(self, name: str, op: str) -> None:
        """Note that the gradient of a layer's output is known."""
        now = self.now()
        self.append(["backward", name, now, now])
        self.sample(now)
        self.doing = op

    def sample(self, stamp: Stamp) -> None:
        """Note the memory at the end of an op of a step in a window."""
        opened = self._open
        if opened is not None and opened.window is not None and opened.end is None:
            opened.memory.append((stamp, self._memory.sample(), self.doing))

    # -- steps and windows -------------------------------------------------------------------------

    def _next(self, step: int, program: Program, module: nn.Module, spec: ModelSpec) -> None:
        self._finish_open()
        window = self._window_of(step) if self._windows else None
        is_first = window is not None and not window.is_open
        if window is not None and is_first:
            window.open(self, head_of(program, spec, self.rank, self.device), module, spec)
        if self._axes is None:
            self._axes = {op.owner: op.axis for op in sent_ops(program)}
        self._open = _OpenStep(step, (time.perf_counter_ns(), self.now()), self._processor.read(), window, is_first)
        if window is not None:
            self._open.threads = queued_threads()
        marks.listen(self)
        if self._unread:
            self._read()

    def _window_of(self, step: int) -> RecordWindow | None:
        """Return the window that a step is in, and leave those before it."""
        for past in [window for window in self._windows if step >= window.steps.stop]:
            self._leave(past)
        return next((window for window in self._windows if step in window.steps), None)

    def _finish_open(self) -> None:
        if self._open is None:
            return
        opened, self._open = self._open, None
        opened.until = self.now()
        if opened.end is None:  # the step has failed
            return
        self._unread.append(opened)

    def _read(self, until_empty: bool = False) -> None:
        """Read the steps that the device has passed."""
        while self._unread and (until_empty or self._clock.is_past(self._unread[0].until)):
            self._newest = unread = self._unread.popleft()
            if unread.window is not None:
                self._newest = step = self._closed(unread)
                unread.window.write(step)
            if self._left:
                self._close_files()

    def _closed(self, open_step: _OpenStep) -> RecordedStep:
        """Return a step with its times in nanoseconds."""
        stamps = [open_step.base[1], open_step.end, open_step.until]
        for event in open_step.events:
            stamps += event[2], open_step.until if event[3] is None else event[3]
        begin, end, until, *times = self._clock.ns(stamps, open_step.base)
        events = []
        for number, event in enumerate(open_step.events):
            start, stop = times[2 * number] - begin, times[2 * number + 1] - begin
            events.append([*event[:2], start, stop, *event[4:]])
        return RecordedStep(
            step=open_step.step,
            begin_ns=begin,
            end_ns=end,
            until_ns=until,
            cpu_ns=open_step.processor[0],
            queued_ns=open_step.processor[1],
            others_queued_ns=open_step.others_queued_ns,
            ahead_ns=self._ahead_of(open_step) if open_step.begun else 0,
            events=events,
            memory=self._memory_of(open_step, begin) if open_step.memory else [],
            held=open_step.held,
        )

    def _ahead_of(self, open_step: _OpenStep) -> int:
        """Return the most nanoseconds by which the host began a task before the device did."""
        begun = self._clock.ns([stamp for _, stamp in open_step.begun], open_step.base)
        return max([0, *(time - host for time, (host, _) in zip(begun, open_step.begun, strict=True))])

    def _memory_of(self, open_step: _OpenStep, begin: int) -> list[MemoryMark]:
        """Return what was sampled of the memory, at times since the begin of a step."""
        times = self._clock.ns([mark[0] for mark in open_step.memory], open_step.base)
        used = self._memory.read([mark[1] for mark in open_step.memory])
        marked = zip(times, used, open_step.memory, strict=True)
        return [MemoryMark(at - begin, *amounts, mark[2]) for at, amounts, mark in marked]

    def _leave(self, window: RecordWindow) -> None:
        """End a window: its marks are removed now, and its file is closed once its last step is written."""
        self._windows.remove(window)
        window.leave()
        self._left.append(window)
        self._close_files()

    def _close_files(self) -> None:
        for finished in [window for window in self._left if all(step.window is not window for step in self._unread)]:
            self._left.remove(finished)
            finished.close()
