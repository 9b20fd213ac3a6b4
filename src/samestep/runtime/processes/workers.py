"""Starting worker processes on this machine, and learning how each of them ends.

```
run_workers ─┬─ fork ─> worker 0: ready, join, joined, main(place, ...), done + value ─┐
   listens   ├─ fork ─> worker 1: ready, join, joined, main(place, ...), done ─────────┤ all leave, once all are done
             └─ ...     each may end in: failed + (when, what, stderr), or a death that the parent sees
```
Forking after torch is imported takes 0.03 s where a new process takes seconds. It is safe only without CUDA, without
an OpenMP pool in use by both sides, and without autograd's device threads; otherwise workers are spawned.

When one worker fails, its peers fail a moment later, with a closed connection. The parent therefore waits a moment and
reports the first failure that is not such a consequence. A worker never outlives its parent.

`runtime/processes/worker.py` is what a worker does, and `runtime/processes/join.py` its part in joining.
"""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import os
import pickle
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from samestep import errors
from samestep.errors import JobError, SamestepError, WorkerError
from samestep.runtime.processes.join import (
    SAVE_SIGNAL,
    STOP_SIGNALS,
    allocator_variables,
    checked_ranks_per_node,
    join,
    launched_from_outside,
    leave,
    loopback_variables,
    resolve_device,
    restore_signals,
    set_defaults,
)
from samestep.runtime.processes.whereabouts import PACKAGE, Whereabouts, lacks
from samestep.runtime.processes.worker import Failure, LaunchOptions, run_worker

T = TypeVar("T")

_TAIL_LINES = 15  # lines of a dead worker's stderr and traceback that its parent shows
_CAUSE_GRACE_S = 0.2  # an earlier cause may still be in another pipe
_ECHO_GRACE_S = 3.0  # with consequences alone, the cause, most often a death, must still show up
_ASK_EVERY_S = 1.0  # once a rank has returned, the others are asked how far they have come
_WAITING_S = 3.0  # in one call, before a rank counts as waiting
_LEAVE_GRACE_S = 30.0  # a worker tears its process group down
_IMPORTED_BY_STEPS = ("torch._dynamo", "samestep.runtime.run")
"""What the first step of every rank imports (any optimizer of torch imports the first), in two seconds of processor time."""


def default_ranks(device: str = "auto") -> int:
    """Return the default number of workers: one for each GPU, else 2.

    Raises:
        JobError: there is no such device.
    """
    return torch.cuda.device_count() if resolve_device(device) == "cuda" else 2


def oversubscribed(ranks: int, threads: int = 1) -> str | None:
    """Return a one-line warning if `ranks` CPU workers of `threads` threads share too few cores, else None."""
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    if ranks * threads <= cores:
        return None
    each = "" if threads == 1 else f" of {threads} threads"
    return (
        f"{ranks} ranks{each} share {cores} {'core' if cores == 1 else 'cores'}: times will be longer than they need be"
    )


def launch(
    main: Callable[..., T],
    args: tuple[Any, ...] = (),
    *,
    ranks: int,
    device: str = "auto",
    threads: int = 1,
    timeout_s: float = 600.0,
) -> T:
    """Run `main(place, *args)` on every rank: in workers of this machine, or here where torchrun or srun started us.

    So one script runs by itself on a laptop and under a launcher on many machines, where the launcher decides on
    `ranks`. Returns what rank 0 returned (under a launcher: what this rank returned).

    Collective over the world under a launcher: every process calls it; if one does not, the others wait for
    `timeout_s`.

    Raises:
        SamestepError: a worker raised it; class and text are the same.
        WorkerError: a worker died or failed otherwise; the text names it and ends with the last lines of its stderr.
        JobError: the arguments do not fit each other or this machine.
    """
    try:
        if not launched_from_outside():
            return run_workers(main, args, ranks=ranks, device=device, threads=threads, timeout_s=timeout_s)
        place = join(device, timeout_s=timeout_s, threads=threads)
        try:
            return main(place, *args)
        finally:
            leave()
    except SamestepError:
        if sys.excepthook is sys.__excepthook__:
            sys.excepthook = _print_without_our_frames
        raise


def _print_without_our_frames(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print an uncaught error; of a mistake that we report, only the user's own lines and the text."""
    if not isinstance(error, SamestepError):
        sys.__excepthook__(kind, error, trace)
        return
    told = traceback.TracebackException(kind, error, trace)
    told.stack = traceback.StackSummary.from_list(
        [one for one in told.stack if PACKAGE not in Path(one.filename).parents]
    )
    told.__cause__ = told.__context__ = None
    print("".join(told.format()), end="", file=sys.stderr)


def run_workers(
    main: Callable[..., T],
    args: tuple[Any, ...] = (),
    *,
    ranks: int,
    device: str = "cpu",
    threads: int = 1,
    timeout_s: float = 600.0,
    ranks_per_node: int | None = None,
    quiet: bool = False,
    isolated: bool = False,
) -> T:
    """Run `main(place, *args)` in `ranks` workers on this machine and return what rank 0 returns.

    A single rank is a worker too: this process keeps its threads, its signals and no CUDA context, and a kill for lack
    of memory still ends in one line. Rank 0 writes to the terminal, the others to files, which are read only after a
    failure. The first SIGINT or SIGTERM asks all workers to stop (`stop_requested`), and a second one kills them; SIGUSR1
    asks them to save (`save_requested`).

    Args:
        main: a function; with GPUs, with more than one thread or outside Linux it must be importable from a module.
        args: further arguments of `main`.
        ranks: number of workers.
        device: cpu, cuda or auto.
        threads: CPU threads of one worker.
        timeout_s: seconds that the start may take, and later any collective.
        ranks_per_node: pretend that so many ranks share a machine; without it all do.
        quiet: rank 0 writes to files as well.
        isolated: the workers never meet: each is rank 0 of a run of one, and `place.local_rank` differs between them.

    Raises:
        SamestepError: a worker raised it; class and text are the same.
        WorkerError: a worker died or failed otherwise; the text names it and ends with the last lines of its stderr.
        JobError: the arguments do not fit each other or this machine.
    """
    if not isinstance(args, tuple | list):
        raise JobError(
            f"args={args!r} is a {type(args).__name__}, not the arguments behind the rank: args=({args!r},) works"
        )
    if ranks < 1:
        raise JobError(f"ranks={ranks}: a run needs at least 1")
    device_type = resolve_device(device)
    if device_type == "cuda" and ranks > torch.cuda.device_count():
        gpus = torch.cuda.device_count()
        raise JobError(f"{ranks} ranks on {gpus} GPUs: each rank needs its own; ranks={gpus} or device=cpu works")
    per_node = checked_ranks_per_node(ranks_per_node or ranks, ranks)
    folder = tempfile.mkdtemp(prefix="samestep-")
    options = LaunchOptions(os.getpid(), folder, ranks, per_node, device_type, threads, timeout_s, quiet, isolated)
    global _last_stop_signal
    pool = _WorkerPool(options)
    try:
        with _forwarding_signals_to(pool):
            try:
                pool.start(main, args)
                return pool.watch()
            finally:
                pool.end()
                _last_stop_signal = pool.stop_signal
    finally:
        shutil.rmtree(folder, ignore_errors=True)


_last_stop_signal = 0


def last_stop_signal() -> int:
    """Return the first stop signal that came during the last `run_workers` of this process; 0 where none came."""
    return _last_stop_signal


def _start_method(device_type: str, threads: int) -> str:
    """Return fork where it is safe, else spawn."""
    if sys.platform != "linux" or device_type == "cuda" or torch.cuda.is_initialized() or dist.is_initialized():
        return "spawn"
    # A forked worker whose parent has used an OpenMP pool hangs in its own first parallel region; with one thread it
    # has no such region. There is no way to ask whether the parent has used one.
    if threads > 1:
        return "spawn"
    return "spawn" if _autograd_has_threads() else "fork"


def _autograd_has_threads() -> bool:
    """Return whether a backward pass ran here on a machine with GPUs: autograd then refuses to run in a fork."""
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):
            if (task / "comm").read_text().startswith("pt_autograd"):
                return True
    return False


@contextlib.contextmanager
def _environment(variables: Mapping[str, str], defaults: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables for the processes started inside."""
    old = {name: os.environ.get(name) for name in (*variables, *defaults)}
    os.environ.update(variables)
    set_defaults(defaults)
    try:
        yield
    finally:
        for name, value in old.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextlib.contextmanager
def _forwarding_signals_to(pool: _WorkerPool) -> Iterator[None]:
    """Forward this process's stop signals to the workers; a signal that is ignored here stays ignored."""
    handlers: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():
        for number in (*STOP_SIGNALS, SAVE_SIGNAL):
            if signal.getsignal(number) is not signal.SIG_IGN:
                handlers[number] = signal.signal(number, pool.on_signal)
    try:
        yield
    finally:
        restore_signals(handlers)


class _WorkerPool:
    """The workers of one run, seen from their parent.

    Each is in one phase: starting -> ready (it handles signals) -> joined -> done, or failed from any of them.
    """

    def __init__(self, options: LaunchOptions) -> None:
        self.options = options
        self.processes: list[BaseProcess] = []
        self.pipes: list[connection.Connection] = []
        self.phases: list[str] = []
        self.failures: list[Failure] = []
        self.value: Any = None
        self.calls_at_return: dict[int, Mapping[str, int]] = {}
        self.waiting: dict[int, tuple[float, Whereabouts]] = {}
        self.asked_at = 0.0
        self.stop_signal = 0
        self.killed_by = 0

    def start(self, main: Callable[..., Any], args: tuple[Any, ...]) -> None:
        """Start all workers.

        Raises:
            JobError: `main` cannot be imported by a new process.
        """
        options = self.options
        method = _start_method(options.device_type, options.threads)
        if method == "fork":
            for name in _IMPORTED_BY_STEPS:  # once, since forked workers have what their parent has imported
                importlib.import_module(name)
        context: Any = multiprocessing.get_context(method)
        defaults = loopback_variables() | allocator_variables(options.device_type)
        with _environment({"OMP_NUM_THREADS": str(options.threads)}, defaults), warnings.catch_warnings():
            # Python 3.12 warns of threads at a fork; those of an imported torch are idle.
            warnings.filterwarnings("ignore", message=".*multi-threaded, use of fork", category=DeprecationWarning)
            for rank in range(options.ranks):
                ours, theirs = context.Pipe()
                process = context.Process(
                    target=run_worker, args=(options, rank, theirs, main, args), name=f"rank {rank}", daemon=False
                )
                self.pipes.append(ours)
                try:
                    process.start()
                except (pickle.PicklingError, AttributeError, TypeError) as error:
                    raise JobError(
                        f"workers start as new processes here and must be able to import main: {error}"
                    ) from None
                finally:
                    theirs.close()
                self.processes.append(process)
                self.phases.append("starting")

    def watch(self) -> Any:
        """Wait for all workers and return rank 0's value.

        Raises:
            SamestepError: a worker raised it; class and text are the same.
            WorkerError: a worker died, failed otherwise or did not join in time.
        """
        deadline = time.monotonic() + self.options.timeout_s
        while any(phase != "done" for phase in self.phases):
            self._listen()
            if self.killed_by:
                raise KeyboardInterrupt if self.killed_by == signal.SIGINT else SystemExit(128 + self.killed_by)
            if self.failures and self._has_settled():
                raise self._cause()
            if self.calls_at_return and not self.failures:
                self._check_waiting()
            late = self._ranks("starting") or self._ranks("ready")
            if late and not self.failures and time.monotonic() > deadline:
                raise WorkerError(f"{self._named(late)} did not join within {self.options.timeout_s:g} s")
        for pipe in self.pipes:
            with contextlib.suppress(OSError):
                pipe.send_bytes(b"leave")
        deadline = time.monotonic() + _LEAVE_GRACE_S
        for process in self.processes:
            process.join(max(0.0, deadline - time.monotonic()))
        return self.value

    def on_signal(self, number: int, _frame: FrameType | None) -> None:
        """Ask the workers to stop, or to save; kill them if they were asked to stop before."""
        if number == SAVE_SIGNAL:
            for rank in self._ranks("joined"):
                self._send(rank, SAVE_SIGNAL)
            return
        if self.stop_signal:
            self.killed_by = number
            self._kill()
        self.stop_signal = self.stop_signal or number
        for rank in (*self._ranks("ready"), *self._ranks("joined")):
            self._send(rank, signal.SIGTERM)

    def end(self) -> None:
        """Kill all workers that still run, and close their pipes."""
        self._kill()
        for process in self.processes:
            process.join(_LEAVE_GRACE_S)
        for pipe in self.pipes:
            pipe.close()

    def _kill(self) -> None:
        for process in self.processes:
            if process.exitcode is None:
                _kill_group(process)

    def _send(self, rank: int, number: int) -> None:
        process = self.processes[rank]
        if process.pid is not None and process.exitcode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, number)

    def _listen(self) -> None:
        """Receive the workers' messages for a moment, and find those that have died."""
        # Not the sentinels: a grandchild (a data loader's process) inherits them, and they outlast the worker.
        for ready in connection.wait([pipe for pipe in self.pipes if not pipe.closed], timeout=0.1):
            self._hear(self.pipes.index(ready))  # type: ignore[arg-type]
        for rank, process in enumerate(self.processes):
            if self.phases[rank] == "failed" or process.exitcode is None:
                continue
            while not self.pipes[rank].closed and self.pipes[rank].poll():
                self._hear(rank)
            if self.phases[rank] != "failed":
                self._fail(Failure(rank, time.monotonic(), _death(process.exitcode)))

    def _hear(self, rank: int) -> None:
        """Receive one message."""
        try:
            word, value = pickle.loads(self.pipes[rank].recv_bytes())
        except (EOFError, OSError):
            self.pipes[rank].close()
            return
        if word == "failed":
            self._fail(value)
            return
        if word == "at":
            since, before = self.waiting.get(rank, (0.0, None))
            self.waiting[rank] = (since if value == before else time.monotonic(), value)
            return
        self.phases[rank] = word
        if word == "done":
            value, self.calls_at_return[rank] = value
            self.value = value if rank == 0 else self.value
        if word == "ready" and self.stop_signal:
            self._send(rank, signal.SIGTERM)

    def _check_waiting(self) -> None:
        """Find out whether every rank that has not returned waits for one that has, which will never come.

        Raises:
            WorkerError: they do, for seconds, in a call that the returned rank has not made.
        """
        now, still = time.monotonic(), self._ranks("joined")
        if self.options.isolated or len(still) + len(self.calls_at_return) < self.options.ranks or not still:
            return
        if now - self.asked_at > _ASK_EVERY_S:
            self.asked_at = now
            for rank in still:
                with contextlib.suppress(OSError):
                    self.pipes[rank].send_bytes(b"at")
        lacking = set(self.calls_at_return)
        for rank in still:
            since, at = self.waiting.get(rank, (now, None))
            if at is None or not at.call or now - since < _WAITING_S:
                return
            lacking &= {gone for gone, calls in self.calls_at_return.items() if lacks(calls, at.calls)}
        if lacking:
            at = self.waiting[still[0]][1]
            where = f" ({at.where})" if at.where else ""
            gone = self._named(sorted(lacking))
            raise WorkerError(
                f"{gone} returned from the function while rank{'s' * (len(still) > 1)} {', '.join(map(str, still))} "
                f"wait{'s' * (len(still) == 1)} for it in {at.call}{where}: every rank must make the same calls"
            )

    def _fail(self, failure: Failure) -> None:
        self.phases[failure.rank] = "failed"
        self.failures.append(failure)
        _kill_group(self.processes[failure.rank])  # together with the processes it started

    def _has_settled(self) -> bool:
        """Return whether waiting longer will not reveal another cause of the failures."""
        if all(phase in ("failed", "done") for phase in self.phases):
            return True
        grace = _ECHO_GRACE_S if all(failure.is_echo for failure in self.failures) else _CAUSE_GRACE_S
        return time.monotonic() > min(failure.time_s for failure in self.failures) + grace

    def _cause(self) -> Exception:
        """Return the exception that describes the first cause."""
        causes = [failure for failure in self.failures if not failure.is_echo]
        first = min(causes or self.failures, key=lambda failure: failure.time_s)
        if first.mistake:
            mistake: SamestepError = getattr(errors, first.mistake)(first.text)
            return mistake
        lines = [f"{self._named([first.rank])} {first.what}"]
        if first.is_echo and (silent := self._ranks("starting") or self._ranks("ready") or self._ranks("joined")):
            lines = [f"{self._named(silent)} did not answer; {lines[0]}"]
        elif first.is_echo and (gone := self._ranks("done")):
            lines = [f"{lines[0]}, after {self._named(gone)} had returned"]
        return WorkerError("\n".join(lines + self._tail_of(first)))

    def _tail_of(self, failure: Failure) -> list[str]:
        """Return the last lines that a worker wrote to stderr, its traceback included."""
        file = Path(self.options.folder, f"{failure.rank}.err")
        written = file.read_text(encoding="utf-8", errors="replace").splitlines() if file.exists() else []
        return [f"  {line}" for line in (*written, *failure.lines)][-_TAIL_LINES:]

    def _ranks(self, phase: str) -> list[int]:
        return [rank for rank, its in enumerate(self.phases) if its == phase]

    def _named(self, ranks: list[int]) -> str:
        return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))} of {self.options.ranks}"


def _kill_group(process: BaseProcess) -> None:
    """Kill a worker and the processes it started, which are in its process group."""
    if process.pid is None:
        return
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    if process.exitcode is None:  # it may not have had time to make its group
        process.kill()


def _death(exit_code: int) -> str:
    """Return how a process ended that reported nothing itself."""
    if exit_code >= 0:
        return f"died: it exited with status {exit_code} before it was done"
    try:
        name = signal.Signals(-exit_code).name
    except ValueError:
        name = f"signal {-exit_code}"
    return f"died: killed by {name}{' (out of memory?)' if -exit_code == signal.SIGKILL else ''}"
