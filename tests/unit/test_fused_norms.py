"""Norms called as one function of torch's: chosen where that equals their float32 island, and for no other formula."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from samestep import Job, batches, parallelize
from samestep.runtime.axes.fused_norms import fused_call

CPU = torch.device("cpu")
SIZE = 24


class Formula(nn.Module):
    """A norm with a formula of its own, as transformers' families write it."""

    def __init__(self, formula: Callable[[Tensor, Tensor, float], Tensor], eps: float = 1e-6) -> None:
        super().__init__()
        self.weight, self.variance_epsilon, self.formula = nn.Parameter(torch.ones(SIZE)), eps, formula

    def forward(self, x: Tensor) -> Tensor:
        return self.formula(x, self.weight, self.variance_epsilon)


def llama(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    raised = x.to(torch.float32)
    return weight * (raised * torch.rsqrt(raised.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


def shifted(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x, (SIZE,), 1 + weight, eps)


def limited(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return llama(x.clamp(-1e4, 1e4), weight, eps)


def unrooted(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return weight * (x / (x.pow(2).mean(-1, keepdim=True) + eps))


def doubled(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return llama(x, weight, 2 * eps)


def island(module: nn.Module, x: Tensor) -> Tensor:
    weights = {name: param.float() for name, param in module.named_parameters()}
    return torch.func.functional_call(module, weights, (x.float(),)).to(x.dtype)


RMS = {
    "torch's": lambda: nn.RMSNorm(SIZE),
    "with an epsilon": lambda: nn.RMSNorm(SIZE, eps=1e-5),
    "llama's": lambda: Formula(llama),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", RMS)
def test_an_rms_norm_is_called_as_one_function_with_equal_bits(name: str, dtype: torch.dtype) -> None:
    module = RMS[name]()
    call = fused_call(module, dtype, torch.float32, CPU)
    assert call is not None
    module.to(dtype)
    draws = torch.Generator().manual_seed(7)
    with torch.no_grad():
        module.weight.copy_(torch.randn(SIZE, generator=draws))
    for scale in (0.01, 1.0, 200.0):
        x = (scale * torch.randn(5, 3, SIZE, generator=draws)).to(dtype).requires_grad_()
        out = torch.randn(5, 3, SIZE, generator=draws).to(dtype)
        results = [(y, *torch.autograd.grad(y, [x, module.weight], out)) for y in (island(module, x), call(module, x))]
        assert all(map(torch.equal, *results))


@pytest.mark.parametrize("formula", [shifted, limited, unrooted, doubled])
def test_another_formula_keeps_its_island(formula: Callable[[Tensor, Tensor, float], Tensor]) -> None:
    module = Formula(formula, eps=1e-3)
    assert fused_call(module, torch.bfloat16, torch.float32, CPU) is None


def over(*dims: int) -> Callable[[Tensor, Tensor, float], Tensor]:
    """Return an RMS norm over these dimensions of its input; over all but the first without any."""

    def formula(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return weight * (x * torch.rsqrt(x.square().mean(dims or [*range(1, x.dim())], keepdim=True) + eps))

    return formula


def centred(formula: Callable[[Tensor, Tensor, float], Tensor]) -> Callable[[Tensor, Tensor, float], Tensor]:
    """Return the layer norm over the second dimension that has the RMS norm of this formula."""
    return lambda x, weight, eps: formula(x - x.mean(1, keepdim=True), weight, eps)


@pytest.mark.parametrize("size", [(SIZE,), (SIZE, 1, 1), (1,), (1, SIZE)])
@pytest.mark.parametrize("formula", [over(1), over(), centred(over(1)), over(1, -1), over(1, 2)])
def test_a_norm_over_other_dimensions_than_those_of_its_weight_keeps_its_island(
    formula: Callable[[Tensor, Tensor, float], Tensor], size: tuple[int, ...]
) -> None:
    """In two dimensions the second is that of the features, and a weight of one element goes with any number of them."""
    module = Formula(formula)
    module.weight = nn.Parameter(torch.ones(size))
    assert fused_call(module, torch.bfloat16, torch.float32, CPU) is None


def test_a_norm_over_features_with_one_weight_for_all_keeps_its_island() -> None:
    module = Formula(llama)
    module.weight = nn.Parameter(torch.ones(1))
    assert fused_call(module, torch.bfloat16, torch.float32, CPU) is None


class Scaled(nn.LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        return 2.0 * super().forward(x)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("module", [nn.LayerNorm(SIZE), nn.LayerNorm(SIZE, eps=1e-3, bias=False)], ids=["", "no bias"])
def test_a_layer_norm_is_called_in_float32_with_equal_bits_on_a_cpu(module: nn.Module, dtype: torch.dtype) -> None:
    """In half precision torch's kernel adds the gradients of its weights rounded."""
    module = copy.deepcopy(module)
    call = fused_call(module, dtype, torch.float32, CPU)
    assert call is not None
    module.to(dtype)
    draws = torch.Generator().manual_seed(7)
    for scale in (0.01, 1.0, 200.0):
        x = (scale * torch.randn(5, 3, SIZE, generator=draws)).to(dtype).requires_grad_()
        out, asked = torch.randn(5, 3, SIZE, generator=draws).to(dtype), [x, *module.parameters()]
        results = [(y, *torch.autograd.grad(y, asked, out)) for y in (island(module, x), call(module, x))]
        assert all(map(torch.equal, *results))
    assert fused_call(Scaled(SIZE), dtype, torch.float32, CPU) is None


def test_a_norm_with_a_forward_of_an_instance_or_without_weights_keeps_its_island() -> None:
    replaced = nn.RMSNorm(SIZE)
    replaced.forward = lambda x: x  # type: ignore[method-assign]
    for module in (replaced, nn.RMSNorm(SIZE, elementwise_affine=False)):
        assert fused_call(module, torch.bfloat16, torch.float32, CPU) is None


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, SIZE), nn.RMSNorm(SIZE), nn.Linear(SIZE, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.first(x)))


class ResidualNorm(nn.RMSNorm):
    """A norm whose input has a name, and which adds a residual where it is given one."""

    def forward(self, hidden: Tensor, residual: Tensor | None = None) -> Tensor:  # type: ignore[override]
        return super().forward(hidden if residual is None else hidden + residual)


@pytest.mark.parametrize("how", ["alone", "by name", "with a residual"])
def test_a_norm_is_called_as_its_code_calls_it(how: str) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.norm = nn.Linear(6, SIZE), ResidualNorm(SIZE)

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            if how == "alone":
                return self.norm(x)
            return self.norm(hidden=x) if how == "by name" else self.norm(x, residual=x)

    found = []
    for precision in ("float32", "bf16"):
        job = Job(train={"global_batch": 4, "steps": 2}, numerics={"precision": precision}, run={"device": "cpu"})
        run = parallelize(
            Model, lambda y, batch: (y.square().sum(), y.numel()), lambda p: torch.optim.SGD(p, 0.1), job=job
        )
        draws = torch.Generator().manual_seed(0)
        data = [(torch.randn(6, generator=draws), torch.zeros(1)) for _ in range(8)]
        found.append([run.step(batch).loss for batch in batches(data, job)])
    assert found[1] == pytest.approx(found[0], rel=0.02)


def test_casts_are_no_hooks_and_a_copy_of_the_model_runs_with_its_own_weights() -> None:
    job = Job(train={"global_batch": 4, "steps": 2}, numerics={"precision": "bf16"}, run={"device": "cpu"})
    run = parallelize(
        Small,
        lambda outputs, batch: ((outputs - batch[1]).square().sum(), outputs.numel()),
        lambda p: torch.optim.SGD(p, 0.1),
        job=job,
    )
    data = [(torch.randn(6), torch.randn(2)) for _ in range(8)]
    for batch in batches(data, job):
        run.step(batch)
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in run.model.modules())
    twin, x = copy.deepcopy(run.model), torch.randn(3, 6)
    with torch.no_grad():
        assert torch.equal(twin(x), run.model(x))
        for param in twin.parameters():
            param.zero_()
        assert torch.equal(twin(x), torch.zeros(3, 2, dtype=torch.bfloat16))
        assert bool(run.model(x).any())
