"""Random numbers that are functions of their place have the distributions of torch's, whatever part of them is drawn."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from samestep.errors import ModelError
from samestep.models.spec import MaskSpec
from samestep.randomness.mode import Draw, DropoutMode, place_samples
from tests.models import Call

ROWS, COLUMNS = 64, 2000


def drawn(function: Callable[[Tensor], Tensor], x: Tensor, samples: Tensor | None = None, step: int = 3) -> Tensor:
    """Return what a forward draws for samples, of which each has a row."""
    model = Call(function)
    shape = tuple(x.shape[1:])
    place_samples(model, tuple(MaskSpec(owner="", entry=0, draw=-1 - index, shape=shape) for index in range(2)))
    with DropoutMode(model, Draw(1, step, torch.arange(len(x)) if samples is None else samples)):
        return model(x)


def zeros(dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.zeros(ROWS, COLUMNS, dtype=dtype)


FUNCTIONS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "rand": (lambda x: torch.rand(x.shape, dtype=x.dtype), lambda u: u),
    "rand_like": (torch.rand_like, lambda u: u),
    "uniform_": (lambda x: x.clone().uniform_(-1, 3), lambda u: 4 * u - 1),
    "randn": (lambda x: torch.randn(*x.shape, dtype=x.dtype), lambda u: math.sqrt(2) * torch.erfinv(2 * u - 1)),
    "randn_like": (torch.randn_like, lambda u: math.sqrt(2) * torch.erfinv(2 * u - 1)),
    "normal": (lambda x: torch.normal(x + 2, 3.0), lambda u: 2 + 3 * math.sqrt(2) * torch.erfinv(2 * u - 1)),
    "normal_": (lambda x: x.clone().normal_(2, std=3), lambda u: 2 + 3 * math.sqrt(2) * torch.erfinv(2 * u - 1)),
    "exponential_": (lambda x: x.clone().exponential_(2.0), lambda u: -(1 - u).log() / 2),
    "log_normal_": (lambda x: x.clone().log_normal_(0, 0.5), lambda u: (0.5 * math.sqrt(2) * torch.erfinv(2 * u - 1)).exp()),
    "cauchy_": (lambda x: x.clone().cauchy_(1, 2), lambda u: 1 + 2 * (math.pi * (u - 0.5)).tan()),
    "geometric_": (lambda x: x.clone().geometric_(0.3), lambda u: ((1 - u).log() / math.log(0.7)).ceil()),
    "bernoulli": (lambda x: torch.bernoulli(x + 0.3), lambda u: (u > 0.7).double()),
    "bernoulli_": (lambda x: x.clone().bernoulli_(0.3), lambda u: (u > 0.7).double()),
    "randint": (lambda x: torch.randint(-2, 5, x.shape), lambda u: (7 * u).floor() - 2),
    "randint_like": (lambda x: torch.randint_like(x, 7), lambda u: (7 * u).floor()),
    "random_": (lambda x: x.clone().random_(3, 9), lambda u: (6 * u).floor() + 3),
    "rrelu": (lambda x: F.rrelu(x - 1, training=True), lambda u: -(1 / 8 + (1 - u) * (1 / 3 - 1 / 8))),
    "multinomial": (
        lambda x: torch.multinomial(torch.tensor([0.5, 0.2, 0.3]).expand(len(x), 3), COLUMNS, replacement=True),
        lambda u: (u > 0.5).double() + (u > 0.7).double(),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_distribution_is_torchs(name: str) -> None:
    """The quantiles of the numbers lie within five deviations of those of the distribution (Kolmogorov's distance)."""
    function, quantile = FUNCTIONS[name]
    numbers = drawn(function, zeros()).flatten().double().sort().values
    n = numbers.numel()
    for u in torch.linspace(0.02, 0.98, 25, dtype=torch.float64):
        at_most = float((numbers <= quantile(u) + 1e-12).double().mean())
        below = float((numbers < quantile(u) - 1e-12).double().mean())
        slack = 5 * math.sqrt(0.25 / n)
        assert below - slack <= float(u) <= at_most + slack


@pytest.mark.parametrize("name", FUNCTIONS)
def test_numbers_belong_to_samples(name: str) -> None:
    function, _ = FUNCTIONS[name]
    whole = drawn(function, zeros())
    order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(1))
    assert torch.equal(drawn(function, zeros(), order), whole[order])
    part = order[:5]
    assert torch.equal(drawn(function, zeros()[:5], part), whole[part])
    assert not torch.equal(drawn(function, zeros(), step=4), whole)


def test_rows_columns_and_draws_are_uncorrelated() -> None:
    def both(x: Tensor) -> Tensor:
        return torch.stack([torch.randn_like(x), torch.randn_like(x)])

    first, second = drawn(both, zeros())
    for a, b in [(first, second), (first[1:], first[:-1]), (first[:, 1:], first[:, :-1]), (first.abs(), second.abs())]:
        a, b = a - a.mean(), b - b.mean()
        assert abs(float((a * b).mean() / (a.std() * b.std()))) < 5 / math.sqrt(a.numel())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_dtype_has_the_numbers_of_float64_rounded(dtype: torch.dtype) -> None:
    """No uniform number is 1, nothing is infinite."""
    uniform = drawn(torch.rand_like, zeros(dtype))
    assert uniform.dtype == dtype
    assert 0 <= float(uniform.min()) <= float(uniform.max()) < 1
    exact = drawn(torch.randn_like, zeros())
    normal = drawn(torch.randn_like, zeros(dtype))
    assert torch.isfinite(normal).all()
    assert (normal.double() - exact).abs().max() <= 6 * torch.finfo(dtype).eps


def test_choices_without_replacement_are_distinct_and_likely() -> None:
    weights = torch.tensor([0.0, 5.0, 1.0, 1.0, 3.0])
    picks = drawn(lambda x: torch.multinomial(weights.expand(len(x), 5), 4), torch.zeros(4000, 5))
    assert (picks.sort(1).values == torch.tensor([1, 2, 3, 4])).all()
    assert float((picks[:, 0] == 1).double().mean()) == pytest.approx(0.5, abs=0.04)
    assert float((picks[:, 0] == 4).double().mean()) == pytest.approx(0.3, abs=0.04)


def test_soft_choices_have_gradients_and_hard_ones_are_one_hot() -> None:
    x = torch.zeros(ROWS, 6, requires_grad=True)
    hard = drawn(lambda x: F.gumbel_softmax(x, tau=0.5, hard=True), x)
    assert torch.equal(hard.detach().round(), F.one_hot(hard.argmax(1), 6).float())
    (hard * torch.arange(6)).sum().backward()
    assert x.grad is not None
    assert x.grad.abs().sum() > 0


def test_an_order_is_one_of_the_whole_step_and_never_of_samples() -> None:
    model = Call(lambda x: x[:, torch.randperm(8)])
    place_samples(model, (MaskSpec(owner="", entry=0, draw=-1, shape=(8,), rows=(-1, 0)),))
    x = torch.arange(8.0).expand(3, 8)
    with DropoutMode(model, Draw(1, 0, torch.arange(3))):
        order = model(x)
    assert sorted(order[0].tolist()) == list(range(8))
    assert (order == order[:1]).all()
    with pytest.raises(ModelError, match="randperm: an order of samples"):
        drawn(lambda x: x[torch.randperm(len(x))], zeros())


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda x: torch.randn_like(x).normal_(generator=torch.Generator()), "normal_ draws from a generator of its own"),
        (lambda x: torch.randn(x.shape, out=x), "randn with out: "),
        (lambda x: torch.randint(5, 5, x.shape), "from 5 to below 5"),
    ],
)  # fmt: skip
def test_what_cannot_be_drawn_is_refused(function: Callable[[Tensor], Tensor], words: str) -> None:
    with pytest.raises(ModelError, match=words):
        drawn(function, zeros())
