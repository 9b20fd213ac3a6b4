"""Crashes at random, one after another, and what came of them: `make crashes [SECONDS=1800] [SEED=0]`.

Each case trains a small job, harms it once, resumes it with `--auto-resume`, mostly in another layout, and holds every loss
of its log against those of a run that nothing has harmed (float64, 1e-9). A case is a function of the seed and its number,
and its result is one line of the record, so a sweep that is ended goes on where it was.

    killed     SIGKILL of a worker or of the command itself, at any moment after the second step
    stopped    SIGSTOP of a worker, which `run.hang_s` must end
    disk       a call of the module that writes checkpoints fails: no space, an input error; or the process dies in it
    damaged    a file or the manifest of the newest checkpoint is harmed: it must be passed over

and, where this machine can make two hosts, what befalls them (`network_faults.py`).
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import functools
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, astuple, dataclass
from pathlib import Path
from typing import Any

import psutil

from benchmarks.network_namespaces import Host, lacking, network
from samestep.errors import CheckpointError
from samestep.output import durable_files
from samestep.runtime import checkpoint_manifest
from samestep.runtime.processes import hang_watch
from tests import small
from tests.crashes import network_faults
from tests.damage import DAMAGES, damaged

KINDS = ("killed", "stopped", "disk", "damaged")
LAYOUTS = ("dp=1", "dp=2", "dp=2 zero=1", "dp=2 zero=3", "tp=2", "pp=2 microbatch=4", "cp=2", "dp=3", "dp=2 tp=2")
STEPS = 8
KEYS: dict[str, Any] = {
    "train.steps": STEPS, "checkpoint.every": 1, "checkpoint.keep": 4, "numerics.precision": "float64",
    "run.hang_s": 3.0, "run.timeout_s": 20.0, "train.watch_every": 0,
}  # fmt: skip


@dataclass(frozen=True)
class Result:
    """One case."""

    number: int
    kind: str
    what: str
    noticed: bool
    """Whether the command said what happened, or was itself what was killed."""
    recovered: bool
    steps_lost: int
    seconds: float
    wrong: bool
    """Whether a loss of the whole run is not that of the undisturbed one."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=1800)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cases", type=int, default=sys.maxsize)
    parser.add_argument("--record", type=Path, default=Path("crashes.jsonl"))
    given = parser.parse_args()
    end, known = time.monotonic() + given.seconds, results(given.record)
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="samestep-crashes-")))
        run_case, kinds = functools.partial(case, losses=undisturbed(folder), folder=folder), KINDS
        if not lacking():
            hosts, losses = stack.enter_context(network(2)), network_faults.undisturbed(folder)
            between, kinds = functools.partial(_between, hosts, losses, folder), (*KINDS, *network_faults.FAULTS)
        for number in range(len(known), given.cases):
            if time.monotonic() > end:
                break
            kind = kinds[number % len(kinds)]
            known.append((run_case if kind in KINDS else between)(kind, given.seed, number))
            with given.record.open("a") as record:
                record.write(json.dumps(asdict(known[-1])) + "\n")
    print(table(known))
    return int(any(one.wrong or not one.recovered for one in known))


def results(record: Path) -> list[Result]:
    """Return the cases of a record."""
    lines = record.read_text().splitlines() if record.exists() else []
    return [Result(**json.loads(line)) for line in lines]


def undisturbed(folder: Path) -> list[float]:
    """Return the losses of a run that nothing harms."""
    assert small.train("--layout", "dp=1", "--out", folder / "whole", **KEYS) == 0
    return small.losses(folder / "whole")


def _between(hosts: list[Host], losses: list[float], folder: Path, kind: str, seed: int, number: int) -> Result:
    """Harm a run on two hosts, and return what came of it."""
    return Result(
        number, kind, *astuple(network_faults.case(kind, random.Random(f"{seed} {number}"), hosts, losses, folder))
    )


def case(kind: str, seed: int, number: int, losses: list[float], folder: Path) -> Result:
    """Harm one run, resume it, and return what came of it."""
    drawn, run = random.Random(f"{seed} {number}"), folder / f"run-{number}"
    first, then = drawn.choice(LAYOUTS), drawn.choice(LAYOUTS)
    what, noticed = {"killed": _killed, "stopped": _stopped, "disk": _disk, "damaged": _damaged}[kind](
        run, folder / "talk", first, drawn
    )
    before, began = _steps(run), time.monotonic()
    status = _resumed(run, folder / "talk", then)
    seconds = time.monotonic() - began
    found = small.losses(run) if status == 0 else []
    at = _resumed_at((folder / "talk" / "out").read_text())
    wrong = any(abs(one - other) > 1e-9 * abs(other) for one, other in zip(found, losses, strict=False))
    recovered = status == 0 and len(found) == STEPS
    shutil.rmtree(run)
    return Result(number, kind, f"{first} -> {then}: {what}", noticed, recovered, max(0, before - at), seconds, wrong)


def _started(run: Path, talk: Path, layout: str, act: Callable[[], None] = lambda: None) -> int:
    """Start a run in the background; `act` is called in its process."""
    words = ["train", *small.settings(**KEYS), "--layout", layout, "--out", str(run)]
    pid = os.fork()
    if pid == 0:
        act()
        inner = small.in_background(words, talk)
        os._exit(small.status_of(inner, 120))
    return pid


def _command(pid: int) -> psutil.Process:
    """Return the command that a process of `_started` has forked."""
    small.wait_for(lambda: bool(psutil.Process(pid).children()))
    return psutil.Process(pid).children()[0]


def _killed(run: Path, talk: Path, layout: str, drawn: random.Random) -> tuple[str, bool]:
    pid = _started(run, talk, layout)
    command = _command(pid)
    small.wait_for(lambda: _steps(run) >= 2)
    time.sleep(drawn.random() * 0.3)
    workers = command.children()
    victim = drawn.choice([command, *workers])
    with _gone():
        victim.send_signal(signal.SIGKILL)
    os.waitpid(pid, 0)
    is_command = victim == command
    said = (talk / "err").read_text()
    return ("the command" if is_command else "a worker"), is_command or "killed by SIGKILL" in said or _steps(
        run
    ) == STEPS


def _stopped(run: Path, talk: Path, layout: str, drawn: random.Random) -> tuple[str, bool]:
    def hasty() -> None:
        hang_watch._NAMED_AFTER_S, hang_watch._SILENT_S = 1.0, 1.5  # type: ignore[misc]

    pid = _started(run, talk, layout, hasty)
    command = _command(pid)
    small.wait_for(lambda: _steps(run) >= 2)
    with _gone(), contextlib.suppress(IndexError):
        drawn.choice(command.children()).send_signal(signal.SIGSTOP)
    os.waitpid(pid, 0)
    return "a worker", "not answer" in (talk / "err").read_text() or _steps(run) == STEPS


class _Failing:
    """`os`, of which one call of the writer fails."""

    NAMES = ("open", "write", "fsync", "rename", "mkdir")

    def __init__(self, at: int, number: int | None) -> None:
        self._left, self._number = at, number

    def __getattr__(self, name: str) -> Any:
        found = getattr(os, name)
        if name not in self.NAMES:
            return found

        def call(*args: Any) -> Any:
            self._left -= 1
            if self._left == 0 and self._number is None:
                os.kill(os.getpid(), signal.SIGKILL)
            if self._left == 0:
                raise OSError(self._number, os.strerror(self._number or 0), name)
            return found(*args)

        return call


def _disk(run: Path, talk: Path, layout: str, drawn: random.Random) -> tuple[str, bool]:
    number, at = drawn.choice([errno.ENOSPC, errno.EIO, None]), drawn.randrange(1, 60)

    def harm() -> None:
        durable_files.os = _Failing(at, number)  # type: ignore[assignment]

    pid = _started(run, talk, layout, harm)
    os.waitpid(pid, 0)
    said = (talk / "err").read_text() + (talk / "out").read_text()
    word = "killed by SIGKILL" if number is None else os.strerror(number)
    return f"call {at}: {word}", word in said or _steps(run) == STEPS


def _damaged(run: Path, talk: Path, layout: str, drawn: random.Random) -> tuple[str, bool]:
    os.waitpid(_started(run, talk, layout), 0)
    newest = checkpoint_manifest.latest(run / "checkpoints")
    assert newest is not None
    damage = drawn.choice([one for one in DAMAGES if one not in ("huge", "world")])
    damaged(newest, damage, drawn)
    try:
        checkpoint_manifest.check_digests(checkpoint_manifest.read_manifest(newest), newest)
    except CheckpointError:
        return damage, True
    return damage, damage in ("flip", "append")  # of a blank between two words, which says the same


def _resumed(run: Path, talk: Path, layout: str) -> int:
    words = ["train", *small.settings(**KEYS), "--auto-resume", "--layout", layout, "--out", str(run)]
    return small.status_of(small.in_background(words, talk), 120)


def _resumed_at(said: str) -> int:
    _, _, rest = said.partition("resumes after step ")
    return int(rest.split("\n")[0]) if rest else STEPS if "is finished" in said else 0


def _steps(run: Path) -> int:
    log = run / "metrics.jsonl"
    return log.read_text().count("\n") if log.exists() else 0


def _gone() -> contextlib.suppress:
    """Return the context in which a process may have ended already."""
    return contextlib.suppress(psutil.NoSuchProcess)


def table(known: list[Result]) -> str:
    """Return the sums of each kind, as text."""
    lines = ["kind      injected  noticed  recovered  steps lost  median s  p95 s  wrong"]
    counts = Counter(one.kind for one in known)
    for kind in [*counts, "all"]:
        rows = [one for one in known if kind in (one.kind, "all")]
        took = sorted(one.seconds for one in rows)
        sums = [sum(values) for values in zip(*((r.noticed, r.recovered, r.steps_lost) for r in rows), strict=True)]
        lines.append(
            f"{kind:<9} {len(rows):>8} {sums[0]:>8} {sums[1]:>10} {sums[2]:>11} {took[len(took) // 2]:>9.1f} "
            f"{took[int(len(took) * 0.95)]:>6.1f} {sum(one.wrong for one in rows):>6}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
