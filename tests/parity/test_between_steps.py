"""What a loop calls between steps gives the result of one device in every layout: means, predictions, whole weights."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import samestep
from samestep.building.loss_result import Loss
from samestep.datasets import read_samples
from samestep.errors import DataError
from samestep.examination.examine import Source
from samestep.job import Job
from samestep.layout import Layout
from samestep.runtime.optimizers.optimizer_source import optimizer_source
from samestep.runtime.processes.join import RankInfo
from samestep.runtime.run import Run
from tests.pool import pool

JOB = Job(
    train={"global_batch": 4, "steps": 4, "watch_every": 0}, run={"device": "cpu"}, numerics={"precision": "float64"}
)
LAYOUTS = ["dp=2", "dp=2 zero=3 microbatch=1", "tp=2", "pp=2 microbatch=2"]


class Points(torch.utils.data.Dataset[Any]):
    """13 samples, which no number of ranks divides."""

    def __len__(self) -> int:
        return 13

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        point = torch.randn(4, generator=torch.Generator().manual_seed(index), dtype=torch.float64)
        return {"x": point, "labels": 2 * point}


class Padded(Points):
    """Samples of 1 to 3 rows, which `read` pads to the longest of those that are read together."""

    def read(self, indices: Any) -> dict[str, Tensor]:
        rows = [self[int(index)]["x"].expand(1 + int(index) % 3, 4) for index in indices]
        padded = nn.utils.rnn.pad_sequence(rows, batch_first=True)
        is_row = torch.arange(padded.shape[1]) < torch.tensor([len(row) for row in rows])[:, None]
        return {"x": padded, "mask": is_row, "labels": 2 * padded}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Net(nn.Module):
    """Nested outputs, of which one has no dimension of samples."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.LayerNorm(4)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Any:
        for block in self.blocks:
            x = block(x)
        last = self.norm(x)
        return {"logits": last, "more": [x, (last.sum(-1), None)], "scale": torch.tensor(0.5, dtype=x.dtype)}


class OfTheBatch(Net):
    """An output that differs between samples, and has no dimension of them."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Any:
        outputs = super().forward(x)
        return outputs | {"mean": outputs["logits"].mean(0)}


def loss(outputs: Any, batch: Any) -> tuple[Tensor, Tensor]:
    errors = (outputs["logits"] - batch["labels"]).square().mean(-1)
    is_counted = batch.get("mask", torch.ones_like(errors))
    return (errors * is_counted).sum(), is_counted.sum()


def measure(outputs: Any, batch: Any) -> dict[str, tuple[Tensor, int]]:
    logits = outputs["logits"]
    return {"largest": (logits.amax(-1).sum(), len(logits)), "positive": ((logits > 0).sum(), logits.numel())}


def run_of(rank: int, world: int, layout: str, model: Any = Net, used: Loss = loss) -> Run:
    optimizer = optimizer_source(lambda params: torch.optim.AdamW(params, lr=0.01), None)
    place = RankInfo(rank, rank, world, world, torch.device("cpu"))
    run = Run(Source(model, used, optimizer), Layout.parse(layout), JOB, place)
    run.prepare(read_samples(Points(), [0]))
    return run


def everywhere(layout: str, function: Any, *args: Any) -> list[Any]:
    """Return what a function of (rank, world, layout) returns on each rank of a layout."""
    ranks = Layout.parse(layout).world_size
    return pool(ranks).run(function, layout, *args) if ranks > 1 else [function(0, 1, layout, *args)]


@functools.cache
def plain() -> nn.Module:
    """The model of one device, with the weights that every run begins with."""
    model = Net().double()
    model.load_state_dict(run_of(0, 1, "dp=1").state_dict())
    return model.eval()


# -- means and predictions -------------------------------------------------------------------------


def evaluated(rank: int, world: int, layout: str) -> list[dict[str, float]]:
    run = run_of(rank, world, layout)
    return [run.evaluate(Points()), run.evaluate(Points(), measure), run.evaluate(Points(), lambda o, b: loss(o, b))]


@pytest.mark.parametrize("layout", ["dp=1", *LAYOUTS])
def test_means_count_each_sample_once(layout: str) -> None:
    whole: Any = read_samples(Points(), range(13))
    with torch.no_grad():
        outputs = plain()(whole["x"])
    pairs = {"loss": loss(outputs, whole), **measure(outputs, whole)}
    wanted = {name: float(total) / float(count) for name, (total, count) in pairs.items()}
    for alone, measured, named in everywhere(layout, evaluated):
        assert alone == pytest.approx({"loss": wanted["loss"]}, rel=1e-12)
        assert measured == pytest.approx(wanted, rel=1e-12)
        assert named == pytest.approx({"loss": wanted["loss"], "measure": wanted["loss"]}, rel=1e-12)


def predicted(rank: int, world: int, layout: str) -> Any:
    return run_of(rank, world, layout).predict(Points())


@pytest.mark.parametrize("layout", ["dp=1", *LAYOUTS])
def test_predictions_are_the_outputs_of_all_samples_in_order(layout: str) -> None:
    whole: Any = read_samples(Points(), range(13))
    with torch.no_grad():
        wanted = plain()(whole["x"])
    for found in everywhere(layout, predicted):
        assert list(found) == list(wanted)
        ours = found["logits"], found["more"][0], found["more"][1][0], found["scale"]
        theirs = wanted["logits"], wanted["more"][0], wanted["more"][1][0], wanted["scale"]
        for one, other in zip(ours, theirs, strict=True):
            assert torch.allclose(one, other, rtol=1e-12, atol=1e-12)
        assert found["more"][1][1] is None


def predicted_each(rank: int, world: int, layout: str) -> Any:
    return run_of(rank, world, layout).predict(Padded())


@pytest.mark.parametrize("layout", ["dp=1", "dp=2 zero=3 microbatch=1"])
def test_samples_of_sizes_of_their_own_are_predicted_one_by_one(layout: str) -> None:
    for found in everywhere(layout, predicted_each):
        assert [len(one["logits"]) for one in found] == [1 + index % 3 for index in range(13)]
        for index, one in enumerate(found):
            with torch.no_grad():
                wanted = plain()(Padded().read([index])["x"])["logits"][0]
            assert torch.allclose(one["logits"], wanted, rtol=1e-12, atol=1e-12)


def test_an_output_of_the_samples_that_run_together_is_refused() -> None:
    run = run_of(0, 1, "dp=1", OfTheBatch)
    with pytest.raises(DataError, match=r"outputs\['mean'\] has no dimension of samples, and differs .* run.evaluate$"):
        run.predict(Points())


def test_a_batch_is_evaluated_and_predicted_too() -> None:
    run = run_of(0, 1, "dp=1")
    batch = next(samestep.batches(Points(), JOB))
    assert len(run.predict(batch)["logits"]) == 4
    assert set(run.evaluate(batch)) == {"loss"}
