"""A worker process: it joins the run, calls the function it was started for, and reports to its parent how it ended.

Its parent is `runtime/processes/workers.py`. A worker dies with its parent; source: prctl(2).
"""

from __future__ import annotations

import bdb
import contextlib
import ctypes
import faulthandler
import io
import multiprocessing
import os
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing import connection
from pathlib import Path
from typing import Any

import torch

from samestep import errors
from samestep.errors import SamestepError, WorkerError, first_line
from samestep.output.durable_files import LastingStream
from samestep.runtime.processes import whereabouts
from samestep.runtime.processes.join import become_worker, join, leave
from samestep.runtime.processes.launch_info import LOOPBACK, LaunchInfo
from samestep.runtime.processes.whereabouts import ParentLink, calls_made


def die_with_parent(parent_pid: int) -> None:
    """Make the system kill this worker when the process that started it, `parent_pid`, is gone for whatever reason."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
    else:
        threading.Thread(target=_exit_after_parent, daemon=True).start()
    if os.getppid() != parent_pid:  # it died before the kernel was asked
        os._exit(1)


def _exit_after_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


@dataclass(frozen=True)
class LaunchOptions:
    """The settings of one run, equal for all its workers."""

    ranks: int
    """The number of workers on all hosts."""
    first_rank: int
    """The first rank of this host."""
    local_ranks: int
    """The number of workers of this host."""
    ranks_per_node: int
    device_type: str
    threads: int
    timeout_s: float
    hang_s: float
    """Seconds after which ranks that stand still in a step, or do not answer, are ended; 0 lets them stand."""
    quiet: bool
    isolated: bool
    shows_all: bool = False
    """Whether lines of ranks other than 0 are shown too, after the name of the rank."""
    interface: str = LOOPBACK
    """The network interface over which ranks send."""
    store: tuple[str, int] | None = None
    """Host and port of the store where the ranks of several hosts meet; those of one host meet through a file."""
    folder: str = ""
    """The folder of the workers' files, and of their store."""
    parent_pid: int = 0


@dataclass(frozen=True)
class Failure:
    """The end of a worker that was not done."""

    rank: int
    time_s: float
    what: str
    """The rest of a sentence: `failed: RuntimeError: ...`, `died: killed by SIGKILL`."""
    lines: tuple[str, ...] = ()
    text: str = ""
    mistake: str = ""
    """Name of the class in samestep.errors, for an error of ours."""
    code: str = ""
    """Its code."""
    is_echo: bool = False
    """Whether it is a consequence, such as the error of a dead or hung worker's peers."""


_OUR_FRAMES = (__file__, str(whereabouts.PACKAGE / "training" / "launch.py"), "<frozen runpy>")
"""The files that stand between the start of a rank and a function or a script of a user."""
# Messages of gloo, nccl and the stores about a peer that is gone or does not answer.
ECHO = re.compile(
    r"connection (closed|reset|refused)|broken pipe|timed? ?out|wait timeout|remote process exited|remote error"
    r"|failed to (recv|send)|connectFullMesh|watchdog",
    re.IGNORECASE,
)


def run_worker(
    options: LaunchOptions, rank: int, pipe: connection.Connection, main: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    """Run in the worker `rank`: join, call `main`, and report the outcome to the parent."""
    os.setpgid(0, 0)  # Ctrl-C in the terminal reaches the parent only, which passes it on once
    die_with_parent(options.parent_pid)
    signal.signal(signal.SIGTTOU, signal.SIG_IGN)  # rank 0 may write to the terminal nevertheless
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # that of a DataLoader of the parent raises errors of its workers
    if rank or options.quiet:
        _write_to_files(options.folder, rank)
    elif os.isatty(0):
        sys.stdin = TerminalInput()
    sys.stdout, sys.stderr = map(LastingStream, (sys.stdout, sys.stderr))
    faulthandler.enable(file=2)
    torch.set_num_threads(options.threads)
    whereabouts.begin()
    become_worker(_launch_info_of(options, rank))
    link = ParentLink(pipe)
    try:
        link.report("ready")
        per_node = None if options.isolated else options.ranks_per_node
        place = join(options.device_type, timeout_s=options.timeout_s, ranks_per_node=per_node)
        link.report("joined")
        link.listen()
        value = main(place, *args)
        link.report("done", (value if rank == options.first_rank else None, calls_made()))
        link.may_leave.wait()  # while one rank still works, the others stay reachable
    except BaseException as error:
        # Exit without teardown: destroying the group could wait for peers that will not come.
        failure = failure_of(rank, error)
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        with contextlib.suppress(Exception):
            link.report("failed", failure)
        os._exit(1)
    leave()


def _launch_info_of(options: LaunchOptions, rank: int) -> LaunchInfo:
    if options.isolated:
        return LaunchInfo("samestep", 0, rank, path=str(Path(options.folder, f"store-{rank}")))
    local, here = rank - options.first_rank, options.local_ranks
    if options.store is not None:
        host, port = options.store
        return LaunchInfo("samestep", rank, local, options.ranks, here, host=host, port=port, store_is_kept=True)
    return LaunchInfo("samestep", rank, local, options.ranks, here, path=str(Path(options.folder, "store")))


def failure_of(rank: int, error: BaseException) -> Failure:
    """Return an exception as a failure, in words that need none of its classes."""
    text = str(error)
    kind = type(error).__name__
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename in _OUR_FRAMES:
        frames = frames.tb_next
    mistake, code = "", ""
    lines = "".join(traceback.format_exception(type(error), error, frames)).splitlines()
    if isinstance(error, bdb.BdbQuit):
        lines.clear()
        text = "breakpoint() needs a terminal, which rank 0 has if the script is started from one. Use it on rank 0, or without launch in layout dp=1"
    if isinstance(error, SamestepError):
        mistake, code = errors.to_words(error)[0], error.code
        lines = [f"  in rank {rank}:", *errors.users_frames(error)]
    return Failure(
        rank,
        time.monotonic(),
        f"failed: {kind}: {text}" if text else f"failed: {kind}",
        tuple(lines),
        text,
        mistake,
        code,
        is_echo=not mistake and isinstance(error, RuntimeError) and ECHO.search(text) is not None,
    )


class TerminalInput(io.TextIOBase):
    """The keyboard, for `breakpoint()` and `input()` in a worker: its process group has the terminal while it reads a line.

    It has no file descriptor, so that `input()` calls it and does not read descriptor 0 itself.
    """

    def readline(self, size: int = -1, /) -> str:  # type: ignore[override]
        """Return the next line; an empty text at the end of the input."""
        group = os.tcgetpgrp(0)
        os.tcsetpgrp(0, os.getpgrp())
        try:
            with open(0, encoding="utf-8", errors="replace", closefd=False) as terminal:
                return terminal.readline(size)
        finally:
            os.tcsetpgrp(0, group)


@contextlib.contextmanager
def lost_peers() -> Iterator[None]:
    """Turn the error that gloo, nccl or a store raises for a peer that is gone into one that says so in a line.

    Raises:
        WorkerError: another rank is gone, or does not answer.
    """
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, SamestepError) or not ECHO.search(str(error)):
            raise
        said = re.sub(
            r"^\[[^]]*/[^]]*\] |\. This is typically caused.*", "", first_line(error)
        )  # lines of gloo's, and its advice
        raise WorkerError(
            "rank-lost",
            f"another rank is gone, or does not answer: {said}; --auto-resume continues when all are started again",
        ) from None


def _write_to_files(folder: str, rank: int) -> None:
    """Redirect this worker's stdout and stderr, those of C++ too, to files."""
    for descriptor, name in ((1, "out"), (2, "err")):
        file = os.open(Path(folder, f"{rank}.{name}"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(file, descriptor)
        os.close(file)
    sys.stdout = os.fdopen(1, "w", buffering=1, encoding="utf-8", errors="replace", closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, encoding="utf-8", errors="replace", closefd=False)
