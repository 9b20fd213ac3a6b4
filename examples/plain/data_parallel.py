"""Data parallelism with buckets (DDP), layout `dp=2`.

The loss of a step is a mean over N tokens. Rank r has the samples S_r of the global batch, and all weights w:

    L(w) = 1/N  sum_r  sum_{i in S_r} l_i(w)          g = dL/dw = 1/N  sum_r g_r,   g_r = sum_{i in S_r} dl_i/dw

So each rank computes g_r by itself, and one all-reduce sums the g_r. As the sum over all ranks is divided once by the N of the
whole batch, the result is that of one device, also if ranks have unequal numbers of tokens. A mean of means is not.

Gradients are ready from the last layer to the first. A bucket is reduced as soon as its last gradient is there, while the
backward pass goes through earlier layers: communication is hidden behind computation.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from tiny import SAMPLES, STEPS, TOKENS, batch, build, loss_sum, main, optimizer

BUCKET = 4096
"""Elements of a bucket: small ones start early, large ones use the links better."""


class Buckets:
    """Sums gradients over ranks in flat buffers, while the backward pass is running."""

    def __init__(self, params: list[torch.nn.Parameter]) -> None:
        self.groups: list[list[torch.nn.Parameter]] = [[]]
        for param in reversed(params):  # about the order in which gradients are ready
            if sum(one.numel() for one in self.groups[-1]) >= BUCKET:
                self.groups.append([])
            self.groups[-1].append(param)
        for group in self.groups:

            def arrived(_: Tensor, group: list[torch.nn.Parameter] = group) -> None:
                self.ready(group)

            for param in group:
                param.register_post_accumulate_grad_hook(arrived)
        self.begin()

    def begin(self) -> None:
        self.missing = {id(group): len(group) for group in self.groups}
        self.sent: list[tuple[dist.Work | None, Tensor, list[torch.nn.Parameter]]] = []

    def ready(self, group: list[torch.nn.Parameter]) -> None:
        self.missing[id(group)] -= 1
        if self.missing[id(group)] == 0:
            flat = torch.cat([param.grad.flatten() for param in group if param.grad is not None])
            self.sent.append((dist.all_reduce(flat, async_op=True), flat, group))

    def finish(self, count: int) -> None:
        for work, flat, group in self.sent:
            if work is not None:
                work.wait()
            for param, part in zip(group, flat.split([one.numel() for one in group]), strict=True):
                param.grad = part.view_as(param) / count
        self.begin()


def train(rank: int, world: int) -> list[float]:
    model, losses = build(), []
    buckets, adam = Buckets([*model.parameters()]), optimizer(model.parameters())
    count, mine = SAMPLES * TOKENS, slice(rank * SAMPLES // world, (rank + 1) * SAMPLES // world)
    for step in range(STEPS):
        tokens, labels = (values[mine] for values in batch(step))
        loss = loss_sum(model(tokens), labels)
        adam.zero_grad()
        loss.backward()
        buckets.finish(count)
        adam.step()
        total = loss.detach()
        dist.all_reduce(total)
        losses.append(total.item() / count)
    return losses


if __name__ == "__main__":
    main(train, "dp=2")
