"""Fully sharded data parallelism (ZeRO-3) by hand, layout `dp=2 zero=3 recompute=full`.

Each rank holds 1/R of every unit (a block), as a chunk of one flat vector. The weights of a unit exist only while it computes:

    forward    w = all_gather(chunk)      y = block(x; w)       free w
    backward   w = all_gather(chunk)      g_r = dl_r/dw         chunk of g = reduce_scatter(g_r)     free w

The two lines are one fact about the operation  all_gather: R^{n/R} -> R^n . Its adjoint, which autograd calls in the backward pass, is
reduce_scatter. So a function with these two is all that FSDP needs. Activation checkpointing of the block drops the gathered
weights with the activations, and gathers them again in the backward pass: 3 x the bytes of w in each step, where DDP sends 2 x.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from tiny import SAMPLES, STEPS, TOKENS, batch, build, loss_sum, main, optimizer
from zero1 import flat, unflatten


class Gather(torch.autograd.Function):
    """All chunks of a vector; the gradient is summed over ranks, and each rank gets its chunk."""

    @staticmethod
    def forward(ctx: Any, chunk: Tensor) -> Tensor:
        chunks = [torch.empty_like(chunk) for _ in range(dist.get_world_size())]
        dist.all_gather(chunks, chunk)
        return torch.cat(chunks)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        chunks = list(gradient.contiguous().chunk(dist.get_world_size()))
        chunk = torch.empty_like(chunks[0])
        dist.reduce_scatter(chunk, chunks)
        return chunk


class Sharded(nn.Module):
    """A module of which each rank holds a chunk of the weights."""

    def __init__(self, module: nn.Module, rank: int, world: int) -> None:
        super().__init__()
        params = dict(module.named_parameters())
        self.chunk = nn.Parameter(flat([*params.values()], world).detach().chunk(world)[rank].clone())
        self.module = [module.to("meta")]  # in a list, so that its parameters are not those of this module
        self.like = {name: torch.empty_like(param, device="meta") for name, param in params.items()}

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self._forward, x, use_reentrant=False)

    def _forward(self, x: Tensor) -> Tensor:
        weights = unflatten(Gather.apply(self.chunk), [*self.like.values()])
        return functional_call(self.module[0], dict(zip(self.like, weights, strict=True)), (x,))


def train(rank: int, world: int) -> list[float]:
    model, losses = build(), []
    model.blocks = nn.ModuleList(Sharded(block, rank, world) for block in model.blocks)
    for name in ("embed", "positions", "norm", "head"):  # the rest: each of these layers is a unit
        setattr(model, name, Sharded(getattr(model, name), rank, world))
    adam = optimizer(model.parameters())  # parameters, gradients and states are chunks
    count, mine = SAMPLES * TOKENS, slice(rank * SAMPLES // world, (rank + 1) * SAMPLES // world)
    for step in range(STEPS):
        tokens, labels = (values[mine] for values in batch(step))
        loss = loss_sum(model(tokens), labels)
        adam.zero_grad()
        (loss / count).backward()
        adam.step()
        total = loss.detach()
        dist.all_reduce(total)
        losses.append(total.item() / count)
    return losses


if __name__ == "__main__":
    main(train, "dp=2 zero=3 recompute=full")
