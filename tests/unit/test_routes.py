"""Choices of experts are noted by sample, and replayed by sample: in other batches, slices and repetitions."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from samestep.randomness.dropout_state import recompute_contexts
from samestep.randomness.mode import Draw
from samestep.runtime.axes.expert import RouteMode, Routes, tokens_of_first

EXPERTS, TOKENS = 8, 6


class Router(nn.Module):
    def forward(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        values, picks = torch.topk(scores.flatten(0, 1), 2, dim=-1)
        return values, picks


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.routers = nn.ModuleList([Router(), Router()])

    def forward(self, scores: Tensor) -> list[tuple[Tensor, Tensor]]:
        return [router(scores * (1 - 2 * index)) for index, router in enumerate(self.routers)]


@pytest.fixture
def noted() -> tuple[Model, Tensor, Routes]:
    """A model, scores of samples 3, 5 and 9, and what was chosen for them."""
    model, routes = Model(), Routes()
    scores = torch.randn(3, TOKENS, EXPERTS, generator=torch.Generator().manual_seed(0))
    with RouteMode(model, Draw(0, 0, torch.tensor([3, 5, 9])), None, routes, tokens_of_first):
        model(scores)
    assert len(routes) == 2 * 3
    return model, scores, routes


def test_a_choice_is_that_of_the_sample_and_its_weights_are_ones_own(noted: tuple[Model, Tensor, Routes]) -> None:
    model, scores, routes = noted
    wanted = model(scores[[2, 0]])
    others = -scores[[2, 0]]
    with RouteMode(model, Draw(0, 0, torch.tensor([9, 3])), None, routes, tokens_of_first):
        found = model(others)
    for index, ((_, picks), (values, replayed)) in enumerate(zip(wanted, found, strict=True)):
        assert torch.equal(replayed, picks)
        assert torch.equal(values, (others * (1 - 2 * index)).flatten(0, 1).gather(1, picks))


@pytest.mark.parametrize("index", [0, 1])
def test_a_slice_of_the_sequence_has_the_choices_of_its_tokens(noted: tuple[Model, Tensor, Routes], index: int) -> None:
    model, scores, routes = noted
    mine = slice(index * TOKENS // 2, (index + 1) * TOKENS // 2)
    wanted = model(scores[[1], mine])
    with RouteMode(
        model, Draw(0, 0, torch.tensor([5])), None, routes, lambda noted, parts: noted.chunk(parts, 1)[index]
    ):
        found = model(-scores[[1], mine])
    assert all(torch.equal(ours[1], theirs[1]) for ours, theirs in zip(found, wanted, strict=True))


def test_a_repeated_forward_chooses_as_the_first(noted: tuple[Model, Tensor, Routes]) -> None:
    model, scores, routes = noted
    seen: list[Tensor] = []

    def block(scores: Tensor) -> Tensor:
        picked = model(scores)
        seen.append(picked[1][1])
        return sum(values.square().sum() for values, _ in picked)  # the squares are what is computed again

    given = (-scores).requires_grad_()
    with RouteMode(model, Draw(0, 0, torch.tensor([3, 5, 9])), None, routes, tokens_of_first):
        loss = checkpoint(block, given, use_reentrant=False, context_fn=functools.partial(recompute_contexts, model))
    loss.backward()
    assert len(seen) == 2
    assert torch.equal(*seen)
    assert torch.equal(seen[0], model(scores)[1][1])
