"""Sparse gradients: an optimizer that updates only their rows leaves all others as they are, in every layout with whole weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import samestep
from samestep.errors import LayoutError
from tests.plain import train_plainly
from tests.pool import pool

Named = list[tuple[str, Tensor]]
STEPS = 4


class Factors(nn.Module):
    """Users and items, with a bias of one number for each user, of which a masked sample reads a row without a gradient."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.users, self.items = nn.Embedding(40, 4, sparse=True), nn.Embedding(30, 4, sparse=True, padding_idx=3)
        self.bias = nn.Embedding(40, 1, sparse=True)
        self.bag = nn.EmbeddingBag(30, 4, sparse=True, mode="sum") if kind == "bags" else None
        self.table = nn.Parameter(torch.randn(30, 1)) if kind == "function" else None
        self.dense = nn.Linear(6, 4) if kind in ("two optimizers", "hook") else None
        if kind == "hook":
            self.users.weight.register_hook(lambda gradient: gradient * -0.5)

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        users = self.users(batch["user"])
        if self.dense is not None:
            users = users + self.dense(batch["x"])
        scores = (users * self.items(batch["item"])).sum(-1) + self.bias(batch["user"])[:, 0]
        if self.bag is not None:
            scores = scores + self.bag(torch.stack([batch["item"], batch["user"] // 2], 1)).sum(-1)
        if self.table is not None:
            scores = scores + F.embedding(batch["item"], self.table, sparse=True)[:, 0]
        return scores


class Lazy(torch.optim.Optimizer):
    """Momenta of the rows alone that a step has read."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for param in self.param_groups[0]["params"]:
            momentum = self.state[param].setdefault("momentum", torch.zeros_like(param))
            rows, values = param.grad.coalesce().indices()[0], param.grad.coalesce().values()
            momentum[rows] = 0.9 * momentum[rows] + values
            param[rows] -= self.param_groups[0]["lr"] * momentum[rows]


def _optimizers(kind: str, named: Named) -> Any:
    tables = [param for name, param in named if "dense" not in name]
    if kind == "momentum":
        return torch.optim.SGD(tables, 0.05, momentum=0.9)
    sparse = Lazy(tables) if kind == "own" else torch.optim.SparseAdam(tables, lr=0.05)
    dense = [param for name, param in named if "dense" in name]
    return {"tables": sparse, "dense": torch.optim.AdamW(dense, lr=0.01)} if dense else sparse


def _batches() -> list[dict[str, Tensor]]:
    draw = torch.Generator().manual_seed(0)
    return [
        {
            "user": torch.randint(40, (16,), generator=draw),
            "item": torch.randint(30, (16,), generator=draw),
            "x": torch.randn(16, 6, generator=draw, dtype=torch.float64),
            "mask": (torch.rand(16, generator=draw) > 0.4).double(),
            "rating": torch.rand(16, generator=draw, dtype=torch.float64),
        }
        for _ in range(STEPS)
    ]


def _loss(outputs: Tensor, batch: Mapping[str, Tensor]) -> tuple[Tensor, int]:
    return ((outputs - batch["rating"]).square() * batch["mask"]).sum(), len(outputs)


def _plain(kind: str) -> dict[str, Tensor]:
    model = Factors(kind).double()
    optimizer = _optimizers(kind, [*model.named_parameters()])
    optimizers = [*optimizer.values()] if isinstance(optimizer, dict) else optimizer
    return train_plainly(model, _batches(), lambda batch: _loss(model(batch), batch), optimizers)[1]


def _trained(rank: int, world: int, layout: str, kind: str) -> dict[str, Tensor]:
    train, numerics = {"global_batch": 16, "steps": STEPS}, {"precision": "float64"}
    job = samestep.Job(train=train, numerics=numerics, run={"device": "cpu"})
    model = Factors(kind).double()
    optimizer, call = _optimizers(kind, [*model.named_parameters()]), lambda module, batch: module(batch)
    run = samestep.parallelize(model, _loss, optimizer, layout=layout, job=job, forward=call)
    for batch in _batches():
        run.step(batch)
    return run.state_dict(on_every_rank=True)


def _states(layout: str, kind: str) -> list[dict[str, Tensor]]:
    world = samestep.Layout(layout).world_size
    return pool(world).run(_trained, layout, kind) if world > 1 else [_trained(0, 1, layout, kind)]


@pytest.mark.parametrize(
    ("layout", "kind"),
    [
        ("dp=1 microbatch=4", "own"),
        ("dp=2 microbatch=4", "rows"),
        ("dp=2", "two optimizers"),
        ("dp=2 microbatch=2", "hook"),
        ("dp=1 microbatch=4", "bags"),
        ("dp=2", "function"),
        ("dp=2 zero=1", "momentum"),
        ("dp=2 zero=3 microbatch=4", "momentum"),
    ],
)
def test_the_rows_of_sparse_gradients_are_updated_as_in_a_plain_loop(layout: str, kind: str) -> None:
    wanted = _plain(kind)
    for state in _states(layout, kind):
        assert all(torch.allclose(state[name], weight, rtol=0.0, atol=1e-9) for name, weight in wanted.items())


@pytest.mark.parametrize("layout", ["dp=2 zero=1", "dp=2 zero=3"])
def test_rows_of_weights_that_a_layout_cuts_are_not_updated_apart(layout: str) -> None:
    with pytest.raises(
        LayoutError, match=r"users.weight by SparseAdam has only the rows of its sparse gradient.*Use zero=0"
    ):
        _states(layout, "rows")
    pool(2).close()
