"""Losses that are no sum over samples, several terms, values for the log, and losses that the forward returns."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import permutations
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import samestep
from benchmarks.script_kinds.kind import DATA, Kind, Port, Table, numbers, usual, whole_numbers


class Block(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 16), nn.Linear(16, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Encoder(nn.Module):
    def __init__(self, out: int = 8) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(8, out)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def points() -> Table:
    return Table(x=numbers(32, 8), labels=whole_numbers(4, 32))


# -- losses over the whole batch --------------------------------------------------------------------


class TwoViews(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = Encoder()

    def forward(self, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
        return self.encoder(first), self.encoder(second)


def views() -> Table:
    return Table(first=numbers(32, 8), second=numbers(32, 8) + 0.3 * numbers(32, 8, seed=1))


def nt_xent(outputs: tuple[Tensor, Tensor], batch: Any) -> Tensor:
    """SimCLR (Chen et al. 2020)."""
    z = F.normalize(torch.cat(outputs), dim=1)
    similarity = (z @ z.T / 0.5).masked_fill(torch.eye(len(z), dtype=torch.bool, device=z.device), -1e9)
    half = len(z) // 2
    return F.cross_entropy(similarity, torch.arange(len(z), device=z.device).roll(half))


class Clip(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.image, self.text = Encoder(), Encoder()
        self.logit_scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, image: Tensor, text: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        features = F.normalize(self.image(image), dim=-1), F.normalize(self.text(text), dim=-1)
        return *features, self.logit_scale.exp()


def clip_loss(outputs: tuple[Tensor, Tensor, Tensor], batch: Any) -> Tensor:
    """CLIP (Radford et al. 2021)."""
    image, text, scale = outputs
    logits = scale * image @ text.T
    labels = torch.arange(len(logits), device=logits.device)
    return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2


def siglip_loss(outputs: tuple[Tensor, Tensor, Tensor], batch: Any) -> Tensor:
    """SigLIP (Zhai et al. 2023)."""
    image, text, scale = outputs
    logits = scale * image @ text.T
    signs = 2 * torch.eye(len(logits), device=logits.device, dtype=logits.dtype) - 1
    return -F.logsigmoid(signs * logits).sum() / len(logits)


def barlow(outputs: tuple[Tensor, Tensor], batch: Any) -> Tensor:
    """Barlow Twins (Zbontar et al. 2021)."""
    first, second = ((z - z.mean(0)) / z.std(0) for z in outputs)
    cross = first.T @ second / len(first)
    return (cross.diagonal() - 1).pow(2).sum() + 0.005 * (cross.pow(2).sum() - cross.diagonal().pow(2).sum())


def vicreg(outputs: tuple[Tensor, Tensor], batch: Any) -> Tensor:
    """VICReg (Bardes et al. 2022)."""
    loss = 25 * F.mse_loss(*outputs)
    for z in outputs:
        centred = z - z.mean(0)
        covariance = centred.T @ centred / (len(z) - 1)
        loss = loss + 25 * F.relu(1 - torch.sqrt(z.var(0) + 1e-4)).mean()
        loss = loss + (covariance.pow(2).sum() - covariance.diagonal().pow(2).sum()) / z.shape[1]
    return loss


def triplet(outputs: Tensor, batch: Any) -> Tensor:
    """The hardest pairs of a batch (Hermans et al. 2017)."""
    labels, distance = batch["labels"], torch.cdist(outputs, outputs)
    same = labels[:, None] == labels[None]
    positive = distance.masked_fill(~same, 0).amax(1)
    negative = distance.masked_fill(same, 1e9).amin(1)
    return F.relu(positive - negative + 0.3).mean()


def dice(outputs: Tensor, batch: Any) -> Tensor:
    """The overlap over all pixels of a batch, as `segmentation_models` has it."""
    p, y = outputs.sigmoid(), batch["labels"]
    return 1 - (2 * (p * y).sum() + 1) / (p.sum() + y.sum() + 1)


class Segmenter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 1, 3, padding=1))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)[:, 0]


class ActorCritic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.actor, self.critic = Encoder(), nn.Linear(8, 3), nn.Linear(8, 1)

    def forward(self, obs: Tensor) -> dict[str, Tensor]:
        hidden = torch.tanh(self.body(obs))
        return {"logits": self.actor(hidden), "value": self.critic(hidden)[:, 0]}


def rollout() -> Table:
    return Table(
        obs=numbers(32, 8), action=whole_numbers(3, 32), old=numbers(32, seed=2) * 0.1 - 1.0,
        advantage=numbers(32, seed=3), ret=numbers(32, seed=4), labels=whole_numbers(3, 32),
    )  # fmt: skip


class Policy(ActorCritic):
    def forward(self, obs: Tensor, **rest: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        return super().forward(obs)


def cleanrl_ppo(outputs: dict[str, Tensor], batch: Any) -> Tensor:
    """PPO with advantages that are normalized over the minibatch (CleanRL)."""
    dist = torch.distributions.Categorical(logits=outputs["logits"])
    advantage = (batch["advantage"] - batch["advantage"].mean()) / (batch["advantage"].std() + 1e-8)
    ratio = (dist.log_prob(batch["action"]) - batch["old"]).exp()
    policy = torch.max(-advantage * ratio, -advantage * ratio.clamp(0.8, 1.2)).mean()
    value = 0.5 * (outputs["value"] - batch["ret"]).square().mean()
    return policy - 0.01 * dist.entropy().mean() + 0.5 * value


def ppo_lm(outputs: Tensor, batch: Any) -> Tensor:
    """PPO for a language model: advantages are whitened over all tokens that the mask counts (TRL)."""
    logprob = outputs.log_softmax(-1).gather(-1, batch["action"][..., None])[..., 0]
    mask, advantage = batch["mask"], batch["advantage"]
    mean = (advantage * mask).sum() / mask.sum()
    variance = ((advantage - mean).square() * mask).sum() / mask.sum()
    advantage = (advantage - mean) * torch.rsqrt(variance + 1e-8)
    ratio = (logprob - batch["old"]).exp()
    losses = torch.max(-advantage * ratio, -advantage * ratio.clamp(0.8, 1.2))
    return (losses * mask).sum() / mask.sum()


class Tokenwise(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = Encoder(5)

    def forward(self, x: Tensor, **rest: Tensor) -> Tensor:
        return self.encoder(x)


def completions() -> Table:
    return Table(
        x=numbers(32, 6, 8), action=whole_numbers(5, 32, 6), old=numbers(32, 6, seed=2) * 0.1 - 1.6,
        advantage=numbers(32, 6, seed=3), mask=(numbers(32, 6, seed=4) > -0.5).double(), labels=whole_numbers(5, 32),
    )  # fmt: skip


# -- several terms, and values for the log ----------------------------------------------------------


class Detr(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.queries = nn.Parameter(torch.randn(3, 8) * 0.5)
        self.classes, self.boxes = nn.Linear(8, 4), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        h = x[:, None] + self.queries
        for block in self.blocks:
            h = block(h)
        return {"logits": self.classes(h), "boxes": self.boxes(h).sigmoid()}


def scenes() -> Table:
    classes = whole_numbers(3, 32, 2)
    classes[::3, 1] = -1  # one object instead of two
    return Table(x=numbers(32, 8), labels=torch.cat([classes.double(), numbers(32, 8, seed=1).sigmoid()], 1))


def matched(outputs: dict[str, Tensor], batch: Any) -> tuple[Tensor, Tensor, int, int]:
    """Return the sums of a class and a box loss over a matching of the least cost, and what they count (Carion et al. 2020)."""
    total_class, total_box, num_boxes = 0.0, 0.0, 0
    for logits, boxes, row in zip(outputs["logits"], outputs["boxes"], batch["labels"], strict=True):
        classes = [int(one) for one in row[:2] if one >= 0]
        wanted = row[2:].view(2, 4)[: len(classes)].to(boxes.dtype)
        with torch.no_grad():
            cost = (torch.cdist(boxes, wanted, p=1) - logits.softmax(-1)[:, classes]).tolist()
            best = min(permutations(range(3), len(classes)), key=lambda q: sum(cost[a][b] for b, a in enumerate(q)))
        target = torch.full((3,), 3)
        for query, kind in zip(best, classes, strict=True):
            target[query] = kind
        total_class = total_class + F.cross_entropy(logits, target.to(logits.device), reduction="sum")
        total_box = total_box + (boxes[list(best)] - wanted).abs().sum()
        num_boxes += len(classes)
    return total_class, total_box, 3 * len(batch["labels"]), num_boxes  # type: ignore[return-value]


def detr_loss(outputs: dict[str, Tensor], batch: Any) -> Tensor:
    classes, boxes, num_queries, num_boxes = matched(outputs, batch)
    return classes / num_queries + 5 * boxes / num_boxes


def detr_terms(outputs: dict[str, Tensor], batch: Any) -> Any:
    classes, boxes, num_queries, num_boxes = matched(outputs, batch)
    return {"class": (classes, num_queries), "box": (5 * boxes, num_boxes)}


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.kind, self.size = Encoder(), nn.Linear(8, 4), nn.Linear(8, 1)

    def forward(self, x: Tensor, size: Tensor) -> tuple[Tensor, Tensor]:
        h = F.gelu(self.body(x))
        return self.kind(h), self.size(h)[:, 0]


def two_tasks() -> Table:
    labels = whole_numbers(4, 32)
    labels[::3] = -100
    size = numbers(32, seed=1)
    size[::2] = torch.nan
    return Table(x=numbers(32, 8), size=size, labels=labels)


def multi_task(outputs: tuple[Tensor, Tensor], batch: Any) -> Tensor:
    has_size = ~batch["size"].isnan()
    return F.cross_entropy(outputs[0], batch["labels"]) + F.mse_loss(outputs[1][has_size], batch["size"][has_size])


def multi_task_terms(outputs: tuple[Tensor, Tensor], batch: Any) -> Any:
    has_size = ~batch["size"].isnan()
    kinds = F.cross_entropy(outputs[0], batch["labels"], reduction="sum"), (batch["labels"] != -100).sum()
    sizes = F.mse_loss(outputs[1][has_size], batch["size"][has_size], reduction="sum"), has_size.sum()
    return {"kind": kinds, "size": sizes}


def logged_accuracy(given: Port, model: nn.Module) -> None:
    """The loop logs the accuracy of each step, which the plain loop adds to its losses."""

    def loss(outputs: Tensor, batch: Any) -> Any:
        right = (outputs.argmax(-1) == batch["labels"]).sum()
        return (
            F.cross_entropy(outputs, batch["labels"], reduction="sum"),
            len(outputs),
            {"accuracy": (right, len(outputs))},
        )

    run = given.parallelize(model, loss, lambda params: torch.optim.AdamW(params, lr=1e-3))
    for batch in given.batches():
        report = run.step(batch)
        given.losses += [report.loss, report.values["accuracy"]]


def logged_accuracy_plain(model: nn.Module, batches: list[Any]) -> list[float]:
    optimizer, found = torch.optim.AdamW(model.parameters(), lr=1e-3), []
    for batch in batches:
        outputs = model(batch["x"])
        loss = F.cross_entropy(outputs, batch["labels"])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found += [loss.item(), (outputs.argmax(-1) == batch["labels"]).double().mean().item()]
    return found


def loss_parts(given: Port, model: nn.Module) -> None:
    def loss(outputs: Tensor, batch: Any) -> Any:
        squared, absolute = (outputs - batch["labels"][:, None]).square(), outputs.abs()
        parts = {"fit": (squared.sum(), squared.numel()), "penalty": (absolute.sum(), absolute.numel())}
        return squared.sum() + 0.1 * absolute.sum(), squared.numel(), parts

    run = given.parallelize(model, loss, lambda params: torch.optim.AdamW(params, lr=1e-3))
    for batch in given.batches():
        report = run.step(batch)
        given.losses += [report.loss, report.values["fit"], report.values["penalty"]]


def loss_parts_plain(model: nn.Module, batches: list[Any]) -> list[float]:
    optimizer, found = torch.optim.AdamW(model.parameters(), lr=1e-3), []
    for batch in batches:
        outputs = model(batch["x"])
        fit, penalty = (outputs - batch["labels"][:, None]).square().mean(), outputs.abs().mean()
        optimizer.zero_grad()
        (fit + 0.1 * penalty).backward()
        optimizer.step()
        found += [(fit + 0.1 * penalty).item(), fit.item(), penalty.item()]
    return found


# -- losses that the forward returns ----------------------------------------------------------------


class Transformers(nn.Module):
    """A forward as those of transformers: labels in, an object with `loss` out."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Encoder(4)

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        logits = self.body(x)
        return {"loss": None if labels is None else F.cross_entropy(logits, labels), "logits": logits}


class Attributes(Transformers):
    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        return SimpleNamespace(**super().forward(x, labels))


class Nanogpt(Transformers):
    """A forward as that of nanoGPT: logits and loss as a tuple, the loss second; here the loss first, as in modded-nanogpt."""

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        logits = self.body(x)
        return F.cross_entropy(logits, labels)  # type: ignore[arg-type]


class Autocast(nn.Module):
    """A wrapper that returns the loss, and leaves autocast within (x-transformers)."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Encoder(4)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            logits = self.net(x)
        return F.cross_entropy(logits, labels)


class Masked(nn.Module):
    """A loss over the patches that are hidden (MAE), which the data says here."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Encoder(8)

    def forward(self, x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        pred = self.net(x * (1 - mask)[..., None])
        loss = (pred - x).square().mean(-1)
        return (loss * mask).sum() / mask.sum(), pred


def patches() -> Table:
    mask = torch.zeros(32, 4, dtype=torch.float64)
    mask[:, :2] = 1.0
    return Table(x=numbers(32, 4, 8), mask=mask)


def returned(name: str, build: Any, data: Any = points, labels: bool = True, **more: Any) -> Kind:
    """A script of which the forward returns the loss."""

    def loss_of(found: Any) -> Tensor:
        if isinstance(found, Mapping):
            return found["loss"]
        if isinstance(found, tuple):
            return found[0]
        return getattr(found, "loss", found)

    def plain(model: nn.Module, batches: list[Any]) -> list[float]:
        optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-3), []
        for batch in batches:
            loss = loss_of(model(**batch))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    def port(given: Port, model: nn.Module) -> None:
        run = given.parallelize(model, "model", lambda params: torch.optim.AdamW(params, lr=1e-3))
        for batch in given.batches():
            given.losses.append(run.step(batch).loss)

    return Kind(name, build, data, plain, port, **more)


def summed_cross_entropy(outputs: Tensor, batch: Any) -> tuple[Tensor, int]:
    return F.cross_entropy(outputs, batch["labels"], reduction="sum"), len(outputs)


def whole(loss: Any) -> Any:
    """The line of the port: the script's own loss, over the outputs of all samples of the step."""
    return lambda: samestep.whole_batch(loss)


def classes_over_images() -> Table:
    return Table(x=numbers(32, 1, 6, 6), labels=(numbers(32, 6, 6, seed=1) > 0).double())


KINDS = [
    usual("SimCLR", TwoViews, views, nt_xent, whole(nt_xent)),
    usual("CLIP", Clip, lambda: Table(image=numbers(32, 8), text=numbers(32, 8, seed=1)), clip_loss, whole(clip_loss)),
    usual(
        "SigLIP",
        Clip,
        lambda: Table(image=numbers(32, 8), text=numbers(32, 8, seed=1)),
        siglip_loss,
        whole(siglip_loss),
    ),
    usual("Barlow Twins", TwoViews, views, barlow, whole(barlow)),
    usual("VICReg", TwoViews, views, vicreg, whole(vicreg)),
    usual("triplets of a batch", Encoder, points, triplet, whole(triplet)),
    usual("dice of a batch", Segmenter, classes_over_images, dice, whole(dice), layouts=DATA),
    usual("PPO (CleanRL)", Policy, rollout, cleanrl_ppo, whole(cleanrl_ppo)),
    usual("PPO of a language model", Tokenwise, completions, ppo_lm, whole(ppo_lm)),
    usual("DETR", Detr, scenes, detr_loss, detr_terms),
    usual("several tasks", TwoHeads, two_tasks, multi_task, multi_task_terms),
    Kind("accuracy in the log", lambda: Encoder(4), points, logged_accuracy_plain, logged_accuracy),
    Kind("parts of a loss in the log", Encoder, points, loss_parts_plain, loss_parts),
    usual(
        "mean as the loss", lambda: Encoder(4), points, lambda o, b: F.cross_entropy(o, b["labels"]), "cross_entropy"
    ),
    returned("loss of transformers", Transformers),
    returned("loss of an object", Attributes),
    returned("modded-nanogpt", Nanogpt),
    returned("x-transformers", Autocast),
    returned("MAE", Masked, patches),
]
