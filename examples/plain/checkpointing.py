"""Activation checkpointing by hand, layout `dp=2 recompute=full`.

A backward pass needs the activations of the forward pass. A block with n activations, of which its input is one, can also
compute the others again:

    forward    y = f(x)         keep x alone
    backward   y = f(x) again, with all activations        dL/dx, dL/dw = backward(y, dL/dy)

It holds the inputs of L blocks and the activations of one, where plain training holds those of L blocks, for one more forward pass:
about a third more work. The result is equal to the bit, as long as f is a function of x and w: a dropout mask has to be drawn
the same way again, and a counter may not move twice. (Chen et al. 2016, arXiv:1604.06174.)
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tiny import SAMPLES, STEPS, TOKENS, batch, build, loss_sum, main, optimizer


class Recomputed(torch.autograd.Function):
    """A block of which the forward pass keeps the input alone."""

    @staticmethod
    def forward(ctx: Any, block: nn.Module, x: Tensor, *params: Tensor) -> Tensor:
        ctx.block = block
        ctx.save_for_backward(x)
        return block(x)  # autograd records nothing within a Function's forward

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.block(x)
        return None, *torch.autograd.grad(y, (x, *ctx.block.parameters()), gradient)


class Checkpointed(nn.Module):
    """A block that is computed twice."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        return Recomputed.apply(self.block, x, *self.block.parameters())


def train(rank: int, world: int) -> list[float]:
    model, losses = build(), []
    model.blocks = nn.ModuleList(Checkpointed(block) for block in model.blocks)
    adam, count = optimizer(model.parameters()), SAMPLES * TOKENS
    for step in range(STEPS):
        tokens, labels = (values.chunk(world)[rank] for values in batch(step))
        loss = loss_sum(model(tokens), labels)
        adam.zero_grad()
        loss.backward()
        for param in model.parameters():
            assert param.grad is not None
            dist.all_reduce(param.grad)
            param.grad /= count
        adam.step()
        total = loss.detach()
        dist.all_reduce(total)
        losses.append(total.item() / count)
    return losses


if __name__ == "__main__":
    main(train, "dp=2 recompute=full")
