"""Loops that take their steps in parts, each as plain torch and with a run: what they compute must be equal."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

import samestep
from samestep.job import Job
from samestep.runtime.run import Run
from tests.parts import Residual

STEPS = 4
Result = tuple[list[float], dict[str, Tensor]]


class Points(torch.utils.data.Dataset[Any]):
    """Points with labels, and numbers from which a generator makes others."""

    def __len__(self) -> int:
        return 29

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        drawn = torch.randn(12, generator=torch.Generator().manual_seed(index), dtype=torch.float64)
        return {"x": drawn[:6], "z": drawn[6:10], "y": drawn[10:]}


class Regression(nn.Module):
    """Two heads over a body."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh())
        self.one, self.two = nn.Linear(8, 2), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        found = self.body(x)
        return self.one(found), self.two(found)


Block = functools.partial(Residual, 4, 8, torch.relu)
"""Two linear layers of four features around a ReLU, with a residual sum."""


class Reading(nn.Module):
    """A head over blocks, of which neurons and a weight are outputs too: the head's, or another one."""

    def __init__(self, of_head: bool = False) -> None:
        super().__init__()
        self.of_head = of_head
        self.lift, self.blocks, self.head = (
            nn.Linear(6, 8),
            nn.ModuleList([Residual(8, 16), Residual(8, 16)]),
            nn.Linear(8, 4),
        )

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        found = self.blocks[0](self.lift(x))
        neurons = torch.tanh(self.blocks[1].up(found))
        found = found + self.blocks[1].down(neurons)
        return self.head(found), *((found, self.head.weight) if self.of_head else (neurons, self.lift.weight))


class Gan(nn.Module):
    """A generator and a discriminator; with a penalty, on the gradient of the latter between real and made points."""

    def __init__(self, penalty: bool = False) -> None:
        super().__init__()
        self.g = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 6))
        self.d = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
        self.penalty = penalty

    def forward(self, z: Tensor, x: Tensor) -> dict[str, Tensor]:
        made = self.g(z)
        found = {"real": self.d(x), "made": self.d(made)}
        if self.penalty:
            share = torch.sigmoid(z[:, :1])
            between = (share * x + (1 - share) * made.detach()).requires_grad_()
            (slope,) = torch.autograd.grad(self.d(between).sum(), between, create_graph=True)
            found["penalty"] = (slope.norm(2, dim=1) - 1).square()
        return found


def one_loss(outputs: Any, batch: Any) -> tuple[Tensor, int]:
    return (outputs[0] - batch["y"]).square().sum(), outputs[0].numel()


def two_loss(outputs: Any, batch: Any) -> tuple[Tensor, Tensor]:
    """A loss with a count of its own."""
    counted = (batch["y"] > -0.7).double()
    return ((outputs[1] + batch["y"]).abs() * counted).sum(), counted.sum()


def both(outputs: Any, batch: Any) -> tuple[Tensor, int]:
    return one_loss(outputs, batch)[0] + outputs[1].square().sum(), outputs[0].numel()


def of_all_outputs(outputs: Any, batch: Any) -> tuple[Tensor, int]:
    """A loss with penalties on neurons and on a weight."""
    found, neurons, weight = outputs
    penalty = neurons.abs().sum(1).square().sum() / 8 + len(found) * (weight.T @ weight).square().sum()
    return both(found.chunk(2, 1), batch)[0] + 0.1 * penalty, found.numel()


def d_loss(outputs: Mapping[str, Tensor], batch: Any) -> tuple[Tensor, int]:
    return softplus(-outputs["real"]).sum() + softplus(outputs["made"]).sum(), len(outputs["real"])


def g_loss(outputs: Mapping[str, Tensor], batch: Any) -> tuple[Tensor, int]:
    return softplus(-outputs["made"]).sum(), len(outputs["made"])


def critic_loss(outputs: Mapping[str, Tensor], batch: Any) -> tuple[Tensor, int]:
    total = outputs["made"].sum() - outputs["real"].sum() + 10.0 * outputs["penalty"].sum()
    return total, len(outputs["real"])


def wasserstein_loss(outputs: Mapping[str, Tensor], batch: Any) -> tuple[Tensor, int]:
    return -outputs["made"].sum(), len(outputs["made"])


adam = functools.partial(torch.optim.Adam, lr=0.02, betas=(0.5, 0.9), eps=1e-3)


momentum = functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9)


class Sam(torch.optim.Optimizer):
    """Sharpness-aware minimisation around a base optimizer, as its authors' code (davda54/sam) has it."""

    def __init__(self, params: Any, base_optimizer: Any, rho: float = 0.05, **options: Any) -> None:
        super().__init__(params, {"rho": rho, **options})
        self.base_optimizer = base_optimizer(self.param_groups, **options)
        self.param_groups = self.base_optimizer.param_groups
        self.defaults.update(self.base_optimizer.defaults)

    @torch.no_grad()
    def first_step(self, zero_grad: bool = False) -> None:
        norms = [p.grad.norm(p=2) for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.norm(torch.stack(norms), p=2)
        for group in self.param_groups:
            scale = group["rho"] / (norm + 1e-12)
            for p in group["params"]:
                if p.grad is None:
                    continue
                self.state[p]["old_p"] = p.data.clone()
                p.add_(p.grad * scale.to(p))
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
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert closure is not None, "Sharpness Aware Minimization requires closure, but it was not provided"
        closure = torch.enable_grad()(closure)
        self.first_step(zero_grad=True)
        closure()
        self.second_step()


def sam(params: Any) -> torch.optim.Optimizer:
    return Sam(params, torch.optim.SGD, rho=0.1, lr=0.05, momentum=0.9)


class Divided(torch.optim.SGD):
    """A step with an option of its own, as that of Sophia."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.1)

    @torch.no_grad()
    def step(self, closure: Any = None, bs: int = 1) -> None:  # type: ignore[override]
        for param in self.param_groups[0]["params"]:
            param.sub_(param.grad, alpha=0.1 / bs)


lbfgs = functools.partial(torch.optim.LBFGS, lr=0.5, max_iter=4, history_size=3)


searching = functools.partial(torch.optim.LBFGS, lr=1.0, max_iter=3, line_search_fn="strong_wolfe")


# -- as plain torch --------------------------------------------------------------------------------


class Plain:
    """What a plain loop has: a model, its optimizers by name, and backwards of means."""

    def __init__(self, model: nn.Module, optimizers: Any) -> None:
        self.model = model
        named = [*model.named_parameters()]
        given = optimizers if isinstance(optimizers, dict) else {"": optimizers}
        self.optimizers = {
            key: make([param for name, param in named if name.startswith(f"{key}." if key else "")])
            for key, make in given.items()
        }

    def mean(self, batch: Any, loss: Callable[..., Any]) -> Tensor:
        names = self.model.forward.__code__.co_varnames[1 : self.model.forward.__code__.co_argcount]
        total, count = loss(self.model(**{name: batch[name] for name in names}), batch)
        mean: Tensor = total / count
        return mean

    def zero_grad(self) -> None:
        self.model.zero_grad()

    def params(self, key: str) -> list[Tensor]:
        return [param for group in self.optimizers[key].param_groups for param in group["params"]]


@dataclass(frozen=True)
class Loop:
    """A loop in both forms, each a function of the model or run, one batch, and the index of its step; it returns losses."""

    build: Callable[[], nn.Module]
    loss: Callable[..., Any]
    optimizers: Any
    plain: Callable[[Plain, Any, int], list[float]] = lambda *_: []
    parts: Callable[[Run, Any, int], list[float]] = lambda *_: []
    clip_norm: float | None = None


def job_of(loop: Loop, steps: int = STEPS, **tables: Any) -> Job:
    return Job(
        train={"global_batch": 8, "steps": steps, "watch_every": 0},
        numerics={"precision": "float64"},
        optimizer={"clip_norm": loop.clip_norm},
        run={"device": "cpu"},
        **tables,
    )


def built(loop: Loop) -> nn.Module:
    torch.manual_seed(5)
    return loop.build()


def plain_result(loop: Loop) -> Result:
    plain = Plain(built(loop).double(), loop.optimizers)
    losses = []
    for batch in samestep.batches(Points(), job_of(loop)):
        losses += loop.plain(plain, batch.samples(batch.indices), batch.step)
    return losses, plain.model.state_dict()


def run_of(loop: Loop, layout: str, **tables: Any) -> Run:
    return samestep.parallelize(built(loop), loop.loss, loop.optimizers, layout=layout, job=job_of(loop, **tables))


def parts_result(loop: Loop, layout: str, folder: Path | None = None, first: int = 0, last: int = STEPS) -> Result:
    """Return the losses and the weights of a loop with a run, which loads a checkpoint or saves one in between."""
    run = run_of(loop, layout)
    if first:
        assert folder is not None
        run.load(folder)
    losses: list[float] = []
    for batch in samestep.batches(Points(), run.job, first_step=run.steps_taken):
        if batch.step == last:
            break
        losses += loop.parts(run, batch, batch.step)
        assert run.steps_taken == batch.step + 1
    if folder is not None and last < STEPS:
        run.save(folder)
    return losses, run.state_dict(on_every_rank=True)


# -- the loops -------------------------------------------------------------------------------------


def _plain_step(plain: Plain, batch: Any, step: int) -> list[float]:
    plain.zero_grad()
    loss = plain.mean(batch, both)
    loss.backward()
    nn.utils.clip_grad_norm_(plain.model.parameters(), 0.1)
    for one in plain.optimizers.values():
        one.step()
    return [loss.item()]


def _plain_whole(loss: Callable[..., Any]) -> Callable[[Plain, Any, int], list[float]]:
    def step_of(plain: Plain, batch: Any, step: int) -> list[float]:
        plain.zero_grad()
        mean = plain.mean(batch, loss)
        mean.backward()
        for one in plain.optimizers.values():
            one.step()
        return [mean.item()]

    return step_of


def _one_backward(run: Run, batch: Any, step: int) -> list[float]:
    report = run.backward(batch)
    run.update()
    return [report.loss]


def _plain_two_losses(plain: Plain, batch: Any, step: int) -> list[float]:
    plain.zero_grad()
    one = plain.mean(batch, one_loss)
    one.backward()
    if step % 2:
        with torch.no_grad():
            for param in plain.model.parameters():
                param.mul_(0.9)
    two = plain.mean(batch, two_loss)
    two.backward()
    nn.utils.clip_grad_norm_(plain.model.parameters(), 0.1)
    for optimizer in plain.optimizers.values():
        optimizer.step()
    return [one.item(), (one + two).item()]


def _two_losses(run: Run, batch: Any, step: int) -> list[float]:
    """Two backwards, between which the loop sets weights in every other step: the gradients of the first one go on waiting."""
    losses = [run.backward(batch, one_loss).loss]
    if step == 1:
        with run.gathered() as model, torch.no_grad():
            for param in model.parameters():
                param.mul_(0.9)
    elif step == 3:
        run.load_state_dict({name: 0.9 * one for name, one in run.state_dict(on_every_rank=True).items()})
    losses.append(run.backward(batch, two_loss).loss)
    run.update()
    return losses


def _plain_in_turn(real: Callable[..., Any], made: Callable[..., Any], every: int) -> Callable[..., Any]:
    def turn(plain: Plain, batch: Any, step: int) -> list[float]:
        plain.zero_grad()
        first = plain.mean(batch, real)
        first.backward()
        plain.optimizers["d"].step()
        if (step + 1) % every:
            return [first.item()]
        plain.zero_grad()
        second = plain.mean(batch, made)
        second.backward()
        plain.optimizers["g"].step()
        return [first.item(), second.item()]

    return turn


def _in_turn(real: Callable[..., Any], made: Callable[..., Any], every: int) -> Callable[..., Any]:
    def turn(run: Run, batch: Any, step: int) -> list[float]:
        losses = [run.backward(batch, real, into="d").loss]
        run.update("d")
        if (step + 1) % every:
            return losses
        losses.append(run.backward(batch, made, into="g").loss)
        run.update("g")
        return losses

    return turn


def _plain_body_every_other(plain: Plain, batch: Any, step: int) -> list[float]:
    """A body that is updated every other step by the gradients of two batches, and heads in each."""
    for key in ("one", "two") if step % 2 else plain.optimizers:
        plain.optimizers[key].zero_grad()
    loss = plain.mean(batch, both)
    loss.backward()
    for key in plain.optimizers if step % 2 else ("one", "two"):
        plain.optimizers[key].step()
    waiting, vars(plain)["waiting"] = vars(plain).get("waiting", 0.0), loss.item()
    return [loss.item() + (waiting if step % 2 else 0.0)]


def _body_every_other(run: Run, batch: Any, step: int) -> list[float]:
    if step % 2:
        assert all(name.startswith("body") for name in run.gradients())
    else:
        run.zero_grad()
    report = run.backward(batch)
    for key in ("body", "one", "two") if step % 2 else ("one", "two"):
        run.update(key)
    return [report.loss]


def _plain_closure(plain: Plain, batch: Any, step: int) -> list[float]:
    losses = []
    optimizer = plain.optimizers[""]

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = plain.mean(batch, both)
        loss.backward()
        losses.append(loss.item())
        return loss

    closure()
    optimizer.step(closure)
    return losses[:1]


def _whole(run: Run, batch: Any, step: int) -> list[float]:
    return [run.step(batch).loss]


def _plain_first_of_two(plain: Plain, batch: Any, step: int) -> list[float]:
    """SAM over the body, by a closure, and SGD over the heads."""
    plain.zero_grad()
    loss = plain.mean(batch, both)
    loss.backward()
    plain.optimizers["one"].step()
    plain.optimizers["two"].step()

    def closure() -> Tensor:
        again = plain.mean(batch, both)
        again.backward()
        return again

    plain.zero_grad()
    closure()
    plain.optimizers["body"].step(closure)
    return [loss.item()]


def _first_of_two(run: Run, batch: Any, step: int) -> list[float]:
    report = run.backward(batch)
    run.update("one")
    run.update("two")
    run.zero_grad()
    run.backward(batch, into="body")
    run.update("body")
    return [report.loss]


def _plain_divided(plain: Plain, batch: Any, step: int) -> list[float]:
    plain.zero_grad()
    loss = plain.mean(batch, both)
    loss.backward()
    plain.optimizers[""].step(bs=step + 1)
    return [loss.item()]


def _divided(run: Run, batch: Any, step: int) -> list[float]:
    loss = run.backward(batch).loss
    run.update(bs=step + 1)
    return [loss]


def _plain_sam(plain: Plain, batch: Any, step: int) -> list[float]:
    optimizer: Any = plain.optimizers[""]
    loss = plain.mean(batch, both)
    loss.backward()
    optimizer.first_step(zero_grad=True)
    again = plain.mean(batch, both)
    again.backward()
    optimizer.second_step(zero_grad=True)
    return [loss.item(), again.item()]


def _sam(run: Run, batch: Any, step: int) -> list[float]:
    losses = [run.backward(batch).loss]
    run.call(None, "first_step", zero_grad=True)
    losses.append(run.backward(batch).loss)
    run.call(None, "second_step", zero_grad=True)
    return losses


def _calls(step: int) -> list[tuple[str, Any]]:
    """Return calls of a step in an order drawn at random, which ends with an update of all that waits."""
    drawn = random.Random(step)
    calls: list[tuple[str, Any]] = [("backward", (drawn.randrange(2), drawn.choice([None, *OF_HEADS])))]
    for _ in range(7):
        kind = drawn.choice(["backward", "backward", "update", "gradients", "zero_grad"])
        given = drawn.choice([None, *OF_HEADS])
        calls.append((kind, (drawn.randrange(2), given) if kind == "backward" else given))
    return [*calls, ("backward", (0, None)), ("update", None)]


def _plain_any_order(plain: Plain, batch: Any, step: int) -> list[float]:
    params = dict(plain.model.named_parameters())
    losses: list[float] = []
    for kind, given in _calls(step):
        mine = {name: param for name, param in params.items() if given is None or name.startswith(f"{given}.")}
        if kind == "backward":
            mine = {name: param for name, param in params.items() if name.startswith(given[1] or "")}
            loss = plain.mean(batch, (one_loss, both)[given[0]])
            found = torch.autograd.grad(loss, [*mine.values()], allow_unused=True)
            for param, gradient in zip(mine.values(), found, strict=True):
                if gradient is not None:
                    param.grad = gradient if param.grad is None else param.grad + gradient
            losses = losses or [loss.item()]
        waiting = [param for param in params.values() if param.grad is not None]
        if kind == "gradients":
            for param in waiting:
                param.grad = param.grad * 0.5
        if kind == "update" and any(param.grad is not None for param in mine.values()):
            nn.utils.clip_grad_norm_(mine.values(), 0.1)
            for name in OF_HEADS if given is None else [given]:
                plain.optimizers[name].step()
        if kind in ("update", "zero_grad"):
            for param in mine.values():
                param.grad = None
    return losses


def _any_order(run: Run, batch: Any, step: int) -> list[float]:
    losses: list[float] = []
    waiting: set[str] = set()
    of_loss = [{"body", "one"}, {*OF_HEADS}]
    for kind, given in _calls(step):
        mine = {*OF_HEADS} if given is None else {given}
        if kind == "backward":
            gives = of_loss[given[0]] & ({*OF_HEADS} if given[1] is None else {given[1]})
            report = run.backward(batch, (one_loss, both)[given[0]], into=given[1])
            losses = losses or [report.loss]
            waiting |= gives
        elif kind == "gradients" and waiting:
            for gradient in run.gradients().values():
                gradient.mul_(0.5)
        elif kind == "update" and mine & waiting:
            run.update(given)
        elif kind == "zero_grad":
            run.zero_grad(given)
        if kind in ("update", "zero_grad"):
            waiting -= mine
    return losses


OF_HEADS = {"body": adam, "one": momentum, "two": adam}
LOOPS = {
    "one backward": Loop(Regression, both, adam, _plain_step, _one_backward, clip_norm=0.1),
    "neurons read": Loop(Reading, of_all_outputs, adam, _plain_whole(of_all_outputs), _whole),
    "weights read": Loop(functools.partial(Reading, True), of_all_outputs, adam, _plain_whole(of_all_outputs), _whole),
    "two losses": Loop(Regression, both, OF_HEADS, _plain_two_losses, _two_losses, clip_norm=0.1),
    "gan": Loop(
        Gan, d_loss, {"d": adam, "g": momentum}, _plain_in_turn(d_loss, g_loss, 1), _in_turn(d_loss, g_loss, 1)
    ),
    "wgan-gp": Loop(
        lambda: Gan(penalty=True),
        critic_loss,
        {"d": adam, "g": adam},
        _plain_in_turn(critic_loss, wasserstein_loss, 2),
        _in_turn(critic_loss, wasserstein_loss, 2),
    ),
    "sam": Loop(Regression, both, sam, _plain_closure, _whole),
    "lbfgs": Loop(Regression, both, lbfgs, _plain_closure, _whole),
    "lbfgs with a search": Loop(Regression, both, searching, _plain_closure, _one_backward),
    "sam for one of three": Loop(
        Regression, both, {"body": sam, "one": momentum, "two": adam}, _plain_first_of_two, _first_of_two
    ),
    "an option of a step": Loop(Regression, both, Divided, _plain_divided, _divided),
    "sam by hand": Loop(Regression, both, sam, _plain_sam, _sam),
    "body every other step": Loop(Regression, both, OF_HEADS, _plain_body_every_other, _body_every_other),
    "any order": Loop(Regression, both, OF_HEADS, _plain_any_order, _any_order, clip_norm=0.1),
}
