"""Outputs that are distributions of torch and plain objects train as in a plain loop, whatever holds the tensors that the loss reads.

`code_array.py` has dicts, records, named tuples and namespaces in every layout.
"""

from __future__ import annotations

import functools
from collections import UserDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, distributions, nn

import samestep
from samestep.job import Job
from samestep.layout import Layout
from tests.plain import Trained, assert_trained, train_in_layout, train_plainly
from tests.pool import pool

STEPS = 2
JOB = Job(
    train={"global_batch": 8, "steps": STEPS, "watch_every": 2},
    run={"device": "cpu"},
    numerics={"precision": "float64"},
)


@dataclass
class Record:
    """Two outputs as attributes."""

    first: Any
    second: Any


class Plain:
    """Two outputs as attributes of an object that no library knows."""

    def __init__(self, first: Any, second: Any) -> None:
        self.first, self.second = first, second


CONTAINERS: dict[str, Callable[[Any, Any], Any]] = {
    "tuple": lambda first, second: (first, second),
    "mapping": lambda first, second: UserDict(first=first, second=second),
    "object": Plain,
    "record in a list": lambda first, second: [Record(first, None), Record(None, second)],
}
VALUES: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any, Tensor], Tensor]]] = {
    "normal": (
        lambda h: distributions.Normal(h[:, :2], h[:, 2:].exp()),
        lambda one, y: -one.log_prob(y).sum(1) + distributions.kl_divergence(one, distributions.Normal(0.0, 1.0)).sum(1),
    ),
    "independent": (
        lambda h: distributions.Independent(distributions.Normal(h[:, :2], h[:, 2:].exp()), 1),
        lambda one, y: -one.log_prob(y),
    ),
    "categorical": (lambda h: distributions.Categorical(logits=h), lambda one, y: -one.log_prob((y[:, 0] > 0).long()) - 0.1 * one.entropy()),
    "mixture": (
        lambda h: distributions.MixtureSameFamily(
            distributions.Categorical(logits=h[:, :2]), distributions.Normal(h[:, 2:], torch.ones_like(h[:, 2:]))
        ),
        lambda one, y: -one.log_prob(y[:, 0]),
    ),
    "transformed": (
        lambda h: distributions.TransformedDistribution(
            distributions.Normal(torch.zeros_like(h[:, :2]), torch.ones_like(h[:, :2])),
            [distributions.AffineTransform(h[:, :2], h[:, 2:].exp())],
        ),
        lambda one, y: -one.log_prob(y).sum(1),
    ),
}  # fmt: skip
CASES = [
    *((container, "normal") for container in CONTAINERS),
    *(("bare", value) for value in VALUES if value != "normal"),
]


class Heads(nn.Module):
    """Two blocks with a sum inside, and two heads, whose outputs are nested."""

    def __init__(self, container: str, value: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 6)) for _ in range(2)])
        self.first = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 4))
        self.second = nn.Sequential(nn.Linear(2, 12), nn.Tanh(), nn.Linear(12, 2))
        self.container, self.value = container, value

    def forward(self, x: Tensor) -> Any:
        for block in self.blocks:
            x = x + block(x)
        hidden = self.first(x)
        value = VALUES[self.value][0](hidden)
        return value if self.container == "bare" else CONTAINERS[self.container](value, self.second(hidden[:, :2]))


def build(container: str, value: str) -> nn.Module:
    torch.manual_seed(3)
    return Heads(container, value)


def data(step: int) -> tuple[Tensor, Tensor]:
    drawn = torch.Generator().manual_seed(100 + step)
    return torch.randn(8, 6, generator=drawn, dtype=torch.float64), torch.randn(
        8, 2, generator=drawn, dtype=torch.float64
    )


def loss_of(container: str, value: str) -> Callable[[Any, Any], tuple[Tensor, int]]:
    def loss(outputs: Any, batch: Any) -> tuple[Tensor, int]:
        y, first, second = batch[1], outputs, None
        if container == "record in a list":
            first, second = outputs[0].first, outputs[1].second
        elif container != "bare":
            keys = ("first", "second") if container == "mapping" else (0, 1)
            is_named = hasattr(outputs, "first") and container != "mapping"
            first, second = (outputs.first, outputs.second) if is_named else (outputs[key] for key in keys)
        each = VALUES[value][1](first, y)
        return (each if second is None else each + (second - y).square().sum(1)).sum(), len(y)

    return loss


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.05)


def trained(rank: int, world: int, layout: str, container: str, value: str) -> Trained:
    model, loss = build(container, value).double(), loss_of(container, value)
    return train_in_layout(
        lambda: samestep.parallelize(model, loss, sgd, layout=layout, job=JOB), lambda _: map(data, range(STEPS))
    )


@functools.cache
def plain(container: str, value: str) -> Trained:
    model, loss = build(container, value).double(), loss_of(container, value)
    batches = map(data, range(STEPS))
    return train_plainly(model, batches, lambda batch: loss(model(batch[0]), batch), sgd(model.parameters()))


@pytest.mark.parametrize("layout", ["dp=2 microbatch=2", "dp=2 zero=3", "tp=2", "pp=2 microbatch=4"])
@pytest.mark.parametrize(("container", "value"), CASES, ids=lambda one: str(one))
def test_nested_outputs_train_as_in_a_plain_loop(container: str, value: str, layout: str) -> None:
    assert_trained(pool(Layout(layout).world_size).run(trained, layout, container, value), plain(container, value))
