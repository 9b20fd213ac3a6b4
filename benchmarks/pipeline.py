"""Two pipeline stages on two cores beside one process: how much of what the clock promises do they reach?

    python benchmarks/pipeline.py [--rounds N] [--json FILE] [--markdown FILE]

One job, heavy in matrix products, one thread a process. All contestants live at the same time and take turns of a few
steps, so that what else the machine does hits all alike. Of each step with stages, every task is timed, without its waits
for messages, and the clock plays the schedule with these costs and with messages that take no time. Columns:

    ideal ms    what the clock makes of the measured costs of the stages, median
    step ms     measured, median
    reached     ideal / step, median over the steps: what is lost is waiting for messages, and what runs between tasks
    formula     m / (m + p - 1), the part of two cores that equal stages can use; zero-bubble and interleaved use more
    of cores    one process's step / (2 x step), the part of two cores that was used
    costs       sum of the stages' costs / one process's step: above 1 two busy cores are slower than one alone

The aim is to reach 0.95.
"""

from __future__ import annotations

import argparse
import datetime
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed as dist
from foresight import as_lines

from samestep import Job, Layout, schedules
from samestep.datasets import batches
from samestep.program.ops import Task
from samestep.program.program import Program
from samestep.runtime.axes.pipeline.stage import Stage
from samestep.runtime.processes.join import RankInfo
from samestep.runtime.processes.launch_info import LOOPBACK
from samestep.runtime.processes.worker import die_with_parent
from samestep.runtime.run import Run
from samestep.runtime.step_observer import Indices, StepObserver
from samestep.schedules import Action
from samestep.training.workload import Workload

AIM = 0.95
TOKENS, SAMPLES = 128, 1
"""Of a sequence, and sequences of a micro-batch."""
CONTESTANTS = (("1f1b", 4), ("1f1b", 8), ("1f1b", 16), ("gpipe", 8), ("interleaved", 8), ("zero-bubble", 8))
"""Schedules, and numbers of micro-batches."""
WARM_UP, TURN = 1, 2
"""Steps of a turn that are not timed, and that are."""


def job_of(microbatches: int) -> Job:
    """A Llama of four equal blocks between an embedding and a head that cost next to nothing."""
    config = {
        "vocab_size": 256, "hidden_size": 512, "intermediate_size": 1376, "num_hidden_layers": 4,
        "num_attention_heads": 8, "num_key_value_heads": 8, "max_position_embeddings": TOKENS,
    }  # fmt: skip
    return Job(
        model={"source": "hf:llama", "config": config},
        data={"sequence_length": TOKENS},
        train={"global_batch": microbatches * SAMPLES, "steps": 100_000},
        optimizer={"name": "sgd", "lr": 1e-3},
    )


def layout_of(schedule: str, microbatch: int = SAMPLES) -> Layout:
    """Two stages; interleaved with two runs of layers each."""
    virtual = " virtual_stages=2" if schedule == "interleaved" else ""
    return Layout(f"pp=2 schedule={schedule}{virtual} microbatch={microbatch}")


# -- in a process of a contestant ------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Step:
    """What one process saw of one step."""

    step_s: float
    tasks_s: tuple[float, ...]
    """Of each task of the program in its order, the update last, without waits for messages."""


class _Timed(StepObserver):
    """A run whose tasks are timed."""

    def __init__(self, workload: Workload, layout: Layout, place: RankInfo) -> None:
        self.tasks_s: list[float] = []
        self._waited_s = 0.0
        self.run = Run(workload.source, layout, workload.job, place, self)
        self.run.prepare(workload.example)
        stage = self.run.assembly.parallel.stage
        if isinstance(stage, Stage):
            self._receive, stage._received = stage._received, self._received  # type: ignore[method-assign]

    @contextmanager
    def running(self, task: Task, samples: Indices) -> Iterator[None]:
        began_s, self._waited_s = time.perf_counter(), 0.0
        yield
        self.tasks_s.append(time.perf_counter() - began_s - self._waited_s)

    def _received(self, *words: Any) -> Any:
        began_s = time.perf_counter()
        found = self._receive(*words)
        self._waited_s += time.perf_counter() - began_s
        return found

    def step(self, batch: Any) -> Step:
        self.tasks_s = []
        began_s = time.perf_counter()
        self.run.step(batch)
        ended_s = time.perf_counter()
        return Step(ended_s - began_s, tuple(self.tasks_s))


def _serve(rank: int, world: int, folder: str, runs: list[tuple[Job, Layout]], pipe: Connection) -> None:
    """Take turns with the runs that are asked for, by their number."""
    die_with_parent(os.getppid())
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = LOOPBACK
    if world > 1:
        store = dist.FileStore(f"{folder}/store", world)  # type: ignore[attr-defined]
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=world, timeout=datetime.timedelta(seconds=600)
        )
    timed, feeds, programs = [], [], []
    for job, layout in runs:
        workload = Workload(job)
        timed.append(_Timed(workload, layout, RankInfo(rank, rank, world, world, torch.device("cpu"))))
        feeds.append(iter(batches(workload.dataset, workload.job)))
        programs.append(timed[-1].run.program)
    pipe.send(programs)
    while (number := pipe.recv()) is not None:
        for _ in range(WARM_UP):
            timed[number].step(next(feeds[number]))
        pipe.send([timed[number].step(next(feeds[number])) for _ in range(TURN)])
    if world > 1:
        dist.barrier()


# -- beside them -----------------------------------------------------------------------------------


class Crew:
    """The processes of some runs on as many ranks."""

    def __init__(self, ranks: int, runs: list[tuple[Job, Layout]], folder: str) -> None:
        context = multiprocessing.get_context("fork")
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(ranks):
            ours, theirs = context.Pipe()
            self._processes.append(context.Process(target=_serve, args=(rank, ranks, folder, runs, theirs)))
            self._processes[-1].start()
            theirs.close()  # so that a process that died is noticed
            self._pipes.append(ours)
        heard: list[list[Program]] = self._hear()
        self.programs = [list(stages) for stages in zip(*heard, strict=True)]
        """Of each run, those of all stages."""

    def _hear(self) -> list[Any]:
        return [pipe.recv() for pipe in self._pipes]

    def turn(self, number: int) -> list[list[Step]]:
        """Return the timed steps of a turn, each as all ranks saw it."""
        for pipe in self._pipes:
            pipe.send(number)
        return [list(step) for step in zip(*self._hear(), strict=True)]

    def dismiss(self) -> None:
        """Let the processes end."""
        for pipe in self._pipes:
            pipe.send(None)
        for process in self._processes:
            process.join()


@dataclass(slots=True)
class Seen:
    """What was measured of one contestant."""

    ideals_s: list[float]
    steps_s: list[float]
    costs_s: list[float]
    alone_s: list[float]
    """Steps of one process, next to which these were taken."""


def ideal_s(programs: Sequence[Program], seen: Sequence[Step]) -> float:
    """Play the schedule with the tasks' measured seconds, and messages that take none."""
    virtual = programs[0].step.layout.virtual_stages
    queues = [list(zip(p.tasks, one.tasks_s, strict=True)) for p, one in zip(programs, seen, strict=True)]
    updates = [queue.pop()[1] for queue in queues]
    free = [0.0] * len(queues)
    ends: dict[tuple[int, Action], float] = {}
    while any(queues):
        for stage, queue in enumerate(queues):
            while queue:
                task, taken_s = queue[0]
                needs = list(schedules.needs(task.action, stage, len(programs), virtual))
                if any(need not in ends for need in needs):
                    break
                free[stage] = ends[stage, task.action] = (
                    max(free[stage], *(ends[need] for need in needs), 0.0) + taken_s
                )
                queue.pop(0)
    return max(free) + max(updates)


def measure(rounds: int, say: Callable[[str], None]) -> list[Seen]:
    """Let all contestants take turns."""
    counts = sorted({count for _, count in CONTESTANTS})
    Workload(job_of(counts[0]))  # what it imports, the processes need not
    with tempfile.TemporaryDirectory() as folder:
        one = Crew(1, [(job_of(c), Layout(f"dp=1 microbatch={SAMPLES}")) for c in counts], folder)
        two = Crew(2, [(job_of(c), layout_of(schedule)) for schedule, c in CONTESTANTS], folder)
        found = [Seen([], [], [], []) for _ in CONTESTANTS]
        for turn in range(rounds):
            for place in range(len(CONTESTANTS)):
                number = (place + turn) % len(CONTESTANTS)
                alone = one.turn(counts.index(CONTESTANTS[number][1]))
                for stages in two.turn(number):
                    found[number].ideals_s.append(ideal_s(two.programs[number], stages))
                    found[number].steps_s.append(max(step.step_s for step in stages))
                    found[number].costs_s.append(sum(sum(step.tasks_s) for step in stages))
                found[number].alone_s += [steps[0].step_s for steps in alone]
            say(
                f"round {turn + 1} of {rounds}: "
                + ", ".join(f"{row[0]} {row[1]} {row[5]:.3f}" for row in rows_of(found))
            )
        one.dismiss()
        two.dismiss()
    return found


HEAD = ("schedule", "m", "one ms", "ideal ms", "step ms", "reached", "aim", "formula", "of cores", "costs")


def rows_of(found: Sequence[Seen]) -> list[tuple[Any, ...]]:
    """Return the table's rows."""
    rows = []
    for (schedule, count), seen in zip(CONTESTANTS, found, strict=True):
        reached = statistics.median(i / s for i, s in zip(seen.ideals_s, seen.steps_s, strict=True))
        alone_s, step_s = statistics.median(seen.alone_s), statistics.median(seen.steps_s)
        rows.append(
            (
                schedule, count, alone_s * 1e3, statistics.median(seen.ideals_s) * 1e3, step_s * 1e3, reached,
                "met" if reached >= AIM else "NO", count / (count + 1), alone_s / 2 / step_s,
                statistics.median(c / a for c, a in zip(seen.costs_s, seen.alone_s, strict=True)),
            )
        )  # fmt: skip
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="two pipeline stages on two cores beside one process")
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="turns of each contestant; default: 5")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all values")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the table for a document")
    words = parser.parse_args(arguments)
    found = measure(max(1, words.rounds), lambda text: print(text, file=sys.stderr))
    rows = rows_of(found)
    print("\n".join(as_lines(HEAD, rows)))
    if words.json:
        record = [
            {"schedule": schedule, "microbatches": count, "ideal_s": seen.ideals_s, "step_s": seen.steps_s,
             "costs_s": seen.costs_s, "one_s": seen.alone_s}
            for (schedule, count), seen in zip(CONTESTANTS, found, strict=True)
        ]  # fmt: skip
        words.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    if words.markdown:
        words.markdown.write_text("\n".join(as_lines(HEAD, rows, markdown=True)) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
