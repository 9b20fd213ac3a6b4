"""What a script keeps from one step to the next: teachers, centres, queues, codebooks, hidden states, layers that begin later."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import samestep
from benchmarks.script_kinds.kind import DATA, Kind, Port, Table, adam, numbers, sgd, usual, whole_numbers
from benchmarks.script_kinds.losses import Block, Encoder, points, views

# -- teachers that follow the student ---------------------------------------------------------------


class Byol(nn.Module):
    """BYOL (Grill et al. 2020): the target follows the online network in the loop."""

    def __init__(self) -> None:
        super().__init__()
        self.online, self.predictor = Encoder(), nn.Linear(8, 8)
        self.target = copy.deepcopy(self.online).requires_grad_(False)

    def forward(self, first: Tensor, second: Tensor) -> tuple[Tensor, ...]:
        with torch.no_grad():
            targets = self.target(second), self.target(first)
        return self.predictor(self.online(first)), self.predictor(self.online(second)), *targets


def byol_loss(outputs: tuple[Tensor, ...], batch: Any) -> Tensor:
    p1, p2, t1, t2 = outputs
    return (2 - 2 * F.cosine_similarity(p1, t1, dim=-1) + 2 - 2 * F.cosine_similarity(p2, t2, dim=-1)).mean()


def byol_sum(outputs: tuple[Tensor, ...], batch: Any) -> tuple[Tensor, int]:
    return byol_loss(outputs, batch) * len(outputs[0]), len(outputs[0])


def follow(model: Any, step: int) -> None:
    for mine, other in zip(model.target.parameters(), model.online.parameters(), strict=True):
        mine.mul_(0.9).add_(0.1 * other)


class Dino(nn.Module):
    """DINO (Caron et al. 2021), whose centre is a moving average of the teacher's mean over the batch; `mean` is the script's."""

    def __init__(self) -> None:
        super().__init__()
        self.online = Encoder()
        self.target = copy.deepcopy(self.online).requires_grad_(False)
        self.register_buffer("center", torch.zeros(8))

    def forward(self, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
        student = self.online(first)
        with torch.no_grad():
            teacher = self.target(second)
        targets = ((teacher - self.center) / 0.04).softmax(-1)
        if self.training:
            self.next_center(teacher)
        return student, targets

    def next_center(self, teacher: Tensor) -> None:
        self.center = self.center * 0.9 + teacher.mean(0) * 0.1


class DinoPort(Dino):
    def next_center(self, teacher: Tensor) -> None:
        samestep.after_step(self.center, self.center * 0.9 + samestep.batch_mean(teacher) * 0.1)


def dino_loss(outputs: tuple[Tensor, Tensor], batch: Any) -> Tensor:
    return -(outputs[1] * (outputs[0] / 0.1).log_softmax(-1)).sum(-1).mean()


def dino_sum(outputs: tuple[Tensor, Tensor], batch: Any) -> tuple[Tensor, int]:
    return -(outputs[1] * (outputs[0] / 0.1).log_softmax(-1)).sum(), len(outputs[0])


class Moco(nn.Module):
    """MoCo (He et al. 2020): a queue of the keys of the last steps."""

    def __init__(self) -> None:
        super().__init__()
        self.online = Encoder()
        self.target = copy.deepcopy(self.online).requires_grad_(False)
        self.register_buffer("queue", F.normalize(torch.randn(16, 8), dim=1))

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        query = F.normalize(self.online(first), dim=1)
        with torch.no_grad():
            key = F.normalize(self.target(second), dim=1)
        logits = torch.cat([(query * key).sum(1, keepdim=True), query @ self.queue.clone().T], dim=1) / 0.2
        if self.training:
            self.enqueue(key)
        return logits

    def enqueue(self, key: Tensor) -> None:
        self.queue = torch.cat([key, self.queue])[:16]


class MocoPort(Moco):
    def enqueue(self, key: Tensor) -> None:
        samestep.after_step(self.queue, torch.cat([samestep.batch_cat(key), self.queue])[:16])


def first_class(outputs: Tensor, batch: Any) -> Tensor:
    return F.cross_entropy(outputs, torch.zeros(len(outputs), dtype=torch.int64, device=outputs.device))


def first_class_sum(outputs: Tensor, batch: Any) -> tuple[Tensor, int]:
    return first_class(outputs, batch) * len(outputs), len(outputs)


class VqVae(nn.Module):
    """A codebook of moving averages (van den Oord et al. 2017, appendix A.1)."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = Encoder(4), nn.Linear(4, 8)
        self.register_buffer("codes", torch.randn(6, 4))
        self.register_buffer("counts", torch.ones(6))
        self.register_buffer("sums", self.codes.clone())

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        z = self.encoder(x)
        picked = F.one_hot(torch.cdist(z, self.codes).argmin(1), 6).to(z.dtype)
        found = picked @ self.codes
        if self.training:
            self.update(picked, z.detach())
        return self.decoder(z + (found - z).detach()), (z - found.detach()).square().mean(-1)

    def update(self, picked: Tensor, z: Tensor) -> None:
        self.counts = self.counts * 0.9 + 0.1 * picked.sum(0)
        self.sums = self.sums * 0.9 + 0.1 * picked.T @ z
        self.codes = self.sums / (self.counts + 1e-5)[:, None]


class VqVaePort(VqVae):
    def update(self, picked: Tensor, z: Tensor) -> None:
        counts = self.counts * 0.9 + 0.1 * samestep.batch_sum(picked)
        sums = self.sums * 0.9 + 0.1 * samestep.batch_sum(picked[:, :, None] * z[:, None])
        samestep.after_step(self.counts, counts)
        samestep.after_step(self.sums, sums)
        samestep.after_step(self.codes, sums / (counts + 1e-5)[:, None])


def vq_loss(outputs: tuple[Tensor, Tensor], batch: Any) -> Tensor:
    return (outputs[0] - batch["x"]).square().mean() + 0.25 * outputs[1].mean()


def vq_sum(outputs: tuple[Tensor, Tensor], batch: Any) -> tuple[Tensor, int]:
    return vq_loss(outputs, batch) * len(outputs[1]), len(outputs[1])


# -- sums over the batch within a forward -----------------------------------------------------------


class Mixture(nn.Module):
    """A mixture of experts with a loss that balances them over the batch (Switch, Fedus et al. 2021)."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.head = nn.Linear(8, 4), nn.Linear(8, 4)
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        weights = self.router(x).softmax(-1)
        picked = F.one_hot(weights.argmax(-1), 4).to(x.dtype)
        mixed = sum((picked * weights)[:, i, None] * expert(x) for i, expert in enumerate(self.experts))
        balance = 4 * (self.mean(picked) * self.mean(weights)).sum()
        return self.head(x + mixed), balance

    def mean(self, x: Tensor) -> Tensor:
        return x.mean(0)


class MixturePort(Mixture):
    def mean(self, x: Tensor) -> Tensor:
        return samestep.batch_mean(x)


def mixture_loss(outputs: tuple[Tensor, Tensor], batch: Any) -> Tensor:
    return F.cross_entropy(outputs[0], batch["labels"]) + 0.1 * outputs[1]


def mixture_sum(outputs: tuple[Tensor, Tensor], batch: Any) -> tuple[Tensor, int]:
    return mixture_loss(outputs, batch) * len(outputs[0]), len(outputs[0])


class AdaptiveOde(nn.Module):
    """An integrator whose steps follow the error over the whole batch, as torchdiffeq's do."""

    def __init__(self) -> None:
        super().__init__()
        self.f = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        t, h = 0.0, 0.5
        while t < 1.0:
            h = min(h, 1.0 - t)
            euler = x + h * self.f(x)
            heun = x + h / 2 * (self.f(x) + self.f(euler))
            error = float(self.mean((heun - euler).detach().square().mean(-1)).sqrt())
            if error < 0.05 or h < 0.05:
                t, x = t + h, heun
            h = h * min(2.0, max(0.3, 0.9 * (0.05 / max(error, 1e-9)) ** 0.5))
        return self.head(x)

    def mean(self, x: Tensor) -> Tensor:
        return x.mean(0)


class AdaptiveOdePort(AdaptiveOde):
    def mean(self, x: Tensor) -> Tensor:
        return samestep.batch_mean(x)


def cross_entropy(outputs: Tensor, batch: Any) -> Tensor:
    return F.cross_entropy(outputs, batch["labels"])


# -- what begins later -----------------------------------------------------------------------------


def later(name: str, prepare: Any, build: Any = lambda: Encoder(4)) -> Kind:
    """A script that changes its model in front of a step: `prepare(model, step)`."""

    def plain(model: nn.Module, batches: list[Any]) -> list[float]:
        optimizer, losses = adam(model.parameters()), []
        for step, batch in enumerate(batches):
            prepare(model, step)
            loss = F.cross_entropy(model(batch["x"]), batch["labels"])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    def port(given: Port, model: nn.Module) -> None:
        run = given.parallelize(model, "cross_entropy", adam)
        for batch in given.batches():
            run.prepare(batch.samples(batch.indices[:1]))
            prepare(run.model, batch.step)
            given.losses.append(run.step(batch).loss)

    return Kind(name, build, points, plain, port)


def thaw(model: Any, step: int) -> None:
    model.blocks[0].requires_grad_(step >= 2)


class Growing(nn.Module):
    """Blocks that take part from a later step on, as progressive growing has them."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head, self.depth = nn.Linear(8, 4), 3

    def forward(self, x: Tensor) -> Tensor:
        for block in list(self.blocks)[: self.depth]:
            x = block(x)
        return self.head(x)


def grow(model: Any, step: int) -> None:
    model.depth = min(3, 1 + step)


# -- targets and averages --------------------------------------------------------------------------


class Dqn(nn.Module):
    """A target network that takes the weights of the online one every second step (Mnih et al. 2015)."""

    def __init__(self) -> None:
        super().__init__()
        self.online = Encoder(3)
        self.target = copy.deepcopy(self.online).requires_grad_(False)

    def forward(self, obs: Tensor, after: Tensor, reward: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            wanted = reward + 0.9 * self.target(after).amax(-1)
        return self.online(obs).gather(1, action[:, None])[:, 0], wanted


def replay() -> Table:
    return Table(
        obs=numbers(32, 8), after=numbers(32, 8, seed=1), reward=numbers(32, seed=2), action=whole_numbers(3, 32)
    )


def huber_sum(outputs: tuple[Tensor, Tensor], batch: Any) -> tuple[Tensor, int]:
    return F.smooth_l1_loss(*outputs, reduction="sum"), len(outputs[0])


def copy_target(model: Any, step: int) -> None:
    if step % 2:
        for mine, other in zip(model.target.parameters(), model.online.parameters(), strict=True):
            mine.copy_(other)


def averaged_plain(model: nn.Module, batches: list[Any]) -> list[float]:
    """The averages of weights are evaluated at the end, as timm's script does."""
    optimizer, losses = adam(model.parameters()), []
    average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.8))
    for batch in batches:
        loss = F.cross_entropy(model(batch["x"]), batch["labels"])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        average.update_parameters(model)
        losses.append(loss.item())
    with torch.no_grad():
        whole = points().columns
        return [*losses, F.cross_entropy(average(whole["x"]), whole["labels"]).item()]


def averaged_port(given: Port, model: nn.Module) -> None:
    run = given.parallelize(model, "cross_entropy", adam)
    for batch in given.batches():
        given.losses.append(run.step(batch).loss)
    with run.averaged():
        given.losses.append(run.evaluate(points())["loss"])


def port_of(kind: Kind, build: Any) -> Kind:
    """A kind whose port has another module, with lines that the script lacks."""

    def port(given: Port, _: Any) -> None:
        torch.manual_seed(0)
        kind.port(given, build().double())

    return Kind(kind.name, kind.build, kind.data, kind.plain, port, kind.layouts, train=kind.train)


KINDS = [
    usual("BYOL", Byol, views, byol_loss, byol_sum, each=follow),
    port_of(usual("DINO", Dino, views, dino_loss, dino_sum, each=follow), DinoPort),
    port_of(usual("MoCo", Moco, views, first_class, first_class_sum, each=follow), MocoPort),
    port_of(usual("VQ-VAE with moving averages", VqVae, lambda: Table(x=numbers(32, 8)), vq_loss, vq_sum), VqVaePort),
    port_of(
        usual("mixture with a balance loss", Mixture, points, mixture_loss, mixture_sum, layouts=DATA), MixturePort
    ),
    port_of(
        usual("adaptive steps of an ODE", AdaptiveOde, points, cross_entropy, "cross_entropy", layouts=DATA),
        AdaptiveOdePort,
    ),
    later("freeze, then thaw", thaw),
    later("blocks added later", grow, Growing),
    usual(
        "DQN with a target network", Dqn, replay, lambda o, b: F.smooth_l1_loss(*o), huber_sum, sgd, each=copy_target
    ),
    Kind("averages of weights", lambda: Encoder(4), points, averaged_plain, averaged_port, train={"ema": 0.8}),
]
