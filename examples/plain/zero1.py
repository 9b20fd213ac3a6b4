"""ZeRO-1: the optimizer states are sharded, layout `dp=2 zero=1`.

An all-reduce is a reduce-scatter followed by an all-gather. Adam works element by element, so it can run between the two:

    reduce_scatter   g_r  ->  rank r has chunk r of  g = 1/N sum_r g_r
    Adam             rank r updates chunk r of w, with its chunk of m and v
    all_gather       all ranks have all of w again

The bytes sent are those of DDP, and each rank holds 1/R of the optimizer states (8 of the 12 bytes for float32 states and master
weights) and does 1/R of the update. (Rajbhandari et al. 2020, arXiv:1910.02054.)
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from tiny import SAMPLES, STEPS, TOKENS, batch, build, loss_sum, main, optimizer


def flat(tensors: list[Tensor], world: int) -> Tensor:
    """Return tensors as one vector, padded so that `world` divides it."""
    vector = torch.cat([tensor.flatten() for tensor in tensors])
    return torch.nn.functional.pad(vector, (0, -len(vector) % world))


def unflatten(vector: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Return the tensors that a vector of `flat` holds, as views."""
    used = vector[: sum(tensor.numel() for tensor in like)]
    parts = used.split([tensor.numel() for tensor in like])
    return [part.view_as(tensor) for part, tensor in zip(parts, like, strict=True)]


def train(rank: int, world: int) -> list[float]:
    model, losses = build(), []
    params = [*model.parameters()]
    chunk = torch.nn.Parameter(flat([param.detach() for param in params], world).chunk(world)[rank].clone())
    adam = optimizer([chunk])  # the states of 1/world of the weights
    count, mine = SAMPLES * TOKENS, slice(rank * SAMPLES // world, (rank + 1) * SAMPLES // world)
    for step in range(STEPS):
        tokens, labels = (values[mine] for values in batch(step))
        loss = loss_sum(model(tokens), labels)
        gradients = flat(list(torch.autograd.grad(loss, params)), world)

        chunk.grad = torch.empty_like(chunk)
        dist.reduce_scatter(chunk.grad, list(gradients.chunk(world)))
        chunk.grad /= count
        adam.step()
        gathered = torch.empty_like(gradients)
        dist.all_gather(list(gathered.chunk(world)), chunk.detach())
        with torch.no_grad():
            for param, value in zip(params, unflatten(gathered, params), strict=True):
                param.copy_(value)

        total = loss.detach()
        dist.all_reduce(total)
        losses.append(total.item() / count)
    return losses


if __name__ == "__main__":
    main(train, "dp=2 zero=1")
