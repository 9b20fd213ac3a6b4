"""Tensor parallelism of attention and MLP, layout `tp=2`.

Every rank has all samples, and 1/T of the columns of the first weight and of the rows of the second one of a pair:

    MLP         A = [A_1 | A_2]     B = [B_1 ; B_2]       gelu(x A) B  =  sum_t  gelu(x A_t) B_t
    attention   rank t has the columns of its heads in W_q, W_k, W_v, and their rows in W_o

The activation between the two is cut and never sent. Two operations connect the parts, each the adjoint of the other:

    copy   forward: x               backward: all_reduce of the gradient       at the beginning of a pair
    add    forward: all_reduce      backward: the gradient                     at its end

Everything else (embeddings, norms, head) is computed by all ranks alike, with equal gradients. (Shoeybi et al. 2019, arXiv:1909.08053.)
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from tiny import SAMPLES, STEPS, TOKENS, batch, build, loss_sum, main, merge_heads, optimizer, split_heads

Group = dist.ProcessGroup | None


class Copy(torch.autograd.Function):
    """The same tensor; its gradient is the sum over the ranks that use it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        gradient = gradient.clone()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None


class Add(torch.autograd.Function):
    """The sum over ranks; each summand has the gradient of the sum."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class ParallelBlock(nn.Module):
    """A rank's part of a block: some heads, and some features of the MLP."""

    q: Tensor
    k: Tensor
    v: Tensor
    o: Tensor
    up: Tensor
    down: Tensor

    def __init__(self, block: Any, rank: int, world: int, group: Group = None) -> None:
        super().__init__()
        self.norm1, self.norm2, self.group = block.norm1, block.norm2, group
        for name in ("q", "k", "v", "up"):  # a weight is [out, in]: its rows are the columns of x W
            setattr(self, name, nn.Parameter(getattr(block, name).weight.detach().chunk(world, 0)[rank].clone()))
        for name in ("o", "down"):
            setattr(self, name, nn.Parameter(getattr(block, name).weight.detach().chunk(world, 1)[rank].clone()))

    def forward(self, x: Tensor) -> Tensor:
        normed = Copy.apply(self.norm1(x), self.group)
        q, k, v = (split_heads(F.linear(normed, weight)) for weight in (self.q, self.k, self.v))
        heads = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + Add.apply(F.linear(merge_heads(heads), self.o), self.group)
        features = F.gelu(F.linear(Copy.apply(self.norm2(x), self.group), self.up))
        return x + Add.apply(F.linear(features, self.down), self.group)


def train(rank: int, world: int) -> list[float]:
    model, losses = build(), []
    model.blocks = nn.ModuleList(ParallelBlock(block, rank, world) for block in model.blocks)
    adam = optimizer(model.parameters())
    for step in range(STEPS):
        tokens, labels = batch(step)  # the whole batch: ranks of tp have the same samples
        loss = loss_sum(model(tokens), labels) / (SAMPLES * TOKENS)
        adam.zero_grad()
        loss.backward()
        adam.step()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    main(train, "tp=2")
