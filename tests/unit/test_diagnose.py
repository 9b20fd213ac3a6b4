"""The module where numbers go bad is named: planted faults, forward and backward, in small modules."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from samestep.runtime.guards.nonfinite import first_nonfinite
from tests.models import Call


class Block(nn.Module):
    """`attention` and `mlp` with something between them."""

    def __init__(self, between: Callable[[Tensor], Tensor] = torch.tanh, inner: nn.Module | None = None) -> None:
        super().__init__()
        self.attention = nn.Linear(4, 4)
        self.mlp = nn.ModuleDict({"up": nn.Linear(4, 4), "act": inner or nn.GELU(), "down": nn.Linear(4, 4)})
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.between(self.attention(x))
        return x + self.mlp["down"](self.mlp["act"](self.mlp["up"](x)))


def model_of(**kwargs: object) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(5, 4), Block(), Block(**kwargs), nn.Linear(4, 5))


TOKENS = torch.tensor([[0, 1, 2, 3]])


def diagnose(
    model: nn.Module, inputs: Tensor = TOKENS, loss: Callable[[Tensor], Tensor] = lambda y: y.square().mean(), **more
) -> str | None:
    """Run the diagnosis, and hold that it leaves no hook."""

    def run() -> Tensor:
        value = loss(model(inputs))
        value.backward()
        return value

    found = first_nonfinite(run, model, **more)
    assert no_hooks(model)
    return found


def no_hooks(model: nn.Module) -> bool:
    return all(
        not (module._forward_hooks or module._forward_pre_hooks or module._forward_hooks_always_called)
        for module in model.modules()
    ) and all(not param._backward_hooks for param in model.parameters())


def test_finite_numbers_are_no_fault() -> None:
    model = model_of()
    expected = copy.deepcopy(model)
    assert diagnose(model) is None
    expected(TOKENS).square().mean().backward()
    for mine, other in zip(model.parameters(), expected.parameters(), strict=True):
        assert torch.equal(mine.grad, other.grad)


@pytest.mark.parametrize(("size", "has_diverged"), [(1e20, True), (1e3, False)])
def test_weights_that_have_diverged_point_to_the_learning_rate(size: float, has_diverged: bool) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
    for weight in model.parameters():
        nn.init.constant_(weight, size)
    found = first_nonfinite(lambda: model(torch.full((2, 4), 3e38)).sum(), model)
    assert found is not None
    assert found.startswith("'0': forward output not finite (max |input| 3.0e+38)")
    assert ("Use a lower learning rate" in found) is has_diverged


def test_forward_names_the_module_around_an_operation_of_its_own() -> None:
    found = diagnose(model_of(between=lambda x: x / (x - x)))
    assert found.startswith("'2': forward output not finite (max |input| ")


def test_one_bad_element_in_a_nested_output() -> None:
    class Outputs(nn.Module):
        def forward(self, x: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
            return {"pair": (x, torch.tensor([1.0, math.nan]))}

    model = nn.Sequential(nn.Linear(4, 4), Outputs(), Call(lambda d: d["pair"][0]))
    assert diagnose(model, torch.ones(2, 4)).startswith("'1': forward output not finite")


def test_a_bad_batch() -> None:
    assert diagnose(nn.Sequential(nn.Linear(2, 2)), torch.full((1, 2), math.nan)) == (
        "the model itself: its input is not finite"
    )


def test_a_mask_of_minus_infinity_is_no_fault() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mask", torch.full((4, 4), -math.inf).triu(1))
            self.mask_of = Call(lambda x: self.mask)
            self.attend = Call(lambda x, mask: (x @ x.mT + mask).softmax(-1) @ x)

        def forward(self, x: Tensor) -> Tensor:
            return self.attend(x, self.mask_of(x))

    model = nn.Sequential(nn.Embedding(5, 4), Masked(), Call(lambda x: x * math.inf))
    assert diagnose(model).startswith("'2': ")


def test_a_bad_weight_that_its_own_module_never_uses() -> None:
    attention = nn.MultiheadAttention(4, 2, batch_first=True)
    model = nn.ModuleDict({"norm": nn.LayerNorm(4), "attention": attention})
    with torch.no_grad():
        attention.out_proj.weight.fill_(math.nan)

    def run() -> None:
        x = model["norm"](torch.ones(1, 3, 4))
        model["attention"](x, x, x)[0].sum().backward()

    assert first_nonfinite(run, model) == "attention: out_proj.weight is not finite"


def half(model: nn.Module) -> nn.Module:
    return model.to(torch.float16)


def test_a_float16_overflow_says_the_largest_number() -> None:
    model = nn.Sequential(nn.Identity(), nn.Linear(4, 2, bias=False))
    nn.init.constant_(model[1].weight, 2.0)
    found = diagnose(half(model), torch.full((1, 4), 10000.0, dtype=torch.float16), lambda y: y.float().sum())
    assert found == (
        "'1': forward output not finite (max |input| 1.0e+04), in float16, which holds numbers up to 65504"
    )


def test_a_float16_overflow_in_a_module_with_children() -> None:
    class Square(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(2)

        def forward(self, x: Tensor) -> Tensor:
            return (self.norm(x) * 0 + x).square()

    x = torch.full((2, 2), 300.0, dtype=torch.float16)
    model = half(nn.Sequential(nn.Identity(), Square()))
    assert diagnose(model, x, lambda y: y.float().sum()).endswith("in float16, which holds numbers up to 65504")
    assert model[1].norm.num_batches_tracked == 1


def test_a_weight_that_overflowed_in_its_cast_to_float16() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    nn.init.constant_(model[1].weight, 1e5)
    masters = {name: p.abs().max().item() for name, p in model.named_parameters()}
    found = diagnose(half(model), torch.ones(1, 2, dtype=torch.float16), lambda y: y.float().sum(), masters=masters)
    assert found == "'1': weight is not finite: value 1.0e+05 does not fit float16 (largest 65504)"


def test_backward_names_the_module_around_an_operation_of_its_own() -> None:
    found = diagnose(model_of(between=lambda x: (x - x.detach()).sqrt()))
    assert found == "'2': backward gradient not finite between its modules, after the output of 2.attention"

    class Root(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(5, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            x = self.embed(x)
            return self.head((x - x.detach()).sqrt())

    expected = "the model itself: backward gradient not finite between its modules, after the output of embed"
    assert diagnose(Root()) == expected


def test_backward_of_a_weight_only() -> None:
    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.zeros(4))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.scale.sqrt() + x

    found = diagnose(nn.Sequential(nn.Linear(4, 4), Scale(), nn.Linear(4, 4)), torch.ones(1, 4))
    assert found.startswith("'1': backward gradient of scale not finite (max |gradient of its output| ")


def test_a_float16_overflow_in_the_backward() -> None:
    steep = half(nn.Sequential(nn.Linear(4, 4), Call(lambda x: x * 100)))
    found = diagnose(steep, torch.full((1, 4), 0.1, dtype=torch.float16), lambda y: y.float().sum() * 1000)
    assert found == "'1': backward gradient of input not finite (max |gradient of its output| 1.0e+03, float16)"


LOSSES = {
    "value": lambda y: (-y.square() - 1).sum().log(),
    "value only": lambda y: y.sum() + math.nan,
    "gradient only": lambda y: (y - y.detach()).sqrt().sum(),
}


@pytest.mark.parametrize("name", LOSSES)
def test_the_loss(name: str) -> None:
    assert diagnose(model_of(), loss=LOSSES[name]).startswith("loss: ")


def test_the_loss_without_its_value() -> None:
    model = model_of()
    found = first_nonfinite(lambda: LOSSES["gradient only"](model(TOKENS)).backward(), model)
    assert found == "loss: its gradient is not finite at the output of '3'"


def test_identity_and_operations_in_place_are_not_blamed() -> None:
    def net(bad: bool) -> nn.Module:
        layers = (nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Identity(), nn.Dropout(0.0), nn.Linear(4, 4))
        return nn.Sequential(*layers, Call(lambda x: (x - x.detach()).sqrt()) if bad else nn.Tanh())

    assert diagnose(net(False), torch.ones(2, 4)) is None
    assert diagnose(net(True), torch.ones(2, 4)).startswith("'5': backward gradient of input not finite")
    assert diagnose(net(False), torch.ones(2, 4), LOSSES["value"]).startswith("loss: ")


@pytest.mark.parametrize("where", ["forward", "backward", "nowhere"])
def test_recompute(where: str) -> None:
    inner = {
        "forward": Call(lambda x: x * math.inf), "backward": Call(lambda x: (x - x.detach()).sqrt()), "nowhere": None
    }[where]  # fmt: skip
    model = model_of(inner=inner)

    class Recomputed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.model:
                x = checkpoint(layer, x, use_reentrant=False)
            return x

    found = diagnose(Recomputed())
    assert found is None if where == "nowhere" else found.startswith(f"model.2.mlp.act: {where}")


def test_hooks_go_when_the_run_raises() -> None:
    model = model_of(inner=Call(lambda x: x.no_such_thing))
    with pytest.raises(AttributeError):
        diagnose(model)
    assert no_hooks(model)


def test_sharded_parameters() -> None:
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    from samestep.randomness.mode import Draw, DropoutMode

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = dist.init_device_mesh("cpu", (1,))
        for fault in ("none", "weight", "backward"):
            model = model_of(inner=Call(lambda x: (x - x.detach()).sqrt()) if fault == "backward" else None)
            if fault == "weight":
                nn.init.constant_(model[2].mlp["down"].weight, math.nan)
            dropout = nn.Sequential(model, nn.Dropout(0.2))
            for block in model[1:3]:
                fully_shard(block, mesh=mesh)
            fully_shard(dropout, mesh=mesh)

            def run(model: nn.Module = dropout) -> None:
                with DropoutMode(model, Draw(0, 0, torch.tensor([0]))) as mode:
                    loss = model(TOKENS).square().mean()
                assert mode.num_draws == 1
                assert mode._entries["0.2"] == 1
                loss.backward()

            found = first_nonfinite(run, dropout)
            expected = {"none": None, "weight": "0.2.mlp.down: weight is not finite"}
            if fault == "backward":
                assert found.startswith("0.2.mlp.act: backward gradient of input not finite")
            else:
                assert found == expected[fault]
    finally:
        dist.destroy_process_group()
