"""Replicas that are trained apart, in the plain torch loop: one whole model each, and one that all start from.

```python
for replica, optimizer, part in zip(replicas, optimizers, batch):
    loss(replica(part)).backward(); clip_grad_norm_(replica.parameters(), limit); optimizer.step()
if every H steps:
    for outer, copies in zip(model.parameters(), zip(*[replica.parameters() for replica in replicas])):
        outer.grad = outer - mean(copies)
    SGD(model.parameters(), lr, momentum, nesterov=True).step()
    for replica in replicas: replica.load_state_dict(model.state_dict())
```
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from samestep.datasets import Batch, Dataset, batches
from samestep.job import Job
from samestep.proof.held_tensors import HeldTensor, held_whole, of_replica
from samestep.proof.observation import Observation, PlainSteps
from samestep.proof.plain_contributions import PlainContributions

Params = Mapping[str, nn.Parameter]
Loss = Callable[[nn.Module, Batch, Any], tuple[Tensor, float]]
"""A function (model, batch, indices of some of its samples) -> the sum of the loss over them, and their count."""


def take_steps(
    models: Sequence[nn.Module],
    loss: Loss,
    job: Job,
    dataset: Dataset,
    seen: Observation,
    contributions: PlainContributions | None,
) -> PlainSteps:
    """Take the steps of one device's observation; the first of equal models is the outer one, the others are replicas."""
    steps, numerics, limit = PlainSteps(), job.numerics, job.optimizer.clip_norm
    outer, *replicas = (_trained(model) for model in models)
    optimizers = [torch.optim.SGD(one.values(), lr=seen.learning_rate, momentum=0.9) for one in replicas]
    momentum = numerics.outer_momentum
    moves = torch.optim.SGD(outer.values(), lr=numerics.outer_lr, momentum=momentum, nesterov=momentum > 0)
    for batch in batches(dataset, job):
        total, counted, norms = 0.0, 0.0, []
        parts = batch.shares(0, 1, numerics.replicas)
        for model, params, optimizer, indices in zip(models[1:], replicas, optimizers, parts, strict=True):
            optimizer.zero_grad()
            loss_sum, count = loss(model, batch, indices)
            (loss_sum / count).backward()
            norms.append(float(nn.utils.clip_grad_norm_(params.values(), math.inf if limit is None else limit)))
            optimizer.step()
            total, counted = total + float(loss_sum.detach()), counted + count
        steps.losses.append(total / counted)
        steps.norms.append(math.hypot(*norms) / math.sqrt(len(norms)))
        gradients = _of_replicas(replicas, _gradient)
        if (batch.step + 1) % numerics.exchange_every == 0 or batch.step + 1 == job.train.steps:
            _set_moves(outer, replicas, contributions)
            gradients = held_whole({name: _gradient(param) for name, param in outer.items()})
            moves.step()
            _go_on_from(outer, replicas)
        steps.gradients.append(gradients)
        steps.weights.append([*_of_replicas(replicas, Tensor.detach), *held_whole(outer)])
    return steps


@torch.no_grad()
def _set_moves(outer: Params, replicas: Sequence[Params], contributions: PlainContributions | None) -> None:
    """Set the gradients of the outer weights to what replicas have moved by on average, as it is or as it is decoded."""
    if contributions is None:
        for name, param in outer.items():
            param.grad = param - torch.stack([one[name].detach() for one in replicas]).mean(0)
        return
    for index, one in enumerate(replicas):
        for name, param in outer.items():
            param.grad = param - one[name]
        contributions.add(index, outer)
    contributions.finish(outer, len(replicas))


@torch.no_grad()
def _go_on_from(outer: Params, replicas: Sequence[Params]) -> None:
    for one in replicas:
        for name, param in outer.items():
            one[name].copy_(param)


def _of_replicas(replicas: Sequence[Params], what: Callable[[nn.Parameter], Tensor]) -> list[HeldTensor]:
    """Return a copy of something of each weight of each replica."""
    named = {f"{name}{of_replica(number)}": what(p) for number, one in enumerate(replicas) for name, p in one.items()}
    return held_whole(named)


def _gradient(param: nn.Parameter) -> Tensor:
    return torch.zeros_like(param) if param.grad is None else param.grad


def _trained(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: param for name, param in model.named_parameters() if param.requires_grad}
