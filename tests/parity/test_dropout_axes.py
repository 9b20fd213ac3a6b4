"""Dropout under tensor cuts and pipelines: the masks of one device, cut as the tensors are, and counted as one counts.

float64, 1e-9. Dropout in attention (written out, and the argument of the fused kernel), in what lies between two cut
layers, in what every rank holds, and before the first block.
"""

from __future__ import annotations

import functools
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from samestep.errors import LayoutError, UnprovenError
from samestep.randomness import dropout_state
from samestep.randomness import mode as dropout
from samestep.randomness.masks import MaskSlice
from tests.laboratory import TOLERANCE, Observed, assert_same, clipped, observe, reference
from tests.models import MODELS, Attentive
from tests.parts import Words
from tests.pool import pool


class ByRank(dropout.DropoutMode):
    """Draws what a rank without coordination would draw."""

    def __init__(self, fault: str, rank: int, model: nn.Module, draw: Any, part: MaskSlice | None = None) -> None:
        if fault == "samples of every rank count from 0":
            draw = dropout.Draw(draw.seed, draw.step, torch.arange(len(draw.samples)))
        if fault == "every rank of a cut has the first part":
            part = part and MaskSlice(part.model, part.degree, 0)
        if fault == "ranks of a cut differ in what they hold alike":
            draw = dropout.Draw(draw.seed + (part.index if part else 0), draw.step, draw.samples)
        super().__init__(model, draw, part)


def observe_faulty(rank: int, world: int, fault: str, model: str, layout: str) -> Observed:
    with mock.patch.object(dropout_state, "DropoutMode", functools.partial(ByRank, fault, rank)):
        return observe(rank, world, model, layout, clipped())


@pytest.mark.parametrize(
    ("fault", "layout"),
    [
        ("samples of every rank count from 0", "dp=2"),
        ("every rank of a cut has the first part", "tp=2"),
        ("ranks of a cut differ in what they hold alike", "tp=2"),
    ],
)
def test_masks_of_another_rank_are_found_out(fault: str, layout: str) -> None:
    assert_same(pool(2).run(observe_faulty, "none", "dropping_gpt2", layout), reference("dropping_gpt2"), TOLERANCE)
    with pytest.raises((AssertionError, UnprovenError)):  # by the proof, or by the sample that is run again before it
        assert_same(pool(2).run(observe_faulty, fault, "dropping_gpt2", layout), reference("dropping_gpt2"), TOLERANCE)


# -- what cannot be cut or counted -------------------------------------------------------------------------------------


def shared_dropout() -> nn.Module:
    """One nn.Dropout for all blocks: a stage must count the entries of other stages."""
    model = Attentive(blocks=4, dropout=0.3)
    for block in model.blocks:
        block.outer = model.blocks[0].outer
    return model


class Folded(Attentive):
    """Neurons cut over tp, folded with tokens into one dimension: no run of it is a rank's."""

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for block in self.blocks:
            hidden = block.up(x).flatten(1)
            x = x + block.down(block.inner(hidden).unflatten(1, (x.shape[1], -1)))
        return self.head(x)


class Fused(Words):
    """Drops q, k and v before they are split."""

    tensor_plan = {"blocks.*.qkv": "qkv", "blocks.*.out": "row"}  # noqa: RUF012

    def __init__(self) -> None:
        super().__init__(FusedBlock, FusedBlock, width=16, entries=64)


class FusedBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.num_heads = 4
        self.qkv, self.out, self.drop = nn.Linear(16, 48), nn.Linear(16, 16), nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (self.num_heads, -1)).mT for part in self.drop(self.qkv(x)).chunk(3, dim=-1))
        return x + self.out((q * k * v).mT.flatten(2))


MODELS |= {"shared_dropout": shared_dropout, "folded": functools.partial(Folded, dropout=0.2), "fused": Fused}


@pytest.mark.parametrize(
    ("model", "layout", "text"),
    [
        ("fused", "tp=2", r"blocks.0.drop draws a dropout mask of shape .1, 12, 24. .* is not known"),
        ("folded", "tp=2", r"blocks.0.inner draws a dropout mask of shape .1, 288. .* or tp=1"),
    ],
)
def test_what_cannot_be_placed_is_refused_by_name(model: str, layout: str, text: str) -> None:
    with pytest.raises(LayoutError, match=text):
        pool(2).run(observe, model, layout, clipped())


@pytest.mark.parametrize("layout", ["tp=2", "pp=2 microbatch=4"])
def test_a_module_shared_by_layers_draws_the_masks_of_each(layout: str) -> None:
    assert_same(pool(2).run(observe, "shared_dropout", layout, clipped()), reference("shared_dropout"), TOLERANCE)
