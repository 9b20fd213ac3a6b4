"""Loops as public scripts have them: optimizers of their own, schedules, accumulation, wrappers, evaluation, and where batches come from."""

from __future__ import annotations

import math
import random
from collections import namedtuple
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import lr_scheduler
from torch.utils.data import ConcatDataset, DataLoader, IterableDataset, Subset, TensorDataset

import samestep
from benchmarks.script_kinds.data import ENCODER
from benchmarks.script_kinds.kind import (
    DATA,
    GLOBAL_BATCH,
    STEPS,
    Kind,
    Port,
    Table,
    adam,
    numbers,
    sgd,
    usual,
    whole_numbers,
)
from benchmarks.script_kinds.losses import ActorCritic, Encoder, cleanrl_ppo, points
from benchmarks.script_kinds.models import Gpt, Vit, pictures, squared, texts
from benchmarks.script_kinds.optimizers import Muon, ce_sum, matrices, others
from benchmarks.script_kinds.states import cross_entropy

# -- optimizers ------------------------------------------------------------------------------------


class MuonWithAux(torch.optim.Optimizer):
    """Keller Jordan's single-device class: one optimizer whose groups say which rule they have, and whose base has no defaults."""

    def __init__(self, param_groups: list[dict[str, Any]]) -> None:
        for group in param_groups:
            if group["use_muon"]:
                group["params"] = sorted(group["params"], key=lambda x: x.numel(), reverse=True)
                group["lr"], group["momentum"] = group.get("lr", 0.02), group.get("momentum", 0.95)
            else:
                group["lr"], group["betas"] = group.get("lr", 3e-4), group.get("betas", (0.9, 0.95))
        super().__init__(param_groups, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    p.grad = torch.zeros_like(p)
                state = self.state[p]
                if group["use_muon"]:
                    if len(state) == 0:
                        state["momentum_buffer"] = torch.zeros_like(p)
                    p.add_(
                        orthogonal(p.grad, state["momentum_buffer"], group["momentum"]).reshape(p.shape),
                        alpha=-group["lr"],
                    )
                    continue
                if len(state) == 0:
                    state["exp_avg"], state["exp_avg_sq"], state["step"] = torch.zeros_like(p), torch.zeros_like(p), 0
                state["step"] += 1
                state["exp_avg"].lerp_(p.grad, 1 - group["betas"][0])
                state["exp_avg_sq"].lerp_(p.grad.square(), 1 - group["betas"][1])
                first, second = (
                    state[n] / (1 - b ** state["step"])
                    for n, b in zip(("exp_avg", "exp_avg_sq"), group["betas"], strict=True)
                )
                p.add_(first / (second.sqrt() + 1e-10), alpha=-group["lr"])


def orthogonal(grad: Tensor, momentum: Tensor, beta: float) -> Tensor:
    momentum.lerp_(grad, 1 - beta)
    x = grad.lerp(momentum, beta)
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(3):
        a = x @ x.mT
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return x * max(1, grad.size(-2) / grad.size(-1)) ** 0.5


def aux_groups(named: Any) -> list[dict[str, Any]]:
    named = list(named)
    return [
        {"params": matrices(named), "use_muon": True, "lr": 0.02},
        {"params": others(named), "use_muon": False, "lr": 2e-3},
    ]


class Combined(torch.optim.Optimizer):
    """A wrapper that holds two optimizers, so that one call steps both."""

    def __init__(self, named: Any) -> None:
        named = list(named)
        self.optimizers = [Muon(matrices(named)), torch.optim.AdamW(others(named), lr=1e-3)]
        super().__init__([group for one in self.optimizers for group in one.param_groups], {})

    def step(self, closure: Any = None) -> None:
        for one in self.optimizers:
            one.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        for one in self.optimizers:
            one.zero_grad(set_to_none)


class Lookahead(torch.optim.Optimizer):
    """Slow weights that follow every second step (Zhang et al. 2019), around another optimizer."""

    def __init__(self, base: torch.optim.Optimizer, alpha: float = 0.5, k: int = 2) -> None:
        super().__init__(base.param_groups, {"lookahead_alpha": alpha, "lookahead_k": k, "lookahead_step": 0})
        self._base_optimizer = base
        self.param_groups = base.param_groups
        for group in base.param_groups:
            group.setdefault("lookahead_alpha", alpha)
            group.setdefault("lookahead_k", k)
            group.setdefault("lookahead_step", 0)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self._base_optimizer.step()
        for group in self.param_groups:
            group["lookahead_step"] += 1
            if group["lookahead_step"] % group["lookahead_k"] == 0:
                for fast in group["params"]:
                    state = self._base_optimizer.state[fast]
                    if "lookahead_slow" not in state:
                        state["lookahead_slow"] = fast.clone()
                    slow = state["lookahead_slow"]
                    slow.add_(fast - slow, alpha=group["lookahead_alpha"])
                    fast.copy_(slow)


class Lion(torch.optim.Optimizer):
    """Signs of an interpolated momentum (Chen et al. 2023)."""

    def __init__(
        self, params: Any, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.99), weight_decay: float = 0.1
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                p.mul_(1 - group["lr"] * group["weight_decay"])
                average = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                p.add_(average.lerp(p.grad, 1 - group["betas"][0]).sign_(), alpha=-group["lr"])
                average.lerp_(p.grad, 1 - group["betas"][1])


class Lamb(torch.optim.Optimizer):
    """Adam's update at a rate that is the ratio of each weight's norm to its update's (You et al. 2020)."""

    def __init__(self, params: Any, lr: float = 1e-2, weight_decay: float = 0.01) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["step"], state["m"], state["v"] = 0, torch.zeros_like(p), torch.zeros_like(p)
                state["step"] += 1
                state["m"].mul_(0.9).add_(p.grad, alpha=0.1)
                state["v"].mul_(0.999).addcmul_(p.grad, p.grad, value=0.001)
                update = (
                    state["m"]
                    / (1 - 0.9 ** state["step"])
                    / ((state["v"] / (1 - 0.999 ** state["step"])).sqrt() + 1e-6)
                )
                update = update + group["weight_decay"] * p
                w, g = p.norm(), update.norm()
                p.add_(update * torch.where(w > 0, torch.where(g > 0, w / g, 1.0), 1.0), alpha=-group["lr"])


class ScheduleFree(torch.optim.Optimizer):
    """Averages in place of a schedule, with weights of its own for evaluation (Defazio et al. 2024)."""

    def __init__(self, params: Any, lr: float = 0.05, beta: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "beta": beta, "k": 0, "train_mode": True})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            weight = 1 / (group["k"] + 1)
            for y in group["params"]:
                if y.grad is None:
                    continue
                state = self.state[y]
                if "z" not in state:
                    state["z"] = y.clone()
                z = state["z"]
                y.lerp_(z, weight)
                y.add_(y.grad, alpha=group["lr"] * (group["beta"] * (1 - weight) - 1))
                z.sub_(y.grad, alpha=group["lr"])
            group["k"] += 1


class TwoStepSam(torch.optim.Optimizer):
    """SAM as davda54/sam has it, whose loop calls `first_step` and `second_step`."""

    def __init__(self, params: Any, base_optimizer: Any = torch.optim.SGD, rho: float = 0.05, **kwargs: Any) -> None:
        super().__init__(params, {"rho": rho, **kwargs})
        self.base_optimizer = base_optimizer(self.param_groups, **kwargs)
        self.param_groups = self.base_optimizer.param_groups
        self.defaults.update(self.base_optimizer.defaults)

    @torch.no_grad()
    def first_step(self, zero_grad: bool = False) -> None:
        norm = torch.norm(
            torch.stack(
                [p.grad.norm(p=2) for group in self.param_groups for p in group["params"] if p.grad is not None]
            ),
            p=2,
        )
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                self.state[p]["old_p"] = p.data.clone()
                p.add_(p.grad * (group["rho"] / (norm + 1e-12)))
        if zero_grad:
            self.zero_grad()

    @torch.no_grad()
    def second_step(self, zero_grad: bool = False) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.data = self.state[p]["old_p"]
        self.base_optimizer.step()
        if zero_grad:
            self.zero_grad()

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        assert closure is not None, "SAM requires a closure"
        closure = torch.enable_grad()(closure)
        self.first_step(zero_grad=True)
        closure()
        self.second_step()


def sam_plain(model: nn.Module, batches: list[Any]) -> list[float]:
    optimizer, losses = TwoStepSam(model.parameters(), lr=0.05, momentum=0.9), []
    for batch in batches:
        loss = cross_entropy(model(batch["x"]), batch)
        loss.backward()
        optimizer.first_step(zero_grad=True)
        cross_entropy(model(batch["x"]), batch).backward()
        optimizer.second_step(zero_grad=True)
        losses.append(loss.item())
    return losses


def sam_port(given: Port, model: nn.Module) -> None:
    run = given.parallelize(model, "cross_entropy", lambda params: TwoStepSam(params, lr=0.05, momentum=0.9))
    for batch in given.batches():
        given.losses.append(run.backward(batch).loss)
        run.call(None, "first_step", zero_grad=True)
        run.backward(batch)
        run.call(None, "second_step", zero_grad=True)


def closure_lbfgs(params: Any) -> torch.optim.Optimizer:
    return torch.optim.LBFGS(params, lr=0.5, max_iter=4, line_search_fn="strong_wolfe")


def lbfgs_plain(model: nn.Module, batches: list[Any]) -> list[float]:
    made, losses = closure_lbfgs(model.parameters()), []
    for batch in batches:

        def closure(batch: Any = batch) -> Tensor:
            made.zero_grad()
            loss = cross_entropy(model(batch["x"]), batch)
            loss.backward()
            return loss

        losses.append(float(made.step(closure).detach()))  # type: ignore[attr-defined]
    return losses


def lbfgs_port(given: Port, model: nn.Module) -> None:
    run = given.parallelize(model, "cross_entropy", closure_lbfgs)
    for batch in given.batches():
        given.losses.append(run.step(batch).loss)


def stepped(name: str, optimizer: Any, ours: Any = None, build: Any = ENCODER, data: Any = points, **more: Any) -> Kind:
    """A script with one optimizer, made of (name, parameter) if `ours` is."""

    def plain(model: nn.Module, batches: list[Any]) -> list[float]:
        made, losses = optimizer(model), []
        for batch in batches:
            loss = cross_entropy(model(batch["x"]), batch)
            made.zero_grad()
            loss.backward()
            made.step()
            losses.append(loss.item())
        return losses

    def port(given: Port, model: nn.Module) -> None:
        run = given.parallelize(model, "cross_entropy", ours or optimizer(model))
        for batch in given.batches():
            given.losses.append(run.step(batch).loss)

    return Kind(name, build, data, plain, port, **more)


def llrd(model: nn.Module) -> list[dict[str, Any]]:
    """Groups with rates by layer and no decay for norms and biases, as fine-tuning scripts make them."""
    groups: dict[str, dict[str, Any]] = {}
    for name, param in model.named_parameters():
        depth = (
            int(name.split(".")[1]) + 1
            if name.startswith("blocks.")
            else 0
            if "patches" in name or name == "token"
            else 3
        )
        decay = 0.0 if param.ndim <= 1 else 0.05
        key = f"{depth}-{decay}"
        groups.setdefault(key, {"params": [], "lr": 1e-3 * 0.75 ** (3 - depth), "weight_decay": decay})[
            "params"
        ].append(param)
    return list(groups.values())


# -- schedules -------------------------------------------------------------------------------------


def scheduled(name: str, schedule: Callable[[Any], Any], by: str = "", optimizer: Any = adam, **more: Any) -> Kind:
    """A script with a scheduler of torch, which is given the loss if `by` says so."""

    def stepping(scheduler: Any, loss: float) -> None:
        scheduler.step(loss) if by == "loss" else scheduler.step()

    def plain(model: nn.Module, batches: list[Any]) -> list[float]:
        made, losses = optimizer(model.parameters()), []
        scheduler = schedule(made)
        for batch in batches:
            loss = cross_entropy(model(batch["x"]), batch)
            made.zero_grad()
            loss.backward()
            made.step()
            losses.append(loss.item())
            stepping(scheduler, losses[-1])
        return losses

    def port(given: Port, model: nn.Module) -> None:
        made = optimizer(model.parameters())
        scheduler = schedule(made)
        run = given.parallelize(model, "cross_entropy", made)
        for batch in given.batches():
            given.losses.append(run.step(batch).loss)
            stepping(scheduler, given.losses[-1])

    return Kind(name, ENCODER, points, plain, port, **more)


def sequential(optimizer: Any) -> Any:
    warmup = lr_scheduler.LinearLR(optimizer, 0.1, total_iters=2)
    return lr_scheduler.SequentialLR(optimizer, [warmup, lr_scheduler.CosineAnnealingLR(optimizer, 3)], milestones=[2])


# -- loops -----------------------------------------------------------------------------------------


def looped(name: str, plain: Any, port: Any, build: Any = ENCODER, data: Any = points, **more: Any) -> Kind:
    return Kind(name, build, data, plain, port, **more)


def remainder_plain(model: nn.Module, _: list[Any]) -> list[float]:
    """Loader batches of 4, an update behind each second one, and one behind the last."""
    optimizer, losses, total, seen = adam(model.parameters()), [], 0.0, 0
    loader = DataLoader(Subset(points(), range(28)), 4)
    for i, batch in enumerate(loader):
        last = i + 1 == len(loader)
        size = 1 if last and len(loader) % 2 else 2
        loss = cross_entropy(model(batch["x"]), batch) / size
        loss.backward()
        total, seen = total + loss.item(), seen + 1
        if (i + 1) % 2 == 0 or last:
            optimizer.step()
            optimizer.zero_grad()
            losses.append(total)
            total = 0.0
    return losses


def remainder_port(given: Port, model: nn.Module) -> None:
    run = given.parallelize(model, "cross_entropy", adam)
    for batch in given.batches(DataLoader(Subset(points(), range(28)), GLOBAL_BATCH)):
        given.losses.append(run.step(batch).loss)


def two_losses_plain(model: nn.Module, batches: list[Any]) -> list[float]:
    """Two backwards of two batches of different sizes, each with its own mean, and one update."""
    optimizer, losses = adam(model.parameters()), []
    for batch in batches:
        optimizer.zero_grad()
        for rows in (slice(0, 3), slice(3, 8)):
            loss = F.cross_entropy(model(batch["x"][rows]), batch["labels"][rows])
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
    return losses


def two_losses_port(given: Port, model: nn.Module) -> None:
    run = given.parallelize(model, "cross_entropy", adam)
    table = points().columns
    for batch in given.batches():
        for rows in (batch.indices[:3], batch.indices[3:]):
            before = given.losses[-1] if rows is not batch.indices[:3] and len(rows) == 5 else 0.0
            found = run.backward({name: column[torch.as_tensor(rows)] for name, column in table.items()}).loss
            given.losses.append(found - before)
        run.update()


def agc(params: Any, gradients: Any) -> None:
    """Adaptive clipping by units (Brock et al. 2021)."""
    for param, gradient in zip(params, gradients, strict=True):
        norm = lambda x: x.norm() if x.ndim <= 1 else x.norm(dim=1, keepdim=True)  # noqa: E731
        most = norm(param.detach()).clamp(min=1e-3) * 0.01
        gradient.mul_((most / norm(gradient).clamp(min=1e-6)).clamp(max=1.0))


def agc_plain(model: nn.Module, batches: list[Any]) -> list[float]:
    optimizer, losses = sgd(model.parameters()), []
    for batch in batches:
        loss = cross_entropy(model(batch["x"]), batch)
        optimizer.zero_grad()
        loss.backward()
        agc(model.parameters(), [p.grad for p in model.parameters()])
        optimizer.step()
        losses.append(loss.item())
    return losses


def agc_port(given: Port, model: nn.Module) -> None:
    run = given.parallelize(model, ce_sum, sgd)
    for batch in given.batches():
        run.prepare(batch.samples(batch.indices[:1]))
        with run.gathered() as whole:
            weights = {name: param.detach().clone() for name, param in whole.named_parameters()}
        given.losses.append(run.backward(batch).loss)
        for name, gradient in run.gradients().items():
            changed = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient.clone()
            agc([weights[name]], [changed])
            gradient.copy_(changed)
        run.update()


def evaluated_plain(model: nn.Module, batches: list[Any]) -> list[float]:
    """Each epoch ends with an evaluation that has a last batch of its own size; the best weights are kept."""
    optimizer, losses, best = adam(model.parameters()), [], math.inf
    held = Subset(points(), range(19))
    for batch in batches:
        model.train()
        loss = cross_entropy(model(batch["x"]), batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        model.eval()
        total, right = 0.0, 0
        with torch.no_grad():
            for one in DataLoader(held, 8):
                outputs = model(one["x"])
                total += F.cross_entropy(outputs, one["labels"], reduction="sum").item()
                right += int((outputs.argmax(1) == one["labels"]).sum())
        losses += [total / 19, right / 19]
        best = min(best, total / 19)
    return [*losses, best]


def evaluated_port(given: Port, model: nn.Module) -> None:
    def accuracy(outputs: Tensor, batch: Any) -> dict[str, Any]:
        return {"accuracy": ((outputs.argmax(1) == batch["labels"]).sum(), len(outputs))}

    held, best = Subset(points(), range(19)), math.inf
    run = given.parallelize(model, "cross_entropy", adam)
    for batch in given.batches():
        given.losses.append(run.step(batch).loss)
        found = run.evaluate(held, accuracy)
        given.losses += [found["loss"], found["accuracy"]]
        best = min(best, found["loss"])
    given.losses.append(best)


class Dropped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net, self.norm, self.head = Encoder(), nn.BatchNorm1d(8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.net(x)))


def curriculum_plain(model: nn.Module, batches: list[Any]) -> list[float]:
    """A loss whose weight follows the step, as ramps of consistency do."""
    optimizer, losses = adam(model.parameters()), []
    for step, batch in enumerate(batches):
        outputs = model(batch["x"])
        ramp = math.exp(-5 * (1 - min(step / 3, 1)) ** 2)
        loss = F.cross_entropy(outputs, batch["labels"]) + ramp * outputs.square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def curriculum_port(given: Port, model: nn.Module) -> None:
    ramp = 0.0

    def loss(outputs: Tensor, batch: Any) -> tuple[Tensor, int]:
        each = F.cross_entropy(outputs, batch["labels"], reduction="none") + ramp * outputs.square().mean(1)
        return each.sum(), len(each)

    run = given.parallelize(model, loss, adam)
    for batch in given.batches():
        ramp = math.exp(-5 * (1 - min(batch.step / 3, 1)) ** 2)
        given.losses.append(run.step(batch).loss)


class CurriculumLoss:
    """The same as an object whose attribute the loop sets."""

    def __init__(self) -> None:
        self.ramp = 0.0

    def __call__(self, outputs: Tensor, batch: Any) -> tuple[Tensor, int]:
        each = F.cross_entropy(outputs, batch["labels"], reduction="none") + self.ramp * outputs.square().mean(1)
        return each.sum(), len(each)


def curriculum_object(given: Port, model: nn.Module) -> None:
    loss = CurriculumLoss()
    run = given.parallelize(model, loss, adam)
    for batch in given.batches():
        loss.ramp = math.exp(-5 * (1 - min(batch.step / 3, 1)) ** 2)
        given.losses.append(run.step(batch).loss)


def minibatches(
    outputs: dict[str, Tensor], obs: Tensor, random_numbers: np.random.Generator
) -> Iterator[dict[str, Tensor]]:
    """Yield two epochs of shuffled minibatches of a rollout, whose outputs have no graph."""
    actions, values = outputs["logits"].argmax(-1), outputs["value"]
    old = torch.distributions.Categorical(logits=outputs["logits"]).log_prob(actions)
    returns = torch.linspace(-1, 1, 16, dtype=torch.float64)
    for _epoch in range(2):
        order = random_numbers.permutation(16)
        for start in range(0, 16, 8):
            rows = torch.as_tensor(order[start : start + 8])
            yield {
                "obs": obs[rows],
                "action": actions[rows],
                "old": old[rows],
                "advantage": (returns - values)[rows],
                "ret": returns[rows],
            }


def ppo_epochs_plain(model: Any, batches: list[Any]) -> list[float]:
    """CleanRL's update: several epochs of minibatches of one rollout, which the policy itself has made."""
    optimizer, losses, random_numbers = adam(model.parameters()), [], np.random.default_rng(0)
    obs = numbers(16, 8)
    for _ in range(2):
        with torch.no_grad():
            outputs = model(obs)
        for batch in minibatches(outputs, obs, random_numbers):
            loss = cleanrl_ppo(model(batch["obs"]), batch)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            losses.append(loss.item())
    return losses


def ppo_epochs_port(given: Port, model: Any) -> None:
    random_numbers, obs = np.random.default_rng(0), numbers(16, 8)
    run = given.parallelize(
        model, samestep.whole_batch(cleanrl_ppo), adam, forward=lambda net, batch: net(batch["obs"])
    )
    first = {
        "obs": obs[:1],
        "action": torch.zeros(1, dtype=torch.int64),
        **{n: torch.zeros(1, dtype=torch.float64) for n in ("old", "advantage", "ret")},
    }
    run.prepare(first)
    for _ in range(2):
        outputs = run.outputs(
            {**{name: value.expand(16) for name, value in first.items() if name != "obs"}, "obs": obs}
        )
        for batch in minibatches(outputs, obs, random_numbers):
            given.losses.append(run.step(batch).loss)


# -- wrappers --------------------------------------------------------------------------------------


def data_parallel() -> nn.Module:
    return nn.DataParallel(Encoder(4))


class Tied(nn.Module):
    """An autoencoder whose decoder is the encoder's weight turned around."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias, self.out = (
            nn.Parameter(torch.randn(4, 8) * 0.3),
            nn.Parameter(torch.zeros(4)),
            nn.Parameter(torch.zeros(8)),
        )

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(torch.tanh(F.linear(x, self.weight, self.bias)), self.weight.t(), self.out)


class Hooked(nn.Module):
    """Distillation of features that forward hooks have kept."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = Encoder(4), Encoder(4).requires_grad_(False)
        self.kept: dict[str, Tensor] = {}
        for name in ("student", "teacher"):
            getattr(self, name).blocks[0].register_forward_hook(partial(self.keep, name))

    def keep(self, name: str, module: Any, args: Any, output: Tensor) -> None:
        self.kept[name] = output

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.student(x)
        with torch.no_grad():
            self.teacher(x)
        return logits, (self.kept["student"] - self.kept["teacher"]).square().mean(-1)


def hooked_sum(outputs: Any, batch: Any) -> tuple[Tensor, int]:
    return F.cross_entropy(outputs[0], batch["labels"], reduction="sum") + outputs[1].sum(), len(outputs[1])


class FrozenNorms(nn.Module):
    """Batch norms that stay in evaluation, as detectors keep those of their backbone."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Linear(4, 4)
        self.norm.requires_grad_(False)
        with torch.no_grad():
            self.norm.running_mean.fill_(0.1)

    def train(self, mode: bool = True) -> FrozenNorms:
        super().train(mode)
        self.norm.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.norm(self.conv(x))).mean((2, 3)))


class Random(nn.Module):
    """Self-conditioning in half of all steps, by one number of torch for the whole batch (Chen et al. 2022)."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 8))

    def forward(self, x: Tensor) -> Tensor:
        noise, before = torch.randn_like(x), torch.zeros_like(x)
        if torch.rand(()) < 0.5:
            with torch.no_grad():
                before = self.net(torch.cat([x + noise, before], 1)).detach()
        return (self.net(torch.cat([x + noise, before], 1)) - noise).square().mean(1)


def sum_and_count(outputs: Tensor, batch: Any) -> tuple[Tensor, int]:
    return outputs.sum(), outputs.numel()


# -- where batches come from -----------------------------------------------------------------------


def loaded(
    name: str,
    loader: Callable[[], Any],
    build: Any = ENCODER,
    call: Any = None,
    loss: Any = "cross_entropy",
    scalar: Any = None,
    **more: Any,
) -> Kind:
    """A script that loops over a loader, with the samples in the loader's own order."""
    call = call or (lambda net, batch: net(batch[0]))
    scalar = scalar or (lambda outputs, batch: F.cross_entropy(outputs, batch[1]))

    def plain(model: nn.Module, _: list[Any]) -> list[float]:
        optimizer, losses = adam(model.parameters()), []
        for batch, _step in zip(loader(), range(STEPS), strict=False):
            found = scalar(call(model, batch), batch)
            optimizer.zero_grad()
            found.backward()
            optimizer.step()
            losses.append(found.item())
        return losses

    def port(given: Port, model: nn.Module) -> None:
        run = given.parallelize(model, loss, adam)
        for batch in given.batches(loader()):
            given.losses.append(run.step(batch).loss)

    return Kind(name, build, points, plain, port, **more)


def as_tuples() -> TensorDataset:
    table = points().columns
    return TensorDataset(table["x"], table["labels"])


class ByLength:
    """Batches of samples of similar lengths, as a batch sampler."""

    def __iter__(self) -> Iterator[list[int]]:
        order = sorted(range(32), key=lambda index: index % 5)
        yield from (order[start : start + GLOBAL_BATCH] for start in range(0, 32, GLOBAL_BATCH))

    def __len__(self) -> int:
        return 4


class Shards(IterableDataset[Any]):
    """A stream of shards through a buffer that shuffles, as webdataset has it."""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        table, drawn, buffer = points().columns, random.Random(0), []
        for index in range(200):
            buffer.append((table["x"][index % 32], table["labels"][index % 32]))
            if len(buffer) >= 10:
                yield buffer.pop(drawn.randrange(len(buffer)))


Pair = namedtuple("Pair", ["x", "labels"])


def as_pairs(samples: list[Any]) -> Pair:
    return Pair(torch.stack([one["x"] for one in samples]), torch.stack([one["labels"] for one in samples]))


def masked_words(samples: list[Any]) -> dict[str, Tensor]:
    """A collator that masks words by numbers of the words themselves, as a fixed one does."""
    ids = torch.stack([one["ids"] for one in samples])
    chosen = (ids * 7 + torch.arange(ids.shape[1])) % 5 == 0
    return {"ids": ids.masked_fill(chosen, 15), "labels": torch.where(chosen, ids, -100)}


class Bert(Gpt):
    def forward(self, ids: Tensor) -> Tensor:
        h = self.embed(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for attention, block in zip(self.attention, self.blocks, strict=True):
            h = block(h + attention(h, h, h, need_weights=False)[0])
        return self.head(h)


def words_loader() -> DataLoader[Any]:
    return DataLoader(texts(), GLOBAL_BATCH, collate_fn=masked_words)


def mlm(outputs: Tensor, batch: Any) -> Tensor:
    return F.cross_entropy(outputs.flatten(0, 1), batch["labels"].flatten())


def hf_loader() -> Any:
    import datasets

    table = points().columns
    rows = datasets.Dataset.from_dict({"x": table["x"].tolist(), "labels": table["labels"].tolist()})
    return DataLoader(rows, GLOBAL_BATCH, collate_fn=from_lists)


def from_lists(samples: list[Any]) -> dict[str, Tensor]:
    return {
        "x": torch.tensor([one["x"] for one in samples], dtype=torch.float64),
        "labels": torch.tensor([one["labels"] for one in samples]),
    }


def by_name(net: Any, batch: Any) -> Any:
    return net(batch["x"])


class Sparse(nn.Module):
    """Embeddings with sparse gradients, as recommenders have them."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(10, 4, sparse=True) for _ in range(3))
        self.top = nn.Linear(12, 4)

    def forward(self, ids: Tensor) -> Tensor:
        return self.top(torch.cat([table(ids[:, i]) for i, table in enumerate(self.tables)], 1))


def categories() -> Table:
    return Table(ids=whole_numbers(10, 32, 3), labels=whole_numbers(4, 32))


def plain_sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1)


KINDS = [
    stepped("Muon with its own AdamW", lambda model: MuonWithAux(aux_groups(model.named_parameters()))),
    stepped("wrapper of two optimizers", lambda model: Combined(model.named_parameters()), lambda named: Combined(named)),
    stepped("Lookahead", lambda model: Lookahead(torch.optim.Adam(model.parameters(), lr=1e-2)), lambda params: Lookahead(torch.optim.Adam(params, lr=1e-2))),
    stepped("Lion", lambda model: Lion(model.parameters())),
    stepped("LAMB", lambda model: Lamb(model.parameters())),
    stepped("Adafactor", lambda model: torch.optim.Adafactor(model.parameters(), lr=1e-2)),
    stepped("schedule-free", lambda model: ScheduleFree(model.parameters())),
    stepped("rates and decays by layer", lambda model: torch.optim.AdamW(llrd(model)), build=Vit, data=pictures),
    looped("SAM in two steps", sam_plain, sam_port),
    looped("LBFGS with a line search", lbfgs_plain, lbfgs_port, layouts=(DATA[0], DATA[1])),
    scheduled("OneCycle with momentum", lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=5), optimizer=sgd),
    scheduled("cosine with restarts", lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 2)),
    scheduled("warm-up, then cosine", sequential),
    scheduled("rate by plateau", lambda o: lr_scheduler.ReduceLROnPlateau(o, factor=0.1, patience=0, threshold=0.5), "loss"),
    scheduled("rate by a function", lambda o: lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step))),
    looped("accumulation with a remainder", remainder_plain, remainder_port),
    looped("two means in one update", two_losses_plain, two_losses_port),
    looped("clipping by units", agc_plain, agc_port),
    looped("evaluation in each epoch", evaluated_plain, evaluated_port, Dropped, layouts=DATA),
    looped("PPO in epochs", ppo_epochs_plain, ppo_epochs_port, ActorCritic, train={"steps": 8}, tables={"optimizer": {"clip_norm": 0.5}}),
    looped("curriculum in the loss", curriculum_plain, curriculum_port),
    looped("curriculum of an object", curriculum_plain, curriculum_object),
    usual("DataParallel", data_parallel, points, cross_entropy, "cross_entropy"),
    usual("tied autoencoder", Tied, lambda: Table(x=numbers(32, 8), labels=numbers(32, 8)), squared, "mse", layouts=DATA),
    usual("features by hooks", Hooked, points, lambda o, b: F.cross_entropy(o[0], b["labels"]) + o[1].mean(), hooked_sum),
    usual("frozen batch norms", lambda: FrozenNorms().train(), pictures, cross_entropy, "cross_entropy", layouts=DATA),
    usual("self-conditioning", Random, lambda: Table(x=numbers(32, 8)), lambda o, b: o.mean(), sum_and_count, layouts=DATA, draws=True),
    usual("sparse embeddings", Sparse, categories, cross_entropy, "cross_entropy", plain_sgd, layouts=DATA),
    loaded("tuples of tensors", lambda: DataLoader(as_tuples(), GLOBAL_BATCH)),
    loaded("batches by length", lambda: DataLoader(as_tuples(), batch_sampler=ByLength())),
    loaded("joined and divided sets", lambda: DataLoader(ConcatDataset([Subset(as_tuples(), range(9)), Subset(as_tuples(), range(20, 32))]), GLOBAL_BATCH, drop_last=True), train={"steps": 2}),
    loaded("shuffled shards", lambda: DataLoader(Shards(), GLOBAL_BATCH)),
    loaded("named tuples", lambda: DataLoader(points(), GLOBAL_BATCH, collate_fn=as_pairs)),
    loaded("masked words", words_loader, Bert, lambda net, batch: net(batch["ids"]), scalar=mlm),
    loaded("data sets of Hugging Face", hf_loader, call=by_name, scalar=cross_entropy),
]  # fmt: skip
