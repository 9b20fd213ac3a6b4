"""A forward of the user's own around an instance that holds another forward than its class: a replaced one, or a compiled one."""

from __future__ import annotations

import functools
import types
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import samestep
from samestep.layout import Layout
from tests.laboratory import TOLERANCE, in_loop
from tests.plain import Trained, assert_trained, train_plainly
from tests.pool import pool

POINTS = torch.randn(16, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
LABELS = torch.randint(3, (16,), generator=torch.Generator().manual_seed(1))
JOB = in_loop(
    samestep.Job(train={"global_batch": 8, "steps": 2}, numerics={"precision": "float64"}, run={"device": "cpu"})
)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 16), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(x)))


def by_function(net: nn.Module) -> nn.Module:
    """As code does that wraps the forward of a model of a library."""
    before = net.forward
    net.forward = lambda x: 2 * before(x)  # type: ignore[method-assign, assignment]
    return net


def by_method(net: nn.Module) -> nn.Module:
    def forward(self: Any, x: Tensor) -> Tensor:
        return self.b(F.relu(self.a(x)))

    net.forward = types.MethodType(forward, net)  # type: ignore[method-assign]
    return net


def compiled(net: nn.Module) -> Any:
    return torch.compile(net, backend="aot_eager")


CHANGES = {"by_function": by_function, "by_method": by_method, "compiled": compiled}


def _model(name: str) -> Any:
    torch.manual_seed(0)
    return CHANGES[name](Net().double())


def two_views(model: Any, batch: Any) -> Tensor:
    """Both names of the batch fit the model's own forward too."""
    return model(batch["x"]) + model(-0.5 * batch["x"])


def _loss(logits: Tensor, batch: Any) -> tuple[Tensor, int]:
    return F.cross_entropy(logits, batch["labels"], reduction="sum"), len(logits)


_sgd = functools.partial(torch.optim.SGD, lr=0.5)


def _batches() -> list[dict[str, Tensor]]:
    return [{"x": x, "labels": y} for x, y in zip(POINTS.split(8), LABELS.split(8), strict=True)]


@functools.cache
def plain(name: str) -> Trained:
    return _trained_plainly(_model(name))


def _trained_plainly(model: nn.Module) -> Trained:
    return train_plainly(
        model, _batches(), lambda batch: _loss(two_views(model, batch), batch), _sgd(model.parameters())
    )


def trained(rank: int, world: int, name: str, layout: str) -> list[float]:
    run = samestep.parallelize(_model(name), _loss, _sgd, layout=layout, job=JOB, forward=two_views)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The .grad attribute")  # of torch.compile itself
        return [run.step(batch).loss for batch in _batches()]


def _called_beside(rank: int, world: int, layout: str) -> tuple[list[float], Tensor, Tensor]:
    torch.manual_seed(0)
    run = samestep.parallelize(Net().double(), _loss, _sgd, layout=layout, job=JOB, forward=two_views)
    losses = [run.step(batch).loss for batch in _batches()]
    with torch.no_grad():
        return losses, run.model(POINTS), run.model(_batches()[0])


@pytest.mark.parametrize("layout", ["dp=2 microbatch=2", "dp=2 zero=3", "tp=2"])
def test_a_loop_calls_the_model_with_a_batch_or_with_its_own_arguments(layout: str) -> None:
    torch.manual_seed(0)
    model = Net().double()
    _trained_plainly(model)
    for _, own, of_batch in pool(2).run(_called_beside, layout):
        torch.testing.assert_close(own, model(POINTS).detach())
        torch.testing.assert_close(of_batch, two_views(model, _batches()[0]).detach())


@pytest.mark.usefixtures("ranks_inherit_the_compiler")
@pytest.mark.every_row
@pytest.mark.parametrize(
    ("name", "layout"),
    [("by_function", "dp=2 microbatch=2"), ("by_method", "tp=2"), ("compiled", "tp=2"), ("compiled", "dp=2 zero=3")],
)
def test_the_forward_around_it_is_run(name: str, layout: str) -> None:
    for losses in pool(2).run(trained, name, layout):
        assert losses == pytest.approx(plain(name)[0], rel=TOLERANCE)


class Adjusted(Net):
    """A model of which the loop sets a number, a buffer or the mode, and which counts its forwards."""

    def __init__(self) -> None:
        super().__init__()
        self.factor, self.calls = 1.0, 0
        self.register_buffer("table", torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x) * self.factor * self.table * (1.0 if self.training else 2.0)


SETS: dict[str, Callable[[nn.Module, int], object]] = {
    "a number": lambda model, step: setattr(model, "factor", 1.0 + 0.5 * step),
    "a buffer": lambda model, step: setattr(model, "table", torch.full((1,), 1.0 + step, dtype=torch.float64)),
    "the mode": lambda model, step: model.train(step % 2 == 0),
}


def twice(model: nn.Module, batch: Any) -> Tensor:
    return model(batch["x"]) + model(batch["x"].flip(-1))


def _adjusted() -> nn.Module:
    torch.manual_seed(0)
    return Adjusted().double()


def _adjusting(rank: int, world: int, layout: str, kind: str) -> tuple[list[float], dict[str, Tensor], int]:
    model = _adjusted()
    run = samestep.parallelize(model, _loss, _sgd(model.parameters()), layout=layout, job=JOB, forward=twice)
    losses = []
    for step, batch in enumerate(_batches()):
        SETS[kind](model, step)
        losses.append(run.step(batch).loss)
    return losses, run.state_dict(on_every_rank=True), model.calls


@pytest.mark.parametrize(
    ("layout", "kind"), [("dp=1", "a number"), ("dp=2", "a buffer"), ("dp=2 zero=3", "the mode"), ("tp=2", "a number")]
)
def test_what_a_loop_sets_on_a_model_is_read_by_a_forward_around_it(layout: str, kind: str) -> None:
    model, steps = _adjusted(), iter(range(len(_batches())))

    def of_batch(batch: Any) -> Any:
        SETS[kind](model, next(steps))
        return _loss(twice(model, batch), batch)

    expected = train_plainly(model, _batches(), of_batch, _sgd(model.parameters()))
    ranks = pool(Layout(layout).world_size).run(_adjusting, layout, kind)
    assert_trained(ranks, expected, TOLERANCE, 1e-12)
    assert {calls for *_, calls in ranks} == {model.calls}
