"""Training code as people write it in trainers and tutorials: models, losses, optimizers and loops, each as one case."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.optim import Optimizer

from tests.proof.odd_code import Vectors

Each = Callable[[nn.Module, Optimizer | None], None]
"""What the loop does behind a step, to the run's own module, or to a plain loop's model."""


@dataclass(frozen=True)
class Case:
    """One piece of training code; `made` returns a build function or an instance, the loss, and the optimizer."""

    made: Callable[[], tuple[Any, Any, Any]]
    data: Callable[[], Any] = Vectors
    each: Each | None = None


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Any:
        return self.c(torch.tanh(self.b(torch.tanh(self.a(x)))))


sgd = functools.partial(torch.optim.SGD, lr=0.1)


def summed(outputs: Tensor, batch: Any) -> tuple[Tensor, int]:
    return F.cross_entropy(outputs, batch[1], reduction="sum"), len(outputs)


# -- losses ----------------------------------------------------------------------------------------

_caught: dict[str, Tensor] = {}


def caught_by_a_hook() -> tuple[Any, Any, Any]:
    def build() -> nn.Module:
        net = Net()
        net.b.register_forward_hook(lambda module, given, output: _caught.update(b=output))
        return net

    def loss(outputs: Tensor, batch: Any) -> tuple[Tensor, int]:
        total, count = summed(outputs, batch)
        return total + 0.1 * _caught["b"].pow(2).sum(), count

    return build, loss, sgd


class WithInput(Net):
    def forward(self, x: Tensor) -> Any:
        x.requires_grad_()
        return super().forward(x), x


def penalty(outputs: Any, batch: Any) -> tuple[Tensor, int]:
    total, count = summed(outputs[0], batch)
    (slope,) = torch.autograd.grad(outputs[0].sum(), outputs[1], create_graph=True)
    return total + 0.5 * slope.pow(2).sum(), count


class OwnMean(Net):
    def forward(self, x: Tensor, y: Tensor) -> Any:
        return F.cross_entropy(super().forward(x), y)


class SomeLabels(Vectors):
    def __getitem__(self, index: int) -> Any:
        label = self.y[index] if index % 3 else torch.tensor(-100)
        return self.x[index], label, label


class Pairs(Vectors):
    def __getitem__(self, index: int) -> Any:
        return self.x[index], self.y[index], -self.x[index]


class Preferred(nn.Module):
    """A policy and its frozen reference, for chosen and rejected samples in one batch."""

    def __init__(self) -> None:
        super().__init__()
        self.policy = Net()
        self.reference = copy.deepcopy(self.policy).requires_grad_(False)

    def forward(self, chosen: Tensor, rejected: Tensor) -> Tensor:
        both = torch.cat([chosen, rejected])
        return self.policy(both)[:, 0] - self.reference(both)[:, 0]


def preference(outputs: Tensor, batch: Any) -> tuple[Tensor, int]:
    chosen, rejected = outputs.chunk(2)
    return -F.logsigmoid(chosen - rejected).sum(), len(chosen)


class Tasks(nn.Module):
    """Two tasks with learned weights: as many numbers as a micro-batch has samples."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.log_variances = Net(), nn.Parameter(torch.zeros(2))

    def forward(self, x: Tensor) -> Any:
        return self.net(x), self.log_variances


def of_tasks(outputs: Any, batch: Any) -> tuple[Tensor, int]:
    logits, weights = outputs
    one, other = F.cross_entropy(logits, batch[1], reduction="sum"), logits.pow(2).sum()
    return (-weights[0]).exp() * one + (-weights[1]).exp() * other + len(logits) * weights.sum(), len(logits)


class Named(Vectors):
    def __getitem__(self, index: int) -> Any:
        return {"x": self.x[index], "name": f"sample {index}", "labels": self.y[index]}


class TakesNames(Net):
    def forward(self, x: Tensor, name: Any = None) -> Any:
        return super().forward(x)


def by_name(outputs: Tensor, batch: Any) -> tuple[Tensor, int]:
    weights = torch.tensor([1.0 + int(name.split()[1]) % 3 for name in batch["name"]], dtype=outputs.dtype)
    return (weights * F.cross_entropy(outputs, batch["labels"], reduction="none")).sum(), len(outputs)


def by_ranks(outputs: Tensor, batch: Any) -> tuple[Tensor, int]:
    total, count = summed(outputs, batch)
    return total / (dist.get_world_size() if dist.is_initialized() else 1), count


class ByRank(Net):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x) * (1 + 0.1 * (dist.get_rank() if dist.is_initialized() else 0))


class Routed(Net):
    """A layer that leaves its auxiliary loss in an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.aux: Any = 0.0

    def forward(self, x: Tensor) -> Any:
        outputs = super().forward(x)
        self.aux = outputs.pow(2).sum()
        return outputs


def auxiliary() -> tuple[Any, Any, Any]:
    net = Routed()

    def loss(outputs: Tensor, batch: Any) -> tuple[Tensor, int]:
        total, count = summed(outputs, batch)
        return total + 0.1 * net.aux, count

    return net, loss, sgd(list(net.parameters()))


# -- models and what a loop does to them -----------------------------------------------------------


class FrozenNorm(Net):
    """A batch norm that a `train` of the class keeps in evaluation mode."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)

    def train(self, mode: bool = True) -> nn.Module:
        super().train(mode)
        self.norm.eval()
        return self

    def forward(self, x: Tensor) -> Any:
        return self.c(torch.tanh(self.norm(self.a(x))))


class LiveNorm(Net):
    """A batch norm and a dropout, which the loop puts into evaluation mode."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.dropout = nn.BatchNorm1d(8), nn.Dropout(0.5)
        self.dropout.p = 0.0

    def forward(self, x: Tensor) -> Any:
        return self.c(self.dropout(torch.tanh(self.norm(self.a(x)))))


def still(module: nn.Module, _: Optimizer | None) -> None:
    module.norm.eval()  # type: ignore[union-attr]
    module.dropout.p = 0.5  # type: ignore[union-attr,assignment]
    module.dropout.eval()  # type: ignore[union-attr]


def in_turn(module: nn.Module, _: Optimizer | None) -> None:
    norm: Any = module.norm
    norm.train(not norm.training)


def evaluated(module: nn.Module, _: Optimizer | None) -> None:
    """Evaluate without a word of train() afterwards, as scripts forget it."""
    module.eval()


class FrozenInstance(Net):
    """A batch norm that was put into evaluation mode where it was built, so that `train` of the whole would end it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)
        self.norm.eval()

    def forward(self, x: Tensor) -> Any:
        return self.c(torch.tanh(self.norm(self.a(x))))


def all_trained(module: nn.Module, _: Optimizer | None) -> None:
    module.train()


def swapped(module: nn.Module, _: Optimizer | None) -> None:
    module.b = nn.Linear(8, 8, dtype=torch.float64)


def taken_out(module: nn.Module, _: Optimizer | None) -> None:
    module.b = nn.Identity()


class _Halved(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight / 2


def parametrized(module: nn.Module, _: Optimizer | None) -> None:
    if not parametrize.is_parametrized(part := module.get_submodule("b")):
        parametrize.register_parametrization(part, "weight", _Halved())


def moved_elsewhere(module: nn.Module, _: Optimizer | None) -> None:
    part = module.get_submodule("b")
    if (weight := part._parameters.pop("weight", None)) is not None:
        module.get_submodule("a").register_parameter("second", weight)
        part.weight = -weight


def noise_later(module: nn.Module, _: Optimizer | None) -> None:
    weight: Any = module.b.weight  # type: ignore[union-attr]
    if not weight._backward_hooks:
        weight.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))


def halve_later(module: nn.Module, _: Optimizer | None) -> None:
    weight: Any = module.b.weight  # type: ignore[union-attr]
    weight.register_hook(lambda gradient: 0.5 * gradient)


class FollowedNet(nn.Module):
    """A teacher that the loop lets follow."""

    def __init__(self) -> None:
        super().__init__()
        self.student = Net()
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)

    def forward(self, x: Tensor) -> Any:
        return self.student(x) + 0.5 * self.teacher(x)


def follow(module: nn.Module, _: Optimizer | None) -> None:
    for theirs, ours in zip(module.teacher.parameters(), module.student.parameters(), strict=True):  # type: ignore[union-attr]
        theirs.data = 0.5 * theirs.data + 0.5 * ours.data


class FrozenStart(Net):
    def __init__(self) -> None:
        super().__init__()
        self.a.requires_grad_(False)


def thaw(module: nn.Module, _: Optimizer | None) -> None:
    module.a.requires_grad_(True)  # type: ignore[union-attr]


_given: dict[str, Any] = {}


def given(optimizer: Callable[[list[Tensor]], Optimizer] = sgd) -> Callable[[], tuple[Any, Any, Any]]:
    """Return what makes a case of a model instance, which the loop changes while the run trains."""

    def made() -> tuple[Any, Any, Any]:
        net = Net()
        net.scale = 1.0  # type: ignore[assignment]
        _given.update(net=net, optimizer=optimizer(list(net.parameters())))
        return net, summed, _given["optimizer"]

    return made


def changing(change: Callable[[Any], object]) -> Each:
    return lambda module, optimizer: (change(_given["net"]), None)[1]


def clamp(net: Any) -> None:
    with torch.no_grad():
        net.a.weight.clamp_(-0.1, 0.1)


def of_optimizer(change: Callable[[Any], object]) -> Each:
    return lambda module, optimizer: (change(_given["optimizer"]), None)[1]


def shrink(net: Any) -> None:
    for param in net.parameters():
        param.data.mul_(0.5)


def decay(module: nn.Module, _: Optimizer | None) -> None:
    for group in _given["optimizer"].param_groups:
        group["weight_decay"] += 0.2


def add_group(module: nn.Module, _: Optimizer | None) -> None:
    _given["optimizer"].add_param_group({"params": [nn.Parameter(torch.ones(2))]})


with_momenta = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)


def cycled(params: list[Tensor]) -> Optimizer:
    made = torch.optim.SGD(params, lr=0.1, momentum=0.9)
    _given["schedule"] = torch.optim.lr_scheduler.OneCycleLR(made, max_lr=0.2, total_steps=8)
    return made


def cycle(module: nn.Module, _: Optimizer | None) -> None:
    _given["schedule"].step()


# -- optimizers ------------------------------------------------------------------------------------


def clipped_in_step(params: list[Tensor]) -> Optimizer:
    """A step that clips what its closure holds."""
    made = torch.optim.SGD(params, lr=0.5)
    usual = made.step

    def step(closure: None = None) -> Any:
        torch.nn.utils.clip_grad_norm_(params, 0.05)
        return usual()

    made.step = step  # type: ignore[method-assign,assignment]
    return made


def clipped_by_a_hook(params: list[Tensor]) -> Optimizer:
    made = torch.optim.SGD(params, lr=0.5)

    def clip(*_: Any) -> None:
        torch.nn.utils.clip_grad_norm_(params, 0.05)

    made.register_step_pre_hook(clip)
    return made


class Lookahead(Optimizer):
    """Slow weights beside those of another optimizer (Zhang et al. 2019), in an attribute of its own."""

    def __init__(self, inner: Optimizer) -> None:
        super().__init__([param for group in inner.param_groups for param in group["params"]], {})
        self.inner, self.steps = inner, 0
        self.param_groups, self.state, self.defaults = inner.param_groups, inner.state, inner.defaults
        self.slow = [[param.detach().clone() for param in group["params"]] for group in self.param_groups]

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        self.inner.step()
        self.steps += 1
        for group, copies in zip(self.param_groups, self.slow, strict=True) if self.steps % 2 == 0 else ():
            for param, slow in zip(group["params"], copies, strict=True):
                slow.lerp_(param, 0.5)
                param.copy_(slow)


def looking_ahead(params: list[Tensor]) -> Optimizer:
    return Lookahead(torch.optim.SGD(params, lr=0.3))


def of(build: Any, loss: Any = summed, optimizer: Any = sgd) -> Callable[[], tuple[Any, Any, Any]]:
    return lambda: (build, loss, optimizer)


CASES: dict[str, Case] = {
    "features caught by a hook": Case(caught_by_a_hook),
    "gradient penalty in the loss": Case(of(WithInput, penalty)),
    "forward that returns a mean of some labels": Case(
        of(OwnMean, lambda outputs, batch: (outputs * len(batch[1]), len(batch[1]))), SomeLabels
    ),
    "a mean as the loss": Case(of(Net, lambda outputs, batch: outputs.mean())),
    "chosen and rejected in one batch": Case(of(Preferred, preference), Pairs),
    "weights of two tasks": Case(of(Tasks, of_tasks)),
    "names in the loss": Case(of(TakesNames, by_name), Named),
    "loss divided by the ranks": Case(of(Net, by_ranks)),
    "forward that asks for its rank": Case(of(ByRank)),
    "auxiliary loss of the given instance": Case(auxiliary),
    "norm kept in evaluation by train": Case(of(FrozenNorm)),
    "teacher with other data": Case(of(FollowedNet), each=follow),
    "layer thawed later": Case(of(FrozenStart), each=thaw),
    "given instance frozen": Case(given(), each=changing(lambda net: net.a.requires_grad_(False))),
    "number of the given instance": Case(given(), each=changing(lambda net: setattr(net, "scale", 2.0))),
    "given instance clamped": Case(given(), each=changing(clamp)),
    "decay of the given optimizer": Case(given(), each=decay),
    "group added to the given optimizer": Case(given(), each=add_group),
    "momentum by a schedule": Case(given(cycled), each=cycle),
    "parts put into evaluation": Case(of(LiveNorm), each=still),
    "norm put into evaluation in turn": Case(of(LiveNorm), each=in_turn),
    "evaluated, and never train() again": Case(of(LiveNorm), each=evaluated),
    "norm built in evaluation, and trained": Case(of(FrozenInstance), each=all_trained),
    "part swapped later": Case(of(Net), each=swapped),
    "part taken out later": Case(of(Net), each=taken_out),
    "parametrization later": Case(of(Net), each=parametrized),
    "weight moved later": Case(of(Net), each=moved_elsewhere),
    "clamping hook later": Case(of(Net), each=noise_later),
    "halving hook later": Case(of(Net), each=halve_later),
    "given instance evaluated": Case(given(), each=changing(lambda net: net(torch.zeros(1, 6).to(net.a.weight)))),
    "given instance put into evaluation": Case(given(), each=changing(lambda net: net.b.eval())),
    "given instance with another part": Case(given(), each=changing(lambda net: setattr(net, "b", nn.Identity()))),
    "given instance with a hook": Case(
        given(), each=changing(lambda net: net.b.register_forward_hook(lambda module, x, y: 0.5 * y))
    ),
    "given instance with a hook on a gradient": Case(
        given(), each=changing(lambda net: net.a.weight.register_hook(lambda gradient: 0.5 * gradient))
    ),
    "given instance shrunk by data": Case(given(), each=changing(shrink)),
    "momenta of the given optimizer cleared": Case(
        given(with_momenta), each=of_optimizer(lambda own: own.state.clear())
    ),
    "given optimizer loaded": Case(given(), each=of_optimizer(lambda own: own.load_state_dict(own.state_dict()))),
    "given optimizer with a hook": Case(
        given(), each=of_optimizer(lambda own: own.register_step_pre_hook(lambda *_: None))
    ),
    "given optimizer with fewer weights": Case(
        given(), each=of_optimizer(lambda own: own.param_groups[0]["params"].pop())
    ),
    "step that clips": Case(of(Net, optimizer=clipped_in_step)),
    "hook that clips": Case(of(Net, optimizer=clipped_by_a_hook)),
    "Lookahead": Case(of(Net, optimizer=looking_ahead)),
}
