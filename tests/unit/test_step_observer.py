"""An observer is told every task of a step in its order, and changes no bit of it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from samestep.building.loss import loss_of
from samestep.building.optimizer import optimizer_of
from samestep.datasets import batches
from samestep.examination.examine import Source
from samestep.job import Job
from samestep.layout import Layout
from samestep.program.ops import StepFlag, Task
from samestep.randomness.dropout_state import Dropout, DropoutState
from samestep.runtime.device_decides import decide
from samestep.runtime.processes.join import RankInfo
from samestep.runtime.run import Run
from samestep.runtime.step_observer import Indices, StepObserver, StepScalars, flag_slots
from samestep.schedules import TaskKind
from tests.laboratory import job_of, perturbed
from tests.models import MODELS, Tokens
from tests.pool import pool


class Recorder(StepObserver):
    """Notes all that it is told."""

    def __init__(self) -> None:
        self.began: list[tuple[Task, list[int]]] = []
        self.ended: list[Task] = []
        self.scalars: list[StepScalars] = []

    @contextmanager
    def running(self, task: Task, samples: Indices) -> Iterator[None]:
        self.began.append((task, samples.tolist()))
        yield
        self.ended.append(task)

    def agreed(self, scalars: StepScalars) -> None:
        self.scalars.append(scalars)


def run_of(rank: int, world: int, model: str, layout: str, job: Job, *observers: StepObserver) -> Run:
    place = RankInfo(rank, rank, world, world, torch.device("cpu"))
    source = Source(perturbed(MODELS[model]), loss_of(job), optimizer_of(job), model)
    return Run(source, Layout(layout), job, place, *observers)


def tasks_told(rank: int, world: int, model: str, layout: str) -> tuple[bool, list[TaskKind], list[int]]:
    """Take a step; say whether the tasks were told as the program has them, their kinds, and the samples of forwards."""
    job = job_of("float64", 1)
    recorder = Recorder()
    run = run_of(rank, world, model, layout, job, recorder)
    run.step(next(iter(batches(Tokens(), job))))
    told = [task for task, _ in recorder.began]
    samples = [index for task, indices in recorder.began if task.kind is TaskKind.FORWARD for index in indices]
    assert recorder.began[-1][1] == []
    return told == list(run.program.tasks) == recorder.ended, [task.kind for task in told], samples


@pytest.mark.parametrize(
    ("model", "layout"), [("plain", "dp=2 microbatch=1"), ("deep_llama", "dp=1 pp=2 schedule=zero-bubble microbatch=2")]
)
def test_tasks_are_told_in_the_order_of_the_program(model: str, layout: str) -> None:
    every_sample = next(iter(batches(Tokens(), job_of("float64", 1)))).indices.tolist()
    ranks = pool(2).run(tasks_told, model, layout)
    assert all(is_as_programmed for is_as_programmed, _, _ in ranks)
    assert all(kinds[-1] is TaskKind.UPDATE for _, kinds, _ in ranks)
    read = [samples for _, _, samples in ranks]
    assert sorted(read[0] + read[1] if "dp=2" in layout else read[0]) == sorted(every_sample)


def test_an_observer_changes_no_bit() -> None:
    job = job_of("float32", 3)
    recorder = Recorder()
    plain, observed = run_of(0, 1, "plain", "dp=1", job), run_of(0, 1, "plain", "dp=1", job, recorder)
    for batch in batches(Tokens(), job):
        expected, report = plain.step(batch), observed.step(batch)
        assert (report.loss, report.grad_norm) == (expected.loss, expected.grad_norm)
        assert recorder.scalars[-1].loss_sum / recorder.scalars[-1].count == report.loss
    for ours, theirs in zip(observed.updater.pieces, plain.updater.pieces, strict=True):
        assert torch.equal(ours.value, theirs.value)


def test_no_update_is_told_of_a_skipped_step() -> None:
    job = job_of("float32", 1, numerics={"on_nonfinite": "skip"})
    recorder = Recorder()
    run = run_of(0, 1, "plain", "dp=1", job, recorder)
    batch = next(iter(batches(Tokens(), job)))
    run.prepare(batch.samples([0]))
    with torch.no_grad():
        run.updater.pieces[0].value.fill_(torch.nan)
    assert run.step(batch).skipped
    assert TaskKind.UPDATE not in {task.kind for task in recorder.ended}


@pytest.mark.parametrize(("draws", "shown"), [([0], Dropout.ABSENT), ([0, 3, 0], Dropout.ACTIVE)])
def test_a_step_shows_whether_dropout_is_active(draws: list[int], shown: Dropout) -> None:
    state = DropoutState(Dropout.UNKNOWN, torch.nn.Linear(2, 2))
    for num_draws in draws:
        state.end_forward(num_draws)
    state.end_step()
    assert state.dropout is shown


SETS_OF_FLAGS = [
    set(raised) for number in range(len(StepFlag) + 1) for raised in itertools.combinations(StepFlag, number)
]


def test_each_flag_of_a_step_has_a_slot_of_its_own() -> None:
    for raised, ranks in itertools.product(SETS_OF_FLAGS, (1, 3, 2**20 + 1)):
        slots = flag_slots({flag: flag in raised for flag in StepFlag}, torch.device("cpu"))
        for uses in ([], [0.0, 2.0]):
            read = StepScalars.of([8.0, 4.0, 1.0, *uses, *(slots * ranks).tolist()], len(uses))
            assert read.flags == {flag: ranks * (flag in raised) for flag in StepFlag}
            assert (read.loss_sum, read.count) == (8.0, 4.0)
            assert read.uses == uses


def test_the_device_holds_back_what_the_host_has_to_decide() -> None:
    for raised in SETS_OF_FLAGS:
        slots = flag_slots({flag: torch.tensor(float(flag in raised)) for flag in StepFlag}, torch.device("cpu"))
        for numbers, is_usual in (([8.0, 4.0, 1.0], True), ([0.0, 0.0, 0.0], False), ([8.0, 4.0, float("nan")], False)):
            decision = decide(torch.cat([torch.tensor(numbers, dtype=torch.float64), slots]), 1.0, None)
            exchanges = bool(raised & {StepFlag.REFUSES, StepFlag.UNUSED_CHANGED})
            assert bool(decision.held_back) == (exchanges or not is_usual)
