"""Harm to checkpoints alone, without a run of the command, in milliseconds: a call of the writer fails, or what is stored is damaged.

    failing save      a save of which one call of the file module fails (no space, an input error), or is the process's last
    damaged           a checkpoint of one of several layouts in which something is changed, and then loaded

What is loaded afterwards, the damaged checkpoint itself or the one before, is held to the bit against what was saved. Before
each load all weights are NaN and there are no states, so that what a load leaves as it was is found.
"""

from __future__ import annotations

import errno
import itertools
import os
import random
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from samestep.datasets import batches
from samestep.errors import CheckpointError, SaveError
from samestep.job import Job
from samestep.output import durable_files
from samestep.runtime.checkpoints import checkpoint, manifests
from samestep.runtime.run import Run
from tests.crashes.failing_calls import FailingCalls, killed, refused
from tests.crashes.outcomes import Outcome
from tests.damage import DAMAGES, SIGNED, damaged
from tests.laboratory import job_of, make_run, on_ranks
from tests.models import Tokens
from tests.parity.test_every_pair import Whole, held, is_part, whole_of

KINDS = ("failing save", "damaged")
LAYOUTS = ("dp=1", "dp=3 zero=2", "dp=2 zero=3 tp=2", "tp=2 pp=2 microbatch=4", "dp=2 ep=2 zero=1")
MODEL = "mixtral"


def job() -> Job:
    """Return the job of all these checkpoints."""
    adamw = {"name": "adamw", "lr": 1e-2, "options": {}, "weight_decay": 0.1}
    return job_of("float32", 4, optimizer=adamw, train={"watch_every": 0})


def saves_twice(rank: int, world: int, model: str, layout: str, of: Job, folder: str) -> list[list[object]]:
    """Save after the first and after the second step; return what this rank holds then."""
    run, found = make_run(rank, world, model, layout, of), []
    for batch in itertools.islice(batches(Tokens(), of), 2):
        run.step(batch)
        checkpoint.save(run, Path(folder))
        found.append(held(run))
    return found


@dataclass(frozen=True)
class Stored:
    """Checkpoints of each layout, what they hold, and a run that loads them."""

    folder: Path
    wholes: dict[str, tuple[Whole, Whole]]
    """By layout: what the checkpoints of the first and of the second step hold."""
    run: Run
    """Of one rank, which loads them."""
    saving: Run
    """Another one, which saves what it holds after its second step."""
    num_calls: int
    """The number of calls that a save makes."""

    @classmethod
    def made(cls, folder: Path, layouts: Sequence[str] = LAYOUTS) -> Stored:
        """Save in each layout, of which the first is that of one rank."""
        wholes = {}
        for number, layout in enumerate(layouts):
            ranks = on_ranks(layout, saves_twice, MODEL, job(), str(folder / str(number)))
            one, two = (whole_of([part for parts in step for part in parts]) for step in zip(*ranks, strict=True))
            wholes[layout] = (one, two)
        runs = [make_run(0, 1, MODEL, "dp=1", job()) for _ in range(2)]
        for run in runs:
            run.prepare(next(batches(Tokens(), job())).samples([0]))
        checkpoint.load(runs[1], folder / "0" / "step-000002")
        calls = FailingCalls(0, killed)
        shutil.copytree(folder / "0", folder / "counted")
        _with_calls(calls, lambda: checkpoint.save(runs[1], folder / "counted", keep=1))
        return cls(folder, wholes, *runs, calls.num)

    def loads(self, path: Path) -> None:
        """Load a checkpoint into weights that are NaN.

        Raises:
            CheckpointError: it is refused.
        """
        updater = self.run.updater
        for piece in updater.pieces:
            piece.set_master(torch.full_like(piece.master(), torch.nan))
        assert updater.optimizer is not None
        updater.optimizer.state.clear()
        checkpoint.load(self.run, path)

    def is_equal(self, layout: str, step: int) -> bool:
        """Return whether the run holds what a checkpoint was saved with."""
        wanted, found = self.wholes[layout][step - 1], held(self.run)
        return {one.name for one in found} == wanted.keys() and all(is_part(one, wanted[one.name]) for one in found)


def _with_calls(calls: FailingCalls, save: Callable[[], object]) -> None:
    durable_files.os = calls  # type: ignore[assignment]
    try:
        save()
    finally:
        durable_files.os = os


def case(kind: str, drawn: random.Random, stored: Stored) -> Outcome:
    """Harm a copy of a checkpoint, or a save beside it; load what is left, and return what came of it."""
    folder = stored.folder / "harmed"
    shutil.rmtree(folder, ignore_errors=True)
    return (_failing_save if kind == "failing save" else _damaged)(drawn, stored, folder)


def _failing_save(drawn: random.Random, stored: Stored, folder: Path) -> Outcome:
    number, at = drawn.choice([errno.ENOSPC, errno.EIO, None]), drawn.randrange(1, stored.num_calls + 1)
    keep = drawn.choice([1, 2])
    shutil.copytree(stored.folder / "0" / "step-000001", folder / "step-000001")
    calls = FailingCalls(at, killed if number is None else refused(number))
    status, said = _in_a_fork(lambda: _with_calls(calls, lambda: checkpoint.save(stored.saving, folder, keep)), folder)
    is_past = status == 0  # there are fewer calls where none is removed
    noticed = is_past or (status == -9 if number is None else status == 3 and os.strerror(number) in said)
    began = time.monotonic()
    newest, wrong_ones = manifests.newest_whole(folder)
    step = int(newest.name[5:]) if newest else 0
    if newest:
        stored.loads(newest)
    equal = stored.is_equal("dp=1", step) if newest else False
    seconds = time.monotonic() - began
    is_tidy = number is None or not [*folder.glob(".step-*")]
    checkpoint.save(stored.saving, folder, keep)  # finds nothing in its way
    is_tidy &= manifests.newest_whole(folder) == (folder / "step-000002", []) and not [*folder.glob(".*")]
    word = "killed" if number is None else os.strerror(number)
    about = f"call {at} of a save that keeps {keep}: {word}, status {status}: {said}"
    return Outcome(about, noticed, bool(newest) and not wrong_ones and is_tidy, 2 - step, seconds, not equal)


def _in_a_fork(save: Callable[[], object], folder: Path) -> tuple[int, str]:
    """Call in a fork of this process; return its status, 3 for a refusal, and what was said."""
    said = folder.with_name("said")
    said.write_text("")
    pid = os.fork()
    if pid == 0:
        status = 70
        try:
            save()
            status = 0
        except SaveError as error:
            said.write_text(str(error))
            status = 3
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), said.read_text()


def _damaged(drawn: random.Random, stored: Stored, folder: Path) -> Outcome:
    layouts = [*stored.wholes]
    layout, damage = drawn.choice(layouts), drawn.choice(DAMAGES)
    shutil.copytree(stored.folder / str(layouts.index(layout)), folder)
    newest = folder / "step-000002"
    damaged(newest, damage, drawn)
    what, began = f"{layout}: {damage}", time.monotonic()
    try:
        stored.loads(newest)
    except CheckpointError as error:
        what += f": {error}"
        is_line = "\n" not in str(error)
        older, wrong_ones = manifests.newest_whole(folder)
        if damage in SIGNED:  # by who means harm: a digest cannot tell, and the load refuses
            return Outcome(what, is_line, True, 0, time.monotonic() - began, False)
        recovered = older == folder / "step-000001" and len(wrong_ones) == 1
        if recovered:
            stored.loads(folder / "step-000001")
        seconds = time.monotonic() - began
        return Outcome(what, is_line, recovered, 1, seconds, recovered and not stored.is_equal(layout, 1))
    is_harmless = damage in ("flip", "append")  # of a blank between two words of the manifest
    return Outcome(what, is_harmless, True, 0, time.monotonic() - began, not stored.is_equal(layout, 2))
