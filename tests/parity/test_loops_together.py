"""What a loop may use at once is that of a plain loop: lanes with a loss over the batch or with two backwards, and samples of several
sizes that a loss over the batch is given padded."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import samestep
from samestep.layout import Layout
from tests.pool import pool, telling

WIDTH, BATCH, STEPS = 6, 8, 4
JOB = samestep.Job(
    train={"global_batch": BATCH, "steps": STEPS}, numerics={"precision": "float64"}, run={"device": "cpu"}
)


IGNORED = -100


class Vectors:
    """Vectors with a class each."""

    def __len__(self) -> int:
        return BATCH * STEPS

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(index)
        x = torch.randn(WIDTH, generator=generator, dtype=torch.float64)
        return {"x": x, "y": torch.randint(3, (), generator=generator)}


class Sequences(Vectors):
    """Sequences of 3 to 6 vectors, padded with zeros to the longest that is read with them."""

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(index)
        return {"x": torch.randn(3 + index % 4, WIDTH, generator=generator, dtype=torch.float64)}

    def read(self, indices: Any) -> dict[str, Tensor]:
        return {"x": nn.utils.rnn.pad_sequence([self[int(index)]["x"] for index in indices], batch_first=True)}


class Tagged(Sequences):
    """Sequences with a class for each vector, padded with a class that does not count."""

    def read(self, indices: Any) -> dict[str, Tensor]:
        x = super().read(indices)["x"]
        counts = x.abs().sum(-1) > 0
        return {"x": x, "tags": torch.where(counts, (x[..., 0] > 0).long() + (x[..., 1] > 0), IGNORED)}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x + self.last(torch.tanh(self.first(x))))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.GRUCell(WIDTH, WIDTH), nn.Linear(WIDTH, 4)

    def forward(self, batch: Any, carried: Tensor | None) -> tuple[Tensor, Tensor]:
        x = batch["x"]
        hidden = self.cell(x, x.new_zeros(len(x), WIDTH) if carried is None else carried)
        return self.head(hidden), hidden


def of_classes(z: Tensor, batch: Any) -> Tensor:
    """Supervised contrastive: samples of one class attract each other."""
    z = F.normalize(z, dim=-1)
    same = (batch["y"][:, None] == batch["y"][None]).double()
    return -((z @ z.T / 0.2).log_softmax(-1) * same).sum() / len(z)


def squares(z: Tensor, batch: Any) -> tuple[Tensor, int]:
    return z.square().sum(), len(z)


def others(z: Tensor, batch: Any) -> tuple[Tensor, int]:
    return (z - 1).abs().sum(), 2 * len(z)


def of_sequences(z: Tensor, batch: Any) -> Tensor:
    counts = (batch["x"].abs().sum(-1) > 0).double()[..., None]
    z = F.normalize((z * counts).sum(1), dim=-1)
    return F.cross_entropy(z @ z.T / 0.2, torch.arange(len(z)))


def of_tags(z: Tensor, batch: Any) -> Tensor:
    """A mean over all tags, and the spread of their scores."""
    counts = batch["tags"] != IGNORED
    rows = z[counts]
    scores = rows.gather(1, batch["tags"][counts][:, None])
    return scores.std() + F.cross_entropy(rows, batch["tags"][counts])


momentum = functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9)


def mean_of(loss: Callable[..., Any], z: Tensor, batch: Any) -> Tensor:
    found = loss(z, batch)
    return found if isinstance(found, Tensor) else found[0] / found[1]


CASES: dict[str, tuple[type[nn.Module], type[Vectors], list[Callable[..., Any]], bool, float | None]] = {
    "lanes, whole batch": (Recurrent, Vectors, [of_classes], True, None),
    "lanes, two backwards": (Recurrent, Vectors, [squares, others], True, None),
    "padded": (Net, Sequences, [of_sequences], False, 0.0),
    "padded tags": (Net, Tagged, [of_tags], False, float(IGNORED)),
}
"""Model, data, the losses of the backwards of a step, whether samples are in lanes, and what pads outputs."""


def start(case: str) -> nn.Module:
    torch.manual_seed(7)
    return CASES[case][0]().double()


def plain(case: str) -> list[float]:
    _, data, losses, lanes, _ = CASES[case]
    model, found, carried = start(case), [], None
    optimizer = momentum(model.parameters())
    source = data()
    for batch in samestep.batches(source, JOB, lanes=lanes):
        samples = batch.samples(batch.shares(0, 1, 1)[0])
        optimizer.zero_grad()
        for loss in losses:
            z, state = model(samples, carried) if lanes else (model(samples["x"]), None)
            value = mean_of(loss, z, samples)
            value.backward()
            found.append(value.item())
        carried = None if state is None else state.detach()
        optimizer.step()
    return found


def in_layout(rank: int, world: int, case: str, layout: str) -> list[float]:
    _, data, losses, lanes, pad = CASES[case]
    whole = [
        samestep.whole_batch(loss, pad=pad) if loss in (of_classes, of_sequences, of_tags) else loss for loss in losses
    ]
    run = samestep.parallelize(start(case), whole[0], momentum, layout=layout, job=JOB)
    found = []
    for batch in samestep.batches(data(), JOB, lanes=lanes):
        sums = [run.backward(batch, loss).loss for loss in whole]
        found += [sums[0], *(later - before for before, later in itertools.pairwise(sums))]
        run.update()
    return found


LAYOUTS = ["dp=2", "dp=2 zero=3", "dp=2 microbatch=2"]


@pytest.mark.parametrize(
    ("case", "layout"),
    [
        *((case, layout) for case in CASES for layout in LAYOUTS),
        ("padded", "pp=2 microbatch=4"),
        ("padded tags", "pp=2 microbatch=4"),
    ],
)
def test_a_loop_that_uses_both_is_a_plain_loop(case: str, layout: str) -> None:
    wanted = plain(case)
    for found in pool(Layout(layout).world_size).run(in_layout, case, layout):
        assert found == pytest.approx(wanted, rel=1e-9, abs=1e-12)


@telling
def refused(rank: int, world: int, layout: str) -> None:
    run = samestep.parallelize(start("padded"), samestep.whole_batch(of_sequences), momentum, layout=layout, job=JOB)
    for batch in samestep.batches(Sequences(), JOB):
        run.step(batch)


@pytest.mark.parametrize("layout", ["dp=2", "dp=2 microbatch=2"])
def test_several_sizes_without_padding_are_refused_in_one_line(layout: str) -> None:
    for text in pool(2).run(refused, layout):
        assert text.startswith("the loss over the whole batch is given tensors of "), text
        assert "different parts of it. Use samestep.whole_batch(loss, pad=0.0), which pads them" in text
        assert "[6, 4] and [6, 4]" not in text
