"""The workers of this machine, seen from the process that started them: their messages, their deaths, and their end.

A SIGKILL alone does not say who sent it. Whether the kernel killed a process because memory ran out shows in its counts
of such kills for each control group and for the machine. Source: Documentation/admin-guide/cgroup-v2.rst
(memory.events) and cgroup-v1/memory.rst of Linux.

Workers start as forks of this process, or as new processes that import what they run. Forking after torch is imported takes 0.03 s where
a new process takes seconds. It is safe only without CUDA, without an OpenMP pool in use by both sides, and without autograd's device
threads; otherwise workers are spawned. Functions of a notebook's cell or of an interactive session cannot be imported by a new process:
their workers are forked even where new processes are preferred, and refused where a fork could not run.
"""

from __future__ import annotations

import codecs
import contextlib
import dataclasses
import importlib
import io
import multiprocessing
import os
import pickle
import re
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any, Protocol, TextIO

import torch
import torch.distributed as dist

from samestep.errors import JobError
from samestep.output import temporary_folder
from samestep.runtime.processes.join import CUDA_HAS_STARTED, allocator_variables, interface_variables, set_defaults
from samestep.runtime.processes.worker import Failure, LaunchOptions, run_worker

OUT_OF_MEMORY = "(out of memory:"
"""How the evidence begins, at the end of the sentence that says how a process ended."""


def count() -> int:
    """Return the number of processes that the kernel has killed for lack of memory, in this control group, or else
    on this machine."""
    for path in (*_group_files(), Path("/proc/vmstat")):
        with contextlib.suppress(OSError):
            if match := re.search(r"^oom_kill (\d+)$", path.read_text(), re.MULTILINE):
                return int(match[1])
    return 0


def evidence(before: int) -> str:
    """Return the evidence that a killed process was killed for lack of memory; empty without any.

    Args:
        before: `count` when it was started.
    """
    return f" {OUT_OF_MEMORY} the kernel has counted such a kill since the start)" if count() > before else ""


def _group_files() -> list[Path]:
    """Return the files in which the kernel counts kills for the control group of this process, from the innermost
    group up."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    group_files = []
    for line in lines:
        _, kinds, path = line.split(":", 2)
        if not kinds:
            group_files.append(Path("/sys/fs/cgroup") / path.lstrip("/") / "memory.events")
        elif "memory" in kinds.split(","):
            group_files.append(Path("/sys/fs/cgroup/memory") / path.lstrip("/") / "memory.oom_control")
    return group_files


_TAIL_LINES = 15  # lines of a dead worker's stderr and traceback that its parent shows
_LEAVE_GRACE_S = 30.0  # a worker tears its process group down
_IMPORTED_BY_STEPS = ("torch._dynamo", "samestep.runtime.run")
"""Modules that the first step of every rank imports (any optimizer of torch imports the first), in two seconds of
processor time."""


class HostWorkers(Protocol):
    """The workers of one host, which `_WorkerPool` starts, asks and ends: `LocalWorkers`, or those of another host."""

    host: str
    """The name of the host; empty for this one."""
    ranks: range

    def start(self) -> None:
        """Start the workers."""

    def sources(self) -> list[Any]:
        """Return what can be waited for until a worker says something."""

    def hear(self) -> Iterable[tuple[int, str, Any]]:
        """Return the messages received, as rank, word and value."""

    def tell(self, rank: int, word: str) -> None:
        """Send a word to one worker."""

    def signal(self, rank: int, number: int) -> None:
        """Send a signal to one worker."""

    def kill(self, rank: int) -> None:
        """Kill one worker and the processes that it started."""

    def end(self) -> None:
        """Wait for the workers that may leave, and kill the rest."""


class OtherHosts(Protocol):
    """The other hosts of a run: how many ranks each has, where all meet, and the workers that this process leads there."""

    @property
    def num_ranks(self) -> tuple[int, ...]:
        """The number of ranks of each host, this one first."""

    @property
    def ranks_per_node(self) -> int:
        """The ranks of every host."""

    @property
    def first_rank(self) -> int:
        """The first rank of this host."""

    @property
    def interface(self) -> str:
        """The network interface towards the other hosts."""

    def store(self) -> contextlib.AbstractContextManager[tuple[str, int]]:
        """Return the address of the store in which all ranks meet, held until it is left."""

    def workers(self, options: LaunchOptions) -> Sequence[HostWorkers]:
        """Return the workers on other hosts that this process leads."""


class LocalWorkers:
    """The workers of one run on this machine."""

    host = ""
    """Name of the machine in errors: this one needs none."""

    def __init__(self, options: LaunchOptions, main: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self._folder = temporary_folder.make()
        self._options = dataclasses.replace(options, folder=str(self._folder), parent_pid=os.getpid())
        self._main, self._args = main, args
        self.ranks = range(options.first_rank, options.first_rank + options.local_ranks)
        self._processes: list[BaseProcess] = []
        self._pipes: list[connection.Connection] = []
        self._over: set[int] = set()
        """Ranks whose failure or death was heard, or that may leave."""
        self._leaving: set[int] = set()
        self._asked: set[int] = set()
        """Ranks that have not answered yet how far they have come."""
        self._memory_kills = count()
        self._copies: list[_Copy] = []

    def start(self) -> None:
        """Start all workers.

        Raises:
            JobError: `main` cannot be imported by a new process, and forking is not safe here.
        """
        options = self._options
        method = start_method(options.device_type, options.threads, (self._main, self._args))
        if method == "fork" and not options.quiet and not (_is_of_a_file(sys.stdout) and _is_of_a_file(sys.stderr)):
            options = dataclasses.replace(options, quiet=True)
            self._copy_output_of(0)
        for rank in self.ranks if options.shows_all else ():
            if rank:
                self._copy_output_of(rank, f"rank {rank}: ")
        context: Any = multiprocessing.get_context(method)
        defaults = interface_variables(options.interface) | allocator_variables(options.device_type)
        defaults |= temporary_folder.compiler_cache()
        with _environment({"OMP_NUM_THREADS": str(options.threads)}, defaults), warnings.catch_warnings():
            # Python 3.12 warns of threads at a fork; those of an imported torch are idle.
            warnings.filterwarnings("ignore", message=".*multi-threaded, use of fork", category=DeprecationWarning)
            for name in _IMPORTED_BY_STEPS if method == "fork" else ():
                importlib.import_module(name)  # once: forked workers inherit the imports of their parent
            for rank in self.ranks:
                ours, theirs = context.Pipe()
                process = context.Process(
                    target=run_worker,
                    args=(options, rank, theirs, self._main, self._args),
                    name=f"rank {rank}",
                    daemon=False,
                )
                self._pipes.append(ours)
                try:
                    process.start()
                except (pickle.PicklingError, AttributeError, TypeError) as error:
                    raise JobError(
                        "workers-cannot-import",
                        f"workers start as new processes here and must be able to import main: {error}",
                    ) from None
                finally:
                    theirs.close()
                self._processes.append(process)

    def _copy_output_of(self, rank: int, name: str = "") -> None:
        """Show what a rank writes to its files in the streams of this process."""
        files = {f"{rank}.out": sys.stdout, f"{rank}.err": sys.stderr}
        self._copies += [_Copy(self._folder / file, stream, name) for file, stream in files.items() if stream]

    def sources(self) -> list[Any]:
        """Return the pipes of the workers, which can be waited for."""
        # Not the sentinels: a grandchild (a data loader's process) inherits them, and they outlast the worker.
        return [pipe for pipe in self._pipes if not pipe.closed]

    def hear(self) -> Iterator[tuple[int, str, Any]]:
        """Yield the received messages, as rank, word and value; a death is a failure too."""
        for copy in self._copies:
            copy.go_on()
        for rank, pipe, process in zip(self.ranks, self._pipes, self._processes, strict=False):
            exit_code = process.exitcode  # before the pipe is read: nothing comes after a death
            while not pipe.closed and pipe.poll():
                try:
                    word, value = pickle.loads(pipe.recv_bytes())
                except (EOFError, OSError):
                    pipe.close()
                    break
                yield self._heard(rank, word, value)
            if exit_code is not None and rank not in self._over:
                is_kill = exit_code == -signal.SIGKILL
                shortage = evidence(self._memory_kills) if is_kill else ""
                yield self._heard(rank, "failed", Failure(rank, time.monotonic(), _death(exit_code) + shortage))

    def _heard(self, rank: int, word: str, value: Any) -> tuple[int, str, Any]:
        if word == "at":
            self._asked.discard(rank)
        if word == "failed":
            self._over.add(rank)
            value = value if value.mistake else dataclasses.replace(value, lines=_tail_of(value, self._folder))
        return rank, word, value

    def tell(self, rank: int, word: str) -> None:
        """Ask a worker how far it has come (`at`), or tell it that it may leave (`leave`)."""
        if word == "leave":
            self._over.add(rank)
            self._leaving.add(rank)
        if word == "at":
            if (
                rank in self._asked
            ):  # the pipe to a worker that reads nothing would be full one day, and hold this process
                return
            self._asked.add(rank)
        with contextlib.suppress(OSError):
            self._pipes[rank - self.ranks.start].send_bytes(word.encode())

    def signal(self, rank: int, number: int) -> None:
        """Send a signal to a worker."""
        process = self._processes[rank - self.ranks.start]
        if process.pid is not None and process.exitcode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, number)

    def kill(self, rank: int) -> None:
        """Kill a worker and the processes it started."""
        _kill_group(self._processes[rank - self.ranks.start])

    def end(self) -> None:
        """Wait for the workers that may leave, kill all others, and remove their files."""
        deadline = time.monotonic() + _LEAVE_GRACE_S
        for rank, process in zip(self.ranks, self._processes, strict=False):
            if rank in self._leaving:
                process.join(max(0.0, deadline - time.monotonic()))
        for process in self._processes:
            if process.exitcode is None:
                _kill_group(process)
        for process in self._processes:
            process.join(_LEAVE_GRACE_S)
        for copy in self._copies:
            copy.go_on(is_last=True)
        for pipe in self._pipes:
            pipe.close()
        temporary_folder.remove(self._folder)


class _Copy:
    """A copy of a rank's output to a stream of this process: of rank 0 to one that is not a file, such as a notebook's, of another rank
    in complete lines after the name of the rank.

    A forked worker could not write to a notebook's stream itself: it leads to a buffer of this process, or to a socket for each
    piece of text, in whatever order they arrive.
    """

    def __init__(self, written: Path, stream: TextIO, name: str) -> None:
        self._written, self._stream, self._name, self._read_bytes = written, stream, name, 0
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._unfinished = ""

    def go_on(self, is_last: bool = False) -> None:
        """Copy the text written since the last time."""
        if not self._written.exists():
            return
        with self._written.open("rb") as file:
            file.seek(self._read_bytes)
            new = file.read()
        self._read_bytes += len(new)
        text = self._unfinished + self._decoder.decode(new)
        if self._name:
            lines, _, self._unfinished = text.rpartition("\n")
            lines, self._unfinished = (text, "") if is_last else (lines, self._unfinished)
            text = "".join(f"{self._name}{line}\n" for line in lines.splitlines())
        if text:
            self._stream.write(text)
            self._stream.flush()


def _is_of_a_file(stream: TextIO) -> bool:
    """Return whether a stream writes to a descriptor, which a forked worker inherits."""
    try:
        return isinstance(stream, io.TextIOWrapper) and stream.fileno() >= 0
    except (OSError, ValueError):
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


def _kill_group(process: BaseProcess) -> None:
    """Kill a worker and the processes it started, which are in its process group."""
    if process.pid is None:
        return
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    if process.exitcode is None:  # it may not have had time to make its group
        process.kill()


def _tail_of(failure: Failure, folder: Path) -> tuple[str, ...]:
    """Return the last lines that a worker wrote to stderr, its traceback included."""
    file = folder / f"{failure.rank}.err"
    written = file.read_text(encoding="utf-8", errors="replace").splitlines() if file.exists() else []
    return (*written, *failure.lines)[-_TAIL_LINES:]


def _death(exit_code: int) -> str:
    """Return the end of a process that reported nothing itself, as text."""
    if exit_code >= 0:
        return f"died: it exited with status {exit_code} before it was done"
    try:
        name = signal.Signals(-exit_code).name
    except ValueError:
        name = f"signal {-exit_code}"
    return f"died: killed by {name}"


def start_method(device_type: str, threads: int, work: Any) -> str:
    """Return fork where it is safe or where `work` cannot be sent to a new process, else spawn.

    Raises:
        JobError: `work` cannot be sent, and a fork could not run it.
    """
    if _prefers_fork(device_type, threads):
        return "fork"
    if not _is_bound_here(work):
        return "spawn"
    _check_fork(threads)
    return "fork"


def _prefers_fork(device_type: str, threads: int) -> bool:
    if sys.platform != "linux" or device_type == "cuda" or torch.cuda.is_initialized() or dist.is_initialized():
        return False
    # A forked worker whose parent has used an OpenMP pool hangs in its own first parallel region; with one thread it
    # has no such region. There is no way to ask whether the parent has used one.
    return threads == 1 and not _autograd_has_threads()


def _is_bound_here(work: Any) -> bool:
    """Return whether a new process could not import what `work` names: a main module without a file has it."""
    if getattr(sys.modules["__main__"], "__file__", None) is not None:
        return False
    try:
        sent = ForkingPickler.dumps(work)
    except Exception:  # whatever the reduction of a user's object raises
        return True
    return b"__main__" in bytes(sent)


def _check_fork(threads: int) -> None:
    """Refuse to fork where the workers could not run.

    Raises:
        JobError: they could not.
    """
    if "fork" not in multiprocessing.get_all_start_methods():
        raise JobError(
            "workers-cannot-import",
            "main is a function of a notebook's cell, and workers cannot be forked on this system. Use main in a module of its own",
        )
    if torch.cuda.is_initialized() or _autograd_has_threads():
        raise JobError("cuda-started", CUDA_HAS_STARTED)
    if threads > 1:
        raise JobError(
            "workers-cannot-import",
            f"threads={threads}: forked workers have one thread, and main is a function of a notebook's cell. Use threads=1, "
            "or main in a module of its own",
        )


def _autograd_has_threads() -> bool:
    """Return whether a backward pass ran here on a machine with GPUs: autograd then refuses to run in a fork."""
    for task in Path("/proc/self/task").iterdir() if Path("/proc/self/task").exists() else ():
        with contextlib.suppress(OSError):
            if (task / "comm").read_text().startswith("pt_autograd"):
                return True
    return False
