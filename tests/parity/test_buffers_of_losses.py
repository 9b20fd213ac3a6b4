"""Buffers of a loss that follow the samples of the step are those of a plain loop in every layout, whatever else calls the loss; and values
that a loss or a model keeps outside of modules are resumed."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import samestep
from samestep.errors import UnprovenError
from tests.laboratory import TOLERANCE, in_loop
from tests.plain import train_plainly
from tests.pool import pool

CLASSES = 3
POINTS = torch.randn(32, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
LABELS = torch.randint(CLASSES, (32,), generator=torch.Generator().manual_seed(1))
BATCHES = list(zip(POINTS.split(8), LABELS.split(8), strict=True))


class Centred(nn.Module):
    """Logits less a centre that follows their mean, as in DINO's loss."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centre", torch.zeros(CLASSES, dtype=torch.float64))

    def mean(self, logits: Tensor) -> Tensor:
        return samestep.batch_mean(logits.detach())

    def forward(self, logits: Tensor, batch: Any) -> Any:
        samestep.after_step(self.centre, 0.9 * self.centre + 0.1 * self.mean(logits))
        return F.cross_entropy(logits - self.centre, batch[1], reduction="sum"), len(logits)


class CentredByPart(Centred):
    """The same by the mean of the samples at hand."""

    def mean(self, logits: Tensor) -> Tensor:
        return logits.detach().mean(0)


class Running(nn.Module):
    """A sum over a running mean, which a call moves in place before its backward reads it."""

    def __init__(self, move: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.register_buffer("mean", torch.ones((), dtype=torch.float64))
        self.move = move

    def forward(self, logits: Tensor, batch: Any) -> Any:
        rows = F.cross_entropy(logits, batch[1], reduction="none")
        self.move(self.mean, rows.detach().mean())
        return rows.sum() / self.mean, len(logits)


def _scaled(mean: Tensor, value: Tensor) -> None:
    mean.mul_(0.9).add_(0.1 * value)


class Robust(nn.Module):
    """Weights of groups that grow with the groups' losses (group DRO)."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("share", torch.full((CLASSES,), 1 / CLASSES, dtype=torch.float64))

    def forward(self, logits: Tensor, batch: Any) -> Tensor:
        of_group = F.one_hot(batch[1], CLASSES).to(logits.dtype)
        groups = F.cross_entropy(logits, batch[1], reduction="none") @ of_group / of_group.sum(0).clamp(min=1)
        share = (self.share * torch.exp(0.5 * groups.detach())).softmax(0)
        samestep.after_step(self.share, share)
        return (groups * share).sum()


LOSSES: dict[str, Callable[[], Any]] = {
    "sum": Centred,
    "whole": lambda: samestep.whole_batch(CentredByPart()),
    "groups": lambda: samestep.whole_batch(Robust()),
    "part": CentredByPart,
    "running": lambda: Running(_scaled),
    "running, lerped": lambda: Running(lambda mean, value: mean.lerp_(value, 0.1)),
}


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, CLASSES)).double()


_sgd = functools.partial(torch.optim.SGD, lr=0.5)


@functools.cache
def plain(name: str) -> list[float]:
    """Return the losses of a loop without samestep, in which a buffer follows when the optimizer has stepped."""
    model, loss = _model(), LOSSES[name]()
    return train_plainly(model, BATCHES, lambda batch: loss(model(batch[0]), batch), _sgd(model.parameters()))[0]


JOB = in_loop(
    samestep.Job(train={"global_batch": 8, "steps": 4}, numerics={"precision": "float64"}, run={"device": "cpu"})
)


def started(name: str, layout: str) -> samestep.Run:
    return samestep.parallelize(_model(), LOSSES[name](), _sgd, layout=layout, job=JOB)


def trained(rank: int, world: int, name: str, layout: str, evaluates: bool = True) -> list[float]:
    """Return the losses of a run that evaluates its loss on other samples between its steps."""
    run, losses = started(name, layout), []
    for batch in BATCHES:
        losses.append(run.step(batch).loss)
        if evaluates:
            run.evaluate((POINTS[:8] + 1, LABELS[:8]))
    return losses


ROWS = [
    ("sum", "dp=2 zero=3"),
    ("sum", "tp=2"),
    ("whole", "dp=2 zero=3"),
    ("whole", "pp=2 microbatch=4"),
    ("groups", "dp=2 zero=1 microbatch=2"),
    ("part", "tp=2"),
]


@pytest.mark.every_row
@pytest.mark.parametrize(("name", "layout"), ROWS)
def test_a_buffer_of_a_loss_follows_its_steps_alone(name: str, layout: str) -> None:
    for losses in pool(2).run(trained, name, layout):
        assert losses == pytest.approx(plain(name), rel=TOLERANCE)


@pytest.mark.every_row
@pytest.mark.parametrize(("name", "layout"), [("running", "dp=1"), ("running, lerped", "tp=2")])
def test_a_mean_that_each_call_moves_is_that_of_the_steps_and_refused_where_samples_are_divided(
    name: str, layout: str
) -> None:
    """The trial of the loss, between its call and its backward, leaves the mean as a graph has saved it."""
    for losses in pool(samestep.Layout(layout).world_size).run(trained, name, layout, False):
        assert losses == pytest.approx(plain(name), rel=TOLERANCE)
    with pytest.raises(
        UnprovenError, match="when it is called again on the same after others, so it keeps something between calls"
    ):
        pool(2).run(trained, name, "dp=2")


@pytest.mark.parametrize("layout", ["dp=2", "pp=2 microbatch=4"])
def test_a_value_of_a_part_of_the_samples_is_refused(layout: str) -> None:
    with pytest.raises(
        UnprovenError, match=r"after_step gives a buffer a value that a part of the samples decides.*batch_mean"
    ):
        pool(2).run(trained, "part", layout)


class Annealed(Robust):
    """Groups whose loss is scaled by a number that each step changes, as an attribute that the loss sets by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = 1.0

    def forward(self, logits: Tensor, batch: Any) -> Tensor:
        found = super().forward(logits, batch) * self.scale
        self.scale = 0.9 * self.scale
        return found


LOSSES["annealed"] = lambda: samestep.whole_batch(Annealed())


def resumed(rank: int, world: int, name: str, layouts: tuple[str, str], folder: str) -> list[float]:
    """Return the losses of two runs, of which the second goes on from the checkpoint of the first with a loss made anew."""
    first, second = (started(name, layout) for layout in layouts)
    losses = [first.step(batch).loss for batch in BATCHES[:2]]
    first.save(folder)
    second.load(folder)
    return losses + [second.step(batch).loss for batch in BATCHES[2:]]


PAIRS = [("dp=2", "pp=2 microbatch=4"), ("pp=2 microbatch=4", "dp=2 zero=3"), ("tp=2", "dp=2 microbatch=2")]


@pytest.mark.parametrize(("name", "layouts"), [("annealed", PAIRS[0]), ("groups", PAIRS[1]), ("annealed", PAIRS[2])])
def test_a_resumed_run_has_what_the_loss_kept(name: str, layouts: tuple[str, str], tmp_path: Path) -> None:
    for losses in pool(2).run(resumed, name, layouts, str(tmp_path)):
        assert losses == pytest.approx(plain(name), rel=TOLERANCE)


def _shrinking(logits: Tensor, batch: Any, scale: float) -> tuple[Tensor, int]:
    return F.cross_entropy(logits, batch[1], reduction="sum") * scale, len(logits)


class Scale:
    """A number that is smaller each time it is asked for."""

    def __init__(self) -> None:
        self.value = 1.0

    def next(self) -> float:
        value, self.value = self.value, 0.9 * self.value
        return value


class Shrinking(Scale):
    """A loss that is an object, with a number of its own."""

    def __call__(self, logits: Tensor, batch: Any) -> tuple[Tensor, int]:
        return _shrinking(logits, batch, self.next())


class Slotted:
    """The same in a slot, as a tensor."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = torch.ones((), dtype=torch.float64)

    def __call__(self, logits: Tensor, batch: Any) -> tuple[Tensor, int]:
        value, self.value = self.value, self.value * 0.9
        return _shrinking(logits, batch, float(value))


class Holding(nn.Module):
    """A module that has the number in an object, or in a list of numbers that it adds to."""

    def __init__(self, held: Any) -> None:
        super().__init__()
        self.held = held

    def forward(self, logits: Tensor, batch: Any) -> tuple[Tensor, int]:
        if isinstance(self.held, Scale):
            return _shrinking(logits, batch, self.held.next())
        self.held.append(0.9 * self.held[-1])
        return _shrinking(logits, batch, self.held[-2])


def _of_closure() -> Callable[..., Any]:
    scale = 1.0

    def loss(logits: Tensor, batch: Any) -> tuple[Tensor, int]:
        nonlocal scale
        value, scale = scale, 0.9 * scale
        return _shrinking(logits, batch, value)

    return loss


def _of_default() -> Callable[..., Any]:
    def loss(logits: Tensor, batch: Any, scale: Any = Scale()) -> tuple[Tensor, int]:  # noqa: B008
        return _shrinking(logits, batch, scale.next())

    return loss


def _mean_of(loss: Callable[..., Any]) -> Callable[..., Any]:
    """Return a loss around the mean of another one."""

    def mean(logits: Tensor, batch: Any) -> Tensor:
        total, count = loss(logits, batch)
        return total / count

    return samestep.mean_over("samples", mean)


SHRINKING: dict[str, Callable[[], Any]] = {
    "partial of an object": lambda: functools.partial(Shrinking()),
    "method": lambda: Shrinking().__call__,
    "slot": Slotted,
    "module with a list": lambda: Holding([1.0]),
    "closure": _of_closure,
    "default": _of_default,
    "whole batch": lambda: samestep.whole_batch(Shrinking()),
    "mean of a module": lambda: _mean_of(Holding(Scale())),
}
"""Losses with one value, in which each kind keeps a number of its own in another place."""
LOSSES |= SHRINKING


@pytest.mark.parametrize("name", SHRINKING)
def test_a_number_that_a_loss_keeps_is_that_of_the_steps_and_is_resumed(name: str, tmp_path: Path) -> None:
    model, loss = _model(), Shrinking()
    expected, _ = train_plainly(model, BATCHES, lambda batch: loss(model(batch[0]), batch), _sgd(model.parameters()))
    assert resumed(0, 1, name, ("dp=1", "dp=1"), str(tmp_path)) == pytest.approx(expected, rel=TOLERANCE)


KEPT = Scale()
"""A variable of this file that a model's code changes."""


class Counted(nn.Module):
    """A model whose outputs shrink with each forward, by a number in a variable of the file."""

    value = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.net = _model()

    def scale(self) -> float:
        return KEPT.next()

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x) * self.scale()


class CountedByClass(Counted):
    """The same in an attribute of the class."""

    def scale(self) -> float:
        value = CountedByClass.value
        CountedByClass.value = 0.9 * value
        return value


def _summed(logits: Tensor, batch: Any) -> tuple[Tensor, int]:
    return F.cross_entropy(logits, batch[1], reduction="sum"), len(logits)


@pytest.mark.parametrize("kind", [Counted, CountedByClass])
def test_a_variable_that_a_forward_changes_is_resumed(kind: type[Counted], tmp_path: Path) -> None:
    def begun() -> samestep.Run:
        KEPT.value = CountedByClass.value = 1.0
        return samestep.parallelize(kind, _summed, _sgd, layout="dp=1", job=JOB)

    run = begun()
    expected = [run.step(batch).loss for batch in BATCHES]
    first = begun()
    for batch in BATCHES[:2]:
        first.step(batch)
    first.save(tmp_path)
    second = begun()
    second.load(tmp_path)
    assert [second.step(batch).loss for batch in BATCHES[2:]] == expected[2:]
