"""Hooks that are not linear see gradients of the mean over the samples that really come; `code_array.py` has those of models in layouts."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import samestep
from samestep.errors import UnprovenError
from tests.code.hooks import limited
from tests.plain import train_plainly
from tests.pool import pool

JOB = samestep.Job(train={"global_batch": 32}, numerics={"precision": "float64"}, run={"device": "cpu"})


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.a(x))
        if h.requires_grad:
            h.register_hook(limited)
        return self.b(h)


def _batch(ignored: bool) -> tuple[Tensor, Tensor]:
    x, y = torch.randn(12, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64), torch.arange(12) % 4
    return x, y.masked_fill(torch.arange(12) % 5 == 0, -100) if ignored else y


SGD = functools.partial(torch.optim.SGD, lr=0.5)


def _sum(outputs: Tensor, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Return a loss of the user's own, which is tried in the first step."""
    return F.cross_entropy(outputs, batch[1], reduction="sum"), (batch[1] != -100).sum()


class Counting(Net):
    """Counts its forwards in a number or a buffer, by which its outputs grow."""

    def __init__(self, kept: str) -> None:
        super().__init__()
        self.kept, self.calls = kept, 0
        self.register_buffer("number", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.number += 1
        factor = {"a number": self.calls, "a buffer": self.number, "the loss": 0}[self.kept]
        return super().forward(x) * (1 + 0.1 * factor)


class CountingLoss:
    def __init__(self, kept: str) -> None:
        self.kept, self.calls = kept, 0

    def __call__(self, outputs: Tensor, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        self.calls += 1
        total, count = _sum(outputs, batch)
        return total * (2.0 if self.kept == "the loss" and self.calls > 2 else 1.0), count


def _counted(rank: int, world: int, layout: str, kept: str) -> list[float]:
    run = samestep.parallelize(Counting(kept), CountingLoss(kept), SGD, layout=layout, job=JOB)
    return [run.step(_batch(True)).loss for _ in range(3)]


@pytest.mark.parametrize(("layout", "kept"), [("dp=1", "a number"), ("dp=1", "a buffer"), ("dp=2", "the loss")])
def test_a_step_that_is_repeated_with_its_count_begins_where_it_began(layout: str, kept: str) -> None:
    model, loss = Counting(kept).double(), CountingLoss(kept)
    wanted, _ = train_plainly(
        model, [_batch(True)] * 3, lambda batch: loss(model(batch[0]), batch), SGD(model.parameters())
    )
    world = samestep.Layout(layout).world_size
    losses = pool(2).run(_counted, layout, kept) if world > 1 else [_counted(0, 1, layout, kept)]
    assert all(of_rank == pytest.approx(wanted, rel=1e-9) for of_rank in losses)


@pytest.mark.parametrize("kind", ["register_hook", "register_post_accumulate_grad_hook"])
def test_a_hook_that_a_loop_registers_sees_gradients_of_the_mean(kind: str) -> None:
    """A step of 12 samples, which no power of two divides; the hooks come behind the first one."""

    def losses(trained: Callable[[], nn.Module], step: Callable[[], float]) -> list[float]:
        first = step()
        for param in trained().parameters():
            if kind == "register_hook":
                param.register_hook(limited)
            else:
                param.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", limited(p.grad)))
        return [first, step(), step()]

    def plain_step() -> float:
        (loss,), _ = train_plainly(model, [_batch(False)], lambda batch: _sum(model(batch[0]), batch), optimizer)
        return loss

    model = Net().double()
    optimizer = SGD([*model.parameters()])
    run = samestep.parallelize(Net(), "cross_entropy", SGD, layout="dp=1", job=JOB)
    found = losses(lambda: run.model, lambda: run.step(_batch(False)).loss)
    assert found == pytest.approx(losses(lambda: model, plain_step), rel=1e-9)


def _halve(param: Tensor) -> None:
    param.grad *= 0.5


@pytest.mark.parametrize(
    ("layout", "late"),
    [("dp=1 microbatch=4", _halve), ("dp=1 microbatch=6", lambda p: setattr(p, "grad", p.grad * 0.5))],
)
def test_a_late_hook_of_a_loop_is_refused_with_micro_batches(layout: str, late: Callable[[Tensor], None]) -> None:
    """It would act on the sums of each micro-batch's gradients with those before it."""
    run = samestep.parallelize(Net(), "cross_entropy", SGD, layout=layout, job=JOB)
    run.step(_batch(False))
    for param in run.model.parameters():
        param.register_post_accumulate_grad_hook(late)
    with pytest.raises(UnprovenError, match=r"a hook (after the accumulated|on the) gradient of"):
        run.step(_batch(False))
