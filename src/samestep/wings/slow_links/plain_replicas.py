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
Where the weights are exchanged in parts, or with a delay, the last lines run for the weights of one part, at that
part's time, with moves of earlier weights, and replicas keep a fraction of their weights.
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
    part_of: Callable[[str], int],
) -> PlainSteps:
    """Take the steps of one device's observation; the first of equal models is the outer one, the others are replicas.

    `part_of` returns the part with which a weight is exchanged, by its name in the model.
    """
    steps, numerics, limit = PlainSteps(), job.numerics, job.optimizer.clip_norm
    outer, *replicas = (trained_params(model) for model in models)
    optimizers = [torch.optim.SGD(replica.values(), lr=seen.learning_rate, momentum=0.9) for replica in replicas]
    exchanges = _Exchanges(job, outer, replicas, contributions, part_of)
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
        rest = [{name: param for name, param in replica.items() if name not in moved} for replica in replicas]
        steps.gradients.append([*_of_replicas(rest, gradient_of), *copy_whole(moved)])
        steps.weights.append([*_of_replicas(replicas, Tensor.detach), *copy_whole(outer)])
    return steps


class _Exchanges:
    """DiLoCo exchanges between replicas: each starts after a step and is applied `exchange_delay` steps later."""

    def __init__(
        self,
        job: Job,
        outer: Params,
        replicas: Sequence[Params],
        contributions: PlainContributions | None,
        part_of: Callable[[str], int],
    ) -> None:
        self._numerics, self._last = job.numerics, job.train.steps
        self._outer, self._replicas, self._contributions = outer, replicas, contributions
        self._names = [[name for name in outer if part_of(name) == part] for part in range(job.numerics.exchange_parts)]
        self._under_way: list[tuple[int, dict[str, Tensor]]] = []
        """Averaged moves, each with the number of the step after which the outer step applies it."""
        momentum = job.numerics.outer_momentum
        self._optimizer = torch.optim.SGD(
            outer.values(), lr=job.numerics.outer_lr, momentum=momentum, nesterov=momentum > 0
        )

    def take(self, step: int) -> dict[str, Tensor]:
        """Start and apply the exchanges that are due after a step; return the averaged moves of the weights that
        were updated."""
        every, parts, delay = (getattr(self._numerics, f"exchange_{word}") for word in ("every", "parts", "delay"))
        moved: dict[str, Tensor] = {}
        for due, moves in self._under_way:
            if step in (due, self._last):
                moved |= self._end(moves, fraction=self._numerics.exchange_mix)
        self._under_way = [(due, moves) for due, moves in self._under_way if step < due]
        for part, names in enumerate(self._names):
            behind = step - (part + 1) * every // parts
            if step == self._last or (delay == 0 and behind >= 0 and behind % every == 0):
                moved |= self._end(self._moves(names), fraction=0.0)
            elif behind >= 0 and behind % every == 0:
                self._under_way.append((step + delay, self._moves(names)))
        return moved

    @torch.no_grad()
    def _moves(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Return the replicas' average move from some of the outer weights, as it is or as it is decoded."""
        outer = {name: self._outer[name] for name in names}
        if self._contributions is None:
            means = {
                name: torch.stack([replica[name].detach() for replica in self._replicas]).mean(0) for name in names
            }
            return {name: param - means[name] for name, param in outer.items()}
        for index, replica in enumerate(self._replicas):
            for name, param in outer.items():
                param.grad = param - replica[name]
            self._contributions.add(index, outer)
        self._contributions.finish(outer, len(self._replicas))
        return {name: gradient_of(param) for name, param in outer.items()}

    @torch.no_grad()
    def _end(self, moves: dict[str, Tensor], fraction: float) -> dict[str, Tensor]:
        """Take the outer step with some moves, which are returned, and set the weights of replicas."""
        for name, param in self._outer.items():
            param.grad = moves.get(name)
        self._optimizer.step()
        for name in moves:
            for replica in self._replicas:
                replica[name].copy_(fraction * replica[name] + (1.0 - fraction) * self._outer[name])
        return moves


def _of_replicas(replicas: Sequence[Params], what: Callable[[nn.Parameter], Tensor]) -> list[HeldTensor]:
    """Return a copy of one tensor for each weight of each replica."""
    named = {
        f"{name}{of_replica(number)}": what(p) for number, replica in enumerate(replicas) for name, p in replica.items()
    }
    return copy_whole(named)
