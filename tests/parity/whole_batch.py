"""Losses over all samples of a step, their models and data, the plain loop, and how layouts are held against it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import samestep
from samestep import after_step, batch_cat, batch_mean, batch_sum
from samestep.building.loss import cross_entropy
from samestep.building.optimizer import optimizer_of
from samestep.datasets import Batch, batches
from samestep.examination.examine import Source
from samestep.job import Job
from samestep.layout import Layout
from samestep.randomness.mode import Draw, DropoutMode, place_samples
from samestep.runtime.run import Run
from tests.laboratory import TOLERANCE, Observed, assert_ledger, follow, traced_run
from tests.plain import Trained, assert_trained, train_plainly
from tests.pool import pool

STEPS, BATCH, WIDTH = 3, 8, 6


class Views:
    """Two noisy views of a point, and its class."""

    def __init__(self) -> None:
        draw = torch.Generator().manual_seed(1)
        centre = torch.randn(40, WIDTH, generator=draw, dtype=torch.float64)
        self.views = [centre + 0.3 * torch.randn(40, WIDTH, generator=draw, dtype=torch.float64) for _ in range(2)]
        self.classes = torch.randint(3, (40,), generator=draw)

    def __len__(self) -> int:
        return len(self.classes)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"one": self.views[0][index], "two": self.views[1][index], "labels": self.classes[index]}


class Block(nn.Module):
    def __init__(self, dropped: float = 0.0) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH)
        self.drop = nn.Dropout(dropped)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.down(torch.tanh(self.up(x))))


class Encoder(nn.Module):
    def __init__(self, dropped: float = 0.0) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(dropped) for _ in range(2))
        self.head = nn.Linear(WIDTH, 4)

    def embed(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Stacked(Encoder):
    """SimCLR: both views one behind the other in one batch."""

    def forward(self, one: Tensor, two: Tensor) -> Tensor:
        return self.embed(torch.cat([one, two]))


class Dropped(Stacked):
    def __init__(self) -> None:
        super().__init__(0.3)


class Clip(Encoder):
    """Pairs of embeddings, and a learned temperature."""

    def __init__(self) -> None:
        super().__init__()
        self.logit_scale = nn.Parameter(torch.tensor(1.0))
        self.text = nn.Linear(WIDTH, 4)

    def forward(self, one: Tensor, two: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return F.normalize(self.embed(one), dim=-1), F.normalize(self.text(two), dim=-1), self.logit_scale.exp()


class Tokens(Encoder):
    """Three rows for each sample, and a part without a gradient."""

    def forward(self, one: Tensor, two: Tensor) -> dict[str, Tensor]:
        rows = self.embed(torch.stack([one, two, one - two], 1)).flatten(0, 1)
        return {"rows": rows, "picked": rows.detach().argmax(-1), "first": rows.unflatten(0, (-1, 3))[:, 0].T}


def simclr(z: Tensor, batch: Any) -> Tensor:
    z = F.normalize(z, dim=-1)
    logits = z @ z.T / 0.5
    logits = logits.masked_fill(torch.eye(len(z), dtype=torch.bool, device=z.device), -1e9)
    targets = torch.arange(len(z), device=z.device).roll(len(z) // 2)
    return F.cross_entropy(logits, targets)


def clip(outputs: Any, batch: Any) -> Tensor:
    image, text, scale = outputs
    logits = scale * image @ text.T
    targets = torch.arange(len(image), device=image.device)
    return (F.cross_entropy(logits, targets) + F.cross_entropy(logits.T, targets)) / 2


def barlow(z: Tensor, batch: Any) -> Tensor:
    one, two = ((part - part.mean(0)) / (part.std(0) + 1e-3) for part in z.chunk(2))
    c = one.T @ two / len(one)
    return (c.diagonal() - 1).square().sum() + 0.01 * (c - c.diagonal().diag()).square().sum()


def triplet(outputs: Any, batch: Any) -> tuple[Tensor, int]:
    """The hardest pair of each sample, by classes; a sum and a count that values decide."""
    z, labels = outputs[: len(batch["labels"])], batch["labels"]
    far = (z[:, None] - z[None]).square().sum(-1)
    alike = labels[:, None] == labels[None]
    hardest = far.masked_fill(~alike, 0).max(1).values - far.masked_fill(alike, 1e9).min(1).values
    lost = F.relu(hardest + 1.0)
    return lost.sum(), max(1, int((lost > 0).sum()))


def of_rows(outputs: Any, batch: Any) -> Tensor:
    """Attention pools of all rows, whose order and picks matter."""
    rows, picked, first = outputs["rows"], outputs["picked"], outputs["first"]
    weight = torch.arange(1, len(rows) + 1, dtype=rows.dtype, device=rows.device)
    spread = (rows * weight[:, None]).std(0).sum() + rows[picked == 1].square().sum() / len(rows)
    return spread + (first @ first.T).square().mean() * (1 + batch["labels"]).prod().to(rows.dtype) ** 0.01


def terms(outputs: Any, batch: Any) -> Any:
    """Terms with counts that values decide, and a value to report."""
    image, text, scale = outputs
    logits, labels = scale * image @ text.T, batch["labels"]
    alike = labels[:, None] == labels[None]
    near = (logits > 0).sum()
    right = (logits.argmax(1) == torch.arange(len(image), device=image.device)).sum()
    found = {"alike": (logits[alike].square().sum(), alike.sum()), "near": (F.softplus(logits).sum(), near)}
    return found, {"right": (right, len(image))}


@dataclass(frozen=True)
class Case:
    model: Callable[[], nn.Module]
    loss: Callable[[Any, Any], Any]


CASES = {
    "dropout": Case(Dropped, samestep.whole_batch(simclr)),
    "clip": Case(Clip, samestep.whole_batch(clip)),
    "barlow": Case(Stacked, samestep.whole_batch(barlow)),
    "triplet": Case(Stacked, samestep.whole_batch(triplet)),
    "terms": Case(Clip, samestep.whole_batch(terms)),
    "rows": Case(Tokens, samestep.whole_batch(of_rows)),
}
WHOLE = [*CASES]
"""Those whose loss is over all samples; other files enter more."""


def job(batch: int = BATCH, **tables: Any) -> Job:
    train = {"global_batch": batch, "steps": STEPS, "watch_every": 0, **tables.pop("train", {})}
    return Job(
        train=train,
        numerics={"precision": "float64", **tables.pop("numerics", {})},
        optimizer={"name": "sgd", "lr": 0.1, "options": {"momentum": 0.9}, "clip_norm": 2.0},
        **tables,
    )


def run_of(rank: int, world: int, name: str, layout: str, batch: int = BATCH, part: str = "") -> Run:
    """Return a run, in which a part is compiled if one is named."""
    case, settings = CASES[name], job(batch)
    if part:
        run = {"compile": part, "compile_backend": "aot_eager"}
        settings = Job(**{**settings.model_dump(), "run": run})
    source = Source(case.model, case.loss, optimizer_of(settings), name)
    return traced_run(("whole batch", name), source, Views(), layout, settings, rank, world)


def observe(rank: int, world: int, name: str, layout: str, *how: Any) -> tuple[list[float], State, Observed, Any]:
    run = run_of(rank, world, name, layout, *how)
    seen = follow(run, Views(), run.job, record=True)
    return seen.losses, run.state_dict(on_every_rank=True), seen, run.evaluate(next(batches(Views(), job(20))))


State = dict[str, Tensor]


@functools.cache
def plain(name: str, batch: int) -> Trained:
    """Train in a loop without samestep, which draws random numbers as the run does."""
    run = run_of(0, 1, name, "dp=1", batch)
    run.prepare(next(batches(Views(), job(batch))).samples([0]))
    case, settings = CASES[name], job(batch)
    model, loss = case.model().double(), getattr(case.loss, "__wrapped__", case.loss)
    model.load_state_dict(run.state_dict())
    place_samples(model, run.program.step.model.masks)

    def of_step(step: Batch) -> Any:
        given = step.samples(step.indices)
        with DropoutMode(model, Draw(settings.train.seed, step.step, torch.as_tensor(step.indices))):
            return loss(model(given["one"], given["two"]), given)

    trained = [param for param in model.parameters() if param.requires_grad]
    return train_plainly(
        model, batches(Views(), settings), of_step, torch.optim.SGD(trained, lr=0.1, momentum=0.9), 2.0
    )


def prove(name: str, layout: str, batch: int, part: str = "", like: str = "") -> list[Any]:
    """Hold a layout against the plain loop of a case, or of another one; return what its ranks have."""
    world = Layout(layout).world_size
    given = name, layout, batch, part
    ranks = pool(world).run(observe, *given) if world > 1 else [observe(0, 1, *given)]
    assert_trained(ranks, plain(like or name, batch), TOLERANCE, TOLERANCE)
    if world > 1:
        assert_ledger([seen for _, _, seen, _ in ranks], layout)
    return [held_out for *_, held_out in ranks]


# -- values of all samples, by name ----------------------------------------------------------------


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
