"""Models and losses that take sums and rows of all samples by name, with state that follows from them."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from samestep import after_step, batch_cat, batch_mean, batch_sum
from samestep.building.loss import cross_entropy
from tests.parity.whole_batch import CASES, WIDTH, Block, Case, Encoder


class Centred(Encoder):
    """Features less their mean, scaled by their spread, and attention over the samples of the batch."""

    def forward(self, one: Tensor, two: Tensor) -> Tensor:
        x = one
        for block in self.blocks:
            x = block(x)
            centred = x - batch_mean(x)
            x = centred / (batch_mean(centred.square()) + 0.1).sqrt()
        keys, near = batch_cat(self.head(two)), self.head(x)
        return (near @ keys.T).softmax(-1) @ keys + near / (1 + batch_sum(near.square()))


class Teacher(Encoder):
    """DINO: targets of a frozen head, less a centre that follows their mean."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.Linear(WIDTH, 4)
        self.teacher.requires_grad_(False)
        self.register_buffer("centre", torch.zeros(4))

    def forward(self, one: Tensor, two: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            target = self.teacher(two)
            share = ((target - self.centre) / 0.5).softmax(-1)
            self.follow(batch_mean(target))
        return self.embed(one), share

    def follow(self, mean: Tensor) -> None:
        if self.training:
            self.centre.mul_(0.9).add_(0.1 * mean)


class Queue(Encoder):
    """MoCo: a queue of the keys of earlier steps."""

    def __init__(self) -> None:
        super().__init__()
        self.key = nn.Linear(WIDTH, 4)
        self.key.requires_grad_(False)
        draw = torch.Generator().manual_seed(3)
        self.register_buffer("queue", torch.randn(16, 4, generator=draw))

    def forward(self, one: Tensor, two: Tensor) -> Tensor:
        with torch.no_grad():
            key = F.normalize(self.key(two), dim=-1)
        query = F.normalize(self.embed(one), dim=-1)
        logits = torch.cat([(query * key).sum(-1, keepdim=True), query @ self.queue.clone().T], 1) / 0.2
        with torch.no_grad():
            self.follow(torch.cat([batch_cat(key), self.queue])[: len(self.queue)])
        return logits

    def follow(self, queue: Tensor) -> None:
        if self.training:
            self.queue.copy_(queue)


class LaterTeacher(Teacher):
    """DINO, whose centre follows once the step is made."""

    def follow(self, mean: Tensor) -> None:
        after_step(self.centre, 0.9 * self.centre + 0.1 * mean)


class LaterQueue(Queue):
    def follow(self, queue: Tensor) -> None:
        after_step(self.queue, queue)


class LaterBlock(Block):
    """A block with a count and a spread of its own, which its code reads."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("spread", torch.ones(WIDTH))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            after_step(self.spread, (self.spread + batch_mean(x.detach().square()).sqrt()) / 2)
            after_step(self.steps, self.steps + 1)
        return super().forward(x / self.spread) * (1 + 0.01 * self.steps.to(x.dtype))


class Plain(Encoder):
    def forward(self, one: Tensor, two: Tensor) -> Tensor:
        return self.embed(one)


class LaterBlocks(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(LaterBlock() for _ in range(2))


class LaterSeen(Encoder):
    """A mean that follows the batch alone, and one that follows the outputs and is read in front of the blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(WIDTH))
        self.register_buffer("near", torch.zeros(4))

    def forward(self, one: Tensor, two: Tensor) -> Tensor:
        after_step(self.seen, (self.seen + batch_mean(two)) / 2)
        z = self.embed(one - self.seen + 0.1 * self.near.sum())
        after_step(self.near, (self.near + batch_mean(z.detach())) / 2)
        return z - self.near


def to_class(outputs: Any, batch: Any) -> tuple[Tensor, Tensor]:
    return cross_entropy(outputs, batch)


def to_share(outputs: Any, batch: Any) -> tuple[Tensor, int]:
    student, share = outputs
    return -(share * (student / 0.3).log_softmax(-1)).sum(), len(student)


def to_first(logits: Tensor, batch: Any) -> tuple[Tensor, int]:
    return -logits.log_softmax(-1)[:, 0].sum(), len(logits)


def whitened(logits: Tensor, batch: Any) -> tuple[Tensor, int]:
    """PPO: advantages less their mean over the batch, divided by their spread."""
    gain = batch["two"].sum(-1)
    centred = gain - batch_mean(gain)
    gain = centred / (batch_mean(centred.square()) + 1e-8).sqrt()
    chosen = logits.log_softmax(-1).gather(1, batch["labels"][:, None])[:, 0]
    entropy = batch_mean(logits.softmax(-1))
    return -(gain * chosen).sum() + (logits.softmax(-1) * entropy).sum(), len(logits)


VALUES = {
    "centred": Case(Centred, to_class),
    "teacher": Case(Teacher, to_share),
    "queue": Case(Queue, to_first),
    "whitened": Case(Plain, whitened),
    "later teacher": Case(LaterTeacher, to_share),
    "later queue": Case(LaterQueue, to_first),
    "later seen": Case(LaterSeen, to_class),
    "later blocks": Case(LaterBlocks, to_class),
}
CASES |= VALUES
