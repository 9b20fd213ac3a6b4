"""Independently trained replicas in the plain torch loop: one whole model each, and an outer one that all start from.

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
from samestep.proof.held_tensors import HeldTensor, copy_whole, of_replica
from samestep.proof.observation import Observation, PlainSteps
from samestep.proof.plain_loop import PlainContributions, gradient_of, trained_params

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
    outer, *replicas = (trained_params(model) for model in models)
    optimizers = [torch.optim.SGD(replica.values(), lr=seen.learning_rate, momentum=0.9) for replica in replicas]
    exchanges = _Exchanges(job, outer, replicas, contributions)
    for batch in batches(dataset, job):
        total, counted, norms = 0.0, 0.0, []
        parts = batch.shares(0, 1, numerics.replicas)
        for model, params, optimizer, indices in zip(models[1:], replicas, optimizers, parts, strict=True):
            optimizer.zero_grad()
            loss_sum, count = loss(model, batch, indices)
            if not count:  # every label is masked, so this replica makes no update
                norms.append(0.0)
                continue
            (loss_sum / count).backward()
            norms.append(float(nn.utils.clip_grad_norm_(params.values(), math.inf if limit is None else limit)))
            optimizer.step()
            total, counted = total + float(loss_sum.detach()), counted + count
        steps.losses.append(total / counted if counted else math.nan)
        steps.norms.append(math.hypot(*norms) / math.sqrt(len(norms)))
        moved = exchanges.take(batch.step + 1)
        steps.gradients.append(copy_whole(moved) if moved else _of_replicas(replicas, gradient_of))
        steps.weights.append([*_of_replicas(replicas, Tensor.detach), *copy_whole(outer)])
    return steps


class _Exchanges:
    """DiLoCo exchanges between replicas."""

    def __init__(
        self, job: Job, outer: Params, replicas: Sequence[Params], contributions: PlainContributions | None
    ) -> None:
        self._every, self._last = job.numerics.exchange_every, job.train.steps
        self._outer, self._replicas, self._contributions = outer, replicas, contributions
        momentum = job.numerics.outer_momentum
        self._optimizer = torch.optim.SGD(
            outer.values(), lr=job.numerics.outer_lr, momentum=momentum, nesterov=momentum > 0
        )

    @torch.no_grad()
    def take(self, step: int) -> dict[str, Tensor]:
        """Exchange weights if that is due after a step; return the averaged moves, none where it is not."""
        if step % self._every and step != self._last:
            return {}
        moves = self._moves()
        for name, param in self._outer.items():
            param.grad = moves[name]
        self._optimizer.step()
        for replica in self._replicas:
            for name, param in self._outer.items():
                replica[name].copy_(param)
        return moves

    def _moves(self) -> dict[str, Tensor]:
        """Return the replicas' average move from the outer weights, as it is or as it is decoded."""
        if self._contributions is None:
            means = {
                name: torch.stack([replica[name].detach() for replica in self._replicas]).mean(0)
                for name in self._outer
            }
            return {name: param - means[name] for name, param in self._outer.items()}
        for index, replica in enumerate(self._replicas):
            for name, param in self._outer.items():
                param.grad = param - replica[name]
            self._contributions.add(index, self._outer)
        self._contributions.finish(self._outer, len(self._replicas))
        return {name: gradient_of(param) for name, param in self._outer.items()}


def _of_replicas(replicas: Sequence[Params], what: Callable[[nn.Parameter], Tensor]) -> list[HeldTensor]:
    """Return a copy of one tensor for each weight of each replica."""
    named = {
        f"{name}{of_replica(number)}": what(p) for number, replica in enumerate(replicas) for name, p in replica.items()
    }
    return copy_whole(named)
