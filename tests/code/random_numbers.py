"""What draws random numbers, in the forward, the backward, the loss, the optimizer or the data: equal to one device, or refused."""

from __future__ import annotations

import functools
import random
import warnings
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from samestep.runtime.run import Run
from tests.code.rows import Remarked, equal, refused, unproven
from tests.code.vectors import WIDTH, Net, Pairs, allowing, code, loss, nets


class LateDropout(Net):
    """A probability that is raised after the first step."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.0)

    def between(self, h: Tensor) -> Tensor:
        return self.drop(h)


class LateRate(Net):
    """The same with a number of the module's own."""

    drop_rate = 0.0

    def __init__(self) -> None:
        super().__init__()
        self.drop_rate = 0.0

    def between(self, h: Tensor) -> Tensor:
        return F.dropout(h, self.drop_rate, self.training)


def raised(run: Run) -> None:
    for module in run.model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.3
        if isinstance(module, LateRate):
            module.drop_rate = 0.3


class Reseeded(Net):
    """A constant that is drawn in the first forward, and puts the generator back."""

    def __init__(self) -> None:
        super().__init__()
        self.basis: np.ndarray | None = None

    def between(self, h: Tensor) -> Tensor:
        if self.basis is None:
            self.basis = np.random.default_rng(3).standard_normal((8, 8))
        return h @ torch.from_numpy(self.basis).to(h)


def _drop(h: Tensor) -> Tensor:
    return F.dropout(h, 0.3, True)


with warnings.catch_warnings():
    warnings.filterwarnings("ignore", "`torch.jit.script` is deprecated")  # of one class or another, by version
    _SCRIPTED = torch.jit.script(_drop)


class NoisyGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, h: Tensor) -> Tensor:
        return h.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad + 0.1 * torch.empty_like(grad).normal_()


class NoiseAfterWarmUp(Net):
    """Noise in later steps alone, as exploration has it."""

    scale = 0.0

    def between(self, h: Tensor) -> Tensor:
        return h + self.scale * torch.randn_like(h) if self.scale else h


class DrawnInParts(Net):
    def between(self, h: Tensor) -> Tensor:
        first, second = torch.rand(2 * len(h), h.shape[1], dtype=h.dtype).chunk(2)
        return h * first + torch.tanh(h) * second


def noisy(run: Run) -> None:
    run.model.scale = 0.1


class PythonNoiseAfterWarmUp(NoiseAfterWarmUp):
    """The same of Python's generator."""

    def between(self, h: Tensor) -> Tensor:
        return h + self.scale * random.random() if self.scale else h


class MultipleOf624(Net):
    """So many numbers that the generator's position is what it was."""

    def between(self, h: Tensor) -> Tensor:
        random.getrandbits(32 * 624)
        return h


def noisy_loss(outputs: Any, batch: Any) -> Any:
    total, count = loss(outputs, batch)
    return total * (1 + 0.1 * np.random.rand()), count


class NoisySGD(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for param in group["params"]:
                param.grad.add_(0.01 * torch.randn_like(param))
        return super().step()


class OwnNoise(Pairs):
    """Features with noise of a generator that the data set holds, which no layout shares."""

    def __init__(self, tokens: bool = True) -> None:
        super().__init__(tokens)
        self.own = np.random.default_rng(0)

    def __getitem__(self, index: int) -> Any:
        x, y = super().__getitem__(index)
        return x + self.own.standard_normal(), y


class SeededByIndex(Pairs):
    """Noise as a function of the index: from its own generator, and from the process's, which it seeds."""

    def __getitem__(self, index: int) -> Any:
        x, y = super().__getitem__(index)
        random.seed(index)
        noise = np.random.default_rng(index).standard_normal(WIDTH)
        return x + 0.1 * torch.from_numpy(noise) * random.random(), y


def noisy_sgd(named: list[tuple[str, Tensor]]) -> torch.optim.Optimizer:
    return NoisySGD([tensor for _, tensor in named], lr=0.3)


def rows_drawn(times: int, h: Tensor) -> Tensor:
    return torch.randn(times * len(h), h.shape[1], dtype=h.dtype)


NETS = nets(
    # Several draws for each sample, as rows of one tensor: whether those of a sample are side by side shows at their use.
    Drawn=lambda _, h: torch.tanh(h + rows_drawn(3, h).view(3, len(h), -1)).mean(0),
    DrawnForCopies=lambda _, h: torch.tanh(h.repeat(2, 1) + rows_drawn(2, h)).view(2, len(h), -1).sum(0),
    DrawnSideBySide=lambda _, h: torch.tanh(h[:, None] + rows_drawn(3, h).view(len(h), 3, -1)).mean(1),
    # Noise that is no random number: a function of the features.
    OwnGenerator=lambda _, h: h + 0.1 * torch.sin(h.detach() * 1e4),
    Aten=lambda net, h: torch.ops.aten.dropout(h, 0.3, net.training),
    Scripted=lambda _, h: _SCRIPTED(h),  # dropout in a scripted function, which no function mode sees
    NumpyNoise=lambda _, h: h * float(np.random.uniform(0.5, 1.5)),
    PythonNoise=lambda _, h: h if random.random() < 0.5 else 2 * h,
    BackwardNoise=lambda _, h: NoisyGradient.apply(h),
)
_OWN = functools.partial(OwnNoise, tokens=False)
_LATE_PYTHON = code(PythonNoiseAfterWarmUp, "warmed up", each=noisy)
_WARM = code(NoiseAfterWarmUp, "warmed up", each=noisy)
_NOISY_SGD = code(Net, "with noise in the optimizer", optimizer=noisy_sgd)
EQUAL = [
    *equal(code(LateDropout, "raised", each=raised), "dp=1 microbatch=2"),
    *equal(code(LateRate, "raised", each=raised), "dp=2"),
    *(row for build in (NETS["OwnGenerator"], Reseeded) for row in equal(code(build), "dp=2 zero=3 microbatch=1")),
    *equal(code(NETS["Drawn"]), "dp=2"),
    *(
        row
        for build in (DrawnInParts, NETS["DrawnForCopies"], NETS["DrawnSideBySide"])
        for row in equal(code(build), "dp=1 microbatch=2")
    ),
    *equal(code(Net, "of samples seeded by the index", data=functools.partial(SeededByIndex, tokens=False)), "dp=2"),
]
REFUSED = [
    *unproven("step 1: .*the forward draws .* torch", "random", code(NETS["Aten"]), "dp=1"),
    *unproven("step 1: .*the forward draws .* torch", "random", code(NETS["Scripted"]), "dp=2"),
    *unproven("step 1: .*the forward draws .* numpy", "random", code(NETS["NumpyNoise"]), "dp=2"),
    *unproven("step 1: .*the forward draws .* Python", "random", code(NETS["PythonNoise"]), "dp=1"),
    *unproven("step 1: .*the forward draws .* Python", "random", code(MultipleOf624), "dp=1"),
    *unproven("step 1: .*a backward draws .* torch", "random", code(NETS["BackwardNoise"]), "dp=1"),
    *refused(r"by the gradient of NoisyGradient.*run\.allow = \[\"samples\"\]", code(NETS["BackwardNoise"]), "dp=2"),
    *unproven("step 2: .*the forward draws", "random", _WARM, "dp=2"),
    *unproven("step 2: .*the forward draws .* Python", "random", _LATE_PYTHON, "dp=2 microbatch=1"),
    *unproven("a loss or a backward draws", "random", code(Net, "with noise in the loss", loss=noisy_loss), "dp=2"),
    *refused("NoisySGD draws random numbers", _NOISY_SGD, "dp=2"),
    *unproven("of the data set is another one", "data", code(Net, "of samples with own noise", data=_OWN), "dp=2"),
]
REMARKED = [
    Remarked("dp=1", _NOISY_SGD, "the optimizer draws"),
    Remarked("dp=1", code(NoiseAfterWarmUp, "allowed", each=noisy, job=allowing("random")), "draws random numbers"),
]
