"""Models that checkpoint themselves: their blocks, parts of these or their heads."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.code.rows import Equal, Refused, Remarked, equal
from tests.code.vectors import WIDTH, Blocks, code


class Inner(nn.Module):
    """A block that checkpoints its own function, with dropout in it."""

    reentrant = False

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.drop = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        return x + checkpoint(self.inner, x, use_reentrant=self.reentrant)

    def inner(self, x: Tensor) -> Tensor:
        return torch.tanh(self.drop(torch.tanh(self.mix(x))))


class ReentrantInner(Inner):
    reentrant = True


class Dropping(Inner):
    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


class InFloat32(Inner):
    """An island of float32, which a step in float64 raises."""

    def inner(self, x: Tensor) -> Tensor:
        return self.drop(self.mix(x).float().tanh()).to(x.dtype)


class OwnInner(Blocks):
    block = Inner


class OwnReentrant(Blocks):
    block = ReentrantInner


class OwnInFloat32(Blocks):
    block = InFloat32


class OwnBlocks(Blocks):
    """Whole blocks under checkpoints."""

    block = Dropping

    def run(self, block: nn.Module, x: Tensor) -> Tensor:
        return checkpoint(block, x, use_reentrant=False)


class OwnBlocksReentrant(OwnBlocks):
    def run(self, block: nn.Module, x: Tensor) -> Tensor:
        return checkpoint(lambda given: block(given), x, use_reentrant=True)


class OwnHead(OwnBlocks):
    """The head under a checkpoint, and the blocks not."""

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x)
        return checkpoint(self.head, x, use_reentrant=False)


class FrozenStart(OwnBlocksReentrant):
    """Nothing before the first block is trained, so torch trains nothing in it either."""

    def __init__(self) -> None:
        super().__init__()
        self.embed.requires_grad_(False)


class Uncheckpointed(Blocks):
    block = Dropping


_PLAIN = code(Uncheckpointed)
_OWN = [code(build, like=_PLAIN) for build in (OwnInner, OwnReentrant, OwnBlocks, OwnBlocksReentrant, OwnHead)]
FROZEN_START = code(FrozenStart)
EQUAL = [
    *(row for own in _OWN for row in equal(own, "dp=2 zero=3", "dp=2 recompute=full")),
    *(Equal("dp=1 pp=2 microbatch=4", own) for own in _OWN),
    Equal("dp=2", FROZEN_START),
    Equal("dp=2", code(OwnInFloat32)),

]  # fmt: skip
REFUSED: list[Refused] = []
REMARKED = [
    Remarked("dp=2", code(OwnBlocks, like=_PLAIN), "recompute=full"),
    Remarked("dp=2", code(OwnInner, like=_PLAIN), "recompute=full"),
    Remarked("dp=2", code(OwnHead, like=_PLAIN), ""),
]
