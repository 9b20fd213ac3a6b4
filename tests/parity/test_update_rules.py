"""Optimizers of any rule give one device's weights in every layout, or are refused by name before the first step.

The rules are those that people write: by elements, by whole matrices, by all weights at once; with hooks and tags of
parameters, weights that take no part, and learning rates that another hand sets.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from samestep.building.loss import loss_of
from samestep.datasets import batches
from samestep.job import Job
from samestep.layout import Layout
from samestep.runtime.assembly import Source
from samestep.runtime.optimizer_source import optimizer_source
from samestep.runtime.processes.join import RankInfo
from samestep.runtime.run import Run
from tests import traced
from tests.laboratory import TOLERANCE, Observed, assert_ledger, assert_same, follow, job_of, perturbed
from tests.models import VOCABULARY, Tokens
from tests.pool import pool


class Rule(Optimizer):
    """An optimizer of a user's own: `one` changes a weight that has a gradient."""

    def __init__(self, params: Any, lr: float = 0.02, **options: Any) -> None:
        super().__init__(params, {"lr": lr, **options})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self.one(param, group, self.state[param])

    def one(self, param: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        raise NotImplementedError


class Lion(Rule):
    def one(self, param: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        mean = state.setdefault("mean", torch.zeros_like(param))
        param.sub_(mean.mul(0.9).add(param.grad, alpha=0.1).tanh(), alpha=group["lr"])
        mean.lerp_(param.grad, 0.01)


class ScheduleFree(Rule):
    """The averages of Defazio et al. 2024, with a count that the groups keep."""

    def one(self, param: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        state["k"] = state.get("k", 0) + 1
        z = state.setdefault("z", param.detach().clone())
        z.sub_(param.grad, alpha=group["lr"])
        param.lerp_(z, 1 / state["k"])


class Lars(Rule):
    """As in MAE, MoCo v3, Barlow Twins: a trust ratio for what has two dimensions, none for norms and biases."""

    def one(self, param: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        ratio: Any = param.norm() / param.grad.norm() if param.ndim > 1 else 1.0
        param.add_(param.grad * ratio, alpha=-0.5 * group["lr"])


class LarsOfNumbers(Rule):
    """The same, with numbers that it looks at."""

    def one(self, param: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        size, slope = param.norm(), param.grad.norm()
        param.add_(
            param.grad, alpha=-0.5 * group["lr"] * float(size / slope) if size > 0 and slope > 0 else -group["lr"]
        )


class Late(Rule):
    """Elementwise for some steps (Shampoo's start_preconditioning_step)."""

    def __init__(self, params: Any, start: int = 2) -> None:
        super().__init__(params, start=start)

    def one(self, param: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        state["step"] = state.get("step", 0) + 1
        param.sub_(param.grad / (param.grad.norm() if state["step"] > group["start"] else 1.0), alpha=group["lr"])


class Factored(Rule):
    """Second moments by rows and columns, from a size on (timm's Adafactor)."""

    def one(self, param: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        square = param.grad.square() + 1e-12
        if param.ndim == 2 and min(param.shape) >= 8:
            rows = state.setdefault("rows", torch.zeros_like(square[:, 0])).lerp_(square.mean(1), 0.5)
            columns = state.setdefault("columns", torch.zeros_like(square[0])).lerp_(square.mean(0), 0.5)
            square = torch.outer(rows, columns) / rows.mean()
        param.sub_(param.grad / square.sqrt().add(1e-3), alpha=0.1 * group["lr"])


class Shampoo(Rule):
    """Two-sided preconditioners, whose roots are taken every other step."""

    def __init__(self, params: Any, lr: float = 0.02, every: int = 2) -> None:
        super().__init__(params, lr=lr, every=every)

    def one(self, param: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        if param.ndim != 2 or max(param.shape) > 64:
            param.sub_(param.grad, alpha=group["lr"])
            return
        state["step"] = state.get("step", 0) + 1
        left = state.setdefault("left", torch.eye(param.shape[0], dtype=param.dtype, device=param.device))
        left += param.grad @ param.grad.mT
        if state["step"] % group["every"] == 1:
            values, vectors = torch.linalg.eigh(left)
            state["root"] = vectors @ (values.clamp(min=1e-6) ** -0.5).diag() @ vectors.mT
        param.sub_(state["root"] @ param.grad, alpha=group["lr"])


class ByAllNorms(Rule):
    def step(self, closure: None = None) -> None:
        norm = torch.stack([p.grad.norm() for group in self.param_groups for p in group["params"]]).norm()
        with torch.no_grad():
            for group in self.param_groups:
                for param in group["params"]:
                    param.sub_(param.grad / norm, alpha=group["lr"])


class ByAllNumbers(Rule):
    """Prodigy's and D-Adaptation's kind: a number that sums over all weights."""

    def step(self, closure: None = None) -> None:
        norm = sum(float(p.grad.norm()) for group in self.param_groups for p in group["params"])
        with torch.no_grad():
            for group in self.param_groups:
                for param in group["params"]:
                    param.sub_(param.grad / norm, alpha=group["lr"])


class Noisy(Rule):
    def one(self, param: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        param.sub_(param.grad + torch.randn_like(param), alpha=group["lr"])


def muon(params: list[Tensor]) -> Optimizer:
    return torch.optim.Muon([param for param in params if param.ndim == 2], lr=0.02)


def muon_beside_adam(params: list[Tensor]) -> Optimizer:
    return MuonAndAdam(params)


class MuonAndAdam(Rule):
    """As in modded-nanogpt: matrices are orthogonalised, the rest goes to Adam, in groups of one optimizer."""

    def __init__(self, params: list[Tensor]) -> None:
        matrices = [param for param in params if param.ndim == 2 and max(param.shape) <= 64]
        others = [param for param in params if all(param is not matrix for matrix in matrices)]
        super().__init__([{"params": matrices, "is_muon": True}, {"params": others, "is_muon": False}])

    def one(self, param: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        mean = state.setdefault("mean", torch.zeros_like(param)).lerp_(param.grad, 0.1)
        if not group["is_muon"]:
            square = state.setdefault("square", torch.zeros_like(param)).lerp_(param.grad.square(), 0.1)
            param.sub_(mean / (square.sqrt() + 1e-2), alpha=group["lr"])
            return
        x = mean / (mean.norm() + 1e-7)
        for _ in range(3):
            x = 1.5 * x - 0.5 * x @ x.mT @ x
        param.sub_(x, alpha=group["lr"] * max(1, param.shape[0] / param.shape[1]) ** 0.5)


def by_dimensions(params: list[Tensor]) -> Optimizer:
    """The usual idiom: matrices are decayed, vectors are not."""
    matrices, vectors = ([p for p in params if (p.dim() >= 2) == is_matrix] for is_matrix in (True, False))
    return torch.optim.SGD([{"params": matrices, "weight_decay": 0.5}, {"params": vectors, "momentum": 0.9}], lr=0.05)


def by_position(params: list[Tensor]) -> Optimizer:
    return torch.optim.SGD([{"params": params[:2], "lr": 0.5}, {"params": params[2:]}], lr=0.05)


def by_size(params: list[Tensor]) -> Optimizer:
    large, small = ([p for p in params if (p.numel() > 300) == is_large] for is_large in (True, False))
    return torch.optim.SGD([{"params": large, "lr": 0.5}, {"params": small, "lr": 0.01}], lr=0.05)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(12), nn.Linear(12, 20), nn.Linear(20, 12, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Small(nn.Module):
    """Matrices of several shapes, vectors, blocks for two stages."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 12)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(12, VOCABULARY)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


OPTIMIZERS: dict[str, Callable[[list[Tensor]], Optimizer]] = {
    kind.__name__: kind
    for kind in (Lion, ScheduleFree, Lars, LarsOfNumbers, Late, Factored, Shampoo, ByAllNorms, ByAllNumbers, Noisy)
} | {
    "muon": muon,
    "muon beside adam": muon_beside_adam,
    "by dimensions": by_dimensions,
    "by position": by_position,
    "by size": by_size,
    "amsgrad": functools.partial(torch.optim.AdamW, lr=0.01, eps=1e-3, amsgrad=True, foreach=True),
    "fused": functools.partial(torch.optim.Adam, lr=0.01, eps=1e-3, fused=True),
    "adagrad": functools.partial(torch.optim.Adagrad, lr=0.01, eps=1e-3, initial_accumulator_value=0.1),
    "asgd": functools.partial(torch.optim.ASGD, lr=0.1, t0=1.0),
    "adafactor": functools.partial(torch.optim.Adafactor, lr=0.01),
}
BY_ELEMENTS = ("Lion", "ScheduleFree", "by dimensions", "by position", "by size", "amsgrad", "fused", "adagrad", "asgd")
WHOLE = ("Lars", "LarsOfNumbers", "Late", "Factored", "Shampoo", "muon", "muon beside adam", "adafactor")
TOGETHER = ("ByAllNorms", "ByAllNumbers")


JOB = job_of("float64", 3, train={"global_batch": 4})


def source_with(name: str, job: Job) -> Source:
    source = Source(perturbed(Small), loss_of(job), optimizer_source(OPTIMIZERS[name]), "small")
    example = next(batches(Tokens(), job)).samples([0])
    return replace(source, prepared=traced.prepared(("small", Tokens), source, job, example, Layout()))


def stepped(rank: int, world: int, names: tuple[str, ...], layout: str, job: Job) -> dict[str, Observed]:
    place = RankInfo(rank, rank, world, world, torch.device("cpu"))
    return {
        name: follow(Run(source_with(name, job), Layout.parse(layout), job, place), Tokens(), job, record=True)
        for name in names
    }


@functools.cache
def alone(name: str) -> Observed:
    return stepped(0, 1, (name,), "dp=1", JOB)[name]


def assert_equal(names: tuple[str, ...], layout: str) -> None:
    """Every one of these optimizers gives in the layout what it gives on one device."""
    expected = {name: alone(name) for name in names}
    ranks = pool(Layout.parse(layout).world_size).run(stepped, names, layout, JOB)
    for name in names:
        try:
            assert_same([seen[name] for seen in ranks], expected[name], TOLERANCE)
            assert_ledger([seen[name] for seen in ranks], layout)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from error


@pytest.mark.parametrize("layout", ["dp=2 zero=1", "dp=2 zero=2", "dp=2 zero=3", "pp=2 microbatch=2"])
@pytest.mark.parametrize("names", [BY_ELEMENTS, WHOLE], ids=["by elements", "whole"])
def test_rules_by_elements_and_by_whole_weights_run_equal(names: tuple[str, ...], layout: str) -> None:
    assert_equal(names, layout)
