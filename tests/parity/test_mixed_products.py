"""Operations on float32 and half precision side by side, which torch refuses, compute under bf16 and fp16, and only where they must be cast."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import samestep
from samestep.runtime.axes.precision import MixedProducts
from tests.pool import pool

WIDTH = 8
Code = Callable[[Tensor, Tensor], Tensor]
"""Takes values in the compute dtype [B, WIDTH], and a weight in it [WIDTH, WIDTH]."""


def _attention(x: Tensor, weight: Tensor) -> Tensor:
    tokens = (x @ weight).view(-1, 1, 4, 2)
    turned = tokens * torch.arange(4).float().cos()[:, None]
    return F.scaled_dot_product_attention(turned, turned, tokens, is_causal=True).flatten(1)


def _scores(x: Tensor, weight: Tensor) -> Tensor:
    scores = (x.float().view(-1, 4, 2) * torch.arange(4).cos()[:, None]).softmax(-1)
    return (scores @ (x @ weight).view(-1, 2, 4)).flatten(1)[:, :WIDTH]


def _picked(x: Tensor, weight: Tensor) -> Tensor:
    out, mask = torch.zeros(x.shape), x[:, 0] > 0
    out[mask] = x[mask] @ weight
    return out


def _added(x: Tensor, weight: Tensor) -> Tensor:
    return torch.zeros(x.shape).index_add(0, torch.arange(len(x)), x @ weight)


def _scattered(x: Tensor, weight: Tensor) -> Tensor:
    places = torch.arange(WIDTH).flip(0).expand(len(x), WIDTH)
    return torch.zeros(x.shape).scatter_add(1, places, x @ weight)


def _cholesky(x: Tensor, weight: Tensor) -> Tensor:
    square = (x @ weight)[:, :, None] * x[:, None] / 8
    return torch.linalg.cholesky(square @ square.mT + torch.eye(WIDTH, dtype=x.dtype)).sum(1)


CODES: dict[str, Code] = {
    "table @ weight": lambda x, weight: x.float().tanh() @ weight,
    "weight @ table": lambda x, weight: (weight @ x.float().tanh().mT).mT,
    "torch.matmul": lambda x, weight: torch.matmul(input=x.float(), other=weight),
    "einsum": lambda x, weight: torch.einsum("bi,io->bo", x.float(), weight),
    "linear": lambda x, weight: F.linear(x.float(), weight, torch.ones(WIDTH)),
    "convolution": lambda x, weight: F.conv1d(x.float()[:, None], weight[:1, None, :3], padding=1).flatten(1),
    "lerp": lambda x, weight: torch.lerp(x.float(), x @ weight, torch.linspace(0, 1, WIDTH)),
    "attention": _attention,
    "attention written out": _scores,
    "a mask writes": _picked,
    "index_add": _added,
    "scatter_add": _scattered,
    "layer_norm": lambda x, weight: F.layer_norm(x.float(), (WIDTH,), weight[0], weight[1]),
    "inverse": lambda x, weight: x @ torch.linalg.inv(weight + 3 * torch.eye(WIDTH, dtype=weight.dtype)),
    "fft": lambda x, weight: torch.fft.rfft(x @ weight, n=2 * WIDTH - 1).real,
    "cholesky": _cholesky,
}


class Mixed(nn.Module):
    """A block that computes as `CODES` says."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.weight, self.code = nn.Parameter(torch.randn(WIDTH, WIDTH) / 3), name

    def forward(self, x: Tensor) -> Tensor:
        return x + (CODES[self.code](x, self.weight) if self.code else x @ self.weight)


def trained(rank: int, world: int, name: str, layout: str, precision: str) -> tuple[list[float], bool]:
    """Return the losses of three steps, and whether forwards have gone on being cast."""

    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), Mixed(name), Mixed(name), nn.Linear(WIDTH, 2))

    points = torch.randn(24, WIDTH, generator=torch.Generator().manual_seed(0))
    job = samestep.Job(
        train={"global_batch": 8, "steps": 3},
        numerics={"precision": precision, **({"loss_scale": 1024.0} if precision == "fp16" else {})},
        run={"device": "cpu"},
    )
    run = samestep.parallelize(
        build, "cross_entropy", lambda params: torch.optim.SGD(params, lr=0.1), layout=layout, job=job
    )
    losses = [run.step((x, (x.sum(1) > 0).long())).loss for x in points.split(8)]
    context = run.assembly.parallel.precise.of_forward()
    assert isinstance(context, MixedProducts | nullcontext)
    return losses, isinstance(context, MixedProducts)


@pytest.mark.parametrize("name", CODES)
def test_operands_of_two_dtypes_compute(name: str) -> None:
    expected, _ = trained(0, 1, name, "dp=1", "float32")
    found, goes_on = trained(0, 1, name, "dp=1 microbatch=4", "bf16")
    assert goes_on
    assert found == pytest.approx(expected, rel=3e-2)


@pytest.mark.parametrize(
    ("layout", "name"), [("dp=2 zero=3 microbatch=2 recompute=full", "attention"), ("pp=2 microbatch=4", "layer_norm")]
)
def test_they_compute_in_layouts(layout: str, name: str) -> None:
    expected, _ = trained(0, 1, name, "dp=1", "float32")
    ranks = pool(2).run(trained, name, layout, "fp16")
    assert any(goes_on for _, goes_on in ranks)  # a stage may have none
    for found, _ in ranks:
        assert found == pytest.approx(expected, rel=3e-2)


class Attended(nn.Module):
    """Attention of torch, whose code reads the weights of its projections, called for two views as a Siamese encoder is."""

    def __init__(self, by_layer: bool) -> None:
        super().__init__()
        self.embed = nn.Linear(2, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, 0.0, batch_first=True)
        self.mix = layer if by_layer else nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.head = nn.Linear(WIDTH, 2)

    def view(self, x: Tensor) -> Tensor:
        tokens = self.embed(x.view(-1, 4, 2))
        mixed = (
            self.mix(tokens, tokens, tokens, need_weights=False)[0]
            if len([*self.mix.children()]) == 1
            else self.mix(tokens)
        )
        return self.head(mixed.mean(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.view(x) + self.view(-x)


def attended(rank: int, world: int, by_layer: bool, layout: str, precision: str) -> list[float]:
    points = torch.randn(24, WIDTH, generator=torch.Generator().manual_seed(0))
    job = samestep.Job(train={"global_batch": 8, "steps": 3}, numerics={"precision": precision}, run={"device": "cpu"})
    build = functools.partial(Attended, by_layer)
    run = samestep.parallelize(build, "cross_entropy", lambda ps: torch.optim.SGD(ps, lr=0.1), layout=layout, job=job)
    return [run.step((x, (x.sum(1) > 0).long())).loss for x in points.split(8)]


@pytest.mark.parametrize(("by_layer", "layout"), [(False, "dp=2 zero=3"), (True, "dp=2 zero=2")])
def test_projections_of_attention_compute_where_weights_are_gathered(by_layer: bool, layout: str) -> None:
    expected = attended(0, 1, by_layer, "dp=1", "float32")
    for found in pool(2).run(attended, by_layer, layout, "bf16"):
        assert found == pytest.approx(expected, rel=3e-2)


def test_operands_of_one_dtype_are_left_as_they_are() -> None:
    """No cast of theirs is needed, so that no function mode is entered from the second step on."""
    losses, goes_on = trained(0, 1, "", "dp=1 microbatch=4", "bf16")
    assert len(losses) == 3
    assert not goes_on
    with MixedProducts(torch.bfloat16, torch.float32) as mode:
        whole = torch.ones(2, 2)
        assert (whole @ whole).dtype is torch.float32
        assert (whole.bfloat16() @ whole.bfloat16()).dtype is torch.bfloat16
        assert F.layer_norm(whole.bfloat16(), (2,), whole[0], whole[0]).dtype is torch.bfloat16
        assert (whole.double() @ whole.double()).dtype is torch.float64
    assert not mode.num_casts
