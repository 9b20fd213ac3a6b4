"""Code that people write, where weights are gathered (zero=2 and 3): it is right as on one device, or refused in one line.

Blocks that write into their inputs, or return them; weights that a custom backward uses; loops that write whole tensors into
`run.model`, or copy it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from samestep.building.loss import loss_of
from samestep.building.optimizer import optimizer_of
from samestep.errors import LayoutError
from samestep.examination.examine import Source
from samestep.runtime.run import Run
from tests.laboratory import TOLERANCE, Observed, assert_ledger, assert_same, follow, job_of, perturbed, traced_run
from tests.parity.test_one_sided_parts import WIDTH, Kinds, Parts
from tests.pool import pool

LAYOUTS = ["dp=2 zero=3", "dp=2 zero=2 microbatch=2"]


class Writing(nn.Module):
    """A block that begins with an activation in place, as that of VQ-VAE."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.parts(x)


class Scaling(nn.Module):
    """A block that writes into its input by itself, and returns it."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        x += self.mix(x.clone()).tanh() * self.scale
        return x.mul_(0.75)


class Passing(nn.Module):
    """A block that returns one of its inputs beside its result."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, side: Tensor) -> tuple[Tensor, Tensor]:
        return x + torch.tanh(self.mix(x) + side), side


class InPlace(Parts):
    """All three, the second one in front of a use of what it has written into."""

    def __init__(self) -> None:
        super().__init__(0)
        self.parts = nn.ModuleList([Writing(), Scaling(), Passing(), Writing()])

    def between(self, x: Tensor, kind: Tensor) -> Tensor:
        first, second, third, last = self.parts
        y = first(x) * 1.5
        z = second(y)
        x, side = third(z + y, x)
        return last(x + side)


class Adjoint(torch.autograd.Function):
    """Steps of a differential equation, whose backward runs them once more with the weights that it was given."""

    @staticmethod
    def forward(ctx: Any, function: nn.Module, steps: int, y: Tensor, *weights: Tensor) -> Tensor:
        ctx.function, ctx.steps = function, steps
        seen = [y]
        with torch.no_grad():
            for _ in range(steps):
                seen.append(seen[-1] + 0.1 * function(seen[-1]))
        ctx.save_for_backward(*seen, *weights)
        return seen[-1]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        seen, weights = ctx.saved_tensors[: ctx.steps], ctx.saved_tensors[ctx.steps + 1 :]
        (g,), sums = gradients, [torch.zeros_like(weight) for weight in weights]
        for y in reversed(seen):
            with torch.enable_grad():
                here = y.detach().requires_grad_()
                g, *more = torch.autograd.grad(here + 0.1 * ctx.function(here), (here, *weights), g)
            sums = [a + b for a, b in zip(sums, more, strict=True)]
        return None, None, g, *sums


class Reversed(torch.autograd.Function):
    """A residual sum whose backward runs the function once more and goes back through it, into weights that it was not given."""

    @staticmethod
    def forward(ctx: Any, function: nn.Module, y: Tensor) -> Tensor:
        ctx.function = function
        ctx.save_for_backward(y)
        with torch.no_grad():
            return y + function(y)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (y,), (g,) = ctx.saved_tensors, gradients
        with torch.enable_grad():
            here = y.detach().requires_grad_()
            ctx.function(here).backward(g)
        return None, g + here.grad


class Equation(Parts):
    """A differential equation between two layers, and residual sums that are reversed: one function in one of them, one in two."""

    def __init__(self) -> None:
        super().__init__(2)
        self.equation, self.once, self.twice = (
            nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, WIDTH)) for _ in range(3)
        )

    def between(self, x: Tensor, kind: Tensor) -> Tensor:
        for part in self.parts:
            x = part(x)
        x = Adjoint.apply(self.equation, 3, x, *self.equation.parameters())  # type: ignore[no-untyped-call]
        for function in (self.twice, self.once, self.twice):
            x = Reversed.apply(function, x)  # type: ignore[no-untyped-call]
        return x


class Odd(nn.Module):
    """Weights of single numbers, of one row and of fewer rows than ranks have."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.parts = nn.Linear(WIDTH, 7), nn.ModuleList(nn.Linear(7, 7) for _ in range(2))
        self.one, self.head = nn.Linear(7, 1), nn.Linear(1, 2)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor, kind: Tensor) -> Tensor:
        x = self.first(x)
        for part in self.parts:
            x = torch.tanh(part(x))
        return self.head(self.one(x)) * self.scale


MODELS: dict[str, Callable[[], nn.Module]] = {"InPlace": InPlace, "Equation": Equation, "Odd": Odd}


@torch.no_grad()
def copy_in(run: Run) -> None:
    made = torch.Generator().manual_seed(3)
    for weight in run.model.parameters():
        whole = torch.randn(weight.shape, generator=made, dtype=torch.float64)
        weight.copy_(whole)
        weight.lerp_(torch.ones(weight.shape, dtype=torch.float64), 0.25)
        kept = torch.zeros_like(whole)
        kept.copy_(weight)
        assert torch.allclose(kept, whole.lerp(torch.ones_like(whole), 0.25))


def load_in(run: Run) -> None:
    made = torch.Generator().manual_seed(4)
    shapes = {name: weight.shape for name, weight in MODELS["Odd"]().named_parameters()}
    state = {name: torch.randn(shape, generator=made, dtype=torch.float64) for name, shape in shapes.items()}
    run.model.load_state_dict(state)


@torch.no_grad()
def write_by_other_operations(run: Run) -> None:
    for weight in run.model.parameters():
        weight.sub_(weight.mean(0))
        weight.div_(weight.norm() + 1.0)
        weight.masked_fill_(torch.arange(weight.numel()).view(weight.shape) % 5 == 0, 0.1)
        weight.clamp_(-0.5, 0.5)
        if weight.dim() == 2:
            weight.renorm_(2, 0, 1.0)
            weight.index_fill_(0, torch.tensor([0]), 0.2)
            weight.tril_()
            weight[:, 0].fill_(0.3)


@torch.no_grad()
def set_a_row(run: Run) -> None:
    run.model.first.weight[1] = 0.5


@torch.no_grad()
def clear_rows(run: Run) -> None:
    run.model.first.weight[2:5].zero_()


@torch.no_grad()
def draw_in(run: Run) -> None:
    torch.manual_seed(5 + run.steps_taken)
    for weight in run.model.parameters():
        nn.init.normal_(weight, std=0.5) if weight.dim() > 1 else nn.init.uniform_(weight, -0.1, 0.1)
    nn.init.eye_(run.model.first.weight)


@torch.no_grad()
def set_norms(run: Run) -> None:
    """Give each weight a norm of its own, and all of them a factor that follows from a number of all."""
    weights = [weight for weight in run.model.parameters() if weight.dim() > 1]
    total = sum(float(weight.abs().sum()) for weight in weights)
    for weight in weights:
        weight.mul_(1.5 / weight.norm())
        weight.mul_(1.0 / (1.0 + 1e-3 * total))


def average(run: Run) -> None:
    torch.optim.swa_utils.AveragedModel(run.model)


def observe(
    rank: int, world: int, model: str, layouts: list[str], each: Callable[[Run], None] | None = None
) -> list[Observed]:
    job = job_of("float64", 3, train={"loss": "cross_entropy", "watch_every": 0})
    source = Source(perturbed(MODELS[model]), loss_of(job), optimizer_of(job), model)
    runs = (traced_run(f"sharded {model}", source, Kinds(15), layout, job, rank, world) for layout in layouts)
    return [follow(run, Kinds(15), job, True, each) for run in runs]


def prove(model: str, layouts: list[str], each: Callable[[Run], None] | None = None) -> None:
    (alone,) = observe(0, 1, model, ["dp=1"], each)
    ranks = pool(2).run(observe, model, layouts, each)
    for index, layout in enumerate(layouts):
        seen = [rank[index] for rank in ranks]
        assert_same(seen, alone, TOLERANCE)
        assert_ledger(seen, layout)


def test_a_block_may_write_into_its_input_and_return_it() -> None:
    prove("InPlace", LAYOUTS)


def test_a_backward_of_the_model_s_own_may_use_weights_that_it_was_given_or_finds() -> None:
    prove("Equation", LAYOUTS)


@pytest.mark.parametrize("write", [copy_in, load_in, write_by_other_operations, draw_in, set_norms])
def test_a_loop_may_write_whole_tensors_into_weights(write: Callable[[Run], None]) -> None:
    prove("Odd", ["dp=2 zero=3", "dp=2 zero=2 offload"], write)


@pytest.mark.parametrize("write", [set_a_row, clear_rows])
def test_a_write_that_would_be_lost_is_refused_in_one_line(write: Callable[[Run], None]) -> None:
    with pytest.raises(
        LayoutError, match=r"a write into a part .* would be lost. Use whole = weight.full_tensor\(\), .*copy_"
    ):
        pool(2).run(observe, "Odd", ["dp=2 zero=3"], write)


def test_a_copy_of_the_model_is_refused_in_one_line() -> None:
    with pytest.raises(
        LayoutError, match=r"a copy of run.model .*Copy it within .*with run.gathered\(\).*run.averaged\(\)"
    ):
        pool(2).run(observe, "Odd", ["dp=2 zero=3"], average)
