"""Forwards that take gradients, use the transforms of `torch.func`, or other weights than their own: equal, or refused by name."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from samestep.errors import InputError
from tests.covering import daily
from tests.laboratory import TOLERANCE, assert_same, clipped, observe, on_ranks, reference
from tests.models import MODELS, VOCABULARY

WIDTH = 8


class Language(nn.Module):
    """Embedding, residual blocks, head."""

    def __init__(self, block: Callable[[], nn.Module] | None = None, number: int = 4) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        make = block or (lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()))
        self.blocks = nn.ModuleList(make() for _ in range(number))

    def through(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.through(self.embed(input_ids))


# -- gradients within a forward --------------------------------------------------------------------


class Perturbed(Language):
    """Adversarial training of embeddings (FGM): the forward runs again where its own gradient leads."""

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        outputs = self.through(x)
        (gradient,) = torch.autograd.grad(outputs.square().sum(), x, create_graph=True)
        return outputs + self.through(x + 0.1 * gradient)


class Likely(Language):
    """Steps up the likelihood of each token, by the sign of the gradient of a mean (PGD): the divisor is taken away again."""

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        moved = x.detach()
        for _ in range(2):
            moved.requires_grad_()
            loss = F.cross_entropy(self.through(moved).flatten(0, 1), input_ids.flatten())
            (gradient,) = torch.autograd.grad(loss, moved)
            moved = (moved + 0.1 * gradient.sign()).detach()
        return self.through(x + moved - x.detach())


class RunsBackward(Language):
    """The same by a backward of its own, whose gradients of weights a loop clears (`clears`)."""

    clears = True

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        moved = nn.Parameter(x.detach().clone())
        F.mse_loss(
            self.through(moved), torch.ones(VOCABULARY, device=x.device, dtype=x.dtype).expand(*x.shape[:2], -1)
        ).backward()
        gradient = moved.grad
        assert gradient is not None
        if self.clears:
            self.zero_grad(set_to_none=len(x) % 2 == 0)
        return self.through(x + 0.1 * gradient.sign())


class LeavesGradients(RunsBackward):
    clears = False


class Energy(nn.Module):
    """A step along the gradient of a learned energy."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 12), nn.Linear(12, 1)

    def energy(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x))).sum()

    def forward(self, x: Tensor) -> Tensor:
        (gradient,) = torch.autograd.grad(self.energy(x), x, create_graph=True)
        return 0.1 * gradient


class EnergyOfTransform(Energy):
    def forward(self, x: Tensor) -> Tensor:
        return 0.1 * torch.func.grad(self.energy)(x)


class Directional(Energy):
    def forward(self, x: Tensor) -> Tensor:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # torch's own, where it first needs a derivative
            _, tangent = torch.func.jvp(self.up, (x,), (torch.ones_like(x),))
        return self.down(torch.tanh(tangent))


# -- vmap ------------------------------------------------------------------------------------------


class OneByOne(Language):
    def through(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + torch.vmap(block)(x)
        return self.head(x)


class Between(Language):
    def through(self, x: Tensor) -> Tensor:
        return super().through(torch.vmap(lambda one: one * one.std())(x))


class Ensemble(Language):
    """Several small networks at once, whose weights are stacked."""

    def __init__(self) -> None:
        super().__init__()
        self.many = nn.Parameter(torch.randn(3, WIDTH, WIDTH) * 0.3)

    def through(self, x: Tensor) -> Tensor:
        apart = torch.vmap(lambda weight, one: torch.tanh(one @ weight), in_dims=(0, None))
        return super().through(apart(self.many, x).mean(0))


class MinusTheBatch(Language):
    def through(self, x: Tensor) -> Tensor:
        return super().through(torch.vmap(lambda one: one - x.mean(0))(x))


class DroppedOneByOne(Language):
    def through(self, x: Tensor) -> Tensor:
        return super().through(torch.vmap(lambda one: F.dropout(one, 0.3), randomness="different")(x))


class Adapted(Language):
    """MAML: every sample takes a step of its own on the weights of a block."""

    def through(self, x: Tensor) -> Tensor:
        block, weights = self.blocks[0], dict(self.blocks[0].named_parameters())

        def loss(weights: dict[str, Tensor], one: Tensor) -> Tensor:
            return torch.func.functional_call(block, weights, (one,)).square().sum()

        def adapted(one: Tensor) -> Tensor:
            gradients = torch.func.grad(loss)(weights, one)
            fast = {name: weight - 0.1 * gradients[name] for name, weight in weights.items()}
            return torch.func.functional_call(block, fast, (one,))

        return super().through(torch.vmap(adapted)(x))


# -- other weights ---------------------------------------------------------------------------------


class FastWeights(Language):
    def through(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            fast = {name: 0.9 * param for name, param in block.named_parameters()}
            x = x + torch.func.functional_call(block, fast, (x,))
        return self.head(x)


class AnotherBias(Language):
    """Blocks are called twice: with a bias that they share, and with their own."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.randn(WIDTH))

    def through(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(torch.func.functional_call(block, {"0.bias": self.shift}, (x,)))
        return self.head(x)


BUILDS: dict[str, Callable[[], nn.Module]] = {
    "perturbed": Perturbed,
    "likely": Likely,
    "runs backward": RunsBackward,
    "leaves gradients": LeavesGradients,
    "energy": functools.partial(Language, Energy),
    "energy of a transform": functools.partial(Language, EnergyOfTransform),
    "directional": functools.partial(Language, Directional),
    "one by one": OneByOne,
    "between": Between,
    "ensemble": Ensemble,
    "minus the batch": MinusTheBatch,
    "dropped one by one": DroppedOneByOne,
    "adapted": Adapted,
    "fast weights": FastWeights,
    "another bias": AnotherBias,
}
MODELS |= {f"transforms {name}": build for name, build in BUILDS.items()}
DATA, PARTS, AGAIN = "dp=2", "dp=2 zero=3 microbatch=1", "dp=1 recompute=full microbatch=4"
PP = "dp=1 pp=2 microbatch=4"
EQUAL = {
    "perturbed": [DATA, PARTS, AGAIN, PP],
    "likely": [DATA, PARTS, AGAIN],
    "runs backward": [DATA, PARTS, AGAIN, "dp=2 zero=1 microbatch=1"],
    "energy": [DATA, PARTS, AGAIN, PP, "dp=2 zero=3 recompute=full"],
    "energy of a transform": [DATA, PARTS, AGAIN, PP],
    "directional": [PARTS, AGAIN, PP],
    "one by one": [DATA, PARTS],
    "between": [PARTS, PP],
    "ensemble": [DATA, PARTS],
    "adapted": [DATA, PARTS],
    "fast weights": [PARTS, AGAIN],
    "another bias": [PARTS, AGAIN, "dp=2 zero=2 microbatch=2"],
}
REFUSED = {
    ("perturbed", "dp=1 recompute=selective"): "takes gradients itself. Use recompute=full",
    ("perturbed", "dp=1 cp=2"): "mixes tokens by sum",
    ("perturbed", "dp=1 tp=2"): "tp=2: the forward at .* takes gradients itself, .*Use .*tp=1",
    ("energy", "dp=1 tp=2"): "tp=2: the forward at .* takes gradients itself, .*Use .*tp=1",
    ("energy", "dp=1 pp=2 microbatch=2 schedule=zero-bubble"): "takes gradients itself. Use schedule=1f1b",
    ("leaves gradients", "dp=1"): "leaves gradients in weights.*Use .*model.zero_grad.. after it",
    ("runs backward", PP): "takes gradients across blocks",
    ("one by one", PP): "no stage can begin with",
    ("ensemble", PP): "a transform of torch.func.* reads many between blocks",
    ("one by one", "dp=1 recompute=full"): r"blocks.0 runs inside of a transform of torch.func .*Use .*recompute=none",
    ("minus the batch", DATA): "lets the samples of a batch influence each other by mean",
    ("dropped one by one", "dp=1"): "inside of a transform of torch.func.*Use .*dropout before or after torch.vmap",
    ("another bias", PP): "Use pp=1",
}


def _row(name: str, layout: str) -> Any:
    """Return a row that names its model, which is traced before ranks are forked."""
    return pytest.param(f"transforms {name}", layout, id=f"{name}-{layout}")


@pytest.mark.parametrize(
    ("model", "layout"), daily(_row(name, layout) for name, layouts in EQUAL.items() for layout in layouts)
)
def test_a_forward_with_gradients_or_transforms_is_equal(model: str, layout: str) -> None:
    assert_same(on_ranks(layout, observe, model, clipped()), reference(model), TOLERANCE)


@pytest.mark.parametrize(("model", "layout"), [_row(*row) for row in REFUSED])
def test_what_a_layout_cannot_carry_out_is_refused_by_name(model: str, layout: str) -> None:
    with pytest.raises(InputError, match=REFUSED[model.removeprefix("transforms "), layout]):
        on_ranks(layout, observe, model, clipped())
