"""Parts of which tests make their models and data: a decoder whose code is that of its blocks, a residual block, points."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


class Words(nn.Module):
    """Embedding, blocks, head: [B, T] tokens to [B, T, V] logits. What is special about a model is its blocks, or how it calls them (`through`)."""

    def __init__(self, *kinds: Callable[[], nn.Module], width: int, entries: int) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(entries, width), nn.Linear(width, entries)
        self.blocks = nn.ModuleList(kind() for kind in kinds)

    def forward(self, input_ids: Tensor) -> Tensor:
        result: Tensor = self.head(self.through(self.embed(input_ids)))
        return result

    def through(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Residual(nn.Module):
    """Two linear layers around a function, added to their input; with a norm in front if it is asked for."""

    def __init__(
        self,
        width: int,
        hidden: int,
        act: Callable[[Tensor], Tensor] = torch.tanh,
        *,
        norm: bool = False,
        bias: bool = True,
    ) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width) if norm else None
        self.up, self.down, self.act = nn.Linear(width, hidden), nn.Linear(hidden, width, bias=bias), act

    def forward(self, x: Tensor) -> Tensor:
        y = x if self.norm is None else self.norm(x)
        result: Tensor = x + self.down(self.act(self.up(y)))
        return result


class Points(torch.utils.data.Dataset[Any]):
    """Points, each a function of its index, and twice of them; of 13 samples no number of ranks is a divisor."""

    def __init__(self, number: int = 13) -> None:
        self.number = number

    def __len__(self) -> int:
        return self.number

    def __getitem__(self, index: int) -> Any:
        point = torch.randn(4, generator=torch.Generator().manual_seed(index), dtype=torch.float64)
        return {"x": point, "labels": 2 * point}
