"""Loops with data, networks and gradients of their own: replay buffers, targets, weights of losses, masks and observers."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import prune

import samestep
from benchmarks.script_kinds.kind import DATA, Kind, Port, Table, adam, numbers, usual, whole_numbers
from benchmarks.script_kinds.losses import Encoder, points
from benchmarks.script_kinds.models import Gpt
from benchmarks.script_kinds.states import cross_entropy


def mlp(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, outputs))


def follow(target: nn.Module, source: nn.Module, rate: float = 0.1) -> None:
    for mine, other in zip(target.parameters(), source.parameters(), strict=True):
        mine.mul_(1 - rate).add_(other, alpha=rate)


def of(*prefixes: str) -> Callable[[Any], torch.optim.Optimizer]:
    return lambda named: torch.optim.Adam([param for name, param in named if name.startswith(prefixes)], lr=2e-3)


# -- soft actor and critics ------------------------------------------------------------------------


class Actor(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net, self.mean, self.log_std = mlp(6, 16), nn.Linear(16, 2), nn.Linear(16, 2)

    def forward(self, obs: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        h = F.relu(self.net(obs))
        log_std = self.log_std(h).clamp(-5, 2)
        action = torch.tanh(self.mean(h) + log_std.exp() * noise)
        normal = -0.5 * noise**2 - log_std - 0.5 * math.log(2 * math.pi)
        return action, normal.sum(-1) - torch.log(1 - action**2 + 1e-6).sum(-1)


class Critic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = mlp(8, 1)

    def forward(self, obs: Tensor, action: Tensor) -> Tensor:
        return self.net(torch.cat([obs, action], -1))[:, 0]


class Alpha(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.log = nn.Parameter(torch.zeros(()))

    def forward(self) -> Tensor:
        return self.log.exp()


def transitions() -> Table:
    return Table(
        obs=numbers(32, 6), action=numbers(32, 2, seed=1).tanh(), reward=numbers(32, seed=2), then=numbers(32, 6, seed=3),
        done=(numbers(32, seed=4) > 1).double(), first=numbers(32, 2, seed=5), second=numbers(32, 2, seed=6),
    )  # fmt: skip


def sac() -> dict[str, nn.Module]:
    models: dict[str, nn.Module] = {"actor": Actor(), "q1": Critic(), "q2": Critic(), "alpha": Alpha()}
    for name in ("q1", "q2"):
        models["target_" + name] = copy.deepcopy(models[name]).requires_grad_(False)
    return models


def sac_forward(models: Any, b: Any) -> dict[str, Tensor]:
    alpha = models["alpha"]()
    with torch.no_grad():
        action, log_prob = models["actor"](b["then"], b["first"])
        value = torch.min(models["target_q1"](b["then"], action), models["target_q2"](b["then"], action))
        y = b["reward"] + 0.99 * (1 - b["done"]) * (value - alpha * log_prob)
    action, log_prob = models["actor"](b["obs"], b["second"])
    value = torch.min(models["q1"](b["obs"], action), models["q2"](b["obs"], action))
    own = [models[name](b["obs"], b["action"]) for name in ("q1", "q2")]
    return {"own": torch.stack(own, 1), "y": y, "log_prob": log_prob, "value": value, "alpha": alpha}


def sac_critics(o: Any, b: Any) -> tuple[Tensor, int]:
    return (o["own"] - o["y"][:, None]).square().sum(), len(o["y"])


def sac_actor(o: Any, b: Any) -> tuple[Tensor, int]:
    return (o["alpha"].detach() * o["log_prob"] - o["value"]).sum(), len(o["y"])


def sac_alpha(o: Any, b: Any) -> tuple[Tensor, int]:
    return (-o["alpha"] * (o["log_prob"].detach() - 2.0)).sum(), len(o["y"])


PARTS = {"q": sac_critics, "actor": sac_actor, "alpha": sac_alpha}


def sac_targets(models: Any) -> None:
    for name in ("q1", "q2"):
        follow(models["target_" + name], models[name])


def sac_plain(models: Any, batches: list[Any]) -> list[float]:
    """Critics, actor and temperature in turn, each by an optimizer of its own, and targets that follow."""
    named, losses = list(nn.ModuleDict(models).named_parameters()), []
    optimizers = {name: of(name)(named) for name in PARTS}
    for batch in batches:
        for name, part in PARTS.items():
            total, count = part(sac_forward(models, batch), batch)
            optimizers[name].zero_grad()
            (total / count).backward()
            optimizers[name].step()
            losses.append(total.item() / count)
        with torch.no_grad():
            sac_targets(models)
    return losses


def sac_port(given: Port, models: Any) -> None:
    def whole(o: Any, b: Any) -> tuple[Tensor, int]:
        return sum((part(o, b)[0] for part in PARTS.values()), torch.zeros(())), len(o["y"])

    run = given.parallelize(models, whole, {name: of(name) for name in PARTS}, forward=sac_forward)
    for batch in given.batches():
        for name, part in PARTS.items():
            given.losses.append(run.backward(batch, part, into=name).loss)
            run.update(name)
        with run.gathered() as held, torch.no_grad():
            sac_targets(held)


# -- a replay buffer -------------------------------------------------------------------------------


def q_networks() -> dict[str, nn.Module]:
    q = mlp(6, 3)
    return {"q": q, "target": copy.deepcopy(q).requires_grad_(False)}


def q_forward(models: Any, b: Any) -> tuple[Tensor, Tensor]:
    with torch.no_grad():
        target = models["target"](b["then"])
    return models["q"](b["obs"]), target


def q_loss(outputs: Any, b: Any) -> tuple[Tensor, int]:
    found = outputs[0].gather(1, b["action"][:, None])[:, 0]
    return F.smooth_l1_loss(found, b["reward"] + 0.9 * outputs[1].amax(1), reduction="sum"), len(found)


def played(
    act: Callable[[Tensor], Tensor], learn: Callable[[Any], float], follow_target: Callable[[], None]
) -> list[float]:
    """Play with actions of the network, some of them at random, and learn from what a buffer holds."""
    drawn, held, losses, obs = torch.Generator().manual_seed(0), list[Any](), list[float](), numbers(4, 6)
    for step in range(5):
        explores = torch.rand(4, generator=drawn, dtype=torch.float64) < 0.3
        action = torch.where(explores, torch.randint(3, (4,), generator=drawn), act(obs).argmax(1))
        then, reward = torch.sin(obs + action[:, None] * 0.3 + step), torch.cos(obs.sum(1) + action)
        held += [{"obs": obs[i], "action": action[i], "reward": reward[i], "then": then[i]} for i in range(4)]
        rows, obs = torch.randint(len(held), (8,), generator=drawn).tolist(), then
        losses.append(learn({name: torch.stack([held[row][name] for row in rows]) for name in held[0]}))
        if step % 2:
            follow_target()
    return losses


def dqn_plain(models: Any, _: list[Any]) -> list[float]:
    optimizer = adam(models["q"].parameters())

    def act(obs: Tensor) -> Tensor:
        with torch.no_grad():
            found: Tensor = models["q"](obs)
        return found

    def learn(batch: Any) -> float:
        total, count = q_loss(q_forward(models, batch), batch)
        optimizer.zero_grad()
        (total / count).backward()
        optimizer.step()
        return total.item() / count

    return played(act, learn, lambda: models["target"].load_state_dict(models["q"].state_dict()))


def dqn_port(given: Port, models: Any) -> None:
    """Rank 0 alone hands over what it has drawn from its buffer."""
    run = given.parallelize(models, q_loss, lambda params: adam(params), forward=q_forward)

    def act(obs: Tensor) -> Tensor:
        rest = {
            "action": torch.zeros(len(obs), dtype=torch.int64),
            "reward": torch.zeros(len(obs), dtype=torch.float64),
        }
        found: Tensor = run.predict({"obs": obs, "then": obs, **rest})[0]
        return found

    def follow_target() -> None:
        with run.gathered() as held:
            held["target"].load_state_dict(held["q"].state_dict())

    is_first = given.place is None or given.place.rank == 0
    given.losses += played(act, lambda batch: run.step(batch if is_first else None).loss, follow_target)


# -- gradients that weigh losses -------------------------------------------------------------------


def vqgan() -> dict[str, nn.Module]:
    body = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 8))
    return {"auto": body, "critic": mlp(8, 1)}


def vqgan_forward(models: Any, b: Any) -> dict[str, Tensor]:
    made = models["auto"](b["x"])
    critic = models["critic"]
    return {"made": made, "fake": critic(made), "real": critic(b["x"]), "apart": critic(made.detach())}


def distance(o: Any, b: Any) -> Tensor:
    found: Tensor = (o["made"] - b["x"]).abs().sum() / 8
    return found


def hinge(o: Any, b: Any) -> tuple[Tensor, int]:
    return 0.5 * (F.relu(1 - o["real"]).sum() + F.relu(1 + o["apart"]).sum()), len(o["real"])


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.05)


def vqgan_plain(models: Any, batches: list[Any]) -> list[float]:
    """The adversarial loss weighs as much as the distance at the last layer (Esser et al. 2021)."""
    auto, critic, losses = sgd(models["auto"].parameters()), sgd(models["critic"].parameters()), []
    last = models["auto"][4].weight
    for b in batches:
        o = vqgan_forward(models, b)
        near, fools = distance(o, b) / 8, -o["fake"].mean()
        one, other = (torch.autograd.grad(loss, last, retain_graph=True)[0].norm() for loss in (near, fools))
        weight = (one / (other + 1e-4)).clamp(max=1e4).item()
        loss, of_critic = near + weight * fools, hinge(o, b)[0] / 8
        models["critic"].requires_grad_(False)
        auto.zero_grad()
        loss.backward(retain_graph=True)
        models["critic"].requires_grad_(True)
        critic.zero_grad()
        hinge_of = torch.autograd.grad(of_critic, list(models["critic"].parameters()))
        for param, gradient in zip(models["critic"].parameters(), hinge_of, strict=True):
            param.grad = gradient
        auto.step()
        critic.step()
        losses += [loss.item(), weight, of_critic.item()]
    return losses


def vqgan_port(given: Port, models: Any) -> None:
    weight = 1.0

    def whole(o: Any, b: Any) -> tuple[Tensor, int]:
        return distance(o, b) - weight * o["fake"].sum() + hinge(o, b)[0], len(o["real"])

    def generator(o: Any, b: Any) -> tuple[Tensor, int]:
        return distance(o, b) - weight * o["fake"].sum(), len(o["real"])

    run = given.parallelize(models, whole, {"auto": sgd, "critic": sgd}, forward=vqgan_forward)

    def norm_of(batch: Any, loss: Any) -> float:
        run.backward(batch, loss, into="auto")
        gradient = run.gradients()["auto.4.weight"]
        found = float((gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient).norm())
        run.zero_grad("auto")
        return found

    for batch in given.batches():
        near = norm_of(batch, lambda o, b: (distance(o, b), len(o["real"])))
        weight = min(near / (norm_of(batch, lambda o, b: (-o["fake"].sum(), len(o["real"]))) + 1e-4), 1e4)
        loss = run.backward(batch, generator, into="auto").loss
        both = run.backward(batch, hinge, into="critic").loss  # of all that waits
        run.update("auto")
        run.update("critic")
        given.losses += [loss, weight, both - loss]


# -- state and masks -------------------------------------------------------------------------------


class Round(torch.autograd.Function):
    """Rounded values, whose gradient goes straight through."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, step: Tensor) -> Tensor:
        return (x / step).round().clamp(-8, 7) * step

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0], None


class Quantised(nn.Module):
    """Activations between two layers in 4 bits, over a range that follows the largest of each batch."""

    is_ours = False

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList(nn.Linear(8, 8) for _ in range(2)), nn.Linear(8, 4)
        self.register_buffer("most", torch.tensor(1.0))

    def forward(self, x: Tensor) -> Tensor:
        before = self.most
        for block in self.blocks:
            x = F.relu(block(x))
            found = 0.9 * before + 0.1 * samestep.batch_cat(x.detach().amax(1)).amax()
            if self.training and self.is_ours:
                samestep.after_step(self.most, found)
            elif self.training:
                self.most = found
            x = Round.apply(x, before / 7)
        return self.head(x)


def quantised_plain(model: Any, batches: list[Any]) -> list[float]:
    return quantised_base.plain(model, batches)


def quantised_port(given: Port, model: Any) -> None:
    model.is_ours = True
    quantised_base.port(given, model)


quantised_base = usual("", Quantised, points, cross_entropy, "cross_entropy")


class Bank(nn.Module):
    """A memory of each sample's features, by its number (Wu et al. 2018)."""

    is_ours = False

    def __init__(self) -> None:
        super().__init__()
        self.encoder = Encoder()
        self.register_buffer("bank", F.normalize(torch.randn(32, 8), dim=1))

    def forward(self, x: Tensor, index: Tensor) -> Tensor:
        z = F.normalize(self.encoder(x), dim=1)
        logits = z @ self.bank.T / 0.07
        new = F.normalize(0.5 * self.bank[index] + 0.5 * z.detach(), dim=1)
        if self.is_ours:
            samestep.after_step(self.bank, self.bank.index_copy(0, samestep.batch_cat(index), samestep.batch_cat(new)))
        else:
            self.bank = self.bank.index_copy(0, index, new)
        return logits


def own_class(outputs: Tensor, batch: Any) -> Tensor:
    return F.cross_entropy(outputs, batch["index"])


def own_class_sum(outputs: Tensor, batch: Any) -> tuple[Tensor, int]:
    return F.cross_entropy(outputs, batch["index"], reduction="sum"), len(outputs)


def numbered() -> Table:
    return Table(x=numbers(32, 8), index=torch.arange(32))


bank_base = usual("", Bank, numbered, own_class, own_class_sum)


def bank_port(given: Port, model: Any) -> None:
    model.is_ours = True
    bank_base.port(given, model)


def prune_blocks(model: Any) -> None:
    for block in model.blocks:
        prune.l1_unstructured(next(one for one in block.modules() if isinstance(one, nn.Linear)), "weight", 0.3)


def pruned() -> nn.Module:
    model = Encoder(4)
    prune_blocks(model)
    return model


def pruned_plain(model: Any, batches: list[Any]) -> list[float]:
    """Pruned once more in the middle of training."""
    optimizer, losses = adam(model.parameters()), []
    for step, batch in enumerate(batches):
        if step == 2:
            prune_blocks(model)
        loss = cross_entropy(model(batch["x"]), batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def pruned_port(given: Port, model: Any) -> None:
    run = given.parallelize(model, "cross_entropy", adam)
    for batch in given.batches():
        if batch.step == 2:
            with run.gathered() as whole:
                prune_blocks(whole)
        given.losses.append(run.step(batch).loss)


# -- losses over the whole batch -------------------------------------------------------------------


class Supervised(nn.Module):
    """A segmenter with an auxiliary head, which this loss does not read."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head, self.aux = nn.Conv2d(1, 8, 3, padding=1), nn.Conv2d(8, 5, 1), nn.Conv2d(8, 5, 1)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        h = F.relu(self.body(x))
        return {"out": self.head(h), "aux": self.aux(h)}


def scenes() -> Table:
    y = whole_numbers(5, 32, 4, 4)
    y[numbers(32, 4, 4, seed=3) > 0.8] = 255
    return Table(x=numbers(32, 1, 4, 4), labels=y)


def hardest(outputs: Any, batch: Any) -> Tensor:
    """The hardest pixels of all images (OHEM)."""
    each = F.cross_entropy(outputs["out"], batch["labels"], ignore_index=255, reduction="none").flatten()
    return each.topk(len(each) // 4).values.mean()


def survivors() -> Table:
    return Table(x=numbers(32, 8), time=numbers(32, seed=2).abs(), event=whole_numbers(2, 32))


def cox(outputs: Tensor, batch: Any) -> Tensor:
    """The partial likelihood of Cox, whose risk sets are those of the batch."""
    order = batch["time"].argsort(descending=True)
    risk, event = outputs[order, 0], batch["event"][order].to(outputs)
    return -((risk - risk.logcumsumexp(0)) * event).sum() / event.sum().clamp(min=1)


class Hazard(Encoder):
    def __init__(self) -> None:
        super().__init__(1)

    def forward(self, x: Tensor, time: Tensor, event: Tensor) -> Tensor:
        return super().forward(x)


class Kto(nn.Module):
    """A policy and its reference, on completions and on mismatched ones (Ethayarajh et al. 2024)."""

    def __init__(self) -> None:
        super().__init__()
        self.policy = Gpt()
        self.reference = copy.deepcopy(self.policy).requires_grad_(False)

    def forward(self, ids: Tensor, other: Tensor, good: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            before = self.of(self.reference, ids)
            mismatch = self.of(self.policy, other) - self.of(self.reference, other)
        return self.of(self.policy, ids) - before, mismatch

    def of(self, model: Any, ids: Tensor) -> Tensor:
        logs = F.log_softmax(model(ids[:, :-1]), -1)
        return torch.gather(logs, 2, ids[:, 1:, None])[..., 0].sum(1)


def completions() -> Table:
    return Table(
        ids=whole_numbers(16, 32, 6), other=whole_numbers(16, 32, 6, seed=3), good=whole_numbers(2, 32, seed=2)
    )


def kto(outputs: Any, batch: Any) -> Tensor:
    better, zero, good = outputs[0], outputs[1].mean().clamp(min=0).detach(), batch["good"] == 1
    wins, fails = torch.sigmoid(0.5 * (better[good] - zero)), torch.sigmoid(0.5 * (zero - better[~good]))
    return torch.cat([1 - wins, 1.2 * (1 - fails)]).mean()


KINDS = [
    Kind("SAC", sac, transitions, sac_plain, sac_port),
    Kind("DQN with replay", q_networks, transitions, dqn_plain, dqn_port),
    Kind("VQGAN", vqgan, points, vqgan_plain, vqgan_port),
    Kind("activations in 4 bits", Quantised, points, quantised_plain, quantised_port),
    Kind("memory bank", Bank, numbered, bank_base.plain, bank_port),
    Kind("pruning", pruned, points, pruned_plain, pruned_port),
    usual("hardest pixels", Supervised, scenes, hardest, samestep.whole_batch(hardest), layouts=DATA),
    usual("Cox", Hazard, survivors, cox, samestep.whole_batch(cox)),
    usual("KTO", Kto, completions, kto, samestep.whole_batch(kto)),
]
