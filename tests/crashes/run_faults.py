"""Harm to whole runs of the command `train`, on one machine: each is harmed once, and resumed, mostly in another layout.

    killed at the start, in a step, in a save, in a resume     SIGKILL of a worker or of the command itself
    stopped                                                    SIGSTOP of a worker, which `run.hang_s` must end
    full disk                                                  the run's file system fills up, and is emptied before the resume
    failing call                                               no space or an input error at a call, or the process dies in it
    damaged, then resumed                                      a file or the manifest of the newest checkpoint is harmed

Every loss of the log is held against those of a run that nothing has harmed (float64, 1e-9).
"""

from __future__ import annotations

import contextlib
import errno
import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from samestep.errors import CheckpointError
from samestep.output import durable_files
from samestep.runtime.checkpoints import manifests
from samestep.runtime.processes import hang_watch
from tests import small
from tests.crashes.failing_calls import FailingCalls, killed, refused
from tests.crashes.outcomes import Outcome
from tests.damage import DAMAGES, SIGNED, damaged

LAYOUTS = ("dp=1", "dp=2", "dp=2 zero=1", "dp=2 zero=3", "tp=2", "pp=2 microbatch=4", "cp=2", "dp=3", "dp=2 tp=2")
STEPS = 8
KEYS: dict[str, Any] = {
    "train.steps": STEPS, "checkpoint.every": 1, "checkpoint.keep": 4, "checkpoint.background": True,
    "numerics.precision": "float64", "run.hang_s": 3.0, "run.timeout_s": 20.0, "train.watch_every": 0,
}  # fmt: skip
_LIMIT_S = 240
_DISK_BYTES = 4 << 20


@dataclass(frozen=True)
class Harmed:
    """A run that is harmed."""

    run: Path
    talk: Path
    """The folder of what the command says."""
    layout: str
    drawn: random.Random

    def start(self, *more: str, act: Callable[[], None] = lambda: None) -> int:
        """Start the command in the background; `act` is called in its process before."""
        words = ["train", *small.settings(**KEYS), "--layout", self.layout, "--out", str(self.run), *more]
        pid = os.fork()
        if pid == 0:
            status = 70
            try:
                act()
                status = small.status_of(small.in_background(words, self.talk), _LIMIT_S) % 256
            except AssertionError:  # it still runs, which whoever waits for it takes for a failure
                small.end_background()
            finally:
                os._exit(status)
        return pid

    @property
    def steps(self) -> int:
        """The number of steps in the log."""
        log = self.run / "metrics.jsonl"
        return log.read_text().count("\n") if log.exists() else 0

    @property
    def is_finished(self) -> bool:
        """Whether all steps were taken before the harm came."""
        return (self.run / "summary.json").exists()

    def said(self) -> str:
        """Return what the command has said."""
        return "".join((self.talk / name).read_text() for name in ("out", "err") if (self.talk / name).exists())

    def kill_one(self, pid: int) -> tuple[str, bool]:
        """Kill the command of `start` or one of its workers; return which, and whether that was noticed."""
        with _gone():
            command = _command(pid)
            victim = self.drawn.choice([command, *command.children()])
            is_command = victim == command
            victim.send_signal(signal.SIGKILL)
            os.waitpid(pid, 0)
            noticed = is_command or "killed by SIGKILL" in self.said() or self.is_finished
            return ("the command" if is_command else "a worker"), noticed
        os.waitpid(pid, 0)
        return "nobody, as it had ended", True


def case(kind: str, drawn: random.Random, losses: list[float], folder: Path) -> Outcome:
    """Harm one run, resume it, and return what came of it."""
    first, then = drawn.choice(LAYOUTS), drawn.choice(LAYOUTS)
    with contextlib.ExitStack() as stack:
        run = stack.enter_context(_small_disk(folder)) / "run" if kind == "full disk" else folder / "run"
        stack.callback(shutil.rmtree, run, ignore_errors=True)
        shutil.rmtree(folder / "talk", ignore_errors=True)
        what, noticed = HARMS[kind](Harmed(run, folder / "talk", first, drawn))
        again = Harmed(run, folder / "talk", then, drawn)
        before, began = again.steps, time.monotonic()
        pid = again.start("--auto-resume")
        seconds = _next_step_s(again, pid, began)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        said, found = again.said(), small.losses(run) if status == 0 else []
        wrong = any(abs(one - other) > 1e-9 * abs(other) for one, other in zip(found, losses, strict=False))
        recovered = status == 0 and len(found) == STEPS and "Traceback" not in said
        lost = max(0, before - _resumed_at(said)) if recovered else 0
    about = "" if recovered and noticed else f", status {status}: {said.strip()[-300:]}"
    return Outcome(f"{first} -> {then}: {what}{about}", noticed, recovered, lost, seconds, wrong)


def undisturbed(folder: Path) -> list[float]:
    """Return the losses of a run that nothing harms."""
    assert small.train("--layout", "dp=1", "--out", folder / "whole", **KEYS) == 0
    return small.losses(folder / "whole")


def _command(pid: int) -> psutil.Process:
    """Return the command that a process of `start` has forked; raise NoSuchProcess where it has ended."""
    small.wait_for(lambda: _has_ended(pid) or bool(psutil.Process(pid).children()))
    if not (found := psutil.Process(pid).children()):
        raise psutil.NoSuchProcess(pid)
    return found[0]


def _wait(harmed: Harmed, pid: int, happened: Callable[[], bool]) -> None:
    """Wait until something has happened, or the run has ended."""
    small.wait_for(lambda: happened() or _has_ended(pid), _LIMIT_S)


def _has_ended(pid: int) -> bool:
    return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def _next_step_s(again: Harmed, pid: int, began: float) -> float:
    """Return the seconds until a run that resumes has logged a step, or says that none was left."""
    _wait(again, pid, lambda: "resumes after step" in again.said())
    at = _resumed_at(again.said())
    _wait(again, pid, lambda: again.steps > at)
    return time.monotonic() - began


def _resumed_at(said: str) -> int:
    _, _, rest = said.partition("resumes after step ")
    return int(rest.split()[0]) if rest.count("\n") else STEPS if "is finished" in said else 0


def _gone() -> contextlib.suppress:
    """Return the context in which a process may have ended already."""
    return contextlib.suppress(psutil.NoSuchProcess)


# -- harms -----------------------------------------------------------------------------------------


def _killed_at_the_start(harmed: Harmed) -> tuple[str, bool]:
    pid = harmed.start()
    with _gone():
        _command(pid)
    time.sleep(harmed.drawn.random() * 1.5)
    return harmed.kill_one(pid)


def _killed_in_a_step(harmed: Harmed) -> tuple[str, bool]:
    pid = harmed.start()
    _wait(harmed, pid, lambda: harmed.steps >= 2)
    time.sleep(harmed.drawn.random() * 0.3)
    return harmed.kill_one(pid)


def _killed_in_a_save(harmed: Harmed) -> tuple[str, bool]:
    pid = harmed.start()
    _wait(harmed, pid, lambda: harmed.steps >= 2 and any((harmed.run / "checkpoints").glob(".step-*")))
    return harmed.kill_one(pid)


def _killed_in_a_resume(harmed: Harmed) -> tuple[str, bool]:
    pid = harmed.start()
    _wait(harmed, pid, lambda: harmed.steps >= 3)
    harmed.kill_one(pid)
    pid = harmed.start("--auto-resume")
    _wait(harmed, pid, lambda: "resumes after step" in harmed.said())
    time.sleep(harmed.drawn.random() * 0.3)
    return harmed.kill_one(pid)


def _stopped(harmed: Harmed) -> tuple[str, bool]:
    def hasty() -> None:
        hang_watch._NAMED_AFTER_S, hang_watch._SILENT_S = 1.0, 1.5  # type: ignore[misc]

    pid = harmed.start(act=hasty)
    _wait(harmed, pid, lambda: harmed.steps >= 2)
    with _gone(), contextlib.suppress(IndexError):
        harmed.drawn.choice(_command(pid).children()).send_signal(signal.SIGSTOP)
    os.waitpid(pid, 0)
    return "a worker", "not answer" in harmed.said() or harmed.is_finished


def _full_disk(harmed: Harmed) -> tuple[str, bool]:
    pid, left = harmed.start(), harmed.drawn.randrange(1 << 16)
    _wait(harmed, pid, lambda: harmed.steps >= 2)
    ballast = harmed.run.parent / "ballast"
    with contextlib.suppress(OSError), ballast.open("wb", buffering=0) as file:
        while free := max(0, shutil.disk_usage(ballast).free - left):
            file.write(bytes(min(free, 4096)))
    os.waitpid(pid, 0)
    said = harmed.said()
    ballast.unlink()
    is_said = os.strerror(errno.ENOSPC) in said and "Traceback" not in said
    return f"with {left} bytes left", is_said or harmed.is_finished


def _failing_call(harmed: Harmed) -> tuple[str, bool]:
    number, at = harmed.drawn.choice([errno.ENOSPC, errno.EIO, None]), harmed.drawn.randrange(1, 60)

    def harm() -> None:
        fail = killed if number is None else refused(number)
        durable_files.os = FailingCalls(at, fail)  # type: ignore[assignment]

    os.waitpid(harmed.start(act=harm), 0)
    word = "killed by SIGKILL" if number is None else os.strerror(number)
    return f"call {at}: {word}", word in harmed.said() or harmed.is_finished


def _damaged(harmed: Harmed) -> tuple[str, bool]:
    os.waitpid(harmed.start(), 0)
    newest = manifests.latest(harmed.run / "checkpoints")
    assert newest is not None
    damage = harmed.drawn.choice([one for one in DAMAGES if one not in SIGNED])
    damaged(newest, damage, harmed.drawn)
    try:
        manifests.check_digests(manifests.read_manifest(newest), newest)
    except CheckpointError:
        return damage, True
    return damage, damage in ("flip", "append")  # of a blank between two words, which says the same


@contextlib.contextmanager
def _small_disk(folder: Path) -> Iterator[Path]:
    """Yield the folder of a file system of a few MiB."""
    disk = folder / "disk"
    disk.mkdir(exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={_DISK_BYTES}", "samestep", str(disk)], check=True)
    try:
        yield disk
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def can_mount(folder: Path) -> bool:
    """Return whether this machine lets the tests make a small file system."""
    with contextlib.suppress(OSError, subprocess.CalledProcessError), _small_disk(folder):
        return True
    return False


HARMS: dict[str, Callable[[Harmed], tuple[str, bool]]] = {
    "killed at the start": _killed_at_the_start,
    "killed in a step": _killed_in_a_step,
    "killed in a save": _killed_in_a_save,
    "killed in a resume": _killed_in_a_resume,
    "stopped": _stopped,
    "full disk": _full_disk,
    "failing call": _failing_call,
    "damaged, then resumed": _damaged,
}
