"""Vectors in three classes and short sequences, the networks that learn them, and the job: what the rows of state and random numbers share."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from samestep.job import Job
from tests.code.rows import entered
from tests.laboratory import Code, job_of
from tests.parts import Words

WIDTH, VOCABULARY, LENGTH = 6, 11, 5


class Pairs:
    """Features and classes of samples, and how often each was read."""

    def __init__(self, tokens: bool) -> None:
        draw = torch.Generator().manual_seed(7)
        self.x, self.y = torch.randn(24, WIDTH, generator=draw, dtype=torch.float64), torch.arange(24) % 3
        self.ids, self.tokens = torch.randint(0, VOCABULARY, (24, LENGTH), generator=draw), tokens

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> Any:
        return (
            {"input_ids": self.ids[index], "labels": self.ids[index]} if self.tokens else (self.x[index], self.y[index])
        )


class Net(nn.Module):
    """Two linear layers around what a case does to the features between them."""

    def __init__(self, how: Callable[[Any, Tensor], Tensor] | None = None) -> None:
        super().__init__()
        self.up, self.down, self.how = nn.Linear(WIDTH, 8), nn.Linear(8, 3), how

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.between(self.up(x))))

    def between(self, h: Tensor) -> Tensor:
        return h if self.how is None else self.how(self, h)


def nets(**kinds: Callable[[Any, Tensor], Tensor]) -> dict[str, Any]:
    """Return the build functions of networks by name, each of which does something to the features."""
    made = {name: functools.partial(Net, how) for name, how in kinds.items()}
    for name, build in made.items():
        build.__name__ = name  # type: ignore[attr-defined]
    return made


class Blocks(Words):
    """Tokens through blocks of a case's class."""

    block: Callable[[], nn.Module]

    def __init__(self) -> None:
        super().__init__(self.block, self.block, width=WIDTH, entries=VOCABULARY)

    def through(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = self.run(block, x)
        return x

    def run(self, block: nn.Module, x: Tensor) -> Tensor:
        return block(x)


class Embedded(nn.Module):
    options: dict[str, Any] = {}  # noqa: RUF012

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH, **self.options), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.head(self.embed(input_ids))


def loss(outputs: Any, batch: Any) -> Any:
    labels = batch["labels"] if isinstance(batch, dict) else batch[1]
    return F.cross_entropy(outputs.flatten(0, -2), labels.flatten(), reduction="sum"), labels.numel()


def sgd(named: list[tuple[str, Tensor]]) -> torch.optim.Optimizer:
    return torch.optim.SGD([tensor for _, tensor in named], lr=0.3, momentum=0.9)


JOB = job_of(steps=3, train={"watch_every": 100})
VECTORS, SEQUENCES = functools.partial(Pairs, tokens=False), functools.partial(Pairs, tokens=True)


def allowing(word: str) -> Job:
    return job_of(steps=3, run={"allow": (word,)})


def code(build: Callable[[], nn.Module], how: str = "", **given: Any) -> str:
    """Enter a network into `MODELS` with how it is trained, said in a word or two; return its name there."""
    is_tokenwise = isinstance(build, type) and issubclass(build, (Blocks, Embedded))
    usual: dict[str, Any] = {"data": SEQUENCES if is_tokenwise else VECTORS, "loss": loss, "optimizer": sgd, "job": JOB}
    return entered(f"{build.__name__} {how}".strip(), Code(build, **usual | given))
