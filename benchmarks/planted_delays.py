"""A job like the default one whose own code can be late: places in its model, loss, optimizer and data where a delay is planted.

    step      1 .. 6    7   8   9   10    11  12  13  14    ...
    planted             .   .   x   x     .   .   x   x              x: the delay is there
    looked at               o       o         o       o              the second step of each pair, which no neighbour reaches into

The code of this file is that of a user: nothing of samestep is called to plant a delay, and nothing of samestep knows of it. What a
delay really took is written by the place itself, into a file of each rank: it is the truth against which `explain.py` holds the rows.
The places are those at which code of a user, the system or the network stands: `PLACES` says which.

A core computes some 5 % faster while its neighbours are idle, so a rank that sleeps or waits makes the others faster: an effect of the
machine that is as large as what is looked for. Hence `companions` computes the same model on every core while no rank wants it.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import io
import mmap
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from samestep import job_files as jobs
from samestep.building.loss import cross_entropy
from samestep.datasets import open_dataset
from samestep.datasets.reading import read_samples
from samestep.runtime import ledger
from samestep.runtime.recording import marks
from samestep.runtime.recording.step_recorder import StepRecorder

WARM_STEPS = 6
"""Steps before the first delay: buffers are allocated, links are opened."""
HELD_OUT = 0.1
"""Part of the data that is evaluated."""
MORE_FLOATS = 12_500_000
"""Numbers of 50 MB in float32: by so much more a collective sends."""
COMPANION_SAMPLES = 48
"""Samples of a companion's step: as many as a rank of two has at a time."""
PLACES = {
    "block": "the forward of one block's MLP",
    "backward": "a hook on the gradient of one block's MLP",
    "loss": "the loss function",
    "optimizer": "the rule of the optimizer",
    "data": "the data set, for each micro-batch",
    "receiver": "a function that is given each report",
    "held out": "the data set that is evaluated between steps",
    "write": "the system's fsync, for each file",
    "collective": "the last bucket of gradients",
    "core": "the core of the rank, on which another program computes too",
}


@dataclass(frozen=True, kw_only=True)
class Delay:
    """A delay at a place, on some ranks."""

    place: str
    """A key of `PLACES`; empty where nothing is planted, or something beside the steps."""
    how: str = "busy"
    """How the time goes by: `busy`, `sleep`, `garbage`, `pages` or `send`."""
    seconds: float = 0.2
    """Seconds, where the length is a choice; others are measured."""
    ranks: Sequence[int] = (0,)
    half: int = 2
    """Steps without the delay, and then as many with it."""
    pairs: int = 8
    """Times that it comes and goes."""

    @property
    def num_steps(self) -> int:
        """Steps in all."""
        return 2 * self.half * self.pairs


@dataclass
class Plan:
    """The delays of a run, one after the other, and the folder for what they took; `step` is kept by `at`."""

    delays: Sequence[Delay]
    folder: str

    def steps_of(self, index: int, *, planted: bool) -> list[int]:
        """Return the steps with or without a delay that are looked at: of each half the second one of two."""
        first = WARM_STEPS + 1 + sum(one.num_steps for one in self.delays[:index])
        one = self.delays[index]
        halves = range(1 if planted else 0, 2 * one.pairs, 2)
        return [first + half * one.half + place for half in halves for place in range(one.half // 2, one.half)]

    @property
    def num_steps(self) -> int:
        """Steps of the run; two more are taken than are looked at, since an end differs from other steps."""
        return WARM_STEPS + 2 + sum(one.num_steps for one in self.delays)

    def delay_of(self, step: int) -> Delay | None:
        """Return the delay that is planted in a step."""
        delay, is_planted = self.turn_of(step)
        return delay if is_planted else None

    def turn_of(self, step: int) -> tuple[Delay | None, bool]:
        """Return the delay whose turn it is in a step, and whether it is planted there."""
        index = step - WARM_STEPS - 1
        for one in self.delays:
            if 0 <= index < one.num_steps:
                return one, bool(index // one.half % 2)
            index -= one.num_steps
        return None, False


class _Place:
    """What the code of this process knows of the plan."""

    plan: Plan | None = None
    file = -1
    beside = 0
    """The process that computes on this one's core."""
    cores: set[int] = set()  # noqa: RUF012


def begin(plan: Plan) -> None:
    """Plant delays in the runs of this process and of those that it forks."""
    _Place.plan, _Place.file = plan, -1


def at(place: str) -> None:
    """Be late at a place of this rank's step, if that is planned."""
    plan, recorder = _Place.plan, marks.listener()
    if plan is None or not isinstance(recorder, StepRecorder):
        return
    delay = plan.delay_of(recorder.step)
    if place == "block":
        _share_core(delay is not None and delay.place == "core" and recorder.rank in delay.ranks)
    if delay is None or delay.place != place or recorder.rank not in delay.ranks:
        return
    began = time.perf_counter_ns()
    _WAYS[delay.how](delay.seconds)
    took(recorder, place, time.perf_counter_ns() - began)


def took(recorder: StepRecorder, place: str, nanoseconds: int) -> None:
    """Write what a delay took."""
    if _Place.file < 0:
        assert _Place.plan is not None
        path = Path(_Place.plan.folder) / f"delays.rank{recorder.rank}"
        _Place.file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(_Place.file, f"{recorder.step}\t{place}\t{nanoseconds}\n".encode())


def took_s(folder: Path, rank: int) -> dict[int, float]:
    """Return the seconds of the delays of each step on a rank, as it has written them."""
    found: dict[int, float] = {}
    path = folder / f"delays.rank{rank}"
    for line in path.read_text().splitlines() if path.exists() else ():
        step, _, nanoseconds = line.split("\t")
        found[int(step)] = found.get(int(step), 0.0) + int(nanoseconds) / 1e9
    return found


# -- how time goes by --------------------------------------------------------------------------------------------------


def _busy(seconds: float) -> None:
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


def _garbage(seconds: float) -> None:
    """Let Python collect once, with so many objects to go through that this takes about `seconds`."""
    held = _objects(seconds)
    assert held
    gc.collect()


@functools.cache
def _objects(seconds: float) -> list[list[Any]]:
    """Return objects that Python goes through in about `seconds`; they are made once, in the first step that needs them."""
    return [[index] for index in range(int(12_000_000 * seconds))]


def _pages(seconds: float) -> None:
    """Touch new pages of memory until so much time has passed, as code that allocates and frees large buffers does."""
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        with mmap.mmap(-1, 16 << 20) as fresh:
            for page in range(0, len(fresh), mmap.PAGESIZE):
                fresh[page] = 1


def _share_core(shares: bool) -> None:
    """Let another program compute on the last core, and bind this process to it, or end that."""
    if shares == bool(_Place.beside):
        return
    if not shares:
        os.kill(_Place.beside, signal.SIGKILL)
        os.waitpid(_Place.beside, 0)
        os.sched_setaffinity(0, _Place.cores)
        _Place.beside = 0
        return
    _Place.cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(_Place.cores)})
    parent = os.getpid()
    _Place.beside = os.fork()
    if not _Place.beside:
        while os.getppid() == parent:
            pass
        os._exit(0)


_WAYS: Mapping[str, Callable[[float], None]] = {
    "busy": _busy,
    "sleep": time.sleep,
    "garbage": _garbage,
    "pages": _pages,
}


# -- the job's own code ------------------------------------------------------------------------------------------------


def llama() -> nn.Module:
    """Return the default job's model, the MLP of whose blocks may be late."""
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.models.llama.modeling_llama import LlamaMLP

    class LateMLP(LlamaMLP):
        """An MLP that may be late."""

        def forward(self, hidden: Tensor) -> Tensor:
            """Return the MLP's outputs."""
            if self.is_late:
                at("block")
            found = super().forward(hidden)
            if self.is_late and found.requires_grad:
                found.register_hook(_late_backward)
            return found

    given = jobs.default().model.config
    model = LlamaForCausalLM(LlamaConfig(**{**given, "attn_implementation": "sdpa"}))
    for index, layer in enumerate(model.model.layers):
        layer.mlp.__class__ = LateMLP
        layer.mlp.is_late = index == len(model.model.layers) - 1
    return model


def _late_backward(gradient: Tensor) -> None:
    at("backward")


def loss(outputs: Any, batch: Any) -> tuple[Tensor, Tensor]:
    """Return the sum of the cross entropy of a micro-batch and the number of its tokens."""
    at("loss")
    return cross_entropy(outputs, batch)


class LateAdamW(torch.optim.AdamW):
    """AdamW whose rule may be late."""

    def step(self, closure: Any = None) -> Any:
        """Update the weights."""
        at("optimizer")
        return super().step(closure)


class _LateTexts:
    """The default job's samples, which may come late."""

    def __init__(self) -> None:
        self._inner = open_dataset(jobs.default(["data.held_out=0"]), "train")
        self._cut = len(self._inner) - round(len(self._inner) * HELD_OUT)

    def __len__(self) -> int:
        return len(self._inner)

    def read(self, indices: Any) -> Any:
        """Return the samples of a micro-batch."""
        at("held out" if min(indices) >= self._cut else "data")
        return read_samples(self._inner, indices)

    def __getitem__(self, index: int) -> Any:
        return self._inner[index]


def texts() -> _LateTexts:
    """Return the data set."""
    return _LateTexts()


def receive(report: Any) -> None:
    """Receive the report of a step, as a tracker would."""
    at("receiver")


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Keep back what a run prints, unless it fails."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(said):
            yield
    except BaseException:
        print(said.getvalue()[-2000:], file=sys.stderr)
        raise


# -- the machine -------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def companions() -> Iterator[None]:
    """Keep every core as busy as the job does: a process of the idle class computes steps of its model where no rank wants the core."""
    if not hasattr(os, "SCHED_IDLE"):
        yield
        return
    commands = ((sys.executable, __file__, str(core)) for core in sorted(os.sched_getaffinity(0)))
    running = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) for command in commands]
    try:
        for one in running:
            assert one.stdout is not None
            one.stdout.readline()  # it has built its model
        yield
    finally:
        for one in running:
            one.kill()
            one.communicate()


def _accompany(core: int) -> None:
    """Compute steps of the default job's model on one core, with the lowest priority, until the parent ends."""
    parent = os.getppid()
    model = llama()
    os.sched_setaffinity(0, {core})
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    tokens = torch.zeros(COMPANION_SAMPLES, jobs.default().data.sequence_length, dtype=torch.long)
    print("ready", flush=True)
    while os.getppid() == parent:
        model(input_ids=tokens, labels=tokens).loss.backward()


# -- what is not the job's code ----------------------------------------------------------------------------------------


@contextlib.contextmanager
def slow_system() -> Iterator[None]:
    """Let files be late, and collectives larger, in this process and in those that it forks, where that is planned."""
    fsync, all_reduce = os.fsync, dist.all_reduce

    def late_fsync(descriptor: int) -> None:
        at("write")
        fsync(descriptor)

    def larger(tensor: Tensor, *given: Any, **named: Any) -> Any:
        began = time.perf_counter_ns()
        work = all_reduce(tensor, *given, **named)
        turn = _turn_of_bucket() if work is not None else None
        if turn is None:
            return work
        return _Timed(all_reduce(_buffer(), *given, **named) if turn else work, began)

    os.fsync, dist.all_reduce = late_fsync, larger
    try:
        yield
    finally:
        os.fsync, dist.all_reduce = fsync, all_reduce


def _turn_of_bucket() -> bool | None:
    """Return whether a bucket of gradients is followed by more in this step; None where that is not to be tried, or this is no bucket."""
    plan, recorder, owners = _Place.plan, marks.listener(), ledger._owners.names
    if plan is None or not isinstance(recorder, StepRecorder) or not owners or not owners[-1].startswith("bucket"):
        return None
    delay, is_planted = plan.turn_of(recorder.step)
    return is_planted if delay is not None and delay.place == "collective" else None


@functools.cache
def _buffer() -> Tensor:
    return torch.zeros(MORE_FLOATS)


class _Timed:
    """The last work of a bucket, which notes when it has ended; a group carries one work after the other."""

    def __init__(self, work: Any, began: int) -> None:
        self._work, self._began = work, began

    def wait(self, *given: Any) -> Any:
        """Wait as the work does."""
        done = self._work.wait(*given)
        recorder = marks.listener()
        if isinstance(recorder, StepRecorder):
            took(recorder, "collective", time.perf_counter_ns() - self._began)
        return done

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


if __name__ == "__main__":
    _accompany(int(sys.argv[1]))
