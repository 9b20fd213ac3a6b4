"""The progress of a worker, by which its parent distinguishes a rank that works from one that waits for ever.

A rank that returns from the function early leaves the others in a collective that it will never call. Each worker
counts the calls that it begins in every process group, as torch does, and on request a thread of it sends its parent
these counts and the line that its main thread is at, with the step that it takes.

Between the first step and the last a rank that stands still hangs. Other long tasks have a name (`apart`): a save, an
evaluation; there a rank need not move, but it answers. In the first step, in which kernels are compiled and chosen, and in the
steps of a user's own loop, a rank may work for long: it stands still only while it waits in a call of a collective, or at one line
of the runtime.
"""

from __future__ import annotations

import contextlib
import faulthandler
import pickle
import re
import statistics
import sys
import tempfile
import threading
import time
import traceback
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing import connection
from pathlib import Path
from types import FrameType
from typing import Any

import torch.distributed as dist
from torch import nn

from samestep import errors
from samestep.building.torch_seams import names_of_groups
from samestep.program.ops import Task
from samestep.runtime.ledger import OwnedCollectives
from samestep.runtime.recording import marks


@dataclass(slots=True)
class _Progress:
    step: int = 0
    may_work: bool = False
    hang_s: float = 0.0
    apart: list[str] = field(default_factory=list)
    """The names of its tasks outside of steps, the innermost last."""


_NUM_STEPS = 20
_progress = _Progress()
_took_s: deque[float] = deque(maxlen=_NUM_STEPS)
_seen = threading.local()
"""The `point` at which a thread that asks has seen the main thread last."""


def begin() -> None:
    """Forget the progress of the process from which this one was forked."""
    _progress.step, _progress.may_work, _progress.hang_s = 0, False, 0.0
    _progress.apart.clear()
    _took_s.clear()


class taking:  # noqa: N801 - a context like those below, in fewer calls
    """Take a step, counted from 1, or with `hang_s` one of a user's own loop; in that, and in the first one, a rank may work for long."""

    __slots__ = ("began_s", "hang_s", "is_first", "is_outer", "step")

    def __init__(self, step: int, *, is_first: bool = False, hang_s: float = 0.0) -> None:
        self.step, self.is_first, self.hang_s = step, is_first, hang_s

    def __enter__(self) -> None:
        self.is_outer = not (self.hang_s and _progress.step)  # else the step is taken by `train`
        if self.is_outer:
            _progress.step, _progress.hang_s = self.step, self.hang_s
            _progress.may_work = self.is_first or self.hang_s > 0
            self.began_s = time.monotonic()

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if self.is_outer:
            if kind is None:
                _took_s.append(time.monotonic() - self.began_s)
            _progress.step, _progress.may_work = 0 if self.hang_s else self.step, False


@contextmanager
def apart(name: str) -> Iterator[None]:
    """Run a task between steps that may take long on a healthy rank; `name` is its name in messages, such as `a
    save`."""
    _progress.apart.append(name)
    try:
        with marks.region("checkpoint" if "save" in name else f"host:{name}"):
            yield
    finally:
        _progress.apart.pop()


def watched_step() -> int:
    """Return the step that this rank takes or has taken last; 0 where it need not move."""
    return 0 if _progress.apart else _progress.step


def task_outside_steps() -> str:
    """Return the name of this rank's task outside of steps, after its first step; empty where it has none."""
    return next(reversed(_progress.apart), "") if _progress.step else ""


def median_step_s() -> float:
    """Return the median of the seconds that the last steps took; 0 before the first."""
    return statistics.median(list(_took_s)) if _took_s else 0.0


PACKAGE = Path(errors.__file__).parent
"""The folder of samestep's own files."""


class ParentLink:
    """A worker's end of the pipe to its parent; once it listens, a thread answers how far this worker has come."""

    def __init__(self, pipe: connection.Connection) -> None:
        self.may_leave = threading.Event()
        self._pipe, self._lock = pipe, threading.Lock()

    def report(self, word: str, value: Any = None) -> None:
        """Send a message to the parent."""
        # Plain pickle: multiprocessing's own sends tensors as shared memory, which disappears when the worker exits.
        text = pickle.dumps((word, value))
        with self._lock:
            self._pipe.send_bytes(text)

    def listen(self) -> None:
        """Start to answer the parent."""
        threading.Thread(target=self._answer, args=(threading.main_thread().ident,), daemon=True).start()

    def _answer(self, main_thread: int) -> None:
        with contextlib.suppress(EOFError, OSError):
            while self._pipe.recv_bytes() != b"leave":
                self.report("at", whereabouts_of(main_thread))
        self.may_leave.set()


@dataclass(frozen=True)
class Whereabouts:
    """The point that a worker has reached: two equal points, with some seconds between them, show that it waits."""

    calls: Mapping[str, int]
    """Calls of collectives, and of sends and receives, that it has begun, by process group."""
    call: str
    """The function of torch.distributed in which its main thread is; empty where it is in none."""
    where: str
    """The line that called it, of the user's code if there is one; without a call the line of the runtime that it is at."""
    task: str = ""
    """The task of the program that it carries out, such as "backward of micro-batch 0"."""
    step: int = 0
    """The step that it takes; 0 in a task that may take long."""
    median_step_s: float = 0.0
    apart: str = ""
    """The name of its task outside of steps, such as "a save"; empty in a step, and before the first one is over."""
    module: str = ""
    """The module that it runs, or the unit that it gathers or reduces, by path."""
    may_work: bool = False
    """Whether it is at work that may take long, so that it does not stand still."""
    hang_s: float = 0.0
    """The seconds after which its run is ended if all ranks stand still; 0 if only the launcher knows."""
    line: str = ""
    """The line of the user's code that it is at; empty without one."""

    @property
    def place(self) -> str:
        """The line that a person looks for, in parentheses."""
        return f" ({self.line or self.where})" if self.line or self.where else ""


def whereabouts_of(main_thread: int | None) -> Whereabouts:
    """Return the progress of this process, by its main thread; another thread may ask, again and again.

    Task and module are known from the second time on that the main thread is at one instruction. To read the variables of a thread
    that runs would keep its tensors, and can crash Python before 3.13.
    """
    frame = sys._current_frames().get(main_thread) if main_thread else None
    calls, step, median_s = calls_made(), watched_step(), median_step_s()
    point = None if frame is None else (id(frame), frame.f_lasti, calls)
    standing = frame if point == getattr(_seen, "point", None) else None
    _seen.point = point
    call, line = _waiting_at(main_thread)
    where = line if call else ""
    if frame is not None and not call and frame.f_code.co_filename.startswith(str(PACKAGE / "runtime")):
        where = f"{frame.f_code.co_filename}:{frame.f_lineno}"  # it may wait for a collective that was begun before
    at = (call, where, _task_in(standing), step, median_s, task_outside_steps(), _module_in(standing))
    return Whereabouts(calls, *at, _progress.may_work and not where, _progress.hang_s, line)


def calls_made() -> dict[str, int]:
    """Return the number of calls that this rank has begun in each process group of which it is a member."""
    return {
        name: group._get_sequence_number_for_group()  # type: ignore[attr-defined]
        for group, name in list(names_of_groups().items())
    }


_DOORS = (str(PACKAGE / "cli.py"), str(Path(__file__).with_name("worker.py")))
"""The files whose calls are those of a rank: what called them is the process that started it."""
_THREAD = re.compile(r"(?:Current thread|Thread) 0x([0-9a-f]+)")
_LINE = re.compile(r'  File "(.*)", line (\d+) in (.*)')


def _stack_of(thread: int) -> list[traceback.FrameSummary]:
    """Return the calls that a thread is in, the outermost first.

    The thread runs on: to follow its frames from Python, which it may leave meanwhile, can crash Python 3.11. `faulthandler` walks them at once.
    """
    with tempfile.TemporaryFile() as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        lines = file.read().decode(errors="replace").splitlines()
    calls: list[traceback.FrameSummary] = []
    is_asked = False
    for line in lines:
        if begins := _THREAD.match(line):
            is_asked = int(begins[1], 16) == thread
        elif is_asked and (call := _LINE.fullmatch(line)):
            calls.append(traceback.FrameSummary(call[1], int(call[2]), call[3], lookup_line=False))
    return calls[::-1]


def _waiting_at(main_thread: int | None) -> tuple[str, str]:
    """Return the function of torch.distributed that a thread is in, empty without one, and the line of the user that it is at."""
    stack = _stack_of(main_thread) if main_thread else []
    begins = max((index for index, call in enumerate(stack) if call.filename in _DOORS), default=-1)
    calls = [call for call in stack[begins + 1 :] if not call.filename.startswith(str(PACKAGE))]
    inside = [index for index, call in enumerate(calls) if call.filename == dist.distributed_c10d.__file__]
    callers = [
        call
        for call in calls[: inside[0] if inside else None]
        if "/multiprocessing/" not in call.filename
        and "/torch/" not in call.filename
        and call.filename != contextlib.__file__
    ]
    name = next((call.name for call in calls[inside[0] :] if call.name != "wrapper"), "") if inside else ""
    return name, f"{callers[-1].filename}:{callers[-1].lineno}" if callers else ""


def _task_in(frame: FrameType | None) -> str:
    """Return the task of the program that a thread carries out; empty where it carries out none."""
    while frame is not None:
        if frame.f_code.co_filename.startswith(str(PACKAGE)) and "task" in frame.f_code.co_varnames:
            task = frame.f_locals.get("task")
            if isinstance(task, Task):
                return f"{task.kind.name.lower()} of micro-batch {task.microbatch}"
        frame = frame.f_back
    return ""


def _module_in(frame: FrameType | None) -> str:
    """Return the path of the module that a thread runs, or the name of the unit that it gathers or reduces; empty without one."""
    inner: nn.Module | None = None
    path = ""
    while frame is not None:
        owner, issue = frame.f_locals.get("self"), frame.f_locals.get("issue")
        if isinstance(issue, OwnedCollectives):
            return issue.name or "(the model itself)"
        if isinstance(owner, nn.Module) and "_modules" in vars(owner):  # else it is being made
            inner = owner if inner is None else inner
            path = next((name for name, module in owner.named_modules() if module is inner), path)
        frame = frame.f_back
    return path


def lacks(calls: Mapping[str, int], others: Mapping[str, int]) -> bool:
    """Return whether a rank has begun fewer calls than another one in a group of both."""
    return any(count < others.get(group, 0) for group, count in calls.items())
