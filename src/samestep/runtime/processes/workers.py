"""Starting the worker processes of a run, and learning how each of them ends.

```
run_workers ─┬─ fork ─> worker 0: ready, join, joined, main(place, ...), done + value ─┐
   listens   ├─ fork ─> worker 1: ready, join, joined, main(place, ...), done ─────────┤ all leave, once all are done
             └─ ...     each may end in: failed + (when, what, stderr), or a death that the parent sees
```
When one worker fails, its peers fail a moment later, with a closed connection. The parent therefore waits a moment and
reports the first failure that is not such a consequence. A worker never outlives its parent.

`runtime/processes/local_workers.py` holds the workers of this machine; those of other hosts come through `OtherHosts`; `runtime/processes/worker.py` is what a worker does, and `runtime/processes/join.py` its part in joining.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import dataclasses
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing import connection
from types import FrameType
from typing import Any, TypeVar

import torch

from samestep import calls, errors
from samestep.errors import JobError, WorkerError
from samestep.runtime.processes.hang_watch import HangWatch
from samestep.runtime.processes.host_share import share_of
from samestep.runtime.processes.join import (
    REQUESTS,
    STOP_SIGNALS,
    check_ranks_per_node,
    ended_by,
    join,
    launched_by,
    leave,
    resolve_device,
    restore_signals,
)
from samestep.runtime.processes.launch_info import LaunchInfo
from samestep.runtime.processes.local_workers import HostWorkers, LocalWorkers, OtherHosts
from samestep.runtime.processes.whereabouts import Whereabouts, lacks
from samestep.runtime.processes.worker import Failure, LaunchOptions

T = TypeVar("T")

_CAUSE_GRACE_S = 0.2  # an earlier cause may still be in another pipe
_ECHO_GRACE_S = 3.0  # with consequences alone, the cause, most often a death, must still show up
_ASK_EVERY_S = 1.0  # ranks are asked how far they have come
_WAITING_S = 3.0  # in one call, before a rank counts as waiting


def default_ranks(device: str = "auto") -> int:
    """Return the default number of workers: one for each GPU, else 2.

    Raises:
        JobError: there is no such device.
    """
    return torch.cuda.device_count() if resolve_device(device) == "cuda" else 2


def oversubscription_warning(ranks: int, threads: int = 1) -> str | None:
    """Return a one-line warning if `ranks` CPU workers of `threads` threads share too few cores, else None."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if ranks * threads <= cores:
        return None
    each = "" if threads == 1 else f" of {threads} threads"
    return (
        f"{ranks} ranks{each} share {cores} {'core' if cores == 1 else 'cores'}: times will be longer than they need be"
    )


@calls.checked
def launch(
    main: Callable[..., T],
    args: tuple[Any, ...] = (),
    *,
    ranks: int,
    device: str = "auto",
    threads: int = 1,
    timeout_s: float = 600.0,
) -> T:
    """Run `main(place, *args)` on every rank: in workers of this machine, or here where a launcher has started one for each rank.

    So one script runs by itself on a laptop and under a launcher on many machines, where the launcher decides on
    `ranks`. A launcher of one process for each host leaves them to us. Returns what rank 0 returned (under a launcher: what
    this rank, or the first of this host, returned).

    Collective over the world under a launcher: every process calls it; if one does not, the others wait for
    `timeout_s`.

    Where SIGINT, SIGTERM or SIGHUP has ended the loops of the workers, this process ends with status 130, 143 or 129 once its script
    is through, as after a signal that nobody has handled; under torchrun, which would start it again at once, with 0.

    Raises:
        SamestepError: a worker raised it; class and text are the same.
        WorkerError: a worker died or failed otherwise; the text names it and ends with the last lines of its stderr.
        JobError: the arguments do not fit each other or this machine.
    """
    info = launched_by()
    if info.launcher == "samestep":  # a script that `samestep launch` runs, and that launches a function itself
        return main(join(device), *args)
    if not info.is_engine:
        say_inside(info)
        share = share_of(info, ranks, timeout_s) if info.num_hosts > 1 else None
        settings: dict[str, Any] = {"device": device, "threads": threads, "timeout_s": timeout_s, "away": share}
        results = run_workers(main, args, ranks=ranks, shows_all=True, **settings)
        number = last_stop_signal()
    else:
        place = join(device, timeout_s=timeout_s, threads=threads)
        try:
            results = main(place, *args)
        finally:
            leave()
        number = ended_by()
    if number:
        end_as_stopped(number)
    return results


def say_inside(info: LaunchInfo) -> None:
    """Print that this process starts workers, where it is inside an allocation and no task of several."""
    if info.inside:
        text = f"inside {info.inside}, and no task of several: the workers are this process's own, on this host"
        print(f"samestep: {text}", file=sys.stderr, flush=True)


def run_workers(
    main: Callable[..., T],
    args: tuple[Any, ...] = (),
    *,
    ranks: int,
    device: str = "cpu",
    threads: int = 1,
    timeout_s: float = 600.0,
    hang_s: float = 0.0,
    ranks_per_node: int | None = None,
    quiet: bool = False,
    shows_all: bool = False,
    isolated: bool = False,
    away: OtherHosts | None = None,
) -> T:
    """Run `main(place, *args)` in `ranks` workers on this machine and return what rank 0 returns.

    A single rank is a worker too: this process keeps its threads, its signals and no CUDA context, and a kill for lack
    of memory still ends in one line. Rank 0 writes to the terminal (a notebook shows it below the cell), the others to files,
    which are read only after a failure. The first SIGINT, SIGTERM or SIGHUP asks all workers to stop, and a second one kills them; SIGUSR1
    asks them to save, and SIGUSR2 to record steps (`join.requests`).

    Args:
        main: a function; with GPUs, with more than one thread or outside Linux it must be importable from a module.
        args: further arguments of `main`.
        ranks: number of workers.
        device: cpu, cuda or auto.
        threads: CPU threads of one worker.
        timeout_s: seconds that the start may take, and later any collective.
        hang_s: seconds after which ranks that stand still in a step of `progress`, or do not answer, are ended; 0 lets them stand.
        ranks_per_node: pretend that so many ranks share a machine; without it all do.
        quiet: rank 0 writes to files as well.
        shows_all: lines of the other ranks are shown too, each after the name of its rank.
        isolated: the workers never meet: each is rank 0 of a run of one, and `place.local_rank` differs between them.
        away: other hosts, which start some of the workers with a `main` of their own. Where another launcher has started them
            (`HostShare`), the value is what the first rank of this host returns.

    Raises:
        SamestepError: a worker raised it; class and text are the same.
        WorkerError: a worker died or failed otherwise; the text names it and ends with the last lines of its stderr.
        JobError: the arguments do not fit each other or this machine.
    """
    if not isinstance(args, tuple | list):
        raise JobError(
            "argument-type",
            f"args={args!r} is a {type(args).__name__}, not a tuple of the arguments after the rank. Use args=({args!r},)",
        )
    if ranks < 1:
        raise JobError("value-out-of-range", f"ranks={ranks}: a run needs at least 1")
    device_type = resolve_device(device)
    here = away.num_ranks[0] if away else ranks
    check_gpus(device_type, here)
    per_node = check_ranks_per_node(ranks_per_node or (away.ranks_per_node if away else ranks), ranks)
    limits = (timeout_s, hang_s)
    first = away.first_rank if away else 0
    options = LaunchOptions(ranks, first, here, per_node, device_type, threads, *limits, quiet, isolated, shows_all)
    return _watch_workers(options, main, args, away)


def _watch_workers(options: LaunchOptions, main: Callable[..., T], args: tuple[Any, ...], away: OtherHosts | None) -> T:
    """Start the workers of this machine and of other hosts, and return what the first one returns."""
    global _last_stop_signal
    with away.store() if away else contextlib.nullcontext() as store:
        if away:
            options = dataclasses.replace(options, store=store, interface=away.interface)
        local = LocalWorkers(options, main, args)
        pool = _WorkerPool(options, [local, *(away.workers(options) if away else ())])
        with _forwarding_signals_to(pool):
            try:
                pool.start()
                return pool.watch()
            finally:
                pool.end()
                _last_stop_signal = pool.stop_signal


def check_gpus(device_type: str, ranks: int) -> None:
    """Refuse more ranks on this machine than it has GPUs, if they are to run on GPUs.

    Raises:
        JobError: there are too few.
    """
    if device_type == "cuda" and ranks > torch.cuda.device_count():
        gpus = torch.cuda.device_count()
        raise JobError(
            "device-missing", f"{ranks} ranks on {gpus} GPUs: each rank needs its own. Use ranks={gpus} or device=cpu"
        )


_last_stop_signal = 0


def last_stop_signal() -> int:
    """Return the number of the first stop signal during the last `run_workers` of this process; 0 without one."""
    return _last_stop_signal


@contextlib.contextmanager
def _forwarding_signals_to(pool: _WorkerPool) -> Iterator[None]:
    """Forward this process's stop signals to the workers; a signal that is ignored here stays ignored."""
    handlers: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():
        for number in (*STOP_SIGNALS, *REQUESTS):
            if signal.getsignal(number) is not signal.SIG_IGN:
                handlers[number] = signal.signal(number, pool.on_signal)
    try:
        yield
    finally:
        restore_signals(handlers)


class _WorkerPool:
    """The workers of one run, seen from the process that leads it.

    Each is in one phase: starting -> ready (it handles signals) -> joined -> done, or failed from any of them.
    """

    def __init__(self, options: LaunchOptions, hosts: Sequence[HostWorkers]) -> None:
        self.options = options
        self.hosts = hosts
        self.phases = {rank: "starting" for host in hosts for rank in host.ranks}
        self.failures: list[Failure] = []
        self.value: Any = None
        self.calls_at_return: dict[int, Mapping[str, int]] = {}
        self.waiting: dict[int, tuple[float, Whereabouts]] = {}
        self.asked_at = 0.0
        self.hang_watch = HangWatch(options.ranks, options.hang_s, start_s=options.timeout_s)
        self.signals: list[int] = []
        self.num_obeyed = 0
        """The number of signals that were forwarded to the workers."""
        self.stop_signal = 0
        self.killed_by = 0

    def start(self) -> None:
        """Start all workers.

        Raises:
            JobError: `main` cannot be imported by a new process.
        """
        for host in reversed(self.hosts):  # other hosts first, which then start while this one does
            host.start()

    def watch(self) -> Any:
        """Wait for all workers and return rank 0's value.

        Raises:
            SamestepError: a worker raised it; class and text are the same.
            WorkerError: a worker died, failed otherwise or did not join in time.
        """
        deadline = time.monotonic() + self.options.timeout_s
        while any(phase != "done" for phase in self.phases.values()):
            self._listen()
            self._obey_signals()
            if self.killed_by:
                raise KeyboardInterrupt if self.killed_by == signal.SIGINT else SystemExit(128 + self.killed_by)
            if self.failures and self._has_settled():
                raise self._cause()
            if not self.failures:
                self._ask()
                self.hang_watch.check(self._ranks("joined"), time.monotonic(), hurries=bool(self.stop_signal))
                self._check_waiting()
            late = self._ranks("starting") or self._ranks("ready")
            if late and not self.failures and time.monotonic() > deadline:
                raise WorkerError(
                    "ranks-not-met", f"{self._named(late)} did not join within {self.options.timeout_s:g} s"
                )
        for rank in self.phases:
            self._host_of(rank).tell(rank, "leave")
        return self.value

    def on_signal(self, number: int, _frame: FrameType | None) -> None:
        """Note a signal, which may interrupt a message to another host; the second one to stop kills the workers of
        this host."""
        self.signals.append(number)
        if len([signal for signal in self.signals if signal not in REQUESTS]) > 1:
            for rank in self.hosts[0].ranks:
                self.hosts[0].kill(rank)

    def _obey_signals(self) -> None:
        """Ask the workers to save, to record, or to stop."""
        for number in self.signals[self.num_obeyed :]:
            if number in REQUESTS:
                self._request(number)
            else:
                self._stop(number, is_again=any(signal not in REQUESTS for signal in self.signals[: self.num_obeyed]))
            self.num_obeyed += 1

    def end(self) -> None:
        """Wait for the workers that may leave, and kill those that still run."""
        for host in self.hosts:
            host.end()

    def _request(self, number: int) -> None:
        """Pass a signal that asks for something on to the workers that can hear it."""
        for rank in self._ranks("joined"):
            self._host_of(rank).signal(rank, number)

    def _stop(self, number: int, *, is_again: bool) -> None:
        """Ask the workers to stop; end them if the same host was asked to stop before."""
        if is_again:
            self.killed_by = number
        self.stop_signal = self.stop_signal or number
        for rank in (*self._ranks("ready"), *self._ranks("joined")):
            self._host_of(rank).signal(rank, signal.SIGTERM)

    def _listen(self) -> None:
        """Receive the workers' messages for a moment, and find those that have died."""
        connection.wait([source for host in self.hosts for source in host.sources()], timeout=0.1)
        for host in self.hosts:
            for rank, word, value in host.hear():
                self._hear(rank, word, value)

    def _hear(self, rank: int, word: str, value: Any) -> None:
        """Take in one message."""
        if word == "failed":
            self._fail(value)
        elif word == "stop" and value[0] in REQUESTS:
            self._request(value[0])
        elif word == "stop":
            self._stop(value[0], is_again=value[1])
        elif word == "at":
            since, previous = self.waiting.get(rank, (0.0, None))
            self.waiting[rank] = (since if value == previous else time.monotonic(), value)
            self.hang_watch.hear(rank, value, time.monotonic())
        else:
            self.phases[rank] = word
            if word == "done":
                value, self.calls_at_return[rank] = value
                self.value = value if rank == self.options.first_rank else self.value
            if word == "ready" and self.stop_signal:
                self._host_of(rank).signal(rank, signal.SIGTERM)

    def _ask(self) -> None:
        """Ask the working ranks for their progress every second."""
        if time.monotonic() - self.asked_at < _ASK_EVERY_S:
            return
        self.asked_at = time.monotonic()
        for rank in self._ranks("joined"):
            self._host_of(rank).tell(rank, "at")

    def _check_waiting(self) -> None:
        """Find out whether every rank that has not returned waits for one that has, which will never come.

        It waits in a call, or at a line of the runtime for a call that it has begun before.

        Raises:
            WorkerError: they do, for seconds, and the returned rank has not made the call.
        """
        now, still = time.monotonic(), self._ranks("joined")
        if (
            not self.calls_at_return
            or self.options.isolated
            or len(still) + len(self.calls_at_return) < self.options.ranks
            or not still
        ):
            return
        lacking = set(self.calls_at_return)
        for rank in still:
            since, at = self.waiting.get(rank, (now, None))
            if at is None or not (at.call or at.where) or now - since < _WAITING_S:
                return
            lacking &= {gone for gone, calls in self.calls_at_return.items() if lacks(calls, at.calls)}
        if lacking:
            at = self.waiting[still[0]][1]
            call = at.call or f"step {at.step}"
            gone = self._named(sorted(lacking))
            raise WorkerError(
                "rank-returned-early",
                f"{gone} returned from the function while rank{'s' * (len(still) > 1)} {', '.join(map(str, still))} "
                f"wait{'s' * (len(still) == 1)} for it in {call}{at.place}: every rank must make the same calls",
            )

    def _fail(self, failure: Failure) -> None:
        self.phases[failure.rank] = "failed"
        self.failures.append(failure)
        self._host_of(failure.rank).kill(failure.rank)  # together with the processes it started

    def _has_settled(self) -> bool:
        """Return whether waiting longer will not reveal another cause of the failures."""
        if all(phase in ("failed", "done") for phase in self.phases.values()):
            return True
        grace = _ECHO_GRACE_S if all(failure.is_echo for failure in self.failures) else _CAUSE_GRACE_S
        return time.monotonic() > min(failure.time_s for failure in self.failures) + grace

    def _cause(self) -> Exception:
        """Return the exception that describes the first cause."""
        causes = [failure for failure in self.failures if not failure.is_echo]
        # A rank whose collective timed out closes its connections, and others fail by that.
        late = [failure for failure in self.failures if failure.is_echo and "imed out" in failure.what]
        first = min(causes or late or self.failures, key=lambda failure: failure.time_s)
        if first.mistake:
            mistake = errors.of_words(first.mistake, [first.code, first.text])
            mistake.in_rank = first.lines
            return mistake
        lines = [f"{self._named([first.rank])} {first.what}"]
        silent = self._ranks("starting") or self._ranks("ready") or self._ranks("joined")
        ranks = [*self.waiting]
        if first in late and ranks and {*silent} <= {*ranks}:
            where = self.hang_watch.text(ranks, self.hang_watch.still_s(ranks, first.time_s), first.time_s)
            return WorkerError("hang", f"{where}; the time limit of a collective has passed (run.timeout_s)")
        if first.is_echo and silent:
            lines = [f"{self._named(silent)} did not answer; {lines[0]}"]
        elif first.is_echo and (gone := self._ranks("done")):
            lines = [f"{lines[0]}, after {self._named(gone)} had returned"]
        return WorkerError("worker-error", "\n".join([*lines, *(f"  {line}" for line in first.lines)]))

    def _host_of(self, rank: int) -> HostWorkers:
        return next(host for host in self.hosts if rank in host.ranks)

    def _ranks(self, phase: str) -> list[int]:
        return [rank for rank, its in self.phases.items() if its == phase]

    def _named(self, ranks: list[int]) -> str:
        hosts = {self._host_of(rank).host for rank in ranks} - {""}
        on = f" on {', '.join(sorted(hosts))}" if hosts else ""
        return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))} of {self.options.ranks}{on}"


_stopped_by = 0


def end_as_stopped(number: int) -> None:
    """Let this process end with the status of a signal once its script is through, and say so.

    A notebook or an interactive session, whose user has ended one call of many, keeps its own status.

    The loop ends after a step, so that the script can save what it has, and then continues to its end; whoever started it must not
    take that for the end of the training. Python cannot change the status of a script that has ended. So the C library ends the process
    by `_exit` with another status, after everything that Python does at its exit. An uncaught exception keeps its own status.
    """
    if hasattr(sys, "ps1"):
        return
    global _stopped_by
    if not _stopped_by:
        atexit.register(_set_status)
    _stopped_by = number
    print(
        f"samestep: {signal.Signals(number).name} asked the run to stop; this script ends with status {128 + number}",
        file=sys.stderr,
        flush=True,
    )


def _set_status() -> None:
    """Register, with the C library, the end of this process, unless an uncaught exception has ended the script."""
    if getattr(sys, "last_value", None) is not None:
        return
    library = ctypes.CDLL(None)
    if hasattr(library, "__cxa_atexit"):
        address = ctypes.cast(library._exit, ctypes.c_void_p)
        library.__cxa_atexit(address, ctypes.c_void_p(128 + _stopped_by), None)
