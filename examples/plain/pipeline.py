"""Pipeline parallelism with the schedules GPipe and 1F1B, layouts `pp=2 microbatch=2 schedule=gpipe` and `schedule=1f1b`.

The layers are a composition of stages, f = f_P o ... o f_1, and each rank has one stage. A batch passes through them as M
micro-batches. The gradient of a sum is the sum of gradients, so adding up the gradients of the micro-batches gives that of the batch:

    forward    x_p = f_p(x_{p-1})            receive x_{p-1} from the stage before, send x_p to the next one
    backward   dL/dx_{p-1} = J_p^T dL/dx_p   receive dL/dx_p from the next one, send dL/dx_{p-1} to the stage before

    GPipe      all forwards, then all backwards           holds the activations of M micro-batches
    1F1B       after P - p forwards, one backward for each forward       holds those of at most P

Both do the same sums and idle for (P - 1) / (M + P - 1) of the time. (Huang et al. 2019, arXiv:1811.06965; Narayanan et al. 2019, PipeDream.)
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tiny import SAMPLES, STEPS, TOKENS, WIDTH, Tiny, batch, build, loss_sum, main, optimizer

MICROBATCH = 2


class Stage(nn.Module):
    """The layers of one rank: the first stage embeds, the last one computes logits."""

    def __init__(self, model: Tiny, rank: int, world: int) -> None:
        super().__init__()
        each = len(model.blocks) // world
        self.blocks = model.blocks[rank * each : (rank + 1) * each]
        self.is_first, self.is_last = rank == 0, rank == world - 1
        if self.is_first:
            self.embed, self.positions = model.embed, model.positions
        if self.is_last:
            self.norm, self.head = model.norm, model.head

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x) + self.positions(torch.arange(x.shape[1])) if self.is_first else x
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)) if self.is_last else x


def order(schedule: str, rank: int, world: int, number: int) -> list[tuple[str, int]]:
    """The forwards F and backwards B of a stage, in their order: 1F1B with as many forwards ahead as stages follow."""
    ahead = number if schedule == "gpipe" else min(number, world - rank - 1)
    tasks = [("F", index) for index in range(ahead)]
    for index in range(number):
        tasks += [("F", ahead + index)] * (ahead + index < number) + [("B", index)]
    return tasks


def step_of(
    stage: Stage, tokens: Tensor, labels: Tensor, count: int, schedule: str, ranks: list[int], place: int
) -> Tensor:
    """Run the forwards and backwards of one batch; gradients are in the parameters. Return the sum of the losses, on the last stage."""
    inputs, outputs, sent = {}, {}, []
    total = torch.zeros((), dtype=torch.float64)
    parts = [*zip(tokens.split(MICROBATCH), labels.split(MICROBATCH), strict=True)]
    for task, index in order(schedule, place, len(ranks), len(parts)):
        if task == "F":
            x = parts[index][0]
            if not stage.is_first:
                x = torch.empty(MICROBATCH, TOKENS, WIDTH, dtype=torch.float64)
                dist.recv(x, ranks[place - 1])
                x.requires_grad_()
            inputs[index], outputs[index] = x, stage(x)
            if stage.is_last:
                outputs[index] = loss_sum(outputs[index], parts[index][1])
                total += outputs[index].detach()
            else:
                sent.append(dist.isend(outputs[index].detach(), ranks[place + 1]))
        else:
            gradient = torch.tensor(1 / count, dtype=torch.float64)
            if not stage.is_last:
                gradient = torch.empty_like(outputs[index])
                dist.recv(gradient, ranks[place + 1])
            outputs.pop(index).backward(gradient)
            x = inputs.pop(index)
            if not stage.is_first:
                sent.append(dist.isend(x.grad, ranks[place - 1]))
    for work in filter(None, sent):
        work.wait()
    return total


def train(rank: int, world: int, schedule: str = "gpipe") -> list[float]:
    stage, losses = Stage(build(), rank, world), []
    adam, count = optimizer(stage.parameters()), SAMPLES * TOKENS
    for step in range(STEPS):
        adam.zero_grad()
        tokens, labels = batch(step)
        total = step_of(stage, tokens, labels, count, schedule, [*range(world)], rank)
        adam.step()
        dist.broadcast(total, world - 1)
        losses.append(total.item() / count)
    return losses


def train_1f1b(rank: int, world: int) -> list[float]:
    return train(rank, world, "1f1b")


if __name__ == "__main__":
    main(train, "pp=2 microbatch=2 schedule=gpipe")
    main(train_1f1b, "pp=2 microbatch=2 schedule=1f1b")
