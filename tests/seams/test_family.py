"""A family of models needs no row and no plan: one that calls everything by names of its own is cut by its data flow.

Whatever asks for a name of another family fails here.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.laboratory import TOLERANCE, Observed, assert_ledger, assert_same, clipped, observe
from tests.models import MODELS
from tests.pool import pool

FEATURES, HEADS, WORDS = 16, 4, 64


class Scaler(nn.Module):
    """An RMS norm whose class does not say so."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(FEATURES))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.weight


class Look(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ask, self.say = nn.Linear(FEATURES, 3 * FEATURES), nn.Linear(FEATURES, FEATURES)
        self.slot = FEATURES // HEADS

    def forward(self, x: Tensor) -> Tensor:
        parts = self.ask(x).chunk(3, dim=-1)
        q, k, v = (part.unflatten(-1, (-1, self.slot)).transpose(1, 2) for part in parts)
        return self.say(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Think(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(FEATURES, 2 * FEATURES), nn.Linear(2 * FEATURES, FEATURES)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.look, self.between, self.think = Scaler(), Look(), Scaler(), Think()

    def forward(self, scale: float, stream: Tensor) -> Tensor:
        stream = stream + scale * self.look(self.before(stream))
        return stream + scale * self.think(self.between(stream))


class Curious(nn.Module):
    base_model_prefix = "base"

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(model_type="curious")
        self.base = nn.Module()
        self.base.words = nn.Embedding(WORDS, FEATURES)
        self.base.b = nn.ModuleList([Block(), Block()])
        self.base.last = Scaler()
        self.head = nn.Linear(FEATURES, WORDS, bias=False)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.base.words(input_ids)  # type: ignore[operator]
        for block in self.base.b:  # type: ignore[union-attr]
            x = block(scale=1.0, stream=x)
        return self.head(self.base.last(x))  # type: ignore[operator]


def observe_curious(rank: int, world: int, layout: str) -> Observed:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(MODELS, "curious", Curious)
        return observe(rank, world, "curious", layout, clipped(), record=True)


@pytest.mark.parametrize("layout", ["tp=2 sequence_parallel", "pp=2"])
def test_a_family_with_names_of_its_own_needs_nothing_but_its_code(layout: str) -> None:
    ranks = pool(2).run(observe_curious, layout)
    assert_same(ranks, observe_curious(0, 1, "dp=1"), TOLERANCE)
    assert_ledger(ranks, layout)
