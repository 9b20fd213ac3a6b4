"""Knowledge of a family of models is one row of `FAMILIES`: one that the product does not know is added here, and obeyed.

The family's models call everything by names of their own, so whatever asks for a name of another family fails here.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from samestep.building.families import DEFAULT, FAMILIES, FamilyFacts, facts_of
from samestep.datasets import Batch
from samestep.errors import LayoutError
from samestep.layout import Layout
from samestep.strategies import program_of
from tests.laboratory import TOLERANCE, Observed, assert_ledger, assert_same, clipped, make_run, observe
from tests.models import MODELS, Tokens
from tests.pool import pool

FEATURES, HEADS, WORDS = 16, 4, 64
CURIOUS = FamilyFacts(
    norm_words=("scaler",),
    transposed_linears=("Turned",),
    head_width="slot",
    head_count="readers",
    hidden_argument="stream",
    tensor_plan={"b.*.look.ask": "qkv", "b.*.look.say": "row", "b.*.think.up": "column", "b.*.think.down": "row"},
)
"""A family that calls everything by names of its own."""


class Scaler(nn.Module):
    """An RMS norm whose class does not say so."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(FEATURES))
        self.dtypes: set[torch.dtype] = set()

    def forward(self, x: Tensor) -> Tensor:
        self.dtypes.add(x.dtype)
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.weight


class Turned(nn.Module):
    """A linear layer with its weight as [in, out]."""

    def __init__(self, given: int, results: int) -> None:
        super().__init__()
        self.results = results
        self.weight = nn.Parameter(0.1 * torch.randn(given, results))
        self.bias = nn.Parameter(torch.zeros(results))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x.reshape(-1, x.shape[-1]), self.weight).view(*x.shape[:-1], self.results)


class Look(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ask, self.say = Turned(FEATURES, 3 * FEATURES), Turned(FEATURES, FEATURES)
        self.readers, self.slot = HEADS, FEATURES // HEADS

    def forward(self, x: Tensor) -> Tensor:
        parts = self.ask(x).chunk(3, dim=-1)
        q, k, v = (part.unflatten(-1, (self.readers, -1)).transpose(1, 2) for part in parts)
        return self.say(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Think(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = Turned(FEATURES, 2 * FEATURES), Turned(2 * FEATURES, FEATURES)

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

    def get_input_embeddings(self) -> nn.Module:
        return self.base.words  # type: ignore[return-value]

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.base.words(input_ids)  # type: ignore[operator]
        for block in self.base.b:  # type: ignore[union-attr]
            x = block(scale=1.0, stream=x)
        return self.head(self.base.last(x))  # type: ignore[operator]


def observe_curious(rank: int, world: int, layout: str) -> Observed:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(MODELS, "curious", Curious)
        patch.setitem(FAMILIES, "curious", CURIOUS)
        return observe(rank, world, "curious", layout, clipped(), record=True)


@pytest.mark.parametrize("layout", ["tp=2 sequence_parallel", "pp=2"])
def test_one_row_of_facts_teaches_every_axis_a_family(layout: str) -> None:
    ranks = pool(2).run(observe_curious, layout)
    assert_same(ranks, observe_curious(0, 1, "dp=1"), TOLERANCE)
    assert_ledger(ranks, layout)


def test_norms_of_a_family_compute_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MODELS, "curious", Curious)
    monkeypatch.setitem(FAMILIES, "curious", CURIOUS)
    run = make_run(0, 1, "curious", "dp=1", clipped("bf16"))
    run.step(Batch(0, list(range(8)), Tokens()))  # type: ignore[arg-type]
    assert run.model.base.last.dtypes == {torch.float32}  # type: ignore[union-attr]


def test_without_the_row_the_family_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert facts_of(Curious()) is DEFAULT
    monkeypatch.setitem(MODELS, "curious without a row", Curious)
    run = make_run(0, 1, "curious without a row", "dp=1", clipped())
    run.prepare({key: value[None] for key, value in Tokens()[0].items()})
    with pytest.raises(LayoutError, match="its blocks have no pair of linear layers"):
        program_of(run.assembly.model.spec, clipped(), Layout("tp=2"))
