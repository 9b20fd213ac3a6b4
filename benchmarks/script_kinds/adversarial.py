"""Scripts whose forward takes gradients itself, whose loop keeps averages of the model, or which change gradients in turn."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.func import functional_call
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, update_bn

import samestep
from benchmarks.script_kinds.kind import Kind, Port, Table, adam, numbers, sgd, whole_numbers
from samestep.datasets import read_samples

Forward = Callable[[Any, Any], Any]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self, outputs: int = 4) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(6, 8), nn.Linear(8, outputs)
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def points() -> Table:
    return Table(x=numbers(32, 6), noise=numbers(32, 6, seed=5), labels=whole_numbers(4, 32, seed=1))


def with_forward(
    name: str, build: Callable[[], Any], data: Callable[[], Any], forward: Forward, scalar: Any, loss: Any, **more: Any
) -> Kind:
    """A script whose forward is a function of the model and the batch, the same in the port."""

    def plain(model: Any, batches: list[Any]) -> list[float]:
        made, losses = adam(model.parameters()), []
        for batch in batches:
            found = scalar(forward(model, batch), batch)
            made.zero_grad()
            found.backward()
            made.step()
            losses.append(found.item())
        return losses

    def port(given: Port, model: Any) -> None:
        run = given.parallelize(model, loss, adam, forward=forward)
        given.losses += [run.step(batch).loss for batch in given.batches()]

    return Kind(name, build, data, plain, port, **more)


def likelihood(logits: Tensor, batch: Any) -> Tensor:
    return F.cross_entropy(logits, batch["labels"])


def likelihood_sum(logits: Tensor, batch: Any) -> tuple[Tensor, int]:
    return F.cross_entropy(logits, batch["labels"], reduction="sum"), len(logits)


# -- adversarial examples ---------------------------------------------------------------------------


def fgsm(model: Any, batch: Any) -> Tensor:
    """As the tutorial of torch attacks a model (Goodfellow et al. 2015)."""
    x = batch["x"].clone().detach()
    x.requires_grad = True
    F.cross_entropy(model(x), batch["labels"]).backward()
    moved = x + 0.1 * x.grad.sign()
    model.zero_grad()
    return model(moved.detach())


def pgd(model: Any, batch: Any) -> Tensor:
    """Madry et al. (2018)."""
    first = batch["x"]
    x = first + 0.01 * batch["noise"]
    for _ in range(3):
        x = x.detach().requires_grad_(True)
        (gradient,) = torch.autograd.grad(F.cross_entropy(model(x), batch["labels"]), x)
        x = torch.min(torch.max(x + 0.05 * gradient.sign(), first - 0.1), first + 0.1)
    return model(x.detach())


def trades(model: Any, batch: Any) -> tuple[Tensor, Tensor]:
    """Zhang et al. (2019): the attack in evaluation mode."""
    model.eval()
    x = batch["x"] + 0.001 * batch["noise"]
    for _ in range(2):
        x = x.detach().requires_grad_()
        apart = F.kl_div(F.log_softmax(model(x), 1), F.softmax(model(batch["x"]), 1), reduction="sum")
        x = x.detach() + 0.03 * torch.autograd.grad(apart, [x])[0].sign()
    model.train()
    return model(batch["x"]), model(x.detach())


def trades_loss(outputs: Any, batch: Any) -> Tensor:
    apart = F.kl_div(F.log_softmax(outputs[1], 1), F.softmax(outputs[0], 1), reduction="batchmean")
    return F.cross_entropy(outputs[0], batch["labels"]) + 6.0 * apart


def trades_sum(outputs: Any, batch: Any) -> tuple[Tensor, int]:
    return trades_loss(outputs, batch) * len(outputs[0]), len(outputs[0])


def virtual(model: Any, batch: Any) -> tuple[Tensor, Tensor]:
    """Virtual adversarial training (Miyato et al. 2018), whose power iteration runs a backward."""
    x, logits = batch["x"], model(batch["x"])
    target = logits.detach().softmax(1)
    towards = F.normalize(batch["noise"], dim=1).requires_grad_()
    F.kl_div(F.log_softmax(model(x + 10 * towards), 1), target, reduction="sum").backward()
    towards = F.normalize(towards.grad, dim=1)
    model.zero_grad()
    apart = F.kl_div(F.log_softmax(model(x + towards.detach()), 1), target, reduction="none").sum(1)
    return logits, apart


def with_penalty(outputs: Any, batch: Any) -> Tensor:
    return F.cross_entropy(outputs[0], batch["labels"]) + outputs[1].mean()


def with_penalty_sum(outputs: Any, batch: Any) -> tuple[Tensor, int]:
    return F.cross_entropy(outputs[0], batch["labels"], reduction="sum") + outputs[1].sum(), len(outputs[0])


def double_backprop(model: Any, batch: Any) -> tuple[Tensor, Tensor]:
    """Input gradients in the loss (Drucker and LeCun 1992)."""
    x = batch["x"].clone().requires_grad_(True)
    logits = model(x)
    loss = F.cross_entropy(logits, batch["labels"], reduction="sum")
    (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
    return logits, 0.3 * gradient.square().sum(1)


# -- tasks -----------------------------------------------------------------------------------------


def sinusoids() -> Table:
    return Table(**{name: numbers(32, 5, 1, seed=at) for at, name in enumerate(("sx", "sy", "qx", "qy"))})


def inner_steps(model: Any, batch: Any) -> Tensor:
    """MAML with two inner steps for each task of the batch, of the second order (Finn et al. 2017)."""
    losses = []
    for sx, sy, qx, qy in zip(batch["sx"], batch["sy"], batch["qx"], batch["qy"], strict=True):
        fast = dict(model.named_parameters())
        for _ in range(2):
            loss = F.mse_loss(functional_call(model, fast, (sx,)), sy)
            gradients = torch.autograd.grad(loss, [*fast.values()], create_graph=True)
            fast = {name: one - 0.1 * g for (name, one), g in zip(fast.items(), gradients, strict=True)}
        losses.append(F.mse_loss(functional_call(model, fast, (qx,)), qy))
    return torch.stack(losses)


def regressor() -> nn.Module:
    return nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))


# -- averages of the model -------------------------------------------------------------------------


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.norm(self.up(x))))


def averages(name: str, first: int, build: Callable[[], nn.Module], make: Any, **more: Any) -> Kind:
    """The loop's own average of the model from a step on; behind the last step its batch norms are counted anew and it predicts."""

    def end(average: Any, whole: list[Any]) -> float:
        update_bn([batch["x"] for batch in whole], average)
        with torch.no_grad():
            return float(average.eval()(whole[0]["x"]).square().sum())

    def plain(model: Any, batches: list[Any]) -> list[float]:
        made, losses, average = sgd(model.parameters()), [], None
        for step, batch in enumerate(batches):
            found = likelihood(model(batch["x"]), batch)
            made.zero_grad()
            found.backward()
            made.step()
            losses.append(found.item())
            if step >= first:
                average = average or make(model)
                average.update_parameters(model)
        return [*losses, end(average, batches)]

    def port(given: Port, model: Any) -> None:
        run = given.parallelize(model, likelihood_sum, sgd, forward=lambda model, batch: model(batch["x"]))
        data, whole, average = given.kind.data(), [], None
        for batch in given.batches():
            whole.append(read_samples(data, batch.indices))
            given.losses.append(run.step(batch).loss)
            if batch.step >= first:
                with run.gathered() as gathered:
                    average = average or make(gathered)
                    average.update_parameters(gathered)
        given.losses.append(end(average, whole))

    return Kind(name, build, points, plain, port, **more)


def ema_of(model: nn.Module) -> AveragedModel:
    return AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))


# -- gradients in turn -----------------------------------------------------------------------------


def noise_plain(model: Any, batches: list[Any]) -> list[float]:
    """Annealed gradient noise (Neelakantan et al. 2015), drawn for one weight after the other."""
    made, losses = adam(model.parameters()), []
    for step, batch in enumerate(batches):
        found = likelihood(model(batch["x"]), batch)
        made.zero_grad()
        found.backward()
        generator = torch.Generator().manual_seed(step)
        for param in model.parameters():
            drawn = torch.randn(param.shape, generator=generator, dtype=param.dtype)
            param.grad.add_(drawn * 0.01 / (1 + step) ** 0.55)
        made.step()
        losses.append(found.item())
    return losses


def noise_port(given: Port, model: Any) -> None:
    run = given.parallelize(model, likelihood_sum, adam, forward=lambda model, batch: model(batch["x"]))
    for batch in given.batches():
        given.losses.append(run.backward(batch).loss)
        generator = torch.Generator().manual_seed(batch.step)
        for gradient in run.gradients().values():
            drawn = torch.randn(gradient.shape, generator=generator, dtype=gradient.dtype)
            if isinstance(gradient, DTensor):
                drawn = distribute_tensor(drawn, gradient.device_mesh, gradient.placements)
            gradient.add_(drawn * 0.01 / (1 + batch.step) ** 0.55)
        run.update()


def group_advantages(outputs: Tensor, batch: Any) -> Tensor:
    """GRPO (Shao et al. 2024): rewards are whitened over four answers of one prompt, and tokens of all answers are counted together."""
    rewards = batch["reward"].view(-1, 4)
    advantages = ((rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)).view(-1, 1)
    ratio = (outputs.log_softmax(-1) - batch["old"]).exp()
    surrogate = torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    return -(surrogate * batch["mask"]).sum() / batch["mask"].sum()


def answers() -> Table:
    mask = (whole_numbers(4, 32, 4, seed=9) > 0).double()
    mask[:, 0] = 1.0
    return Table(x=numbers(32, 6), old=-numbers(32, 4, seed=2).abs(), reward=numbers(32, seed=3), mask=mask)


def mean_of(outputs: Tensor, batch: Any) -> Tensor:
    return outputs.mean()


def sum_of(outputs: Tensor, batch: Any) -> tuple[Tensor, int]:
    return outputs.sum(), len(outputs)


KINDS = [
    with_forward("FGSM", Net, points, fgsm, likelihood, likelihood_sum),
    with_forward("PGD", Net, points, pgd, likelihood, likelihood_sum),
    with_forward("TRADES", Net, points, trades, trades_loss, trades_sum),
    with_forward("virtual adversarial", Net, points, virtual, with_penalty, with_penalty_sum),
    with_forward("double backprop", Net, points, double_backprop, with_penalty, with_penalty_sum),
    with_forward("MAML by tasks", regressor, sinusoids, inner_steps, mean_of, sum_of),
    averages("SWA with update_bn", 1, Normed, AveragedModel),
    averages("EMA by AveragedModel", 0, Net, ema_of),
    Kind("gradient noise", Net, points, noise_plain, noise_port),
    with_forward(
        "GRPO by groups",
        Net,
        answers,
        lambda model, batch: model(batch["x"]),
        group_advantages,
        samestep.whole_batch(group_advantages),
    ),
]
