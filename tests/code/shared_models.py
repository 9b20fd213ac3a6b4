"""Models whose layers share weights, and models whose blocks exchange more than tensors.

A block that is called again and again, one norm, one adapter, tied projections; dictionaries and lists that blocks change.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.code.pipeline_models import WIDTH, Block, Language
from tests.models import VOCABULARY


class Dropping(Block):
    """A block with two draws of dropout, one of them in a part of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.dropout(self.drop(torch.tanh(self.mix(self.norm(x)))), 0.1, self.training)


class Repeated(Language):
    """One block, called four times (ALBERT), with other masks each time; its logits are those of its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Dropping()])
        self.head.weight = self.embed.weight

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for _ in range(4):
            x = self.blocks[0](x)
        return self.head(x)


class _Adapted(Block):
    adapter: nn.Module

    def forward(self, x: Tensor) -> Tensor:
        return self.adapter(super().forward(x))  # type: ignore[no-any-return]


class Adapted(Language):
    """All blocks hold one adapter, which drops."""

    block = _Adapted

    def __init__(self) -> None:
        super().__init__()
        adapter = Dropping()
        for block in self.blocks:
            block.adapter = adapter


class TiedBlocks(Language):
    """The blocks of the middle share one projection, the outer ones another; each has its own norm and bias."""

    def __init__(self) -> None:
        super().__init__()
        for first, second in ((1, 2), (0, 3)):
            self.blocks[second].mix.weight = self.blocks[first].mix.weight  # type: ignore[union-attr]


class ThreeStages(Language):
    """Six blocks; one norm is used by all, one weight by three of them as an argument, and it is a part of the logits."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(6))
        self.norm = nn.LayerNorm(WIDTH)
        self.gain = nn.Parameter(torch.rand(WIDTH))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for index, block in enumerate(self.blocks):
            x = self.norm(block(x))
            if index % 2:
                x = x * self.gain
        return self.head(x * self.gain)


class _Noting(Block):
    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 4)

    def forward(self, state: dict[str, Any]) -> dict[str, Any]:  # type: ignore[override]
        x = super().forward(state["x"])
        pair = state.get("pair")
        x = x if pair is None else x + 0.1 * pair[0]
        return {"x": x, "pair": (x.tanh(), None), "balance": [*state["balance"], self.router(x).mean()]}


class Noting(Language):
    """Blocks exchange dictionaries of tuples, None and lists; what the routers say is collected, and the loss ignores it."""

    block = _Noting

    def forward(self, input_ids: Tensor) -> Tensor:
        state: dict[str, Any] = {"x": self.embed(input_ids), "balance": []}
        for block in self.blocks:
            state = block(state)
        return self.head(state["x"] + state["pair"][0])


class _Caching(Block):
    def forward(self, x: Tensor, kept: dict[str, Tensor], states: list[Tensor]) -> Tensor:  # type: ignore[override]
        if "keys" not in kept:
            kept["keys"] = self.mix(x)
        x = super().forward(x) + 0.1 * kept["keys"]
        states.append(x)
        if len(states) > 2:
            del states[0]
        return x


class Caching(Language):
    """Later blocks read what the first has put into a dictionary (shared keys and values), and states out of a list."""

    block = _Caching

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        kept: dict[str, Tensor] = {}
        states: list[Tensor] = []
        for block in self.blocks:
            x = block(x, kept, states)
        return self.head(x + sum(states) * 0.5)
