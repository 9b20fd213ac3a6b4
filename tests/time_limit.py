"""The time limit of each test: a test that is out of time fails with the Python stacks of every process it started.

A test may take LIMIT_S, or what `@pytest.mark.time_limit(900)` says, set-up and clean-up of fixtures included. If it does
not end soon after it failed, the session ends: something in it waits for ever.

`faulthandler` answers a signal that nobody else takes with the stacks of all threads, at once, also of a process that waits inside a collective.
It is registered before the first fork, so every rank of a pool and every launched worker inherits the answer and the file
that it goes to. A process that was started as a new program has neither; it is listed by its command line.
"""

from __future__ import annotations

import faulthandler
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Generator
from pathlib import Path
from types import FrameType
from typing import Any

import psutil
import pytest

STACKS_SIGNAL = getattr(signal, "SIGRTMIN", signal.SIGUSR2)
"""Signal that shows the stacks; SIGUSR2 asks runs to record steps."""
LIMIT_S = 600.0
"""Seconds that a test may take: many times what the slowest needs, since other work may leave it a tenth of a core."""
CLEAN_UP_S = 30.0
"""Seconds that a test may take to end after its limit; then the whole session ends."""
_ANSWER_S = 20.0
"""Seconds that a process has to write its stacks: its core may have much else to do."""
_SILENCE_S = 0.5
"""Seconds without a new line after which an answer is complete."""

_stacks_file = tempfile.TemporaryFile("a+", prefix="samestep-stacks-")  # noqa: SIM115 - faulthandler keeps its descriptor


class OutOfTime(BaseException):
    """A test took longer than its limit; no `except Exception` and no shrinking of hypothesis holds it up."""


def pytest_configure(config: pytest.Config) -> None:
    """Have this process, and every fork of it, answer the signal with its stacks."""
    config.addinivalue_line("markers", "time_limit(seconds): how long a test may take, if not as long as the others")
    faulthandler.register(STACKS_SIGNAL, file=_stacks_file)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Run one test with its clock; in a debugger without."""
    if item.config.getoption("usepdb"):
        return (yield)
    before = signal.signal(signal.SIGALRM, _striker(item))
    signal.setitimer(signal.ITIMER_REAL, _limit_of(item))
    try:
        return (yield)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _limit_of(item: pytest.Item) -> float:
    marker = item.get_closest_marker("time_limit")
    return marker.args[0] if marker else LIMIT_S


def _striker(item: pytest.Item) -> Callable[[int, FrameType | None], None]:
    """Return the handler of SIGALRM for one test: it fails the test, and when called once more ends the session."""
    has_struck = False

    def strike(_number: int, _frame: FrameType | None) -> None:
        nonlocal has_struck
        words = f"{item.nodeid} took longer than {_limit_of(item):g} s\n{stacks()}"
        if has_struck:
            _end_session(item, f"{words}\nIt did not end within {CLEAN_UP_S:g} s after that, so all ends here.")
        has_struck = True
        signal.setitimer(signal.ITIMER_REAL, CLEAN_UP_S)
        raise OutOfTime(words)

    return strike


def stacks() -> str:
    """Return the Python stacks of this process and of all below it."""
    this = psutil.Process()
    return "\n".join(_stacks_of(process) for process in (this, *this.children(recursive=True)))


def _stacks_of(process: psutil.Process) -> str:
    """Return the title and the stacks of one process; it may end meanwhile."""
    try:
        status = Path(f"/proc/{process.pid}/status").read_text(encoding="utf-8")
        title = f"process {process.pid} ({process.status()}): {' '.join(process.cmdline())}"
        if not _answers(status):
            return f"{title}\n  a program of its own, which shows no stacks"
        start = _end_of_file()
        os.kill(process.pid, STACKS_SIGNAL)
    except (psutil.NoSuchProcess, OSError):
        return f"process {process.pid} has ended"
    _wait_for_answer(start)
    found = os.pread(_stacks_file.fileno(), _end_of_file() - start, start).decode(errors="replace")
    return f"{title}\n{found or '  it did not answer'}"


def _answers(status: str) -> bool:
    """Return whether the status of a process, as /proc gives it, says that it catches the signal."""
    (caught,) = re.findall(r"^SigCgt:\s*(\w+)", status, re.MULTILINE)
    return bool(int(caught, 16) >> (STACKS_SIGNAL - 1) & 1)


def _end_of_file() -> int:
    return os.fstat(_stacks_file.fileno()).st_size


def _wait_for_answer(start: int) -> None:
    """Wait until the file has grown past `start`, and then has not grown for a while."""
    size, changed_s = start, time.monotonic()
    while time.monotonic() - changed_s < (_SILENCE_S if size > start else _ANSWER_S):
        time.sleep(0.05)
        if (size_now := _end_of_file()) != size:
            size, changed_s = size_now, time.monotonic()


def _end_session(item: pytest.Item, words: str) -> None:
    """Say what hangs, kill every process of this session and end it."""
    capture: Any = item.config.pluginmanager.getplugin("capturemanager")
    if capture is not None:
        capture.suspend_global_capture(in_=True)
    print(f"\n{words}", file=sys.stderr, flush=True)
    for process in psutil.Process().children(recursive=True):
        process.kill()
    os._exit(1)
