"""Ring attention over a sequence that is cut, layout `cp=2 exchange=ring`.

Rank r has 1/C of the tokens of every sample. All layers but attention act on each token by itself. In attention, a rank needs the
keys and values of all ranks; they travel around a ring, one hop at a time, and the softmax is computed in pieces:

    for each slice j of keys:   s_j = q k_j^T        m = max over all s        l = sum_j sum exp(s_j - m)
                                o = sum_j exp(s_j - m) v_j  /  l

m and l are updated as slices arrive: with a new maximum m', earlier sums are multiplied by exp(m - m'). This is exact, and no rank
ever has all keys. The adjoint of "send to the next rank" is "send to the one before", so the backward pass needs no more code.
(Liu et al. 2023, arXiv:2310.01889; online softmax: Milakov and Gimelshein 2018, arXiv:1805.02867.)
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from tiny import SAMPLES, STEPS, TOKENS, batch, build, loss_sum, main, merge_heads, optimizer, split_heads


class Hop(torch.autograd.Function):
    """Send a tensor to the next rank of the ring and return that of the rank before; backward in the other direction."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return shift(x, 1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return shift(gradient, -1)


def shift(x: Tensor, by: int) -> Tensor:
    rank, world, received = (
        dist.get_rank(),
        dist.get_world_size(),
        torch.empty_like(x, memory_format=torch.contiguous_format),
    )
    work = dist.isend(x.contiguous(), (rank + by) % world)
    dist.recv(received, (rank - by) % world)
    if work is not None:
        work.wait()
    return received


def ring_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention of this rank's queries to the keys of all ranks, [samples, heads, tokens, width]."""
    rank, world, tokens = dist.get_rank(), dist.get_world_size(), q.shape[-2]
    places = torch.arange(tokens)
    top = q.new_full((*q.shape[:-1], 1), -torch.inf)
    below, above = torch.zeros_like(top), torch.zeros_like(q)
    for hop in range(world):
        owner = (rank - hop) % world  # the rank that these keys come from
        later = (owner * tokens + places)[None, :] > (rank * tokens + places)[:, None]
        scores = (q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5).masked_fill(later, -torch.inf)
        new_top = torch.maximum(top, scores.amax(-1, keepdim=True)).detach()  # any maximum gives the same quotient
        weights, earlier = (scores - new_top).exp(), (top - new_top).exp()
        below = earlier * below + weights.sum(-1, keepdim=True)
        above = earlier * above + weights @ v
        top = new_top
        if hop < world - 1:
            k, v = Hop.apply(torch.stack([k, v])).unbind()
    return above / below


class RingBlock(nn.Module):
    """A block on a slice of the tokens."""

    def __init__(self, block: Any) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        block = self.block
        normed = block.norm1(x)
        q, k, v = (split_heads(layer(normed)) for layer in (block.q, block.k, block.v))
        x = x + block.o(merge_heads(ring_attention(q, k, v)))
        return x + block.down(F.gelu(block.up(block.norm2(x))))


def train(rank: int, world: int) -> list[float]:
    model, losses = build(), []
    blocks, adam, count = [RingBlock(block) for block in model.blocks], optimizer(model.parameters()), SAMPLES * TOKENS
    mine = torch.arange(TOKENS).chunk(world)[rank]
    for step in range(STEPS):
        tokens, labels = (values[:, mine] for values in batch(step))
        x = model.embed(tokens) + model.positions(mine)  # a token keeps its position
        for block in blocks:
            x = block(x)
        loss = loss_sum(model.head(model.norm(x)), labels)
        adam.zero_grad()
        loss.backward()
        for param in model.parameters():  # all ranks have all weights: their gradients are sums over tokens
            assert param.grad is not None
            dist.all_reduce(param.grad)
            param.grad /= count
        adam.step()
        total = loss.detach()
        dist.all_reduce(total)
        losses.append(total.item() / count)
    return losses


if __name__ == "__main__":
    main(train, "cp=2 exchange=ring")
