"""An all-reduce in 8 bits with error feedback, layout `dp=2` with `numerics.compression = "int8"`.

A block of n elements is sent as whole numbers from -127 to 127 and one scale, a power of two:

    m = max |x|     s = 2^q, the smallest with m < 127 s     code = round(x / s)     |x - s code| <= s / 2

The error e of a code is added to the gradient of the next step (error feedback), so that no part of a gradient is lost for
good: what was sent after T steps is the sum of all gradients less one error. Both directions are coded:

    rank r      g_r + e_r  -> codes -> all_to_all -> chunk r of all ranks -> decode, add up, + e'_r -> codes
    all ranks   all_gather of the codes of the sums -> decode

It sends 1/4 of the bytes of float32. A result depends on the code, so it belongs to the job and not to the layout. The layout
still changes nothing: the code is that of two replicas on any number of ranks. (Seide et al. 2014, doi:10.21437/Interspeech.2014-274.)
"""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import Tensor

from tiny import SAMPLES, STEPS, TOKENS, batch, build, loss_sum, main, optimizer


def block_of(shape: torch.Size) -> int:
    """Elements that share a scale: the largest power of two up to 256 that divides a row, at best four times; 1 in a vector."""
    row = math.prod(shape[1:]) if len(shape) > 1 else 1
    return next((size for times in (4, 1) for size in (256, 128, 64, 32, 16) if row % (times * size) == 0), 1)


def encode(values: Tensor, block: int, lost: Tensor) -> Tensor:
    """Return codes and exponents of a vector plus what was lost before, int8 [blocks, block + 1]; `lost` is what is lost now."""
    rows = (values + lost).view(-1, block)
    exponents = torch.frexp(rows.abs().amax(1))[1] - 7  # m < 2^(q + 7)
    exponents += rows.abs().amax(1) >= 127 * 2.0**exponents
    codes = (rows / 2.0 ** exponents[:, None]).round()
    lost.copy_((rows - codes * 2.0 ** exponents[:, None]).view(-1))
    return torch.cat([codes, exponents[:, None]], 1).to(torch.int8)


def decode(wire: Tensor) -> Tensor:
    codes, exponents = wire[:, :-1].double(), wire[:, -1:].double()
    return (codes * 2.0**exponents).view(-1)


class Int8AllReduce:
    """The sum of one gradient over ranks, in 8 bits."""

    def __init__(self, param: Tensor, rank: int, world: int) -> None:
        self.block, self.world, self.rank = block_of(param.shape), world, rank
        self.lost = param.new_zeros(param.numel())
        self.lost_of_sum = param.new_zeros(param.numel() // world)

    def __call__(self, gradient: Tensor) -> None:
        wire = encode(gradient.flatten(), self.block, self.lost)
        received = torch.empty_like(wire)
        dist.all_to_all_single(received, wire)  # chunk r of all ranks
        total = torch.stack([decode(part) for part in received.chunk(self.world)]).sum(0)
        wire = encode(total, self.block, self.lost_of_sum)
        gathered = [torch.empty_like(wire) for _ in range(self.world)]
        dist.all_gather(gathered, wire)
        gradient.copy_(decode(torch.cat(gathered)).view_as(gradient))


def train(rank: int, world: int) -> list[float]:
    model, losses = build(), []
    params = [*model.parameters()]
    coded = [Int8AllReduce(param.detach(), rank, world) for param in params]
    adam, count = optimizer(params), SAMPLES * TOKENS
    for step in range(STEPS):
        tokens, labels = (values.chunk(world)[rank] for values in batch(step))
        loss = loss_sum(model(tokens), labels)
        adam.zero_grad()
        loss.backward()
        for param, all_reduce in zip(params, coded, strict=True):
            assert param.grad is not None
            all_reduce(param.grad)
            param.grad /= count
        adam.step()
        total = loss.detach()
        dist.all_reduce(total)
        losses.append(total.item() / count)
    return losses


if __name__ == "__main__":
    main(train, "dp=2", compression="int8", replicas=2)
