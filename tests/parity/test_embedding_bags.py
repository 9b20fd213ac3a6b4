"""`nn.EmbeddingBag`, which looks up and reduces in one operation: equal to one device."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

from tests.laboratory import entered_and_traced, prove

WIDTH, WORDS = 8, 64


class Bags(nn.Module):
    """A bag of tokens around each token, then blocks and a head; by rows [N, bag], or flat with offsets."""

    def __init__(self, mode: str, *, flat: bool = False) -> None:
        super().__init__()
        self.flat = flat
        self.bag = nn.EmbeddingBag(WORDS, WIDTH, mode=mode)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 16), nn.ReLU(), nn.Linear(16, WIDTH)) for _ in range(2)
        )
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, input_ids: Tensor) -> Tensor:
        bags = torch.stack([input_ids, input_ids.roll(1, 1), input_ids.flip(1)], -1).flatten(0, 1)
        if self.flat:
            offsets = torch.arange(0, bags.numel(), bags.shape[1], device=bags.device)
            x = self.bag(bags.flatten(), offsets)
        else:
            x = self.bag(bags)
        x = x.view(*input_ids.shape, WIDTH)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


MODES = ("sum", "mean", "max")
BAGS: dict[str, Callable[[], nn.Module]] = {
    **{f"bags by {mode}": functools.partial(Bags, mode) for mode in MODES},
    **{f"flat bags by {mode}": functools.partial(Bags, mode, flat=True) for mode in MODES},
}
LAYOUTS = ("dp=2", "dp=2 zero=3", "tp=2", "pp=2")


@pytest.fixture(scope="module", autouse=True)
def _traced() -> Iterator[None]:
    with entered_and_traced(BAGS):
        yield


DAILY = {
    ("bags by mean", "dp=2"),
    ("flat bags by max", "dp=2 zero=3"),
    ("flat bags by mean", "tp=2"),
    ("bags by max", "pp=2"),
}


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        pytest.param(name, layout, marks=() if (name, layout) in DAILY else pytest.mark.nightly)
        for name in BAGS
        for layout in LAYOUTS
    ],
)
def test_bags_are_equal(name: str, layout: str) -> None:
    prove(layout, name)
