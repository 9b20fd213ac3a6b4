"""Modules whose code looks at values, and may take another branch for the next sample: equal to one device, or refused by name.

Such a module stays whole under tp, is given whole tensors, and all ranks take the branch that one device takes; the rest of the
model is cut. Both branches occur in the batches of these tests.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from samestep.errors import LayoutError
from tests.laboratory import clipped, observe, program_traced_in, prove
from tests.models import MODELS

WIDTH, NEURONS, WORDS = 8, 32, 64
Part = Callable[[], nn.Module]


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, NEURONS), nn.Linear(NEURONS, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(self.norm(x)).relu())


class Looking(nn.Module):
    """Asks `went` which way its code goes."""

    def went(self, way: Any) -> Any:
        return way


class Depths(Looking):
    """Mixture of depths: the tokens with a high score go through an MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.score, self.mlp = nn.Linear(WIDTH, 1), Mlp()

    def forward(self, x: Tensor) -> Tensor:
        score = self.score(x).squeeze(-1).sigmoid()
        out, chosen = torch.zeros_like(x), score > 0.5
        if self.went(int(chosen.sum())):
            out[chosen] = self.mlp(x[chosen]) * score[chosen][:, None]
        return out


class Exit(Looking):
    """An early exit: samples whose gate is open skip an MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.mlp = nn.Linear(WIDTH, 1), Mlp()

    def of_one(self, x: Tensor) -> Tensor:
        gate = self.gate(x.mean(0)).sigmoid()
        return x * gate if self.went(gate.item() > 0.5) else x + self.mlp(x) * gate

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([self.of_one(one) for one in x])


class Ponder(Looking):
    """A loop bounded by a value: as many turns as a sample asks for."""

    def __init__(self) -> None:
        super().__init__()
        self.halt, self.turn = nn.Linear(WIDTH, 1), Mlp()

    def of_one(self, x: Tensor) -> Tensor:
        for _ in range(self.went(int(self.halt(x.mean(0)).sigmoid() * 5))):
            x = x + self.turn(x)
        return x

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([self.of_one(one) for one in x])


class Clamp(Looking):
    """A clamp that depends on data, in a module without weights."""

    def of_one(self, x: Tensor) -> Tensor:
        norm = x.norm()
        return x * (9.0 / norm) if self.went(bool(norm > 9.0)) else x

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([self.of_one(one) for one in x])


class OfSample(Looking):
    """Conditions on a vector of each sample, in one of two ways."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.linear, self.other = nn.Linear(WIDTH, 1), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def of_one(self, x: Tensor) -> Tensor:
        return self.linear(x) if self.went(self.gate(x).item() > 0) else self.other(x).tanh()

    def forward(self, pooled: Tensor) -> Tensor:
        return torch.stack([self.of_one(one) for one in pooled])


class Block(nn.Module):
    def __init__(self, part: Part | None) -> None:
        super().__init__()
        self.mlp, self.part = Mlp(), part() if part else None

    def forward(self, x: Tensor, pooled: Tensor) -> Tensor:
        x = x + self.mlp(x)
        return x if self.part is None else x + self.part(x)


class Conditioned(Block):
    """A block whose part is given a vector of the sample."""

    def forward(self, x: Tensor, pooled: Tensor) -> Tensor:
        assert self.part is not None
        return x + self.mlp(x) + self.part(pooled)[:, None]


class InBlock(Block):
    """A block whose own code looks."""

    def forward(self, x: Tensor, pooled: Tensor) -> Tensor:
        return torch.stack([one + self.mlp(one) if one.norm().item() > 9.0 else one for one in x])


class OfCut(Block):
    """Its part is given neurons of which a rank has some, by a keyword that the branch of the trace does not read."""

    def forward(self, x: Tensor, pooled: Tensor) -> Tensor:
        assert self.part is not None
        hidden = self.mlp.up(self.mlp.norm(x)).relu()
        return x + self.part(x + self.mlp.down(hidden), hidden=hidden)


class Reading(Looking):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor, hidden: Tensor) -> Tensor:
        return x * hidden.square().mean() if self.went(self.weight.item() < -0.5) else x + self.weight


class Scaling(Block):
    """The result of its part meets neurons of which a rank has some."""

    def forward(self, x: Tensor, pooled: Tensor) -> Tensor:
        assert self.part is not None
        return x + self.mlp.down(self.mlp.up(x).relu() * (1 + self.part(x).mean(-1, keepdim=True)))


class ByTokens(nn.Module):
    """An MLP whose code between two cuts branches by the tokens of a sample, which are known in a trace."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, NEURONS), nn.Linear(NEURONS, WIDTH)

    def forward(self, x: Tensor, tokens: Tensor) -> Tensor:
        hidden = self.up(x).relu()
        rows = [
            h if t.min() < 2 else h / (1 + h.norm(dim=-1, keepdim=True)) for h, t in zip(hidden, tokens, strict=True)
        ]
        return self.down(torch.stack(rows))


class TokenBlock(Block):
    """A block that is given the tokens, and a plain MLP behind."""

    def forward(self, x: Tensor, tokens: Tensor) -> Tensor:
        assert self.part is not None
        return x + self.mlp(x + self.part(x, tokens))


class Model(nn.Module):
    def __init__(self, *parts: Part | None, block: Callable[[Part | None], nn.Module] = Block) -> None:
        super().__init__()
        self.embed, self.blocks = nn.Embedding(WORDS, WIDTH), nn.ModuleList(map(block, parts))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        pooled = x.mean(1)
        for block in self.blocks:
            x = block(x, pooled)
        return self.head(self.norm(x))


class GivenTokens(Model):
    """Blocks are given the tokens."""

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x, input_ids)
        return self.head(self.norm(x))


class InModel(Model):
    """The model's own code looks."""

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x, x) if self.norm.weight.sum().item() > -1.0 else x
        return self.head(self.norm(x))


class Scaled(Model):
    """Its own plan cuts what the result of a part meets."""

    def __init__(self) -> None:
        super().__init__(Exit, Exit, block=Scaling)
        self.tensor_plan = {"blocks.[01].mlp.up": "column", "blocks.[01].mlp.down": "row"}


class Planned(Model):
    """Its own plan cuts a module whose code looks."""

    def __init__(self) -> None:
        super().__init__(Exit, Exit)
        self.tensor_plan = {"blocks.*.up": "column", "blocks.*.down": "row"}


EQUAL: dict[str, Part] = {
    "depths": functools.partial(Model, Depths, Depths),
    "exit": functools.partial(Model, Exit, None),
    "ponder": functools.partial(Model, Ponder, Ponder),
    "clamp": functools.partial(Model, Clamp, Exit),
    "of a sample": functools.partial(Model, OfSample, OfSample, block=Conditioned),
    "of what is cut": functools.partial(Model, Reading, Reading, block=OfCut),
    "scaling": Scaled,
    "tokens": functools.partial(GivenTokens, ByTokens, ByTokens, block=TokenBlock),
    "one block looks": lambda: _mixed(),
}
REFUSED: dict[str, Part] = {
    "in each block": functools.partial(Model, None, None, block=InBlock),
    "in the model": functools.partial(InModel, None, None),
    "planned": Planned,
}


def _mixed() -> nn.Module:
    model = Model(None, None)
    model.blocks[1] = InBlock(None)
    return model


MODELS |= {f"looking {name}": build for name, build in (EQUAL | REFUSED).items()}
LAYOUTS = ("tp=2", "tp=2 sequence_parallel", "dp=2 tp=2", "tp=2 pp=2", "dp=2 tp=2 zero=1", "dp=2 tp=2 zero=3")
DAILY = {
    ("exit", "tp=2 sequence_parallel"), ("depths", "tp=2 pp=2"), ("ponder", "tp=2"),
    ("clamp", "tp=2 sequence_parallel"), ("of a sample", "tp=2"), ("of what is cut", "tp=2"), ("tokens", "tp=2"), ("scaling", "tp=2"),
    ("one block looks", "tp=2"),
}  # fmt: skip
SEQUENCES = ("depths", "exit", "ponder", "clamp")


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        *(
            pytest.param(f"looking {name}", layout, marks=() if (name, layout) in DAILY else pytest.mark.nightly)
            for name in EQUAL
            for layout in LAYOUTS
            if "sequence" not in layout or name in SEQUENCES
        ),
        pytest.param("looking of a sample", "cp=2", marks=pytest.mark.every_turn),
    ],
)
def test_ranks_take_the_branches_of_one_device(model: str, layout: str) -> None:
    prove(layout, model)


@pytest.mark.parametrize("name", ["depths", "exit", "ponder", "clamp", "of a sample"])
def test_both_branches_occur_in_the_batches(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ways = list[Any]()

    def noting(part: nn.Module, way: Any) -> Any:
        ways.append(way)
        return way

    monkeypatch.setattr(Looking, "went", noting)
    observe(0, 1, f"looking {name}", "dp=1", clipped())
    assert len({*ways}) > 1, ways


@pytest.mark.parametrize(
    ("name", "layout", "words"),
    [
        ("in each block", "tp=2", "at blocks.0 depend on values.* nothing is left to shard. Use a module of its own for the branch"),
        ("in the model", "tp=2", "at the model itself depend on values.*. Use a module of its own for the branch"),
        ("planned", "tp=2", "at blocks.0.part depend on values.*. Use a module of its own for the branch"),
        ("in each block", "cp=2", "at blocks.0 depend on values, .*Use a module of its own for the branch that is given no tokens"),
        ("in the model", "cp=2", "at the model itself depend on values"),
        ("one block looks", "tp=2 sequence_parallel", "at blocks.1 depend on values.*. Use a module of its own for the branch"),
    ],
)  # fmt: skip
def test_branches_of_which_a_rank_has_a_part_are_refused_with_the_way_out(name: str, layout: str, words: str) -> None:
    with pytest.raises(LayoutError, match=words):
        program_traced_in(layout, f"looking {name}")
