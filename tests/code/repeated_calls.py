"""Models that call modules again within one forward, for each sample, chunk of samples or round: equal where weights are gathered too.

Under zero=3 a unit that is called again stays gathered until the forward ends, as its program lists, so that no call needs another gather.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.code.rows import Equal, of_cases
from tests.covering import daily
from tests.laboratory import Code, clipped
from tests.models import MODELS, VOCABULARY
from tests.parts import Residual

WIDTH = 8


class Repeating(nn.Module):
    """Embedding, blocks that are called in an order of their own, head: [B, T] tokens to [B, T, V] logits."""

    def __init__(self, between: Callable[[Repeating, Tensor], Tensor]) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Residual(WIDTH, 16, norm=True) for _ in range(3))
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.between = between

    def through(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.head(self.between(self, self.embed(input_ids)))


def each_sample_through_all(net: Repeating, x: Tensor) -> Tensor:
    return torch.stack([net.through(sample) for sample in x])


def each_sample_through_one(net: Repeating, x: Tensor) -> Tensor:
    x = net.blocks[0](x)
    return net.blocks[2](torch.cat([net.blocks[1](x[index : index + 1]) for index in range(len(x))]))


def chunks_of_two(net: Repeating, x: Tensor) -> Tensor:
    return torch.cat([net.through(part) for part in x.split(2)])


def chunks_of_five(net: Repeating, x: Tensor) -> Tensor:
    """More than the samples on which the independence of samples is proven."""
    return torch.cat([net.through(part) for part in x.split(5)])


def rounds_through_all(net: Repeating, x: Tensor) -> Tensor:
    for _ in range(2):
        x = net.through(x)
    return x


def rounds_for_each_sample(net: Repeating, x: Tensor) -> Tensor:
    return torch.stack([rounds_through_all(net, sample) for sample in x])


def checkpointed_samples(net: Repeating, x: Tensor) -> Tensor:
    return torch.stack([checkpoint(net.through, sample, use_reentrant=False) for sample in x])


PARTS = [
    each_sample_through_all, each_sample_through_one, chunks_of_two, rounds_through_all, rounds_for_each_sample, checkpointed_samples,
]  # fmt: skip

MODELS |= {f"repeats {part.__name__}": Code(functools.partial(Repeating, part)) for part in PARTS}
SIXTEEN = clipped(global_batch=16)
MODELS["repeats chunks_of_five"] = Code(functools.partial(Repeating, chunks_of_five), job=SIXTEEN)
LAYOUTS = [
    "dp=2 zero=3 microbatch=2",
    "dp=2 zero=3",
    "dp=2 zero=3 microbatch=3 accumulate=full recompute=full",
    "dp=2 zero=2",
    "dp=2 zero=2 microbatch=2 recompute=selective",
    "dp_replicate=2 dp_shard=2 zero=3",
]
EQUAL: list[Equal] = [
    Equal("dp=2 zero=3", "repeats chunks_of_five"),
    Equal("dp=2 zero=3", "repeats each_sample_through_all"),
    *of_cases("repeats ", daily((layout, part.__name__) for layout, part in itertools.product(LAYOUTS, PARTS))),
]
