"""What a plain loop does to `param.grad` between backward and update does the same between `run.backward` and `run.update`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import samestep
from samestep.errors import LayoutError
from tests.pool import pool

Params = list[Any]


class Net(nn.Module):
    """Blocks that stages share, whose features tp cuts."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 4)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        return self.last(x)


def _own_norm(params: Params) -> None:
    norm = sum(float(param.grad.data.norm()) ** 2 for param in params) ** 0.5
    for param in params:
        param.grad.data.mul_(0.1 / norm)


def _squares(params: Params) -> None:
    total = sum((param.grad**2).sum() for param in params)
    for param in params:
        param.grad = param.grad * (0.1 / total.sqrt())


def _total(params: Params) -> None:
    norm = nn.utils.get_total_norm([param.grad for param in params])
    nn.utils.clip_grads_with_norm_(params, 0.1, norm)


def _each(params: Params) -> None:
    for param in params:
        nn.utils.clip_grad_norm_([param], 0.02)


def _in_place(params: Params) -> None:
    for param in params:
        param.grad *= 0.5
    params[0].grad.zero_()
    params[-1].grad.sign_()


WAYS: dict[str, Callable[[Params], Any]] = {
    "norm": lambda params: nn.utils.clip_grad_norm_(params, 0.1),
    "norm one by one": lambda params: nn.utils.clip_grad_norm_(params, 0.1, foreach=False),
    "largest": lambda params: nn.utils.clip_grad_norm_(params, 0.1, norm_type=float("inf")),
    "value": lambda params: nn.utils.clip_grad_value_(params, 0.01),
    "own norm": _own_norm,
    "squares": _squares,
    "total norm": _total,
    "each": _each,
    "in place": _in_place,
    "all at once": lambda params: torch._foreach_mul_([param.grad for param in params], 0.5),
}


def _batches() -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(0)
    return [
        (torch.randn(16, 6, generator=draw, dtype=torch.float64), torch.randint(4, (16,), generator=draw))
        for _ in range(2)
    ]


def _plain(way: str) -> dict[str, Tensor]:
    model = Net().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for x, y in _batches():
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        WAYS[way]([*model.parameters()])
        optimizer.step()
    return dict(model.state_dict())


def _off(rank: int, world: int, layout: str, ways: list[str]) -> dict[str, float]:
    """Return how far the weights are from those of a plain loop, for each of the ways."""
    job, off = samestep.Job(train={"global_batch": 16}, numerics={"precision": "float64"}, run={"device": "cpu"}), {}
    for way in ways:
        model = Net().double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        run = samestep.parallelize(model, "cross_entropy", optimizer, layout=layout, job=job)
        for batch in _batches():
            run.backward(batch)
            WAYS[way]([*run.model.parameters()])
            run.update()
        state = run.state_dict(on_every_rank=True)
        off[way] = max(float((state[name] - weight).abs().max()) for name, weight in _plain(way).items())
    return off


@pytest.mark.parametrize(
    "layout",
    [
        "dp=1 microbatch=4",
        "dp=2 zero=3",
        "tp=2",
        "pp=2 microbatch=8",
        pytest.param("dp=2", marks=pytest.mark.nightly),
        pytest.param("dp=2 zero=1", marks=pytest.mark.nightly),
    ],
)
def test_gradients_that_a_loop_clips_are_those_of_the_whole_step(layout: str) -> None:
    world = samestep.Layout(layout).world_size
    of_ranks = pool(world).run(_off, layout, [*WAYS]) if world > 1 else [_off(0, 1, layout, [*WAYS])]
    assert all(off <= 1e-9 for of_rank in of_ranks for off in of_rank.values()), of_ranks


@pytest.mark.nightly
@pytest.mark.parametrize("way", ["norm", "own norm", "total norm"])
def test_a_norm_of_stages_whose_gradients_are_sharded_is_refused(way: str) -> None:
    with pytest.raises(LayoutError, match=r"grad is in another stage of the pipeline\. .* use report\.grad_norm"):
        pool(4).run(_off, "dp=2 pp=2 zero=3 microbatch=4", [way])
    pool(4).close()
