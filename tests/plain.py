"""One plain torch loop for all tests that hold runs against one, and how they are held against it.

The loop is of torch alone: what judges the code of samestep shares none of it. Only which samples a step has is taken from it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import samestep
from samestep.job import Job
from samestep.layout import Layout
from samestep.runtime.run import Run
from tests.pool import pool

Trained = tuple[list[float], dict[str, Tensor]]
"""The losses of steps, and the state of the model behind them."""


def whole_batches(dataset: Any, job: Job) -> Iterator[Any]:
    """Return the samples of each step of a job."""
    for batch in samestep.batches(dataset, job):
        yield batch.samples(batch.indices)


def mean_of(result: Any) -> Any:
    """Return the number that a result of a loss stands for: it, a sum with its count, or such terms by name; values beside them are not read."""
    if isinstance(result, Tensor):
        return result
    if isinstance(result, dict):
        return sum(total / count for total, count in result.values() if count)
    return mean_of(result[0]) if isinstance(result[0], dict) else result[0] / result[1]


def train_plainly(
    model: nn.Module,
    batches: Iterable[Any],
    loss: Callable[[Any], Any],
    optimizers: Any,
    clip: float | None = None,
    schedules: Sequence[Any] = (),
    after: Callable[[], object] = lambda: None,
) -> Trained:
    """Take a step with each batch, of which `loss` returns what a loss does; `after` follows each update."""
    losses, trained = [], [param for param in model.parameters() if param.requires_grad]
    updates = optimizers if isinstance(optimizers, list) else [optimizers]
    for batch in batches:
        mean = mean_of(loss(batch))
        model.zero_grad()
        mean.backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(trained, clip)
        for update in (*updates, *schedules):
            update.step()
        after()
        losses.append(mean.item())
    return losses, {name: value.detach().clone() for name, value in model.state_dict().items()}


def train_in_layout(make: Callable[[], Run], batches: Callable[[int], Iterable[Any]], folder: str = "") -> Trained:
    """Take the steps of a run over `batches(first step)`; with a folder a second run takes those behind the second from a checkpoint."""
    run, losses = make(), list[float]()
    if folder:
        for batch, _ in zip(batches(0), range(2), strict=False):
            losses.append(run.step(batch).loss)
        run.save(folder)
        run = make()
        run.load(folder)
    losses += [run.step(batch).loss for batch in batches(len(losses))]
    return losses, run.state_dict(on_every_rank=True)


def assert_trained(
    ranks: Iterable[Any], expected: Trained, rtol: float = 1e-8, atol: float = 1e-10, loss_atol: float = 1e-12
) -> None:
    """Every rank has the losses and the weights that are expected, which come first of what it returns."""
    for losses, weights, *_ in ranks:
        assert losses == pytest.approx(expected[0], rel=1e-9, abs=loss_atol)
        assert weights.keys() >= expected[1].keys()
        for name, value in expected[1].items():
            torch.testing.assert_close(
                weights[name], value, rtol=rtol, atol=atol, msg=lambda text, name=name: f"{name}: {text}"
            )


def train_in_turn(function: Callable[..., Any], layouts: tuple[str, str], steps: int, *args: Any) -> list[Trained]:
    """Take three steps in one layout and the others, from its checkpoint, in another; return what each rank of that has, with all losses.

    `function(rank, world, layout, *args, first step, last step)` takes the steps, and leaves a checkpoint.
    """
    losses: list[float] = []
    ranks: list[Any] = []
    for layout, first, last in zip(layouts, (0, 3), (3, steps), strict=True):
        ranks = pool(Layout(layout).world_size).run(function, layout, *args, first, last)
        assert all(others == ranks[0][0] for others, *_ in ranks)
        losses += ranks[0][0]
    return [(losses, weights) for _, weights, *_ in ranks]


@functools.cache
def on_one_device(function: Callable[..., Any], *args: Any) -> Any:
    """Return what one device makes of `function(rank, world, layout, *args)`, once in a session."""
    return pool(1).run(function, "dp=1", *args)[0]


def assert_as_on_one_device(
    function: Callable[..., Trained], layout: str, *args: Any, rtol: float = 1e-8, atol: float = 1e-10
) -> None:
    """The ranks of a layout have the losses and the weights of one device."""
    ranks = pool(Layout(layout).world_size).run(function, layout, *args)
    assert_trained(ranks, on_one_device(function, *args), rtol, atol)
