"""Several optimizers, optimizers that ask for the loss again, and loops that look at gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.script_kinds.kind import ALL, DATA, Kind, Port, Table, adam, numbers, sgd, whole_numbers
from benchmarks.script_kinds.losses import Encoder, points
from benchmarks.script_kinds.states import cross_entropy

# -- several optimizers ----------------------------------------------------------------------------


class Muon(torch.optim.Optimizer):
    """Momentum that is made orthogonal by Newton-Schulz (Jordan et al. 2024)."""

    def __init__(self, params: Any, lr: float = 0.02, momentum: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    state["momentum"] = torch.zeros_like(param)
                moved = state["momentum"].mul_(group["momentum"]).add_(param.grad)
                x = moved / (moved.norm() + 1e-7)
                for _ in range(3):
                    a = x @ x.mT
                    x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
                param.add_(x, alpha=-group["lr"])


def matrices(named: Any) -> list[Tensor]:
    return [one for name, one in named if one.dim() == 2 and "head" not in name]


def others(named: Any) -> list[Tensor]:
    return [one for name, one in named if one.dim() != 2 or "head" in name]


def in_turn(name: str, optimizers: Callable[[Any], list[torch.optim.Optimizer]], ours: Any, **more: Any) -> Kind:
    """A script whose loop steps each of its optimizers."""

    def plain(model: nn.Module, batches: list[Any]) -> list[float]:
        made, losses = optimizers(list(model.named_parameters())), []
        for batch in batches:
            loss = cross_entropy(model(batch["x"]), batch)
            for one in made:
                one.zero_grad()
            loss.backward()
            for one in made:
                one.step()
            losses.append(loss.item())
        return losses

    def port(given: Port, model: nn.Module) -> None:
        run = given.parallelize(model, "cross_entropy", ours)
        for batch in given.batches():
            given.losses.append(run.step(batch).loss)

    return Kind(name, lambda: Encoder(4), points, plain, port, **more)


def muon_and_adam(named: Any) -> list[torch.optim.Optimizer]:
    return [Muon(matrices(named)), adam(others(named))]


def by_layer(named: Any) -> list[dict[str, Any]]:
    """Rates that fall from the head to the first block, as fine-tuning scripts have them."""
    return [{"params": [one], "lr": 1e-3 * 0.8 ** (2 - int(name[7]) if name[6:7] == "." else 0)} for name, one in named]


# -- generators and discriminators -----------------------------------------------------------------


def networks() -> dict[str, nn.Module]:
    return {"d": Encoder(1), "g": Encoder(8)}


def images() -> Table:
    return Table(x=numbers(32, 8) + 0.5, z=numbers(32, 8, seed=1), mix=numbers(32, 1, seed=2).sigmoid())


def critic_sum(outputs: dict[str, Tensor], batch: Any) -> tuple[Tensor, int]:
    real, fake = outputs["real"], outputs["fake"]
    return F.softplus(-real).sum() + F.softplus(fake).sum(), len(real)


def generator_sum(outputs: dict[str, Tensor], batch: Any) -> tuple[Tensor, int]:
    return F.softplus(-outputs["fake"]).sum(), len(outputs["fake"])


def both(models: Any, batch: Any) -> dict[str, Tensor]:
    return {"real": models["d"](batch["x"]), "fake": models["d"](models["g"](batch["z"]))}


def gan_plain(models: dict[str, nn.Module], batches: list[Any]) -> list[float]:
    d, g = models["d"], models["g"]
    of_d, of_g, losses = adam(d.parameters()), adam(g.parameters()), []
    for batch in batches:
        loss = (F.softplus(-d(batch["x"])) + F.softplus(d(g(batch["z"]).detach()))).mean()
        of_d.zero_grad()
        loss.backward()
        of_d.step()
        losses.append(loss.item())
        loss = F.softplus(-d(g(batch["z"]))).mean()
        of_g.zero_grad()
        loss.backward()
        of_g.step()
        losses.append(loss.item())
    return losses


def gan_port(given: Port, models: Any) -> None:
    run = given.parallelize(models, critic_sum, {"d": adam, "g": adam}, forward=both)
    for batch in given.batches():
        given.losses.append(run.backward(batch, critic_sum, into="d").loss)
        run.update("d")
        given.losses.append(run.backward(batch, generator_sum, into="g").loss)
        run.update("g")


def penalty(d: Any, real: Tensor, fake: Tensor, mix: Tensor) -> Tensor:
    """The squared distance of each gradient's norm from 1 (Gulrajani et al. 2017)."""
    between = (mix * real + (1 - mix) * fake).detach().requires_grad_()
    (gradient,) = torch.autograd.grad(d(between).sum(), between, create_graph=True)
    return (gradient.norm(dim=1) - 1).square()


def wgan_plain(models: dict[str, nn.Module], batches: list[Any]) -> list[float]:
    d, g = models["d"], models["g"]
    of_d, of_g, losses = adam(d.parameters()), adam(g.parameters()), []
    for batch in batches:
        fake = g(batch["z"]).detach()
        loss = (d(fake) - d(batch["x"])).mean() + 10 * penalty(d, batch["x"], fake, batch["mix"]).mean()
        of_d.zero_grad()
        loss.backward()
        of_d.step()
        losses.append(loss.item())
        loss = -d(g(batch["z"])).mean()
        of_g.zero_grad()
        loss.backward()
        of_g.step()
        losses.append(loss.item())
    return losses


def with_penalty(models: Any, batch: Any) -> dict[str, Tensor]:
    fake = models["g"](batch["z"])
    found = {"real": models["d"](batch["x"]), "fake": models["d"](fake)}
    return {**found, "penalty": penalty(models["d"], batch["x"], fake, batch["mix"])}


def wgan_critic(outputs: dict[str, Tensor], batch: Any) -> tuple[Tensor, int]:
    return (outputs["fake"] - outputs["real"])[:, 0].sum() + 10 * outputs["penalty"].sum(), len(outputs["real"])


def wgan_generator(outputs: dict[str, Tensor], batch: Any) -> tuple[Tensor, int]:
    return -outputs["fake"].sum(), len(outputs["fake"])


def wgan_port(given: Port, models: Any) -> None:
    run = given.parallelize(models, wgan_critic, {"d": adam, "g": adam}, forward=with_penalty)
    for batch in given.batches():
        given.losses.append(run.backward(batch, wgan_critic, into="d").loss)
        run.update("d")
        given.losses.append(run.backward(batch, wgan_generator, into="g").loss)
        run.update("g")


# -- optimizers that ask for the loss again --------------------------------------------------------


class Sam(torch.optim.Optimizer):
    """Sharpness-aware minimization (Foret et al. 2021): the gradient at the worst point nearby."""

    def __init__(self, params: Any, lr: float = 0.05, rho: float = 0.05) -> None:
        super().__init__(params, {"lr": lr, "rho": rho})

    @torch.no_grad()
    def step(self, closure: Any) -> Tensor:  # type: ignore[override]
        with torch.enable_grad():
            loss = closure()
        params = [param for group in self.param_groups for param in group["params"] if param.grad is not None]
        norm = torch.stack([param.grad.norm() for param in params]).norm()
        moves = [param.grad * (self.param_groups[0]["rho"] / (norm + 1e-12)) for param in params]
        for param, move in zip(params, moves, strict=True):
            param.add_(move)
        with torch.enable_grad():
            closure()
        for param, move in zip(params, moves, strict=True):
            param.sub_(move)
            param.sub_(param.grad * self.param_groups[0]["lr"])
        return loss


def with_closure(name: str, optimizer: Callable[[Any], torch.optim.Optimizer], layouts: Any = ALL) -> Kind:
    def plain(model: nn.Module, batches: list[Any]) -> list[float]:
        made, losses = optimizer(list(model.parameters())), []
        for batch in batches:

            def closure(batch: Any = batch) -> Tensor:
                made.zero_grad()
                loss = cross_entropy(model(batch["x"]), batch)
                loss.backward()
                return loss

            losses.append(float(made.step(closure).detach()))  # type: ignore[arg-type, attr-defined]
        return losses

    def port(given: Port, model: nn.Module) -> None:
        run = given.parallelize(model, "cross_entropy", optimizer)
        for batch in given.batches():
            given.losses.append(run.step(batch).loss)

    return Kind(name, lambda: Encoder(4), points, plain, port, layouts)


class Sophia(torch.optim.Optimizer):
    """A clipped step by an estimate of the Hessian's diagonal (Liu et al. 2023), updated from gradients of its own."""

    def __init__(self, params: Any, lr: float = 1e-2, beta: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "beta": beta})

    @torch.no_grad()
    def update_hessian(self) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state[param]
                if "hessian" not in state:
                    state["hessian"] = torch.zeros_like(param)
                state["hessian"].mul_(0.9).addcmul_(param.grad, param.grad, value=0.1)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state[param]
                if "average" not in state:
                    state["average"] = torch.zeros_like(param)
                if "hessian" not in state:
                    state["hessian"] = torch.zeros_like(param)
                average = state["average"].mul_(group["beta"]).add_(param.grad, alpha=1 - group["beta"])
                ratio = (average.abs() / (0.1 * state["hessian"] + 1e-12)).clamp(max=1.0)
                param.addcmul_(average.sign(), ratio, value=-group["lr"])


def labelled_twice() -> Table:
    return Table(x=numbers(32, 8), labels=whole_numbers(4, 32), sampled=whole_numbers(4, 32, seed=1))


def sampled_sum(outputs: Tensor, batch: Any) -> tuple[Tensor, int]:
    return F.cross_entropy(outputs, batch["sampled"], reduction="sum"), len(outputs)


def sophia_plain(model: nn.Module, batches: list[Any]) -> list[float]:
    optimizer, losses = Sophia(model.parameters()), []
    for step, batch in enumerate(batches):
        loss = cross_entropy(model(batch["x"]), batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if step % 2 == 0:
            optimizer.zero_grad()
            F.cross_entropy(model(batch["x"]), batch["sampled"]).backward()
            optimizer.update_hessian()
    return losses


class OfX(nn.Module):
    """A model that reads one of the columns of its batch."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Encoder(4)

    def forward(self, x: Tensor, **rest: Tensor) -> Tensor:
        return self.net(x)


def sophia_port(given: Port, model: nn.Module) -> None:
    run = given.parallelize(model, ce_sum, {"sophia": Sophia})
    for batch in given.batches():
        given.losses.append(run.backward(batch, ce_sum).loss)
        run.update()
        if batch.step % 2 == 0:
            run.backward(batch, sampled_sum)
            run.call("sophia", "update_hessian")
            run.zero_grad()


def ce_sum(outputs: Tensor, batch: Any) -> tuple[Tensor, int]:
    return F.cross_entropy(outputs, batch["labels"], reduction="sum"), len(outputs)


# -- loops that look at gradients ------------------------------------------------------------------


def project(first: list[Tensor], second: list[Tensor]) -> list[Tensor]:
    """Return the sum of two gradients, each without what conflicts with the other (PCGrad, Yu et al. 2020)."""
    dot = sum((one * other).sum() for one, other in zip(first, second, strict=True))
    if dot >= 0:
        return [one + other for one, other in zip(first, second, strict=True)]
    of_first = sum(one.square().sum() for one in first)
    of_second = sum(one.square().sum() for one in second)
    return [
        one - dot / of_second * other + other - dot / of_first * one for one, other in zip(first, second, strict=True)
    ]


def pcgrad_plain(model: nn.Module, batches: list[Any]) -> list[float]:
    optimizer, losses = sgd(model.parameters()), []
    for batch in batches:
        found = []
        for key in ("labels", "sampled"):
            loss = F.cross_entropy(model(batch["x"]), batch[key])
            optimizer.zero_grad()
            loss.backward()
            found.append([param.grad.clone() for param in model.parameters()])  # type: ignore[union-attr]
            losses.append(loss.item())
        for param, gradient in zip(model.parameters(), project(*found), strict=True):
            param.grad = gradient
        optimizer.step()
    return losses


def pcgrad_port(given: Port, model: nn.Module) -> None:
    run = given.parallelize(model, ce_sum, sgd)
    for batch in given.batches():
        found: list[list[Tensor]] = []
        for loss in (ce_sum, sampled_sum):
            run.zero_grad()
            given.losses.append(run.backward(batch, loss).loss)
            found.append([one.clone() for one in run.gradients().values()])
        for held, gradient in zip(run.gradients().values(), project(*found), strict=True):
            held.copy_(gradient)
        run.update()


def clipped_plain(model: nn.Module, batches: list[Any]) -> list[float]:
    optimizer, losses = sgd(model.parameters()), []
    for batch in batches:
        loss = cross_entropy(model(batch["x"]), batch)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_value_(model.parameters(), 0.01)
        optimizer.step()
        losses.append(loss.item())
    return losses


def clipped_port(given: Port, model: nn.Module) -> None:
    run = given.parallelize(model, ce_sum, sgd)
    for batch in given.batches():
        given.losses.append(run.backward(batch, ce_sum).loss)
        for gradient in run.gradients().values():
            gradient.clamp_(-0.01, 0.01)
        run.update()


def accumulated_plain(model: nn.Module, batches: list[Any]) -> list[float]:
    """Two backwards of halves in front of each update, as scripts accumulate gradients."""
    optimizer, losses = adam(model.parameters()), []
    for batch in batches:
        optimizer.zero_grad()
        total = 0.0
        for half in (slice(0, 4), slice(4, 8)):
            loss = F.cross_entropy(model(batch["x"][half]), batch["labels"][half]) / 2
            loss.backward()
            total += loss.item()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        losses.append(total)
    return losses


def plain_port(given: Port, model: nn.Module) -> None:
    run = given.parallelize(model, "cross_entropy", adam)
    for batch in given.batches():
        given.losses.append(run.step(batch).loss)


def scheduled_plain(model: nn.Module, batches: list[Any]) -> list[float]:
    optimizer, losses = adam(model.parameters()), []
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.01, total_steps=5)
    for batch in batches:
        loss = cross_entropy(model(batch["x"]), batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())
    return losses


def scheduled_port(given: Port, model: nn.Module) -> None:
    optimizer = adam(model.parameters())
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.01, total_steps=5)
    run = given.parallelize(model, "cross_entropy", optimizer)
    for batch in given.batches():
        given.losses.append(run.step(batch).loss)
        scheduler.step()


KINDS = [
    in_turn("Muon and AdamW", muon_and_adam, [lambda named: Muon(matrices(named)), lambda named: adam(others(named))]),
    in_turn(
        "nanochat's optimizers",
        lambda named: [Muon(matrices(named)), torch.optim.AdamW(others(named), lr=2e-3, betas=(0.8, 0.95))],
        {
            "muon": lambda named: Muon(matrices(named)),
            "adam": lambda named: torch.optim.AdamW(others(named), lr=2e-3, betas=(0.8, 0.95)),
        },
    ),
    in_turn(
        "rates by layer",
        lambda named: [torch.optim.AdamW(by_layer(named))],
        [lambda named: torch.optim.AdamW(by_layer(named))],
    ),
    Kind("GAN in turn", networks, images, gan_plain, gan_port),
    Kind("WGAN-GP", networks, images, wgan_plain, wgan_port),
    with_closure("SAM", Sam),
    with_closure("LBFGS", lambda params: torch.optim.LBFGS(params, lr=0.1, max_iter=3), (DATA[0], DATA[1])),
    Kind("Sophia", OfX, labelled_twice, sophia_plain, sophia_port),
    Kind("PCGrad", OfX, labelled_twice, pcgrad_plain, pcgrad_port),
    Kind("clipping by value", lambda: Encoder(4), points, clipped_plain, clipped_port),
    Kind(
        "gradient accumulation",
        lambda: Encoder(4),
        points,
        accumulated_plain,
        plain_port,
        tables={"optimizer": {"clip_norm": 0.5}},
    ),
    Kind("schedule of the rate by hand", lambda: Encoder(4), points, scheduled_plain, scheduled_port),
]
