"""Mixed precision in fp16 with loss scaling, layout `dp=2` with `numerics.precision = "fp16"`.

Matrices are multiplied in fp16, and the weights that Adam updates stay in float32 (master weights): a step of 1e-4 of a weight
would round to nothing in the 10 bits of fp16. Gradients below 6e-8 would be zero in fp16, so the loss is multiplied by S first:

    L_S = S L        g_S = S g in fp16        g = float32(g_S) / S        if any g_S is inf or nan: skip the step, S = S / 2

After 2,000 steps without an overflow S doubles. Sums over ranks, the norm and the update are in float32. All ranks must agree
on skipping: the sum of the gradients of all ranks is infinite on every rank as soon as it is on one.
(Micikevicius et al. 2018, arXiv:1710.03740.)
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from tiny import SAMPLES, STEPS, TOKENS, batch, build, loss_sum, main, optimizer


class Norm(nn.LayerNorm):
    """A norm that computes in float32: its sums of squares would overflow in fp16."""

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = self.weight.float(), self.bias.float()
        return F.layer_norm(x.float(), self.normalized_shape, weight, bias, self.eps).half()


def in_half(model: nn.Module) -> nn.Module:
    """Return a model with weights in fp16."""
    for module in model.modules():
        if isinstance(module, nn.LayerNorm):
            module.__class__ = Norm
    return model.half()


def train(rank: int, world: int) -> list[float]:
    masters, losses = build(torch.float32), []
    model = in_half(build(torch.float32))  # the weights that compute
    adam, count = optimizer(masters.parameters()), SAMPLES * TOKENS
    scale, good = 65536.0, 0
    for step in range(STEPS):
        with torch.no_grad():
            for weight, master in zip(model.parameters(), masters.parameters(), strict=True):
                weight.copy_(master)
        tokens, labels = (values.chunk(world)[rank] for values in batch(step))
        loss = loss_sum(model(tokens), labels)
        model.zero_grad()
        (loss * (scale / count)).backward()
        for weight, master in zip(model.parameters(), masters.parameters(), strict=True):
            assert weight.grad is not None
            master.grad = weight.grad.float()
            dist.all_reduce(master.grad)
            master.grad /= scale
        if all(master.grad is not None and master.grad.isfinite().all() for master in masters.parameters()):
            adam.step()
            good += 1
            scale *= 2.0 if good % 2000 == 0 else 1.0
        else:
            scale, good = scale / 2, 0
        total = loss.detach().double()
        dist.all_reduce(total)
        losses.append(total.item() / count)
    return losses


if __name__ == "__main__":
    main(train, "dp=2", precision="fp16")
