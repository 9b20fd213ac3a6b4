"""The trial of a chat template: one short conversation, written by a child process under limits of time and memory.

A template comes with a tokenizer's folder and is a program. Jinja's sandbox keeps it from files and functions, and not from
loops that never end or texts that fill the memory. So before a template writes for this process, it writes two messages in a
forked child, which the system ends where it takes too long or too much; and whatever it writes later has a largest length.
"""

from __future__ import annotations

import functools
import os
import signal
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from samestep.errors import DataError

MOST_SECONDS = 20.0
MOST_BYTES = 1 << 30
"""Memory that a template may take for a short conversation, beyond what the process has."""
MOST_CHARACTERS = 1 << 26
"""Characters that a template may write for any conversation."""
_SHORT: tuple[dict[str, Any], ...] = ({"role": "user", "content": "a"}, {"role": "assistant", "content": "b"})


@functools.lru_cache(maxsize=8)
def try_template(auto: Any) -> None:
    """Let a tokenizer's template write a short conversation in a child process, once.

    Raises:
        DataError: it takes too long or too much memory; a template that refuses the messages passes.
    """
    if not hasattr(os, "fork"):
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of threads at a fork; the child calls none of them
        child = os.fork()
    if child == 0:
        try:
            os._exit(_status_of(lambda: auto.apply_chat_template([*_SHORT], tokenize=False)))
        finally:
            os._exit(1)
    if status := _wait_for(child):
        what = f"does not end within {MOST_SECONDS:.0f} s" if status < 0 else f"takes over {MOST_BYTES >> 30} GiB"
        raise DataError(
            f"the tokenizer's chat template {what} for two short messages: a folder without the template works"
        )


def _status_of(write: Callable[[], Any]) -> int:
    """Return 0 if a text is written or refused within the memory, else 1; it is called in the child."""
    import resource  # noqa: PLC0415 - a module that Windows lacks, where nothing forks

    size = Path("/proc/self/statm")
    if size.exists():
        most = int(size.read_text().split()[0]) * resource.getpagesize() + MOST_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
    try:
        return int(len(str(write())) > MOST_CHARACTERS)
    except MemoryError:
        return 1
    except Exception:
        return 0


def _wait_for(child: int) -> int:
    """Return the exit status of a child, or -1 if it had to be ended."""
    end_s = time.monotonic() + MOST_SECONDS
    while time.monotonic() < end_s:
        found, status = os.waitpid(child, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.002)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return -1
