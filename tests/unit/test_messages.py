"""What a message says of a person's own code and data: the line that fails, the sample at fault, names that read as numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import samestep
from samestep.datasets import read_samples
from samestep.errors import DataError, LayoutError, ModelError, NonFiniteError
from samestep.examination.examine import Source
from samestep.job import Job
from samestep.layout import Layout
from samestep.runtime.optimizers.optimizer_source import optimizer_source
from samestep.runtime.run import Run
from samestep.training import run_folder
from tests.laboratory import run_from
from tests.pool import pool

JOB = Job(
    train={"global_batch": 8, "steps": 4, "watch_every": 0},
    run={"device": "cpu"},
    numerics={"precision": "float64", "on_nonfinite": "stop"},
)


class Points(torch.utils.data.Dataset[Any]):
    """Points, of which some are not finite, and one may be longer."""

    def __init__(self, bad: tuple[int, ...] = (), longer: int = -1) -> None:
        self.bad, self.longer = bad, longer

    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        point = torch.ones(4 + (index == self.longer), dtype=torch.float64) * index
        return point / (0.0 if index in self.bad and index else 1.0), torch.zeros(4, dtype=torch.float64)


def run_of(build: Any, layout: str = "dp=1", rank: int = 0, world: int = 1) -> Run:
    optimizer = optimizer_source(lambda params: torch.optim.SGD(params, lr=1e-3), None)
    return run_from(Source(build, samestep.building.loss.mse, optimizer), layout, JOB, rank, world)


def _stopped(rank: int, world: int, layout: str, bad: tuple[int, ...]) -> str:
    run = run_of(lambda: nn.Linear(4, 4), layout, rank, world)
    try:
        for batch in samestep.batches(Points(bad), JOB):
            run.step(batch)
    except NonFiniteError as error:
        return f"{batch.step} {error}"
    return "it was not stopped"


@pytest.mark.parametrize("layout", ["dp=1", "dp=2 zero=1"])
def test_the_samples_that_are_not_finite_are_named_on_every_rank(layout: str) -> None:
    stream = [batch.indices.tolist() for batch in samestep.batches(Points(), JOB)]
    step = 1 if 0 not in stream[1] else 2
    for bad, said in ((stream[step][5:6], "sample {0}"), (stream[step][:5], "samples {0}, {1}, {2} and 2 more")):
        text = f"its input is not finite: {said.format(*sorted(bad))} (rank "
        ranks = Layout(layout).world_size
        given = (layout, tuple(bad))
        for found in pool(ranks).run(_stopped, *given) if ranks > 1 else [_stopped(0, 1, *given)]:
            assert found.startswith(f"{step} ")
            assert text in found


class Missing(Points):
    def __getitem__(self, index: int) -> Any:
        if index == 5:
            raise KeyError("of mine")
        return super().__getitem__(index)


@pytest.mark.parametrize("collate", [None, list])
def test_a_sample_that_fails_is_one_of_the_users_data_set_also_in_a_loader(collate: Any) -> None:
    job = Job(train={"global_batch": 8, "steps": 1})
    for source in (Missing(), DataLoader(Missing(), batch_size=8, collate_fn=collate)):
        batch = next(samestep.batches(source, job))
        with pytest.raises(DataError, match=r"reading sample 5 of a Missing fails: KeyError: 'of mine'"):
            batch.samples([4, 5])


def test_a_sample_of_another_shape_is_named() -> None:
    with pytest.raises(
        DataError, match=r"batch \(sample 5 has \[5\], \[4\], and sample 3 \[4\], \[4\]\): .*read\(indices\)"
    ):
        read_samples(Points(longer=5), [3, 4, 5])
    with pytest.raises(DataError, match=r"\(sample 1 has \[2\], and sample 0 \[3\]\)"):
        read_samples([{"ids": [1, 2, 3]}, {"ids": [4, 5]}], [0, 1])


class Between(nn.Module):
    """A forward that fails in a line of its own, behind a module that has ended."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Any:
        return self.first(x) @ torch.ones(7, 7, dtype=x.dtype)


def test_a_forward_that_fails_names_its_line() -> None:
    line = Between.forward.__code__.co_firstlineno + 1
    for build, where in ((Between, ""), (lambda: nn.Sequential(Between(), nn.Linear(4, 4)), " at '0'")):
        run = run_of(build)
        with pytest.raises(
            ModelError, match=rf"the forward{where} fails: RuntimeError: .*{Path(__file__).name}:{line}\)"
        ):
            run.prepare(read_samples(Points(), [0]))


def test_a_module_whose_name_reads_as_a_number_is_in_quotes() -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), nn.Linear(4, 4))

    with pytest.raises(LayoutError, match=r"batch norm '0\.1' takes the statistics of 8 samples at once"):
        run_of(build, "dp=1 microbatch=2").prepare(read_samples(Points(), [0]))
    failing = run_of(lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(5, 4)))
    with pytest.raises(ModelError, match=r"the forward at '1' fails"):
        failing.prepare(read_samples(Points(), [0]))


def test_a_failed_run_says_how_it_goes_on(tmp_path: Path) -> None:
    assert run_folder.with_way_on("rank 1 died: killed\nmore", tmp_path) == "rank 1 died: killed\nmore"
    for step in (2, 10):
        (tmp_path / "checkpoints" / f"step-{step:06d}").mkdir(parents=True)
    (tmp_path / "checkpoints" / ".step-000012.draft").mkdir()
    said = run_folder.with_way_on("rank 1 died: killed\nmore", tmp_path)
    assert said == f"rank 1 died: killed; --resume --out {tmp_path} continues from step 10\nmore"
