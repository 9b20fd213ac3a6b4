"""Rows that values of the batch pick, as many as these say: equal to one device, or refused by name.

Only masked positions go through the head, padding is taken out of the blocks, each block has tokens of its own. Every rank
of tp picks the same rows; a stage of a pipeline cannot be sent them, since it is told the shapes before.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from samestep.errors import LayoutError
from tests.laboratory import program_traced_in, prove
from tests.models import MODELS

WIDTH, NEURONS, WORDS = 8, 32, 64


class Block(nn.Module):
    """x + down(code(up(norm(x)))) on rows of any number."""

    def __init__(self, code: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, NEURONS), nn.Linear(NEURONS, WIDTH)
        self.code = code

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.code(self.up(self.norm(x)), x))


def relu(hidden: Tensor, _: Tensor) -> Tensor:
    return hidden.relu()


class Model(nn.Module):
    """Embedding, two blocks and a head; `kinds` of it pick rows."""

    def __init__(self, code: Callable[[Tensor, Tensor], Tensor] = relu) -> None:
        super().__init__()
        self.tensor_plan = {"blocks.*.up": "column", "blocks.*.down": "row", "head": "vocab"}
        self.embed, self.blocks = nn.Embedding(WORDS, WIDTH), nn.ModuleList(Block(code) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS)

    def body(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.norm(x)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.head(self.body(self.embed(input_ids)))


class MaskedHead(Model):
    """Some positions alone go through the head."""

    def forward(self, input_ids: Tensor) -> Tensor:
        x, chosen = self.body(self.embed(input_ids)), input_ids % 3 == 0
        logits = x.new_zeros(*input_ids.shape, WORDS)
        logits[chosen] = self.head(x[chosen])
        return logits


class Found(Model):
    """The same by indices that nonzero finds."""

    def forward(self, input_ids: Tensor) -> Tensor:
        places = (input_ids.flatten() % 3 == 0).nonzero().squeeze(1)
        x = self.body(self.embed(input_ids))
        logits = x.new_zeros(input_ids.numel(), WORDS)
        logits[places] = self.head(x.flatten(0, 1)[places])
        return logits.view(*input_ids.shape, -1)


class Unpadded(Model):
    """The blocks work on what is no padding."""

    def forward(self, input_ids: Tensor) -> Tensor:
        kept = input_ids % 4 != 0
        x = self.body(self.embed(input_ids[kept]))
        padded = x.new_zeros(*input_ids.shape, WIDTH)
        padded[kept] = x
        return self.head(padded)


class InBlocks(Model):
    """Each block works on the rows of some tokens."""

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for index, block in enumerate(self.blocks):
            mine = (input_ids % 3 != index)[..., None]
            x = x.masked_scatter(mine, block(x.masked_select(mine).view(-1, WIDTH)))
        return self.head(self.norm(x))


class Unseen(MaskedHead):
    """The first sample has no such position."""

    def forward(self, input_ids: Tensor) -> Tensor:
        return super().forward(input_ids.clamp(min=1) * 3 + 1)


def rows_of_a_part(hidden: Tensor, x: Tensor) -> Tensor:
    """Rows that a mask picks of what tp cuts."""
    some = torch.arange(hidden.shape[1], device=x.device) % 3 != 0
    return hidden[:, some].relu().sum(1, keepdim=True) + hidden


def picked_neurons(hidden: Tensor, x: Tensor) -> Tensor:
    """Neurons that a mask picks, of which a rank has some."""
    some = torch.arange(hidden.shape[-1], device=x.device) % 2 == 0
    return hidden[..., some].repeat(1, 1, 2)


def neurons_as_rows(hidden: Tensor, x: Tensor) -> Tensor:
    """The same of neurons that come first."""
    some = torch.arange(hidden.shape[-1], device=x.device) % 2 == 0
    return hidden.movedim(-1, 0)[some].movedim(0, -1).repeat(1, 1, 2)


def by_the_hidden(hidden: Tensor, x: Tensor) -> Tensor:
    """Rows that a mask of a rank's own neurons picks."""
    some = hidden.sum(-1) > 0
    return hidden.masked_fill(~some[..., None], 0.0) + hidden[some].sum()


LEGAL: dict[str, Callable[[], nn.Module]] = {
    "a masked head": MaskedHead,
    "rows that nonzero finds": Found,
    "no padding in blocks": Unpadded,
    "some tokens in each block": InBlocks,
    "rows of what is cut": functools.partial(Model, rows_of_a_part),
    "neurons": functools.partial(Model, picked_neurons),
    "neurons as rows": functools.partial(Model, neurons_as_rows),
}
REFUSED: dict[str, Callable[[], nn.Module]] = {
    "a mask of what is cut": functools.partial(Model, by_the_hidden),
    "no row in the trace": Unseen,
}


MODELS |= {f"picking {name}": build for name, build in (LEGAL | REFUSED).items()}
EVERY_TURN = [
    ("some tokens in each block", "dp=2 tp=2 zero=3 recompute=full"),
    ("a masked head", "pp=2 microbatch=1"),
    ("rows that nonzero finds", "pp=2 tp=2"),
]


def _row(name: str, layout: str, *marks: pytest.MarkDecorator) -> Any:
    return pytest.param(f"picking {name}", layout, marks=marks)


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        *(_row(name, "tp=2") for name in LEGAL),
        *(_row(*row, pytest.mark.every_turn) for row in EVERY_TURN),
        *(_row(name, EVERY_TURN[0][1], pytest.mark.nightly) for name in LEGAL),
    ],
)
def test_picked_rows_are_equal(model: str, layout: str) -> None:
    prove(layout, model)


@pytest.mark.parametrize(
    ("name", "layout", "text"),
    [
        ("no padding in blocks", "pp=2", "no stage can begin with blocks.1: embed works on rows that values pick"),
        ("some tokens in each block", "pp=2", "no stage can begin with blocks.1: masked_select works on rows"),
        ("a masked head", "cp=2", "shapes or branches at norm depend on values"),
        ("no padding in blocks", "tp=2 sequence_parallel", "does not map a tensor"),
        pytest.param("a mask of what is cut", "tp=2", "depend on values", marks=pytest.mark.every_turn),
        ("no row in the trace", "tp=2", "shapes at norm depend"),
    ],
)
def test_what_ranks_agree_on_before_is_refused_for_picked_rows(name: str, layout: str, text: str) -> None:
    with pytest.raises(LayoutError, match=text):
        program_traced_in(layout, f"picking {name}")
