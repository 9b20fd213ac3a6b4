"""Models and loops that leave some weights without a gradient in some steps, drawn by a seed, and the plain loop beside them."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from samestep.building.loss import mse
from samestep.datasets import batches
from samestep.examination.examine import Source
from samestep.job import Job
from samestep.layout import Layout
from samestep.runtime.optimizers.optimizer_source import optimizer_source
from samestep.runtime.processes.join import RankInfo
from samestep.runtime.run import Run
from samestep.runtime.step_report import StepReport
from tests.laboratory import device_of_ranks
from tests.parts import Residual
from tests.plain import Trained, train_plainly, whole_batches

STEPS, WIDTH = 5, 6


class Pairs:
    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.x, self.y = (torch.randn(64, size, generator=generator) for size in (WIDTH, 4))

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.x[index], self.y[index]


class Switched(nn.Module):
    """Blocks and a head that a loop leaves out."""

    def __init__(self) -> None:
        super().__init__()
        self.on, self.has_extra = (True,) * 4, True
        self.first, self.head, self.extra = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 4), nn.Linear(WIDTH, 4)
        self.blocks = nn.ModuleList(Residual(WIDTH, 8) for _ in self.on)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for is_on, block in zip(self.on, self.blocks, strict=True):
            x = block(x) if is_on else x
        return self.head(x) + self.extra(x) if self.has_extra else self.head(x)


class Asleep(Switched):
    """A block and a head that the trace does not see."""

    def __init__(self) -> None:
        super().__init__()
        self.on, self.has_extra = (True, True, False, True), False


class Experts(nn.Module):
    """Experts whose rows values pick: some step has none for an expert, and some rank."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 4)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        chosen = (1.5 * x[:, 0] + 3).floor().clamp(0, 5).long()
        out = torch.zeros_like(h)
        for expert in chosen.unique().tolist():
            rows = (chosen == expert).nonzero().flatten()
            out = out.index_add(0, rows, self.experts[expert](h[rows]))
        return self.head(h + out)


class Matched(nn.Module):
    """Two heads, of which the loss looks at the values of one, without gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Residual(WIDTH, 8) for _ in range(2))
        self.box, self.kind = nn.Linear(WIDTH, 4), nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        for block in self.blocks:
            x = block(x)
        return self.box(x), self.kind(x)


def matching(outputs: Any, batch: Any) -> tuple[Any, int]:
    boxes, kinds = outputs
    cost = kinds.detach().softmax(-1)[:, 0].tolist()
    return sum(((boxes[i] - batch[1][i]) ** 2).sum() for i in range(len(cost)) if cost[i] > -1.0), len(cost)


def constant(outputs: Any, batch: Any) -> tuple[Any, Any]:
    """Count the samples of a kind alone: a micro-batch without one has a constant loss, and uses no weight."""
    counted = batch[1][:, 0] > 0.3
    rows = counted.nonzero().flatten()
    if not len(rows):
        return torch.zeros((), dtype=outputs[0].dtype), 0
    return ((outputs[0][rows] - batch[1][rows]) ** 2).sum() + 0.1 * outputs[1][rows].sum(), len(rows)


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[..., Any]]] = {
    "switched": (Switched, mse),
    "asleep": (Asleep, mse),
    "experts": (Experts, mse),
    "matched": (Matched, matching),
    "constant": (Matched, constant),
}
OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=1e-2, weight_decay=0.1),
    "momentum": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9, weight_decay=0.01),
    "nadam": lambda params: torch.optim.NAdam(params, lr=1e-2, weight_decay=0.1),
    "adafactor": lambda params: torch.optim.Adafactor(params, lr=1e-2, weight_decay=0.1),
}


@dataclass(frozen=True)
class Turn:
    """What a loop does before one step."""

    on: tuple[bool, ...] = (True,) * 4
    has_extra: bool = True
    frozen: tuple[str, ...] = ()

    def make(self, model: nn.Module) -> None:
        if hasattr(model, "on"):
            model.on, model.has_extra = self.on, self.has_extra  # type: ignore[assignment]
        for name, param in model.named_parameters():
            param.requires_grad_(not name.startswith(self.frozen) if self.frozen else True)


def turns(kind: str, seed: int, steps: int = STEPS) -> list[Turn]:
    """Return what a loop does in each step: it freezes and thaws layers, or leaves out blocks and a head, or both."""
    draw = random.Random(seed)
    found = []
    for _ in range(steps):
        on = tuple(draw.random() < 0.6 for _ in range(4))
        frozen = tuple(
            f"{name}." for name in ("first", "blocks.0", "blocks.1", "blocks.3", "head") if draw.random() < 0.4
        )
        is_used, is_frozen = kind in ("used", "both"), kind in ("frozen", "both")
        found.append(
            Turn(on if is_used else (True,) * 4, not is_used or draw.random() < 0.6, frozen if is_frozen else ())
        )
    return found


def job(*, clip_norm: float | None = None, precision: str = "float64", device: str = "cpu", **tables: Any) -> Job:
    return Job(
        train={"global_batch": 6, "steps": STEPS, **tables.pop("train", {})},
        numerics={"precision": precision, **tables.pop("numerics", {})},
        optimizer={"clip_norm": clip_norm},
        run={"device": device},
        **tables,
    )


def built(model: str, frozen: str = "") -> nn.Module:
    torch.manual_seed(0)
    module = MODELS[model][0]()
    for name, param in module.named_parameters() if frozen else ():
        param.requires_grad_(not name.startswith(frozen))
    return module


def run_of(
    rank: int, world: int, model: str, layout: str, made: Job, optimizer: Callable[[Any], Optimizer], frozen: str = ""
) -> Run:
    """Return a run of a model given as an instance, whose values it keeps."""
    source = Source(built(model, frozen), MODELS[model][1], optimizer_source(optimizer), model)
    return Run(source, Layout(layout), made, RankInfo(rank, rank, world, world, device_of_ranks()))


def reports(run: Run, plan: list[Turn], first: int = 0) -> Iterator[StepReport]:
    """Take the steps of a loop in a run; yield their reports."""
    for batch in batches(Pairs(), run.job, first_step=first):
        run.prepare(batch.samples(batch.indices[:1]))
        plan[batch.step].make(run._stepper._own.current.model.module)
        yield run.step(batch)


def taken(run: Run, plan: list[Turn], first: int = 0) -> Iterator[float]:
    """Take the steps of a loop in a run; yield their losses."""
    return (report.loss for report in reports(run, plan, first))


@functools.cache
def plain(model: str, clip_norm: float | None, optimizer: str, kind: str, seed: int) -> Trained:
    """Take the steps of a plain torch loop."""
    module, plan = built(model).double(), turns(kind, seed)

    def loss(numbered: tuple[int, Any]) -> Any:
        step, samples = numbered
        plan[step].make(module)
        samples = [tensor.double() for tensor in samples]
        return MODELS[model][1](module(samples[0]), samples)

    batches_of_steps = enumerate(whole_batches(Pairs(), job()))
    return train_plainly(module, batches_of_steps, loss, OPTIMIZERS[optimizer](list(module.parameters())), clip_norm)
