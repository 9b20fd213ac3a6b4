"""Reading ahead changes where samples are read, never which: in a thread, in processes, and after a jump."""

from __future__ import annotations

import io
import multiprocessing
import os
import random
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from samestep.datasets import Batch, batches, read_ahead, shares
from samestep.errors import DataError, WorkerError
from samestep.examination.examine import Source
from samestep.job import Job
from samestep.layout import Layout
from samestep.runtime.processes.join import RankInfo
from samestep.runtime.run import Run
from tests.laboratory import job_of, source_of
from tests.models import Tokens

STEPS, RANKS, MICROBATCHES = 6, 2, 3


class Squares:
    """Samples that name their index and the process that read them; the fifth one is no tensor on demand."""

    def __init__(self, delay_s: float = 0.0, broken: int = -1) -> None:
        self.delay_s, self.broken = delay_s, broken
        self.read_here: list[int] = []

    def __len__(self) -> int:
        return 50

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        time.sleep(self.delay_s)
        self.read_here.append(index)
        length = 2 if index == self.broken else 1
        return {"x": torch.full((length,), float(index) ** 2), "process": torch.tensor([os.getpid()])}


def job_with(workers: int) -> Job:
    return Job(train={"global_batch": 10, "steps": STEPS, "seed": 7}, run={"data_workers": workers})


@pytest.fixture(autouse=True)
def _always_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_ahead, "WORTH_A_THREAD_S", 0.0)


def taken(dataset: Squares, workers: int, first_step: int = 0) -> Iterator[tuple[Batch, np.ndarray, dict[str, Tensor]]]:
    """Yield the micro-batches of rank 1 as its steps take them."""
    for batch in batches(dataset, job_with(workers), first_step=first_step):
        batch.read_ahead(1, RANKS, MICROBATCHES)
        for indices in batch.shares(1, RANKS, MICROBATCHES):
            yield batch, indices, batch.samples(indices)


def test_one_slow_read_begins_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(read_ahead, "WORTH_A_THREAD_S", 1.0)
    monkeypatch.setattr(read_ahead, "time", SimpleNamespace(perf_counter=lambda: clock[0]))

    class Timed(Squares):
        read_s = 0.0

        def __getitem__(self, index: int) -> dict[str, Tensor]:
            clock[0] += self.read_s
            return super().__getitem__(index)

    dataset = Timed()
    stream = taken(dataset, 0)
    for dataset.read_s in (2.0, 0.0, 2.0, 0.0):
        dataset.read_here.clear()
        _, indices, _ = next(stream)
        assert dataset.read_here == list(indices)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("first_step", [0, 4])
def test_every_microbatch_is_the_one_that_was_asked_for(workers: int, first_step: int) -> None:
    seen = [(batch.step, indices, samples) for batch, indices, samples in taken(Squares(), workers, first_step)]
    assert len(seen) == (STEPS - first_step) * MICROBATCHES
    for step, indices, samples in seen:
        assert samples["x"].flatten().tolist() == [float(index) ** 2 for index in indices]
        if workers:
            assert os.getpid() not in samples["process"]
        assert step < STEPS


@pytest.mark.parametrize("workers", [0, 2])
def test_reads_that_were_not_foreseen_are_right_and_leave_the_others_foreseen(workers: int) -> None:
    dataset = Squares()
    for number, (batch, indices, samples) in enumerate(taken(dataset, workers)):
        assert samples["x"].flatten().tolist() == [float(index) ** 2 for index in indices]
        dataset.read_here.clear()
        if number % 2:  # as the canary and the search for a module at fault do
            again = batch.samples(indices[:1])
            assert again["process"].item() == os.getpid()
            assert again["x"].item() == float(indices[0]) ** 2
    assert number == STEPS * MICROBATCHES - 1


def test_a_loop_that_leaves_steps_out_is_read_ahead_again() -> None:
    stream = batches(Squares(), job_with(1))
    for step in (0, 3, 4):
        batch = next(batch for batch in stream if batch.step == step)
        batch.read_ahead(0, RANKS, MICROBATCHES)
        for indices in batch.shares(0, RANKS, MICROBATCHES):
            samples = batch.samples(indices)
            assert samples["x"].flatten().tolist() == [float(index) ** 2 for index in indices]
            assert os.getpid() not in samples["process"]


def test_a_thread_reads_the_next_while_one_is_in_use() -> None:
    dataset = Squares()
    stream = taken(dataset, 0)
    next(stream), next(stream)
    deadline = time.monotonic() + 60
    first, second = (batch.indices for _, batch in zip(range(2), batches(dataset, job_with(0)), strict=False))
    microbatches = [*shares(first, 1, RANKS, MICROBATCHES), *shares(second, 1, RANKS, MICROBATCHES)][:4]
    expected = [index for part in microbatches for index in part]
    while len(dataset.read_here) < len(expected) and time.monotonic() < deadline:
        time.sleep(0.001)
    assert dataset.read_here == expected  # the first two, and two ahead


def test_a_data_set_that_seeds_a_generator_of_the_process_is_read_where_it_is_used() -> None:
    class Seeded(Squares):
        def __getitem__(self, index: int) -> dict[str, Tensor]:
            random.seed(index)
            return {**super().__getitem__(index), "drawn": torch.tensor([random.random()])}

    dataset, before = Seeded(), random.getstate()
    for number, (_, indices, samples) in enumerate(taken(dataset, 0)):
        assert samples["drawn"].flatten().tolist() == pytest.approx([random.Random(int(i)).random() for i in indices])
        assert dataset.read_here == indices.tolist() * (
            1 if number else 3
        )  # once more when it was seen to draw, and item by item
        dataset.read_here.clear()
    assert random.getstate() == before


def test_samples_that_begin_to_draw_while_a_thread_reads_are_read_where_they_are_used() -> None:
    class Late(Squares):
        def __getitem__(self, index: int) -> dict[str, Tensor]:
            drawn = random.random() if len(self.read_here) > 14 else 0.0
            return {**super().__getitem__(index), "drawn": torch.tensor([drawn])}

    def drawn(workers: int) -> list[float]:
        dataset = Late()
        found = []
        for _, _, samples in taken(dataset, workers):
            found += samples["drawn"].flatten().tolist()
        return found

    before, seen = random.getstate(), drawn(0)
    assert random.getstate() == before
    assert seen[:9] == [0.0] * 9
    assert len(set(seen[-9:])) == 9


@pytest.mark.parametrize("workers", [0, 2])
def test_a_sample_that_fits_no_batch_is_refused_as_without_workers(workers: int) -> None:
    broken = Squares(broken=3)
    with pytest.raises(DataError, match="samples of equal shapes, or a method read"):
        for _ in taken(broken, workers):
            pass


def test_a_worker_that_dies_is_named() -> None:
    stream = taken(Squares(), 1)
    _, _, samples = next(stream)
    os.kill(int(samples["process"][0]), signal.SIGKILL)
    with pytest.raises(WorkerError, match="a process that reads data ended"):
        for _ in stream:
            pass


def test_workers_leave_the_generators_of_the_process_alone_and_end_with_the_stream() -> None:
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[2]
    stream = batches(Squares(), job_with(2))
    batch = next(stream)
    batch.read_ahead(0, 1, 1)
    process = int(batch.samples(batch.shares(0, 1, 1)[0])["process"][0])
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1:] == (random.getstate(), np.random.get_state()[2])
    stream.stop()
    deadline = time.monotonic() + 60
    while os.path.exists(f"/proc/{process}") and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not os.path.exists(f"/proc/{process}")


def losses(job: Job, first: int = 0, run: Run | None = None, until: int = 4) -> tuple[list[float], list[float], Run]:
    layout = Layout("microbatch=3")
    source: Source = source_of("plain", layout, job)
    run = run or Run(source, layout, job, RankInfo(0, 0, 1, 1, torch.device("cpu")))
    reports = []
    for batch in batches(Tokens(), job, first_step=first):
        if batch.step >= until:
            break
        reports.append(run.step(batch))
    return [report.loss for report in reports], [report.data_wait_s for report in reports], run


def test_a_run_is_the_same_to_the_bit_with_any_number_of_workers() -> None:
    plain, waited, _ = losses(job_of(steps=4))
    assert all(wait > 0 for wait in waited)
    with_workers, _, _ = losses(job_of(steps=4, run={"data_workers": 2}))
    assert with_workers == plain
    half, _, run = losses(job_of(steps=4, run={"data_workers": 1}), until=2)
    rest, _, _ = losses(job_of(steps=4), first=2, run=run)
    assert half + rest == plain


class Opened:
    """A data set that opens its file once."""

    def __init__(self, file: Any) -> None:
        self.files = [file]


class Numbered:
    """A reader that holds the number of its file alone."""

    def __init__(self, number: int) -> None:
        self._number = number

    def fileno(self) -> int:
        return self._number


class Reading:
    """A data set that reads by a function around a file."""

    def __init__(self, file: Any) -> None:
        self.read = lambda: file.read(1)


class Nested(Reading):
    """One whose function calls that function."""

    def __init__(self, file: Any) -> None:
        def byte() -> Any:
            return file.read(1)

        self.read = lambda: byte()


def _has_inherited(dataset: Opened) -> None:
    sys.exit(int(read_ahead._is_inherited(dataset.files[0])))


def test_a_file_that_processes_would_share_is_named(tmp_path: Path) -> None:
    (tmp_path / "rows").write_bytes(b"rows")
    with (tmp_path / "rows").open("rb") as file:
        child = multiprocessing.get_context("fork").Process(target=_has_inherited, args=(Opened(file),))
        child.start()
        child.join()
        assert child.exitcode == 1
        assert not read_ahead._is_inherited(file)
        for dataset in (Opened(file), torch.utils.data.Subset(Opened(file), [0])):  # type: ignore[arg-type]
            with pytest.raises(DataError, match=r"files of .* is a file that was opened before processes were forked"):
                read_ahead.refuse_shared_files(dataset, 1)
            read_ahead.refuse_shared_files(dataset, 0)
        with pytest.raises(DataError, match="files of Opened is a file"):
            read_ahead.refuse_shared_files(Opened(Numbered(file.fileno())), 1)
        for kind in (Reading, Nested):
            with pytest.raises(DataError, match=f"file of {kind.__name__} is a file that was opened"):
                read_ahead.refuse_shared_files(kind(file), 1)
            read_ahead.refuse_shared_files(kind(io.BytesIO()), 1)
        read_ahead.refuse_shared_files(Opened(io.BytesIO()), 1)
    read_ahead.refuse_shared_files(Opened(file), 1)
