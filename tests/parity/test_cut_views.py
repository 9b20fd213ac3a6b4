"""What loops and losses are given of weights that ranks cut: one flat gradient, what a plain loop does to `param.grad`, penalties, a teacher that follows."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import samestep
from samestep.errors import LayoutError, ModelError
from tests.plain import assert_as_on_one_device
from tests.pool import pool


class Gain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.inp, self.out = nn.Linear(6, 8), nn.Linear(8, 4)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 16), nn.GELU(), Gain(), nn.Linear(16, 8)) for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for block in self.blocks:
            x = x + block(x)
        return self.out(x)


class Points:
    def __init__(self) -> None:
        draw = torch.Generator().manual_seed(3)
        self.x, self.y = torch.randn(24, 6, generator=draw, dtype=torch.float64), torch.arange(24) % 4

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": self.x[index], "y": self.y[index]}


JOB = samestep.Job(train={"global_batch": 8, "steps": 2}, numerics={"precision": "float64"}, run={"device": "cpu"})
Found = tuple[list[float], dict[str, Tensor]]


_sgd = functools.partial(torch.optim.SGD, lr=0.1)


def _nll(outputs: Tensor, batch: Any) -> tuple[Tensor, int]:
    return F.cross_entropy(outputs, batch["y"], reduction="sum"), len(outputs)


def _flat(rank: int, world: int, layout: str) -> Found:
    """Divide all gradients by their common norm, found from one flat tensor and by torch's own function."""
    run = samestep.parallelize(
        Net(), _nll, _sgd, layout=layout, job=JOB, forward=lambda model, batch: model(batch["x"])
    )
    norms = []
    for batch in samestep.batches(Points(), JOB):
        run.backward(batch)
        gradients = run.gradients()
        norm = torch.cat([one.flatten() for one in gradients.values()]).norm()
        norms += [float(norm), float(torch.nn.utils.get_total_norm(gradients.values()))]
        if "tp" in layout or "zero" in layout:
            with pytest.raises(ModelError, match=r"inp.bias is a DTensor.*Use \.full_tensor\(\)\.numpy\(\)"):
                gradients["inp.bias"].numpy()
        for gradient in gradients.values():
            gradient.mul_(1.0 / norms[-1])
        run.update()
    return norms, run.state_dict(on_every_rank=True)


def _penalty(rank: int, world: int, layout: str) -> Found:
    """A penalty on all weights, gains too whose gradients the ranks add up, which the forward returns."""

    def forward(model: nn.Module, batch: Any) -> Any:
        return model(batch["x"]), [*model.parameters()]

    def loss(outputs: Any, batch: Any) -> Any:
        return {"ce": _nll(outputs[0], batch), "l1": (0.1 * sum(one.abs().sum() for one in outputs[1]), 1)}

    run = samestep.parallelize(Net(), loss, _sgd, layout=layout, job=JOB, forward=forward)
    losses = [run.step(batch).loss for batch in samestep.batches(Points(), JOB)]
    return losses, run.state_dict(on_every_rank=True)


def _teacher(rank: int, world: int, layout: str, how: str) -> Found:
    """A teacher that the forward calls otherwise than the student, so that a plan would cut only one of them."""

    def forward(models: Any, batch: Any) -> Any:
        with torch.no_grad():
            teacher = models["teacher"]
            target = teacher(batch["x"]) if how == "whole" else teacher.out(teacher.inp(batch["x"]))
        return models["student"](2 * batch["x"]), target

    def loss(outputs: Any, batch: Any) -> tuple[Tensor, int]:
        return (outputs[0] - outputs[1]).square().sum(), len(outputs[0])

    models = {"student": Net(), "teacher": copy.deepcopy(Net())}
    follow: Any = {"teacher": ("student", 0.5)}
    run = samestep.parallelize(models, loss, _sgd, layout=layout, job=JOB, forward=forward, ema=follow)
    losses = [run.step(batch).loss for batch in samestep.batches(Points(), JOB)]
    return losses, run.state_dict(on_every_rank=True)


@pytest.mark.every_row
@pytest.mark.parametrize(
    ("layout", "work", "more"),
    [
        ("dp=2 zero=3", _flat, ()),
        ("dp=2 tp=2 zero=2", _flat, ()),
        pytest.param("dp=2 tp=2 zero=3", _flat, (), marks=pytest.mark.nightly),
        ("tp=2", _penalty, ()),
        ("tp=2", _teacher, ("whole",)),
        pytest.param("tp=2", _teacher, ("its ends",), marks=pytest.mark.nightly),
    ],
)
def test_what_is_given_of_cut_weights_is_that_of_one_device(layout: str, work: Any, more: tuple[str, ...]) -> None:
    assert_as_on_one_device(work, layout, *more, rtol=1e-9, atol=1e-12)


# -- gradients that a loop changes between backward and update --------------------------------------

Params = list[Any]


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


def _two_batches() -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(0)
    return [
        (torch.randn(16, 6, generator=draw, dtype=torch.float64), torch.randint(4, (16,), generator=draw))
        for _ in range(2)
    ]


class Bare(Net):
    """Without the gains, numbers of whose gradients a rank with zero=3 has no part that torch's functions take."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block[3] = nn.Identity()  # type: ignore[index]


def _plain(way: str) -> dict[str, Tensor]:
    model = Bare().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for x, y in _two_batches():
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        WAYS[way]([*model.parameters()])
        optimizer.step()
    return dict(model.state_dict())


def _off(rank: int, world: int, layout: str, ways: list[str]) -> dict[str, float]:
    """Return how far the weights are from those of a plain loop, for each of the ways."""
    job, off = samestep.Job(train={"global_batch": 16}, numerics={"precision": "float64"}, run={"device": "cpu"}), {}
    for way in ways:
        model = Bare().double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        run = samestep.parallelize(model, "cross_entropy", optimizer, layout=layout, job=job)
        for batch in _two_batches():
            run.backward(batch)
            WAYS[way]([*run.model.parameters()])
            run.update()
        state = run.state_dict(on_every_rank=True)
        off[way] = max(float((state[name] - weight).abs().max()) for name, weight in _plain(way).items())
    return off


@pytest.mark.parametrize(
    ("layout", "ways"),
    [
        ("dp=2 zero=3", [*WAYS]),
        ("tp=2", ["largest", "own norm", "squares", "total norm", "in place"]),
        ("pp=2 microbatch=8", ["norm one by one", "value", "own norm", "each"]),
        *(
            pytest.param(layout, [*WAYS], marks=pytest.mark.nightly)
            for layout in ("dp=2", "dp=2 zero=1", "tp=2", "pp=2 microbatch=8")
        ),
    ],
)
def test_gradients_that_a_loop_clips_are_those_of_the_whole_step(layout: str, ways: list[str]) -> None:
    of_ranks = pool(2).run(_off, layout, ways)
    assert all(off <= 1e-9 for of_rank in of_ranks for off in of_rank.values()), of_ranks


@pytest.mark.nightly
@pytest.mark.parametrize("way", ["norm one by one", "own norm", "total norm"])
def test_a_norm_of_stages_whose_gradients_are_sharded_is_refused(way: str) -> None:
    with pytest.raises(LayoutError, match=r"grad is in another stage of the pipeline\. .* use report\.grad_norm"):
        pool(4).run(_off, "dp=2 pp=2 zero=3 microbatch=4", [way])
    pool(4).close()
