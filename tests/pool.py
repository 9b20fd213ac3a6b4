"""Warm forked ranks for the tests: a job on two ranks takes milliseconds instead of seconds.

`pool(2).run(function, *args)` calls `function(rank, world, *args)` on every rank and returns the results by rank. The
function stands at the top level of a module. The ranks joined one gloo group on the loopback interface when the pool
was first used. A job that fails may leave its peers inside a collective, so after it the pool is killed, unless every rank
has raised the same refusal, and built again for the next job; so it is when the pytest process has traced more of the job's model meanwhile,
for its ranks to inherit. A job that hangs ends with its test's time limit (`tests/time_limit.py`).
"""

from __future__ import annotations

import datetime
import functools
import gc
import math
import multiprocessing
import os
import pickle
import shutil
import signal
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Hashable
from multiprocessing import connection
from typing import Any

import torch
import torch.distributed as dist

from samestep.errors import SamestepError
from samestep.examination.traced_model import TracedModel
from samestep.runtime.processes import join, launch_info, worker
from tests import traced
from tests.device import real_gpu

ECHO_GRACE_S = 1.0  # how long to wait for the cause when one rank only says that its peer has gone


class Pool:
    """`ranks` processes that wait for jobs; on `cuda` each has a simulated device, or a real one (`device/real_gpu.py`)."""

    def __init__(self, ranks: int, device: str = "cpu") -> None:
        self.ranks, self.device = ranks, device
        self.processes: list[Any] = []
        self.pipes: list[connection.Connection] = []
        self.folder = ""
        self.inherited: dict[Hashable, TracedModel] = {}
        """Traced models that the ranks have."""
        self.inherits = device == "cpu" or not real_gpu.is_asked()
        """Whether the ranks are forked."""
        self.ended_s = 0.0
        """Seconds of processor time of ranks that have been ended."""
        self._refusal_of_all: BaseException | None = None
        """What every rank has raised alike, so that none is left inside a collective."""

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Return what `function(rank, world, *args)` returns on every rank, or raise what one of them raised first."""
        if self.inherits and traced.is_asked_beyond(self.inherited):
            self.close()
        if not self.processes:
            self._start()
        job = pickle.dumps((function, args))
        try:
            for pipe in self.pipes:
                pipe.send_bytes(job)
            return self._collect()
        except BaseException as error:
            if error is not self._refusal_of_all:
                self.close()
            raise

    def used_s(self) -> float:
        """Return the seconds of processor time that the ranks have used, by the clocks that Linux has of processes."""
        try:
            return sum(time.clock_gettime(~process.pid << 3 | 2) for process in self.processes)
        except OSError:  # a rank has ended
            return math.nan

    def close(self) -> None:
        """Kill the ranks; the next job starts new ones."""
        if not math.isnan(used_s := self.used_s()):
            self.ended_s += used_s
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()
            process.close()
        for pipe in self.pipes:
            pipe.close()
        self.processes, self.pipes = [], []
        shutil.rmtree(self.folder, ignore_errors=True)

    def _start(self) -> None:
        from tests.laboratory import trace_ahead

        if self.inherits:
            warm_up()
            trace_ahead()
            join.leave()  # a rank that inherits a group could make none
        self.inherited = traced.known()
        context: Any = multiprocessing.get_context("fork" if self.inherits else "spawn")
        self.folder = tempfile.mkdtemp(prefix="samestep-pool-")
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*multi-threaded, use of fork", category=DeprecationWarning)
            for rank in range(self.ranks):
                ours, theirs = context.Pipe()
                process = context.Process(
                    target=_serve,
                    args=(rank, self.ranks, self.device, self.folder, theirs, os.getpid()),
                    name=f"pool rank {rank}",
                )
                process.start()
                theirs.close()
                self.processes.append(process)
                self.pipes.append(ours)

    def _collect(self) -> list[Any]:
        results: dict[int, Any] = {}
        failures: dict[int, tuple[float, BaseException]] = {}
        deadline = math.inf
        while len(results) + len(failures) < self.ranks:
            waiting = [rank for rank in range(self.ranks) if rank not in results and rank not in failures]
            left_s = None if deadline == math.inf else max(0.0, deadline - time.monotonic())
            ready = connection.wait([self.pipes[rank] for rank in waiting], left_s)
            if not ready:
                break
            for pipe in ready:
                rank = self.pipes.index(pipe)  # type: ignore[arg-type]
                worked, value = self._answer(rank)
                if worked:
                    results[rank] = value
                    continue
                failures[rank] = value
                # A peer that hangs because this rank failed says nothing more; one that caused it says so at once.
                deadline = min(deadline, time.monotonic() + (ECHO_GRACE_S if _is_echo(value[1]) else 0.1))
        if failures:
            causes = [failure for failure in failures.values() if not _is_echo(failure[1])]
            first = min(causes or list(failures.values()), key=lambda failure: failure[0])[1]
            raised = {(type(error), str(error)) for _, error in failures.values()}
            if len(failures) == self.ranks and len(raised) == 1 and isinstance(first, SamestepError):
                self._refusal_of_all = first
            raise first
        return [results[rank] for rank in range(self.ranks)]

    def _answer(self, rank: int) -> tuple[bool, Any]:
        try:
            return pickle.loads(self.pipes[rank].recv_bytes())
        except (EOFError, OSError):
            self.processes[rank].join()
            code = self.processes[rank].exitcode
            return False, (time.monotonic(), RuntimeError(f"pool rank {rank} died with exit code {code}"))


def telling(function: Callable[..., object]) -> Callable[..., str]:
    """Let a function of ranks return the text of an error of samestep that it raises, or nothing."""

    @functools.wraps(function)
    def told(*args: Any) -> str:
        try:
            function(*args)
        except SamestepError as error:
            return str(error)
        return ""

    return told


@functools.cache
def warm_up() -> None:
    """Import here, once, what the first run of a process imports: each rank that is forked would take 3 s for it."""
    from tests.laboratory import clipped, observe

    if not torch.cuda.is_available():  # there a backward starts threads, and what is forked then could run none
        observe(0, 1, "llama", "dp=1 recompute=full microbatch=4", clipped(), True)


def pool(ranks: int, device: str = "cpu") -> Pool:
    """Return the session's pool of so many ranks on a device."""
    return _pools.setdefault((ranks, device), Pool(ranks, device))


def used_s_of_all() -> float:
    """Return the seconds of processor time that the ranks of all pools have used so far, as far as they are known."""
    running = [made.used_s() for made in _pools.values()]
    return sum(made.ended_s for made in _pools.values()) + sum(used_s for used_s in running if not math.isnan(used_s))


def close_all() -> None:
    """Kill every pool of the session."""
    for made in _pools.values():
        made.close()


def close_busy() -> None:
    """Kill the pools of which a rank uses its processor while it has no job.

    Where ranks parted within a job, gloo's thread asks for ever after a message that nobody receives, which once took half a core
    until the session ended.
    """
    before = {made: made.used_s() for made in _pools.values() if made.processes}
    if before:
        time.sleep(_IDLE_S)
    for made, used_s in before.items():
        if not made.used_s() - used_s < _IDLE_S / 10:
            made.close()


_IDLE_S = 0.03
"""Seconds in which idle ranks use next to none."""


_pools: dict[tuple[int, str], Pool] = {}


def _is_echo(error: BaseException) -> bool:
    is_torchs = isinstance(error, RuntimeError) and not isinstance(error, SamestepError)
    return is_torchs and worker.ECHO.search(str(error)) is not None


def _serve(rank: int, world: int, device: str, folder: str, pipe: connection.Connection, parent_pid: int) -> None:
    worker.die_with_parent(parent_pid)
    gc.freeze()  # what was inherited stays: no collection looks through it, nor copies its pages
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # pytest's Ctrl-C is pytest's affair, which then kills us
    os.environ["GLOO_SOCKET_IFNAME"] = launch_info.LOOPBACK
    torch.set_num_threads(1)
    try:
        store = dist.FileStore(f"{folder}/store", world)
        timeout = datetime.timedelta(seconds=60)
        if device == "cuda":
            real_gpu.join(store, rank, world, timeout)
        else:
            dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timeout)
        dist.barrier()  # a job that ends at once may not close the connection of who is still connecting
    except BaseException as error:
        pipe.recv_bytes()
        pipe.send_bytes(pickle.dumps((False, _told(error))))
        return
    warnings.resetwarnings()
    # As in the pytest process; a torch that was never tried with its GPU may warn of what the tests do not know.
    warnings.simplefilter("default" if device == "cuda" and real_gpu.is_asked() else "error")
    warnings.filterwarnings(
        "ignore", "LSTM with projections is not supported with oneDNN"
    )  # torch says it of bf16 on some CPUs
    while True:
        try:
            job = pipe.recv_bytes()
        except EOFError:
            os._exit(0)
        try:
            function, args = pickle.loads(job)
            answer = pickle.dumps((True, function(rank, world, *args)))
        except BaseException as error:
            answer = pickle.dumps((False, _told(error)))
        pipe.send_bytes(answer)


def _told(error: BaseException) -> tuple[float, BaseException]:
    """Return when it happened, and the exception with this rank's traceback as a note, fit for pickling."""
    words = "".join(traceback.format_exception(error))
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        error = RuntimeError(f"{type(error).__name__}: {error}")
    error.add_note(f"In rank {dist.get_rank() if dist.is_initialized() else '?'} of the pool:\n{words}")
    return time.monotonic(), error
