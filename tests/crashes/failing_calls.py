"""The module `os` with one call that fails, in place of that of the one file through which checkpoints touch the disk."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any, NoReturn

NAMES = ("open", "write", "fsync", "rename", "mkdir", "close", "unlink", "rmdir")


class FailingCalls:
    """The functions of `os` that change the disk, of which the n-th call fails; it counts them."""

    def __init__(self, fail_at: int, fail: Callable[[str], object]) -> None:
        self.num, self._fail_at, self._fail = 0, fail_at, fail

    def __getattr__(self, name: str) -> Any:
        found = getattr(os, name)
        if name not in NAMES:
            return found

        def call(*args: Any) -> Any:
            self.num += 1
            if self.num == self._fail_at:
                if name == "close":
                    os.close(*args)
                self._fail(name)
            return found(*args)

        return call


def refused(number: int) -> Callable[[str], NoReturn]:
    """Return what raises one of the system's errors in the name of a call."""

    def fail(name: str) -> NoReturn:
        raise OSError(number, os.strerror(number), name)

    return fail


def killed(name: str) -> None:
    """End this process at once."""
    os.kill(os.getpid(), signal.SIGKILL)
